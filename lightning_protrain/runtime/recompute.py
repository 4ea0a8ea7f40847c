"""Activation checkpointing of one block.

[Note: Recomputation]
`torch.utils.checkpoint` in its non-reentrant form keeps what the block is given and nothing of what it computes. When
backward asks for the first saved tensor, the block's forward runs again, in the middle of backward and perhaps not to
its end. The random state is the one of the forward, so dropout repeats bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint
from torch import nn


def checkpoint(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `function(*args, **kwargs)` and forgets its activations, see [Note: Recomputation]."""
    return torch.utils.checkpoint.checkpoint(functools.partial(function, **kwargs), *args, use_reentrant=False)


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
