"""The host's optimizer step, in tiles.

A gradient in lower precision has to be cast, a clipped one scaled, and a shadow copy written. Each of these as a pass
over main memory would cost a good part of another step. So the step works in tiles that stay in the cache, which
threads take from a queue. Every operation ends by taking Python's lock, which a thread that launches kernels holds most
of the time, so tiles are as large as the cache permits.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_protrain.runtime.optim.adam8bit import TILE as TILE_8BIT
from lightning_protrain.runtime.optim.adam8bit import BlockwiseStep, is_blockwise
from lightning_protrain.runtime.optim.fused import (
    KERNELS,
    LINE,
    NO_CLIP,
    Clip,
    FlatState,
    FusedRule,
    in_order,
    is_dense,
    laid_out_as,
)
from lightning_protrain.runtime.optim.split_adamw import SplitAdamW, TileMemory, tile_of
from lightning_protrain.runtime.optim.split_numbers import PAGE
from lightning_protrain.runtime.optim.threads import StepThreads

# Most elements of a tile for each core that a thread computes on (see benchmarks/LOG.md), and least elements that are
# worth a call of their own.
TILE, LEAST = 1 << 19, 1 << 16


class ParamUpdate(NamedTuple):
    """A parameter to step, with its gradient.

    Attributes:
        parameter: Weight in host memory, a key of the optimizer's state.
        gradient: Gradient of the same shape, in any floating dtype. It is clipped in place if it has the dtype of the
            weight.
        copy: Shadow copy to write the new weight to, with the parameter's shape and strides. It may be the memory of
            the gradient. None: there is none.
    """

    parameter: Tensor
    gradient: Tensor
    copy: Tensor | None = None


Given = Iterable[tuple[Mapping[str, Any], Sequence[ParamUpdate]]]
_Step = Callable[[slice, Tensor], object]


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the present settings of a group without its parameters; a tensor (a learning rate) is cloned."""
    settings = {name: value for name, value in group.items() if name != "params"}
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in settings.items()}


class HostStep:
    """The optimizer step of parameters in host memory.

    Results are bitwise those of three passes over whole tensors: clip and cast the gradient, run the optimizer's own
    step, and cast the shadow copy. It calls no hooks: they belong to `optimizer.step()`, of which this step is a part.
    `step` may be called from any thread.

    Args:
        cores: Number of cores to compute on, see `StepThreads`.
        fuse: Whether a group in which the user chose no implementation uses the fused kernel. False leaves the choice
            to PyTorch, which takes its slowest loop on the CPU. The fused kernel rounds differently.
        tile: Most elements of a tile for each core that a thread computes on, a multiple of `LINE`.
    """

    def __init__(self, cores: int | None = None, fuse: bool = True, tile: int = TILE) -> None:
        self._fuse = fuse
        self._tile = tile
        self._threads = StepThreads(cores)
        self._own, self._split = threading.local(), TileMemory()

    def close(self) -> None:
        """End the threads; a later step would start new ones."""
        self._threads.close()

    def of(self, optimizer: Optimizer) -> Callable[[Given, Clip], None]:
        """Return `step` for one step of an optimizer; call it before groups are taken out of the optimizer."""
        blockwise = self._blockwise(optimizer)
        return lambda given, clip: self.step(optimizer, given, clip, blockwise)

    @torch.no_grad()
    def step(
        self, optimizer: Optimizer, given: Given, clip: Clip = NO_CLIP, blockwise: BlockwiseStep | None = None
    ) -> None:
        """Step these parameters and no others; on return, they and their shadow copies are written.

        Args:
            optimizer: Optimizer whose state is used; missing state is created as in its own first step.
            given: Parameters, with the hyperparameters of their groups.
            clip: Clipping of their gradients before the step.
            blockwise: Step of an optimizer of bitsandbytes; None: make one.

        Raises:
            ValueError: The optimizer works on all its parameters as one vector (LBFGS).
        """
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "LBFGS works on all parameters as one vector and evaluates the loss again, so it cannot step them part "
                'by part. Use another optimizer, or plan="resident".'
            )
        blockwise = blockwise or self._blockwise(optimizer)
        calls: list[Callable[[], object]] = []
        for group, updates in given:
            if blockwise is not None:
                calls += [call for update in updates for call in blockwise.calls(group, *update, clip)]
                continue
            dense, rest = _sorted_out(updates)
            if type(optimizer) is SplitAdamW:
                calls += self._split_calls(optimizer, group, dense, clip)
            elif kernel := kernel_of(optimizer, group, self._fuse):
                calls += self._fused_calls(optimizer, FusedRule.of(kernel, group), dense, clip)
            else:
                rest = list(updates)
            if rest:
                cast = [update._replace(gradient=update.gradient.to(update.parameter.dtype)) for update in rest]
                clip.apply(update.gradient for update in cast)
                _own_step(optimizer, group, cast)
        self._threads.make(calls)

    def _blockwise(self, optimizer: Optimizer) -> BlockwiseStep | None:
        return BlockwiseStep(optimizer, self._threads.width * TILE_8BIT) if is_blockwise(optimizer) else None

    def _fused_calls(
        self, optimizer: Optimizer, rule: FusedRule, updates: Sequence[ParamUpdate], clip: Clip
    ) -> Iterator[Callable[[], None]]:
        counted, steps = list[Tensor](), list[tuple[FlatUpdate, _Step]]()
        for update in updates:
            state = optimizer.state[update.parameter] if rule.states else {}
            first = rule.name == "sgd" and state.get("momentum_buffer") is None
            if rule.states and (first or not state):
                state.update(rule.first_state(optimizer, update.parameter))
            flat = FlatUpdate.of(update, clip)
            for name in rule.states:
                # A loaded state may have another layout, but the kernels go by memory, not by index.
                state[name] = laid_out_as(update.parameter, state[name])
            states = [in_order(update.parameter, state[name]) for name in rule.states]
            whole = FlatState(flat.weight, states, state.get("step", flat.weight))
            counted.append(whole.step)
            steps.append((flat, partial(rule.step, whole, first)))
        if counted and rule.name != "sgd":
            torch._foreach_add_(counted, 1)
        return self._calls(steps, self._tile, LINE)

    def _split_calls(
        self, optimizer: SplitAdamW, group: Mapping[str, Any], updates: Sequence[ParamUpdate], clip: Clip
    ) -> Iterator[Callable[[], None]]:
        flat = [FlatUpdate.of(update, clip) for update in updates]
        made = [partial(self._split.step, optimizer.begin(group, update.parameter)) for update in updates]
        return self._calls([*zip(flat, made, strict=True)], tile_of(torch.device("cpu")), PAGE)

    def _calls(self, steps: Sequence[tuple[FlatUpdate, _Step]], most: int, unit: int) -> Iterator[Callable[[], None]]:
        """Yield calls that step as many elements each, as many calls for each thread: no thread waits at the end.

        Args:
            steps: Parameters, with functions that step the elements of a slice with their gradient, which has the dtype
                of the weight.
            most: Most elements of a call for each core of a thread.
            unit: Number of elements of which a slice begins at a multiple.
        """
        threads, width = self._threads.split
        total = sum(flat.weight.numel() for flat, _ in steps)
        number = threads * -(-total // (threads * width * most))
        size = max(-(-total // (number or 1)), min(LEAST, most))
        size = room = -(-size // unit) * unit
        part = list[Callable[[], None]]()
        for flat, step in steps:
            begin, end = 0, flat.weight.numel()
            while begin < end:
                place = slice(begin, min(begin + room, end))
                part.append(partial(self._step, flat, step, place))
                room -= -(-(place.stop - begin) // unit) * unit
                begin = place.stop
                if not room:
                    yield partial(_all_of, part)
                    part, room = [], size
        if part:
            yield partial(_all_of, part)

    def _step(self, flat: FlatUpdate, step: _Step, place: slice) -> None:
        weight, gradient, copy = flat.weight[place], flat.gradient[place], flat.copy
        if gradient.dtype != weight.dtype:
            gradient = self._scratch(weight.dtype, gradient.numel()).copy_(gradient)
        flat.clip.apply([gradient])
        step(place, gradient)
        if copy is not None:
            copy[place].copy_(weight)

    def _scratch(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Return memory of this thread."""
        memory: dict[torch.dtype, Tensor] = vars(self._own).setdefault("memory", {})
        if dtype not in memory or memory[dtype].numel() < numel:
            memory[dtype] = torch.empty(numel, dtype=dtype)
        return memory[dtype][:numel]


def _all_of(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()


class FlatUpdate(NamedTuple):
    """A parameter to step, with tensors of its N elements in the order in which they lie in memory, shape (N,).

    Attributes:
        weight: The weight.
        gradient: The gradient.
        copy: The shadow copy; None: there is none.
        clip: Clipping that is still to be done.
    """

    weight: Tensor
    gradient: Tensor
    copy: Tensor | None
    clip: Clip

    @classmethod
    def of(cls, update: ParamUpdate, clip: Clip) -> FlatUpdate:
        """Return the flat update of a dense parameter; clip the gradient first if its memory has another order."""
        parameter, gradient, copy = update
        assert all(tensor is None or tensor.shape == parameter.shape for tensor in (gradient, copy)), "another shape"
        if clip and gradient.stride() != parameter.stride():
            gradient = gradient.to(parameter.dtype)
            clip.apply([gradient])
            clip = NO_CLIP
        low = None if copy is None else in_order(parameter, copy)
        assert low is None or low.data_ptr() == copy.data_ptr(), "a shadow copy of another layout"  # type: ignore[union-attr]
        return cls(in_order(parameter, parameter.detach()), in_order(parameter, gradient), low, clip)


def _sorted_out(updates: Sequence[ParamUpdate]) -> tuple[list[ParamUpdate], list[ParamUpdate]]:
    """Split updates into those that can be made in tiles, whose weights are dense in memory, and the rest."""
    sorted_out: tuple[list[ParamUpdate], list[ParamUpdate]] = [], []
    for update in updates:
        takes = update.parameter.dtype.is_floating_point and update.gradient.layout == torch.strided
        sorted_out[not (takes and is_dense(update.parameter))].append(update)
    return sorted_out


def kernel_of(optimizer: Optimizer, group: Mapping[str, Any], fuse: bool) -> str | None:
    """Return the fused kernel that steps a group, one of `KERNELS`; None: the optimizer's class steps it.

    Args:
        optimizer: The optimizer.
        group: Hyperparameters of the group.
        fuse: Whether a group in which the user chose no implementation uses the fused kernel.
    """
    chosen = group.get("fused")
    takes = (
        (chosen or (fuse and chosen is None and group.get("foreach") is None))
        and not group.get("differentiable")
        # Set by a gradient scaler during a step: only the class's own step honours them.
        and getattr(optimizer, "grad_scale", None) is None
        and getattr(optimizer, "found_inf", None) is None
    )
    return KERNELS.get(type(optimizer)) if takes else None


def class_step(optimizer: Optimizer) -> Callable[[], object]:
    """Return the step of the optimizer's class, without its wrappers (hooks, profiling)."""
    return partial(inspect.unwrap(type(optimizer).step), optimizer)


def trial_of(optimizer: Any) -> Optimizer:
    """Return an optimizer of the same class and groups, with states of its own and none of them paged."""
    trial: Any = object.__new__(type(optimizer))
    attributes = {name: _own(value) for name, value in vars(optimizer).items()}
    vars(trial).update(attributes, state=defaultdict(dict))
    if is_blockwise(optimizer):
        overrides = copy.copy(optimizer.mng)
        vars(overrides).update(pid2config=dict(overrides.pid2config), index2config=dict(overrides.index2config))
        vars(trial).update(is_paged=False, name2qmap=copy.copy(optimizer.name2qmap), mng=overrides)
    return trial


def _own(value: Any) -> Any:
    """Return a copy of a value that a step of the user's class may change in place, such as a counter."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def trial_step(optimizer: Optimizer, ids: set[int]) -> Callable[[], object]:
    """Return a step of the optimizer's class on the parameters with these `id`s, with states of its own."""
    trial: Any = trial_of(optimizer)
    groups = [{name: _own(value) for name, value in group.items()} for group in trial.param_groups]
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in ids]
    trial.param_groups = [group for group in groups if group["params"]]
    vars(trial).update(initialized=False)  # Of bitsandbytes: its first step applies overrides.
    return class_step(trial)


def _own_step(optimizer: Optimizer, group: Mapping[str, Any], updates: Sequence[ParamUpdate]) -> None:
    """Run the step of the optimizer's class on these parameters, without its wrappers (hooks, profiling)."""
    part = object.__new__(type(optimizer))
    vars(part).update(vars(optimizer))  # Not copy.copy: it drops attributes of the class beyond groups and state.
    part.param_groups = [{**group, "params": [update.parameter for update in updates]}]
    held = [update.parameter.grad for update in updates]
    try:
        for update in updates:
            update.parameter.grad = update.gradient
        with torch.no_grad():
            class_step(part)()
    finally:
        for update, gradient in zip(updates, held, strict=True):
            update.parameter.grad = gradient
    for update in updates:
        if update.copy is not None:
            update.copy.copy_(update.parameter.detach())
