"""Describes a checkpoint: its names, its digests, and the manifest that holds them.

A folder is a checkpoint if it has a valid manifest. It is a good one if its files are exactly those in the manifest,
byte for byte; names, times and links prove nothing. Every content has exactly one text as a manifest, and the last line
is a digest of the text, so any changed byte makes the manifest invalid.

[Note: States]
A published checkpoint has a plain name. The same folder, and so the same disk, may also hold `.NAME~TOKEN.staged`
(being written), `.NAME~TOKEN.old` (whole; its successor of the same name is about to be, or has been, published) and
`.NAME~TOKEN.removed` (being removed). The first half of TOKEN stands for the run, so that no run removes what another
run is writing.

[Note: Lineage]
`sequence` counts the checkpoints of a run in the order of their saves. A run that resumes from a checkpoint other than
its latest one begins a new *branch*. `lineage` lists the earlier branches, each with the last step that the new branch
shares with it. A checkpoint outside the lineage of the latest one is found, but never chosen.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import xxhash

from lightning_protrain.config import format_bytes

State = Literal["staged", "old", "removed"]

# Bytes of a name that file systems accept, less the bytes that a state adds.
MOST_NAME_BYTES = 255 - len(".~.removed") - 16

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED = re.compile(r"\.(?P<name>.+)~(?P<run>[0-9a-f]{8})[0-9a-f]{8}\.(?P<state>staged|old|removed)", re.DOTALL)
_KEPT = re.compile(r"\..*(\.lock|~[0-9a-f]{16}\.\w+)")


class Reserved(NamedTuple):
    """The parts of a name of [Note: States]."""

    name: str
    run_mark: str
    state: State


def check_run(run: object) -> str:
    """Return the run's name if it is allowed.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise ValueError(
            f"run={run!r}: give 1 to 64 letters, digits, '.', '_' and '-', beginning with a letter or a digit."
        )
    return run


def check_name(name: str) -> str:
    """Return the name of a checkpoint if it is allowed: a printable file name without separators.

    Raises:
        ValueError: If it is not.
    """
    size = len(name.encode(errors="surrogateescape"))
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable() or _KEPT.fullmatch(name):
        raise ValueError(
            f"The checkpoint cannot be called {name!r}. Give a name without separators and control characters that is "
            "not '.', '..', or reserved for saves under way."
        )
    if size > MOST_NAME_BYTES:
        raise ValueError(
            f"The checkpoint's name {name!r} has {format_bytes(size)}. Give one of at most {MOST_NAME_BYTES}."
        )
    return name


def check_file(name: object) -> str:
    """Return the name of a file in a checkpoint if it is allowed.

    Raises:
        ValueError: If it is not.
    """
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} cannot be the name of a file of a checkpoint.")
    return name


def run_mark(run: str) -> str:
    """Return the 8 characters that stand for the run in reserved names."""
    return hashlib.sha256(run.encode()).hexdigest()[:8]


def reserved_name(name: str, run: str, state: State) -> str:
    """Return a new folder name for a checkpoint in a state, see [Note: States]."""
    return f".{name}~{run_mark(run)}{secrets.token_hex(4)}.{state}"


def parse_reserved(entry: str) -> Reserved | None:
    """Parse a name of `reserved_name`; return None for any other name."""
    match = _RESERVED.fullmatch(entry)
    return Reserved(match["name"], match["run"], match["state"]) if match else None  # type: ignore[arg-type]


# Hexadecimal digits of a digest, by algorithm.
DIGESTS = {"xxh3_128": 32, "crc32": 8, "sha256": 64}
# Algorithm of new checkpoints; older ones are verified with their own.
DEFAULT = "xxh3_128"


class _Running(Protocol):
    def update(self, data: memoryview | bytes | bytearray, /) -> None: ...

    def hexdigest(self) -> str: ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview | bytes | bytearray, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_ALGORITHMS: dict[str, Callable[[], _Running]] = {
    "xxh3_128": xxhash.xxh3_128,
    "crc32": _Crc32,
    "sha256": hashlib.sha256,
}


class Digest:
    """Running digest of one file; `str` gives the text for the manifest.

    Args:
        algorithm: `"xxh3_128"` and `"crc32"` detect accidental damage; the first takes a quarter of the time.
            `"sha256"` also detects deliberate changes, and takes longer than the writing.

    Raises:
        ValueError: If there is no such algorithm.
    """

    def __init__(self, algorithm: str = DEFAULT) -> None:
        if algorithm not in DIGESTS:
            raise ValueError(f"digest={algorithm!r}: give one of {', '.join(map(repr, DIGESTS))}.")
        self._algorithm = algorithm
        self._running = _ALGORITHMS[algorithm]()

    def update(self, data: memoryview | bytes | bytearray) -> None:
        """Add bytes to the digest."""
        self._running.update(data)

    def __str__(self) -> str:
        return f"{self._algorithm}:{self._running.hexdigest()}"


MANIFEST = "manifest.json"
# Every checkpoint has this file, too. These two names distinguish the remains of a checkpoint from foreign files.
STATE = "state.pt"
# Key of the list of states by rank, in a checkpoint's content.
RANK_STATES = "rank_states"
KIND = "lightning_protrain.checkpoint"
FORMAT = 1
# A manifest has about a hundred bytes for each file; larger ones are not read.
MOST_MANIFEST_BYTES = 16 << 20
_MOST = (1 << 63) - 1
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        size: Size in bytes.
        digest: Algorithm, colon, hexadecimal digits: `"xxh3_128:..."`; see `Digest`.
    """

    size: int
    digest: str

    def __post_init__(self) -> None:
        _whole(self.size, "size")
        kind, _, digits = _text(self.digest, "digest").partition(":")
        if len(digits) != DIGESTS.get(kind) or not _HEX.issuperset(digits):
            raise ValueError(f"digest={self.digest!r} is none of {', '.join(DIGESTS)}")

    @property
    def algorithm(self) -> str:
        """Algorithm of the digest."""
        return self.digest.partition(":")[0]


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint; see [Note: Lineage].

    Attributes:
        run: Name of the run.
        step: Number of optimizer steps made.
        sequence: Place in the order of the run's saves.
        identity: 16 hexadecimal digits, different for every save; copies of one save share them.
        files: Entry of each file in the folder except the manifest, by name.
        world_size: Number of ranks that saved it.
        branch: Branch of the run.
        lineage: Earlier branches, each with the last step that this branch shares.
        record: Anything else that JSON can hold: metrics, versions.
    """

    run: str
    step: int
    sequence: int
    identity: str
    files: Mapping[str, FileEntry]
    world_size: int = 1
    branch: int = 0
    lineage: tuple[tuple[int, int], ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_run(self.run)
        for name in ("step", "sequence", "world_size", "branch"):
            _whole(getattr(self, name), name)
        if self.world_size < 1:
            raise ValueError("world_size is {self.world_size}, and must be at least 1")
        if len(_text(self.identity, "identity")) != 16 or not _HEX.issuperset(self.identity):
            raise ValueError(f"identity={self.identity!r} is not 16 hexadecimal digits")
        for branch, step in self.lineage:
            _whole(branch, "lineage")
            _whole(step, "lineage")
        for name in self.files:
            if check_file(name) == MANIFEST:
                raise ValueError("the manifest lists itself")
        try:
            same = json.loads(json.dumps(self.record, allow_nan=False)) == self.record
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"record cannot be written as JSON: {error}") from error
        if not same or not isinstance(self.record, dict):
            raise ValueError("record changes when it is written as JSON: use str keys, lists, and finite numbers")

    def is_on_line_of(self, head: Manifest) -> bool:
        """Return True if `head` is this checkpoint or continues from it, see [Note: Lineage]."""
        if self.branch == head.branch:
            return self.sequence <= head.sequence
        return any(branch == self.branch and self.step <= step for branch, step in head.lineage)

    def to_text(self) -> str:
        """Return the only text that this content can have."""
        content = {
            "kind": KIND,
            "format": FORMAT,
            "run": self.run,
            "step": self.step,
            "sequence": self.sequence,
            "identity": self.identity,
            "world_size": self.world_size,
            "branch": self.branch,
            "lineage": [list(each) for each in self.lineage],
            "record": self.record,
            "files": {name: [entry.size, entry.digest] for name, entry in self.files.items()},
        }
        return _sign(content)

    @staticmethod
    def from_text(data: bytes) -> Manifest:
        """Parse a text of `to_text`; nothing in it is used before the digest is checked.

        Raises:
            ValueError: If it is no manifest, was changed after it was written, or has another format version.
        """
        try:
            content = json.loads(data.decode("ascii"), parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is no JSON text: {error}") from error
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise ValueError("it is not the manifest of a checkpoint")
        digest = content.pop("digest", None)
        try:
            right = _sign(content).encode() == data
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if not right:
            raise ValueError(f"it was changed after it was written, its digest {str(digest)[:16]!r} does not fit")
        if content.pop("format", None) != FORMAT:
            raise ValueError(f"it has another format than {FORMAT}: another version of lightning_protrain wrote it")
        del content["kind"]
        try:
            files = {name: FileEntry(*entry) for name, entry in content.pop("files").items()}
            lineage = tuple((branch, step) for branch, step in content.pop("lineage"))
            return Manifest(**content, files=files, lineage=lineage)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"its content is not that of a manifest: {error}") from error


def is_remains(folder: Path) -> bool:
    """Return True if the folder is a checkpoint or the remains of one: no other folder may ever be removed."""
    return any(os.path.lexists(folder / name) for name in (MANIFEST, STATE))


def _sign(content: Mapping[str, Any]) -> str:
    dump: Callable[[Any], str] = lambda what: json.dumps(what, sort_keys=True, indent=1, allow_nan=False)  # noqa: E731
    digest = hashlib.sha256(dump(content).encode()).hexdigest()
    return dump({**content, "digest": digest}) + "\n"


def _whole(value: Any, name: str) -> None:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{name}={str(value)[:40]!r} is no whole number from 0 on")


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}={str(value)[:40]!r} is no text")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
