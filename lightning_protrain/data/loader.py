"""The batches of training: resumable in mid-epoch, with the trained tokens of the accumulation window in each batch.

[Note: Position]
In a `Trainer`, where an epoch goes on is what the progress of its loops says: Lightning saves and restores it with
every checkpoint, and it counts batches that were trained, whatever workers have read ahead. It is asked when the first
batch is drawn, and not before: Lightning makes iterators before it has read the checkpoint, or knows the epoch. So
nothing has to be replayed, and the number of workers may change. The state of the loader adds what the position
depends on, so that other data, another batch size or another number of ranks are refused instead of mixed up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_protrain.data.collating import WEIGHT_UNITS, Batch, Row, Rows
from lightning_protrain.data.examples import IGNORE_INDEX, Encoded
from lightning_protrain.data.sampling import EpochSampler


@dataclass(frozen=True)
class Stretch:
    """What is left of an epoch.

    Attributes:
        epoch: The order is that of this epoch.
        start: First batch.
        stop: One past the last batch.
        accumulate: Batches of an accumulation window; windows begin at its multiples.
    """

    epoch: int
    start: int
    stop: int
    accumulate: int


def stretch_of_fit(trainer: Trainer, num_batches: int) -> Stretch:
    """What is left of the epoch that the trainer is in, see [Note: Position].

    Args:
        trainer: In training.
        num_batches: Batches that the loader has in an epoch.
    """
    loop = trainer.fit_loop
    return Stretch(
        # To overfit is to see the same batches in every epoch.
        epoch=0 if trainer.overfit_batches else loop.epoch_progress.current.processed,  # type: ignore[attr-defined]
        start=loop.epoch_loop.batch_progress.current.ready,
        stop=min(num_batches, int(trainer.num_training_batches)),
        accumulate=trainer.accumulate_grad_batches,
    )


@dataclass
class TokenWindow:
    """The mean loss of an accumulation window, as far as its batches are computed: the other end of `trained_tokens`.

    Attributes:
        key: Epoch, and number of the window in it.
        num_tokens: Trained tokens of the window on all ranks, or the sum of their weights: a float32 scalar.
        loss: Sum of the shares of the batches of this rank so far, a scalar.
    """

    key: tuple[int, int]
    num_tokens: Tensor
    loss: Tensor | float = 0.0

    @classmethod
    def at(cls, batch_idx: int, batch: Batch, trainer: Trainer, before: Self | None) -> Self:
        """The window of a batch: that of the batch before, or a new one, which takes one all-reduce of an integer.

        Args:
            batch_idx: Number of the batch in its epoch.
            batch: With `trained_tokens`.
            trainer: In training.
            before: The window of the batch before; None for the first batch of a fit.
        """
        key = (trainer.current_epoch, batch_idx // trainer.accumulate_grad_batches)
        if before is not None and before.key == key:
            return before
        # A clone: the reduction is in place.
        count = trainer.strategy.reduce(batch["trained_tokens"].clone(), reduce_op="sum").clamp(min=1).float()
        return cls(key, count / WEIGHT_UNITS if "loss_weights" in batch else count)

    def add(self, loss_sum: Tensor) -> Tensor:
        """Adds the summed loss of a batch of this rank, and gives its share in the mean loss of the window."""
        share = loss_sum / self.num_tokens
        self.loss = self.loss + share.detach()
        return share


class TrainLoader:
    """Batches of an epoch, from where training stands.

    Each batch has `trained_tokens`, an int64 scalar: the trained tokens of all batches on this rank that make one
    optimizer step; where there are `loss_weights`, the sum of those in units of 1 / WEIGHT_UNITS. To know it, the
    batches of a window are made before the first of them is given.

    Args:
        examples: A map-style sequence, read in worker processes where there are any.
        sampler: The order; holds the state.
        collate: Makes a batch of rows.
        num_workers: Processes that make batches; 0 makes them in this one. Batches do not depend on it.
        pin_memory: Whether batches are put into page-locked memory.
        trainer: Whose fit these batches are for. Without one, each batch is a window, and an epoch begins where
            `load_state_dict` says, else at its begin.
    """

    def __init__(
        self,
        examples: Sequence[Encoded],
        sampler: EpochSampler,
        collate: Callable[[Sequence[Row]], Batch],
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        trainer: Trainer | None = None,
    ) -> None:
        self.sampler = sampler
        self._trainer = trainer
        self._upcoming: list[list[int]] = []
        self._loader: DataLoader[Row] = DataLoader(
            Rows(examples, sampler.blocks),
            batch_sampler=self._upcoming,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            collate_fn=collate,
            pin_memory=pin_memory,
            # Without its own generator each iterator draws from the global one, and dropout changes with it.
            generator=torch.Generator().manual_seed(sampler.seed),
        )

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        """The batches that are left of the epoch, which is looked up when the first is drawn."""
        stretch = self._stretch()
        self.sampler.epoch, self.sampler.position = stretch.epoch, stretch.start
        self._upcoming[:] = self.sampler.batches(stretch.epoch)[stretch.start : stretch.stop]
        batches = iter(self._loader)
        index = stretch.start
        while index < stretch.stop:
            window_stop = min(stretch.stop, index - index % stretch.accumulate + stretch.accumulate)
            window = deque(islice(batches, window_stop - index))
            count = count_trained(window)
            while window:
                index += 1
                self.sampler.position = index
                yield {**window.popleft(), "trained_tokens": torch.tensor(count)}

    def _stretch(self) -> Stretch:
        if self._trainer is not None and self._trainer.training:
            return stretch_of_fit(self._trainer, len(self))
        start = self.sampler.position if self.sampler.position < len(self) else 0
        return Stretch(self.sampler.epoch, start, len(self), accumulate=1)

    # Lightning ends worker processes by way of this attribute of loaders.

    @property
    def _iterator(self) -> Any:
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._loader._iterator = iterator

    def state_dict(self) -> dict[str, Any]:
        """Epoch, batches given in it, and what these depend on: plain numbers, alike on all ranks."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was taken.

        Raises:
            ValueError: In the middle of an epoch, where the batches are no longer those of `state`.
        """
        self.sampler.load_state_dict(state)


def count_trained(window: Sequence[Batch]) -> int:
    """Tokens that the loss of these batches scores, or the sum of their `loss_weights` in units of 1 / WEIGHT_UNITS.

    Args:
        window: Batches, all of them with weights or none.
    """
    scored = [batch["labels"][:, 1:] != IGNORE_INDEX for batch in window]
    if not any("loss_weights" in batch for batch in window):
        return sum(int(mask.sum()) for mask in scored)
    weights = [batch["loss_weights"][:, 1:][mask].sum() for batch, mask in zip(window, scored, strict=True)]
    return int(sum(weights))
