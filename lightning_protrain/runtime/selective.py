"""Keeps the products of a forward for the time when it runs again.

[Note: Selective recomputation]
A block may keep its products, see [Note: Products]. When its forward runs again, in the middle of backward,
each product is found in place of being computed, and is let go then: who still needs it is autograd. Where the graph is
to be gone through once more (`retain_graph`), it stays. Where backward comes to the block in parts (from one of its
outputs, later from another), what has been let go is computed. Both runs are watched operation by operation, in Python;
not what a backward inside of the forward (`torch.autograd.grad`) does. PyTorch compiles nothing that is watched so.

What stays must not change: a product that is written to in place, in the block or by whoever gets it, is refused.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lightning_protrain.products import is_product


class Products:
    """The products of one call of a block, in the order in which they are made.

    Args:
        name: Of the block, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._made: list[tuple[Any, Any]] = []
        self._next = 0

    def rewind(self) -> None:
        """The forward begins to run again."""
        self._next = 0

    def keep(self, func: Any, made: Any) -> None:
        """Keeps what `func` has made, without its history."""
        self._made.append((func, tree_map_only(Tensor, _Kept, made)))

    def find(self, func: Any) -> Any:
        """What `func` made in its turn; None: it has been let go.

        Raises:
            ValueError: It was another one's turn, or what it made has been changed since.
        """
        index, self._next = self._next, self._next + 1
        earlier, kept = self._made[index] if index < len(self._made) else (None, None)
        if earlier is not func:
            raise ValueError(
                f"{self.name!r} is recomputed, and does not call the operations that it called before: {func} in place "
                f"of {earlier or 'none'}. Let its forward do the same every time, or keep all its activations."
            )
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._made[index] = func, None
        return tree_map_only(_Kept, self._get, kept)

    def _get(self, kept: _Kept) -> Tensor:
        if kept.tensor._version != kept.version:
            raise ValueError(
                f"{self.name!r} keeps its products for its recomputation, and one of them, of shape "
                f"{tuple(kept.tensor.shape)}, has been changed in place since. Change it out of place (`x = x + y` for "
                "`x += y`), or checkpoint the block as a whole (`num_checkpoint_blocks`)."
            )
        return _alias(kept.tensor)


class _Kept:
    """A tensor as it is now."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = _alias(tensor)
        self.version = tensor._version


class _Watching(TorchDispatchMode):
    """Around a run of a forward.

    Args:
        products: Of the call.
    """

    def __init__(self, products: Products) -> None:
        super().__init__()
        self._products = products
        self._backward = -1

    def __enter__(self) -> Self:
        self._backward = torch._C._current_graph_task_id()
        super().__enter__()
        return self

    def _makes_product(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Another backward, which has begun since, may not run in both runs, or not in the same order."""
        if not isinstance(func, torch._ops.OpOverload) or torch._C._current_graph_task_id() != self._backward:
            return False
        return is_product(func, args, kwargs)


class Keeping(_Watching):
    """Around the first run of a forward; its products are kept."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Part of `TorchDispatchMode`."""
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if self._makes_product(func, args, kwargs):
            self._products.keep(func, made)
        return made


class Finding(_Watching):
    """Around the run in backward; its products are found."""

    def __enter__(self) -> Self:
        self._products.rewind()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Part of `TorchDispatchMode`."""
        kwargs = kwargs or {}
        found = self._products.find(func) if self._makes_product(func, args, kwargs) else None
        return func(*args, **kwargs) if found is None else found


class Both:
    """One context inside of another; they may be entered again when they have ended.

    Args:
        outer: Entered first.
        inner: Entered then.
    """

    def __init__(self, outer: Any, inner: Any) -> None:
        self._contexts = outer, inner
        self._stack = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._stack = stack.pop_all()

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory and versions without the history; autograd gives that to the tensor itself later."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
