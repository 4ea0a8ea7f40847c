"""Comparison of the settings of a resumed run with those in its checkpoint.

[Note: Contract]
Optimizer states, learning rate schedules and data positions are valid for one model, one optimizer and one order of the
data. A run that resumes with other settings does not fail, but trains differently. So every checkpoint stores the
*terms*: settings that a resumed run must share. Resuming reports each term that has changed. A term that is missing in
the checkpoint or in the present run is not compared.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

# Key of the contract in a checkpoint's content.
CONTRACT = "contract"
# Meaning of each term.
TERMS = {
    "model": "names and shapes of the weights",
    "dtype": "dtypes of the weights",
    "optimizer": "class of each optimizer, and its parameters in their order",
    "precision": "precision of the Trainer",
    "accumulation": "batches of an optimizer step",
    "batch_size": "samples of a batch on each rank",
    "data": "fingerprint of the training data",
    "lr_schedule": "learning rate schedules, with their total number of steps",
}
# Limits of a message: differences of each term, and characters of each value.
_MOST_LINES = 6
_MOST_LETTERS = 80
_ABSENT = object()


def check_drift(names: Collection[str]) -> frozenset[str]:
    """Return the names of `allow_drift` as a set; raise ValueError if a name is not in `TERMS`."""
    unknown = sorted(set([names] if isinstance(names, str) else names) - set(TERMS))
    if isinstance(names, str) or unknown:
        raise ValueError(f"allow_drift={names!r}: give a list of {', '.join(TERMS)}.")
    return frozenset(names)


def compare(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the differences between two contracts by term, such as `["batch_size [0]: saved 2, now 4"]`.

    Args:
        saved: Saved value of each term: numbers, texts, None, and lists and dicts of them.
        current: Values of the present run, in the same form.
    """
    known = (term for term in TERMS if saved.get(term) is not None and current.get(term) is not None)
    differences = {term: list(_differences(term, "", saved[term], current[term])) for term in known}
    return {term: lines for term, lines in differences.items() if lines}


def describe(differences: Mapping[str, Sequence[str]]) -> str:
    """Format the first differences of each term, one per line."""
    lines: list[str] = []
    for term, of_term in differences.items():
        lines += of_term[:_MOST_LINES]
        if len(of_term) > _MOST_LINES:
            lines.append(f"{term}: and {len(of_term) - _MOST_LINES} more")
    return "\n".join(f"  {line}" for line in lines)


def refusal(differences: Mapping[str, Sequence[str]], source: str) -> str:
    """Return the error message for differences that are not allowed.

    Args:
        differences: Result of `compare`, not empty.
        source: Name of the checkpoint.
    """
    if "model" in differences:
        had_adapters = any(re.search(r"\.lora_\S+: saved .*, now nothing$", line) for line in differences["model"])
        merge = " To go on with all weights, train what `lightning-protrain merge` writes." if had_adapters else ""
        return (
            f"{source} is a checkpoint of another model: names or shapes of weights differ.\n{describe(differences)}\n"
            f"Resume with the model that was saved, or from another checkpoint.{merge}"
        )
    return (
        f"{source} was saved with settings that differ from those of this run:\n{describe(differences)}\n"
        f"Restore the saved settings. If the difference is intended, {allowing(list(differences))}. To resume only "
        "weights and counters, set ProTrainCheckpoint(weights_and_counters_only=True)."
    )


def allowing(terms: Sequence[str]) -> str:
    """Return what to write in Python or YAML so that `terms` may differ."""
    return (
        f"set ProTrainCheckpoint(allow_drift={list(terms)}), in YAML `allow_drift: [{', '.join(terms)}]` in its "
        "init_args"
    )


def _differences(term: str, place: str, saved: Any, current: Any) -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        for key in [*saved, *(key for key in current if key not in saved)]:
            inner = f"{place}.{key}" if place else str(key)
            yield from _differences(term, inner, saved.get(key, _ABSENT), current.get(key, _ABSENT))
    elif isinstance(saved, list | tuple) and isinstance(current, list | tuple) and len(saved) == len(current):
        for index, (was, now) in enumerate(zip(saved, current, strict=True)):
            yield from _differences(term, f"{place}[{index}]", was, now)
    elif saved != current:
        yield f"{term}{' ' if place else ''}{place}: saved {_text(saved)}, now {_text(current)}"


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}... ({len(text)} letters)"
