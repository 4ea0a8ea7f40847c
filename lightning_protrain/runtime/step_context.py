"""State of the present step, which every part of the runtime reads and the executor writes.

[Note: Calls]
Every call of a block that autograd may go back through gets the next number. Autograd runs nodes in the reverse order
of their creation. So when the gradient of the output of call k arrives, no node of a later call is left to run: this is
the pre-backward of call k, and chunks pinned for later calls may be released. Calls that ran inside of call k have
higher numbers too, but backward reaches them after call k: their chunks stay pinned. The runtime counts no gradients
and pairs no hooks, so frozen parameters, unused branches and recomputation need no rule of their own.

A block may checkpoint a part of itself (`torch.utils.checkpoint` in its own forward, detected in its first call). It
runs that part again in the middle of its backward, where no hook fires. So its device parameters stay registered while
its backward runs, unlike those of other blocks.

[Note: Scopes]
A *scope* is one `training_step`, `validation_step` and so on. Chunks that a training scope leaves live wait for
backward. The end of backward, and the end of any other scope, releases every chunk. A block that is called outside of
any scope releases its chunks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby, pairwise

import torch

from lightning_protrain.device.device import Device
from lightning_protrain.runtime.block import Block, BlockOrder
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.param import OffloadedParam
from lightning_protrain.runtime.prefetch_schedule import Timeline


class StepPhase(Enum):
    """Phase of the runtime."""

    IDLE = auto()  # Outside of any scope. After a training scope, live chunks wait for its backward.
    FORWARD = auto()  # In a training scope.
    EVAL = auto()  # In any other scope.
    BACKWARD = auto()  # In a backward that has reached an offloaded or swapped block.


@dataclass(frozen=True)
class BlockCall:
    """One call of a block, see [Note: Calls].

    Attributes:
        block: The called block.
        number: Number of the call.
        end: Number of the first call that began after this one had ended.
    """

    block: Block
    number: int
    end: int


class StepContext:
    """The phase, the position in the order of blocks, and the reads that backward still has to do.

    Args:
        blocks: All blocks that need chunks, in execution order; the root block `""` is entered with every scope.
        chunks: Offloaded chunks in execution order.
        device: Device that computes.
        log_once: Shows a sentence to the user.

    Attributes:
        phase: Phase of the runtime.
        timeline: Positions at which each chunk is needed in the present scope or backward.
        position: First position of the timeline that has not begun.
        num_calls: Number of the next call.
        call: Call whose backward is running or ran last; None: none has begun in this backward.
    """

    def __init__(
        self, blocks: Sequence[Block], chunks: Sequence[Chunk], device: Device, log_once: Callable[[str], None]
    ) -> None:
        self.blocks = tuple(blocks)
        self.chunks = tuple(chunks)
        self.device = device
        self.log_once = log_once
        self.phase = StepPhase.IDLE
        self.timeline = Timeline(())
        self.position = 0
        self.num_calls = 0
        self.call: BlockCall | None = None
        self._unread = tuple(block for block in blocks if not block.backward_reads)
        # Expected order, for training (True) and evaluation (False): that of the plan until a step has run.
        self._orders = {True: BlockOrder(self.blocks, self.blocks[::-1]), False: BlockOrder(self.blocks, ())}
        self._recorded = {True: False, False: False}
        self._said = False
        # The latest scope: blocks in the order of their forwards, and calls whose gradient is awaited.
        self._entered: list[Block] = []
        self._awaited: list[tuple[int, Block]] = []
        # The latest backward: its order, the positions of calls in it, and the call that follows each.
        self._backward_order = BlockOrder((), ())
        self._phase_around = StepPhase.IDLE
        self._num_calls_before = 0
        self._positions: dict[int, int] = {}
        self._next_calls: dict[int, int] = {}
        # By chunk: the earliest call whose backward reads it, and the earliest call that uses it.
        self._last_reads: dict[int, int] = {}
        self._last_uses: dict[int, int] = {}
        # Chunks of weights that the latest scope has read without a call: nothing tells when backward needs them.
        self._read_directly: set[int] = set()

    @property
    def in_scope(self) -> bool:
        """True if a step of a loop is running, and no backward inside of it."""
        return self.phase is StepPhase.FORWARD or self.phase is StepPhase.EVAL

    # --- scopes and calls -------------------------------------------------------------------------------------------

    def begin_scope(self, training: bool) -> None:
        """Begin a scope; a backward follows a training scope."""
        self.forget()
        self.phase = StepPhase.FORWARD if training else StepPhase.EVAL
        self.position = 0
        self.timeline = self._orders[training].timeline

    def end_scope(self, completed: bool) -> None:
        """End the scope; a completed scope sets the order to expect in the next one."""
        training, self.phase = self.phase is StepPhase.FORWARD, StepPhase.IDLE
        if completed:
            self._compare_order(training)

    def forget(self) -> None:
        """Forget the latest scope and its calls."""
        self.phase = StepPhase.IDLE
        self.call = None
        self._entered, self._awaited = [], []
        self._read_directly.clear()
        for block in self.blocks:
            block.first_call = None
            block.num_calls = 0
            block.forget_uses()

    def read_directly(self, param: OffloadedParam) -> None:
        """Note a read of a weight without a call: its chunk is needed until backward ends."""
        self._read_directly |= {index for index, chunk in enumerate(self.chunks) if param in chunk.params}

    def begin_call(self, block: Block) -> int:
        """Return the number of a new call that autograd may go back through."""
        number = self.num_calls
        self.num_calls += 1
        if block.first_call is None:
            block.first_call = number
        if self.in_scope:
            block.num_calls += 1
        return number

    def await_gradient(self, call: BlockCall) -> None:
        """Note that a call has ended, and that autograd will announce the gradient of its output."""
        if self.in_scope:
            self._awaited.append((call.number, call.block))

    def advance(self, block: Block) -> None:
        """Move the position past this forward of `block` in the expected order."""
        if self.in_scope:
            self._entered.append(block)
            self.position = self._orders[self.phase is StepPhase.FORWARD].behind(block, self.position)

    # --- backward ---------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Begin the backward of the calls that the latest scope (such as one `training_step`) made."""
        self._phase_around, self.phase = self.phase, StepPhase.BACKWARD
        self.call = None
        self._num_calls_before = self.num_calls
        awaited = self._awaited[::-1]
        self._positions = {number: position for position, (number, _) in enumerate(awaited)}
        self._next_calls = dict(pairwise(self._positions))
        self._last_reads = {}
        for number, block in awaited:
            for index in block.chunks:
                self._last_reads[index] = min(number, self._last_reads.get(index, number))
        self._last_uses = dict(self._last_reads)
        for block in self._unread:
            if (first := block.first_call) is not None:
                for index in block.chunks:
                    self._last_uses[index] = min(first, self._last_uses.get(index, first))
        blocks = [block for _, block in awaited]
        if not self._backward_order.is_of([], blocks):
            self._backward_order = BlockOrder([], blocks)
        self.timeline = self._backward_order.timeline
        self.position = 0

    def end_backward(self) -> None:
        """End the backward, complete or not, and return to the phase around it."""
        if self.phase is StepPhase.BACKWARD:
            self.phase = self._phase_around

    def advance_backward(self, call: BlockCall) -> bool:
        """Move the position past the backward of a call; return True if that call was expected next."""
        position = self._positions.get(call.number)
        if position is not None:
            self.position = position + 1
        return position is not None

    def call_after(self, call: BlockCall) -> int | None:
        """Return the number of the call whose backward comes next."""
        return self._next_calls.get(call.number)

    def number_of(self, block: Block) -> int | None:
        """Return the number of the call of `block` that a recomputation repeats; None: it has not been called."""
        return self.call.number if self.is_in_backward_of(block) and self.call is not None else block.first_call

    def is_in_backward_of(self, block: Block) -> bool:
        """Return whether a backward is running and the last call that it has reached is a call of `block`."""
        return self.phase is StepPhase.BACKWARD and self.call is not None and self.call.block is block

    def has_read(self, index: int) -> bool:
        """Return whether backward has reached the earliest call that reads the chunk, so that no read follows.

        Backward reaches a call before the calls inside it, which have higher numbers.
        """
        if index in self._read_directly:
            return False
        last = self._last_reads.get(index)
        number, end = self._reached
        return last is None or last == number or last >= end

    def has_left(self, index: int) -> bool:
        """Return whether backward has left the earliest call that uses the chunk, so that no gradient follows.

        No hook announces the backward of an embedding; it runs after the backwards of all later calls.
        """
        _, end = self._reached
        return index not in self._read_directly and self._last_uses.get(index, end) >= end

    def num_uses(self, param: OffloadedParam) -> int:
        """Return the number of places where calls of the present step have used a parameter."""
        return sum(block.num_calls for block in self.blocks for _, other in block.sites if other is param)

    @property
    def _reached(self) -> tuple[int, int]:
        """Number of the call that backward has reached, and of the first call after it."""
        if self.call is None:
            return self._num_calls_before, self._num_calls_before
        return self.call.number, self.call.end

    # --- orders -----------------------------------------------------------------------------------------------------

    def _compare_order(self, training: bool) -> None:
        """Take the order of this scope as the expected order of the next one."""
        if not self._entered:
            return
        before = self._orders[training]
        # Ignore repeated calls of one block (a head may be called for each slice of a sequence) and blocks without
        # chunks, because they move no weights.
        is_other = _without_repeats(self._entered) != _without_repeats(before.forward)
        if self._recorded[training] and is_other and not self._said:
            self._said = True
            self.log_once(
                "The blocks ran in another order than in the step before: the results are right, but weights were "
                "fetched late. Steps of changing order run slower when offloaded."
            )
        self._recorded[training] = True
        backward = [block for _, block in reversed(self._awaited)]
        if not before.is_of(self._entered, backward):
            self._orders[training] = BlockOrder(self._entered, backward)


def _without_repeats(blocks: Sequence[Block]) -> list[Block]:
    return [block for block, _ in groupby(block for block in blocks if block.chunks)]


def in_backward() -> bool:
    """Return whether autograd runs a backward on this thread: a forward now is a recomputation."""
    return torch._C._current_graph_task_id() != -1
