"""The checker of fences: who touched what last, and whether that was ordered.

[Note: Happens-before]
Work on two streams is ordered only by fences. Each stream, and the host, counts its own steps and knows of every other
stream the last step that a fence has made it wait for: a vector clock (Lamport 1978, Mattern 1989). Of each storage
the checker keeps the last writer and the readers since. An access is right if its stream's clock covers the last
writer, and for a write the readers too. The first that is not covered raises, whether or not the late copy would have
gone wrong this time. The host launches everything, so whatever it has done so far comes before what it launches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_protrain.simulation.streams import RaceError, SimulatedStream


@dataclass
class _History:
    """Who touched a storage: (stream, step, operation) of the last writer, and of the readers since by stream."""

    writer: tuple[str, int, str] | None = None
    readers: dict[str, tuple[int, str]] = field(default_factory=dict)


class Accesses:
    """Accesses to storages, each checked against those before, see [Note: Happens-before]."""

    def __init__(self) -> None:
        self._histories: dict[int, _History] = {}

    def add(self, stream: SimulatedStream, step: int, key: int, write: bool, operation: str) -> None:
        """Checks and notes one access.

        Args:
            stream: Who.
            step: In its own count.
            key: What stands for the storage.
            write: Whether it writes.
            operation: In what.

        Raises:
            RaceError: No fence orders it after an access it depends on.
        """
        history = self._histories.setdefault(key, _History())
        what = f"{stream.name} {'writes' if write else 'reads'} in {operation}"
        if history.writer is not None:
            name, at, before = history.writer
            if name != stream.name and stream.clock.get(name, 0) < at:
                raise RaceError(f"{what} what {name} wrote in {before}, and no fence is between them.")
        if not write:
            history.readers[stream.name] = (step, operation)
            return
        for name, (at, before) in history.readers.items():
            if name != stream.name and stream.clock.get(name, 0) < at:
                raise RaceError(f"{what} what {name} may still read in {before}, and no fence is between them.")
        self._histories[key] = _History((stream.name, step, operation))

    def forget(self, key: int) -> None:
        """The storage is no more."""
        self._histories.pop(key, None)
