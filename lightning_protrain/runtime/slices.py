"""Runs a row-wise forward on one slice of the tokens after the other, see [Note: Slices] in profiler/row_wise.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_protrain.profiler.row_wise import rows_of, takes_slices
from lightning_protrain.runtime.recompute import checkpoint_call


def run_in_slices(forward: Callable[[Tensor], Tensor], given: Tensor, slice_tokens: int) -> Tensor:
    """Return the result of a row-wise forward, which runs on at most `slice_tokens` tokens at a time.

    Args:
        forward: The forward; it maps each token alone.
        given: Its input, [tokens, ...] or [batch, tokens, ...].
        slice_tokens: Maximum number of tokens of a slice; at least one token or one sample is in each.
    """
    rows = rows_of(given)
    count = -(-rows.numel() // slice_tokens)
    if count <= 1:
        return forward(given)
    dim = 0 if rows[0] >= count else 1
    parts = given.split(-(-rows[dim] // count), dim)

    def run(part: Tensor) -> Tensor:
        return forward(part.contiguous())

    if not torch.is_grad_enabled():
        return torch.cat([run(part) for part in parts], dim)
    return torch.cat([checkpoint_call(run, part, preserve_rng_state=False) for part in parts], dim)


class ForwardReplacement:
    """A replacement of `module.forward`, or of another method, while a plan is applied.

    Replacing `forward` on the instance changes no name, adds no module and leaves every hook of the user in place.

    Args:
        name: Name of the module.
        module: The module.
        method: Name of the method.
    """

    def __init__(self, name: str, module: nn.Module, method: str = "forward") -> None:
        functools.update_wrapper(self, getattr(module, method))  # It copies attributes, so it comes first.
        self.name = name
        self._module = module
        self._method = method
        self._had_own = module.__dict__.get(method)
        self._forward: Callable[..., Any] = getattr(module, method)

    @property
    def is_running(self) -> bool:
        """True while the module runs its forward with weights of the device."""
        return False

    def put_on(self) -> None:
        """Replace the method of the module."""
        self._module.__dict__[self._method] = self

    def take_off(self) -> None:
        """Restore the method of the module."""
        if self._had_own is None:
            self._module.__dict__.pop(self._method, None)
        else:
            self._module.__dict__[self._method] = self._had_own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __reduce__(self) -> NoReturn:
        raise ValueError(
            f"The model cannot be pickled while its plan is applied, which replaces the forward of {self.name!r}. Save "
            "its `state_dict()`, or use `trainer.save_checkpoint`."
        )


class SlicedForward(ForwardReplacement):
    """A forward that runs on slices of the tokens.

    Args:
        name: Name of the module.
        module: The module, which is row-wise.
        slice_tokens: Maximum number of tokens of a slice.
    """

    def __init__(self, name: str, module: nn.Module, slice_tokens: int) -> None:
        super().__init__(name, module)
        self._slice_tokens = slice_tokens

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not takes_slices(args, kwargs):
            return self._forward(*args, **kwargs)
        return run_in_slices(self._forward, args[0], self._slice_tokens)
