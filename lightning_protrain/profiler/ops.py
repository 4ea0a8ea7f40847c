"""Costs of operations; corrections of PyTorch's meta kernels, and FLOP formulas that PyTorch lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the FLOPs of one operation, two for a multiply-add; 0 for operations limited by memory bandwidth.

    Args:
        func: An `OpOverload`.
        args: Positional arguments, with real or meta tensors.
        kwargs: Keyword arguments.
        result: Result of the operation.
    """
    own = _FORMULAS.get(func) or PRODUCTS_OF_CODES.get(func._schema.name)
    if own is not None:
        return own(*args)
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=result)


def operation_cost(
    func: Any, flops: int, given: Sequence[Tensor], made: Sequence[Tensor]
) -> tuple[int, int, str] | None:
    """Return the cost of an operation: FLOPs, bytes read and written, dtype; None for views and without tensors.

    Args:
        func: An `OpOverload`.
        flops: Result of `count_flops`.
        given: Input tensors.
        made: Output tensors.
    """
    tensors = [*given, *made]
    if func.is_view or not tensors:
        return None
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    of = next((tensor for tensor in given if tensor.is_floating_point()), tensors[0]) if flops else tensors[0]
    if flops and func._schema.name in PRODUCTS_OF_CODES:  # Inputs of quantised products may be integers and scales.
        of = made[0]
    return flops, nbytes, str(of.dtype).removeprefix("torch.")


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in arguments or results of an operation; faster than PyTorch's functions for trees."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for inner in value for tensor in tensors_in(inner)]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return arguments or results of an operation with the tensors replaced by what `function` returns for them."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)([map_tensors(function, inner) for inner in value])
    if type(value) is dict:
        return {key: map_tensors(function, inner) for key, inner in value.items()}
    return value


def written_tensors(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation changes in place."""
    if not func._schema.is_mutable:
        return []
    tensors = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            tensors += tensors_in(value)
    return tensors


def mask_positions(indices: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Replace every mask in `indices` by the positions of its true elements."""
    positions: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            positions.extend(index.nonzero(as_tuple=True))
        else:
            positions.append(index)
    return positions


def _grouped_mm(
    first: Tensor, second: Tensor, offsets: Tensor | None = None, bias: Tensor | None = None, dtype: Any = None
) -> Tensor:
    """Return the result of a grouped product; the meta kernel supports only bfloat16."""
    shape = [first.shape[-2], second.shape[-1]]
    if first.dim() == second.dim():
        groups = first.shape[0] if offsets is None else offsets.shape[0]
        shape = [groups, *shape]
    return first.new_empty(shape, dtype=dtype or first.dtype)


def _normalization(operation: Any, tensor: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return the result of a normalization on the CPU, whose statistics have other dtypes than in meta kernels.

    Their dtype is that of the weights or, without weights, of the input.
    """
    output, *statistics = operation(tensor, *rest)
    if operation is _ATEN.native_batch_norm.default and not rest[4]:  # In evaluation.
        statistics = [statistic.new_empty(0) for statistic in statistics]
    dtype = next((weight.dtype for weight in rest if isinstance(weight, Tensor)), tensor.dtype)
    return (output, *(statistic.to(dtype) for statistic in statistics))


def _group_norm_backward(gradient: Tensor, tensor: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Return the gradient of the input in the input's dtype; the meta kernel uses the dtype of the weights."""
    of_input, *of_weights = _ATEN.native_group_norm_backward.default(gradient, tensor, *rest)
    return (of_input.to(tensor.dtype), *of_weights)


def _rnn_layer(*args: Any) -> tuple[Tensor, ...]:
    """Return the result of an RNN layer; run it on zeros to find the size of oneDNN's workspace."""
    zeros = map_tensors(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), args)
    workspace = _ATEN.mkldnn_rnn_layer.default(*zeros)[-1]
    *outputs, empty = _ATEN.mkldnn_rnn_layer.default(*args)
    return (*outputs, empty.new_empty(workspace.shape))


def _rnn_layer_backward(*args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of an RNN layer, float32.

    In the meta kernel those of its two biases share memory, and in torch 2.11 they have the dtype of the weights.
    """
    gradients = _ATEN.mkldnn_rnn_layer_backward.default(*args)
    *outputs, second, hidden, cell = (gradient.float() for gradient in gradients)
    return (*outputs, torch.empty_like(second), hidden, cell)


def _loss(operation: Any, tensor: Tensor, target: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Return a loss in a storage of the size of its summands, which the CPU kernel allocates."""
    output: Tensor = operation(tensor, target, *rest, **options)
    if output.dim():
        return output
    return output.new_empty(torch.broadcast_shapes(tensor.shape, target.shape)).as_strided((), ())


def _grouped_mm_flops(first: Tensor, second: Tensor, *rest: Any) -> int:
    """Return the FLOPs of a grouped product; a 2-D factor has rows or columns of all groups."""
    stacked = first.dim() == 3 and second.dim() == 3
    return 2 * (first.shape[0] if stacked else 1) * first.shape[-2] * first.shape[-1] * second.shape[-1]


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> int:
    """Return the FLOPs of scores and outputs; key and value may have fewer heads than the query."""
    num_scores = query.shape[:-1].numel() * key.shape[-2]
    return 2 * num_scores * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> int:
    """Return the FLOPs of the scores again, and of the gradients of weights, value, query and key."""
    num_scores = query.shape[:-1].numel() * key.shape[-2]
    return 2 * num_scores * (3 * query.shape[-1] + 2 * value.shape[-1])


def _rnn_flops(tensor: Tensor, input_weight: Tensor, hidden_weight: Tensor, *rest: Any) -> int:
    return 2 * tensor.shape[0] * tensor.shape[1] * (input_weight.numel() + hidden_weight.numel())


def _cudnn_rnn_flops(tensor: Tensor, weights: Sequence[Tensor], *rest: Any) -> int:
    """Return the FLOPs of all layers and directions; `tensor` may be a packed batch."""
    return 2 * (tensor.numel() // tensor.shape[-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _gemm_4bit_flops(tensor: Tensor, codes: Tensor, shape: Sequence[int], *rest: Any) -> int:
    """Return the FLOPs of a product with a packed weight, whose unpacked shape is `shape`."""
    return 2 * tensor.numel() * shape[0]


def _gemm_8bit_flops(tensor: Tensor, codes: Tensor, *rest: Any) -> int:
    return 2 * tensor.numel() * codes.shape[0]


_NORMALIZATIONS = (
    _ATEN.native_layer_norm.default,
    _ATEN.native_group_norm.default,
    _ATEN.native_batch_norm.default,
    _ATEN._native_batch_norm_legit.default,
    _ATEN._native_batch_norm_legit.no_stats,
)
_LOSSES = (
    _ATEN.mse_loss.default,
    _ATEN.smooth_l1_loss.default,
    _ATEN.soft_margin_loss.default,
    _ATEN.binary_cross_entropy.default,
)
# Functions that run on meta tensors in place of operations whose meta kernel is wrong.
SHAPE_RULES: dict[Any, Callable[..., Any]] = {
    _ATEN._grouped_mm.default: _grouped_mm,
    _ATEN.mkldnn_rnn_layer.default: _rnn_layer,
    _ATEN.mkldnn_rnn_layer_backward.default: _rnn_layer_backward,
    _ATEN.native_group_norm_backward.default: _group_norm_backward,
    **{operation: partial(_loss, operation) for operation in _LOSSES},
    **{operation: partial(_normalization, operation) for operation in _NORMALIZATIONS},
}
# Operations whose meta kernel is wrong only for the CPU.
CPU_ONLY = frozenset([*_LOSSES, *_NORMALIZATIONS])
_ATTENTION = (
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)
# FLOP formulas that the registry of torch 2.11 lacks, or refuses for grouped heads.
_FORMULAS: dict[Any, Callable[..., int]] = {
    _ATEN._grouped_mm.default: _grouped_mm_flops,
    **{getattr(_ATEN, name).default: _attention_flops for name in _ATTENTION},
    **{getattr(_ATEN, f"{name}_backward").default: _attention_backward_flops for name in _ATTENTION},
    # The backward of a recurrent layer has two products for each product of the forward.
    _ATEN.mkldnn_rnn_layer.default: _rnn_flops,
    _ATEN.mkldnn_rnn_layer_backward.default: lambda *args: 2 * _rnn_flops(*args),
    _ATEN._cudnn_rnn.default: _cudnn_rnn_flops,
    _ATEN._cudnn_rnn_backward.default: lambda *args: 2 * _cudnn_rnn_flops(*args),
}
# FLOP formulas of products with quantised weights: operations of bitsandbytes, which may not be installed. They compute
# in the dtype of the result.
PRODUCTS_OF_CODES: dict[str, Callable[..., int]] = {
    "bitsandbytes::gemm_4bit": _gemm_4bit_flops,
    "bitsandbytes::int8_scaled_mm": _gemm_8bit_flops,
    "bitsandbytes::int8_mixed_scaled_mm": lambda tensor, *codes: _gemm_8bit_flops(*codes),
    "lightning_protrain::gemm_4bit": _gemm_4bit_flops,  # in plans without bitsandbytes
}
