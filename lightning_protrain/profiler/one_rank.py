"""Answers the collectives of a step that is profiled on rank 0 alone.

[Note: One rank]
Rank 0 profiles a training step while the other ranks wait for its plan, so they would never join a collective. So while
a step is profiled, every collective of this thread, in any group, returns at once, as if all ranks had this rank's
tensors: a sum stays as it is, gathered tensors are copies. Shapes, world size and rank are those of the run. Receiving
    from another rank, or its broadcast, is refused with its name, because rank 0 cannot know the values.

PyTorch sends the collectives of all process groups through its dispatcher, as `c10d::*`. So nothing of PyTorch,
Lightning or the user is replaced, except the function that makes groups, which would wait for other ranks in the store.
Functional collectives are refused too: their tensors are of a special class that cannot be traced.
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

# Arguments of a collective, by name.
_Given = Mapping[str, Any]


class OneRank(TorchDispatchMode):
    """A mode that answers collectives, and runs every other operation unchanged.

    Attributes:
        has_answered: True if there has been a collective.
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
    """Answer every collective of this thread at once, see [Note: One rank]; do nothing without a process group.

    Enter it after the mode that runs the operations of a step, which then runs the copies that replace a collective.

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
        f"`training_step` is profiled on rank 0 alone, where nobody knows what {given['operation']} gives on all ranks."
    )


def _refuse_new_group(*args: Any, **kwargs: Any) -> None:
    raise UntraceableError(
        "`training_step` is profiled on rank 0 alone, and makes a process group. Make the group in `setup`."
    )


def _leave(given: _Given) -> None:
    """Leave tensors as they are, because all ranks have the same."""


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
    """Put the part of every rank into the gathered tensor."""
    if part.numel():
        whole.view(-1, part.numel()).copy_(part.reshape(1, -1))


def _take(part: Tensor, whole: Tensor) -> None:
    """Take the first part of the scattered tensor."""
    part.copy_(whole.reshape(-1)[: part.numel()].view_as(part))


def _exchange(given: _Given, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    """Put into each output what every rank sends to the first one."""
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
