"""Operations that do the arithmetic of a model: their results are dear to compute again, and few.

[Note: Products]
Matrix products, convolutions, recurrent layers and attention kernels take nearly all of a block's time, and what they
make is less than half of what autograd saves: the rest comes of norms, activation functions, rotations and casts, which
are cheap to compute again. So a block can keep its *products* alone, and whatever it was given.
"""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

# By name of the schema: what torch's registry of costs lacks. Those of bitsandbytes may not be there.
OTHERS = frozenset(
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


def is_product(func: Any) -> bool:
    """Whether an `OpOverload` makes a product, in memory of its own; see [Note: Products]."""
    return (func.overloadpacket in flop_registry or func._schema.name in OTHERS) and not func._schema.is_mutable
