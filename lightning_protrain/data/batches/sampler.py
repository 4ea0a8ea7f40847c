"""Samplers that divide rows among ranks: for training, in an order given by seed and epoch, and for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DistributedSampler, Sampler

from lightning_protrain.data.batches.pack import Blocks

# Number of consecutive steps whose rows are sorted by length together. A larger number leaves less padding, a smaller
# one a more random order.
GROUP_STEPS = 64


class EpochSampler(Sampler[list[int]]):
    """Yields batches of row indices for one rank; every row is trained exactly once in an epoch.

    A step has a batch of `batch_size` rows on each rank. Its rows are packed on all ranks, or unpacked on all ranks.
    Rows that do not fill a step are divided among the ranks as evenly as possible. A rank without such a row gets the
    index `~row`, which stands for a row without trained tokens. So all ranks have the same number of batches.

    Args:
        blocks: The rows of all ranks.
        batch_size: Number of rows in a batch.
        seed: Seed of the order.
        group_by_length: True puts rows of similar lengths into a step.
        rank: Number of this rank.
        world_size: Number of ranks.

    Raises:
        ValueError: If the seed is negative, or there are no rows.
    """

    def __init__(
        self,
        blocks: Blocks,
        batch_size: int,
        *,
        seed: int = 0,
        group_by_length: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed={seed}: give a number that is not negative.")
        if not len(blocks):
            raise ValueError("There are no rows to train on.")
        self.blocks = blocks
        self.batch_size = batch_size
        self.seed = seed
        self.group_by_length = group_by_length
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        """Return the number of batches in an epoch, equal in all epochs and on all ranks."""
        step = self.batch_size * self.world_size
        packed = int(self.blocks.packed.sum())
        return -(-packed // step) + -(-(len(self.blocks) - packed) // step)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the present epoch, from `position` on."""
        yield from self.batches(self.epoch)[self.position :]

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of an epoch; keep the position if the epoch is the present one."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def batches(self, epoch: int) -> list[list[int]]:
        """Return all batches of this rank in an epoch."""
        rng = np.random.default_rng([self.seed, epoch])
        steps: list[list[int]] = []
        for packed in (True, False):
            rows = np.flatnonzero(self.blocks.packed == packed)
            steps += self._steps(rows, rng) if len(rows) else []
        return [steps[index] for index in rng.permutation(len(steps))]

    def _steps(self, rows: NDArray[np.int64], rng: np.random.Generator) -> list[list[int]]:
        """Divide packed rows, or unpacked rows, into batches; return the batches of this rank."""
        rows = rng.permutation(rows)
        size = self.batch_size * self.world_size
        count = len(rows) // size * size
        whole, rest = rows[:count], rows[count:]
        if self.group_by_length:
            group = np.arange(count) // (size * GROUP_STEPS)
            whole = whole[np.lexsort((self.blocks.lengths[whole], group))]
        # A rank takes every `world_size`-th row of a step, so that lengths are similar on all ranks.
        steps: list[list[int]] = whole.reshape(-1, size)[:, self.rank :: self.world_size].tolist()
        if len(rest):
            steps.append(rest[self.rank :: self.world_size].tolist() or [~int(rest[0])])
        return steps

    def identity(self) -> dict[str, Any]:
        """Return the settings for which a saved position is valid."""
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "num_batches": len(self),
            "num_rows": len(self.blocks),
            "num_tokens": int(self.blocks.lengths.sum()),
            "group_by_length": self.group_by_length,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the position in it (number of batches), and `identity`; equal on all ranks."""
        return {"epoch": self.epoch, "position": self.position, **self.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position of `state`.

        Raises:
            ValueError: If `state` is within an epoch, and data or settings have changed since it was saved.
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
    """Yields the rows of one rank in evaluation: every `world_size`-th row, without repetition.

    All ranks have the same number of batches, because a forward may contain collectives. A rank with a batch less gets
    index `~0`, a row without trained tokens. The base class matters: Lightning replaces other samplers by a
    `DistributedSampler`, which repeats rows.

    Args:
        rows: Rows of all ranks.
        batch_size: Number of rows in a batch.
        rank: Number of this rank.
        world_size: Number of ranks.

    Raises:
        ValueError: If `rank` is not below `world_size`.
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
