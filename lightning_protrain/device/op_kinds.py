"""Operations that do the arithmetic of a model: their results are dear to compute again, and few.

[Note: Products]
Matrix products, convolutions, recurrent layers and attention kernels take nearly all of a block's time, and what they
make is less than half of what autograd saves: the rest comes of norms, activation functions, rotations and casts, which
are cheap to compute again. So a block can keep its *products* alone, and whatever it was given. A matrix product over
few inner dimensions is none: what a low-rank adapter adds is as large as what it is added to, and cheap; so are the
scores of an attention that is written out. Nor is what draws random numbers: whatever draws after it would get others
if it did not draw again. Nor is what is made where autograd is off: a forward may do that once only, for a log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten
# A matrix product of so many times more columns than inner dimensions, or more, is cheap.
SLENDER = 8
# Where the left factor stands among the arguments; the right one follows.
_LEFT = {_ATEN.mm: 0, _ATEN.addmm: 1, _ATEN.bmm: 0, _ATEN.baddbmm: 1}
# By name of the schema: what torch's registry of costs lacks. Those of bitsandbytes may not be there.
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
    """Whether an operation makes a product, in memory of its own; see [Note: Products].

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
    """Whether a kernel drops elements at random."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return False
