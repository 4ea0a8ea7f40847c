"""The optimizer step of some parameters in host memory, part by part on several threads, in low precision or not.

[Note: Cold]
A step goes through hundreds of megabytes, and nothing of the interpreter is left in the caches when it ends: the next
one runs several times slower than it does in a profile. So as little as possible is done for each step, and nothing is
kept from one to the next: to check it would cost as much as to make it anew.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_protrain.runtime import kernels
from lightning_protrain.runtime.crew import Crew
from lightning_protrain.runtime.kernels import KERNELS, LINE, NO_CLIP, Clip, Kind, Piece, Rule

# Bytes of a scratch tile, one for each thread: 1 to 2 MiB were best, see benchmarks/LOG.md.
TILE_BYTES = 2 << 20
# Parts of a large step for each thread: one that is held up leaves some to the others.
PARTS_PER_THREAD = 2


class Update(NamedTuple):
    """A parameter to step.

    Attributes:
        parameter: The weight in host memory, a key of the optimizer's state.
        gradient: Of the same shape, in any floating dtype; written only if it is to be clipped.
        copy: Receives the new weight in its own dtype; of the shape and strides of the parameter.
    """

    parameter: Tensor
    gradient: Tensor
    copy: Tensor | None = None


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says now, without its parameters; a tensor in it (a learning rate) is cloned."""
    kept = {name: value for name, value in group.items() if name != "params"}
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in kept.items()}


class _Scratch(threading.local):
    """Memory for one tile, of each thread that looks at it."""

    def __init__(self, nbytes: int) -> None:
        self.tile = torch.empty(nbytes // 8, dtype=torch.float64)


class HostStep:
    """Steps parameters in host memory as their optimizer would, see the notes of this module.

    The result is bitwise that of PyTorch's own step over whole tensors, with the gradient clipped and cast before and
    the weight cast after it. `step` may be called from any thread, and from several at once for different parameters.
    It calls no hooks: they belong to `optimizer.step()`, of which this is a part.

    Args:
        num_threads: Threads that compute, the calling one among them; None: as many as PyTorch uses in the thread of
            the first step. The first step that needs them starts the others, on the cores of the thread that calls it.
        fuse: Whether a group in which the user chose no implementation takes the fused kernel. False leaves the choice
            to PyTorch, which takes its slowest loop on the CPU. The fused kernel rounds differently.
        tile_bytes: Size of a tile, see [Note: Tiles].
    """

    def __init__(self, num_threads: int | None = None, fuse: bool = True, tile_bytes: int = TILE_BYTES) -> None:
        self._num_threads = num_threads
        self._fuse = fuse
        self._tile_bytes = tile_bytes
        self._walk = kernels.without_lock(kernels.walk)
        self._crew = Crew("protrain-step")
        self._own = _Scratch(max(tile_bytes, 8 * LINE))

    def step(
        self, optimizer: Optimizer, group: Mapping[str, Any], updates: Sequence[Update], clip: Clip = NO_CLIP
    ) -> None:
        """Steps these parameters and no others; when it returns, they and their copies are written.

        Args:
            optimizer: Whose state is used, and made as its own first step would make it.
            group: The hyperparameters of their group, e.g. of `hyperparameters`.
            updates: Parameters of that group.
            clip: What is done to their gradients first, in place.

        Raises:
            ValueError: The optimizer works on all its parameters as one vector (LBFGS).
        """
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "LBFGS works on all parameters as one vector and evaluates the loss again, so it cannot step them part "
                'by part. Use another optimizer, or plan="resident".'
            )
        kernel = self._kernel(optimizer, group)
        with torch.no_grad():
            fused, rest = _sorted_out(updates) if kernel else ([], updates)
            if rest:
                clip.apply([update.gradient for update in rest])
                _own_step(optimizer, group, rest)
            if kernel and fused:
                rule = Rule.of(kernel, group)
                pieces = [_piece(optimizer, rule, update, clip) for update in fused]
                if kernel != "sgd":
                    torch._foreach_add_([piece.step for piece in pieces], 1)
                self._run(rule, pieces, clip)

    def close(self) -> None:
        """Ends the threads when they have done what they were given; a later step would start others."""
        self._crew.close()

    def _kernel(self, optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
        chosen = group.get("fused")
        takes = (
            (chosen or (self._fuse and chosen is None and group.get("foreach") is None))
            and not group.get("differentiable")
            # Set by a gradient scaler for the time of a step: the class's own step obeys them.
            and getattr(optimizer, "grad_scale", None) is None
            and getattr(optimizer, "found_inf", None) is None
        )
        return KERNELS.get(type(optimizer)) if takes else None

    def _run(self, rule: Rule, pieces: list[Piece], clip: Clip) -> None:
        num_threads = self._num_threads = self._num_threads or torch.get_num_threads()
        share = sum([piece.end for piece in pieces])
        if num_threads > 1:
            share = max(share // (num_threads * PARTS_PER_THREAD) + 1, self._tile(torch.float32))
        parts = list(_parts(pieces, _up_to_line(share)))
        queue = iter(parts)
        self._crew.run(lambda: self._work(rule, queue, clip), min(num_threads, len(parts)) - 1)

    def _work(self, rule: Rule, queue: Iterator[list[Piece]], clip: Clip) -> None:
        for part in queue:  # the iterator of a list: each part goes to one thread
            kind = part[0].kind
            whole = not kind.tiled
            if whole and not any(piece.is_cut for piece in part):
                kernels.run_whole(rule, part)
                continue
            self._walk(
                rule.name,
                [piece.tensors for piece in part],
                [piece.step for piece in part],
                [(piece.begin, piece.end) for piece in part],
                self._own.tile.view(kind.dtype),
                max([piece.end for piece in part]) if whole else self._tile(kind.dtype),
                rule.numbers,
                {**rule.flags, "copied": kind.copied, "first": kind.first},
                *(clip if kind.clipped else NO_CLIP).arguments,
            )

    def _tile(self, dtype: torch.dtype) -> int:
        return _up_to_line(self._tile_bytes // dtype.itemsize)


def _up_to_line(size: int) -> int:
    return max(-(-size // LINE), 1) * LINE


def _piece(optimizer: Optimizer, rule: Rule, update: Update, clip: Clip) -> Piece:
    """The whole parameter; its state is made as by PyTorch's own fused step."""
    parameter, gradient, copy = update.parameter, update.gradient, update.copy
    assert gradient.shape == parameter.shape, "a gradient of another shape"
    assert copy is None or copy.shape == parameter.shape, "a copy of another shape"
    state = optimizer.state[parameter] if rule.states else {}
    first = rule.name == "sgd" and state.get("momentum_buffer") is None
    if first and rule.states:
        state["momentum_buffer"] = torch.empty_like(parameter)  # the kernel fills it
    elif rule.states and not state:
        start = optimizer.defaults["initial_accumulator_value"] if rule.name == "adagrad" else 0.0
        state["step"] = torch.zeros((), dtype=torch.float32)
        state |= {key: torch.full_like(parameter, start) for key in rule.states}
    tensors = [parameter, gradient, *[state[key] for key in rule.states]]
    if copy is not None:
        tensors.append(copy)
    clipped = bool(clip)
    if clipped and gradient.stride() != parameter.stride():
        clip.apply([gradient])  # What the kernel reads may be a copy of it.
        clipped = False
    for tensor in tensors:
        if not tensor.is_contiguous():
            tensors = _in_memory_order(tensors, state, rule.states, copy is not None)
            break
    tiled = copy is not None or gradient.dtype != parameter.dtype or clipped
    kind = Kind(tiled, parameter.dtype, copy is not None, first, clipped)
    return Piece(tensors, state.get("step", parameter), kind, 0, parameter.numel())  # SGD counts no steps


def _in_memory_order(tensors: list[Tensor], state: dict[str, Any], names: Iterable[str], copied: bool) -> list[Tensor]:
    """The tensors of a piece with their dimensions in the order in which those of the parameter lie in memory."""
    order = _order(tensors[0])
    for index, name in enumerate(names, start=2):
        if not tensors[index].permute(order).is_contiguous():
            # Loaded from elsewhere. The kernels go by memory, not by index.
            tensors[index] = state[name] = torch.empty_like(tensors[0]).copy_(tensors[index])
    assert not copied or tensors[-1].permute(order).is_contiguous(), "a copy of another layout"
    return [tensor.permute(order).contiguous() for tensor in tensors]


def _order(tensor: Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _parts(pieces: list[Piece], size: int) -> Iterator[list[Piece]]:
    """Pieces of one kind, at most `size` elements in each part; `size` is a multiple of `LINE`."""
    kinds: dict[Kind, list[Piece]] = {}
    for piece in pieces:
        kinds.setdefault(piece.kind, []).append(piece)
    for alike in kinds.values():
        part: list[Piece] = []
        room = size
        for piece in alike:
            begin = 0
            while begin < piece.end:
                length = min(room, piece.end - begin)
                part.append(piece if length == piece.end else piece._replace(begin=begin, end=begin + length))
                begin, room = begin + length, (room - length) // LINE * LINE
                if not room:
                    yield part
                    part, room = [], size
        if part:
            yield part


def _sorted_out(updates: Sequence[Update]) -> tuple[list[Update], list[Update]]:
    """Those that a kernel can take, going through the memory of a parameter from its begin to its end; and the rest."""
    dense: list[Update] = []
    rest: list[Update] = []
    for update in updates:
        parameter = update.parameter
        whole = parameter.is_contiguous() or parameter.permute(_order(parameter)).is_contiguous()
        taken = whole and parameter.dtype.is_floating_point and update.gradient.layout == torch.strided
        (dense if taken else rest).append(update)
    return dense, rest


def _own_step(optimizer: Optimizer, group: Mapping[str, Any], updates: Sequence[Update]) -> None:
    """The step of the optimizer's class on these parameters, without what is wrapped around it (hooks, profiling)."""
    part = object.__new__(type(optimizer))
    vars(part).update(vars(optimizer))  # not copy.copy: it forgets what a class keeps beside groups and state
    part.param_groups = [{**group, "params": [update.parameter for update in updates]}]
    held = [update.parameter.grad for update in updates]
    try:
        for update in updates:
            update.parameter.grad = update.gradient.to(update.parameter.dtype)
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(part)
    finally:
        for update, gradient in zip(updates, held, strict=True):
            update.parameter.grad = gradient
    for update in updates:
        if update.copy is not None:
            update.copy.copy_(update.parameter.detach())
