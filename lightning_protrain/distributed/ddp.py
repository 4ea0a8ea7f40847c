"""Averaging of gradients of resident parameters over ranks: with DDP, or in one flat all-reduce.

The runtime averages gradients of offloaded chunks. `DistributedDataParallel` averages gradients of resident parameters
and ignores all others. If only few resident parameters are trained (adapters), their gradients are averaged in one flat
tensor at the end of backward instead.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_protrain.config import DDPOptions, GradSync
from lightning_protrain.runtime.apply import Runtime

# Maximum fraction of all elements that trained parameters have for a flat average.
_SHARE_OF_ADAPTERS = 0.1
# Attribute of a model from which DDP reads the names of parameters to ignore.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


def ignored_by_user(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters and buffers that the user lets DDP ignore; each rank has its own values."""
    return frozenset(name.lstrip(".") for name in getattr(model, _IGNORED, ()))


def wrap(model: nn.Module, mine: Sequence[nn.Parameter], device: torch.device, options: DDPOptions) -> nn.Module:
    """Wrap a model in DDP so that DDP averages only gradients of `mine`.

    Args:
        model: The model, with equal weights on all ranks; the user's list of ignored parameters is not changed.
        mine: Trained parameters on `device`.
        device: Device of the gradients.
        options: The user's DDP options.
    """
    ignored_before = getattr(model, _IGNORED, None)
    marked = [tensor for tensor in (*model.parameters(), *model.buffers()) if getattr(tensor, "_ddp_ignored", False)]
    ignored = [*(ignored_before or ()), *_names_of_others(model, {id(parameter) for parameter in mine})]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    try:
        wrapped = DistributedDataParallel(
            model,
            device_ids=None if device.type == "cpu" else [device.index],
            init_sync=False,
            gradient_as_bucket_view=True,  # Saves a second copy of the gradients.
            find_unused_parameters=options.find_unused_parameters or (not options.static_graph and _has_towers(model)),
            static_graph=options.static_graph,
        )
    finally:
        delattr(model, _IGNORED)
        if ignored_before is not None:
            setattr(model, _IGNORED, ignored_before)
        for tensor in (*model.parameters(), *model.buffers()):
            vars(tensor).pop("_ddp_ignored", None)  # DDP does not remove its own marks.
        for tensor in marked:
            vars(tensor)["_ddp_ignored"] = True
    taken, _ = wrapped._build_params_for_reducer()
    assert {id(tensor) for tensor in taken} == {id(tensor) for tensor in mine}, "DDP averages wrong parameters"
    if options.comm_hook is not None:
        wrapped.register_comm_hook(options.comm_state, options.comm_hook)
    return wrapped


def behind_chunks(options: DDPOptions, runtime: Runtime, device: torch.device) -> DDPOptions:
    """Return options with a hook that sends each bucket of DDP when all gradients of chunks have been sent.

    Ranks that use different parts of a model would otherwise send buckets and chunks in different orders, see
    [Note: One group at a time] in runtime/comm/collectives.py. Resident weights are mostly the first ones that a model
    uses, so their gradients come last anyway.

    Args:
        options: The user's options; a hook of the user is called in place of an all-reduce.
        runtime: Runtime that averages gradients of chunks.
        device: Device of the gradients.
    """
    send = options.comm_hook or _average
    at_end = options.static_graph  # The first backward of a static graph calls the hook when it has ended.

    @functools.wraps(send)
    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP does not read annotations that are strings.
        nonlocal at_end
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[] if device.type == "cpu" else [device])
        runtime.after_chunks(lambda: future.set_result(send(state, bucket).wait()), at_end)
        at_end = at_end and not bucket.is_last()
        return future

    return replace(options, comm_hook=hook)


def _average(state, bucket):  # type: ignore[no-untyped-def]
    """Average a bucket of DDP, as DDP does without a hook."""
    flat = bucket.buffer().mul_(1.0 / dist.get_world_size())
    return dist.all_reduce(flat, async_op=True).get_future().then(lambda future: future.value()[0])


def chooses_flat(choice: GradSync, mine: Sequence[nn.Parameter], model: nn.Module, has_fast_link: bool) -> bool:
    """Return True if gradients of resident parameters are averaged in one flat tensor.

    DDP sends buckets during backward, which is better for many gradients. Few gradients would be many small messages,
    each with the latency of the link.

    Args:
        choice: `"flat"`, `"ddp"`, or `"auto"`, which means flat for adapters unless the link is fast.
        mine: Parameters whose gradients are averaged.
        model: The whole model.
        has_fast_link: True if NVLink connects the devices.
    """
    if choice != "auto":
        return choice == "flat"
    trained, whole = (sum(tensor.numel() for tensor in some) for some in (mine, model.parameters()))
    return not has_fast_link and trained <= _SHARE_OF_ADAPTERS * whole


class FlatAverage:
    """Averaging of the gradients of a few parameters, in one all-reduce for each dtype.

    The all-reduce includes a flag for each parameter, so that a parameter without a gradient on all ranks keeps None.

    Args:
        parameters: Parameters, in the same order on all ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._groups: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            self._groups.setdefault(parameter.dtype, []).append(parameter)

    def average(self) -> None:
        """Average the gradients after the backward that ends a step; every rank calls it."""
        for group in self._groups.values():
            group = [parameter for parameter in group if parameter.requires_grad]
            if group:
                self._average(group)

    def _average(self, group: list[nn.Parameter]) -> None:
        grads = [parameter.grad for parameter in group]
        if any(grad is not None and grad.is_sparse for grad in grads):
            raise RuntimeError(
                'A gradient of a resident parameter is sparse, but adapter_grad_sync="flat" averages only dense '
                'gradients. Use `sparse=False`, or set adapter_grad_sync="ddp".'
            )
        parts = [
            torch.zeros_like(parameter).flatten() if grad is None else grad.flatten()
            for parameter, grad in zip(group, grads, strict=True)
        ]
        # Make the flags on the device, because a copy from the host would wait for the end of backward.
        flags = parts[0].new_ones(len(group))
        for at, grad in enumerate(grads):
            if grad is None:
                flags[at : at + 1].zero_()
        flat = torch.cat([*parts, flags]).mul_(1.0 / dist.get_world_size())
        dist.all_reduce(flat)
        absent = [at for at, grad in enumerate(grads) if grad is None]
        anywhere = flat[-len(group) :].tolist() if absent else []
        begin = 0
        for at, (parameter, grad) in enumerate(zip(group, grads, strict=True)):
            part = flat[begin : begin + parameter.numel()].view(parameter.shape)
            begin += parameter.numel()
            if grad is not None:
                grad.copy_(part)
            elif anywhere[at]:
                parameter.grad = part.clone()


def broadcast_weights(tensors: Sequence[Tensor], group: Any = None) -> None:
    """Broadcast tensors in host memory from rank 0; every rank of the group calls it."""
    for tensor in tensors:
        if tensor.numel():
            dense = tensor.detach().contiguous()
            # Viewing a tensor of one element as bytes requires a stride of 1.
            dist.broadcast(dense.as_strided((dense.numel(),), (1,)).view(torch.uint8), 0, group=group)
            if dense.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(dense)


def without_sync(model: nn.Module | None) -> AbstractContextManager[None]:
    """Return a context without the averaging of gradients by DDP."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def _has_towers(model: nn.Module) -> bool:
    """Return True for a model of transformers with media inputs, parts of which do not run for batches of text only."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(set(getattr(config, "sub_configs", ())) - {"text_config"} for config in configs)


def _names_of_others(model: nn.Module, mine: Collection[int]) -> list[str]:
    """Return all names of parameters whose id is not in `mine`, also in DDP's form with a leading dot."""
    names: dict[str, None] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in mine:
                names.update({f"{path}.{name}": None, f"{path}.{name}".lstrip("."): None})
    return list(names)
