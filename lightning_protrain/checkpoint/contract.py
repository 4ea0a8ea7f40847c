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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ContractDifference:
    """One difference between two contracts.

    Attributes:
        term: Key of `TERMS`.
        place: Path within the term, such as `0.lr`; empty if the term is a single value.
        saved: Value in the checkpoint, as text.
        current: Value of the present run, as text.
    """

    term: str
    place: str
    saved: str
    current: str

    def __str__(self) -> str:
        name = f"{self.term} {self.place}" if self.place else self.term
        return f"{name}: saved {self.saved}, now {self.current}"


def check_signature(names: Collection[str], argument: str) -> frozenset[str]:
    """Return `names` as a set; raise ValueError if a name is not in `TERMS`.

    Args:
        names: Names to check.
        argument: Name of the user's keyword, for the message.
    """
    unknown = sorted(set([names] if isinstance(names, str) else names) - set(TERMS))
    if isinstance(names, str) or unknown:
        raise ValueError(f"{argument}={names!r}: give a list of {', '.join(TERMS)}.")
    return frozenset(names)


def compare(
    saved: Mapping[str, Any], current: Mapping[str, Any], allowed: Collection[str] = ()
) -> tuple[list[ContractDifference], list[ContractDifference]]:
    """Return the differences between two contracts.

    Args:
        saved: Saved value of each term: numbers, texts, None, and lists and dicts of them.
        current: Values of the present run, in the same form.
        allowed: Terms that may differ.

    Returns:
        The refused differences, and the allowed ones.
    """
    refused: list[ContractDifference] = []
    passed: list[ContractDifference] = []
    for term in TERMS:
        if saved.get(term) is not None and current.get(term) is not None:
            found = [ContractDifference(term, *each) for each in _differences("", saved[term], current[term])]
            (passed if term in allowed else refused).extend(found)
    return refused, passed


def describe(drifts: Collection[ContractDifference]) -> str:
    """Format the first differences of each term, one per line."""
    lines = []
    for term in TERMS:
        of_term = [str(each) for each in drifts if each.term == term]
        lines += of_term[:_MOST_LINES]
        if len(of_term) > _MOST_LINES:
            lines.append(f"{term}: and {len(of_term) - _MOST_LINES} more")
    return "\n".join(f"  {line}" for line in lines)


def refusal(drifts: Collection[ContractDifference], source: str) -> str:
    """Return the error message for differences that are not allowed.

    Args:
        drifts: Differences, not empty.
        source: Name of the checkpoint.
    """
    terms = [term for term in TERMS if any(each.term == term for each in drifts)]
    if "model" in terms:
        had_adapters = any(re.search(r"\.lora_\S+: saved .*, now nothing$", str(each)) for each in drifts)
        merge = " To go on with all weights, train what `lightning-protrain merge` writes." if had_adapters else ""
        return (
            f"{source} is a checkpoint of another model: names or shapes of weights differ.\n{describe(drifts)}\n"
            f"Resume with the model that was saved, or from another checkpoint.{merge}"
        )
    return (
        f"{source} was saved with settings that differ from those of this run:\n{describe(drifts)}\n"
        f"Restore the saved settings. If the difference is intended, {allowing(terms)}. To resume only weights and "
        "counters, set ProTrainCheckpoint(weights_and_counters_only=True)."
    )


def allowing(terms: Sequence[str]) -> str:
    """Return what to write in Python or YAML so that `terms` may differ."""
    return (
        f"set ProTrainCheckpoint(allow_drift={list(terms)}), in YAML `allow_drift: [{', '.join(terms)}]` in its "
        "init_args"
    )


def _differences(place: str, saved: Any, current: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        for key in [*saved, *(key for key in current if key not in saved)]:
            inner = f"{place}.{key}" if place else str(key)
            yield from _differences(inner, saved.get(key, _ABSENT), current.get(key, _ABSENT))
    elif isinstance(saved, list | tuple) and isinstance(current, list | tuple) and len(saved) == len(current):
        for index, (one, other) in enumerate(zip(saved, current, strict=True)):
            yield from _differences(f"{place}[{index}]", one, other)
    elif saved != current:
        yield place, _text(saved), _text(current)


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "nothing"
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}... ({len(text)} letters)"
