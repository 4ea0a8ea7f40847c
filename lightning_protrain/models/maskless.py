"""Causal attention of padded and packed rows and of sliding windows, without a mask of tokens x tokens.

[Note: Spans]
For `sdpa`, transformers makes a bool mask [batch, 1, tokens, tokens] if a row is padded or packed, or longer than the
sliding window, and PyTorch adds a float copy in every layer: 256 MiB and 512 MiB a row at 16,384 tokens in bfloat16.
The implementation `NAME` makes `RowSpans` instead: rows are cut where a document or the text after left padding begins,
and each span is attended to alone, with `is_causal=True`. Padding on the right needs no cut, as no token sees a token
to its right. In a span longer than the window, blocks of queries share one mask [BLOCK, BLOCK + window].

Only masks whose parts are in `_PARTS` are replaced. Others are made as for `sdpa`: with a key-value cache, padding
inside rows, bidirectional images, functions of a user, and in models that are compiled whole.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils.import_utils import is_tracing

# Name among the attention implementations of transformers. Configs are saved without the name.
NAME = "sdpa_without_masks"
# Queries that share a mask where a window slides.
BLOCK = 2048
# Functions of transformers' masking_utils.py that make the parts of a replaceable mask.
_PARTS = {"causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function"}
# Kernels read masks faster, or only, if rows and slices of it begin at multiples of this number of elements.
_ALIGNED = 16


@dataclass(frozen=True, eq=False)
class RowSpans:
    """The spans of rows, which transformers passes to attention in place of a mask; see [Note: Spans].

    Attributes:
        lengths: Numbers of tokens of the spans of each row; their sum is the length of the row.
        window: Number of latest tokens, itself included, that a token sees; None means all of its span.
        band: Mask of a block of queries in a sliding window, float [BLOCK, left + BLOCK], where `left` is the number of
            tokens before the block that are read; None without a window.
    """

    lengths: tuple[tuple[int, ...], ...]
    window: int | None = None
    band: Tensor | None = None

    # Without this, a compiled block would be compiled again for every cut of the rows.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, module: nn.Module, given: tuple[Tensor, Tensor, Tensor], options: Mapping[str, Any]) -> Tensor:
        """Return the result of attention, [batch, tokens, heads, width].

        Args:
            module: The attention layer.
            given: Query, key and value, [batch, heads, tokens, width].
            options: Further arguments of `sdpa_attention_forward`.
        """
        batch, _, tokens, _ = given[0].shape
        if len(set(self.lengths)) == 1:  # Equal rows are attended to together.
            rows = [(self.lengths[0], given)]
        else:
            rows = list(zip(self.lengths, zip(*(tensor.split(1) for tensor in given), strict=True), strict=True))
        parts: list[Tensor] = []
        for lengths, row in rows:
            for query, key, value in zip(*(tensor.split(lengths, 2) for tensor in row), strict=True):
                if self.window is None or query.shape[2] <= self.window:
                    parts.append(sdpa_attention_forward(module, query, key, value, None, **options)[0])
                else:
                    parts += self._blocks(query, key, value, options)
        return torch.cat(parts, 1).reshape(batch, tokens, *parts[0].shape[2:])

    def _blocks(self, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]) -> Iterator[Tensor]:
        """Yield the result of attention for each block of queries of a span in a sliding window."""
        assert self.band is not None
        # Under autocast, PyTorch casts query and key to the dtype of the mask.
        band = self.band if torch.is_autocast_enabled(query.device.type) else self.band.to(query.dtype)
        tokens, left = query.shape[2], band.shape[1] - BLOCK
        starts = range(0, tokens, BLOCK)
        bounds = [(max(0, start - left), min(tokens, start + BLOCK)) for start in starts]
        # Fused kernels on CUDA do not share heads if there is a mask.
        repeated = (repeat_kv(part, query.shape[1] // part.shape[1]) for part in (key, value))
        blocks = zip(starts, query.split(BLOCK, 2), *(_Slices.apply(part, bounds) for part in repeated), strict=True)
        for start, queries, keys, values in blocks:
            skipped = max(0, left - start)
            mask = band[: queries.shape[2], skipped : skipped + keys.shape[2]].expand(1, 1, -1, -1)
            dropout, scale = options.get("dropout", 0.0), options.get("scaling")
            result = F.scaled_dot_product_attention(queries, keys, values, mask, dropout_p=dropout, scale=scale)
            yield result.transpose(1, 2)


class _Slices(torch.autograd.Function):
    """Overlapping slices of tokens. PyTorch's own backward would write a gradient of all tokens for each of them."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, bounds: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        ctx.bounds, ctx.tokens = bounds, whole.shape[2]
        return tuple(whole[:, :, first:stop] for first, stop in bounds)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        batch, heads, _, width = gradients[0].shape
        total = gradients[0].new_zeros(batch, heads, ctx.tokens, width)
        for (first, stop), gradient in zip(ctx.bounds, gradients, strict=True):
            total[:, :, first:stop] += gradient
        return total, None


def _band(window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a mask of queries and keys, the first of which is `left` tokens before the first query."""
    left = -(-(window - 1) // _ALIGNED) * _ALIGNED
    if torch.is_autocast_enabled(device.type):  # Autocast would cast the mask in each call.
        dtype = torch.get_autocast_dtype(device.type)
    hidden = torch.full((BLOCK, left + BLOCK), -math.inf, dtype=dtype, device=device)
    return hidden.triu(left + 1).add_(hidden.tril(left - window))


def _parts(function: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the names of the functions that have made the parts of a mask function, and their variables."""
    if not inspect.isfunction(function):
        yield repr(function), {}
        return
    name, variables = function.__qualname__.partition(".")[0], inspect.getclosurevars(function).nonlocals
    if name == "and_masks":
        for part in variables["mask_functions"]:
            yield from _parts(part)
    elif name == "remap_positions_for_packed_sequence":  # Differences of positions in a document do not change.
        yield from _parts(variables["mask_function"])
    else:
        yield name, variables


def _cuts(rows: int, attention_mask: Tensor | None, documents: Tensor | None) -> list[list[int]] | None:
    """Return the first token of each span of each row; None if a row has padding between tokens."""
    cuts = [[0] for _ in range(rows)]
    # On the host, which waits for the device once.
    if documents is not None:
        begins = documents.cpu().diff(dim=-1).expand(rows, -1) != 0
    elif attention_mask is not None:
        text = attention_mask.cpu()
        begins = text[:, 1:] & ~text[:, :-1]
        if (begins.sum(-1) + text[:, 0] > 1).any():
            return None
    else:
        return cuts
    for row, before in begins.nonzero().tolist():
        cuts[row].append(before + 1)
    return cuts


def spans_or_mask(**given: Any) -> RowSpans | Tensor | None:
    """Return spans if a mask can be replaced by them, None for a plain causal mask, and else the mask of `sdpa`.

    Args:
        given: The arguments that transformers passes to a mask interface, such as `sdpa_mask`.
    """
    if is_tracing(given["attention_mask"]):
        return sdpa_mask(**given)
    parts = dict(_parts(given["mask_function"]))
    documents = parts.get("packed_sequence_mask_function", {}).get("packed_sequence_mask")
    rows, tokens = given["batch_size"], given["q_length"]
    cached = given["kv_length"] != tokens or not isinstance(given["q_offset"], int) or given["q_offset"]
    # Without packing, a caller that does not allow `is_causal` needs a tensor.
    skips = given["allow_is_causal_skip"] or documents is not None
    if cached or not skips or not parts.keys() <= _PARTS or is_tracing(documents):
        return sdpa_mask(**given)
    cuts = _cuts(rows, given["attention_mask"], documents)
    if cuts is None:
        return sdpa_mask(**given)
    lengths = tuple(tuple(stop - first for first, stop in pairwise([*cut, tokens])) for cut in cuts)
    window = parts.get("sliding_window_overlay", {}).get("sliding_window")
    if window is None or max(map(max, lengths)) <= window:
        return None if max(map(len, lengths)) == 1 else RowSpans(lengths)
    return RowSpans(lengths, window, _band(window, given["dtype"], torch.device(given["device"])))


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention as `sdpa` does, span by span if `attention_mask` is `RowSpans`."""
    if isinstance(attention_mask, RowSpans):
        return attention_mask.attend(module, (query, key, value), options), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, spans_or_mask)
