"""The masking's rules token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_protrain.data.chat.markers import Markers
from lightning_protrain.data.chat.mask import MaskOptions
from tests.data.reference_scan import Turn, borders, match, reference_scan


def excluded(ids: Sequence[int], turn: Turn, border: int, markers: Markers, options: MaskOptions) -> Iterator[int]:
    """Positions in the content of a turn that its exclusions cover."""
    for part in markers.exclusions:
        if part.kind == "thinking" and options.train_thinking:
            continue
        at = turn.content if part.kind == "scaffold" else turn.start
        while at < turn.end:
            opened = match(part.start, ids, at, border)
            stop = opened[0] if opened and opened[0] <= turn.end else None
            if stop is not None and part.end:
                closed = [match(part.end, ids, place, border) for place in range(stop, turn.end)]
                first = next((found[0] for found in closed if found), None)
                last = match(part.end, ids, turn.end, border) if part.kind == "thinking" and first is None else None
                if first is None and last and last[0] <= turn.stop:
                    first = last[0]
                elif first is None or first > turn.end:
                    first = turn.end
                stop = first
            if stop is not None:
                yield from range(max(at, turn.content), stop)
            if part.kind == "scaffold":
                break
            at = at + 1 if stop is None else max(stop, at + 1)


def means_more(ids: tuple[int, ...], markers: Markers, options: MaskOptions) -> bool:
    """Return whether a terminator begins turns, or ends those of a role that does not include its end."""
    starts = [start.ids for role in markers.roles for start in role.starts]
    begins = any(start[: len(ids)] == ids for start in starts)
    closes = any(ids == end.ids for role in markers.roles if not role.include_end for end in role.ends)
    ends = any(ids == end.ids for role in markers.roles if role.role in options.roles for end in role.ends)
    return ids in starts or closes or (begins and not ends)


def reference_mask(
    rows: Sequence[Sequence[int]], markers: Markers, options: MaskOptions, weights: Sequence[float] | None = None
) -> list[bool]:
    """Return whether each token of concatenated rows is trained."""
    ids = [token for row in rows for token in row]
    turns = reference_scan(rows, markers)
    candidates = [turn for turn in turns if markers.roles[turn.role].role in options.roles]
    dropped = [turn for turn, weight in zip(candidates, weights or [1] * len(candidates), strict=True) if weight == 0]
    trainable = [turn for turn in candidates if turn not in dropped]
    trained = [options.train_on_inputs] * len(ids)
    never: set[int] = set()
    for first, border in borders(rows):
        last = [turn for turn in trainable if first <= turn.start < border][-1:]
        for turn in [turn for turn in turns if first <= turn.start < border and not options.train_on_inputs]:
            role = markers.roles[turn.role]
            chosen = turn in (last if options.train_on == "last_turn" else trainable)
            if chosen:
                never.update(excluded(ids, turn, border, markers, options))
                for at in range(turn.start if role.include_start else turn.content, turn.end):
                    trained[at] = True
            terminator = match(role.ends, ids, turn.end, border) if turn.stop > turn.end else None
            wanted = {
                "turn": chosen,
                "last": chosen and turn in last and turn.complete,
                "none": False,
                "all": chosen or (turn not in dropped and terminator is not None and bool(options.roles)),
            }[options.train_on_eos]
            if wanted and not chosen and terminator and means_more(role.ends[terminator[1]].ids, markers, options):
                wanted = False
            for at in range(turn.end, turn.stop if role.include_end and wanted else turn.end):
                trained[at] = True
    inside = {at for first, border in borders(rows) for at in range(first + 1, border)}
    if options.train_on_inputs:
        never = {at for turn in dropped for at in range(turn.content, turn.stop)}
    return [trained[at] and at in inside and at not in never and ids[at] not in markers.media for at in range(len(ids))]
