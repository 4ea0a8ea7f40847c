"""Names of checkpoints, digests of their files, and the manifest that lists the files.

A folder is a checkpoint if it has a valid manifest. The checkpoint is undamaged if its files are exactly those in the
manifest, byte for byte. The manifest contains a digest of its own text, so any changed byte makes it invalid.

[Note: States]
A published checkpoint has the name that the user gave. Saves and removals use three more names in the same folder:
`.NAME~TOKEN.staged` (being written), `.NAME~TOKEN.old` (complete, and being replaced by a new checkpoint NAME) and
`.NAME~TOKEN.removed` (being removed). The first half of TOKEN identifies the run, so that a run only cleans up its own
folders.

[Note: Order]
`sequence` numbers the checkpoints of a run in the order of their saves. If a run resumes from an earlier step or starts
again, its first save renames the later checkpoints to `NAME.aside` (`set_aside` in atomic.py). So the checkpoints of a
run in one folder always continue each other. A checkpoint that is set aside still loads by its path.
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
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import xxhash

from lightning_protrain.config import format_bytes

State = Literal["staged", "old", "removed"]

# Maximum bytes of a checkpoint's name: the limit of file systems, less what [Note: States] adds.
MOST_NAME_BYTES = 255 - len(".~.removed") - 16

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED = re.compile(r"\.(?P<name>.+)~(?P<run>[0-9a-f]{8})[0-9a-f]{8}\.(?P<state>staged|old|removed)", re.DOTALL)
_KEPT = re.compile(r"\..*(\.lock|~[0-9a-f]{16}\.\w+)")


class Reserved(NamedTuple):
    """The parts of a reserved name, see [Note: States]."""

    name: str
    run_mark: str
    state: State


def check_run(run: object) -> str:
    """Return the name of a run; raise ValueError if it is not allowed."""
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise ValueError(
            f"run={run!r}: give 1 to 64 letters, digits, '.', '_' and '-', beginning with a letter or a digit."
        )
    return run


def check_name(name: str) -> str:
    """Return the name of a checkpoint; raise ValueError if it is not a printable file name without separators."""
    size = len(name.encode(errors="surrogateescape"))
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable() or _KEPT.fullmatch(name):
        raise ValueError(
            f"The checkpoint cannot be called {name!r}. Give a name without separators and control characters that is "
            "not '.', '..', or reserved for running saves."
        )
    if size > MOST_NAME_BYTES:
        raise ValueError(
            f"The checkpoint's name {name!r} has {format_bytes(size)}. "
            f"Give a name of at most {format_bytes(MOST_NAME_BYTES)}."
        )
    return name


def check_file(name: object) -> str:
    """Return the name of a file in a checkpoint; raise ValueError if it is not allowed."""
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} cannot be the name of a file of a checkpoint.")
    return name


def run_mark(run: str) -> str:
    """Return the 8 hexadecimal digits that identify the run in reserved names."""
    return hashlib.sha256(run.encode()).hexdigest()[:8]


def reserved_name(name: str, run: str, state: State) -> str:
    """Return a new reserved name with a random token, see [Note: States]."""
    return f".{name}~{run_mark(run)}{secrets.token_hex(4)}.{state}"


def parse_reserved(entry: str) -> Reserved | None:
    """Parse a name of `reserved_name`; return None for any other name."""
    match = _RESERVED.fullmatch(entry)
    return Reserved(match["name"], match["run"], match["state"]) if match else None  # type: ignore[arg-type]


# Hexadecimal digits of a digest, by algorithm.
DIGESTS = {"xxh3_128": 32, "crc32": 8, "sha256": 64}
# Default algorithm of new checkpoints. Existing ones are verified with the algorithm in their manifest.
DEFAULT = "xxh3_128"


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview | bytes | bytearray, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_ALGORITHMS: dict[str, Callable[[], Any]] = {
    "xxh3_128": xxhash.xxh3_128,
    "crc32": _Crc32,
    "sha256": hashlib.sha256,
}


class Digest:
    """Running digest of one file; `str` returns the text for the manifest.

    Args:
        algorithm: `"xxh3_128"` and `"crc32"` detect accidental damage; `"xxh3_128"` is four times as fast. `"sha256"`
            also detects deliberate changes, and takes longer than writing the file.

    Raises:
        ValueError: If `algorithm` is unknown.
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
# Every checkpoint has a manifest and this file. A folder with neither of them is not a checkpoint.
STATE = "state.pt"
# Key in a checkpoint's content: the list of states by rank.
RANK_STATES = "rank_states"
KIND = "lightning_protrain.checkpoint"
FORMAT = 2
# Larger manifests are refused. A valid one has about a hundred bytes for each file.
MOST_MANIFEST_BYTES = 16 << 20
_MOST = (1 << 63) - 1
_HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint.

    Attributes:
        size: Size in bytes.
        digest: Algorithm and hexadecimal digits, such as `"xxh3_128:..."`; see `Digest`.
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
        """Algorithm of the digest, such as `"xxh3_128"`."""
        return self.digest.partition(":")[0]


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        run: Name of the run.
        step: Number of optimizer steps before the save.
        sequence: Number of the save in its run, from 0; see [Note: Order].
        identity: 16 random hexadecimal digits, the same in all copies of one save.
        files: Files of the checkpoint by name, without the manifest.
        world_size: Number of ranks at the save.
        record: Further JSON values, such as the score and versions of libraries.
    """

    run: str
    step: int
    sequence: int
    identity: str
    files: Mapping[str, FileEntry]
    world_size: int = 1
    record: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_run(self.run)
        for name in ("step", "sequence", "world_size"):
            _whole(getattr(self, name), name)
        if self.world_size < 1:
            raise ValueError(f"world_size is {self.world_size}, and must be at least 1")
        if len(_text(self.identity, "identity")) != 16 or not _HEX.issuperset(self.identity):
            raise ValueError(f"identity={self.identity!r} is not 16 hexadecimal digits")
        for name in self.files:
            if check_file(name) == MANIFEST:
                raise ValueError("the manifest lists itself")
        try:
            same = json.loads(json.dumps(self.record, allow_nan=False)) == self.record
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"record cannot be written as JSON: {error}") from error
        if not same or not isinstance(self.record, dict):
            raise ValueError("record does not survive a round trip through JSON: use str keys, lists, finite numbers")

    def to_text(self) -> str:
        """Return the manifest as JSON text, signed with a digest; equal manifests have equal texts."""
        files = {name: [entry.size, entry.digest] for name, entry in self.files.items()}
        return _sign({**vars(self), "kind": KIND, "format": FORMAT, "files": files})

    @staticmethod
    def from_text(data: bytes) -> Manifest:
        """Parse a text of `to_text` after checking its digest.

        Raises:
            ValueError: If the text is not a manifest, was changed after it was written, or has another format version.
        """
        try:
            content = json.loads(data.decode("ascii"), parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not valid JSON: {error}") from error
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise ValueError("it is not the manifest of a checkpoint")
        digest = content.pop("digest", None)
        try:
            right = _sign(content).encode() == data
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if not right:
            raise ValueError(f"it was changed after it was written: its digest {str(digest)[:16]!r} does not match")
        version = content.pop("format", None)
        if version == 1:  # It had a number for each resume from an earlier step.
            content.pop("branch", None)
            content.pop("lineage", None)
        elif version != FORMAT:
            raise ValueError(f"it has another format than {FORMAT}: another version of lightning_protrain wrote it")
        del content["kind"]
        try:
            files = {name: FileEntry(*entry) for name, entry in content.pop("files").items()}
            return Manifest(**content, files=files)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"its fields are not those of a manifest: {error}") from error


def is_remains(folder: Path) -> bool:
    """Return True if the folder is a checkpoint or a damaged one. Only such folders are ever removed."""
    return any(os.path.lexists(folder / name) for name in (MANIFEST, STATE))


def _sign(content: Mapping[str, Any]) -> str:
    dump = partial(json.dumps, sort_keys=True, indent=1, allow_nan=False)
    digest = hashlib.sha256(dump(content).encode()).hexdigest()
    return dump({**content, "digest": digest}) + "\n"


def _whole(value: Any, name: str) -> None:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{name}={str(value)[:40]!r} is not an integer of at least 0")


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}={str(value)[:40]!r} is not a string")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not allowed")
