"""What torch does not know about single operations: shapes that its meta kernels get wrong, costs that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

_ATEN = torch.ops.aten


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Floating-point operations of one operation, two for a multiplication with an addition; 0 for cheap ones.

    Args:
        func: An `OpOverload`.
        args: Its arguments, with real or meta tensors.
        kwargs: Its keyword arguments.
        result: What it gave.
    """
    own = _FORMULAS.get(func)
    if own is not None:
        return own(*args)
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


def _grouped_mm(
    first: Tensor, second: Tensor, offsets: Tensor | None = None, bias: Tensor | None = None, dtype: Any = None
) -> Tensor:
    """Products of groups of rows or columns; the meta kernel refuses all dtypes but bfloat16."""
    shape = [first.shape[-2], second.shape[-1]]
    if first.dim() == second.dim():
        groups = first.shape[0] if offsets is None else offsets.shape[0]
        shape = [groups, *shape]
    return first.new_empty(shape, dtype=dtype or first.dtype)


def _normalization(operation: Any, tensor: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The CPU keeps statistics in the dtype of the weights or, without any, of the input; meta kernels differ."""
    output, *statistics = operation(tensor, *rest)
    dtype = next((weight.dtype for weight in rest if isinstance(weight, Tensor)), tensor.dtype)
    return (output, *(statistic.to(dtype) for statistic in statistics))


def _rnn_layer(*args: Any) -> tuple[Tensor, ...]:
    """Only oneDNN knows how large its workspace is, so one layer is run on zeros to see it."""
    zeros = tree_map_only(Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), args)
    workspace = _ATEN.mkldnn_rnn_layer.default(*zeros)[-1]
    *outputs, empty = _ATEN.mkldnn_rnn_layer.default(*args)
    return (*outputs, empty.new_empty(workspace.shape))


def _grouped_mm_flops(first: Tensor, second: Tensor, *rest: Any) -> int:
    """Every row goes through one group, or every column; only two stacks have a product for each pair."""
    stacked = first.dim() == 3 and second.dim() == 3
    return 2 * (first.shape[0] if stacked else 1) * first.shape[-2] * first.shape[-1] * second.shape[-1]


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _rnn_flops(tensor: Tensor, input_weight: Tensor, hidden_weight: Tensor, *rest: Any) -> int:
    return 2 * tensor.shape[0] * tensor.shape[1] * (input_weight.numel() + hidden_weight.numel())


_NORMALIZATIONS = (
    _ATEN.native_layer_norm.default,
    _ATEN.native_group_norm.default,
    _ATEN.native_batch_norm.default,
    _ATEN._native_batch_norm_legit.default,
    _ATEN._native_batch_norm_legit.no_stats,
)
# What gives the result of an operation on meta tensors as the CPU would, where its meta kernel does not.
SHAPE_RULES: dict[Any, Callable[..., Any]] = {
    _ATEN._grouped_mm.default: _grouped_mm,
    _ATEN.mkldnn_rnn_layer.default: _rnn_layer,
    **{operation: partial(_normalization, operation) for operation in _NORMALIZATIONS},
}
# What torch's registry of costs lacks.
_FORMULAS: dict[Any, Callable[..., int]] = {
    _ATEN._grouped_mm.default: _grouped_mm_flops,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: _attention_flops,
    _ATEN.mkldnn_rnn_layer.default: _rnn_flops,
}
