r"""Converts the text of markers into token ids of a tokenizer.

[Note: Tails]
A tokenizer may merge the last characters of a marker and the first characters of the content into one token. For
example, "<|im_start|>assistant\n" and a content that begins with a newline share the token "\n\n". So the ids of a
marker stop before its last characters, and `tails` has all tokens that begin with these characters. The token that
follows the ids must be in `tails`, and belongs to the marker.

A marker may also have different ids after different texts: SentencePiece encodes `USER` differently at the beginning
of a text and after `</s>`. So each marker is tokenized between all texts in `_BEFORE` and `_AFTER`, and each distinct
result is a `Marker`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_protrain.data.chat.chat_format import EOS, Exclusion, Family, RoleBoundary
from lightning_protrain.data.chat.vocabulary import Vocabulary

# Texts before and after a marker with which it is tokenized. _BEFORE_SYMBOLS are for markers that begin with a symbol.
_BEFORE = ("", "\n", "\n\n", " ", ".", ".\n", ".\n\n", ". ", ")\n", '"\n', "a\n", "a\n\n", "a ")
_BEFORE_SYMBOLS = ("a", "7", ")", "}", "`", '"', ">", "!", "?", "\u3002")
_AFTER = (
    *("", "a", "A", "The", "7", " a", "  a", "\n", "\n\n", "\na", "\n\na", "\n\n\n", "\t"),
    *(".", "(", "<", '"', "{", "[", "`", "*", "#", "-"),
)
_REQUIRED_ROLES = ("assistant", "user")


@dataclass(frozen=True)
class Marker:
    """A marker in one of its tokenizations.

    Attributes:
        text: Text of the marker.
        ids: Token ids, at least one.
        tails: Tokens that may follow `ids`, see [Note: Tails]; empty if any token may.
    """

    text: str
    ids: tuple[int, ...]
    tails: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RoleMarkers:
    """The markers of a role.

    Attributes:
        role: Name of the role.
        starts: Start markers, at least one.
        ends: End markers; may be empty.
        open_ended: True if a turn may end without an end marker, at the next start marker or the end of the row.
        include_start: True if the start marker of a trained turn is trained.
        include_end: True if the end marker of a trained turn is trained.
    """

    role: str
    starts: tuple[Marker, ...]
    ends: tuple[Marker, ...]
    open_ended: bool
    include_start: bool
    include_end: bool


@dataclass(frozen=True)
class ExclusionMarkers:
    """The markers of an `Exclusion` on one tokenizer; `end` is empty if `start` is the whole part."""

    kind: str
    start: tuple[Marker, ...]
    end: tuple[Marker, ...]


@dataclass(frozen=True)
class Markers:
    """The markers of a chat format on one tokenizer.

    Attributes:
        family: Name of the chat format.
        roles: Markers of each role; a role may be missing if the tokenizer cannot encode its markers.
        exclusions: Markers of parts of a trained turn that are not trained, if the tokenizer can encode them.
        media: Ids of media tokens, which are never trained.
    """

    family: str
    roles: tuple[RoleMarkers, ...]
    exclusions: tuple[ExclusionMarkers, ...]
    media: frozenset[int]


def resolve(family: Family, vocabulary: Vocabulary, strict: bool = False) -> Markers:
    """Return the markers of a chat format on a tokenizer.

    Markers that the tokenizer cannot encode are left out, except those of the roles assistant and user. Of several end
    markers, those with control tokens that the tokenizer lacks are left out.

    Args:
        family: The chat format.
        vocabulary: Vocabulary of the tokenizer.
        strict: True leaves out no markers.

    Raises:
        ValueError: If the tokenizer cannot encode a marker that is not left out; or if the chat format ends turns
            with the end-of-sequence token and the tokenizer has none.
    """
    resolver = _Resolver(family, vocabulary)
    roles, exclusions = [], []
    for boundary in family.boundaries:
        optional = not strict and boundary.role not in _REQUIRED_ROLES
        if not optional or resolver.can_spell(boundary.start):
            roles.append(resolver.role_markers(boundary, strict))
    for exclusion in family.exclusions:
        if strict or resolver.can_spell((exclusion.start, exclusion.end or exclusion.start)):
            exclusions.append(resolver.exclusion_markers(exclusion))
    return Markers(
        family=family.name,
        roles=tuple(roles),
        exclusions=tuple(exclusions),
        media=frozenset(vocabulary.added[text] for text in family.media if text in vocabulary.added),
    )


class _Resolver:
    """Tokenizes the markers of one chat format, and caches the results."""

    def __init__(self, family: Family, vocabulary: Vocabulary) -> None:
        self.family = family
        self.vocabulary = vocabulary
        ends = [self._end_text(end) for boundary in family.boundaries for end in boundary.end if end is not None]
        borders = dict.fromkeys(text for text in (*ends, vocabulary.bos, vocabulary.eos) if text)
        self.borders = tuple(border + space for border in borders for space in ("", "\n", " ", "\n\n"))
        self.known: dict[str, tuple[Marker, ...]] = {}

    def can_spell(self, texts: Iterable[str]) -> bool:
        """Return True if the tokenizer can encode all markers in `texts`."""
        try:
            return all(map(self.markers, texts))
        except ValueError:
            return False

    def role_markers(self, boundary: RoleBoundary, strict: bool) -> RoleMarkers:
        ends = [self._end_text(end) for end in boundary.end if end is not None]
        missing = any(end is None for end in ends)
        texts = [end for end in ends if end is not None]
        if missing and (strict or not (texts or None in boundary.end)):
            raise ValueError(
                f"{self.family.name}: the turns of {boundary.role!r} end with the end-of-sequence token, but the "
                f"tokenizer {self.vocabulary.name!r} has none. Set its `eos_token`, or give the text of the end marker."
            )
        return RoleMarkers(
            role=boundary.role,
            starts=self._all([s for s in boundary.start if strict or self.can_spell((s,))] or boundary.start),
            ends=self._all(texts if strict else [text for text in texts if self.vocabulary.has(text)] or texts),
            open_ended=None in boundary.end,
            include_start=boundary.include_start,
            include_end=boundary.include_end,
        )

    def exclusion_markers(self, exclusion: Exclusion) -> ExclusionMarkers:
        end = self.markers(exclusion.end) if exclusion.end else ()
        return ExclusionMarkers(exclusion.kind, self.markers(exclusion.start), end)

    def markers(self, text: str) -> tuple[Marker, ...]:
        if text not in self.known:
            self.known[text] = self._resolve(text)
        return self.known[text]

    def _end_text(self, end: str | None) -> str | None:
        return self.vocabulary.eos if end == EOS else end

    def _all(self, texts: Sequence[str]) -> tuple[Marker, ...]:
        return tuple(dict.fromkeys(marker for text in dict.fromkeys(texts) for marker in self.markers(text)))

    def _resolve(self, text: str) -> tuple[Marker, ...]:
        core = text.rstrip(" ") or text
        spaces = self._spaces(text[len(core) :].encode()) if core != text else frozenset[int]()
        if core in self.vocabulary.added:
            ids = (self.vocabulary.added[core],)
            cuts: list[tuple[tuple[int, ...], bytes]] = [(ids, b"")]
            markers: tuple[Marker, ...] = (Marker(text, ids),)
        else:
            cuts = self._found(core)
            markers = self._with_tails(text, core, cuts)
        # A space at the end of the marker belongs to the marker if it is a token of its own, and to the content if the
        # tokenizer merges it with the following word.
        return (*markers, *(Marker(text, ids, spaces) for ids, rest in cuts if spaces and not rest))

    def _spaces(self, begin: bytes) -> frozenset[int]:
        """Return the tokens that consist of whitespace and begin with `begin`."""
        tokens = sorted(self.vocabulary.beginning_with(begin))
        return frozenset(
            token for token, spelled in zip(tokens, self.vocabulary.spell(tokens), strict=True) if spelled.isspace()
        )

    def _found(self, core: str) -> list[tuple[tuple[int, ...], bytes]]:
        """Return the distinct tokenizations of a marker between other texts.

        Returns:
            Pairs of the marker's token ids, and the last bytes of the marker that the next token includes.
        """
        symbols = () if core[0].isalnum() else _BEFORE_SYMBOLS
        befores = (*_BEFORE, *symbols, *self.borders)
        parts = self._around_control(core, befores)
        if parts is None:
            cuts = self._cuts([(before, core, after) for before in befores for after in _AFTER])
            parts = dict.fromkeys(part for _, part in cuts if part is not None)
        if not parts:
            raise ValueError(self._lost(core))
        return list(parts)

    def _around_control(self, core: str, befores: Sequence[str]) -> dict[tuple[tuple[int, ...], bytes], None] | None:
        """Return what `_found` returns, without combining each text before the marker with each text after it.

        A control token in the marker separates them: tokens after it do not depend on the text before it.

        Returns:
            None if the marker has no control token, or a text beside the marker changes the token.
        """
        added = self.vocabulary.added
        control = max((token for token in added if token in core and not token.isspace()), key=len, default="")
        if not control:
            return None
        last, index = core.rfind(control), added[control]
        heads = self._cuts([(before, core[:last] + control, "") for before in befores])
        ends = self._cuts([("", core[last:], after) for after in _AFTER])
        if any(ids[-1:] != [index] for ids, _ in heads) or any(ids[:1] != [index] for ids, _ in ends):
            return None
        return {(head[0][:-1] + end[0], end[1]): None for _, head in heads if head for _, end in ends if end}

    def _cuts(
        self, contexts: Sequence[tuple[str, str, str]]
    ) -> list[tuple[list[int], tuple[tuple[int, ...], bytes] | None]]:
        """Return the ids of each text before, in and after a marker, and the part of the marker if it can be cut."""
        cuts = []
        for context, ids in zip(contexts, self.vocabulary.encode(["".join(parts) for parts in contexts]), strict=True):
            before, core, after = (text.encode() for text in context)
            known = self.vocabulary.unknown not in ids
            cuts.append((ids, _cut(self.vocabulary.spell(ids), ids, before, core, after) if known else None))
        return cuts

    def _with_tails(self, text: str, core: str, cuts: Sequence[tuple[tuple[int, ...], bytes]]) -> tuple[Marker, ...]:
        """Return markers with tails for all last characters that may share a token with the following text.

        `core` is the text without spaces at its end, and `cuts` are its tokenizations, from `_found`.
        """
        fixed: dict[tuple[tuple[int, ...], bytes], None] = {}
        for ids, rest in cuts:
            spelled = self.vocabulary.spell(ids)
            length = len(ids)
            if rest and length:
                fixed[ids, rest] = None
            while length > 1 and self._may_merge(core, ids[length - 1], spelled[length - 1], rest):
                length -= 1
                rest = spelled[length] + rest
                fixed[ids[:length], rest] = None
            if length == len(ids) and not rest:
                fixed[ids, b""] = None
        tails = {rest: self.vocabulary.beginning_with(rest) if rest else frozenset[int]() for _, rest in fixed}
        return tuple(Marker(text, ids, tails[rest]) for ids, rest in fixed if tails[rest] or not rest)

    def _may_merge(self, core: str, index: int, spelled: bytes, rest: bytes) -> bool:
        """Return True if the last token of a marker, with text `spelled`, may merge with the following text."""
        if index in self.vocabulary.added.values() and not spelled.isspace():
            return False
        if core[-1].isspace():
            return spelled[-1:].isspace()
        return not rest and not core[-1].isalnum()

    def _lost(self, text: str) -> str:
        ids = self.vocabulary.encode([text])[0]
        what = f"{self.family.name}: the marker {text!r} "
        if not ids:
            what += "encodes to nothing"
        elif self.vocabulary.unknown in ids:
            what += f"encodes to the unknown token ({ids})"
        else:
            spelled = b"".join(self.vocabulary.spell(ids)).decode(errors="replace")
            what += f"encodes to {ids}, which comes back as {spelled!r}"
        return (
            f"{what} on the tokenizer {self.vocabulary.name!r}, so its turns cannot be found. Use the tokenizer that "
            "belongs to the chat format, or name another `family`."
        )


def _cut(
    spelled: Sequence[bytes], ids: Sequence[int], before: bytes, core: bytes, after: bytes
) -> tuple[tuple[int, ...], bytes] | None:
    """Return the token ids of `core` in `before + core + after`, and the bytes at its end that the next token includes.

    The token ids `ids` of the whole text have the bytes `spelled`.

    Returns:
        None if the tokens do not spell the text, or a token spans `before` and `core`; a token may span spaces only.
    """
    text = before + core + after
    first, last = len(before), len(before) + len(core)
    spans = _align(text, spelled)
    if spans is None:
        return None
    inside: list[int] = []
    # Spaces that the tokenizer inserted belong to the marker only if more of its tokens follow.
    inserted: list[int] = []
    for (start, stop), index in zip(spans, ids, strict=True):
        if stop <= first or (start == stop and start in (first, last)):
            continue
        if start >= last:
            break
        if start == stop:
            inserted.append(index)
            continue
        if start < first and text[start:first].strip():
            return None
        inside += inserted
        inserted = []
        if stop > last:
            return (tuple(inside), text[max(start, first) : last]) if inside else None
        inside.append(index)
    return (tuple(inside), b"") if inside else None


def _align(text: bytes, spelled: Sequence[bytes]) -> list[tuple[int, int]] | None:
    """Return the begin and end of each token in the text; None if the tokens do not spell the text.

    A tokenizer may insert a space before a token, and an added token may absorb spaces beside it.
    """
    if b"".join(spelled) == text:
        stops = list(accumulate(map(len, spelled)))
        return list(zip([0, *stops], stops, strict=False))
    spans: list[tuple[int, int]] = []
    position = 0
    for piece in spelled:
        start, known = position, piece
        if not text.startswith(known, start):
            known = piece.removeprefix(b" ")
        if not text.startswith(known, start):
            start, known = len(text) - len(text[position:].lstrip()), piece
        if not text.startswith(known, start):
            return None
        position = start + len(known)
        spans.append((start, position))
    return None if text[position:].strip() else spans
