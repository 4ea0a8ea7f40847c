"""Groups examples: one a row of a batch, several packed into a row of one length, or two that belong together.

A packed row holds several examples, called *segments*, one after the other. The `position_ids` of each segment begin at
0, and there is no attention mask. For the architectures in `models.loading.PACKING_MODEL_TYPES`, attention keeps
segments apart by such inputs, see [Note: Spans] in models/maskless.py; tests compare them with unpacked rows. Other
architectures would attend across segments, so they are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.config import plural

# Number of consecutive examples that are packed together. A larger window leaves less padding, a smaller one a more
# random order.
WINDOW = 8192


@dataclass(frozen=True, eq=False)
class Blocks:
    """Groups of examples; each group, called a block, becomes a row of a batch, or two rows if it is a pair.

    Attributes:
        examples: Indices of the examples of all blocks, concatenated, int64 of shape [examples].
        offsets: Position in `examples` at which each block begins, and the length of `examples`, int64 of shape
            [blocks + 1].
        lengths: Number of tokens in each block, or in the longer side of a pair, int64 of shape [blocks].
        packed: True for each block that becomes a packed row, bool of shape [blocks].
        are_pairs: True if each block is a pair.
    """

    examples: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    packed: NDArray[np.bool_]
    are_pairs: bool = False

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, block: int) -> NDArray[np.int64]:
        if not 0 <= block < len(self):
            raise IndexError(f"Block {block} of {len(self)} does not exist.")
        return self.examples[self.offsets[block] : self.offsets[block + 1]]


def single_blocks(lengths: NDArray[np.int64]) -> Blocks:
    """Return an unpacked block for each example."""
    count = len(lengths)
    return Blocks(np.arange(count), np.arange(count + 1), np.asarray(lengths, np.int64), np.zeros(count, np.bool_))


def pair_blocks(lengths: NDArray[np.int64]) -> Blocks:
    """Return an unpacked block for every two consecutive examples."""
    count = len(lengths)
    longer = np.asarray(lengths, np.int64).reshape(-1, 2).max(1)
    return Blocks(np.arange(count), np.arange(0, count + 1, 2), longer, np.zeros(count // 2, np.bool_), True)


def pack(
    lengths: NDArray[np.int64], max_length: int, *, alone: NDArray[np.bool_] | None = None, seed: int = 0
) -> Blocks:
    """Pack examples into blocks of at most `max_length` tokens.

    The examples are shuffled, and every `WINDOW` of them are packed by best-fit decreasing. Equal arguments give equal
    blocks.

    Args:
        lengths: Number of tokens in each example, of shape [examples].
        max_length: Maximum number of tokens in a packed block.
        alone: True for each example that gets an unpacked block, such as one with images, of shape [examples]. None
            packs all examples.
        seed: Seed of the shuffle.

    Raises:
        ValueError: If a packed example is empty or longer than `max_length`.
    """
    lengths = np.asarray(lengths, np.int64)
    alone = np.zeros(len(lengths), np.bool_) if alone is None else alone
    wrong = np.flatnonzero((lengths < 1) | ((lengths > max_length) & ~alone))
    if len(wrong):
        first = int(wrong[0])
        raise ValueError(
            f"Example {first} has {plural(int(lengths[first]), 'token')} and cannot be packed into "
            f"rows of max_length={max_length}. "
            "Truncate examples before they are packed, and leave out empty ones."
        )
    order = np.random.default_rng([seed, 0]).permutation(np.flatnonzero(~alone))
    parts: list[NDArray[np.int64]] = []
    counts: list[int] = []
    for start in range(0, len(order), WINDOW):
        members = order[start : start + WINDOW]
        members = members[np.argsort(-lengths[members], kind="stable")]
        blocks = np.asarray(_best_fit(lengths[members].tolist(), max_length))
        parts.append(members[np.argsort(blocks, kind="stable")])
        counts += np.bincount(blocks).tolist()
    num_packed = len(counts)
    rest = np.flatnonzero(alone)
    examples = np.concatenate([*parts, rest]).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum([*counts, *[1] * len(rest)])]).astype(np.int64)
    totals = np.concatenate([[0], np.cumsum(lengths[examples])])
    return Blocks(examples, offsets, np.diff(totals[offsets]), np.arange(len(offsets) - 1) < num_packed)


def _best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Put each item into the fullest block with room for it; return the number of each item's block.

    Bit `n` of the integer `rooms` is set if a block has room for exactly `n` more tokens. So the smallest sufficient
    room is found by bit operations, and the time is linear in the number of items.
    """
    placed: list[int] = []
    blocks_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0
    num_blocks = 0
    for length in lengths:
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            block = blocks_by_room[room].pop()
            if not blocks_by_room[room]:
                rooms ^= 1 << room
        else:
            room, block = capacity, num_blocks
            num_blocks += 1
        room -= length
        if room:
            blocks_by_room[room].append(block)
            rooms |= 1 << room
        placed.append(block)
    return placed
