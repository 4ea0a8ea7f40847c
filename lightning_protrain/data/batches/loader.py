"""Makes the training batches: tensors from encoded conversations, resumable in the middle of an epoch.

In a `Trainer`, the progress of its loops says where an epoch continues: Lightning saves and restores it with every
checkpoint, and it counts trained batches, whatever workers have read ahead. The loader reads it when the first batch is
drawn, because Lightning makes iterators before it has loaded the checkpoint or knows the epoch. So nothing has to be
replayed, and the number of workers may change. The state of the loader adds the values that the position depends on, so
that other data, another batch size or another number of ranks are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_protrain.data.batches.encode import IGNORE_INDEX, TOKEN_EXTRAS, Encoded
from lightning_protrain.data.batches.pack import Blocks
from lightning_protrain.data.batches.sampler import EpochSampler

Batch = dict[str, Tensor]
# Weights in batches are integers in units of 1 / WEIGHT_UNITS: integers survive a cast of the batch to half precision.
WEIGHT_UNITS = 2**32


@dataclass(frozen=True, eq=False)
class BatchRow:
    """One row of a batch.

    Attributes:
        segments: Examples in the row; only one if the row is not packed.
        packed: True if the row has positions and no attention mask.
    """

    segments: tuple[Encoded, ...]
    packed: bool = False


class BatchRows(Dataset[BatchRow]):
    """The blocks of examples as rows; `~index` gives a row with nothing trained.

    Args:
        examples: Any sequence of examples.
        blocks: Groups of examples that share a row.
    """

    def __init__(self, examples: Sequence[Encoded], blocks: Blocks) -> None:
        self.examples = examples
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> BatchRow:
        row = index if index >= 0 else ~index
        segments = tuple(self.examples[int(example)] for example in self.blocks[row])
        if index < 0:
            segments = tuple(segment.untrained() for segment in segments)
        return BatchRow(segments, bool(self.blocks.packed[row]))


@dataclass(frozen=True)
class Collator:
    """Makes a batch of rows of one kind, padded on the right to the longest of them, rounded up.

    Batches have `input_ids` and `labels`, int64 of shape [batch, length]. Labels are not shifted, and -100 where
    nothing is trained and at the first token of each segment. Padded batches have an `attention_mask`. Packed batches
    have `position_ids` that begin at 0 in each segment, and again in the padding. Tensors of media of all rows are
    concatenated along their first dimension, and padded with zeros where other dimensions differ.

    Attributes:
        pad_token_id: Token id of the padding.
        max_length: Limit of the rounding.
        multiple: Lengths are rounded up to a multiple of this number.
        weighted: True if batches have `loss_weights`, int64 of shape [batch, length] in units of 1 / WEIGHT_UNITS, 0
            where nothing is trained. All batches of a run have weights, or none has.
    """

    pad_token_id: int
    max_length: int
    multiple: int = 8
    weighted: bool = False

    def __call__(self, rows: Sequence[BatchRow]) -> Batch:
        """Return the batch.

        Raises:
            ValueError: If rows of both kinds are mixed, or examples have weights although `weighted` is False.
        """
        packed = rows[0].packed
        if any(row.packed != packed for row in rows):
            raise ValueError("Packed rows and others cannot share a batch. Take batches from EpochSampler.")
        segments = [row.segments for row in rows]
        shape = (len(rows), self._length([sum(map(len, row)) for row in segments]))
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        places = np.zeros(shape, dtype=np.int64)  # positions of packed rows, mask of padded ones
        weights = np.zeros(shape, dtype=np.int64)
        for index, row in enumerate(segments):
            start = 0
            for segment in row:
                here = (index, slice(start, start + len(segment)))
                input_ids[here] = segment.input_ids
                labels[here] = np.where(_targets(segment), segment.input_ids, IGNORE_INDEX)
                weights[here] = self._weights(segment)
                places[here] = np.arange(len(segment)) if packed else 1
                start += len(segment)
            if packed:
                places[index, start:] = np.arange(shape[1] - start)
        names = ("input_ids", "labels", "position_ids" if packed else "attention_mask")
        batch = dict(zip(names, map(torch.from_numpy, (input_ids, labels, places)), strict=True))
        if self.weighted:
            batch["loss_weights"] = torch.from_numpy(weights)
        return batch | _stack_extras([segment for row in segments for segment in row], shape[1])

    def _length(self, lengths: Sequence[int]) -> int:
        longest = max(lengths)
        rounded = -(-longest // self.multiple) * self.multiple
        return max(longest, min(rounded, self.max_length))

    def _weights(self, segment: Encoded) -> NDArray[np.int64]:
        targets = _targets(segment)
        if segment.weights is None:
            return targets * WEIGHT_UNITS
        if not self.weighted:
            raise ValueError("An example has weights, which would be lost. Make the collator with weighted=True.")
        return np.where(targets, np.rint(segment.weights * float(WEIGHT_UNITS)), 0).astype(np.int64)


def is_packed(batch: Mapping[str, Tensor]) -> bool:
    """Return True if transformers distinguishes segments in the rows of a batch by their positions."""
    return "position_ids" in batch and "attention_mask" not in batch


def _targets(segment: Encoded) -> NDArray[np.bool_]:
    """Return a mask of the scored tokens: trained tokens with a token before them."""
    targets = segment.trained.copy()
    targets[:1] = False
    return targets


def _stack_extras(rows: Sequence[Encoded], length: int) -> Batch:
    """Return the tensors of the media of all rows.

    Tensors with a value per token are padded to `length` and exist for all rows. A model with cross-attention
    (`cross_attention_mask`) reads an entry of each tensor for each row: rows without images get zeros.
    """
    names = dict.fromkeys(name for row in rows for name in row.extras)
    stacked = {}
    for name in names:
        parts = [row.extras[name] for row in rows if name in row.extras]
        if name in TOKEN_EXTRAS or "cross_attention_mask" in names:
            none = parts[0].new_zeros((1, *(0,) * (parts[0].ndim - 1)))
            parts = [row.extras.get(name, none) for row in rows]
        if name in TOKEN_EXTRAS:
            parts = [F.pad(part, (0, 0) * (part.ndim - 2) + (0, length - part.shape[1])) for part in parts]
        stacked[name] = torch.cat(_same_shape(parts))
    return stacked


def _same_shape(parts: Sequence[Tensor]) -> list[Tensor]:
    """Pad all dimensions but the first at their end with zeros, until all tensors have the same shape."""
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [size - have for size, have in zip(shape, part.shape[1:], strict=True)]
        padded.append(F.pad(part, [n for size in reversed(missing) for n in (0, size)]) if any(missing) else part)
    return padded


@dataclass(frozen=True)
class EpochRemainder:
    """The rest of an epoch.

    Attributes:
        epoch: Epoch that determines the order.
        start: First batch.
        stop: One past the last batch.
        accumulate: Number of batches in an accumulation window; windows begin at its multiples.
    """

    epoch: int
    start: int
    stop: int
    accumulate: int


def remainder_of_fit(trainer: Trainer, num_batches: int) -> EpochRemainder:
    """Return the rest of the trainer's present epoch; the module docstring says when to read it.

    Args:
        trainer: Trainer that is in training.
        num_batches: Number of batches of the loader in an epoch.
    """
    loop = trainer.fit_loop
    return EpochRemainder(
        # Overfitting uses the same batches in every epoch.
        epoch=0 if trainer.overfit_batches else loop.epoch_progress.current.processed,  # type: ignore[attr-defined]
        start=loop.epoch_loop.batch_progress.current.ready,
        stop=min(num_batches, int(trainer.num_training_batches)),
        accumulate=trainer.accumulate_grad_batches,
    )


@dataclass
class TokenWindow:
    """The mean loss of an accumulation window over the batches computed so far; uses `trained_tokens` of the batches.

    Attributes:
        key: Epoch, and number of the window in it.
        num_tokens: Number of trained tokens of the window on all ranks, or the sum of their weights: a float32 scalar.
        loss: Sum of the shares of this rank's batches so far, a scalar.
    """

    key: tuple[int, int]
    num_tokens: Tensor
    loss: Tensor | float = 0.0

    @classmethod
    def at(cls, batch_idx: int, batch: Batch, trainer: Trainer, before: Self | None) -> Self:
        """Return the window of a batch: that of the previous batch, or a new one after an all-reduce of one integer.

        Args:
            batch_idx: Number of the batch in its epoch.
            batch: Batch with `trained_tokens`.
            trainer: Trainer that is in training.
            before: Window of the previous batch; None for the first batch of a fit.
        """
        key = (trainer.current_epoch, batch_idx // trainer.accumulate_grad_batches)
        if before is not None and before.key == key:
            return before
        # Clone, because the reduction is in place.
        count = trainer.strategy.reduce(batch["trained_tokens"].clone(), reduce_op="sum").clamp(min=1).float()
        return cls(key, count / WEIGHT_UNITS if "loss_weights" in batch else count)

    def add(self, loss_sum: Tensor) -> Tensor:
        """Add the summed loss of a batch on this rank; return its share of the mean loss of the window."""
        share = loss_sum / self.num_tokens
        self.loss = self.loss + share.detach()
        return share


class TrainLoader:
    """Batches of an epoch, from the present position of training on.

    Each batch has `trained_tokens`, an int64 scalar: the number of trained tokens of all batches on this rank that make
    one optimizer step. With `loss_weights`, it is their sum in units of 1 / WEIGHT_UNITS. To know it, all batches of a
    window are made before the first one is returned.

    Args:
        examples: Map-style sequence, read in worker processes if there are any.
        sampler: Sampler with the order and the state.
        collate: Makes a batch of rows.
        num_workers: Number of processes that make batches; 0 makes them in this one. Batches do not depend on it.
        pin_memory: True puts batches into page-locked memory.
        trainer: Trainer of the fit. Without one, each batch is its own window, and an epoch begins at the position of
            `load_state_dict`, else at its beginning.
    """

    def __init__(
        self,
        examples: Sequence[Encoded],
        sampler: EpochSampler,
        collate: Callable[[Sequence[BatchRow]], Batch],
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        trainer: Trainer | None = None,
    ) -> None:
        self.sampler = sampler
        self._trainer = trainer
        self._upcoming: list[list[int]] = []
        self._loader: DataLoader[BatchRow] = DataLoader(
            BatchRows(examples, sampler.blocks),
            batch_sampler=self._upcoming,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            collate_fn=collate,
            pin_memory=pin_memory,
            # Without its own generator each iterator draws from the global one, and dropout changes with it.
            generator=torch.Generator().manual_seed(sampler.seed),
        )

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch, which is determined when the first batch is drawn."""
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

    def _stretch(self) -> EpochRemainder:
        if self._trainer is not None and self._trainer.training:
            return remainder_of_fit(self._trainer, len(self))
        start = self.sampler.position if self.sampler.position < len(self) else 0
        return EpochRemainder(self.sampler.epoch, start, len(self), accumulate=1)

    # Lightning ends the worker processes of a loader through this attribute.

    @property
    def _iterator(self) -> Any:
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._loader._iterator = iterator

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the number of batches drawn from it, and the values they depend on; equal on all ranks."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position of `state`.

        Raises:
            ValueError: If `state` is in the middle of an epoch and the batches have changed since.
        """
        self.sampler.load_state_dict(state)


def count_trained(window: Sequence[Batch]) -> int:
    """Return the number of scored tokens of the batches, or the sum of their `loss_weights`.

    Args:
        window: Batches, all of them with weights in units of 1 / WEIGHT_UNITS, or none.
    """
    scored = [batch["labels"][:, 1:] != IGNORE_INDEX for batch in window]
    if not any("loss_weights" in batch for batch in window):
        return sum(int(mask.sum()) for mask in scored)
    weights = [batch["loss_weights"][:, 1:][mask].sum() for batch, mask in zip(window, scored, strict=True)]
    return int(sum(weights))
