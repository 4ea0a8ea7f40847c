"""What ranks tell each other, so that they go on only if they mean the same."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gather(value: Any) -> list[Any]:
    """The values of all ranks, by rank; every rank calls it."""
    if not dist.is_available() or not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def refuse_unequal(values: list[str | None], what: str) -> None:
    """Every rank calls it with what all ranks mean.

    Args:
        values: By rank, see `gather`.
        what: Begins the message: `"The ranks have loaded different checkpoints"`.

    Raises:
        ValueError: They are not all the same.
    """
    if len(set(values)) > 1:
        each = ", ".join(f"rank {rank}: {found}" for rank, found in enumerate(values))
        raise ValueError(f"{what}: {each}.")
