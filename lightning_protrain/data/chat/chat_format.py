"""Describes chat formats by the text at which turns begin and end.

A turn is the part of a rendered conversation that one role says. Each turn begins with a start marker and ends with an
end marker, such as "<|im_start|>user" and "<|im_end|>"; its content is between the markers. `markers.resolve` converts
markers into token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

EOS = "eos_token"
"""Stands for the tokenizer's end-of-sequence token in a list of end markers."""

ExclusionKind = Literal["tool_output", "thinking", "scaffold"]

_KEYS = ("role", "start", "end", "include_start", "include_end")


@dataclass(frozen=True)
class RoleBoundary:
    """The markers at which the turns of one role begin and end.

    Attributes:
        role: Name of the role, such as "system", "user", "assistant", "tool" or "developer".
        start: Variants of the start marker; the longest match wins.
        end: Variants of the end marker. `EOS` means the tokenizer's end-of-sequence token. None means that the turn
            ends at the next start marker of any role, or at the end of the conversation.
        include_start: True trains the start marker together with a trained turn.
        include_end: True trains the end marker together with a trained turn.

    Raises:
        ValueError: If role or start markers are missing, or a marker is empty or repeated.
    """

    role: str
    start: tuple[str, ...]
    end: tuple[str | None, ...] = (None,)
    include_start: bool = False
    include_end: bool = True

    def __post_init__(self) -> None:
        if not self.role.strip():
            raise ValueError("A role boundary has an empty role. Name the role, such as 'assistant'.")
        for name, markers in (("start", self.start), ("end", self.end)):
            if not markers:
                raise ValueError(f"The role {self.role!r} has no {name} marker. Give at least one.")
            if any(marker is not None and not marker.strip(" ") for marker in markers):
                raise ValueError(f"The role {self.role!r} has an empty {name} marker: {markers!r}. Give its text.")
            if len(set(markers)) < len(markers):
                raise ValueError(f"The role {self.role!r} has a {name} marker twice: {markers!r}. Name each once.")


@dataclass(frozen=True)
class Exclusion:
    """A part of a trained turn that is not trained.

    Attributes:
        kind: "scaffold" for text that the template adds at the beginning of a turn's content, such as an empty
            thought; it is excluded only there. "thinking" for reasoning; it is excluded if `train_thinking` is False.
            "tool_output" for tool results within a turn; they are always excluded.
        start: Text at the beginning of the part; it belongs to the part.
        end: Text at the end of the part; it belongs to the part. If `end` is empty, `start` is the whole part.
    """

    kind: ExclusionKind
    start: str
    end: str = ""


@dataclass(frozen=True)
class Family:
    """A chat format: the markers of its roles, and the text that is never trained.

    Attributes:
        name: Name of the format.
        boundaries: One or more boundaries for each role. If there are none, nothing is trained.
        exclusions: Parts of turns that are not trained.
        media: Text of tokens that stand for images, audio or videos and are never trained.

    Raises:
        ValueError: If two boundaries have a common start marker.
    """

    name: str
    boundaries: tuple[RoleBoundary, ...]
    exclusions: tuple[Exclusion, ...] = ()
    media: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        owners: dict[str, str] = {}
        for boundary in self.boundaries:
            for start in boundary.start:
                if start in owners:
                    raise ValueError(
                        f"{self.name}: the start marker {start!r} belongs to both {owners[start]!r} and "
                        f"{boundary.role!r}. A start marker tells the role, so give it to one."
                    )
                owners[start] = boundary.role

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles in `boundaries`, without repetition."""
        return tuple(dict.fromkeys(boundary.role for boundary in self.boundaries))


def parse_boundaries(specs: Sequence[dict[str, Any]], name: str = "role_boundaries") -> Family:
    """Convert the option `role_boundaries` into a chat format.

    Args:
        specs: Mappings with `role` and `start`, and optionally `end`, `include_start` and `include_end`. A marker is
            text, or a list of variants. `end` may contain None and `"eos_token"`; its default is None. An empty list
            means that nothing is trained.
        name: Name of the chat format, and of the option in messages.

    Raises:
        ValueError: If a key or a value is invalid.
    """
    if isinstance(specs, str | dict) or not isinstance(specs, Sequence):
        raise ValueError(f"{name} is a {type(specs).__name__}. Give a list of mappings with the keys {_join(_KEYS)}.")
    boundaries = []
    for number, spec in enumerate(specs):
        where = f"{name}[{number}]"
        if not isinstance(spec, dict):
            raise ValueError(f"{where} is {spec!r}. Give a mapping with the keys {_join(_KEYS)}.")
        try:
            boundaries.append(_parse_boundary(spec, where))
        except ValueError as error:
            raise ValueError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error
    return Family(name, tuple(boundaries))


def _parse_boundary(spec: dict[str, Any], where: str) -> RoleBoundary:
    for key in spec:
        if key not in _KEYS:
            near = get_close_matches(str(key), _KEYS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where}: unknown key {key!r}.{hint} The keys are {_join(_KEYS)}.")
    for key in ("role", "start"):
        if key not in spec:
            raise ValueError(f"{where}: the key {key!r} is missing. `role` and `start` are needed.")
    if not isinstance(spec["role"], str):
        raise ValueError(f"{where}: role={spec['role']!r} is not text. Name the role, such as 'assistant'.")
    flags = {}
    for key, default in (("include_start", False), ("include_end", True)):
        flags[key] = spec.get(key, default)
        if not isinstance(flags[key], bool):
            raise ValueError(f"{where}: {key}={flags[key]!r} is neither true nor false.")
    starts = _parse_variants(spec["start"], f"{where}: start")
    if None in starts:
        raise ValueError(f"{where}: start=null. Only `end` may be null; give the text that begins the turn.")
    if EOS in starts:
        raise ValueError(f"{where}: start={EOS!r} is allowed only in `end`. Give the text that begins the turn.")
    return RoleBoundary(
        role=spec["role"],
        start=tuple(start for start in starts if start is not None),
        end=_parse_variants(spec.get("end"), f"{where}: end"),
        **flags,
    )


def _parse_variants(value: Any, where: str) -> tuple[str | None, ...]:
    variants = tuple(value) if isinstance(value, list | tuple) else (value,)
    for variant in variants:
        if variant is not None and not isinstance(variant, str):
            raise ValueError(f"{where}={value!r} holds a {type(variant).__name__}. Give text, or a list of texts.")
    return variants


def _join(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
