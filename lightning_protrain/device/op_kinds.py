"""Operations that do most of a model's arithmetic: expensive to recompute, with few results.

[Note: Products]
Matrix products, convolutions, recurrent layers and attention kernels take nearly all of a block's time. Their results
are less than half of what autograd saves. The other half comes from norms, activation functions, rotary embeddings and
casts, which are cheap to recompute. So a block can keep only its *products* and its inputs.

Four kinds of results do not count as products:

- A matrix product over few inner dimensions: the output of a low-rank adapter is as large as the output that it is
  added to, and cheap. Attention scores that are written out are the same case.
- An operation that draws random numbers: unless it draws again in the recompute, all later draws would differ.
- An operation that writes into its inputs.
- An operation where autograd is off: a forward may run it only once, for example for a log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten
# A matrix product is cheap if it has at least this many times more columns than inner dimensions.
SLENDER = 8
# Position of the left factor among the arguments; the right factor follows.
_LEFT = {_ATEN.mm: 0, _ATEN.addmm: 1, _ATEN.bmm: 0, _ATEN.baddbmm: 1}
# Schema names of products that torch's registry of costs lacks. bitsandbytes may not be installed, so its operations
# are named too.
_OTHERS = frozenset(
    {
        "aten::_cudnn_rnn",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::mkldnn_rnn_layer",
        "bitsandbytes::gemm_4bit",
        "bitsandbytes::int8_mixed_scaled_mm",
        "bitsandbytes::int8_scaled_mm",
    }
)


def is_product(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if an operation makes a product in memory of its own, see [Note: Products].

    Args:
        func: An `OpOverload`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
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
    """Return True if a kernel applies dropout."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return False
