"""Batches for the test networks: a few tokens, images and sounds, drawn from a generator."""

from __future__ import annotations

import torch
from torch import Tensor

VOCABULARY, LENGTH, BATCH = 40, 10, 2
IMAGE = 8  # pixels of one side
IMAGE_TOKEN, VISION_START, VIDEO_TOKEN, VISION_END = 35, 36, 37, 38

Batch = dict[str, Tensor]


def _tokens(generator: torch.Generator, low: int = 3, high: int = IMAGE_TOKEN, length: int = LENGTH) -> Tensor:
    return torch.randint(low, high, (BATCH, length), generator=generator)


def text(generator: torch.Generator) -> Batch:
    """Tokens that are predicted, the second row padded."""
    ids = _tokens(generator)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def whole_text(generator: torch.Generator) -> Batch:
    """Tokens that are predicted, nothing padded."""
    ids = _tokens(generator)
    return {"input_ids": ids, "labels": ids}


def pairs(generator: torch.Generator) -> Batch:
    """A text to read and one to write."""
    read = text(generator)
    return {**read, "labels": _tokens(generator, length=6)}


def classes(generator: torch.Generator) -> Batch:
    """One of three classes for each text."""
    return {**text(generator), "labels": torch.randint(3, (BATCH,), generator=generator)}


def token_classes(generator: torch.Generator) -> Batch:
    """One of three classes for each token."""
    return {**text(generator), "labels": torch.randint(3, (BATCH, LENGTH), generator=generator)}


def _pixels(generator: torch.Generator, size: int = IMAGE) -> Tensor:
    return torch.randn(BATCH, 3, size, size, generator=generator)


def pictures(generator: torch.Generator) -> Batch:
    """One of three classes for each image."""
    return {"pixel_values": _pixels(generator), "labels": torch.randint(3, (BATCH,), generator=generator)}


def large_pictures(generator: torch.Generator) -> Batch:
    """Return a batch of images that are large enough for networks that halve images several times."""
    return {"pixel_values": _pixels(generator, 32), "labels": torch.randint(3, (BATCH,), generator=generator)}


def captions(generator: torch.Generator) -> Batch:
    """Images and texts that belong together."""
    ids = _tokens(generator)
    ids[:, -1] = 1
    return {"input_ids": ids, "pixel_values": _pixels(generator), "return_loss": torch.tensor(True)}


def speech(generator: torch.Generator) -> Batch:
    """The spectrum of a sound, and what is said."""
    return {
        "input_features": torch.randn(BATCH, 8, 24, generator=generator),
        "labels": _tokens(generator, length=6),
    }


def illustrated(generator: torch.Generator) -> Batch:
    """Four tokens of each text stand for an image."""
    batch = text(generator)
    batch["input_ids"][:, 2:6] = IMAGE_TOKEN
    return {**batch, "labels": _without_images(batch), "pixel_values": _pixels(generator)}


def marked(generator: torch.Generator) -> Batch:
    """Return a batch of tokens with the token types that Gemma needs."""
    batch = illustrated(generator)
    return {**batch, "token_type_ids": (batch["input_ids"] == IMAGE_TOKEN).long()}


def tiled(generator: torch.Generator) -> Batch:
    """The image as rows of patches: 4 x 4 of them, of which 2 x 2 make a token."""
    batch = text(generator)
    batch["input_ids"][:, 1] = VISION_START
    batch["input_ids"][:, 2:6] = IMAGE_TOKEN
    batch["input_ids"][:, 6] = VISION_END
    return {
        **batch,
        "labels": _without_images(batch),
        "pixel_values": torch.randn(BATCH * 16, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        "mm_token_type_ids": (batch["input_ids"] == IMAGE_TOKEN).int(),
    }


def _without_images(batch: Batch) -> Tensor:
    return batch["labels"].masked_fill(batch["input_ids"] >= IMAGE_TOKEN, -100)
