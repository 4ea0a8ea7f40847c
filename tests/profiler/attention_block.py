"""A block of attention that is written out."""

from __future__ import annotations

from torch import Tensor, nn


class Attention(nn.Module):
    """Attention in single operations: its scores are not kept as a product, and its output is."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        return (query @ key.transpose(-1, -2)).softmax(-1) @ value
