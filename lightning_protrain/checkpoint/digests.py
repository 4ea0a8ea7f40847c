"""Running digests of files, by the names that a manifest gives them."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from typing import Protocol

import xxhash

# Hexadecimal digits of a digest, by algorithm.
DIGESTS = {"xxh3_128": 32, "crc32": 8, "sha256": 64}
# Of what is saved; what was saved with another one is verified with that.
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
    """Running digest of one file; `str` of it is what the manifest has.

    Args:
        algorithm: `"xxh3_128"` and `"crc32"` find what breaks by accident, and the first one takes a quarter of the
            time. `"sha256"` also finds what was made to look the same, and takes longer than the writing.

    Raises:
        ValueError: There is no such algorithm.
    """

    def __init__(self, algorithm: str = DEFAULT) -> None:
        if algorithm not in DIGESTS:
            raise ValueError(f"digest={algorithm!r}: give one of {', '.join(map(repr, DIGESTS))}.")
        self._algorithm = algorithm
        self._running = _ALGORITHMS[algorithm]()

    def update(self, data: memoryview | bytes | bytearray) -> None:
        """Adds bytes."""
        self._running.update(data)

    def __str__(self) -> str:
        return f"{self._algorithm}:{self._running.hexdigest()}"
