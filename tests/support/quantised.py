"""Models whose linear layers are those of bitsandbytes, with adapters to train beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from tests.support.models import VOCABULARY, ParityModule

# A multiple of 64: the smallest block that shares one scale.
WIDTH = 64


def linear_4bit(quant_type: str, nested: bool, width: int = WIDTH, bias: bool = True) -> bnb.nn.Linear4bit:
    """A square 4-bit layer that is not quantised yet."""
    return bnb.nn.Linear4bit(width, width, bias=bias, quant_type=quant_type, compress_statistics=nested)


def linear_8bit(width: int = WIDTH, bias: bool = True, threshold: float = 0.0) -> bnb.nn.Linear8bitLt:
    """A square 8-bit layer that is not quantised yet."""
    return bnb.nn.Linear8bitLt(width, width, bias=bias, has_fp16_weights=False, threshold=threshold)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "nf4": lambda: linear_4bit("nf4", nested=False),
    "nf4 nested": lambda: linear_4bit("nf4", nested=True),
    "fp4 nested": lambda: linear_4bit("fp4", nested=True),
    "int8": linear_8bit,
    "int8 with outliers": lambda: linear_8bit(threshold=1.0),
}


class AdaptedBlock(nn.Module):
    """A residual block of a frozen quantised layer and a trained adapter: (..., WIDTH) to (..., WIDTH)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.base = layer.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        return hidden + torch.tanh(self.base(normed)) + self.up(self.down(normed))


class QuantisedNet(nn.Module):
    """Blocks of one kind of layer between an input and a head in float32: (ROWS, 8) to (ROWS, 1)."""

    def __init__(self, kind: str, num_blocks: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(AdaptedBlock(LAYERS[kind]()) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.inp(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class QuantisedLanguageModel(nn.Module):
    """Quantised blocks between an embedding and a head: (B, S) tokens to (B, S, V) logits."""

    def __init__(self, kind: str, embedding: nn.Module | None = None, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = embedding or nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(AdaptedBlock(LAYERS[kind]()) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def build(kind: str, **options: Any) -> QuantisedNet:
    """A quantised net, always the same."""
    torch.manual_seed(0)
    return QuantisedNet(kind, **options).to("cpu")  # which is when bitsandbytes quantises


def module(kind: str, embedding: Callable[[], nn.Module] | None = None) -> ParityModule:
    """A Lightning module of it, not quantised yet, always the same."""
    torch.manual_seed(0)
    return ParityModule(QuantisedLanguageModel(kind, embedding() if embedding else None))
