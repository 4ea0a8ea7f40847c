"""The step of optimizers of bitsandbytes for single parameters in host memory.

[Note: Places]
bitsandbytes finds what `GlobalOptimManager` overrides for a parameter by its group and its place in that group. Here
parameters are stepped in other groups, or some are left out. So each is looked up where it is in the groups that the
user knows: else one would get what is meant for another.

[Note: Own step]
What the tables do not know (states of 32 bits, norms of whole parameters, classes that others derive) the library steps
itself. It makes several copies of a parameter in float32, which for an embedding are gigabytes, so where its rule goes
element by element it is given tiles: no block lies in two of them. It also makes weights and gradients contiguous, in
memory of their own, while theirs has to stay in its chunk: it is given stand-ins for those that are not.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_protrain.runtime.codes import tables_of
from lightning_protrain.runtime.kernels import NO_CLIP, Clip
from lightning_protrain.runtime.moments import BLOCK, STATES, TILE, Moments, Scratch, Settings, compiled, step

# Elements of a tile that the library steps, whole blocks: larger ones are not faster.
OWN_TILE = 1 << 18
# Of one call: some milliseconds, so that threads end together and Python's lock is seldom taken.
_TILES_PER_CALL = 8
# Tables that all parameters share.
SHARED = ("qmap1", "qmap2")
_METHODS = ("step", "update_step", "init_state", "get_config")


def is_blockwise(optimizer: Optimizer) -> bool:
    """Whether it is one of bitsandbytes, whatever the bits of its states."""
    names = ((base.__module__.partition(".")[0], base.__name__) for base in type(optimizer).__mro__)
    return ("bitsandbytes", "Optimizer8bit") in names


def is_unchanged(optimizer: Optimizer) -> bool:
    """Whether it is one of bitsandbytes, and steps as the library does: what is derived from it changes nothing."""
    methods = [inspect.unwrap(getattr(type(optimizer), name, is_blockwise)) for name in _METHODS]
    return is_blockwise(optimizer) and all(method.__module__.startswith("bitsandbytes.") for method in methods)


class BlockwiseStep:
    """Steps parameters in host memory one by one, for the time of one step of their optimizer.

    The result is bitwise that of the optimizer's own step on the CPU.

    Args:
        optimizer: One of bitsandbytes, with all its groups.
        tile: Elements of a tile, see [Note: Passes] in `moments`.
        own_tile: Elements of a tile that the library steps, see [Note: Own step].
    """

    def __init__(self, optimizer: Optimizer, tile: int = TILE, own_tile: int = OWN_TILE) -> None:
        self._tile = tile
        self._own_tile = own_tile
        self._groups = optimizer.param_groups
        self._places = {
            id(parameter): (index, at)
            for index, group in enumerate(optimizer.param_groups)
            for at, parameter in enumerate(group["params"])
        }
        self._kind: Any = type(optimizer)
        # Pages would be in host memory, too: there is nothing to warn of.
        self._optimizer = self._copy(vars(optimizer), _cpu_paged_warned=True)
        self._scratch = threading.local()

    def config(self, parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """What the optimizer says for a parameter, see [Note: Places]."""
        found: dict[str, Any] = self._optimizer.get_config(*self._places[id(parameter)], group)
        return found

    def calls(
        self,
        group: Mapping[str, Any],
        parameter: Tensor,
        gradient: Tensor,
        copy: Tensor | None = None,
        clip: Clip = NO_CLIP,
    ) -> list[Callable[[], None]]:
        """Calls that step a parameter: in any order, by any thread; its counter is counted here.

        Args:
            group: The hyperparameters of its group.
            parameter: The weight in host memory, one of the optimizer's.
            gradient: Of the same shape; written only in the dtype of the weight, if it is to be clipped.
            copy: Receives the new weight in its own dtype; it may lie where the gradient does.
            clip: What is done to the gradient first, in place.
        """
        state = self._optimizer.state[parameter]
        if not state:
            self._optimizer.init_state(group, parameter, *self._places[id(parameter)])
        config = self.config(parameter, group)
        tensors = [parameter.detach(), gradient] if copy is None else [parameter.detach(), gradient, copy]
        moments = self._moments(tensors, state, config)
        if moments is None:
            return [partial(self._own, group, parameter, gradient, copy, clip)]
        state["step"] += 1
        compiled()  # Here, before several threads want it.
        settings = Settings.of(self._optimizer.optimizer_name, config, state["step"])
        flat, numel = [tensor.view(-1) for tensor in tensors], parameter.numel()
        share = _TILES_PER_CALL * self._tile
        ranges = [(begin, min(begin + share, numel)) for begin in range(0, numel, share)]
        return [partial(self._walk, flat, moments, settings, part, clip.arguments) for part in ranges]

    def _walk(self, tensors: list[Tensor], moments: Moments, settings: Settings, part: Any, clip: Any) -> None:
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = Scratch(self._tile)
        step(self._optimizer.optimizer_name, tensors, moments, settings, self._scratch.memory, part, clip)

    def _moments(self, tensors: list[Tensor], state: Mapping[str, Any], config: Mapping[str, Any]) -> Moments | None:
        """The states as the tables know them; None: they do not."""
        number = STATES.get(self._optimizer.optimizer_name, 0)
        numel = tensors[0].numel()
        if not number or not self._by_element({**config, "max_unorm": 0}) or not isinstance(config["lr"], float | int):
            return None
        names = [f"{name}{index}" for name in ("state", "absmax", "qmap") for index in range(1, number + 1)]
        found = [state[name] for name in names if isinstance(state.get(name), Tensor)]
        if len(found) < len(names) or not _is_plain((*tensors, *found)):
            return None
        codes, scales = found[:number], found[number : 2 * number]
        kept = all(
            code.dtype == torch.uint8 and code.numel() == numel and not code.storage_offset() % 2
            and scale.dtype == torch.float32 and scale.numel() == -(-numel // BLOCK)
            for code, scale in zip(codes, scales, strict=True)
        )  # fmt: skip
        tables = [table for table in map(tables_of, found[2 * number :]) if table is not None]
        if not kept or len(tables) < number:
            return None
        return Moments([code.view(-1) for code in codes], [scale.view(-1) for scale in scales], tables)

    def _own(
        self, group: Mapping[str, Any], parameter: Tensor, gradient: Tensor, copy: Tensor | None, clip: Clip
    ) -> None:
        """The library's step, see [Note: Own step]."""
        state = self._optimizer.state[parameter]
        weight, gradient = parameter.detach(), gradient.to(parameter.dtype)
        clip.apply([gradient])
        tensors = [value for name, value in state.items() if isinstance(value, Tensor) and name not in SHARED]
        if self._by_element(self.config(parameter, group)) and _is_plain((weight, gradient, *tensors)):
            counted = state["step"] + 1
            for begin in range(0, weight.numel(), self._own_tile):
                part = weight.view(-1)[begin : begin + self._own_tile]
                kept = _part(state, begin, part.numel(), weight.numel())
                self._step(group, parameter, part, gradient.view(-1)[begin : begin + self._own_tile], kept)
            state["step"] = counted
        else:
            part = weight.contiguous()
            self._step(group, parameter, part, gradient, state)
            if part.data_ptr() != weight.data_ptr():
                weight.copy_(part)
        if copy is not None:
            copy.copy_(weight)

    def _by_element(self, config: Mapping[str, Any]) -> bool:
        """Whether the library's rule looks at one element of a parameter at a time."""
        # Older versions have 8 bits without blocks, and clip by the norm of a parameter over its last steps.
        alone = config.get("block_wise", True) and config.get("percentile_clipping", 100) >= 100
        known = is_unchanged(self._optimizer) and self._optimizer.optimizer_name in STATES
        return bool(known and alone and not config["max_unorm"])

    def _step(
        self, group: Mapping[str, Any], parameter: Tensor, part: Tensor, gradient: Tensor, state: dict[str, Any]
    ) -> None:
        part.grad = gradient
        own = self._copy(vars(self._optimizer), state={part: state})
        self._kind.update_step(own, group, part, *self._places[id(parameter)])

    def _copy(self, attributes: Mapping[str, Any], **changed: Any) -> Any:
        """One with the same attributes, but for those that stand for methods while a step runs."""
        made = object.__new__(self._kind)
        vars(made).update({name: value for name, value in attributes.items() if name not in _METHODS})
        vars(made).update(changed, param_groups=self._groups)
        return made


def _is_plain(tensors: tuple[Tensor, ...]) -> bool:
    """Whether they are in host memory, and elements of all of them follow each other."""
    return all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        for tensor in tensors
    )


def _part(state: Mapping[str, Any], begin: int, count: int, numel: int) -> dict[str, Any]:
    """The state of some elements, in the memory of the whole."""
    found = dict(state)
    for name, value in state.items():
        if not isinstance(value, Tensor) or name in SHARED:
            continue
        each = 1 if value.numel() == numel else BLOCK
        found[name] = value.view(-1)[begin // each : -(-(begin + count) // each)]
    return found
