"""Finds modules that compute every token alone, so that they may run on a slice of the tokens at a time.

[Note: Slices]
A norm, a linear layer with its adapters, or an MLP is *row-wise*: it computes each token from that token alone. If a
batch is too long for the device, these modules run on one slice of the tokens after the other. Each slice is
checkpointed: autograd keeps the input of the module, and backward runs each slice again when it needs it. So their
working memory is that of one slice. Gradients of weights are sums over slices, in another order than without them, so
the last bits may differ.

Names do not tell whether a module is row-wise. So its forward is traced twice, with batches of different shape.
Dimensions that differ count samples and tokens: *rows*. The module is row-wise if it only uses operations that are
known to keep rows apart: element-wise operations, products with weights, norms and reductions over other dimensions,
and views that keep the order of rows. All else is refused, such as attention, convolutions over tokens, routing of
experts, random numbers, and changes of buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_protrain.profiler.fake_mode import StepMode
from lightning_protrain.profiler.ops import PRODUCTS_OF_CODES, tensors_in

_ATEN = torch.ops.aten
# Samples and tokens of the two batches.
_BATCHES = ((3, 7), (5, 11))
_RATIO = prod(_BATCHES[1]), prod(_BATCHES[0])
# Operations that copy or allocate, without a tag of PyTorch that says so.
_COPIES = frozenset(
    getattr(_ATEN, name).default
    for name in ("_to_copy", "copy_", "empty_like", "zeros_like", "ones_like", "new_empty", "new_zeros")
)
_FACTORIES = frozenset([_ATEN.empty.memory_format, _ATEN.zeros.default, _ATEN.ones.default, _ATEN.full.default])
# Views that may give rows another place. Other views move, split or drop whole dimensions.
_RESHAPES = frozenset([_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default, _ATEN.as_strided.default])
_NORMS = frozenset([_ATEN.native_layer_norm.default, _ATEN._fused_rms_norm.default])
_SOFTMAX = frozenset([_ATEN._softmax.default, _ATEN._log_softmax.default])
# Index of the factor with rows among the tensors of a product; the factor after it holds weights.
_PRODUCTS = {_ATEN.mm.default: 0, _ATEN.addmm.default: 1}

Shape = Sequence[int]


class _Operation(NamedTuple):
    """An operation of a trace, with the shapes of the tensors that it reads and makes."""

    func: Any
    args: tuple[Any, ...]
    read: Sequence[Shape]
    made: Sequence[Shape]


class _Watch:
    """A list of the operations of a trace."""

    def __init__(self) -> None:
        self.operations: list[_Operation] = []

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note an operation."""
        with torch._C.DisableTorchFunction():
            read, made = ([tuple(each.shape) for each in tensors_in(one)] for one in ((args, kwargs), result))
        self.operations.append(_Operation(func, args, read, made))

    def dtype_read(self, tensor: Tensor) -> None:
        """Do nothing."""

    def attention(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()


@dataclass
class Slices:
    """A way to run row-wise forwards on slices of the tokens. The first module that can be sliced determines the size.

    Attributes:
        run: Runs a row-wise forward on an input, on so many tokens at a time.
        most: Maximum number of slices of the first module.
        least: Minimum number of tokens of a slice.
        tokens: Maximum number of tokens of a slice; 0: nothing was sliced.
    """

    run: Callable[[Callable[[Tensor], Tensor], Tensor, int], Tensor]
    most: int
    least: int
    tokens: int = 0

    def divide(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True if the only input of a forward is a tensor of more tokens than a slice has."""
        return takes_slices(args, kwargs) and rows_of(args[0]).numel() > (self.tokens or self.least)

    def __call__(self, forward: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
        """Run a row-wise forward."""
        self.tokens = self.tokens or max(-(-rows_of(given).numel() // self.most), self.least)
        return self.run(forward, given, self.tokens)


def takes_slices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if the only input of a forward is a tensor of real numbers with tokens."""
    given = args[0] if len(args) == 1 and not kwargs else None
    return isinstance(given, Tensor) and given.dim() >= 2 and given.is_floating_point()


def rows_of(given: Tensor) -> torch.Size:
    """Return the dimensions of an input that count tokens: [tokens] or [batch, tokens]."""
    return given.shape[: 1 if given.dim() == 2 else 2]


def is_row_wise(forward: Callable[[Tensor], Any], given: Tensor, mode: StepMode) -> bool:
    """Return True if a forward is row-wise, see [Note: Slices].

    Args:
        forward: Forward of a module.
        given: Its only input, [tokens, ...] or [batch, tokens, ...].
        mode: The running trace.
    """
    observer, traces = mode.observer, []
    try:
        for samples, tokens in _BATCHES:
            rows = (samples * tokens,) if len(rows_of(given)) == 1 else (samples, tokens)
            mode.observer = None
            other = given.new_empty((*rows, *given.shape[len(rows) :]))
            watch = mode.observer = _Watch()
            with torch.autograd.graph.saved_tensors_hooks(_same, _same):  # Instead of the hooks of the recorder.
                made = forward(other)
            if not isinstance(made, Tensor) or made.shape[: len(rows)] != rows:
                return False
            traces.append(watch.operations)
    except (RuntimeError, ValueError):  # It takes no other shapes, or it asks for values.
        return False
    finally:
        mode.observer = observer
    return len(traces[0]) == len(traces[1]) and all(map(_keeps_rows, *traces))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _keeps_rows(one: _Operation, two: _Operation) -> bool:
    """Return True if an operation, in both traces, is known to keep rows apart."""
    func, shapes = one.func, [(*one.read, *one.made), (*two.read, *two.made)]
    if func is not two.func or list(map(len, shapes[0])) != list(map(len, shapes[1])):
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    pairs = zip(*shapes, strict=True)
    rows = [tuple(at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b) for pair in pairs]
    read, made = rows[: len(one.read)], rows[len(one.read) :]
    if func._schema.is_mutable and not read[0]:  # It changes a weight or a buffer.
        return False
    if not any(rows):
        return True
    if not any(read):
        return func in _FACTORIES
    if not all(made):
        return False
    if torch.Tag.pointwise in func.tags or func in _COPIES:
        behind = {at - len(one.made[0]) for at in made[0]}
        return all({at - len(shape) for at in of} <= behind for shape, of in zip(one.read, read, strict=True))
    if func.is_view or func in _RESHAPES:
        whole = all(prod(after) * _RATIO[1] == prod(before) * _RATIO[0] for before, after in zip(*shapes, strict=True))
        first = all(of == tuple(range(len(of))) for of in rows)
        return whole and (first or func not in _RESHAPES)
    return _keeps_columns(one, read)


def _keeps_columns(one: _Operation, read: Sequence[tuple[int, ...]]) -> bool:
    """Return True if an operation sums or multiplies over other dimensions than rows."""
    func, args = one.func, one.args
    if func in _PRODUCTS or func._schema.name in PRODUCTS_OF_CODES:
        at = _PRODUCTS.get(func, 0)
        return len(one.read[at]) - 1 not in read[at] and not any(read[:at]) and not any(read[at + 1 :])
    if func in _NORMS:
        return max(read[0]) < len(one.read[0]) - len(args[1]) and not any(read[1:])
    if torch.Tag.reduction in func.tags or func in _SOFTMAX:
        place = next((at for at, each in enumerate(func._schema.arguments) if each.name == "dim"), len(args))
        over = args[place] if place < len(args) else None
        dims = [over] if isinstance(over, int) else (over or [])
        size = len(one.read[0])
        return bool(dims) and all(dim % size not in read[0] for dim in dims)
    return False
