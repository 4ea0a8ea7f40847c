"""Replacement of collectives in a step that is profiled on rank 0 alone.

[Note: One rank]
Rank 0 profiles a training step while the other ranks wait for its plan, so they would not join a collective. Therefore
every collective of this thread returns at once, as if all ranks had the same tensors: an all-reduce changes nothing,
gathered tensors are copies. World size and rank do not change. A receive or a broadcast from another rank raises an
error, because rank 0 does not know the values.

A dispatch mode can replace collectives, because PyTorch dispatches them as operations (`c10d::*`). Functional
collectives raise an error, because their tensor class cannot be traced. Creating a process group would wait for the
other ranks, so the function that does this is patched to raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_protrain.profiler.fake_mode import UntraceableError

# Arguments of a collective by name, and the operation itself as `operation`.
_Given = Mapping[str, Any]


class OneRank(TorchDispatchMode):
    """A dispatch mode that replaces collectives, see [Note: One rank].

    Attributes:
        has_answered: True if a collective has been replaced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_answered = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("c10d", "_c10d_functional"):
            return func(*args, **(kwargs or {}))
        self.has_answered = True
        answer = _ANSWERS.get(func._schema.name.removeprefix("c10d::"), _refuse)
        names = [argument.name for argument in func._schema.arguments]
        answer({**dict(zip(names, args, strict=False)), **(kwargs or {}), "operation": func})
        ended: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        ended.set_result([])
        work = torch._C._distributed_c10d._create_work_from_future(ended).boxed()  # type: ignore[attr-defined]
        returns = len(func._schema.returns)
        return (args[0], work) if returns == 2 else work if returns else None


@contextmanager
def on_one_rank() -> Iterator[OneRank | None]:
    """Replace the collectives of this thread, see [Note: One rank]; do nothing without a process group.

    Enter this context after the mode that traces the step, so that the mode runs the copies that replace a collective.

    Raises:
        UntraceableError: Within the context, if the step needs values of another rank, or makes a process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        yield None
        return
    new_group = dist.distributed_c10d._new_group_with_tag
    dist.distributed_c10d._new_group_with_tag = _refuse_new_group
    try:
        with OneRank() as mode:
            yield mode
    finally:
        dist.distributed_c10d._new_group_with_tag = new_group


def _refuse(given: _Given) -> None:
    raise UntraceableError(
        f"`training_step` is profiled on rank 0 alone, where the result of {given['operation']} is unknown."
    )


def _refuse_new_group(*args: Any, **kwargs: Any) -> None:
    raise UntraceableError(
        "`training_step` makes a process group, but is profiled on rank 0 alone. Make the group in `setup`."
    )


def _leave(given: _Given) -> None:
    """Do nothing: the result equals the input if all ranks have equal tensors."""


def _broadcast(given: _Given) -> None:
    if given["root_rank"] != 0:
        _refuse(given)


def _gather(given: _Given) -> None:
    for outputs, tensor in zip(given["output_tensors"], given["input_tensors"], strict=False):
        for output in outputs:
            output.copy_(tensor)


def _gather_coalesced(given: _Given) -> None:
    for outputs in given["output_lists"]:
        for output, tensor in zip(outputs, given["input_list"], strict=True):
            output.copy_(tensor)


def _scatter(given: _Given) -> None:
    for output, tensors in zip(given["output_tensors"], given["input_tensors"], strict=False):
        output.copy_(tensors[0])


def _fill(whole: Tensor, part: Tensor) -> None:
    """Copy `part` to the place of every rank in a gathered tensor."""
    if part.numel():
        whole.view(-1, part.numel()).copy_(part.reshape(1, -1))


def _take(part: Tensor, whole: Tensor) -> None:
    """Copy the first part of a scattered tensor to `part`."""
    part.copy_(whole.reshape(-1)[: part.numel()].view_as(part))


def _exchange(given: _Given, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    """Copy `tensor`, which every rank sends to rank 0, to each output."""
    if any(output.shape != tensor.shape for output in outputs):
        _refuse(given)
    for output in outputs:
        output.copy_(tensor)


def _exchange_flat(given: _Given) -> None:
    size = dist.ProcessGroup.unbox(given["process_group"]).size()
    outputs, parts = (
        given[name].split(given[f"{name}_split_sizes"] or given[name].shape[0] // size) for name in ("output", "input")
    )
    _exchange(given, outputs, parts[0])


_ANSWERS: dict[str, Callable[[_Given], None]] = {
    **dict.fromkeys(("allreduce_", "allreduce_coalesced_", "reduce_"), _leave),
    **dict.fromkeys(("barrier", "monitored_barrier_", "send"), _leave),
    "broadcast_": _broadcast,
    "allgather_": _gather,
    "gather_": _gather,
    "allgather_coalesced_": _gather_coalesced,
    "_allgather_base_": lambda given: _fill(given["output_tensor"], given["input_tensor"]),
    "reduce_scatter_": _scatter,
    "scatter_": _scatter,
    "_reduce_scatter_base_": lambda given: _take(given["output_tensor"], given["input_tensor"]),
    "alltoall_": lambda given: _exchange(given, given["output_tensors"], given["input_tensors"][0]),
    "alltoall_base_": _exchange_flat,
}
