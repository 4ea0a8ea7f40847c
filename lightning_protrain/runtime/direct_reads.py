"""Weights that a model reads without calling their module, on a device other than the host's.

[Note: Direct reads]
Outside blocks, a streamed weight is on the device only while its module runs. Some models read it elsewhere: a row of
an embedding as padding, a table of positions that is interpolated, or only `weight.device`, to move an input there. On
the CPU the host parameter answers. On a GPU, while a module around it runs, its class overrides `__torch_function__`:
`device` is that of the computation, and an operation gets a copy on the device; of a weight that is indexed, only the
part. Autograd records the copy, so the gradient arrives at the host parameter, see [Note: Direct use] in
grad_offload.py. Writes, `data` and `detach()` go to the host parameter. A write to a part that was read, which would be
lost, is refused. The code of a step around the model, such as a penalty over all weights, sees host parameters as ever.
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
_OF_HOST = DESCRIPTIONS | NO_VALUES | {_ATTRIBUTES.data.__get__, Tensor.detach, torch.detach, Tensor.cpu}
_OF_HOST |= {Tensor.data_ptr, Tensor.untyped_storage, Tensor.is_pinned, Tensor.is_shared, Tensor.numpy, Tensor.tolist}
_OF_HOST |= {Tensor.__reduce_ex__, Tensor.__repr__, Tensor.__format__, Tensor.__len__, Tensor.is_contiguous}
_OF_HOST |= {Tensor.storage_offset, Tensor.nelement, Tensor.ndimension, Tensor.retain_grad, torch.autograd.grad}
_OF_HOST |= {Tensor.register_post_accumulate_grad_hook, Tensor.pin_memory}
# Functions that return a part of a parameter.
_PARTS = frozenset((Tensor.__getitem__, Tensor.select, Tensor.narrow, torch.select, torch.narrow))
_NO_WRITES = frozenset(("__iter__", "__int__", "__index__", "__invert__"))


class DirectReads:
    """Lets a model read weights outside blocks where it computes, see [Note: Direct reads].

    Args:
        device: Device that computes.
        guard: A guard that may watch some of the parameters.
        log_once: Shows a sentence to the user.
        note: Called with each parameter that is read.
        settle: Waits until uploads have read the host's memory; called before a parameter is written to.
    """

    def __init__(
        self,
        device: torch.device,
        guard: AccessGuard,
        log_once: Callable[[str], None],
        note: Callable[[OffloadedParam], None],
        settle: Callable[[], None],
    ) -> None:
        self._params: dict[int, OffloadedParam] = {}
        self._device = device
        self._guard = AccessGuard(lambda _: None, beside=guard)
        self._log_once = log_once
        self._note = note
        self._settle = settle
        self._said: set[str] = set()
        self._read_parts: list[tuple[Tensor, str]] = []  # Without gradients, a part may be written to.

    def add(self, params: Iterable[OffloadedParam]) -> None:
        """Let the model read these parameters, which no block has."""
        self._params |= {id(param.host): param for param in params if can_be_watched(param.host)}

    @property
    def names(self) -> list[str]:
        """Fully qualified names of the parameters that may be read."""
        return [param.fqn for param in self._params.values()]

    def close(self) -> None:
        """Forget the parameters."""
        self.end()
        self._params.clear()

    def begin(self) -> bool:
        """Answer reads on the device until `end`; return False if that is so already, or there are no parameters."""
        if not self._params or self._guard.register.reader is not None:
            return False
        self._guard.register.reader = self._read
        self._guard.watch(param.host for param in self._params.values())
        return True

    def end(self) -> None:
        """Leave the parameters to the host; safe to call again."""
        self._guard.unwatch([param.host for param in self._params.values()])
        self._guard.register.reader = None
        self._read_parts.clear()

    @contextmanager
    def allowed(self) -> Generator[None]:
        """Answer reads on the device in this context.

        Raises:
            RuntimeError: A part of a weight that was read has been written to.
        """
        if not self.begin():
            yield
            return
        try:
            yield
            for part, fqn in self._read_parts:
                if part._version:
                    raise RuntimeError(
                        f"{fqn!r} is streamed, and a part of it was changed in place outside its module, which changes "
                        "a copy. Write to the whole weight (`weight[rows] = values`), or make its chunk resident "
                        "(`num_persistent_chunks`)."
                    )
        finally:
            self.end()

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of PyTorch, of whose arguments some may be parameters."""
        if func in _PLACES and id(args[0]) in self._params:
            return self._device if func == _PLACES[0] else self._device.type == "cuda"
        if func in _OF_HOST:
            return func(*args, **kwargs)
        target = kwargs["out"] if kwargs.get("out") is not None else args[:1] if _writes(func) else ()
        if self._among(target):
            self._settle()
            args, kwargs = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, (args, kwargs))
            return func(*args, **kwargs)
        read = self._among((args, kwargs))
        self._tell(read.values())
        if func in _PARTS and len(read) == sum(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            copies = [func(*args, **kwargs).to(self._device)]
            result = copies[0]
        else:
            moved = {key: param.host.to(self._device) for key, param in read.items()}
            args, kwargs = tree_map(lambda leaf: moved.get(id(leaf), leaf), (args, kwargs))
            copies, result = list(moved.values()), func(*args, **kwargs)
        if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            self._read_parts += [(copy, param.fqn) for copy, param in zip(copies, read.values(), strict=True)]
        return result

    def _among(self, values: Any) -> dict[int, OffloadedParam]:
        """Return the parameters in nested values, by identity."""
        return {id(leaf): self._params[id(leaf)] for leaf in tree_leaves(values) if id(leaf) in self._params}

    def _tell(self, read: Iterable[OffloadedParam]) -> None:
        for param in read:
            self._note(param)
            if param.fqn not in self._said:
                self._said.add(param.fqn)
                self._log_once(
                    f"{param.fqn!r} is read without a call of its module: each read copies it to the device. If it is "
                    "large, make its chunk resident (`num_persistent_chunks`)."
                )


def _writes(func: Any) -> bool:
    """Return True if a function changes its first argument."""
    name = getattr(func, "__name__", "")
    if name.endswith("__"):
        return name in ("__set__", "__delete__", "__setitem__") or (name.startswith("__i") and name not in _NO_WRITES)
    return name.endswith("_")
