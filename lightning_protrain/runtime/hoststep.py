"""The optimizer step of some parameters in host memory, on threads of its own, reading and writing low precision.

[Note: Tiles]
PyTorch's fused CPU kernels want the gradient in the dtype of the weight. Where it arrives in a lower precision, and the
new weight is wanted in a lower precision too, two more passes over main memory would cost most of another step. So the
work goes in *tiles* that stay in the cache: cast the gradient into a scratch tile, run the fused kernel on the tile,
write the copy.

The kernels are vectorised, and the scalar loop over the last elements of a range rounds differently. PyTorch divides a
tensor between its threads at multiples of a cache line, so only the last elements of a tensor meet the scalar loop,
with any number of threads. A tile begins at a multiple of `LINE` elements from the start of its tensor: every element
takes the same way as in one call for the whole tensor, and the result is the same bit for bit.

[Note: Threads]
A kernel that divides a tile between OpenMP threads loses more than it wins: each tile ends at a barrier, and a
neighbour on the machine delays them all. So each thread here computes alone (`torch.set_num_threads(1)`) and takes the
next *part*, some tiles, from one queue. The calling thread is one of them; a thread that wakes too late is not waited
for. `torch.set_num_threads` also sets what threads started later begin with,
and even what the main thread gets if it has not computed yet; so the calling thread reads its own number before, and
sets it again when ours have started and at the end.

[Note: Walk]
Python's lock has to be taken after every call of a kernel. A thread busy in Python gives it up only after the
interpreter's switch interval, 5 ms, many times what a tile takes. So the walk over the tiles of a part is run by
TorchScript, which needs no compiler and works without the lock; the lock is taken once per part. Where there is no
TorchScript (Python 3.14), the same function runs as it stands, and computes the same.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer

# Elements: a multiple of every vector and of every cache line, see [Note: Tiles].
LINE = 64
# Bytes of a scratch tile, one for each thread: 1 to 2 MiB were best, see benchmarks/LOG.md.
TILE_BYTES = 2 << 20
# Parts of a large step for each thread: one that is held up leaves some to the others.
PARTS_PER_THREAD = 2
# Of exactly these classes; a class derived from one may step in another way.
KERNELS: dict[type[Optimizer], str] = {Adam: "adam", AdamW: "adam", SGD: "sgd", Adagrad: "adagrad"}


@dataclass(frozen=True, eq=False)
class Update:
    """A parameter to step.

    Attributes:
        parameter: The weight in host memory, a key of the optimizer's state.
        gradient: Of the same shape, in any floating dtype; it is only read.
        copy: Receives the new weight in its own dtype; of the shape and strides of the parameter.
    """

    parameter: Tensor
    gradient: Tensor
    copy: Tensor | None = None


@dataclass(frozen=True)
class _Rule:
    """A fused kernel with its hyperparameters."""

    name: str
    states: list[str]
    numbers: dict[str, float]
    flags: dict[str, bool]


class _Piece(NamedTuple):
    """Some elements of one parameter, in the order in which they lie in memory.

    Attributes:
        tensors: Whole and contiguous: weight, gradient, states, and the copy at the end if there is one.
        step: The counter of the optimizer.
        kind: What must be the same in all pieces of a part: dtype of the weight; whether there is a copy; whether the
            kernel is to make the momentum.
        begin: The first of the elements.
        end: Behind the last one.
    """

    tensors: list[Tensor]
    step: Tensor
    kind: tuple[torch.dtype, bool, bool]
    begin: int
    end: int


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

    The result is bitwise that of PyTorch's own step over whole tensors, with the gradient cast before and the weight
    cast after it. `step` may be called from any thread, and from several at once for different parameters. It calls no
    hooks: they belong to `optimizer.step()`, of which this is a part.

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
        self._walk = _without_lock(_walk)
        self._starting = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._own = _Scratch(max(tile_bytes, 8 * LINE))

    def step(self, optimizer: Optimizer, group: Mapping[str, Any], updates: Sequence[Update]) -> None:
        """Steps these parameters and no others; when it returns, they and their copies are written.

        Args:
            optimizer: Whose state is used, and made as its own first step would make it.
            group: The hyperparameters of their group, e.g. of `hyperparameters`.
            updates: Parameters of that group.

        Raises:
            ValueError: The optimizer works on all its parameters as one vector (LBFGS).
        """
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "LBFGS works on all parameters as one vector and evaluates the loss again, so it cannot step them part "
                'by part. Use another optimizer, or plan="resident".'
            )
        kernel = self._kernel(optimizer, group)
        fused = [update for update in updates if kernel and _is_dense(update)]
        rest = [update for update in updates if not (kernel and _is_dense(update))]
        if rest:
            _own_step(optimizer, group, rest)
        if kernel and fused:
            rule = _rule(kernel, group)
            with torch.no_grad():
                pieces = [_piece(optimizer, rule, update) for update in fused]
                if kernel != "sgd":
                    torch._foreach_add_([piece.step for piece in pieces], 1)
                self._run(rule, pieces)

    def close(self) -> None:
        """Ends the threads when they have done what they were given; a later step would start others."""
        with self._starting:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None

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

    def _run(self, rule: _Rule, pieces: Sequence[_Piece]) -> None:
        before = torch.get_num_threads()
        num_threads = self._num_threads = self._num_threads or before
        share = sum(piece.end for piece in pieces) // (num_threads * PARTS_PER_THREAD) + 1
        parts = list(_parts(pieces, max(_up_to_line(share), self._tile(torch.float32))))
        queue, others = iter(parts), min(num_threads, len(parts)) - 1
        jobs = [self._started(num_threads - 1).submit(self._work, rule, queue) for _ in range(others)]
        torch.set_num_threads(1)
        try:
            self._work(rule, queue)
        finally:
            torch.set_num_threads(before)
            jobs = [job for job in jobs if not job.cancel()]
            wait(jobs)  # also before an error lets the caller go on
        for job in jobs:
            job.result()

    @torch.no_grad()
    def _work(self, rule: _Rule, queue: Iterator[list[_Piece]]) -> None:
        for part in queue:  # the iterator of a list: each part goes to one thread
            dtype, copied, first = part[0].kind
            self._walk(
                rule.name,
                [piece.tensors for piece in part],
                [piece.step for piece in part],
                [(piece.begin, piece.end) for piece in part],
                self._own.tile.view(dtype),
                self._tile(dtype),
                rule.numbers,
                {**rule.flags, "copied": copied, "first": first},
            )

    def _tile(self, dtype: torch.dtype) -> int:
        return _up_to_line(self._tile_bytes // dtype.itemsize)

    def _started(self, num_threads: int) -> ThreadPoolExecutor:
        with self._starting:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(num_threads, "protrain-step", torch.set_num_threads, (1,))
                all_run = threading.Barrier(num_threads + 1)
                for _ in range(num_threads):
                    self._pool.submit(all_run.wait)
                all_run.wait()  # see [Note: Threads]
            return self._pool


def _up_to_line(size: int) -> int:
    return max(-(-size // LINE), 1) * LINE


def _walk(
    name: str,
    tensors: list[list[Tensor]],
    steps: list[Tensor],
    ranges: list[tuple[int, int]],
    scratch: Tensor,
    tile: int,
    numbers: dict[str, float],
    flags: dict[str, bool],
) -> None:
    """Steps pieces tile by tile, in the part of Python that TorchScript knows, see [Note: Walk]."""
    copied = flags["copied"]
    for i in range(len(tensors)):
        flat = [tensor.view(-1) for tensor in tensors[i]]
        start, end = ranges[i]
        cast = flat[0].dtype != flat[1].dtype
        size = tile if cast or copied else max(end - start, 1)
        for begin in range(start, end, size):
            length = min(size, end - begin)
            views = [tensor.narrow(0, begin, length) for tensor in flat]
            weight, gradient, states = views[0:1], views[1], views[2:]
            if copied:
                states.pop()
            if cast:
                gradient = scratch.narrow(0, 0, length).copy_(gradient)
            _kernel(name, weight, gradient, states, steps[i : i + 1], numbers, flags)
            # Without this use of the list that the kernel has written, TorchScript would take it for dead code.
            if copied:
                views[-1].copy_(weight[0])


def _kernel(
    name: str,
    weight: list[Tensor],
    gradient: Tensor,
    states: list[Tensor],
    step: list[Tensor],
    numbers: dict[str, float],
    flags: dict[str, bool],
) -> None:
    lr, weight_decay, maximize = numbers["lr"], numbers["weight_decay"], flags["maximize"]
    if name == "adam":
        beta1, beta2, eps, amsgrad = numbers["beta1"], numbers["beta2"], numbers["eps"], flags["amsgrad"]
        first, second, largest = states[0:1], states[1:2], states[2:3]
        if flags["decoupled_weight_decay"]:
            torch._fused_adamw_(
                weight, [gradient], first, second, largest, step,
                lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=amsgrad, maximize=maximize,
            )  # fmt: skip
        else:
            torch._fused_adam_(
                weight, [gradient], first, second, largest, step,
                lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=amsgrad, maximize=maximize,
            )  # fmt: skip
    elif name == "sgd":
        torch._fused_sgd_(
            weight, [gradient], states, weight_decay=weight_decay, momentum=numbers["momentum"], lr=lr,
            dampening=numbers["dampening"], nesterov=flags["nesterov"], maximize=maximize,
            is_first_step=flags["first"],
        )  # fmt: skip
    else:
        lr_decay, eps = numbers["lr_decay"], numbers["eps"]
        torch._fused_adagrad_(
            weight, [gradient], states, step,
            lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps, maximize=maximize,
        )  # fmt: skip


def _without_lock(function: Callable[..., None]) -> Callable[..., None]:
    if sys.version_info >= (3, 14):  # TorchScript ends there
        return function
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


def _rule(name: str, group: Mapping[str, Any]) -> _Rule:
    beta1, beta2 = group.get("betas", (0.0, 0.0))
    numbers = {"beta1": float(beta1), "beta2": float(beta2)}
    for key in ("lr", "weight_decay", "eps", "momentum", "dampening", "lr_decay"):
        numbers[key] = float(group.get(key, 0.0))
    flags = {key: bool(group.get(key)) for key in ("maximize", "amsgrad", "decoupled_weight_decay", "nesterov")}
    states = {"adam": ["exp_avg", "exp_avg_sq"], "sgd": [], "adagrad": ["sum"]}[name]
    if name == "adam" and flags["amsgrad"]:
        states.append("max_exp_avg_sq")
    if name == "sgd" and numbers["momentum"]:
        states.append("momentum_buffer")
    return _Rule(name, states, numbers, flags)


def _piece(optimizer: Optimizer, rule: _Rule, update: Update) -> _Piece:
    """The whole parameter; its state is made as by PyTorch's own fused step."""
    parameter, copy = update.parameter, update.copy
    assert update.gradient.shape == parameter.shape, "a gradient of another shape"
    assert copy is None or copy.shape == parameter.shape, "a copy of another shape"
    state = optimizer.state[parameter] if rule.states else {}
    first = rule.name == "sgd" and state.get("momentum_buffer") is None
    if first and rule.states:
        state["momentum_buffer"] = torch.empty_like(parameter)  # the kernel fills it
    elif rule.states and not state:
        start = optimizer.defaults["initial_accumulator_value"] if rule.name == "adagrad" else 0.0
        state["step"] = torch.zeros((), dtype=torch.float32)
        state |= {key: torch.full_like(parameter, start) for key in rule.states}
    tensors = [parameter, update.gradient, *(state[key] for key in rule.states)]
    if copy is not None:
        tensors.append(copy)
    if not all(tensor.is_contiguous() for tensor in tensors):
        tensors = _in_memory_order(tensors, state, rule.states, copy is not None)
    kind = (parameter.dtype, copy is not None, first)
    return _Piece(tensors, state.get("step", parameter), kind, 0, parameter.numel())  # SGD counts no steps


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


def _parts(pieces: Iterable[_Piece], size: int) -> Iterator[list[_Piece]]:
    """Pieces of one kind, at most `size` elements in each part; `size` is a multiple of `LINE`."""
    kinds: dict[Any, list[_Piece]] = defaultdict(list)
    for whole in pieces:
        for begin in range(0, whole.end, size):
            kinds[whole.kind].append(whole._replace(begin=begin, end=min(begin + size, whole.end)))
    for alike in kinds.values():
        first, held = 0, 0
        for index, piece in enumerate(alike):
            length = piece.end - piece.begin
            if held + length > size and index > first:
                yield alike[first:index]
                first, held = index, 0
            held += length
        yield alike[first:]


def _is_dense(update: Update) -> bool:
    """Whether a kernel can go through the memory of the parameter from its begin to its end."""
    parameter = update.parameter
    dense = parameter.is_contiguous() or parameter.permute(_order(parameter)).is_contiguous()
    return dense and parameter.is_floating_point() and update.gradient.layout == torch.strided


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
