"""PyTorch's fused CPU kernels: their hyperparameters, their states, and a walk over tiles that needs no Python's lock.

[Note: Tiles]
The kernels want the gradient in the dtype of the weight. Where it arrives in a lower precision, the new weight is
wanted in a lower precision too, or the gradient has still to be clipped, each of these as a pass of its own over main
memory would cost a good part of another step. So the work goes in *tiles* that stay in the cache: clip the gradient,
cast it into a scratch tile, run the fused kernel, write the copy. Where there is none of that, one call takes all
tensors as they are.

The kernels are vectorised, and the scalar loop over the last elements of a range rounds differently. PyTorch divides a
tensor between its threads at multiples of a cache line, so only the last elements of a tensor meet the scalar loop,
with any number of threads. A tile begins at a multiple of `LINE` elements from the start of its tensor: every element
takes the same way as in one call for the whole tensor, and the result is the same bit for bit.

[Note: Walk]
Python's lock has to be taken after every call of a kernel, and of what only cuts a view, too. A thread busy in Python
gives it up only after the interpreter's switch interval, 5 ms, many times what a tile takes. So the walk over the tiles
of a part is run by TorchScript, which needs no compiler and works without the lock; the lock is taken once per part.
Where there is no TorchScript (Python 3.14), the same function runs as it stands, and computes the same.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

# Elements: a multiple of every vector and of every cache line, see [Note: Tiles].
LINE = 64
# Of exactly these classes; a class derived from one may step in another way.
KERNELS: dict[type[Optimizer], str] = {Adam: "adam", AdamW: "adam", SGD: "sgd", Adagrad: "adagrad"}
_NUMBERS = {
    "adam": ("lr", "weight_decay", "eps"),
    "sgd": ("lr", "weight_decay", "momentum", "dampening"),
    "adagrad": ("lr", "weight_decay", "eps", "lr_decay"),
}
_FLAGS = {"adam": ("maximize", "amsgrad", "decoupled_weight_decay"), "sgd": ("maximize", "nesterov")}


@dataclass(frozen=True)
class Rule:
    """A fused kernel with its hyperparameters.

    Attributes:
        name: One of `KERNELS`.
        states: What the optimizer keeps for each parameter, beside a counter of steps.
        numbers: By the name of the argument.
        flags: The same.
    """

    name: str
    states: tuple[str, ...]
    numbers: dict[str, float]
    flags: dict[str, bool]

    @classmethod
    def of(cls, name: str, group: Mapping[str, Any]) -> Rule:
        """The rule of a group of an optimizer."""
        numbers = {key: float(group[key]) for key in _NUMBERS[name]}
        flags = {key: bool(group.get(key)) for key in _FLAGS.get(name, ("maximize",))}
        states: tuple[str, ...] = ("sum",)
        if name == "adam":
            beta1, beta2 = group["betas"]
            numbers["beta1"], numbers["beta2"] = float(beta1), float(beta2)
            states = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if flags["amsgrad"] else ("exp_avg", "exp_avg_sq")
        elif name == "sgd":
            states = ("momentum_buffer",) if numbers["momentum"] else ()
        return cls(name, states, numbers, flags)


class Kind(NamedTuple):
    """What must be the same in all pieces of a part.

    Attributes:
        tiled: Whether it goes in tiles, see [Note: Tiles].
        dtype: Of the weight.
        copied: Whether there is a copy.
        first: Whether the kernel is to make the momentum.
        clipped: Whether the gradient has still to be clipped.
    """

    tiled: bool
    dtype: torch.dtype
    copied: bool
    first: bool
    clipped: bool


class Piece(NamedTuple):
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
    kind: Kind
    begin: int
    end: int

    @property
    def is_cut(self) -> bool:
        """Whether there are other elements."""
        return self.end - self.begin < self.tensors[0].numel()


@dataclass(frozen=True)
class Clip:
    """What is done to gradients, in place, before they are used.

    Attributes:
        bound: No value is larger than that, or smaller than the negative of it; None: as they are.
        coefficient: What they are multiplied by then, a tensor without dimensions; None: by nothing.
    """

    bound: float | None = None
    coefficient: Tensor | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return self.bound is not None or self.coefficient is not None

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """As `torch.nn.utils.clip_grad_value_` and `clip_grad_norm_` do it, in passes of their own."""
        for gradient in gradients:
            _clip([gradient], *self.arguments)

    @property
    def arguments(self) -> tuple[list[float], list[Tensor]]:
        """Bound and coefficient as TorchScript takes them: lists of at most one."""
        bounds = [] if self.bound is None else [float(self.bound)]
        return bounds, [] if self.coefficient is None else [self.coefficient]


NO_CLIP = Clip()


def whole(rule: Rule, part: Sequence[Piece]) -> Callable[[], None]:
    """What steps whole parameters in one call, without tiles."""
    columns = [list(column) for column in zip(*[piece.tensors for piece in part], strict=True)]
    steps = [piece.step for piece in part]
    arguments: dict[str, Any] = {**rule.numbers, **rule.flags}
    if rule.name == "adam":
        kernel = torch._fused_adamw_ if arguments.pop("decoupled_weight_decay") else torch._fused_adam_
        return partial(kernel, *columns[:4], columns[4] if len(columns) > 4 else [], steps, **arguments)
    if rule.name == "sgd":
        momentum = columns[2] if len(columns) > 2 else []
        return partial(torch._fused_sgd_, *columns[:2], momentum, is_first_step=part[0].kind.first, **arguments)
    return partial(torch._fused_adagrad_, *columns, steps, **arguments)


def walk(
    name: str,
    tensors: list[list[Tensor]],
    steps: list[Tensor],
    ranges: list[tuple[int, int]],
    scratch: Tensor,
    tile: int,
    numbers: dict[str, float],
    flags: dict[str, bool],
    bounds: list[float],
    coefficients: list[Tensor],
) -> None:
    """Steps pieces tile by tile, in the part of Python that TorchScript knows, see [Note: Walk]."""
    copied = flags["copied"]
    for i in range(len(tensors)):
        flat = [tensor.view(-1) for tensor in tensors[i]]
        start, end = ranges[i]
        cast = flat[0].dtype != flat[1].dtype
        for begin in range(start, end, tile):
            length = min(tile, end - begin)
            views = [tensor.narrow(0, begin, length) for tensor in flat]
            weights, gradients, states = views[0:1], views[1:2], [[view] for view in views[2:]]
            if copied:
                states.pop()
            _clip(gradients, bounds, coefficients)
            if cast:
                gradients = [scratch.narrow(0, 0, length).copy_(gradients[0])]
            _kernel(name, weights, gradients, states, steps[i : i + 1], numbers, flags)
            # Without this use of the list that the kernel has written, TorchScript would take it for dead code.
            if copied:
                views[-1].copy_(weights[0])


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
    numbers: dict[str, float],
    flags: dict[str, bool],
) -> None:
    lr, weight_decay, maximize = numbers["lr"], numbers["weight_decay"], flags["maximize"]
    if name == "adam":
        beta1, beta2, eps, amsgrad = numbers["beta1"], numbers["beta2"], numbers["eps"], flags["amsgrad"]
        largest = states[2] if amsgrad else states[0][:0]
        if flags["decoupled_weight_decay"]:
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
            momentum=numbers["momentum"], lr=lr, dampening=numbers["dampening"], nesterov=flags["nesterov"],
            maximize=maximize, is_first_step=flags["first"],
        )  # fmt: skip
    else:
        torch._fused_adagrad_(
            weights, gradients, states[0], steps,
            lr=lr, lr_decay=numbers["lr_decay"], weight_decay=weight_decay, eps=numbers["eps"], maximize=maximize,
        )  # fmt: skip


def without_lock(function: Callable[..., None]) -> Callable[..., None]:
    """The function in TorchScript, which runs without Python's lock, see [Note: Walk]."""
    if sys.version_info >= (3, 14):  # TorchScript ends there
        return function
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)
