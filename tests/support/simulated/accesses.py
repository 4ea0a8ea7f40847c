"""The checker of fences: who touched what last, and whether that was ordered.

[Note: Happens-before]
Work on two streams is ordered only by fences. Each stream, and the host, counts its own steps and knows of every other
stream the last step that a fence has made it wait for: a vector clock (Lamport 1978, Mattern 1989). Of each extent that
has been touched the checker keeps the last writer and the readers since. An access is right if its stream's clock
covers the last writer of whatever it overlaps, and for a write the readers too. The first that is not covered raises,
whether or not the late copy would have gone wrong this time. The host launches everything, so whatever it has done so
far comes before what it launches.

An *extent* is what lies from the first byte of a tensor to its last. Two without a byte in common need no order, as on
a GPU: a copy may write beside what a kernel writes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tests.support.simulated.streams import RaceError, SimulatedStream

Extent = tuple[int, int]
# Of a whole storage, whatever its size.
WHOLE: Extent = (0, sys.maxsize)


@dataclass
class _History:
    """The latest accesses to an extent.

    Attributes:
        writer: Stream, step and operation of the last write; None: it has not been written.
        readers: Step and operation of the last read since then, by stream.
    """

    writer: tuple[str, int, str] | None = None
    readers: dict[str, tuple[int, str]] = field(default_factory=dict)


class Accesses:
    """Accesses to storages, each checked against those before, see [Note: Happens-before]."""

    def __init__(self) -> None:
        self._histories: dict[int, dict[Extent, _History]] = {}

    def add(
        self, stream: SimulatedStream, step: int, key: int, write: bool, operation: str, extent: Extent = WHOLE
    ) -> None:
        """Check one access against earlier ones, and record it.

        Args:
            stream: Stream that accesses the storage.
            step: Number of the access in the stream's own count.
            key: Identifier of the storage.
            write: Whether it writes.
            operation: Name of the operation, for messages.
            extent: First byte, and the byte after the last one.

        Raises:
            RaceError: No fence orders it after an access it depends on.
        """
        begin, end = extent
        if begin == end:
            return
        histories = self._histories.setdefault(key, {})
        for (first, last), history in histories.items():
            if first < end and begin < last:
                _check(history, stream, write, operation)
        if not write:
            histories.setdefault(extent, _History()).readers[stream.name] = (step, operation)
            return
        # What is covered in part keeps its history for the rest. Whoever comes after this write comes after that, too.
        for first, last in [other for other in histories if begin <= other[0] and other[1] <= end]:
            del histories[first, last]
        histories[extent] = _History((stream.name, step, operation))

    def forget(self, key: int) -> None:
        """Forget a storage that has been freed."""
        self._histories.pop(key, None)


def extent_of(tensor: Tensor, base: int = 0) -> Extent:
    """Return the extent of a tensor.

    Args:
        tensor: The tensor.
        base: Address at which its storage begins.

    Returns:
        Its first byte, and the one behind its last.
    """
    begin = base + int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.itemsize


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an argument or of a result of an operation, which is one, or lists of them, or has none."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for entry in value for tensor in tensors_in(entry)] if isinstance(value, list | tuple) else []


def _check(history: _History, stream: SimulatedStream, write: bool, operation: str) -> None:
    what = f"{stream.name} {'writes' if write else 'reads'} in {operation}"
    if history.writer is not None:
        name, at, before = history.writer
        if name != stream.name and stream.clock.get(name, 0) < at:
            raise RaceError(f"{what} what {name} wrote in {before}, and no fence is between them.")
    if write:
        for name, (at, before) in history.readers.items():
            if name != stream.name and stream.clock.get(name, 0) < at:
                raise RaceError(f"{what} what {name} may still read in {before}, and no fence is between them.")
