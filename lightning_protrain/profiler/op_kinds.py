"""Operations whose outputs selective checkpointing keeps, because they are expensive to recompute.

[Note: Products]
Matrix products, convolutions, recurrent layers and attention kernels take nearly all of a block's time, but their
outputs are less than half of the memory that autograd saves. The rest are outputs of normalizations, activation
functions, rotary embeddings and casts, which are cheap to recompute. So selective checkpointing keeps only a
block's *products*: the outputs of these expensive operations. Four kinds of operations are excluded:

- Matrix products with a small inner dimension, which are cheap for their size, such as low-rank adapters and attention
  scores.
- Operations that draw random numbers: if the recompute skipped one, all later random numbers would differ.
- Operations that write to their inputs.
- Operations under `no_grad`, which a forward may run only once, such as for logging.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten
# A matrix product is cheap if its number of columns is at least this multiple of its inner dimension.
SLENDER = 8
# Index of the left factor among the arguments; the right factor follows.
_LEFT = {_ATEN.mm: 0, _ATEN.addmm: 1, _ATEN.bmm: 0, _ATEN.baddbmm: 1}
# Schema names of expensive operations that are not in torch's `flop_registry`.
_OTHERS = frozenset(
    {
        "aten::_cudnn_rnn",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::mkldnn_rnn_layer",
        "bitsandbytes::gemm_4bit",
        "bitsandbytes::int8_mixed_scaled_mm",
        "bitsandbytes::int8_scaled_mm",
        "lightning_protrain::gemm_4bit",
    }
)


def is_product(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if selective checkpointing keeps the output of an operation, see [Note: Products].

    Args:
        func: An `OpOverload`.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    packet = func.overloadpacket
    if not torch.is_grad_enabled() or func._schema.is_mutable:
        return False
    if packet not in flop_registry and func._schema.name not in _OTHERS:
        return False
    if packet not in _LEFT:
        return not _drops(func, args, kwargs)
    left, right = args[_LEFT[packet]], args[_LEFT[packet] + 1]
    return bool(SLENDER * left.shape[-1] > right.shape[-1])


def _drops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call applies dropout."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(value)
    return False
