"""Sets of candidates of a search, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Boxes:
    """Sets of candidates; see [Note: Search].

    Attributes:
        swap: The fewest swapping blocks, (K,).
        swaps: The most of them.
        least: The fewest steps of the others, see [Note: Layout of policies].
        most: The most of them.
        fewest: The fewest resident chunks.
        persistent: The most of them.
        point: Whether it is one candidate.
    """

    swap: Integers
    swaps: Integers
    least: Integers
    most: Integers
    fewest: Integers
    persistent: Integers
    point: Flags

    def only(self, chosen: Flags | Integers) -> Boxes:
        """Some of them."""
        return Boxes(**{name: values[chosen] for name, values in vars(self).items()})

    def beside(self, others: Boxes) -> Boxes:
        """These and others."""
        return Boxes(**{name: np.concatenate((values, vars(others)[name])) for name, values in vars(self).items()})


@dataclass(frozen=True)
class Each:
    """Every number of swapped blocks of every box, those of one box next to each other.

    Attributes:
        box: Which box.
        swap: Swapping blocks.
        start: The first one of each box.
    """

    box: Integers
    swap: Integers
    start: Integers

    @classmethod
    def of(cls, least: Integers, most: Integers) -> Each:
        """From the fewest to the most of each box, (K,)."""
        counts = most - least + 1
        start = np.cumsum(counts) - counts
        box = np.repeat(np.arange(len(counts)), counts)
        return cls(box, np.arange(len(box)) + (least - start)[box], start)

    def least(self, values: Integers) -> Integers:
        """The least value in each box, (K,)."""
        found: Integers = np.minimum.reduceat(values, self.start)
        return found
