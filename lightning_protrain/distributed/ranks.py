"""Exchange and comparison of values between ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_protrain.runtime.comm.rank_health import naming_wait


def gather(value: Any, what: str = "what the other ranks have") -> list[Any]:
    """Return the values of all ranks, by rank; every rank calls it.

    Args:
        value: Value of this rank.
        what: Name of the exchanged values, for a warning about a long wait.
    """
    if not dist.is_available() or not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    with naming_wait(what):
        dist.all_gather_object(values, value)
    return values
