"""Cuts long conversations to a number of tokens, never in the middle of a marker or of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_protrain.data.examples import Encoded

# What processors give with one value per token, by the dimension of the tokens.
TOKEN_EXTRAS = {"token_type_ids": 1, "mm_token_type_ids": 1, "cross_attention_mask": 1}


class Dropped(Enum):
    """Why nothing is left of an example."""

    NOTHING_TRAINED = "no trained token lies within max_length"
    IMAGE_CUT = "an image lies beyond max_length"


def truncate(encoded: Encoded, max_length: int) -> Encoded | Dropped:
    """Keeps the first `max_length` tokens, fewer where one of `borders` would be cut in two.

    Args:
        encoded: Is returned as it is where it is short enough, whatever is trained of it.
        max_length: Tokens at most, at least 1.

    Returns:
        What is left; the reason why nothing is, where the cut takes all the trained tokens or an image. An example with
        images loses one with any cut, unless its `images_stop` says otherwise.

    Raises:
        ValueError: `max_length` below 1.
    """
    if max_length < 1:
        raise ValueError(f"max_length={max_length}: give at least 1.")
    if len(encoded) <= max_length:
        return encoded
    length = cut_before(encoded.borders, max_length)
    if encoded.images and not 0 < encoded.images_stop <= length:
        return Dropped.IMAGE_CUT
    if encoded.num_trained and not encoded.trained[1:length].any():
        return Dropped.NOTHING_TRAINED
    if length == 0:
        return Dropped.NOTHING_TRAINED
    return replace(
        encoded,
        input_ids=encoded.input_ids[:length],
        trained=encoded.trained[:length],
        weights=None if encoded.weights is None else encoded.weights[:length],
        borders=encoded.borders[encoded.borders[:, 1] <= length],
        extras=_truncate_extras(encoded.extras, length),
    )


def cut_before(borders: NDArray[np.int32], length: int) -> int:
    """The largest number of tokens up to `length` that cuts no range of `borders` in two.

    Args:
        borders: Ranges, first and one past the last, of shape [ranges, 2]; they may overlap.
        length: Tokens at most.
    """
    while True:
        cut = borders[(borders[:, 0] < length) & (length < borders[:, 1])]
        if not len(cut):
            return length
        length = int(cut[:, 0].min())


def _truncate_extras(extras: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    kept = dict(extras)
    for name in TOKEN_EXTRAS.keys() & kept.keys():
        kept[name] = kept[name][:, :length]
    return kept
