"""PyTorch's fused CPU kernels: hyperparameters, states, and a walk over tiles that does not need Python's lock.

[Note: Tiles]
The kernels need the gradient in the dtype of the weight. A gradient in lower precision has to be cast, a clipped one
scaled, and a shadow copy written. Each of these as a separate pass over main memory would cost a good part of another
step. So the step works in *tiles* that stay in the cache: cast the gradient into a scratch tile, clip it, run the fused
kernel, and write the shadow copy, which may lie in the memory of the gradient. If nothing has to be cast or clipped and
there is no shadow copy, no tiles are needed: the fused kernel is called once with the whole tensors.

The kernels are vectorised, and the scalar loop over the last elements of a range rounds differently. PyTorch divides a
tensor between its threads at multiples of a cache line, so only the last elements of a tensor meet the scalar loop,
with any number of threads. A tile begins at a multiple of `LINE` elements from the start of its tensor. So every
element takes the same path as in one call for the whole tensor, and the result is the same bit for bit.

[Note: Walk]
Every kernel call, and every call that makes a view, ends by taking Python's lock again. A thread busy in Python gives
the lock up only after the interpreter's switch interval, 5 ms, many times the duration of a tile. So TorchScript, which
needs no compiler and no lock, runs the walk over the tiles of a part; the lock is taken once per part. Without
TorchScript (Python 3.14) the same function runs in Python, with the same results. Right after gigabytes have gone
through the caches, a TorchScript call takes some 0.2 ms, twice as long as a kernel. So ranges that need no tiles are
cut beforehand, and the kernel is called directly.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Number of elements: a multiple of the length of every vector and every cache line, see [Note: Tiles].
LINE = 64
# By exact class, as a derived class may step in another way.
KERNELS: dict[type[Optimizer], str] = {Adam: "adam", AdamW: "adam", SGD: "sgd", Adagrad: "adagrad"}


class KernelSettings(NamedTuple):
    """The hyperparameters of all kernels; each kernel ignores those that it does not have.

    TorchScript reads them as fast as variables. A dictionary would cost more than the kernel does for a small tile.
    """

    lr: float = 0.0
    weight_decay: float = 0.0
    eps: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    lr_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    decoupled_weight_decay: bool = False
    nesterov: bool = False


@dataclass(frozen=True)
class FusedRule:
    """A fused kernel with its hyperparameters.

    Attributes:
        name: Name of the kernel, a value of `KERNELS`.
        states: Names of the optimizer's states for each parameter, beside the step counter.
        settings: Hyperparameters.
    """

    name: str
    states: tuple[str, ...]
    settings: KernelSettings

    @classmethod
    def of(cls, name: str, group: Mapping[str, Any]) -> FusedRule:
        """Return the rule of an optimizer group."""
        lr, weight_decay, maximize = float(group["lr"]), float(group["weight_decay"]), bool(group.get("maximize"))
        given = KernelSettings(lr, weight_decay, maximize=maximize)
        if name == "adam":
            amsgrad, (beta1, beta2) = bool(group.get("amsgrad")), group["betas"]
            given = KernelSettings(
                lr, weight_decay, float(group["eps"]), float(beta1), float(beta2), amsgrad=amsgrad, maximize=maximize,
                decoupled_weight_decay=bool(group.get("decoupled_weight_decay")),
            )  # fmt: skip
            states = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
            return cls(name, states if amsgrad else states[:2], given)
        if name == "sgd":
            given = given._replace(
                momentum=float(group["momentum"]),
                dampening=float(group["dampening"]),
                nesterov=bool(group.get("nesterov")),
            )
            return cls(name, ("momentum_buffer",) if given.momentum else (), given)
        return cls(name, ("sum",), given._replace(eps=float(group["eps"]), lr_decay=float(group["lr_decay"])))


class TileKind(NamedTuple):
    """The properties that all ranges of a part have in common.

    Attributes:
        tiled: Whether the ranges are stepped in tiles, see [Note: Tiles].
        dtype: Dtype of the weights.
        copied: Whether shadow copies are written.
        first: Whether the kernel initialises the momentum.
        clipped: Whether the gradients are still to be clipped.
    """

    tiled: bool
    dtype: torch.dtype
    copied: bool
    first: bool
    clipped: bool


class TileRange(NamedTuple):
    """A range of elements of one parameter, in the order in which they lie in memory.

    Attributes:
        tensors: Whole contiguous tensors: weight, gradient, states, and the shadow copy at the end if there is one.
        step: Step counter of the optimizer.
        kind: How the range is stepped; the ranges of one call of a kernel have the same kind.
        begin: First element.
        end: One past the last element.
    """

    tensors: list[Tensor]
    step: Tensor
    kind: TileKind
    begin: int
    end: int

    @property
    def is_cut(self) -> bool:
        """True if the range is only a part of the parameter."""
        return self.end - self.begin < self.tensors[0].numel()


@dataclass(frozen=True)
class Clip:
    """The clipping of gradients before the step: in place, except for gradients of another dtype than their weights.

    Attributes:
        bound: Largest absolute value; None: values are not clipped.
        coefficient: Factor applied after the bound, a tensor without dimensions; None: no factor.
    """

    bound: float | None = None
    coefficient: Tensor | None = None

    def __bool__(self) -> bool:
        """Return whether anything is to be clipped."""
        return self.bound is not None or self.coefficient is not None

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Clip gradients as `clip_grad_value_` and `clip_grad_norm_` of PyTorch do, in separate passes."""
        for gradient in gradients:
            _clip([gradient], *self.arguments)

    @property
    def arguments(self) -> tuple[list[float], list[Tensor]]:
        """Return `bound` and `coefficient` as TorchScript takes them: lists of one element, empty ones for None."""
        bounds = [] if self.bound is None else [float(self.bound)]
        return bounds, [] if self.coefficient is None else [self.coefficient]


NO_CLIP = Clip()


def whole(rule: FusedRule, part: Sequence[TileRange]) -> Callable[[], None]:
    """Return a call that steps whole parameters at once, without tiles."""
    columns = [list(column) for column in zip(*[piece.tensors for piece in part], strict=True)]
    steps, first = [piece.step for piece in part], part[0].kind.first
    return partial(_kernel, rule.name, columns[0], columns[1], columns[2:], steps, rule.settings, first)


def cut(tensors: list[list[Tensor]], ranges: list[tuple[int, int]]) -> list[list[Tensor]]:
    """Return views of ranges of contiguous tensors; compiled by TorchScript, see [Note: Walk]."""
    views: list[list[Tensor]] = []
    for i in range(len(tensors)):
        begin, end = ranges[i]
        views.append([tensor.as_strided([end - begin], [1], tensor.storage_offset() + begin) for tensor in tensors[i]])
    return views


def walk(
    name: str,
    tensors: list[list[Tensor]],
    steps: list[Tensor],
    ranges: list[tuple[int, int]],
    scratch: Tensor,
    tile: int,
    settings: KernelSettings,
    copied: bool,
    first: bool,
    bounds: list[float],
    coefficients: list[Tensor],
) -> None:
    """Step ranges tile by tile, in the subset of Python that TorchScript compiles, see [Note: Walk]."""
    for i in range(len(tensors)):
        start, end = ranges[i]
        cast = tensors[i][0].dtype != tensors[i][1].dtype
        # Split each tensor into all its views at once: one view at a time would cost twice as much.
        columns = [
            tensor.as_strided([end - start], [1], tensor.storage_offset() + start).split(tile) for tensor in tensors[i]
        ]
        for k in range(len(columns[0])):
            weights, gradients = [columns[0][k]], [columns[1][k]]
            states = [[column[k]] for column in columns[2:]]
            if copied:
                states.pop()
            if cast:
                gradients = [scratch.narrow(0, 0, weights[0].numel()).copy_(gradients[0])]
            _clip(gradients, bounds, coefficients)
            _kernel(name, weights, gradients, states, steps[i : i + 1], settings, first)
            # TorchScript would remove the kernel call as dead code if nothing used the list that it writes.
            if copied:
                columns[-1][k].copy_(weights[0])


def _clip(gradients: list[Tensor], bounds: list[float], coefficients: list[Tensor]) -> None:
    for bound in bounds:
        torch._foreach_clamp_min_(gradients, -bound)
        torch._foreach_clamp_max_(gradients, bound)
    for coefficient in coefficients:
        torch._foreach_mul_(gradients, coefficient)


def _kernel(
    name: str,
    weights: list[Tensor],
    gradients: list[Tensor],
    states: list[list[Tensor]],
    steps: list[Tensor],
    settings: KernelSettings,
    first: bool,
) -> None:
    lr, weight_decay, maximize = settings.lr, settings.weight_decay, settings.maximize
    if name == "adam":
        beta1, beta2, eps, amsgrad = settings.beta1, settings.beta2, settings.eps, settings.amsgrad
        largest = states[2] if amsgrad else states[0][:0]
        if settings.decoupled_weight_decay:
            torch._fused_adamw_(
                weights, gradients, states[0], states[1], largest, steps,
                lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=amsgrad, maximize=maximize,
            )  # fmt: skip
        else:
            torch._fused_adam_(
                weights, gradients, states[0], states[1], largest, steps,
                lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=amsgrad, maximize=maximize,
            )  # fmt: skip
    elif name == "sgd":
        torch._fused_sgd_(
            weights, gradients, states[0] if len(states) else weights[:0], weight_decay=weight_decay,
            momentum=settings.momentum, lr=lr, dampening=settings.dampening, nesterov=settings.nesterov,
            maximize=maximize, is_first_step=first,
        )  # fmt: skip
    else:
        torch._fused_adagrad_(
            weights, gradients, states[0], steps,
            lr=lr, lr_decay=settings.lr_decay, weight_decay=weight_decay, eps=settings.eps, maximize=maximize,
        )  # fmt: skip


def without_lock(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function compiled by TorchScript, which runs without Python's lock, see [Note: Walk]."""
    if sys.version_info >= (3, 14):  # TorchScript does not support it.
        return function
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)
