"""One encoded conversation, as it leaves the tokenizer and before it is cut, packed or padded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# The label of a token that is not trained.
IGNORE_INDEX = -100


def _no_borders() -> NDArray[np.int32]:
    return np.empty((0, 2), dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Encoded:
    """Tokens of a conversation and what of them is trained.

    Attributes:
        input_ids: Token ids, int32 of shape [tokens].
        trained: Whether the token is one to learn, bool of shape [tokens].
        weights: Weight of each token in the loss, float32 of shape [tokens]; None weighs all trained tokens alike.
        borders: Ranges of tokens that must not be cut in two, first and one past the last, int32 of shape [ranges, 2]:
            markers, runs of image tokens.
        extras: What the processor makes of the images, such as `pixel_values`; empty for text.
        images: Number of images.
        images_stop: One past the last token of the last image; 0 where that is unknown or there is no image.
        num_unended: Trained turns without a terminator.
        num_cut: Those of them that were cut at the maximal length.
        doubt: Why the mask may be wrong; empty: it is held against the messages.
        num_unwritten: Messages whose thoughts the chat template leaves out.

    Raises:
        ValueError: Shapes that do not fit each other.
    """

    input_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    weights: NDArray[np.float32] | None = None
    borders: NDArray[np.int32] = field(default_factory=_no_borders)
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    images: int = 0
    images_stop: int = 0
    num_unended: int = 0
    num_cut: int = 0
    doubt: str = ""
    num_unwritten: int = 0

    def __post_init__(self) -> None:
        # Made for every row, so the check is written for speed.
        shape = self.input_ids.shape
        weights = self.weights
        if self.trained.shape != shape or (weights is not None and weights.shape != shape):
            name, array = ("trained", self.trained) if self.trained.shape != shape else ("weights", weights)
            found = None if array is None else array.shape
            raise ValueError(f"{name} has the shape {found}, input_ids {shape}. Give one value per token.")
        if len(shape) != 1 or self.borders.shape[1:] != (2,):
            raise ValueError(
                f"input_ids of shape {shape} and borders of shape {self.borders.shape}: give [tokens] and [ranges, 2]."
            )

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_trained(self) -> int:
        """Number of tokens that a loss sees: the first token has nothing before it that could predict it."""
        return int(np.count_nonzero(self.trained[1:]))

    def untrained(self) -> Encoded:
        """The same tokens, none of them trained."""
        return replace(self, trained=np.zeros_like(self.trained))
