"""The executor: brings each unit's chunks when it computes, and decides nothing that the plan has decided.

[Note: Calls]
Every call of a unit that autograd may go back through gets the next number. Autograd runs nodes in the reverse order of
their creation, so when the gradient of the output of call k is there, no node of a later call is left to run: that is
the pre-backward of k, and whatever later calls pinned may go (calls inside of k have later numbers, but an earlier end:
they stay). No counting of gradients, no pairing of hooks: frozen parameters, unused branches and recomputation need no
rule of their own.

A unit that checkpoints a part of itself (`torch.utils.checkpoint` in its own forward, which its first call shows) runs
that part again in the midst of its backward, past any hook. So while its backward runs its device parameters are
registered; of any other unit they are not.

[Note: Scopes]
A *scope* is one `training_step`, `validation_step`, ... . What a training scope leaves live waits for backward; the end
of backward, and the end of any other scope, release everything. A unit called outside of any scope releases at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import torch

from lightning_protrain.device.device import Device
from lightning_protrain.runtime.block import Block, BlockOrder
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.comm.collectives import Collectives
from lightning_protrain.runtime.grad_offload import GradOffload
from lightning_protrain.runtime.optim.async_step import AsyncStep
from lightning_protrain.runtime.param import OffloadedParam
from lightning_protrain.runtime.prefetch_schedule import Capacity, Timeline
from lightning_protrain.runtime.residency import Residency, WarmupPrefetch
from lightning_protrain.runtime.swap import ActivationSwap


@dataclass
class _Scope:
    """What one scope has recorded, see [Note: Scopes].

    Attributes:
        training: Whether backward follows.
        open: Whether the step is still running.
        entered: Units in the order of their forwards.
        awaited: Calls whose gradient is awaited, in the order in which they ended: backward begins with the last.
    """

    training: bool
    open: bool = True
    entered: list[Block] = field(default_factory=list)
    awaited: list[tuple[int, Block]] = field(default_factory=list)


class Executor:
    """Streams chunks through the device.

    Args:
        chunks: The offloaded chunks in execution order.
        units: All units that need chunks, in execution order; `""` among them is entered with every scope.
        capacity: What may be live at one time.
        device: Where to.
        async_step: Knows which host weights are still being stepped.
        say: Takes a sentence for the user.
        swap: Brings back what blocks have swapped; None: no block does.
        communicator: Averages gradients over ranks; None: there is one rank.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        units: Sequence[Block],
        capacity: Capacity,
        device: Device,
        async_step: AsyncStep,
        say: Callable[[str], None],
        swap: ActivationSwap | None = None,
        communicator: Collectives | None = None,
    ) -> None:
        self.units = tuple(units)
        self._unread = tuple(unit for unit in units if not unit.backward_reads)
        self.root = next((unit for unit in units if unit.name == "" and unit.chunks), None)
        self._chunks = tuple(chunks)
        self._device = device
        self._say = say
        self._swap = swap
        self._async_step = async_step
        self._residency = Residency(chunks, capacity, device, async_step, say)
        self._early = WarmupPrefetch(chunks, self._residency, async_step, self._give_up)
        self._landing = GradOffload(
            chunks,
            device,
            self.begin_backward,
            async_step,
            self._is_past,
            self._num_uses,
            communicator=communicator,
            is_behind=self._is_behind,
            leave=self._leave,
        )
        # The order to expect, for training and for evaluation; until a step has run, that of the plan.
        self._orders = {True: BlockOrder(self.units, self.units[::-1]), False: BlockOrder(self.units, ())}
        self._recorded = {True: False, False: False}
        self._said = False
        self._timeline = Timeline(())
        self._cursor = 0
        self.num_calls = 0
        self._scope: _Scope | None = None
        # What backward goes through.
        self._awaited = BlockOrder((), ())
        self._backward: Block | None = None
        self._shown: Block | None = None
        self._backward_number = self._backward_end = -1  # The call that it is at, and the first one after that.
        self._backward_runs = False
        self._backward_positions: dict[int, int] = {}
        self._backward_next: dict[int, int] = {}
        # By chunk, the earliest call whose backward reads it, and the earliest call.
        self._last_reads: dict[int, int] = {}
        self._last_uses: dict[int, int] = {}

    def reserve_gradients(self, lends: bool) -> None:
        """Make host memory for gradients before training, see `GradOffload.reserve`."""
        self._landing.reserve(lends)

    # --- scopes -----------------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self, training: bool) -> Iterator[None]:
        """One step of the training loop, or of evaluation (forward only)."""
        if self._scope is not None and self._scope.open:
            # A step called from inside a step belongs to it.
            yield
            return
        self._early.end()
        self.release_all()
        self._scope = _Scope(training)
        self._async_step.copies.begin()
        for unit in self.units:
            unit.first_call = None
            unit.num_calls = 0
            unit.forget_uses()
        self._cursor = 0
        self._timeline = self._orders[training].timeline
        try:
            self._early.begin(self._timeline, training)
            yield
        except BaseException:
            self._scope.open = False
            with suppress(RuntimeError):  # A device that has failed says it again in `reset`, beside the cause.
                self._early.drop()
            raise
        self._early.drop()
        self._scope.open = False
        self._compare_order(self._scope)
        if not training:
            self.release_all()

    def begin_call(self, unit: Block) -> int:
        """Numbers a call that autograd may go back through, see [Note: Calls]."""
        number = self.num_calls
        self.num_calls += 1
        if unit.first_call is None:
            unit.first_call = number
        if self._scope is not None and self._scope.open:
            unit.num_calls += 1
        return number

    def await_gradient(self, unit: Block, number: int) -> None:
        """Notes that the call `number` has ended and that `before_backward` will be called for it."""
        if self._scope is not None and self._scope.open:
            self._scope.awaited.append((number, unit))

    # --- forward ----------------------------------------------------------------------------------------------------

    def enter(self, unit: Block) -> None:
        """Brings the unit's chunks and registers the device parameters."""
        recomputing = in_backward()
        if unit.depth == 0:
            if self._shown is unit:
                self._hide()
            if recomputing:
                number = self._backward_number if self._backward is unit else unit.first_call
                self._residency.pin(unit, number if number is not None else -1)
                unit.forget_uses()  # They are the same ones.
            else:
                self._advance(unit)
                self._notice_call(unit)
            self._early.end()
            self._residency.require(unit, self._timeline, self._cursor, recomputing)
            unit.follow()
            self._register_device_params(unit)
        unit.depth += 1
        if not recomputing and self._scope is not None and self._scope.open:
            self._residency.prefetch(self._timeline, self._cursor)

    def exit(self, unit: Block) -> None:
        """Registers the host parameters again; the chunks may go now."""
        unit.depth -= 1
        if unit.depth:
            return
        del self._residency.running[unit]
        unit.register_hosts()
        unit.end_uses()
        for index in unit.chunks:
            self._chunks[index].write_back()
        if in_backward():
            if unit is self._backward:
                self._show(unit)
            return
        if self._scope is None or not self._scope.open:
            self._residency.release(set(unit.chunks) - self._residency.pinned())
        elif self._swap is not None:
            # Its buffers are free now, before the compute stream waits for what swapped blocks copy out.
            self._residency.prefetch(self._timeline, self._cursor)

    # --- backward ---------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Called before anything else of a backward; its end calls `end_backward`."""
        if self._backward_runs:
            return
        self._early.end()
        self._async_step.begin_backward()
        torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(self))
        self._backward_runs = True
        awaited = self._scope.awaited[::-1] if self._scope is not None else []
        self._backward_positions = {number: position for position, (number, _) in enumerate(awaited)}
        self._backward_next = dict(pairwise(self._backward_positions))
        self._backward_number = self._backward_end = self.num_calls
        self._last_reads = {}
        for number, unit in awaited:
            for index in unit.chunks:
                self._last_reads[index] = min(number, self._last_reads.get(index, number))
        self._last_uses = dict(self._last_reads)
        for unit in self._unread if self._scope is not None else ():
            if (first := unit.first_call) is not None:
                for index in unit.chunks:
                    self._last_uses[index] = min(first, self._last_uses.get(index, first))
        units = [unit for _, unit in awaited]
        if not self._awaited.is_of([], units):
            self._awaited = BlockOrder([], units)
        self._timeline = self._awaited.timeline
        self._cursor = 0

    def begin_averages(self) -> None:
        """The backward that follows ends with gradients averaged over the ranks, see [Note: Reduction]."""
        if self._landing.reduction is not None:
            self._landing.reduction.begin()

    def before_backward(self, unit: Block, number: int, end: int) -> None:
        """The gradient of the output of call `number` is there, see [Note: Calls]; calls from `end` on came after it.

        Raises:
            RuntimeError: Backward makes a graph itself, whose own backward nothing would announce.
        """
        if torch.is_grad_enabled() and (unit.chunks or unit.swap_bytes):
            raise RuntimeError(
                f"Backward with create_graph=True runs through {unit.name!r}, which is streamed: its second derivative "
                "would find no weights. Make its chunks resident (`num_persistent_chunks`), and swap no activations."
            )
        self.begin_backward()
        self._hide()
        self._residency.unpin(end)
        self._backward, self._backward_number, self._backward_end = unit, number, end
        self._residency.pin(unit, number)
        self._residency.require(unit, self._timeline, self._cursor, in_backward=True)
        position = self._backward_positions.get(number)
        if position is not None:
            self._cursor = position + 1
            if self._swap is not None:
                # What the next call needs first comes first: its weights, then its activations, then what is farther.
                self._residency.prefetch(self._timeline, self._cursor, self._timeline.later(self._cursor))
        if self._swap is not None:
            self._swap.before_backward(number, self._backward_next.get(number), end)
        unit.follow()
        self._show(unit)
        if position is not None:
            self._residency.prefetch(self._timeline, self._cursor)

    def _show(self, unit: Block) -> None:
        """Register the device parameters of a unit whose backward will run a part of its forward, [Note: Calls]."""
        if unit.depth or not unit.recomputes_itself:
            return
        unit.forget_uses()  # What it computes again uses them as its forward did.
        unit.register_device_params()
        self._shown = unit

    def _hide(self) -> None:
        """Register the host parameters of the unit whose backward has ended."""
        unit, self._shown = self._shown, None
        if unit is not None:
            unit.register_hosts()
            unit.end_uses()

    def give_up_backward(self) -> None:
        """Register the host parameters again after an exception in backward; `reset` does the rest."""
        self._backward_runs = False
        self._hide()

    def end_backward(self) -> None:
        """Ends what backward began: every gradient is on the host, nothing is live that no forward is using."""
        self._backward_runs = False
        self._backward = None
        self._hide()
        self._residency.pins.clear()
        for unit in self.units:
            unit.forget_uses()
        self._landing.finish()
        self.settle()

    # --- at any time ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Before host weights are written to: nothing is live that no forward is using, and no upload reads them."""
        self._residency.release_unused()
        if self._swap is not None:
            self._swap.settle()
        self._device.settle()

    def refresh(self) -> None:
        """After an optimizer step: what is live holds old values; what is in use is fetched again."""
        self.settle()
        self._residency.renew()  # Whatever the versions say: an optimizer may write through `parameter.data`.

    def release_all(self) -> None:
        """Between scopes: frees everything. Afterwards host weights may be written to."""
        self._residency.pins.clear()
        self.settle()

    def reset(self) -> None:
        """After an exception in mid-step: host parameters registered, nothing live, nothing under way."""
        for unit in self._residency.running:
            unit.depth = 0
            unit.register_hosts()
        if self._shown is not None:
            self._shown.register_hosts()
            self._shown = None
        self._residency.running.clear()
        self._backward_runs = False
        self._backward = None
        self._early.end()
        self._scope = None
        try:
            self._landing.forget()
            for chunk in self._chunks:
                for param in chunk.params:
                    param.drop_gradient()
                    if param.uses is not None:
                        param.uses.forget()
            self.release_all()
        finally:  # Also after an error of the device, no weight is watched any more.
            self._async_step.copies.forget()

    # --- orders -----------------------------------------------------------------------------------------------------

    def _advance(self, unit: Block) -> None:
        """Moves the cursor behind this call in the expected order."""
        if self._scope is None or not self._scope.open:
            return
        self._scope.entered.append(unit)
        self._cursor = self._orders[self._scope.training].behind(unit, self._cursor)

    def _register_device_params(self, unit: Block) -> None:
        """Registers all device parameters of a unit or none, whatever comes in between; `reset` finds it either way."""
        running = self._residency.running
        running[unit] = None
        done = False
        try:
            unit.register_device_params()
            done = True
        finally:
            if not done:
                unit.register_hosts()
                del running[unit]

    def _notice_call(self, unit: Block) -> None:
        """Code that runs a unit outside of any scope may do anything before it, and after it."""
        if self._scope is None or not self._scope.open:
            self._async_step.copies.interrupt()
            self._invalidate(unit.chunks)

    def _invalidate(self, indices: Iterable[int]) -> None:
        self._async_step.copies.invalidate(param for index in indices for param in self._chunks[index].params)

    def _give_up(self, indices: Iterable[int]) -> None:
        """What has been fetched of these chunks is fetched again when it is needed."""
        self.settle()
        self._invalidate(indices)

    def _is_past(self, index: int) -> bool:
        """Return whether backward has reached the earliest call that reads the chunk: none is left to come.

        Backward reaches a call before the calls within it, which have higher numbers.
        """
        last = self._last_reads.get(index)
        return last is None or last == self._backward_number or last >= self._backward_end

    def _is_behind(self, index: int) -> bool:
        """Return whether backward has left the earliest call that uses the chunk, so that no gradient is left to come.

        Nothing announces the backward of an embedding: it comes behind those of all later calls.
        """
        return self._last_uses.get(index, self._backward_end) >= self._backward_end

    def _leave(self, index: int) -> None:
        """Gradients of a chunk are sent: a rank that shares it may step it from now on, see [Note: Step sync]."""
        if self._async_step.leave(index) and index in self._residency.live - self._residency.pinned():
            self._residency.release([index])

    def _num_uses(self, param: OffloadedParam) -> int:
        """In how many places calls of the present step have used a parameter."""
        return sum(unit.num_calls for unit in self.units for _, other in unit.sites if other is param)

    def _compare_order(self, scope: _Scope) -> None:
        """Takes the order of this step as the one to expect."""
        if not scope.entered:
            return
        before = self._orders[scope.training]
        # How often a unit is called in a row moves no weights: a head is called for each slice of a sequence.
        is_other = _without_repeats(scope.entered) != _without_repeats(before.forward)
        if self._recorded[scope.training] and is_other and not self._said:
            self._said = True
            self._say(
                "The blocks ran in another order than in the step before: the results are right, but weights were "
                "fetched late. Steps of changing order run slower when offloaded."
            )
        self._recorded[scope.training] = True
        backward = [unit for _, unit in reversed(scope.awaited)]
        if not before.is_of(scope.entered, backward):
            self._orders[scope.training] = BlockOrder(scope.entered, backward)


def _without_repeats(units: Sequence[Block]) -> list[Block]:
    return [unit for unit, _ in groupby(units)]


class _EndOfBackward:
    """What autograd calls when a backward has ended, and lets go of uncalled when it has failed.

    Args:
        executor: Is told of either.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor: Executor | None = executor

    def __call__(self) -> None:
        executor, self._executor = self._executor, None
        assert executor is not None
        executor.end_backward()

    def __del__(self) -> None:
        if self._executor is not None:
            self._executor.give_up_backward()


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward now is a recomputation."""
    return torch._C._current_graph_task_id() != -1
