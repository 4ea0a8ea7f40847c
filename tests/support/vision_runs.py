"""Rows with images, and short runs of the families of `vision_families` on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import torch
from PIL import Image
from torch import Tensor

from lightning_protrain import CausalLMModule, ChatDataModule
from lightning_protrain.data.batches.encode import Encoded
from lightning_protrain.data.batches.loader import Batch, BatchRow, Collator
from lightning_protrain.data.batches.vision import ImageEncoder
from lightning_protrain.data.conversation import Conversation
from tests.support.ranks import quiet_trainer
from tests.support.vision_families import VISION_FAMILIES

SIZES = ((20, 24), (40, 18), (16, 16))


@cache
def picture(size: tuple[int, int]) -> Image.Image:
    """Colours that differ from pixel to pixel."""
    pixels = torch.randint(256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(size[0]))
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def row(num_images: int, question: str = "Is it walnut?", answer: str = "maple") -> Conversation:
    """Two questions with their answers; the images come first."""
    parts = [{"type": "image"} for _ in range(num_images)]
    first = [*parts, {"type": "text", "text": question}] if parts else question
    messages = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And walnut now?"},
        {"role": "assistant", "content": f"still {answer}"},
    ]
    made: Any = {"messages": messages}
    return made | {"images": [picture(size) for size in SIZES[:num_images]]} if parts else made


def saved(name: str, folder: Path, weights: bool = False, **sizes: Any) -> str:
    """Writes the processor of a family, rows with no, one and two images, and maybe a model.

    Args:
        name: Family.
        folder: Empty.
        weights: True writes a model.
        sizes: Keys of its config that are updated, such as `text_config`.

    Returns:
        The folder, where the rows are in `rows.jsonl`.
    """
    processor, config = VISION_FAMILIES[name].make()
    processor.save_pretrained(folder)
    for number, size in enumerate(SIZES):
        picture(size).save(folder / f"{number}.png")
    lines = []
    for index in range(9):
        made: Any = row(index % 3, answer="maple " * (index % 4 + 1))
        paths = [f"{(index + number) % len(SIZES)}.png" for number in range(index % 3)]
        lines.append(json.dumps({"messages": made["messages"], **({"images": paths} if paths else {})}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    if weights:
        config |= {key: {**config[key], **changed} for key, changed in sizes.items()}
        module(config=config).model.save_pretrained(folder)
    return str(folder)


def batch(encoder: ImageEncoder, rows: Sequence[Conversation]) -> Batch:
    """One batch of these rows."""
    encoded = [encoder.encode(row, "row") for row in rows]
    assert all(isinstance(one, Encoded) for one in encoded)
    return Collator(encoder.processor.tokenizer.pad_token_id, 1000)([BatchRow((one,)) for one in encoded])  # type: ignore[arg-type]


def module(**options: Any) -> CausalLMModule:
    """A module with its model; random weights are always the same."""
    made = CausalLMModule(warmup_steps=0, learning_rate=0.01, loss_chunk_tokens=None, **options)
    torch.manual_seed(0)
    made.configure_model()
    return made


def data(folder: str, **options: Any) -> ChatDataModule:
    """The rows of `saved`, four to a batch."""
    given = {"max_length": 1000, "batch_size": 4, "cache_dir": f"{folder}/cache", **options}
    return ChatDataModule(dataset=f"{folder}/rows.jsonl", tokenizer=folder, **given)


class Losses(L.Callback):
    """Records the losses of a run."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        self.losses.append(outputs["loss"].clone())


def fit(made: CausalLMModule, rows: ChatDataModule, callbacks: Sequence[L.Callback] = (), **options: Any) -> Any:
    """Trains two steps unless told; returns the losses and the weights."""
    losses = Losses()
    settings = {"max_steps": 2, "devices": 1, "limit_val_batches": 0, "callbacks": [losses, *callbacks]}
    torch.manual_seed(0)
    quiet_trainer(**{**settings, **options}).fit(made, rows)
    return losses.losses, {name: value.clone() for name, value in made.state_dict().items()}


def inputs(batch: Batch) -> Batch:
    """What the model reads of a batch."""
    return {name: value for name, value in batch.items() if name not in ("labels", "loss_weights", "trained_tokens")}
