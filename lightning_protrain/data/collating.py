"""Batches of tensors from encoded conversations: padded rows with an attention mask, packed ones with positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_protrain.data.examples import IGNORE_INDEX, Encoded
from lightning_protrain.data.packing import Blocks
from lightning_protrain.data.truncation import TOKEN_EXTRAS

Batch = dict[str, Tensor]
# Weights in batches are counted in these parts of one: integers survive a cast of the batch to half precision.
WEIGHT_UNITS = 2**32


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a batch.

    Attributes:
        segments: The examples in it; just one where the row is not packed.
        packed: Whether the row has positions and no attention mask.
    """

    segments: tuple[Encoded, ...]
    packed: bool = False


class Rows(Dataset[Row]):
    """The blocks of examples as rows; `~index` gives a row with nothing trained.

    Args:
        examples: Any sequence of examples.
        blocks: Which of them share a row.
    """

    def __init__(self, examples: Sequence[Encoded], blocks: Blocks) -> None:
        self.examples = examples
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Row:
        row = index if index >= 0 else ~index
        segments = tuple(self.examples[int(example)] for example in self.blocks[row])
        if index < 0:
            segments = tuple(segment.untrained() for segment in segments)
        return Row(segments, bool(self.blocks.packed[row]))


@dataclass(frozen=True)
class Collator:
    """Makes a batch of rows of one kind, padded on the right to the longest of them, rounded up.

    Batches have `input_ids` and `labels` (not shifted, -100 where nothing is trained, at the first token of each
    segment too), int64 of shape [batch, length]; padded ones `attention_mask`, packed ones `position_ids` that begin at
    0 in each segment, and once more in the padding. Tensors of images follow as the processor gives them, one after the
    other along their first dimension, filled up with zeros where the others differ.

    Attributes:
        pad_token_id: What stands at padded places.
        max_length: The rounding stops here.
        multiple: Lengths are rounded up to a multiple of it.
        weighted: Whether batches have `loss_weights`, int64 of shape [batch, length] in units of 1 / WEIGHT_UNITS, 0
            where nothing is trained. All batches of a run have them or none.
    """

    pad_token_id: int
    max_length: int
    multiple: int = 8
    weighted: bool = False

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """The batch.

        Raises:
            ValueError: Rows of both kinds, or examples with weights although `weighted` is False.
        """
        packed = rows[0].packed
        if any(row.packed != packed for row in rows):
            raise ValueError("Packed rows and others cannot share a batch. Take batches from EpochSampler.")
        segments = [row.segments for row in rows]
        shape = (len(rows), self._length([sum(map(len, row)) for row in segments]))
        input_ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        places = np.zeros(shape, dtype=np.int64)  # positions of packed rows, the mask of others
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
    """Whether transformers tells segments in the rows of a batch by their positions."""
    return "position_ids" in batch and "attention_mask" not in batch


def _targets(segment: Encoded) -> NDArray[np.bool_]:
    """What is scored: trained tokens with a token before them."""
    targets = segment.trained.copy()
    targets[:1] = False
    return targets


def _stack_extras(rows: Sequence[Encoded], length: int) -> Batch:
    """The tensors of images of all rows; those with a value per token are padded to `length` and there for all rows."""
    names = dict.fromkeys(name for row in rows for name in row.extras)
    stacked = {}
    for name in names:
        parts = [row.extras[name] for row in rows if name in row.extras]
        if name in TOKEN_EXTRAS:
            none = parts[0].new_zeros((1, 0, *parts[0].shape[2:]))
            parts = [row.extras.get(name, none) for row in rows]
            parts = [F.pad(part, (0, 0) * (part.ndim - 2) + (0, length - part.shape[1])) for part in parts]
        stacked[name] = torch.cat(_same_shape(parts))
    return stacked


def _same_shape(parts: Sequence[Tensor]) -> list[Tensor]:
    """Zeros are added after the end of every dimension but the first, until all are alike."""
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [size - have for size, have in zip(shape, part.shape[1:], strict=True)]
        padded.append(F.pad(part, [n for size in reversed(missing) for n in (0, size)]) if any(missing) else part)
    return padded
