"""The work of an operation, from which simulated devices and clocks derive the time that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.flop_counter import flop_registry

from tests.support.simulated.accesses import tensors_in


def work_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> tuple[int, int]:
    """Return the FLOPs of an operation, and the bytes of all tensors that it is given and returns."""
    count = flop_registry.get(func._overloadpacket)
    flops = count(*args, **kwargs, out_val=result) if count is not None else 0
    return flops, sum(tensor.nbytes for each in (*args, *kwargs.values(), result) for tensor in tensors_in(each))
