"""Optimizers of bitsandbytes: the size of their states, the cost of their host step, and their whole step in tiles.

Their 8-bit states are quantised in blocks of 256 elements, and each block has a float32 scale (Dettmers et al., arXiv
2110.02861). So Adam's two moments take 2 + 2/64 bytes for each element, instead of 8. Parameters with few elements keep
32-bit states.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_protrain.runtime.optim.adam8bit import SHARED, TILE, BlockwiseStep, is_blockwise
from lightning_protrain.runtime.optim.host_step import trial_of
from lightning_protrain.runtime.optim.step import state_bytes_per_element
from lightning_protrain.runtime.optim.threads import StepThreads

_KERNEL = "bitsandbytes::optimizer_update_8bit_blockwise"


def mean_state_bytes(optimizers: Iterable[Optimizer]) -> float:
    """Return the bytes of optimizer state for each trained element, averaged over all elements of all optimizers.

    Exact for the optimizers of bitsandbytes, whose states are created on the meta device. Paged states are counted as
    if they were not paged.
    """
    total, elements = 0.0, 0
    for optimizer in optimizers:
        numel = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
        total += _nbytes(optimizer) if is_blockwise(optimizer) else numel * state_bytes_per_element([optimizer])
        elements += numel
    return total / elements if elements else 0.0


def refuse_without_host_step(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers of a bitsandbytes version that cannot step parameters in host memory.

    Raises:
        ValueError: The installed version has kernels for accelerators only.
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
    """Have the optimizer's step take host parameters tile by tile, on as many threads as PyTorch uses.

    Other parameters are stepped as usual. Within this context the groups may be split or shortened, see `adam8bit`.
    """
    if not is_blockwise(optimizer):
        yield
        return
    attributes = vars(optimizer)
    whole = optimizer.update_step  # type: ignore[attr-defined]
    threads = StepThreads()
    host = BlockwiseStep(optimizer, threads.width * TILE)

    def get_config(index: int, at: int, group: Mapping[str, Any]) -> dict[str, Any]:
        return host.config(optimizer.param_groups[index]["params"][at], group)

    def update_step(group: Mapping[str, Any], parameter: Tensor, *place: int) -> None:
        if parameter.device.type != "cpu":
            whole(group, parameter, *place)
            return
        assert parameter.grad is not None
        threads.make(host.calls(group, parameter, parameter.grad))

    attributes.update(update_step=update_step, get_config=get_config, _cpu_paged_warned=True)
    try:
        yield
    finally:
        del attributes["update_step"], attributes["get_config"]
        threads.close()


def load_by_reference(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a state dict without copying tensors that already have the right device and dtype.

    PyTorch's own optimizers already do so. Optimizers of bitsandbytes deep-copy all states first, so that `state_dict`
    stays unchanged. Here they get the same tensors in new dictionaries.
    """
    optimizer.load_state_dict(_Shared(state_dict) if is_blockwise(optimizer) else dict(state_dict))


class _Shared(dict[str, Any]):
    """A state dict whose deep copy holds the same tensors."""

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: _copied(value) for name, value in self.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else copy.deepcopy(value)


def _nbytes(optimizer: Any) -> int:
    """Return the size of the optimizer's states for all its parameters, bytes."""
    trial: Any = trial_of(optimizer)
    trial.check_overrides()  # Overrides of modules; the optimizer's first step applies them too.
    total = 0
    for index, group in enumerate(optimizer.param_groups):
        for at, parameter in enumerate(group["params"]):
            trial.state = defaultdict(dict)
            probe = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            trial.init_state(group, probe, index, at)
            total += sum(
                value.nbytes
                for name, value in trial.state[probe].items()
                if isinstance(value, Tensor) and name not in SHARED
            )
    return total
