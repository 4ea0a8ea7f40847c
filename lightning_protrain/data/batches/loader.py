"""Makes training batches of encoded conversations; training can resume within an epoch.

The position in the epoch is the number of trained batches, which the Trainer's loops count and Lightning saves. Batches
that workers have prefetched do not count, so the number of workers may change. The loader reads the position when the
first batch is drawn: Lightning creates iterators before it restores the loops. The loader's own state has the settings
for which the position is valid. Resuming with other data, another batch size or another number of ranks is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_protrain.data.batches.encode import TOKEN_EXTRAS, Encoded
from lightning_protrain.data.batches.pack import Blocks
from lightning_protrain.data.batches.sampler import EpochSampler

_T = TypeVar("_T")
Batch = dict[str, Tensor]
# Label of a token that is not in the loss.
IGNORE_INDEX = -100
# Loss weights in batches are integers, in units of 1 / WEIGHT_UNITS: a cast of the batch to half precision changes
# only floating-point tensors.
WEIGHT_UNITS = 2**32


@dataclass(frozen=True, eq=False)
class BatchRow:
    """A row of a batch, or the two rows of a pair.

    Attributes:
        segments: Examples in the row; one example if the row is not packed, or the two sides of a pair.
        packed: True if the row gets `position_ids` rather than an attention mask.
        pair: Number of the pair among all pairs; -1 for a pair without trained tokens. None if this is no pair.
    """

    segments: tuple[Encoded, ...]
    packed: bool = False
    pair: int | None = None


class BatchRows(Dataset[BatchRow]):
    """A map-style dataset of rows; index `~i` gives row `i` without trained tokens.

    Args:
        examples: All examples.
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
        pair = None
        if self.blocks.are_pairs:
            pair = int(self.blocks[row][0]) // 2 if index >= 0 else -1
        return BatchRow(segments, bool(self.blocks.packed[row]), pair)


@dataclass(frozen=True)
class Collator:
    """Makes a batch of rows, padded on the right.

    Batches have `input_ids` and `labels`, int64 of shape [batch, length]. Labels are not shifted; untrained tokens and
    the first token of each segment have the label -100. Unpacked batches have an `attention_mask`. Packed batches have
    `position_ids`, which restart at 0 in each segment and in the padding. Media tensors of the rows are concatenated
    along the first dimension, and zero-padded in the others.

    The sides of pair `i` are rows `2 * i`, the chosen one, and `2 * i + 1`. Such batches have `pair_ids`, the number of
    each pair, and `desirable`, 1 or 0, if answers have labels; both are int64 of shape [pairs].

    Attributes:
        pad_token_id: Token id of the padding.
        max_length: Maximum length to which rounding up may extend a batch, tokens.
        multiple: Granularity of the length of a batch, tokens: the length is rounded up to a multiple of this number.
        weighted: True adds `loss_weights`, int64 of shape [batch, length] in units of 1 / WEIGHT_UNITS, 0 for
            untrained tokens. All batches of a run must have weights, or none.
    """

    pad_token_id: int
    max_length: int
    multiple: int = 8
    weighted: bool = False

    def __call__(self, rows: Sequence[BatchRow]) -> Batch:
        """Return the batch of rows that are all packed, or all unpacked."""
        packed = rows[0].packed
        assert all(row.packed == packed for row in rows)
        segments = [row.segments for row in rows]
        pairs = [row.pair for row in rows if row.pair is not None]
        if pairs:
            segments = [(segment,) for sides in segments for segment in sides]
        shape = (len(segments), self.padded(max(sum(map(len, row)) for row in segments)))
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        places = np.zeros(shape, dtype=np.int64)  # `position_ids` or `attention_mask`
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
                # No position in the padding exceeds those of a segment, as the model may have no more of them.
                places[index, start:] = np.arange(shape[1] - start) % max(map(len, row))
        names = ("input_ids", "labels", "position_ids" if packed else "attention_mask")
        batch = dict(zip(names, map(torch.from_numpy, (input_ids, labels, places)), strict=True))
        if self.weighted:
            batch["loss_weights"] = torch.from_numpy(weights)
        if pairs:
            batch["pair_ids"] = torch.tensor(pairs)
            labels_of = [row.segments[0].label for row in rows]
            if labels_of[0] is not None:
                batch["desirable"] = torch.tensor(labels_of, dtype=torch.int64)
        return batch | _stack_extras([segment for row in segments for segment in row], shape[1])

    def padded(self, longest: int) -> int:
        """Return the length of a batch whose longest row has `longest` tokens."""
        rounded = -(-longest // self.multiple) * self.multiple
        return max(longest, min(rounded, self.max_length))

    def _weights(self, segment: Encoded) -> NDArray[np.int64]:
        targets = _targets(segment)
        if segment.weights is None:
            return targets * WEIGHT_UNITS
        assert self.weighted, "the weights of an example would be lost"
        return np.where(targets, np.rint(segment.weights * float(WEIGHT_UNITS)), 0).astype(np.int64)


def is_packed(batch: Mapping[str, Tensor]) -> bool:
    """Return True if a batch has packed rows, whose segments transformers separates by their `position_ids`."""
    return "position_ids" in batch and "attention_mask" not in batch


def _targets(segment: Encoded) -> NDArray[np.bool_]:
    """Return a mask of the trained tokens without the first token, which no token predicts."""
    targets = segment.trained.copy()
    targets[:1] = False
    return targets


def _stack_extras(rows: Sequence[Encoded], length: int) -> Batch:
    """Concatenate the media tensors of all rows.

    Tensors with a value per token are padded to `length`, and rows without media get zeros. Models that read
    `cross_attention_mask` need an entry for each row in every tensor, so there all tensors get zeros.
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
    """Zero-pad tensors at the end of each dimension but the first, so that these dimensions are equal."""
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [size - have for size, have in zip(shape, part.shape[1:], strict=True)]
        padded.append(F.pad(part, [n for size in reversed(missing) for n in (0, size)]) if any(missing) else part)
    return padded


@dataclass(frozen=True)
class EpochRemainder:
    """The batches of an epoch that are still to be trained.

    Attributes:
        epoch: Epoch that determines the order of the batches.
        start: Number of the first batch.
        stop: One past the number of the last batch.
        accumulate: Number of batches in a gradient accumulation window; windows begin at multiples of it.
    """

    epoch: int
    start: int
    stop: int
    accumulate: int


def remainder_of_fit(trainer: Trainer, num_batches: int) -> EpochRemainder:
    """Return the batches of the trainer's present epoch that are still to be trained.

    Args:
        trainer: Trainer during `fit`, after it has restored its loops.
        num_batches: Number of batches of the loader in an epoch.
    """
    loop = trainer.fit_loop
    return EpochRemainder(
        # With `overfit_batches`, all epochs use the batches of epoch 0.
        epoch=0 if trainer.overfit_batches else loop.epoch_progress.current.processed,  # type: ignore[attr-defined]
        start=loop.epoch_loop.batch_progress.current.ready,
        stop=min(num_batches, int(trainer.num_training_batches)),
        accumulate=trainer.accumulate_grad_batches,
    )


@dataclass
class TokenWindow:
    """A gradient accumulation window, which normalizes the loss by its number of trained tokens on all ranks.

    Attributes:
        key: Epoch, and number of the window in the epoch.
        num_tokens: Number of trained tokens of the window on all ranks, or the sum of their weights, a float32 scalar.
        loss: Loss of this rank's batches so far: their summed loss divided by `num_tokens`.
    """

    key: tuple[int, int]
    num_tokens: Tensor
    loss: Tensor | float = 0.0

    @classmethod
    def at(cls, batch_idx: int, batch: Batch, trainer: Trainer, before: Self | None) -> Self:
        """Return the window of a batch: `before`, or a new window, for which ranks all-reduce `trained_tokens`.

        Args:
            batch_idx: Number of the batch in its epoch.
            batch: Batch of a `TrainLoader`.
            trainer: Trainer during `fit`.
            before: Window of the previous batch; None for the first batch.
        """
        key = (trainer.current_epoch, batch_idx // trainer.accumulate_grad_batches)
        if before is not None and before.key == key:
            return before
        # Clone, because `reduce` works in place.
        count = trainer.strategy.reduce(batch["trained_tokens"].clone(), reduce_op="sum").clamp(min=1).float()
        return cls(key, count / WEIGHT_UNITS if "loss_weights" in batch else count)

    def add(self, loss_sum: Tensor) -> Tensor:
        """Add a batch's summed loss on this rank; return it divided by `num_tokens`."""
        share = loss_sum / self.num_tokens
        self.loss = self.loss + share.detach()
        return share


class TrainLoader:
    """Yields this rank's training batches, from the present batch of the epoch on.

    Each batch gets `trained_tokens`, an int64 scalar: the number of trained tokens in the batches of its accumulation
    window, on this rank. With `loss_weights`, it is the sum of the weights. To count the tokens, the loader makes all
    batches of a window before it yields the first.

    Args:
        examples: All examples; worker processes read them if there are any.
        sampler: Sampler that determines the order and keeps the position.
        collate: Makes a batch of rows.
        num_workers: Number of processes that make batches; 0 makes them in this process.
        pin_memory: True puts batches into page-locked memory.
        trainer: Trainer that determines position and accumulation window. None means that each batch is a window, and
            `load_state_dict` sets the position.
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
            # An iterator draws a seed from this generator; drawing from the global generator would change dropout.
            generator=torch.Generator().manual_seed(sampler.seed),
        )

    def __len__(self) -> int:
        """Return the number of this rank's batches in a whole epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch; the position is read when the first batch is drawn."""
        rest = self._remainder()
        self.sampler.epoch, self.sampler.position = rest.epoch, rest.start
        self._upcoming[:] = self.sampler.batches(rest.epoch)[rest.start : rest.stop]
        for window in accumulation_windows(iter(self._loader), rest):
            count = count_trained(window)
            while window:
                self.sampler.position += 1
                yield {**window.popleft(), "trained_tokens": torch.tensor(count)}

    def _remainder(self) -> EpochRemainder:
        if self._trainer is not None and self._trainer.training:
            return remainder_of_fit(self._trainer, len(self))
        start = self.sampler.position if self.sampler.position < len(self) else 0
        return EpochRemainder(self.sampler.epoch, start, len(self), accumulate=1)

    # Lightning shuts down the worker processes of a loader through its attribute `_iterator`.

    @property
    def _iterator(self) -> Any:
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self._loader._iterator = iterator

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, position and the settings for which they are valid, equal on all ranks."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position of `state`.

        Raises:
            ValueError: If `state` is within an epoch, and data or settings have changed since it was saved.
        """
        self.sampler.load_state_dict(state)


def accumulation_windows(batches: Iterator[_T], rest: EpochRemainder) -> Iterator[deque[_T]]:
    """Yield the batches of each accumulation window that is still to be trained, or what is left of the first one.

    `batches` begins with batch `rest.start` of the epoch.
    """
    index = rest.start
    while index < rest.stop:
        stop = min(rest.stop, index - index % rest.accumulate + rest.accumulate)
        yield deque(islice(batches, stop - index))
        index = stop


def count_trained(window: Sequence[Batch]) -> int:
    """Return the number of trained tokens in the batches, or the sum of their weights in units of 1 / WEIGHT_UNITS.

    Of pairs, return the number of pairs: their loss is the mean over pairs. All batches have `loss_weights`, or none.
    """
    if any("pair_ids" in batch for batch in window):
        return sum(int((batch["pair_ids"] >= 0).sum()) for batch in window)
    scored = [batch["labels"][:, 1:] != IGNORE_INDEX for batch in window]
    if not any("loss_weights" in batch for batch in window):
        return sum(int(mask.sum()) for mask in scored)
    weights = [batch["loss_weights"][:, 1:][mask].sum() for batch, mask in zip(window, scored, strict=True)]
    return int(sum(weights))
