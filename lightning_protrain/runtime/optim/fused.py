"""PyTorch's fused CPU kernels: their hyperparameters and states, and the clipping of gradients.

The kernels are vectorised, and the scalar loop over the last elements of a range rounds differently. PyTorch divides a
tensor between its threads at multiples of a cache line, so only the last elements of a tensor meet the scalar loop,
with any number of threads. A tile begins at a multiple of `LINE` elements from the start of its tensor. So every
element takes the same path as in one call for the whole tensor, and the result is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

# Number of elements: a multiple of the length of every vector and every cache line.
LINE = 64
# By exact class, as a derived class may step in another way.
KERNELS: dict[type[Optimizer], str] = {Adam: "adam", AdamW: "adam", SGD: "sgd", Adagrad: "adagrad"}


def _order(parameter: Tensor) -> list[int]:
    return sorted(range(parameter.dim()), key=parameter.stride, reverse=True)


def is_dense(parameter: Tensor) -> bool:
    """Return whether the memory of a parameter has no gaps."""
    return parameter.is_contiguous() or parameter.permute(_order(parameter)).is_contiguous()


def in_order(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return the elements of `tensor`, flat, in the order of the parameter's memory; a view if possible."""
    if not parameter.is_contiguous():
        tensor = tensor.permute(_order(parameter))
    return tensor.contiguous().view(-1)


def laid_out_as(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return `tensor` with the memory layout of the parameter: itself if it has that layout, else a copy."""
    if tensor.permute(_order(parameter)).is_contiguous():
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)


class FlatState(NamedTuple):
    """A parameter and its state, flat.

    Attributes:
        weight: Weights.
        states: States of the optimizer.
        step: Step counter of the optimizer.
    """

    weight: Tensor
    states: Sequence[Tensor]
    step: Tensor


@dataclass(frozen=True)
class FusedRule:
    """A fused kernel with its hyperparameters.

    Attributes:
        name: Name of the kernel, a value of `KERNELS`.
        states: Names of the optimizer's states for each parameter, beside the step counter.
        settings: Arguments of the kernel.
    """

    name: str
    states: tuple[str, ...]
    settings: dict[str, Any]

    @classmethod
    def of(cls, name: str, group: Mapping[str, Any]) -> FusedRule:
        """Return the rule of an optimizer group."""
        settings: dict[str, Any] = {
            "lr": float(group["lr"]),
            "weight_decay": float(group["weight_decay"]),
            "maximize": bool(group.get("maximize")),
        }
        if name == "adam":
            amsgrad, (beta1, beta2) = bool(group.get("amsgrad")), group["betas"]
            settings |= {"beta1": float(beta1), "beta2": float(beta2), "eps": float(group["eps"]), "amsgrad": amsgrad}
            states = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
            decoupled = bool(group.get("decoupled_weight_decay"))
            return cls("adamw" if decoupled else name, states if amsgrad else states[:2], settings)
        if name == "sgd":
            settings |= {key: float(group[key]) for key in ("momentum", "dampening")}
            settings["nesterov"] = bool(group.get("nesterov"))
            return cls(name, ("momentum_buffer",) if settings["momentum"] else (), settings)
        return cls(name, ("sum",), settings | {"eps": float(group["eps"]), "lr_decay": float(group["lr_decay"])})

    def first_state(self, optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state that PyTorch's own fused step would make for a parameter."""
        if self.name == "sgd":  # SGD counts no steps, and the kernel fills the momentum.
            return {name: torch.empty_like(parameter) for name in self.states}
        start = optimizer.defaults["initial_accumulator_value"] if self.name == "adagrad" else 0.0
        state = {name: torch.full_like(parameter, start) for name in self.states}
        return {"step": torch.zeros((), dtype=torch.float32), **state}

    def step(self, whole: FlatState, first: bool, place: slice, gradient: Tensor) -> None:
        """Run the kernel on some elements of a parameter.

        Args:
            whole: The parameter; its step counter has been increased.
            first: Whether the kernel initialises the momentum of SGD.
            place: The elements.
            gradient: Their gradient, in the dtype of the weights.
        """
        weights, gradients, steps = [whole.weight[place]], [gradient], [whole.step]
        states: list[Any] = [[state[place]] for state in whole.states]
        if self.name == "sgd":
            torch._fused_sgd_(weights, gradients, *(states or [[]]), is_first_step=first, **self.settings)
        elif self.name == "adagrad":
            torch._fused_adagrad_(weights, gradients, states[0], steps, **self.settings)
        else:
            kernel: Any = torch._fused_adamw_ if self.name == "adamw" else torch._fused_adam_
            largest = states[2:] or [[]]
            kernel(weights, gradients, *states[:2], *largest, steps, **self.settings)


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

    def apply(self, gradients: Iterable[Tensor]) -> None:
        """Clip gradients as `clip_grad_value_` and `clip_grad_norm_` of PyTorch do."""
        for gradient in gradients:
            if self.bound is not None:
                torch._foreach_clamp_min_([gradient], -self.bound)
                torch._foreach_clamp_max_([gradient], self.bound)
            if self.coefficient is not None:
                torch._foreach_mul_([gradient], self.coefficient)


NO_CLIP = Clip()
