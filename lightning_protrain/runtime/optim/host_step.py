"""The host's optimizer step in tiles, on several threads.

An OpenMP kernel ends at a barrier, so one thread that another process delays holds up all threads. Each thread here
therefore computes alone (`torch.set_num_threads(1)`) and takes its next call from a common queue. Nobody waits for a
thread that wakes too late. `torch.set_num_threads` also sets the number for threads that start later, and even for the
main thread if it has not computed yet. So the calling thread reads its number before it starts threads, and restores it
once they have started and at the end. The queues are `queue.SimpleQueue`, which is written in C: waking a thread of an
executor takes several times as long when the caches hold nothing of the interpreter.

A step streams hundreds of megabytes through the caches and evicts the interpreter from them. The Python code of the
next step then takes several times as long as in a profile. So `StepSchedule` prepares several chunks together while the
interpreter is in the caches, and puts their calls into one queue. No thread then waits for others at the end of a
chunk, or for Python code of another thread. Prepared calls are not kept for the next optimizer step: checking that they
are still valid would cost as much as preparing them again.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
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
    """A group of calls that are waited for together.

    Attributes:
        number: Number of calls.
        ends: Outcome of each call that has ended: None, or the exception it raised.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.ends: _Ends = SimpleQueue()


class WorkQueue:
    """A queue of calls, which idle threads make in order."""

    def __init__(self) -> None:
        self._queue: deque[tuple[_Work, _Ends]] = deque()

    def add(self, works: Sequence[_Work]) -> WaitGroup:
        """Add calls, which must not depend on each other or on calls added before or after."""
        group = WaitGroup(len(works))
        self._queue.extend([(work, group.ends) for work in works])
        return group

    def make(self, until: WaitGroup | None = None) -> None:
        """Make calls until none is left, or until those of the group `until` have ended."""
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
        """Make calls until all calls of the group have ended; call it once.

        While other threads make the last calls of the group, this thread makes calls that were added later. It waits
        only if there are none.

        Raises:
            BaseException: The exception of a call of the group, after all of its calls have ended.
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
    """A pool of threads that make calls; `join` starts them on the cores of its caller when they are first needed.

    Args:
        name: Prefix of the names of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: list[threading.Thread] = []
        self._tasks: SimpleQueue[WorkQueue | None] = SimpleQueue()
        self._starting = threading.Lock()

    def join(self, calls: WorkQueue, number: int) -> None:
        """Have `number` threads make calls of the queue too, as soon as they can and until none is left.

        They make them without gradients and bypass the guard.
        """
        if len(self._threads) < number:
            before = torch.get_num_threads()
            self._start(number)
            torch.set_num_threads(before)
        for _ in range(number):
            self._tasks.put(calls)

    def close(self) -> None:
        """End the threads when they have made their calls; a later `join` would start new ones."""
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
                begun.get()  # Each has set its own number of threads, so the caller may restore its number.

    def _loop(self, begun: SimpleQueue[None]) -> None:
        torch.get_num_threads()  # Otherwise the first computation would replace the number that is set here.
        torch.set_num_threads(1)
        begun.put(None)
        with below_guard(), torch.no_grad():
            while (calls := self._tasks.get()) is not None:
                calls.make()
                del calls  # Otherwise the queue, with all that it refers to, would live until the next task.


# Size of a scratch tile, one for each thread, bytes: 1 to 2 MiB were best, see benchmarks/LOG.md.
TILE_BYTES = 2 << 20
# Parts of a chunk for each thread if no other chunk follows: other threads take over parts of a delayed thread.
PARTS_PER_THREAD = 2
# Largest number of chunks that are prepared together. The first chunk waits for the preparation, which copies gradients
# whose layout differs from that of their weights.
PREPARED_TOGETHER = 8


class ParamUpdate(NamedTuple):
    """A parameter to step, with its gradient.

    Attributes:
        parameter: Weight in host memory, a key of the optimizer's state.
        gradient: Gradient of the same shape, in any floating dtype. It is clipped in place if it has the dtype of the
            weight.
        copy: Shadow copy to write the new weight to, with the parameter's shape and strides. It may be the memory of
            the gradient. None: there is none.
    """

    parameter: Tensor
    gradient: Tensor
    copy: Tensor | None = None


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the present settings of a group without its parameters; a tensor (a learning rate) is cloned."""
    kept = {name: value for name, value in group.items() if name != "params"}
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in kept.items()}


Given = Iterable[tuple[Mapping[str, Any], Sequence[ParamUpdate]]]


class _Scratch(threading.local):
    """Memory for one tile, separate for each thread."""

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes // 8, dtype=torch.float64)
        self._tiles: dict[torch.dtype, Tensor] = {}

    def tile(self, dtype: torch.dtype) -> Tensor:
        """Return all of the memory as a tensor of `dtype`."""
        if dtype not in self._tiles:
            self._tiles[dtype] = self._memory.view(dtype)
        return self._tiles[dtype]


class StepBatch:
    """A batch of parameters, usually those of a chunk, that are stepped and waited for together.

    Attributes:
        given: Returns the updates with the hyperparameters of their groups; called once.
        clip: Clipping of the gradients before the step.
        own: Groups and updates left to the step of the optimizer's own class.
        group: Calls that step the rest; None: not prepared yet.
        error: Exception of the preparation; None: it has not failed.
    """

    def __init__(self, given: Callable[[], Given], clip: Clip) -> None:
        self.given = given
        self.clip = clip
        self.own: list[tuple[Mapping[str, Any], Sequence[ParamUpdate]]] = []
        self.group: WaitGroup | None = None
        self.error: BaseException | None = None


class HostStep:
    """The optimizer step of parameters in host memory.

    Results are bitwise those of three passes over whole tensors: clip and cast the gradient, run PyTorch's own step,
    and cast the shadow copy. `step` may be called from any thread, and from several at once for different parameters.
    It calls no hooks: they belong to `optimizer.step()`, of which this step is a part.

    Args:
        num_threads: Number of computing threads, including the caller; None: as many as PyTorch uses in the thread of
            the first step. Threads are started when a step first needs them, on the cores of its caller.
        fuse: Whether a group in which the user chose no implementation uses the fused kernel. False leaves the choice
            to PyTorch, which takes its slowest loop on the CPU. The fused kernel rounds differently.
        tile_bytes: Size of a tile, bytes, see [Note: Tiles].
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
        """Step these parameters and no others; on return, they and their shadow copies are written.

        Args:
            optimizer: Optimizer whose state is used; missing state is created as in its own first step.
            group: Hyperparameters of the group, e.g. the result of `hyperparameters`.
            updates: Parameters of that group.
            clip: Clipping of their gradients before the step.

        Raises:
            ValueError: The optimizer works on all its parameters as one vector (LBFGS).
        """
        steps = self.steps(optimizer)
        with torch.no_grad():
            steps.finish(steps.add(lambda: [(group, updates)], clip))

    def steps(self, optimizer: Optimizer) -> StepSchedule:
        """Return a schedule that steps the optimizer's parameters in batches without a pause between them."""
        return StepSchedule(self, optimizer)

    def close(self) -> None:
        """End the threads when they have made their calls; a later step would start new ones."""
        self._pool.close()

    def kernel(self, optimizer: Optimizer, group: Mapping[str, Any]) -> str | None:
        """Return the fused kernel that steps a group, one of `KERNELS`; None: the optimizer's class steps it."""
        return kernel_of(optimizer, group, self._fuse)

    def calls(self, rule: FusedRule, pieces: list[TileRange], clip: Clip, parts: int) -> list[Callable[[], None]]:
        """Return calls that step these parameters in any order on any thread, about `parts` for each thread."""
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
        """Have other threads make calls of the queue too, given that it holds `number` of them."""
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
    """A schedule of steps of an optimizer's parameters in batches, which are prepared ahead.

    `add` may be called at any time and from any thread, `finish` from one thread at a time.

    Args:
        host: Steps the parameters.
        optimizer: Optimizer whose state is used.

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
        self._num_ahead = 0  # Number of prepared batches that `finish` has not waited for.

    def add(self, given: Callable[[], Given], clip: Clip = NO_CLIP) -> StepBatch:
        """Add a batch of parameters, none of which is in another batch.

        Args:
            given: Returns the updates; called when this batch or an earlier one is to be finished.
            clip: Clipping of their gradients before the step.
        """
        batch = StepBatch(given, clip)
        self._added.append(batch)
        return batch

    def finish(self, batch: StepBatch) -> None:
        """Step a batch; on return, its weights and shadow copies are written, and maybe those of other batches.

        Call it once for each batch, without gradients (`torch.no_grad`).

        Raises:
            BaseException: The exception of the optimizer or of a kernel.
        """
        if self._added and self._num_ahead < PREPARED_TOGETHER // 2:
            if not self._num_ahead:
                self._prepare(1)  # The other threads can begin with this batch.
            self._prepare(PREPARED_TOGETHER - 1)
        while batch.group is None:
            if batch.error is not None:
                raise batch.error
            assert self._added, "a batch of another schedule"
            self._prepare(PREPARED_TOGETHER)
        for group, given in batch.own:
            updates = [update._replace(gradient=update.gradient.to(update.parameter.dtype)) for update in given]
            batch.clip.apply([update.gradient for update in updates])
            _own_step(self._optimizer, group, updates)
        batch.own.clear()
        self._num_ahead -= 1
        self._calls.finish(batch.group)

    def _prepare(self, number: int) -> None:
        batches = [self._added.popleft() for _ in range(min(len(self._added), number))]
        steps: list[Tensor] = []
        last = batches[-1] if batches and not self._added else None
        try:
            prepared = [(batch, self._calls_of(batch, batch is not last, steps)) for batch in batches]
            if steps:
                torch._foreach_add_(steps, 1)
        except RuntimeError as error:
            _fail(batches, error)
            return
        except BaseException as error:
            _fail(batches, error)
            raise
        for batch, calls in prepared:
            batch.group = self._calls.add(calls)
        self._num_ahead += len(prepared)
        self._host.offer(self._calls, sum([len(calls) for _, calls in prepared]))

    def _calls_of(self, batch: StepBatch, followed: bool, steps: list[Tensor]) -> list[Callable[[], None]]:
        """Return the calls that step a batch, and append its step counters to `steps`.

        Args:
            batch: The batch.
            followed: Whether another batch follows it.
            steps: Receives the step counters.
        """
        parts = 1 if followed else PARTS_PER_THREAD
        calls: list[Callable[[], None]] = []
        for group, updates in batch.given():
            if self._blockwise is not None:
                calls += [call for update in updates for call in self._blockwise.calls(group, *update, batch.clip)]
                continue
            kernel = self._host.kernel(self._optimizer, group)
            fused, rest = _sorted_out(updates) if kernel else ([], updates)
            if rest:
                batch.own.append((group, rest))
            if kernel and fused:
                rule = FusedRule.of(kernel, group)
                pieces = [_piece(self._optimizer, rule, update, batch.clip) for update in fused]
                if kernel != "sgd":
                    steps += [piece.step for piece in pieces]
                calls += self._host.calls(rule, pieces, batch.clip, parts)
        return calls


def _fail(batches: Iterable[StepBatch], error: BaseException) -> None:
    for batch in batches:
        batch.error = error


def _up_to_line(size: int) -> int:
    return max(-(-size // LINE), 1) * LINE


def _piece(optimizer: Optimizer, rule: FusedRule, update: ParamUpdate, clip: Clip) -> TileRange:
    """Return the range of a whole parameter; its state is created as by PyTorch's own fused step."""
    parameter, gradient, copy = update.parameter, update.gradient, update.copy
    assert all(each is None or each.shape == parameter.shape for each in (gradient, copy)), "another shape"
    state = optimizer.state[parameter] if rule.states else {}
    first = rule.name == "sgd" and state.get("momentum_buffer") is None
    if first and rule.states:
        state["momentum_buffer"] = torch.empty_like(parameter)  # The kernel fills it.
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
        clip.apply([gradient])  # Clip first: the kernel may read a contiguous copy of the gradient.
        clipped = False
    for tensor in tensors:
        if not tensor.is_contiguous():
            tensors = _in_memory_order(tensors, state, rule.states, copy is not None)
            break
    tiled = copy is not None or gradient.dtype != parameter.dtype or clipped
    kind = TileKind(tiled, parameter.dtype, copy is not None, first, clipped)
    return TileRange(tensors, state.get("step", parameter), kind, 0, parameter.numel())  # SGD counts no steps


def _in_memory_order(tensors: list[Tensor], state: dict[str, Any], names: Iterable[str], copied: bool) -> list[Tensor]:
    """Return the tensors of a range with their dimensions permuted to the parameter's order in memory."""
    order = _order(tensors[0])
    for index, name in enumerate(names, start=2):
        if not tensors[index].permute(order).is_contiguous():
            # A loaded state may have another layout, but the kernels go by memory, not by index.
            tensors[index] = state[name] = torch.empty_like(tensors[0]).copy_(tensors[index])
    assert not copied or tensors[-1].permute(order).is_contiguous(), "a shadow copy of another layout"
    return [tensor.permute(order).contiguous() for tensor in tensors]


def _order(tensor: Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _parts(pieces: list[TileRange], size: int) -> Iterator[list[TileRange]]:
    """Yield parts: ranges of one kind with at most `size` elements in all; `size` is a multiple of `LINE`."""
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
    """Split updates into those that a fused kernel can take, whose weights are dense in memory, and the rest."""
    found: tuple[list[ParamUpdate], list[ParamUpdate]] = [], []
    for update in updates:
        parameter = update.parameter
        whole = parameter.is_contiguous() or parameter.permute(_order(parameter)).is_contiguous()
        taken = whole and parameter.dtype.is_floating_point and update.gradient.layout == torch.strided
        found[not taken].append(update)
    return found


def kernel_of(optimizer: Optimizer, group: Mapping[str, Any], fuse: bool) -> str | None:
    """Return the fused kernel that steps a group, one of `KERNELS`; None: the optimizer's class steps it.

    Args:
        optimizer: The optimizer.
        group: Hyperparameters of the group.
        fuse: Whether a group in which the user chose no implementation uses the fused kernel.
    """
    chosen = group.get("fused")
    takes = (
        (chosen or (fuse and chosen is None and group.get("foreach") is None))
        and not group.get("differentiable")
        # Set by a gradient scaler during a step: only the class's own step honours them.
        and getattr(optimizer, "grad_scale", None) is None
        and getattr(optimizer, "found_inf", None) is None
    )
    return KERNELS.get(type(optimizer)) if takes else None


def class_step(optimizer: Optimizer) -> Callable[[], object]:
    """Return the step of the optimizer's class, without its wrappers (hooks, profiling)."""
    return partial(inspect.unwrap(type(optimizer).step), optimizer)


def trial_of(optimizer: Any) -> Optimizer:
    """Return an optimizer of the same class and groups, with states of its own and none of them paged."""
    trial: Any = object.__new__(type(optimizer))
    own = {name: _own(value) for name, value in vars(optimizer).items()}
    vars(trial).update(own, state=defaultdict(dict))
    if is_blockwise(optimizer):
        overrides = copy.copy(optimizer.mng)
        vars(overrides).update(pid2config=dict(overrides.pid2config), index2config=dict(overrides.index2config))
        vars(trial).update(is_paged=False, name2qmap=copy.copy(optimizer.name2qmap), mng=overrides)
    return trial


def _own(value: Any) -> Any:
    """Return a copy of a value that a step of the user's class may change in place, such as a counter."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.copy(value) if isinstance(value, list | dict | set) else value


def trial_step(optimizer: Optimizer, ids: set[int]) -> Callable[[], object]:
    """Return a step of the optimizer's class on the parameters with these `id`s, with states of its own."""
    trial: Any = trial_of(optimizer)
    groups = [{name: _own(value) for name, value in group.items()} for group in trial.param_groups]
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in ids]
    trial.param_groups = [group for group in groups if group["params"]]
    vars(trial).update(initialized=False)  # Of bitsandbytes: its first step applies overrides.
    return class_step(trial)


def _own_step(optimizer: Optimizer, group: Mapping[str, Any], updates: Sequence[ParamUpdate]) -> None:
    """Run the step of the optimizer's class on these parameters, without its wrappers (hooks, profiling)."""
    part = object.__new__(type(optimizer))
    vars(part).update(vars(optimizer))  # Not copy.copy: it drops attributes of the class beyond groups and state.
    part.param_groups = [{**group, "params": [update.parameter for update in updates]}]
    held = [update.parameter.grad for update in updates]
    try:
        for update in updates:
            update.parameter.grad = update.gradient
        with torch.no_grad():
            class_step(part)()
    finally:
        for update, gradient in zip(updates, held, strict=True):
            update.parameter.grad = gradient
    for update in updates:
        if update.copy is not None:
            update.copy.copy_(update.parameter.detach())
