"""Activation checkpointing of one block.

[Note: Recomputation]
`torch.utils.checkpoint` in its non-reentrant form keeps what the block is given and nothing of what it computes. When
backward asks for the first saved tensor, the block's forward runs again, in the middle of backward and perhaps not to
its end. The random state is the one of the forward, so dropout repeats bit for bit. Buffers are those of
before the forward meanwhile, or running statistics would count every batch twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch.utils.checkpoint
from torch import nn


def checkpoint(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module) -> Any:
    """Calls `function(*args, **kwargs)`, the forward of `module`, and forgets activations: [Note: Recomputation]."""

    def positional(*values: Any) -> Any:
        return function(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

    # PyTorch notices that an input was changed in place before the recomputation only where it is positional.
    buffers = _EarlierBuffers(module)
    return torch.utils.checkpoint.checkpoint(
        positional,
        *args,
        *kwargs.values(),
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), buffers),
    )


class _EarlierBuffers:
    """Within it, `module` has copies of the buffers that it had when this was made; what happens to them is forgotten.

    Copies stand in for the buffers: to write the old values back would look to autograd like a change of what the
    recomputation has saved.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (owner._buffers, name, buffer)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._earlier = {id(buffer): buffer.clone() for _, _, buffer in self._places}
        self._now: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        self._now = [buffers[name] for buffers, name, _ in self._places]
        copies = {key: buffer.clone() for key, buffer in self._earlier.items()}
        for buffers, name, buffer in self._places:
            buffers[name] = copies[id(buffer)]

    def __exit__(self, *exception: object) -> None:
        for (buffers, name, _), buffer in zip(self._places, self._now, strict=True):
            buffers[name] = buffer


def refuse_own_checkpointing(model: nn.Module) -> None:
    """The plan decides which blocks are checkpointed; twice would recompute twice.

    Raises:
        ValueError: The user has switched gradient checkpointing on.
    """
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ValueError(
                f"Gradient checkpointing is switched on in {name!r}, but the plan decides which blocks are "
                "checkpointed. Remove the call (`model.gradient_checkpointing_disable()`)."
            )


def stop_caching(model: nn.Module) -> list[Any]:
    """Switches key-value caches off, which a block that runs twice would fill twice.

    Returns:
        The configurations whose `use_cache` was on and has to be set back.
    """
    configs: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    caching = [config for config in configs.values() if getattr(config, "use_cache", False) is True]
    for config in caching:
        config.use_cache = False
    return caching
