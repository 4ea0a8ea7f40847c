"""Weights that a step reads without calling their module, on a device other than the host's.

[Note: Direct reads]
Outside blocks, a streamed weight is on the device only while its module runs. Some models read it elsewhere: a row of
an embedding as padding, a table of positions that is interpolated, or only `weight.device`, to move an input there. On
the CPU the host parameter answers. On a GPU, for the time of a step, its class overrides `__torch_function__`: `device`
is that of the computation, and an operation gets a copy on the device; of a weight that is indexed, only the part.
Autograd records the copy, so the gradient arrives at the host parameter, see [Note: Direct use] in grad_offload.py.
Writes, `data` and `detach()` go to the host parameter, as do all reads in training while gradients are off: a write may
follow.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_protrain.runtime.access_guard import DESCRIPTIONS, NO_VALUES, AccessGuard, can_be_watched
from lightning_protrain.runtime.param import OffloadedParam

_ATTRIBUTES: Any = Tensor
_PLACES = (_ATTRIBUTES.device.__get__, _ATTRIBUTES.is_cuda.__get__)
# Functions that answer for the host parameter.
_OF_HOST = DESCRIPTIONS | NO_VALUES | {_ATTRIBUTES.data.__get__, _ATTRIBUTES.data.__set__, Tensor.detach, Tensor.cpu}
_OF_HOST |= {Tensor.data_ptr, Tensor.untyped_storage, Tensor.is_pinned, Tensor.is_shared, Tensor.numpy, Tensor.tolist}
_OF_HOST |= {Tensor.__reduce_ex__, Tensor.__repr__, Tensor.__format__}
# Functions that return a part of a parameter.
_PARTS = frozenset((Tensor.__getitem__, Tensor.select, Tensor.narrow, torch.select, torch.narrow))
_NO_WRITES = frozenset(("__iter__", "__int__", "__index__", "__invert__"))


class DirectReads:
    """Lets a step read weights outside blocks where it computes, see [Note: Direct reads].

    Args:
        device: Device that computes.
        guard: A guard that may watch some of the parameters.
        log_once: Shows a sentence to the user.
    """

    def __init__(self, device: torch.device, guard: AccessGuard, log_once: Callable[[str], None]) -> None:
        self._params: dict[int, OffloadedParam] = {}
        self._device = device
        self._guard = AccessGuard(lambda _: None, beside=guard)
        self._log_once = log_once
        self._training = False

    def add(self, params: Iterable[OffloadedParam]) -> None:
        """Let steps read these parameters, which no block has."""
        self._params |= {id(param.host): param for param in params if can_be_watched(param.host)}

    @property
    def has_any(self) -> bool:
        """True if there are parameters that a step may read."""
        return bool(self._params)

    def close(self) -> None:
        """Forget the parameters."""
        self._params.clear()

    @contextmanager
    def allowed(self, training: bool) -> Generator[None]:
        """Answer reads on the device in this context: a step, or the recomputation of a block."""
        if not self._params or self._guard.register.reader is not None:
            yield
            return
        self._training = training
        self._guard.register.reader = self._read
        self._guard.watch(param.host for param in self._params.values())
        try:
            yield
        finally:
            self._guard.unwatch([param.host for param in self._params.values()])
            self._guard.register.reader = None

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of PyTorch, of whose arguments some may be parameters."""
        if func in _PLACES and id(args[0]) in self._params:
            return self._device if func == _PLACES[0] else self._device.type == "cuda"
        silent = self._training and not torch.is_grad_enabled()
        if silent or func in _OF_HOST or _writes(func) or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        read = {id(leaf): self._params[id(leaf)] for leaf in leaves if id(leaf) in self._params}
        for param in read.values():
            self._log_once(
                f"{param.fqn!r} is read without a call of its module: each read copies it to the device. If it is "
                "large, make its chunk resident (`num_persistent_chunks`)."
            )
        if read and func in _PARTS and len(read) == len(leaves):
            return func(*args, **kwargs).to(self._device)
        if read:
            args, kwargs = tree_map(lambda leaf: leaf.to(self._device) if id(leaf) in read else leaf, (args, kwargs))
        return func(*args, **kwargs)


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NO_WRITES)
    return name.endswith("_")
