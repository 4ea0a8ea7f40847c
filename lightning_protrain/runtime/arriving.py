"""What stands for the fence of an upload where other ranks bring a part of a chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Arriving(ABC):
    """A chunk that comes from several ranks.

    Attributes:
        abandoned: Whether nobody waits for it any more, after an exception: others may still write to its memory.
    """

    abandoned: bool = False

    @abstractmethod
    def wait(self) -> None:
        """Makes the compute stream wait for all of it."""

    @abstractmethod
    def land(self) -> None:
        """Blocks the host until this rank has read from host memory what it uploads."""
