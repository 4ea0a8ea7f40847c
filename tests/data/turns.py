"""Conversations composed of token ids, so that the correct loss mask is known by construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from lightning_protrain.data.chat.markers import ExclusionMarkers, Marker, Markers, RoleMarkers
from lightning_protrain.data.chat.mask import MaskOptions

BOS, FILLER = 99, 200
NEWLINE, NEWLINES, NEWLINE_SPACE = 10, 11, 12
TAILS = frozenset({NEWLINE, NEWLINES, NEWLINE_SPACE})
Ids = tuple[int, ...]


def mark(*ids: int, tails: frozenset[int] = frozenset()) -> Marker:
    return Marker("".join(f"<{token}>" for token in ids), ids, tails)


def role(name: str, starts: Sequence[Marker], ends: Sequence[Marker] = (), *, include_end: bool = True) -> RoleMarkers:
    return RoleMarkers(name, tuple(starts), tuple(ends), not ends, include_start=False, include_end=include_end)


@dataclass(frozen=True)
class Form:
    """The tokens with which a style writes the turns of a role.

    Attributes:
        starts: Start markers, of which one is drawn; if `tailed`, one of `TAILS` follows.
        ends: End markers, of which one is drawn; empty if the next start marker ends the turn.
        after: Tokens after the end marker that belong to no turn.
        parts: By kind of part, the tokens before and after its content.
        first: Text that a template may add at the beginning of the content.
        whole: Kinds of parts that extend to the end of the content, with the tokens that begin them.
    """

    starts: tuple[Ids, ...]
    ends: tuple[Ids, ...] = ((),)
    after: Ids = ()
    tailed: bool = False
    parts: dict[str, tuple[Ids, Ids]] = field(default_factory=dict)
    first: tuple[Ids, ...] = ()
    whole: tuple[tuple[str, Ids], ...] = ()


@dataclass(frozen=True)
class Style:
    """A family: its markers and how its turns are written.

    Attributes:
        into_next: Number of tokens of the next start marker that end the turn, by role.
        tempting: Ids that are parts of markers, but not whole ones.
        may_follow: Roles that may follow, by role; all roles may follow a role that is missing here.
        start_after: Start marker of the turn that follows, by role.
        begin: Tokens before the first turn.
    """

    markers: Markers
    forms: dict[str, Form]
    into_next: dict[str, int] = field(default_factory=dict)
    tempting: tuple[Ids, ...] = ()
    may_follow: dict[str, tuple[str, ...]] = field(default_factory=dict)
    start_after: dict[str, Ids] = field(default_factory=dict)
    begin: Ids = (BOS,)


@dataclass(frozen=True)
class Written:
    """One turn as ids: `content` has the kind of each part, "" for plain content."""

    role: str
    start: Ids
    content: tuple[tuple[str, Ids], ...]
    end: Ids
    after: Ids

    @property
    def ids(self) -> Ids:
        return (*self.start, *(token for _, part in self.content for token in part), *self.end, *self.after)


@dataclass(frozen=True)
class Conversation:
    style: Style
    turns: tuple[Written, ...]

    @property
    def ids(self) -> list[int]:
        return [*self.style.begin, *(token for turn in self.turns for token in turn.ids)]

    def offsets(self) -> list[int]:
        """Return the position at which each turn begins."""
        offsets = [len(self.style.begin)]
        for turn in self.turns:
            offsets.append(offsets[-1] + len(turn.ids))
        return offsets[:-1]

    def spans(self) -> list[tuple[int, int, int, int, str]]:
        """Return (start, content, end, stop, role) of each turn."""
        spans = []
        for index, (first, turn) in enumerate(zip(self.offsets(), self.turns, strict=True)):
            content = first + len(turn.start)
            end = content + sum(len(part) for _, part in turn.content)
            shared = self.style.into_next.get(turn.role, 0) if index + 1 < len(self.turns) else 0
            spans.append((first, content, end, end + (len(turn.end) or shared), turn.role))
        return spans

    def expected(self, options: MaskOptions) -> list[bool]:
        """Return whether each token is trained."""
        trained = [False] * len(self.ids)
        spans = self.spans()
        trainable = [index for index, span in enumerate(spans) if span[4] in options.roles]
        for index in trainable:
            if options.train_on == "last_turn" and index != trainable[-1]:
                continue
            _, at, end, stop, _ = spans[index]
            for kind, part in self.turns[index].content:
                keep = kind == "" or (kind == "thinking" and options.train_thinking)
                trained[at : at + len(part)] = [keep] * len(part)
                at += len(part)
            wanted = {"turn": True, "all": True, "last": index == trainable[-1], "none": False}[options.train_on_eos]
            if wanted and self.include_end(index) and not (self.ends_a_thought(index) and not options.train_thinking):
                trained[end:stop] = [True] * (stop - end)
        return trained

    def ends_a_thought(self, index: int) -> bool:
        """Return whether a turn is a thought, which its end marker ends."""
        turn = self.turns[index]
        ends = {end.ids for part in self.style.markers.exclusions if part.kind == "thinking" for end in part.end}
        return turn.end in ends and any(kind == "thinking" for kind, _ in turn.content)

    def include_end(self, index: int) -> bool:
        return next(entry.include_end for entry in self.style.markers.roles if entry.role == self.turns[index].role)

    def splits_a_marker(self, cut: int) -> bool:
        """Return whether a cut at this length goes through a marker."""
        inside = set(range(1, len(self.style.begin)))
        for (start, at, end, stop, _), turn in zip(self.spans(), self.turns, strict=True):
            inside |= set(range(start + 1, at)) | set(range(end + 1, stop))
            form = self.style.forms[turn.role]
            for kind, part in turn.content:
                opening = form.parts[kind][0] if kind in form.parts else dict(form.whole).get(kind, part)
                inside |= set(range(at + 1, at + len(opening))) if kind else set()
                at += len(part)
        return cut in inside


def turns(style: Style, name: str) -> st.SearchStrategy[Written]:
    """A turn of a role, with content that looks like markers and is none."""
    form = style.forms[name]
    filler = st.integers(FILLER, FILLER + 9).map(lambda token: (token,))
    # Behind a part of a marker comes something that cannot complete it.
    tempting = [st.sampled_from(style.tempting).map(lambda ids: (*ids, FILLER))] if style.tempting else []
    plain = st.lists(st.one_of(filler, *tempting), max_size=5).map(
        lambda parts: tuple(t for part in parts for t in part)
    )
    parts = [plain.map(lambda ids: ("", ids))]
    for kind, (opening, closing) in form.parts.items():
        parts.append(plain.map(lambda ids, k=kind, o=opening, c=closing: (k, (*o, *ids, *c))))  # type: ignore[misc]
    content = st.lists(st.one_of(parts), max_size=3).map(tuple)
    if form.first:
        opened = st.sampled_from([("scaffold", ids) for ids in form.first])
        content = st.one_of(content, st.tuples(opened, parts[0]))
    for kind, opening in form.whole:
        content = st.one_of(content, plain.map(lambda ids, k=kind, o=opening: ((k, (*o, *ids)),)))  # type: ignore[misc]
    tail = st.sampled_from([(token,) for token in sorted(TAILS)]) if form.tailed else st.just(())
    start = st.tuples(st.sampled_from(form.starts), tail).map(lambda both: both[0] + both[1])
    return st.builds(Written, st.just(name), start, content, st.sampled_from(form.ends), st.just(form.after))


@st.composite
def conversations(draw: st.DrawFn, style: Style, max_turns: int = 5) -> Conversation:
    names: list[str] = []
    for _ in range(draw(st.integers(0, max_turns))):
        allowed = style.may_follow.get(names[-1] if names else "", tuple(style.forms))
        if not allowed:
            break
        names.append(draw(st.sampled_from(allowed)))
    written = [draw(turns(style, name)) for name in names]
    for index, previous in enumerate(names[:-1]):
        if previous in style.start_after:
            written[index + 1] = replace(written[index + 1], start=style.start_after[previous])
    return Conversation(style, tuple(written))


def family(
    name: str, roles: Sequence[RoleMarkers], *exclusions: ExclusionMarkers, media: Sequence[int] = ()
) -> Markers:
    return Markers(name, tuple(roles), exclusions, frozenset(media))
