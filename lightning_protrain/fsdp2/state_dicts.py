"""Conversion of state dicts between whole tensors, as a plain Trainer saves them, and shards of FSDP2."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer


def describe_tensors(model: nn.Module) -> dict[str, str]:
    """Return a text for each parameter and buffer, by name: its dtype, its shape, and "trained" or "frozen"."""
    return {
        name: f"{tensor.dtype}{list(tensor.shape)}, {'trained' if tensor.requires_grad else 'frozen'}"
        for tensors in (model.named_parameters(remove_duplicate=False), model.named_buffers())
        for name, tensor in tensors
    }


def spread(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Move parameters and buffers to `device` and broadcast the values of rank 0.

    Args:
        tensors: Tensors in the same order on each rank; tensors on the meta device are skipped.
        device: Device from which the backend broadcasts.
    """
    for tensor in tensors:
        if tensor.is_meta:
            continue
        tensor.data = tensor.data.to(device).contiguous()
        if dist.get_world_size() > 1:
            # Send bytes, because backends do not support all dtypes. A view as bytes requires a stride of 1.
            dist.broadcast(tensor.data.as_strided((tensor.numel(),), (1,)).view(torch.uint8), src=0)


def whole_states(states: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Return a state dict with whole tensors on the host; every rank calls it with the same keys.

    Args:
        states: State dict whose values may be DTensors; other values are not changed. Tied values stay tied.
        keep: True on a rank that needs the result; other ranks get an empty dict.
    """
    found: dict[int, Any] = {}
    for value in states.values():
        if id(value) not in found:
            found[id(value)] = _whole(value, keep)
    return {name: found[id(value)] for name, value in states.items()} if keep else {}


def whole_optimizer_state(optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """Return `optimizer.state_dict()` as it would be without FSDP2; every rank calls it.

    Args:
        optimizer: Optimizer whose parameters and states may be DTensors.
        keep: True on a rank that needs the result; other ranks get an empty dict.
    """
    content = optimizer.state_dict()
    states = {
        index: {name: _whole(value, keep) for name, value in content["state"][index].items()}
        for index in sorted(content["state"])
    }
    return {**content, "state": states} if keep else {}


def load_optimizer_parts(optimizer: Optimizer, content: Mapping[str, Any]) -> None:
    """Load a whole state dict into an optimizer of shards; each rank takes its shards, without communication.

    Raises:
        ValueError: If the states belong to other parameters; raised by `Optimizer.load_state_dict`.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    saved = [index for group in content["param_groups"] for index in group["params"]]
    places = dict(zip(saved, parameters, strict=False))
    states = {
        index: {name: _state_part(value, places.get(index)) for name, value in values.items()}
        for index, values in content["state"].items()
    }
    optimizer.load_state_dict({**content, "state": states})


def load_parts(model: nn.Module, states: Mapping[str, Any], strict: bool) -> None:
    """Load a whole state dict into a model that may be sharded; each rank takes its shards, without communication.

    Raises:
        RuntimeError: If names or shapes do not match; raised by `Module.load_state_dict`.
    """
    present = model.state_dict(keep_vars=True)
    model.load_state_dict({name: shard_of(value, present.get(name)) for name, value in states.items()}, strict=strict)


def has_optimizer_states(path: Path) -> bool:
    """Return True if a sharded checkpoint contains optimizer states."""
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return any(name.startswith("optimizer_") for name in names)


def load_sharded(model: nn.Module, path: Path, strict: bool) -> None:
    """Load the weights of a sharded checkpoint, saved with any mesh; each rank reads its shards.

    Args:
        model: The sharded model.
        path: Folder of the checkpoint.
        strict: As in `Module.load_state_dict`.
    """
    states = get_model_state_dict(model)
    dcp.load({"state_dict": states}, checkpoint_id=path)
    model.load_state_dict(states, strict=strict)


def load_sharded_optimizers(model: nn.Module, optimizers: Iterable[Optimizer], path: Path) -> None:
    """Load the optimizer states of a sharded checkpoint; each rank reads its shards.

    Args:
        model: The sharded model.
        optimizers: Optimizers, in the order in which they were saved.
        path: Folder of the checkpoint.
    """
    for index, optimizer in enumerate(optimizers):
        states = get_optimizer_state_dict(model, optimizer)
        dcp.load({f"optimizer_{index}": states}, checkpoint_id=path)
        options = StateDictOptions(cpu_offload=True)
        set_optimizer_state_dict(model, optimizer, optim_state_dict=states, options=options)


def shard_of(value: Any, like: Any) -> Any:
    """Return this rank's shard of a whole tensor, as a DTensor placed like `like`; return other values unchanged."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != like.shape:
        return value  # `load_state_dict` raises an error with the name.
    local = value.detach().to(like.device_mesh.device_type)
    placed = distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)
    # Clone, because a view would keep the whole tensor in memory.
    held = placed.to_local().clone().to(like.to_local().device)
    return DTensor.from_local(
        held, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _state_part(value: Any, parameter: Any) -> Any:
    """Return this rank's shard of an optimizer state; states with another shape than the parameter are not sharded."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.ndim == 0:
        return value
    if value.shape == parameter.shape:
        return shard_of(value, parameter)
    mesh = parameter.device_mesh
    held = value.detach().clone().to(parameter.to_local().device)
    return DTensor.from_local(held, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _whole(value: Any, keep: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if isinstance(value, DTensor):
        mesh_device = torch.device(value.device_mesh.device_type)
        if value.to_local().device.type != mesh_device.type:
            # Copy offloaded shards to the device of the mesh, whose backend gathers them.
            value = DTensor.from_local(
                value.to_local().to(mesh_device),
                value.device_mesh,
                value.placements,
                run_check=False,
                shape=value.shape,
                stride=value.stride(),
            )
        value = value.full_tensor()
    return value.cpu() if keep else None
