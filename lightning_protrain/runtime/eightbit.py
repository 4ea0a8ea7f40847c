"""Optimizers of bitsandbytes: the bytes of their states, and their step over parameters in host memory.

[Note: Blocks]
Their states of 8 bits are quantised in blocks of 256 elements, each with a scale of its own (Dettmers et al., arXiv
2110.02861): two bytes and two 128ths for each element of Adam in place of eight. Parameters of few elements keep states
of 32 bits. On the host the library's own rule runs, so states and numbers are the library's; but it makes several
copies of a parameter in float32, which for an embedding are gigabytes. So it is given one tile after the other. No
block lies in two tiles, and the rule goes element by element otherwise: the result is the same.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_protrain.runtime.optimizer import state_bytes_per_element

# Elements that share one scale.
BLOCK = 256
# Elements of a tile, whole blocks: larger ones are not faster.
TILE = 1 << 18
# What its step takes of the host beside PyTorch's fused AdamW: 20 and 0.6 ns for each element, on one thread.
SLOWDOWN = 32.0
# Whose rule looks at one element at a time; the others scale by the norm of the whole.
_ELEMENTWISE = ("adam", "lion", "momentum", "rmsprop", "adagrad")
# Tables that all parameters share.
_SHARED = ("qmap1", "qmap2")
_KERNEL = "bitsandbytes::optimizer_update_8bit_blockwise"


def is_blockwise(optimizer: Optimizer) -> bool:
    """Whether it is one of bitsandbytes, whatever the bits of its states."""
    names = ((base.__module__.partition(".")[0], base.__name__) for base in type(optimizer).__mro__)
    return ("bitsandbytes", "Optimizer8bit") in names


def mean_state_bytes(optimizers: Iterable[Optimizer]) -> float:
    """Bytes of optimizer state for each trained element, averaged over all elements of all optimizers.

    Exact of the optimizers of bitsandbytes: their states are made without memory. What they keep paged is counted
    where it is when it is used.
    """
    total, elements = 0.0, 0
    for optimizer in optimizers:
        numel = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
        total += _nbytes(optimizer) if is_blockwise(optimizer) else numel * state_bytes_per_element([optimizer])
        elements += numel
    return total / elements if elements else 0.0


def host_slowdown(optimizers: Iterable[Optimizer]) -> float:
    """How many times longer the host steps than with PyTorch's fused AdamW, roughly."""
    return SLOWDOWN if any(map(is_blockwise, optimizers)) else 1.0


def refuse_without_host_step(optimizers: Iterable[Optimizer]) -> None:
    """Refuses optimizers of a bitsandbytes that cannot step parameters in host memory.

    Raises:
        ValueError: The installed version has kernels for devices only.
    """
    for optimizer in optimizers:
        if is_blockwise(optimizer) and not torch._C._dispatch_has_kernel_for_dispatch_key(_KERNEL, "CPU"):
            raise ValueError(
                f"{type(optimizer).__name__} of the installed bitsandbytes has no step for parameters in host memory, "
                'where the plan keeps some. Install bitsandbytes>=0.50, or give plan="resident" or an optimizer of '
                "torch.optim."
            )


@contextmanager
def in_tiles(optimizer: Optimizer) -> Iterator[None]:
    """Within it, its step goes through large host parameters in tiles, see [Note: Blocks]; others are left alone."""
    if not is_blockwise(optimizer):
        yield
        return
    attributes = vars(optimizer)
    whole = optimizer.update_step  # type: ignore[attr-defined]
    # Pages would be in host memory, too: there is nothing to warn of.
    attributes["_cpu_paged_warned"] = True
    attributes["update_step"] = _tiled(optimizer, whole)
    try:
        yield
    finally:
        del attributes["update_step"]


def _tiled(optimizer: Any, whole: Callable[..., None]) -> Callable[..., None]:
    def update_step(group: Mapping[str, Any], parameter: Tensor, *place: int) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = optimizer.state[parameter]
        small = parameter.numel() <= TILE or parameter.device.type != "cpu"
        if small or not _is_elementwise(optimizer, group, *place) or not _is_plain(parameter, gradient, state):
            whole(group, parameter, *place)
            return
        for begin in range(0, parameter.numel(), TILE):
            part = parameter.detach().view(-1)[begin : begin + TILE]
            part.grad = gradient.view(-1)[begin : begin + TILE]
            own = object.__new__(type(optimizer))
            vars(own).update(vars(optimizer), state={part: _part(state, begin, part.numel(), parameter.numel())})
            type(optimizer).update_step(own, group, part, *place)
        state["step"] += 1

    return update_step


def _is_elementwise(optimizer: Any, group: Mapping[str, Any], *place: int) -> bool:
    return optimizer.optimizer_name in _ELEMENTWISE and not optimizer.get_config(*place, group)["max_unorm"]


def _is_plain(parameter: Tensor, gradient: Tensor, state: Mapping[str, Any]) -> bool:
    """Whether elements of all of them follow each other in memory."""
    tensors = [parameter, gradient, *(value for value in state.values() if isinstance(value, Tensor))]
    return all(tensor.layout is torch.strided and tensor.is_contiguous() for tensor in tensors)


def _part(state: Mapping[str, Any], begin: int, count: int, numel: int) -> dict[str, Any]:
    """The state of some elements, in the memory of the whole."""
    found = dict(state)
    for name, value in state.items():
        if not isinstance(value, Tensor) or name in _SHARED:
            continue
        each = 1 if value.numel() == numel else BLOCK
        found[name] = value.view(-1)[begin // each : -(-(begin + count) // each)]
    return found


def _nbytes(optimizer: Any) -> int:
    """Bytes of its states, of all its parameters."""
    trial = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer), is_paged=False, name2qmap=copy.copy(optimizer.name2qmap))
    total = 0
    for index, group in enumerate(optimizer.param_groups):
        for at, parameter in enumerate(group["params"]):
            trial.state = defaultdict(dict)
            probe = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            trial.init_state(group, probe, index, at)
            total += sum(
                value.nbytes
                for name, value in trial.state[probe].items()
                if isinstance(value, Tensor) and name not in _SHARED
            )
    return total
