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


def refuse_unequal(values: list[str | None], what: str) -> None:
    """Raise ValueError if the values of ranks differ.

    Args:
        values: One value for each rank, see `gather`.
        what: Beginning of the message, such as `"The ranks have loaded different checkpoints"`.
    """
    if len(set(values)) > 1:
        each = ", ".join(f"rank {rank}: {found}" for rank, found in enumerate(values))
        raise ValueError(f"{what}: {each}.")
