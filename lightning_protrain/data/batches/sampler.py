"""The order of training: a pure function of seed and epoch, shared out to ranks, begun again at any batch.

[Note: Leftovers]
A *step* takes `batch_size` rows for each rank. The rows of a kind that fill no whole step are shared out as evenly as
they can be; a rank that gets none of them repeats a row without training it. So every row is trained exactly once an
epoch, all ranks have the same number of batches, and none is empty. A loss that is a mean over the tokens of all ranks
weighs such smaller batches rightly. Evaluation does the same in the order of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, Sampler

from lightning_protrain.data.batches.pack import Blocks

# Steps whose rows are sorted by length together: more save more padding, fewer leave more to chance.
DEFAULT_GROUP_STEPS = 64


class EpochSampler(Sampler[list[int]]):
    """Batches of row indices for one rank.

    An index below zero, `~row`, asks for a row of which nothing is trained, see [Note: Leftovers]. Rows of one step are
    of one kind on all ranks: packed or not.

    Args:
        blocks: The rows.
        batch_size: Rows of a batch.
        seed: Seed of the order.
        shuffle: Whether rows are taken by chance; else in their order.
        group_by_length: Whether the rows of a step are of like lengths. The order of steps stays random.
        rank: Which share.
        world_size: Number of shares.
        group_steps: Steps whose rows are sorted together.

    Raises:
        ValueError: A number out of range, or no rows.
    """

    def __init__(
        self,
        blocks: Blocks,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        group_by_length: bool = False,
        rank: int = 0,
        world_size: int = 1,
        group_steps: int = DEFAULT_GROUP_STEPS,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("world_size", world_size), ("group_steps", group_steps)):
            if value < 1:
                raise ValueError(f"{name}={value}: give at least 1.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is none of {world_size} ranks.")
        if seed < 0:
            raise ValueError(f"seed={seed}: give a number that is not negative.")
        if not len(blocks):
            raise ValueError("There are no rows to train on.")
        self.blocks = blocks
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.group_by_length = group_by_length
        self.rank = rank
        self.world_size = world_size
        self.group_steps = group_steps
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        """Batches of an epoch, the same in every epoch and on every rank."""
        step = self.batch_size * self.world_size
        packed = int(self.blocks.packed.sum())
        return -(-packed // step) + -(-(len(self.blocks) - packed) // step)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of the epoch from the position on."""
        yield from self.batches(self.epoch)[self.position :]

    def set_epoch(self, epoch: int) -> None:
        """Goes to the begin of an epoch; stays at its position in the epoch that it is in."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def batches(self, epoch: int) -> list[list[int]]:
        """All batches of this rank in an epoch."""
        rng = np.random.default_rng([self.seed, epoch])
        steps: list[list[int]] = []
        for packed in (True, False):
            rows = np.flatnonzero(self.blocks.packed == packed)
            steps += self._steps(rows, rng) if len(rows) else []
        if not self.shuffle:
            return steps
        return [steps[index] for index in rng.permutation(len(steps))]

    def _steps(self, rows: NDArray[np.int64], rng: np.random.Generator) -> list[list[int]]:
        """The batches of this rank, out of rows of one kind."""
        if self.shuffle:
            rows = rng.permutation(rows)
        size = self.batch_size * self.world_size
        count = len(rows) // size * size
        whole, rest = rows[:count], rows[count:]
        if self.group_by_length:
            group = np.arange(count) // (size * self.group_steps)
            whole = whole[np.lexsort((self.blocks.lengths[whole], group))]
        # Every n-th row of a step, not a run of them, so that lengths are alike on all ranks.
        steps: list[list[int]] = whole.reshape(-1, size)[:, self.rank :: self.world_size].tolist()
        if len(rest):
            steps.append(rest[self.rank :: self.world_size].tolist() or [~int(rest[0])])
        return steps

    def identity(self) -> dict[str, Any]:
        """What must be unchanged for a position to mean the same."""
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "num_batches": len(self),
            "num_rows": len(self.blocks),
            "num_tokens": int(self.blocks.lengths.sum()),
            "shuffle": self.shuffle,
            "group_by_length": self.group_by_length,
            "group_steps": self.group_steps,
        }

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position in batches, and what they depend on: plain numbers, alike on all ranks."""
        return {"epoch": self.epoch, "position": self.position, **self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was taken.

        Raises:
            ValueError: In the middle of an epoch, where the batches are no longer those of `state`.
        """
        changed = {key: value for key, value in self.identity().items() if state[key] != value}
        if changed and 0 < state["position"] < state["num_batches"]:
            was = ", ".join(f"{key} was {state[key]!r} and is {value!r}" for key, value in changed.items())
            raise ValueError(
                f"The checkpoint was written after batch {state['position']} of epoch {state['epoch']}, and the "
                f"batches have changed since: {was}. Resume with the same data, or from the end of an epoch."
            )
        self.epoch, self.position = state["epoch"], state["position"]


class ShareSampler(DistributedSampler[Any]):
    """The rows of one rank in evaluation: every `world_size`-th in their order, none of them twice.

    All ranks have the same number of batches, as a forward may be collective: a rank that would have one less gets
    `~0`, which asks for a row of which nothing is scored, see [Note: Leftovers]. Lightning leaves samplers of this base
    class as they are, whatever `Trainer(use_distributed_sampler=...)` says, and has others repeat rows.

    Args:
        rows: Of all ranks.
        batch_size: Rows of a batch.
        rank: Which share.
        world_size: Number of shares.

    Raises:
        ValueError: `rank` is none of `world_size`.
    """

    def __init__(self, rows: Sized, batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(rows, world_size, rank, shuffle=False)  # type: ignore[arg-type]
        self.indices = list(range(rank, len(rows), world_size))
        most_rows = -(-len(rows) // world_size)
        if -(-len(self.indices) // batch_size) < -(-most_rows // batch_size):
            self.indices.append(~0)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)
