"""Activation checkpointing of one block.

[Note: Recomputation]
`torch.utils.checkpoint` in its non-reentrant form keeps what the block is given and nothing of what it computes. Backward
asks for the first saved tensor, the block's forward runs again, in the middle of backward and perhaps not to its end. The
random state is the one of the forward, so dropout repeats bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint


def checkpoint(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `function(*args, **kwargs)` and forgets its activations, see [Note: Recomputation]."""
    return torch.utils.checkpoint.checkpoint(functools.partial(function, **kwargs), *args, use_reentrant=False)
