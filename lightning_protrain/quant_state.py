"""The tensors that scale a quantised weight, stored in the same memory as the weight.

[Note: Companions]
A quantised weight of bitsandbytes is a tensor of codes (arXiv 2208.07339 and 2305.14314). The tensors that scale its
codes are its *companions*. A `Params4bit` has them in its `quant_state`: the maxima of blocks, the code table, and, if
the maxima are quantised too, an offset and a second state. An `Int8Params` has `SCB`, the maxima of rows.

Companions are neither parameters nor buffers, so moving a module does not move them. This module stores them behind the
bytes of their weight: one copy fetches both, and the size of the weight includes them. Any parameter with these
attributes is treated as quantised; bitsandbytes is not imported.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

# Bytes. Kernels load up to 16 bytes at once, from addresses that are multiples of 16.
ALIGNMENT = 16
_OF_STATE = ("absmax", "code", "offset")
_KINDS = ("quant_state", "SCB")

# Takes an offset in the weight's memory (bytes) and a tensor; returns memory of the tensor's shape and dtype there.
Placing = Callable[[int, Tensor], Tensor]


def packed_nbytes(parameter: Tensor) -> int:
    """Return the size of a tensor, with its aligned companions if it is a quantised weight, bytes."""
    end = parameter.nbytes
    for _, _, begin, tensor in _places(parameter):
        end = begin + tensor.nbytes
    return end


def has_companions(parameter: Tensor) -> bool:
    """Return True if a weight has companions, see [Note: Companions]."""
    return next(_holders(parameter), None) is not None


def place_companions(parameter: Tensor, place: Placing) -> None:
    """Copy the companions of a host weight into memory that `place` returns, and attach the copies to the weight."""
    for holder, name, begin, tensor in list(_places(parameter)):
        target = place(begin, tensor)
        if target.data_ptr() != tensor.data_ptr():
            target.copy_(tensor)
            setattr(holder, name, target)
    _renew_codes(parameter)


def attach_companions(host: Tensor, device_param: Tensor, place: Placing) -> None:
    """Give a device parameter companions of its own, in memory that `place` returns; no values are copied.

    See [Note: Companions]. The next fetch fills their memory together with the weight's. So an autograd function may
    keep the companions: the fetch for backward makes their values valid again.
    """
    state = vars(host).get("quant_state")
    if state is not None:
        device_param.quant_state = state = copy.copy(state)  # type: ignore[attr-defined]
        if state.state2 is not None:
            state.state2 = copy.copy(state.state2)
    for (_, name, begin, tensor), (holder, _) in zip(_places(host), list(_holders(device_param)), strict=True):
        setattr(holder, name, place(begin, tensor))
    _renew_codes(device_param)


def move_companions(parameter: Tensor, device: torch.device) -> None:
    """Move the companions of a weight to `device`."""
    for holder, name in _holders(parameter):
        setattr(holder, name, getattr(holder, name).to(device))
    _renew_codes(parameter)


def prepare_weights(model: nn.Module, device: torch.device | None = None) -> None:
    """Quantise weights that are not quantised yet, and attach every companion to its weight.

    Layers of bitsandbytes quantise their weight when they are moved to a device, but streamed layers are never moved.
    Call this before sizes of weights are computed.

    Args:
        model: The model; its weights stay on their device.
        device: Device that quantises one weight at a time; None means each weight's own device.
    """
    for module in model.modules():
        weight = _registered_weight(module)
        if weight is not None and not weight.is_meta:
            _quantise(weight, device)
            _gather(module, weight)
        if weight is not None and "quant_state" in vars(weight):
            _cast_bias(module)


def _registered_weight(module: nn.Module) -> nn.Parameter | None:
    """Return the parameter `weight` or None; reading the attribute would run a parametrization."""
    return dict(module._parameters.items()).get("weight")  # In TorchScript, `_parameters` has no `get`.


@contextmanager
def accepting_companions(model: nn.Module) -> Iterator[None]:
    """Let `load_state_dict` accept the companions that quantised layers save, within the context.

    A layer that is not quantised yet is quantised first, if the loaded state dict has companions for it.
    """
    with ExitStack() as stack:
        for module in model.modules():
            weight = _registered_weight(module)
            if weight is not None and not vars(weight).keys().isdisjoint(_KINDS):
                stack.callback(accept_companions(module).remove)
        yield


def accept_companions(module: nn.Module) -> RemovableHandle:
    """Let a layer load the companions of its weight, until the returned handle is removed."""
    return module.register_load_state_dict_pre_hook(_load)


def _load(module: Any, state_dict: dict[str, Tensor], prefix: str, *others: Any) -> None:
    if "quant_state" in vars(module.weight):
        _load_4bit(module.weight, state_dict, prefix, others[-1])
    elif f"{prefix}SCB" in state_dict:  # The layer itself copies this value into the weight's SCB.
        _quantise(module.weight)
        _gather(module, module.weight)


def _load_4bit(weight: Any, state_dict: dict[str, Tensor], prefix: str, errors: list[str]) -> None:
    """Move the companion values of a 4-bit weight from `state_dict` into the weight's own companions."""
    start = f"{prefix}weight."
    stored = {key.removeprefix(start): value for key, value in state_dict.items() if key.startswith(start)}
    if not stored:
        return
    _quantise(weight)
    state = weight.quant_state
    packed = stored.pop(f"quant_state.bitsandbytes__{state.quant_type}", None)
    targets = {"absmax": state.absmax, "quant_map": state.code}
    if state.state2 is not None:
        targets |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
    shapes = {key: tuple(value.shape) for key, value in stored.items()}
    if packed is None or shapes != {key: tuple(value.shape) for key, value in targets.items()}:
        keys = ", ".join(sorted(key.removeprefix(start) for key in state_dict if key.startswith(start)))
        errors.append(
            f"{prefix}weight is quantised differently in the checkpoint ({keys}) and in the model "
            f"({state.quant_type}, {'nested' if state.state2 is not None else 'not nested'}, blocks of "
            f"{state.blocksize}). Quantise the model like the checkpoint."
        )
    else:
        content = json.loads(bytes(packed.cpu().tolist()))
        for key, target in targets.items():
            target.copy_(stored[key])
        if state.state2 is not None:
            state.offset.fill_(content["nested_offset"])
    for key in [key for key in state_dict if key.startswith(start)]:
        del state_dict[key]


def _quantise(weight: Any, device: torch.device | None = None) -> None:
    waits_4bit = vars(weight).get("bnb_quantized") is False and vars(weight).get("quant_state") is None
    waits_8bit = vars(weight).get("has_fp16_weights") is False and weight.is_floating_point()
    if waits_4bit or waits_8bit:
        place = weight.device
        weight.to(device or place)  # in place
        if weight.device != place:
            weight.data = _plain(weight).to(place)
            move_companions(weight, place)


def _cast_bias(module: nn.Module) -> None:
    """Cast the bias to the compute dtype, as the first forward of a 4-bit layer does.

    Otherwise the layer would cast the streamed copy of the bias in each forward.
    """
    dtype, bias = vars(module).get("compute_dtype"), getattr(module, "bias", None)
    if isinstance(dtype, torch.dtype) and isinstance(bias, nn.Parameter) and bias.dtype != dtype:
        bias.data = bias.data.to(dtype)


def _gather(module: nn.Module, weight: nn.Parameter) -> None:
    """Move the companions of an 8-bit weight back from the layer's `state`, where its first forward puts them.

    A weight that has companions nevertheless was quantised after that forward, as by OLoRA: it keeps them.
    """
    state = vars(module).get("state")
    if state is not None and _is_8bit(weight) and getattr(state, "SCB", None) is not None:
        if vars(weight)["SCB"] is None:
            vars(weight).update(CB=_plain(weight), SCB=state.SCB)
        state.CB = state.SCB = None


def _places(parameter: Tensor) -> Iterator[tuple[Any, str, int, Tensor]]:
    """Yield for each companion: object and attribute that refer to it, offset in the weight's memory, tensor."""
    end = parameter.nbytes
    for holder, name in _holders(parameter):
        tensor = getattr(holder, name)
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        yield holder, name, begin, tensor
        end = begin + tensor.nbytes


def _holders(parameter: Tensor) -> Iterator[tuple[Any, str]]:
    """Yield the objects and attributes that refer to companions, always in the same order."""
    attributes = vars(parameter)
    state = attributes.get("quant_state")
    for holder in (state, getattr(state, "state2", None)):
        for name in _OF_STATE if holder is not None else ():
            if isinstance(getattr(holder, name, None), Tensor):
                yield holder, name
    if isinstance(attributes.get("SCB"), Tensor):
        yield parameter, "SCB"


def _is_8bit(parameter: Tensor) -> bool:
    return parameter.dtype is torch.int8 and "SCB" in vars(parameter)


def _renew_codes(parameter: Tensor) -> None:
    """Let the attribute `CB` of an 8-bit weight be an alias of its data again; do nothing for other tensors."""
    if _is_8bit(parameter) and vars(parameter).get("CB") is not None:
        vars(parameter)["CB"] = _plain(parameter)


def _plain(parameter: Tensor) -> Tensor:
    """Return a weight as a plain tensor that shares its memory."""
    return parameter.detach().as_subclass(Tensor)
