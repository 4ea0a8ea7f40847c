"""What a quantised weight is of no use without: the tensors that say what its bytes mean, and where they hang.

[Note: Companions]
A weight of bitsandbytes is a tensor of codes; what scales them are other tensors, its *companions*: of a `Params4bit`
those of its `quant_state` (largest values of blocks, table of codes, and where the first are quantised themselves an
offset and the same again), of an `Int8Params` its `SCB` (Dettmers et al., arXiv 2208.07339 and 2305.14314). They are no
parameters and no buffers, so nothing that moves a module moves them. Here they lie behind the bytes of their weight, in
the same memory: what brings the weight brings them, and their bytes are counted as the weight's. Nothing of
bitsandbytes is imported: whatever has these attributes is treated so.
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

# One load of a kernel takes 16 bytes at most; their first one must be a multiple of it.
ALIGNMENT = 16
_OF_STATE = ("absmax", "code", "offset")
_KINDS = ("quant_state", "SCB")

# Gives memory for a tensor of a dtype, shape and strides from some byte of the weight's memory on.
Placing = Callable[[int, Tensor], Tensor]


def packed_nbytes(parameter: Tensor) -> int:
    """Bytes of a weight with its companions, each aligned; of any other tensor its own."""
    end = parameter.nbytes
    for _, _, begin, tensor in _places(parameter):
        end = begin + tensor.nbytes
    return end


def has_companions(parameter: Tensor) -> bool:
    """Whether the bytes of a weight mean nothing without other tensors."""
    return next(_holders(parameter), None) is not None


def place_companions(parameter: Tensor, place: Placing) -> None:
    """Copies the companions of a host weight to where `place` says and puts them there; see [Note: Companions]."""
    for holder, name, begin, tensor in list(_places(parameter)):
        target = place(begin, tensor)
        if target.data_ptr() != tensor.data_ptr():
            target.copy_(tensor)
            setattr(holder, name, target)
    if _codes(parameter) is not None:
        vars(parameter)["CB"] = _plain(parameter)


def attach_companions(host: Tensor, device_param: Tensor, place: Placing) -> None:
    """Gives the device parameter of a weight companions of its own, where `place` says; nothing is copied there.

    Autograd functions keep the objects that hold them, and find in backward what has been fetched by then.
    """
    state = vars(host).get("quant_state")
    if state is not None:
        device_param.quant_state = state = copy.copy(state)  # type: ignore[attr-defined]
        if state.state2 is not None:
            state.state2 = copy.copy(state.state2)
    for (_, name, begin, tensor), (holder, _) in zip(_places(host), list(_holders(device_param)), strict=True):
        setattr(holder, name, place(begin, tensor))
    if _codes(device_param) is not None:
        vars(device_param)["CB"] = _plain(device_param)


def move_companions(parameter: Tensor, device: torch.device) -> None:
    """Moves the companions of a weight beside it."""
    for holder, name in _holders(parameter):
        setattr(holder, name, getattr(holder, name).to(device))
    if _codes(parameter) is not None:
        vars(parameter)["CB"] = _plain(parameter)


def prepare_weights(model: nn.Module, device: torch.device | None = None) -> None:
    """Quantises what waits for it and has every companion hang on its weight, before anybody counts bytes.

    Layers of bitsandbytes quantise when they are moved to a device, which a streamed weight never is.

    Args:
        model: Its weights stay where they are.
        device: What quantises, one weight after the other; None: where the weight is.
    """
    for module in model.modules():
        weight = _registered_weight(module)
        if weight is not None and not weight.is_meta:
            _quantise(weight, device)
            _gather(module, weight)
            if "quant_state" in vars(weight):
                _cast_bias(module)


def _registered_weight(module: nn.Module) -> nn.Parameter | None:
    """Return the parameter `weight`: a parametrization would compute what is asked for by attribute."""
    return dict(module._parameters.items()).get("weight")  # TorchScript has no `get` of its own.


@contextmanager
def accepting_companions(model: nn.Module) -> Iterator[None]:
    """Within it, `load_state_dict` takes what quantised layers save beside their weights, strict or not.

    Layers that are not quantised yet are, if what is loaded is; whatever else is given goes the layers' own way.
    """
    with ExitStack() as stack:
        for module in model.modules():
            weight = _registered_weight(module)
            if weight is not None and not vars(weight).keys().isdisjoint(_KINDS):
                stack.callback(accept_companions(module).remove)
        yield


def accept_companions(module: nn.Module) -> RemovableHandle:
    """The same for one layer, until the handle is removed."""
    return module.register_load_state_dict_pre_hook(_load)


def _load(module: Any, state_dict: dict[str, Tensor], prefix: str, *others: Any) -> None:
    if "quant_state" in vars(module.weight):
        _load_4bit(module.weight, state_dict, prefix, others[-1])
    elif f"{prefix}SCB" in state_dict:  # The layer copies it to where the weight has its own.
        _quantise(module.weight)
        _gather(module, module.weight)


def _load_4bit(weight: Any, state_dict: dict[str, Tensor], prefix: str, errors: list[str]) -> None:
    """Takes what belongs to the weight of a 4-bit layer out of `state_dict`; values only, every tensor stays."""
    start = f"{prefix}weight."
    given = {key.removeprefix(start): value for key, value in state_dict.items() if key.startswith(start)}
    if not given:
        return
    _quantise(weight)
    state = weight.quant_state
    packed = given.pop(f"quant_state.bitsandbytes__{state.quant_type}", None)
    targets = {"absmax": state.absmax, "quant_map": state.code}
    if state.state2 is not None:
        targets |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
    shapes = {key: tuple(value.shape) for key, value in given.items()}
    if packed is None or shapes != {key: tuple(value.shape) for key, value in targets.items()}:
        found = ", ".join(sorted(key.removeprefix(start) for key in state_dict if key.startswith(start)))
        errors.append(
            f"{prefix}weight is quantised in another way in the checkpoint ({found}) than in the model "
            f"({state.quant_type}, {'nested' if state.state2 is not None else 'not nested'}, blocks of "
            f"{state.blocksize}). Quantise the model as the checkpoint is."
        )
    else:
        said = json.loads(bytes(packed.cpu().tolist()))
        for key, target in targets.items():
            target.copy_(given[key])
        if state.state2 is not None:
            state.offset.fill_(said["nested_offset"])
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
    """Casts the bias as the first forward of a 4-bit layer does, for good: a streamed one would be cast in each."""
    dtype, bias = vars(module).get("compute_dtype"), getattr(module, "bias", None)
    if isinstance(dtype, torch.dtype) and isinstance(bias, nn.Parameter) and bias.dtype != dtype:
        bias.data = bias.data.to(dtype)


def _gather(module: nn.Module, weight: nn.Parameter) -> None:
    """Hangs what the first forward of an 8-bit layer has put into its `state` on the weight again."""
    state = vars(module).get("state")
    if state is not None and _is_8bit(weight) and getattr(state, "SCB", None) is not None:
        vars(weight).update(CB=_plain(weight), SCB=state.SCB)
        state.CB = state.SCB = None


def _places(parameter: Tensor) -> Iterator[tuple[Any, str, int, Tensor]]:
    """Every companion with what holds it, under which name, and its first byte behind that of the weight."""
    end = parameter.nbytes
    for holder, name in _holders(parameter):
        tensor = getattr(holder, name)
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        yield holder, name, begin, tensor
        end = begin + tensor.nbytes


def _holders(parameter: Tensor) -> Iterator[tuple[Any, str]]:
    """Objects and attributes that hold companions, always in the same order."""
    attributes = vars(parameter)
    state = attributes.get("quant_state")
    for each in (state, getattr(state, "state2", None)):
        for name in _OF_STATE if each is not None else ():
            if isinstance(getattr(each, name, None), Tensor):
                yield each, name
    if isinstance(attributes.get("SCB"), Tensor):
        yield parameter, "SCB"


def _is_8bit(parameter: Tensor) -> bool:
    return parameter.dtype is torch.int8 and "SCB" in vars(parameter)


def _codes(parameter: Tensor) -> Tensor | None:
    """What an 8-bit weight calls its codes: its own data under another name."""
    found: Tensor | None = vars(parameter).get("CB") if _is_8bit(parameter) else None
    return found


def _plain(parameter: Tensor) -> Tensor:
    """The memory of a weight as a plain tensor."""
    return parameter.detach().as_subclass(Tensor)
