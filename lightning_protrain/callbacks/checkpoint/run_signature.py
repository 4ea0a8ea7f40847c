"""Computes the terms of a run's contract from its Trainer, see [Note: Contract] in checkpoint/contract.py."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import SequentialSampler, TensorDataset

from lightning_protrain.checkpoint.serialize import flat_bytes

# Steps at which the function of a learning rate schedule is evaluated, to compare it.
_SAMPLED_STEPS = tuple(mantissa * 10**power for power in range(7) for mantissa in (1, 2, 5))
# Suffixes of the entries that a 4-bit layer of bitsandbytes saves beside its weight, see [Note: Companions] in
# quant_state.py.
_COMPANIONS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_MOST_HASHED_BYTES = 64 << 20


def model_signature(state_dict: Mapping[str, Any], common_with: Collection[str] | None = None) -> dict[str, Any]:
    """Return the shapes of a state dict's tensors by name, without companions of quantised weights.

    Args:
        state_dict: State dict of a module.
        common_with: Names to which the result is restricted; None means all names.
    """
    return {
        name: list(value.shape)
        for name, value in state_dict.items()
        if isinstance(value, Tensor)
        and not _is_companion(name, state_dict)
        and (common_with is None or name in common_with)
    }


def dtype_signature(state_dict: Mapping[str, Any], common_with: Collection[str]) -> dict[str, Any]:
    """Return the dtypes of a state dict's tensors by name, for the names in `common_with`."""
    return {name: str(state_dict[name].dtype) for name in model_signature(state_dict, common_with)}


def trainer_signature(trainer: Trainer) -> dict[str, Any]:
    """Return the terms of the contract that are arguments of the Trainer."""
    return {"precision": str(trainer.precision), "accumulation": trainer.accumulate_grad_batches}


def optimizer_signature(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """Describe the optimizers and schedules of `configure_optimizers`, before their first step."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    optimizers = [
        {
            "class": _name(getattr(optimizer, "interchangeable_with", type(optimizer))),
            "groups": [[names.get(id(each), "?") for each in group["params"]] for group in optimizer.param_groups],
        }
        for optimizer in trainer.optimizers
    ]
    schedules = [
        {"interval": config.interval, "frequency": config.frequency, **_schedule(config.scheduler)}
        for config in trainer.lr_scheduler_configs
    ]
    return {"optimizer": optimizers, "lr_schedule": schedules}


def data_signature(loaders: Iterable[Any]) -> dict[str, Any]:
    """Return the batch sizes and a description of the data, without reading it; None for an unknown value.

    The description includes an attribute `fingerprint` or `_fingerprint` of the dataset. If the sampler has a method
    `identity`, its result is the description.

    Args:
        loaders: Training loaders.
    """
    loaders = list(loaders)
    sizes = [_batch_size(loader) for loader in loaders]
    data = [_data(loader) for loader in loaders]
    return {
        "batch_size": sizes if any(size is not None for size in sizes) else None,
        "data": data if any(data) else None,
    }


def _schedule(scheduler: Any) -> dict[str, Any]:
    """Describe a learning rate schedule by its plain attributes, and by sampled values of its functions."""
    state = scheduler.state_dict() if callable(getattr(scheduler, "state_dict", None)) else {}
    terms = {name: plain for name, value in state.items() if (plain := _plain(value)) is not None}
    functions = [part for part in getattr(scheduler, "lr_lambdas", []) if callable(part)]
    if functions:
        terms["factors"] = [_sampled(function) for function in functions]
    inner = [_schedule(part) for part in getattr(scheduler, "_schedulers", [])]
    return {"class": _name(type(scheduler)), **terms, **({"schedulers": inner} if inner else {})}


def _sampled(function: Callable[[int], Any]) -> dict[str, Any]:
    return {f"at step {step}": _plain(function(step)) for step in _SAMPLED_STEPS}


def _batch_size(loader: Any) -> int | None:
    # The user's batch sampler may be any object, such as a list.
    for holder in (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        size = getattr(holder, "batch_size", None)
        if type(size) is int:
            return size
    return None


def _data(loader: Any) -> dict[str, Any]:
    identity = getattr(getattr(loader, "sampler", None), "identity", None)
    if callable(identity):
        # The batch size is a separate term, and the number of ranks may change.
        plain = {name: _plain(value) for name, value in identity().items()}
        return {name: plain[name] for name in plain if name not in ("batch_size", "world_size", "num_batches")}
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        length = sized_len(loader)
        return {} if length is None else {"batches": length}
    known: dict[str, Any] = {"dataset": _name(type(dataset))}
    if hasattr(dataset, "__len__"):
        known["rows"] = len(dataset)
    shuffled = _is_shuffled(getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    if shuffled is not None:
        known["shuffled"] = shuffled
    fingerprint = _fingerprint(dataset)
    return known if fingerprint is None else {**known, "fingerprint": fingerprint}


def _is_shuffled(sampler: Any) -> bool | None:
    if isinstance(sampler, SequentialSampler):
        return False
    if type(sampler).__name__ == "RandomSampler":  # of PyTorch or of torchdata
        return True
    shuffled = getattr(sampler, "shuffle", None)
    return shuffled if isinstance(shuffled, bool) else None


def _fingerprint(dataset: Any) -> str | None:
    for name in ("fingerprint", "_fingerprint"):
        fingerprint = getattr(dataset, name, None)
        if isinstance(fingerprint, str | int):
            return str(fingerprint)
    if not isinstance(dataset, TensorDataset):
        return None
    tensors = [each for each in dataset.tensors if each.device.type == "cpu" and each.layout is torch.strided]
    if sum(tensor.nbytes for tensor in tensors) > _MOST_HASHED_BYTES:
        return None
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(flat_bytes(tensor).numpy().data, crc)
    return f"crc32:{crc:08x}"


def _plain(value: Any) -> Any:
    """Convert a value into numbers, strings and lists of them; return None if that is not possible."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() <= 64 and value.device.type != "meta" else None
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return items if all(item is not None for item in items) else None
    return None


def _is_companion(name: str, names: Mapping[str, Any]) -> bool:
    return any(
        name[: place - 1] in names and (name[place:] in _COMPANIONS or name.startswith("quant_state.", place))
        for place in (index + 1 for index, letter in enumerate(name) if letter == ".")
    )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
