"""PyTorch's fused CPU kernels: their hyperparameters, their states, and a walk over tiles that needs no Python's lock.

[Note: Tiles]
The kernels want the gradient in the dtype of the weight. Where it arrives in a lower precision, the new weight is
wanted in a lower precision too, or the gradient has still to be clipped, each of these as a pass of its own over main
memory would cost a good part of another step. So the work goes in *tiles* that stay in the cache: cast the gradient
into a scratch tile, clip it, run the fused kernel, write the copy, which may lie where the gradient was. Where there is
none of that, one call takes all tensors as they are.

The kernels are vectorised, and the scalar loop over the last elements of a range rounds differently. PyTorch divides a
tensor between its threads at multiples of a cache line, so only the last elements of a tensor meet the scalar loop,
with any number of threads. A tile begins at a multiple of `LINE` elements from the start of its tensor: every element
takes the same way as in one call for the whole tensor, and the result is the same bit for bit.

[Note: Walk]
Python's lock has to be taken after every call of a kernel, and of what only cuts a view, too. A thread busy in Python
gives it up only after the interpreter's switch interval, 5 ms, many times what a tile takes. So the walk over the tiles
of a part is run by TorchScript, which needs no compiler and works without the lock; the lock is taken once per part.
Where there is no TorchScript (Python 3.14), the same function runs as it stands, and computes the same. Right after
gigabytes have gone through the caches, a call of TorchScript takes some 0.2 ms, twice that of a kernel itself: what
needs no tiles is cut beforehand, and the kernel called directly.
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
# Elements: a multiple of every vector and of every cache line, see [Note: Tiles].
LINE = 64
# Of exactly these classes; a class derived from one may step in another way.
KERNELS: dict[type[Optimizer], str] = {Adam: "adam", AdamW: "adam", SGD: "sgd", Adagrad: "adagrad"}


class KernelSettings(NamedTuple):
    """The hyperparameters of a kernel; those that it does not have do not count.

    TorchScript reads them as fast as variables: a dictionary would cost it more than the kernel does for a small tile.
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
        name: One of `KERNELS`.
        states: What the optimizer keeps for each parameter, beside a counter of steps.
        settings: The hyperparameters.
    """

    name: str
    states: tuple[str, ...]
    settings: KernelSettings

    @classmethod
    def of(cls, name: str, group: Mapping[str, Any]) -> FusedRule:
        """Return the rule of an optimizer's group."""
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
    """The properties that all pieces of a part have in common.

    Attributes:
        tiled: True if the part is stepped in tiles, see [Note: Tiles].
        dtype: Dtype of the weight.
        copied: True if there is a copy.
        first: True if the kernel is to make the momentum.
        clipped: True if the gradient still has to be clipped.
    """

    tiled: bool
    dtype: torch.dtype
    copied: bool
    first: bool
    clipped: bool


class TileRange(NamedTuple):
    """Some elements of one parameter, in the order in which they lie in memory.

    Attributes:
        tensors: Whole and contiguous: weight, gradient, states, and the copy at the end if there is one.
        step: The counter of the optimizer.
        kind: Of the part that it can be in.
        begin: The first of the elements.
        end: Behind the last one.
    """

    tensors: list[Tensor]
    step: Tensor
    kind: TileKind
    begin: int
    end: int

    @property
    def is_cut(self) -> bool:
        """True if the parameter has more elements than this range."""
        return self.end - self.begin < self.tensors[0].numel()


@dataclass(frozen=True)
class Clip:
    """Clipping of gradients before they are used: in place, unless their dtype is not the weight's.

    Attributes:
        bound: Bound of the absolute values; None means no bound.
        coefficient: Factor after that, a tensor without dimensions; None means no factor.
    """

    bound: float | None = None
    coefficient: Tensor | None = None

    def __bool__(self) -> bool:
        """Return True if there is anything to do."""
        return self.bound is not None or self.coefficient is not None

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Clip like `torch.nn.utils.clip_grad_value_` and `clip_grad_norm_`, in passes of their own."""
        for gradient in gradients:
            _clip([gradient], *self.arguments)

    @property
    def arguments(self) -> tuple[list[float], list[Tensor]]:
        """Bound and coefficient as TorchScript takes them: lists of at most one."""
        bounds = [] if self.bound is None else [float(self.bound)]
        return bounds, [] if self.coefficient is None else [self.coefficient]


NO_CLIP = Clip()


def whole(rule: FusedRule, part: Sequence[TileRange]) -> Callable[[], None]:
    """Return a call that steps whole parameters at once, without tiles."""
    columns = [list(column) for column in zip(*[piece.tensors for piece in part], strict=True)]
    steps, first = [piece.step for piece in part], part[0].kind.first
    return partial(_kernel, rule.name, columns[0], columns[1], columns[2:], steps, rule.settings, first)


def cut(tensors: list[list[Tensor]], ranges: list[tuple[int, int]]) -> list[list[Tensor]]:
    """Return views of some elements of contiguous tensors; for TorchScript, see [Note: Walk]."""
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
    """Step pieces tile by tile, in the subset of Python that TorchScript compiles, see [Note: Walk]."""
    for i in range(len(tensors)):
        start, end = ranges[i]
        cast = tensors[i][0].dtype != tensors[i][1].dtype
        # All views of a tensor at once: cut one by one, they would cost twice as much.
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
            # Without this use of the list that the kernel has written, TorchScript would take it for dead code.
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
    """Return the function in TorchScript, which runs without the GIL, see [Note: Walk]."""
    if sys.version_info >= (3, 14):  # TorchScript ends there
        return function
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)
