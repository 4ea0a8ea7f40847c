"""What several ranks do together: they fail together, and they go on only if they mean the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from lightning_protrain.callbacks.failures import share_failure


@contextmanager
def together(doing: str) -> Iterator[None]:
    """All ranks do the block, and all of them raise if one does; they come and go together.

    Args:
        doing: For the message: `"Saving X"`.

    Raises:
        RuntimeError: Another rank failed, or has gone; the message names it.
    """
    try:
        yield
    except BaseException as error:
        with suppress(RuntimeError):  # The error of this rank is the one to be seen here.
            share_failure(error, doing)
        raise
    share_failure(None, doing)


def gather(value: Any) -> list[Any]:
    """The values of all ranks, by rank; every rank calls it."""
    if not dist.is_available() or not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def refuse_different(value: str | None, what: str) -> None:
    """Every rank calls it with what it means.

    Args:
        value: Of this rank.
        what: Begins the message: `"The ranks have loaded different checkpoints"`.

    Raises:
        ValueError: Another rank means something else.
    """
    values = gather(value)
    if len(set(values)) > 1:
        each = ", ".join(f"rank {rank}: {found}" for rank, found in enumerate(values))
        raise ValueError(f"{what}: {each}.")
