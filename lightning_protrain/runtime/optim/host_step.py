"""The host's optimizer step in tiles, on several threads.

[Note: Threads]
A kernel that divides its work between OpenMP threads ends at a barrier, and a neighbour on the machine delays them all.
So each thread here computes alone (`torch.set_num_threads(1)`), and takes what it does from where the others take it. A
thread that wakes too late is not waited for. `torch.set_num_threads` also sets what threads started later begin with,
and even what the main thread gets if it has not computed yet; so the calling thread reads its own number before, and
sets it again when ours have started and at the end.

The queues are those of the C library of Python: waking a thread of an executor takes several times as long when nothing
of the interpreter is in the caches.

[Note: Ahead]
A step goes through hundreds of megabytes, and nothing of the interpreter is left in the caches when it ends: the Python
of the next one takes several times as long as in a profile. So the chunks that are known are prepared together, one
after the other while the interpreter is warm, and their parts go into one queue: no thread waits at the end of a chunk
for the others, and none for Python that another one is in. Nothing is kept from one step of the optimizer to the next:
to check it would cost as much as to make it anew.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_protrain.runtime.access_guard import below_guard
from lightning_protrain.runtime.optim import fused
from lightning_protrain.runtime.optim.adam8bit import BlockwiseStep, is_blockwise
from lightning_protrain.runtime.optim.fused import KERNELS, LINE, NO_CLIP, Clip, FusedRule, TileKind, TileRange

_Work = Callable[[], None]
_Ends = SimpleQueue[BaseException | None]


class WaitGroup:
    """Calls that are waited for together.

    Attributes:
        number: How many.
        ends: Of each when it has ended: None, or what it raised.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.ends: _Ends = SimpleQueue()


class WorkQueue:
    """Calls to make, in order, by whoever has nothing else to do."""

    def __init__(self) -> None:
        self._queue: deque[tuple[_Work, _Ends]] = deque()

    def add(self, works: Sequence[_Work]) -> WaitGroup:
        """Add calls that depend on no other call in the queue."""
        group = WaitGroup(len(works))
        self._queue.extend([(work, group.ends) for work in works])
        return group

    def make(self, until: WaitGroup | None = None) -> None:
        """Make calls until none is left, or until all calls of a group have ended."""
        queue = self._queue
        while until is None or until.ends.qsize() < until.number:
            try:
                work, ends = queue.popleft()
            except IndexError:
                return
            try:
                work()
            except RuntimeError as error:
                ends.put(error)
            except BaseException as error:
                ends.put(error)
                raise
            else:
                ends.put(None)

    def finish(self, group: WaitGroup) -> None:
        """Make calls as `make` does, and wait for calls of the group that other threads make. Call it once.

        Instead of waiting, it makes calls that were added later.

        Raises:
            BaseException: An error of one call of the group, when all its calls have ended.
        """
        before = torch.get_num_threads()
        if before > 1:
            torch.set_num_threads(1)
        try:
            self.make(until=group)
        finally:
            if before > 1:
                torch.set_num_threads(before)
        for error in [group.ends.get() for _ in range(group.number)]:
            if error is not None:
                raise error


class ThreadPool:
    """Threads that make calls; `join` starts them when it needs them, on the cores of the thread that calls it.

    Args:
        name: The names of the threads begin with it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[threading.Thread] = []
        self._tasks: SimpleQueue[WorkQueue | None] = SimpleQueue()
        self._starting = threading.Lock()

    def join(self, calls: WorkQueue, number: int) -> None:
        """Has `number` threads make calls, too, as soon as they can and until none is left.

        They do it without gradients and below the guard.
        """
        if len(self._threads) < number:
            before = torch.get_num_threads()
            self._start(number)
            torch.set_num_threads(before)
        for _ in range(number):
            self._tasks.put(calls)

    def close(self) -> None:
        """End the threads when they have done their tasks; a later call starts new ones."""
        with self._starting:
            for _ in self._threads:
                self._tasks.put(None)
            while self._threads:
                self._threads.pop().join()

    def _start(self, number: int) -> None:
        with self._starting:
            begun: SimpleQueue[None] = SimpleQueue()
            new = range(len(self._threads), number)
            for index in new:
                thread = threading.Thread(target=self._loop, args=(begun,), name=f"{self._name}-{index}", daemon=True)
                self._threads.append(thread)
                thread.start()
            for _ in new:
                begun.get()  # see [Note: Threads]

    def _loop(self, begun: SimpleQueue[None]) -> None:
        torch.set_num_threads(1)
        begun.put(None)
        with below_guard(), torch.no_grad():
            while (calls := self._tasks.get()) is not None:
                calls.make()
                del calls  # Or it, and all that it refers to, would live until the next task.


# Bytes of a scratch tile, one for each thread: 1 to 2 MiB were best, see benchmarks/LOG.md.
TILE_BYTES = 2 << 20
# Parts of a chunk for each thread if no other chunk follows: a thread that is held up leaves some to the others.
PARTS_PER_THREAD = 2
# Chunks that are prepared together at most: the first is waiting meanwhile, and gradients that lie otherwise than their
# weights are copied then.
PREPARED_TOGETHER = 8


class ParamUpdate(NamedTuple):
    """A parameter to step.

    Attributes:
        parameter: The weight in host memory, a key of the optimizer's state.
        gradient: Of the same shape, in any floating dtype; written only in that of the weight, if it is to be clipped.
        copy: Receives the new weight in its own dtype; maybe the gradient itself. Of the parameter's shape and strides.
    """

    parameter: Tensor
    gradient: Tensor
    copy: Tensor | None = None


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the present settings of a group without its parameters.

    A tensor among them (a learning rate) is cloned.
    """
    kept = {name: value for name, value in group.items() if name != "params"}
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in kept.items()}


Given = Iterable[tuple[Mapping[str, Any], Sequence[ParamUpdate]]]


class _Scratch(threading.local):
    """Memory for one tile, of each thread that looks at it."""

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes // 8, dtype=torch.float64)
        self._tiles: dict[torch.dtype, Tensor] = {}

    def tile(self, dtype: torch.dtype) -> Tensor:
        """All of it."""
        if dtype not in self._tiles:
            self._tiles[dtype] = self._memory.view(dtype)
        return self._tiles[dtype]


class StepBatch:
    """Parameters that are stepped and waited for together, those of a chunk.

    Attributes:
        given: Says what to step, and with which hyperparameters, e.g. of `hyperparameters`; called once.
        clip: What is done to the gradients first, in place.
        own: What takes the own step of the optimizer's class.
        group: Calls that step the rest; None: not prepared.
        error: Why it cannot be prepared.
    """

    def __init__(self, given: Callable[[], Given], clip: Clip) -> None:
        self.given = given
        self.clip = clip
        self.own: list[tuple[Mapping[str, Any], Sequence[ParamUpdate]]] = []
        self.group: WaitGroup | None = None
        self.error: BaseException | None = None


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
        self._walk = fused.without_lock(fused.walk)
        self._cut = fused.without_lock(fused.cut)
        self._pool = ThreadPool("protrain-step")
        self._own = _Scratch(max(tile_bytes, 8 * LINE))

    def step(
        self, optimizer: Optimizer, group: Mapping[str, Any], updates: Sequence[ParamUpdate], clip: Clip = NO_CLIP
    ) -> None:
        """Step these parameters and no others; when it returns, they and their copies are written.

        Args:
            optimizer: Optimizer whose state is used; a missing state is made as its own first step would make it.
            group: The hyperparameters of their group, e.g. from `hyperparameters`.
            updates: Parameters of that group.
            clip: Clipping of the gradients before the step, in place.

        Raises:
            ValueError: If the optimizer works on all its parameters as one vector (LBFGS).
        """
        steps = self.steps(optimizer)
        with torch.no_grad():
            steps.finish(steps.add(lambda: [(group, updates)], clip))

    def steps(self, optimizer: Optimizer) -> StepSchedule:
        """Return a schedule for steps of parts of the optimizer's parameters that overlap, see [Note: Ahead]."""
        return StepSchedule(self, optimizer)

    def close(self) -> None:
        """End the threads when they have done their tasks; a later step starts new ones."""
        self._pool.close()

    def kernel(self, optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
        """Return the fused kernel that steps a group, one of `KERNELS`; None if the optimizer's class steps it."""
        chosen = group.get("fused")
        takes = (
            (chosen or (self._fuse and chosen is None and group.get("foreach") is None))
            and not group.get("differentiable")
            # Set by a gradient scaler for the time of a step: the class's own step obeys them.
            and getattr(optimizer, "grad_scale", None) is None
            and getattr(optimizer, "found_inf", None) is None
        )
        return KERNELS.get(type(optimizer)) if takes else None

    def calls(self, rule: FusedRule, pieces: list[TileRange], clip: Clip, parts: int) -> list[Callable[[], None]]:
        """Return calls that together step these parameters, about `parts` per thread, in any order on any thread."""
        num_threads = self._num_threads = self._num_threads or torch.get_num_threads()
        share = sum([_up_to_line(piece.end) for piece in pieces])
        if num_threads > 1:
            share = _up_to_line(max(share // (num_threads * parts), self._tile(torch.float32)))
        made = list(_parts(pieces, share))
        some = [piece for part in made for piece in part if piece.is_cut and not piece.kind.tiled]
        if some:
            tensors, ranges = [piece.tensors for piece in some], [(piece.begin, piece.end) for piece in some]
            views = {id(piece): view for piece, view in zip(some, self._cut(tensors, ranges), strict=True)}
            made = [[piece._replace(tensors=views.get(id(piece), piece.tensors)) for piece in part] for part in made]
        return [self._call(rule, part, clip) for part in made]

    def offer(self, calls: WorkQueue, number: int) -> None:
        """Has other threads make calls, too, of which there are `number`."""
        others = min(self._num_threads or torch.get_num_threads(), number) - 1
        if others > 0:
            self._pool.join(calls, others)

    def _call(self, rule: FusedRule, part: list[TileRange], clip: Clip) -> Callable[[], None]:
        kind = part[0].kind
        if not kind.tiled:
            return fused.whole(rule, part)
        tensors, steps = [piece.tensors for piece in part], [piece.step for piece in part]
        ranges = [(piece.begin, piece.end) for piece in part]
        tile = self._tile(kind.dtype)
        bounds, coefficients = (clip if kind.clipped else NO_CLIP).arguments

        def walk() -> None:
            scratch = self._own.tile(kind.dtype)
            self._walk(
                rule.name, tensors, steps, ranges, scratch, tile, rule.settings, kind.copied, kind.first, bounds,
                coefficients,
            )  # fmt: skip

        return walk

    def _tile(self, dtype: torch.dtype) -> int:
        return _up_to_line(self._tile_bytes // dtype.itemsize)


class StepSchedule:
    """Steps of parts of an optimizer's parameters, see [Note: Ahead].

    `add` may be called at any time and from any thread, `finish` from one thread at a time.

    Args:
        host: What steps them.
        optimizer: Whose state is used.

    Raises:
        ValueError: The optimizer works on all its parameters as one vector (LBFGS).
    """

    def __init__(self, host: HostStep, optimizer: Optimizer) -> None:
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "LBFGS works on all parameters as one vector and evaluates the loss again, so it cannot step them part "
                'by part. Use another optimizer, or plan="resident".'
            )
        self._host = host
        self._optimizer = optimizer
        self._blockwise = BlockwiseStep(optimizer) if is_blockwise(optimizer) else None
        self._added: deque[StepBatch] = deque()
        self._calls = WorkQueue()
        self._num_ahead = 0  # prepared, and not waited for yet

    def add(self, given: Callable[[], Given], clip: Clip = NO_CLIP) -> StepBatch:
        """Add parameters, none of which is in another portion.

        Args:
            given: Returns the parameters; called when this portion or an earlier one is to be finished.
            clip: Clipping of the gradients before the step, in place.
        """
        portion = StepBatch(given, clip)
        self._added.append(portion)
        return portion

    def finish(self, portion: StepBatch) -> None:
        """Step a portion; when it returns, the portion and its copies are written, and perhaps some of the others.

        Call it once for each portion, and without gradients (`torch.no_grad`).

        Raises:
            BaseException: The error of the optimizer or of a kernel.
        """
        if self._added and self._num_ahead < PREPARED_TOGETHER // 2:
            if not self._num_ahead:
                self._prepare(1)  # The other threads begin with it.
            self._prepare(PREPARED_TOGETHER - 1)
        while portion.group is None:
            if portion.error is not None:
                raise portion.error
            assert self._added, "a portion of other steps"
            self._prepare(PREPARED_TOGETHER)
        for group, given in portion.own:
            updates = [update._replace(gradient=update.gradient.to(update.parameter.dtype)) for update in given]
            portion.clip.apply([update.gradient for update in updates])
            _own_step(self._optimizer, group, updates)
        portion.own.clear()
        self._num_ahead -= 1
        self._calls.finish(portion.group)

    def _prepare(self, number: int) -> None:
        portions = [self._added.popleft() for _ in range(min(len(self._added), number))]
        steps: list[Tensor] = []
        last = portions[-1] if portions and not self._added else None
        try:
            prepared = [(portion, self._calls_of(portion, portion is not last, steps)) for portion in portions]
            if steps:
                torch._foreach_add_(steps, 1)
        except RuntimeError as error:
            _fail(portions, error)
            return
        except BaseException as error:
            _fail(portions, error)
            raise
        for portion, calls in prepared:
            portion.group = self._calls.add(calls)
        self._num_ahead += len(prepared)
        self._host.offer(self._calls, sum([len(calls) for _, calls in prepared]))

    def _calls_of(self, portion: StepBatch, followed: bool, steps: list[Tensor]) -> list[Callable[[], None]]:
        """Return the calls for a portion, which depend on whether another one follows; adds its counters to `steps`."""
        parts = 1 if followed else PARTS_PER_THREAD
        calls: list[Callable[[], None]] = []
        for group, updates in portion.given():
            if self._blockwise is not None:
                calls += [call for update in updates for call in self._blockwise.calls(group, *update, portion.clip)]
                continue
            kernel = self._host.kernel(self._optimizer, group)
            fused, rest = _sorted_out(updates) if kernel else ([], updates)
            if rest:
                portion.own.append((group, rest))
            if kernel and fused:
                rule = FusedRule.of(kernel, group)
                pieces = [_piece(self._optimizer, rule, update, portion.clip) for update in fused]
                if kernel != "sgd":
                    steps += [piece.step for piece in pieces]
                calls += self._host.calls(rule, pieces, portion.clip, parts)
        return calls


def _fail(portions: Iterable[StepBatch], error: BaseException) -> None:
    for portion in portions:
        portion.error = error


def _up_to_line(size: int) -> int:
    return max(-(-size // LINE), 1) * LINE


def _piece(optimizer: Optimizer, rule: FusedRule, update: ParamUpdate, clip: Clip) -> TileRange:
    """Return the whole parameter as a piece; its state is made as by PyTorch's own fused step."""
    parameter, gradient, copy = update.parameter, update.gradient, update.copy
    assert all(each is None or each.shape == parameter.shape for each in (gradient, copy)), "another shape"
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
        tensors[1] = gradient = gradient.to(parameter.dtype)
        clip.apply([gradient])  # What the kernel reads may be a copy of it.
        clipped = False
    for tensor in tensors:
        if not tensor.is_contiguous():
            tensors = _in_memory_order(tensors, state, rule.states, copy is not None)
            break
    tiled = copy is not None or gradient.dtype != parameter.dtype or clipped
    kind = TileKind(tiled, parameter.dtype, copy is not None, first, clipped)
    return TileRange(tensors, state.get("step", parameter), kind, 0, parameter.numel())  # SGD counts no steps


def _in_memory_order(tensors: list[Tensor], state: dict[str, Any], names: Iterable[str], copied: bool) -> list[Tensor]:
    """Return the tensors of a piece with dimensions in the order in which the parameter's lie in memory."""
    order = _order(tensors[0])
    for index, name in enumerate(names, start=2):
        if not tensors[index].permute(order).is_contiguous():
            # Loaded from elsewhere. The kernels go by memory, not by index.
            tensors[index] = state[name] = torch.empty_like(tensors[0]).copy_(tensors[index])
    assert not copied or tensors[-1].permute(order).is_contiguous(), "a copy of another layout"
    return [tensor.permute(order).contiguous() for tensor in tensors]


def _order(tensor: Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _parts(pieces: list[TileRange], size: int) -> Iterator[list[TileRange]]:
    """Pieces of one kind, at most `size` elements in each part; `size` is a multiple of `LINE`."""
    kinds: dict[TileKind, list[TileRange]] = {}
    for piece in pieces:
        kinds.setdefault(piece.kind, []).append(piece)
    for alike in kinds.values():
        part: list[TileRange] = []
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


def _sorted_out(updates: Sequence[ParamUpdate]) -> tuple[list[ParamUpdate], list[ParamUpdate]]:
    """Return the updates that a kernel can take, because the parameter's elements fill its memory; and the others."""
    found: tuple[list[ParamUpdate], list[ParamUpdate]] = [], []
    for update in updates:
        parameter = update.parameter
        whole = parameter.is_contiguous() or parameter.permute(_order(parameter)).is_contiguous()
        taken = whole and parameter.dtype.is_floating_point and update.gradient.layout == torch.strided
        found[not taken].append(update)
    return found


def _own_step(optimizer: Optimizer, group: Mapping[str, Any], updates: Sequence[ParamUpdate]) -> None:
    """Step these parameters with the optimizer's class, without hooks and profiling around its `step`."""
    part = object.__new__(type(optimizer))
    vars(part).update(vars(optimizer))  # not copy.copy: it forgets what a class keeps beside groups and state
    part.param_groups = [{**group, "params": [update.parameter for update in updates]}]
    held = [update.parameter.grad for update in updates]
    try:
        for update in updates:
            update.parameter.grad = update.gradient
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(part)
    finally:
        for update, gradient in zip(updates, held, strict=True):
            update.parameter.grad = gradient
    for update in updates:
        if update.copy is not None:
            update.copy.copy_(update.parameter.detach())
