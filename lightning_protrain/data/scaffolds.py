"""Thoughts in any chat format: empty ones that templates write, and such as stand in tags of plain text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from lightning_protrain.data.boundaries import Exclusion, Family
from lightning_protrain.data.derivation import empty_thoughts
from lightning_protrain.data.features import THOUGHT_TAGS
from lightning_protrain.data.markers import ExclusionMarkers, Markers, resolve_exclusions
from lightning_protrain.data.probes import THINKING, Render, as_parts
from lightning_protrain.data.proof import prove
from lightning_protrain.data.vocabulary import Vocabulary

EMPTY_THOUGHTS = (
    *("<think>\n\n</think>\n\n", "<think>\n\n</think>\n", "<think>\n</think>\n", "<think></think>"),
    *("<|channel>thought\n<channel|>", "[THINK][/THINK]"),
)


_TAG = r"(<[^<>\s]+>|\[[^\[\]\s]+\])"
_TAG_BEFORE, _TAG_BEHIND = re.compile(_TAG + r"\s*$"), re.compile(r"\s*" + _TAG)


def with_scaffolds(markers: Markers, vocabulary: Vocabulary, render: Render) -> Markers:
    """Markers of a user, with the empty thoughts that the template puts before answers as scaffolds.

    Args:
        markers: Without exclusions.
        vocabulary: Spells the tokens.
        render: Renders messages.
    """
    texts = dict.fromkeys((*EMPTY_THOUGHTS, *empty_thoughts(render, vocabulary)))
    return _with(markers, vocabulary, (Exclusion("scaffold", text) for text in texts))


def with_tags(markers: Markers, vocabulary: Vocabulary, render: Render) -> Markers:
    """Markers that know thoughts in tags of plain text too, and, if it needs that, in what the template writes.

    Args:
        markers: Of a chat format.
        vocabulary: Spells the tokens.
        render: Renders messages.
    """
    tagged = _with(markers, vocabulary, (Exclusion("thinking", f"<{tag}>", f"</{tag}>") for tag in THOUGHT_TAGS))
    if prove(render, vocabulary, tagged, quiet=True):
        for tag in _written(vocabulary, render):
            more = _with(tagged, vocabulary, (Exclusion("thinking", *tag),))
            if not prove(render, vocabulary, more, quiet=True):
                return more
    return tagged


def _written(vocabulary: Vocabulary, render: Render) -> Iterator[tuple[str, str]]:
    """What stands right before and right behind a thought, if both look like tags."""
    thought = str(THINKING.messages[-1]["reasoning_content"])
    for probe in (THINKING, as_parts(THINKING)):
        try:
            text = vocabulary.text(render(probe.messages))
        except ValueError:
            continue
        before, found, behind = text.rpartition(thought)
        opening, closing = _TAG_BEFORE.search(before), _TAG_BEHIND.match(behind)
        if found and opening and closing:
            yield opening[1], closing[1]
            return


def _with(markers: Markers, vocabulary: Vocabulary, exclusions: Iterable[Exclusion]) -> Markers:
    known = set(markers.exclusions)
    family = Family(markers.family, (), tuple(exclusions))
    added: list[ExclusionMarkers] = [one for one in resolve_exclusions(family, vocabulary) if one not in known]
    return replace(markers, exclusions=(*markers.exclusions, *added))
