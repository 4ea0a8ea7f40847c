"""Fetches each block's chunks when the block computes, as the plan decided.

Every hook of the runtime calls the executor: forwards of blocks, gradients of their outputs, gradients of weights, and
the end of backward. `StepContext` keeps the position in the step, see [Note: Calls] and [Note: Scopes].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lightning_protrain.planner.plan import Plan
from lightning_protrain.runtime.block import Block
from lightning_protrain.runtime.comm.collectives import Collectives
from lightning_protrain.runtime.direct_reads import DirectReads
from lightning_protrain.runtime.grad_offload import GradOffload
from lightning_protrain.runtime.optim.async_step import AsyncStep
from lightning_protrain.runtime.param import OffloadedParam
from lightning_protrain.runtime.prefetch_schedule import Capacity
from lightning_protrain.runtime.residency import Residency
from lightning_protrain.runtime.step_context import BlockCall, StepContext, StepPhase, in_backward
from lightning_protrain.runtime.swap import ActivationSwap


class Executor:
    """The control of streaming: moves chunks through the device.

    Args:
        context: State of the present step.
        plan: Applied plan, which says how many chunks may be live.
        async_step: Steps offloaded chunks; knows which host weights are still being stepped.
        swap: Swaps activations of blocks; None: no block swaps.
        communicator: Averages gradients over ranks; None: a single rank.

    Attributes:
        root: Block of the offloaded parameters that the root module itself holds; None: it holds none.
        grads: Downloads gradients to the host.
        direct: Lets the model read weights without calling their module; none unless added.
    """

    def __init__(
        self,
        context: StepContext,
        plan: Plan,
        async_step: AsyncStep,
        swap: ActivationSwap | None = None,
        communicator: Collectives | None = None,
    ) -> None:
        self.context = context
        self.root = next((block for block in context.blocks if block.name == "" and block.chunks), None)
        self.swap = swap
        self.async_step = async_step
        torch_device = context.device.torch_device
        self.direct = DirectReads(
            torch_device, async_step.guard, context.log_once, context.read_directly, context.device.settle
        )
        self._residency = Residency(context, Capacity.of(plan), async_step)
        self.grads = GradOffload(context, self._residency, async_step, communicator)
        self._registered: Block | None = None  # Its device parameters stay registered during its backward.

    # --- scopes -----------------------------------------------------------------------------------------------------

    @contextmanager
    def scope(self, training: bool) -> Iterator[None]:
        """Run one step of the training loop, or of evaluation (forward only)."""
        if self.context.phase is not StepPhase.IDLE:
            # A step called from inside a step belongs to the outer step.
            yield
            return
        self.release_all()
        self.async_step.shadows.begin()
        self.context.begin_scope(training)
        try:
            yield
        except BaseException:
            self.context.end_scope(completed=False)
            raise
        self.context.end_scope(completed=True)
        if not training:
            self.release_all()

    # --- forward ----------------------------------------------------------------------------------------------------

    def enter(self, block: Block) -> None:
        """Fetch the block's chunks and register its device parameters."""
        context, recomputing = self.context, in_backward()
        if block.depth == 0:
            if self._registered is block:
                self._register_hosts()
            if recomputing:
                number = context.number_of(block)
                self._residency.pin(block, number if number is not None else -1)
                block.forget_uses()  # The recomputation repeats the uses of the forward.
            else:
                context.advance(block)
                if not context.in_scope:  # Outside of any scope, unknown code runs before and after the call.
                    self.async_step.shadows.interrupt()
                    params = (param for index in block.chunks for param in context.chunks[index].params)
                    self.async_step.shadows.invalidate(params)
            self._residency.require(block, recomputing)
            block.follow()
            self._register_device_params(block)
        block.depth += 1
        if not recomputing and context.in_scope:
            self._residency.prefetch()

    def exit(self, block: Block) -> None:
        """Register the host parameters again; from now on the chunks may be released."""
        block.depth -= 1
        if block.depth:
            return
        del self._residency.running[block]
        block.register_hosts()
        block.end_uses()
        for index in block.chunks:
            self.context.chunks[index].write_back()
        if in_backward():
            if self.context.is_in_backward_of(block):
                self._keep_registered(block)
            return
        if not self.context.in_scope:
            self._residency.release(set(block.chunks) - self._residency.pinned())
        elif self.swap is not None:
            # Upload into the block's buffers before the compute stream waits for the swap-out of its activations.
            self._residency.prefetch()

    # --- backward ---------------------------------------------------------------------------------------------------

    def before_backward(self, call: BlockCall) -> None:
        """Prepare the backward of a call, as the gradient of its output has arrived, see [Note: Calls].

        Raises:
            RuntimeError: Backward builds a graph (create_graph=True); no hook would announce that graph's backward.
        """
        block, context = call.block, self.context
        if torch.is_grad_enabled() and (block.chunks or block.swap_bytes):
            raise RuntimeError(
                f"Backward with create_graph=True runs through {block.name!r}, which is streamed: its second "
                "derivative would find no weights. Make its chunks resident (`num_persistent_chunks`), and swap no "
                "activations."
            )
        self._begin_backward()
        self._register_hosts()
        self._residency.unpin(call.end)
        context.call = call
        self._residency.pin(block, call.number)
        self._residency.require(block, in_backward=True)
        awaited = context.advance_backward(call)
        if self.swap is not None:
            if awaited:
                # In the order of need: weights of the next call, its activations, then weights of later calls.
                self._residency.prefetch(but=context.timeline.later(context.position))
            self.swap.before_backward(call.number, context.call_after(call), call.end)
        block.follow()
        self._keep_registered(block)
        if awaited:
            self._residency.prefetch()

    def take_gradient(self, param: OffloadedParam) -> None:
        """Take the gradient that autograd has accumulated into a device parameter."""
        self._begin_backward()
        self.grads.take(param)

    def before_direct_gradient(self, param: OffloadedParam) -> None:
        """Prepare for a gradient that autograd accumulates into the host parameter, see [Note: Direct use]."""
        self._begin_backward()
        self.grads.before_direct_gradient(param)

    def after_chunks(self, issue: Callable[[], None]) -> None:
        """Call `issue` when this backward has sent the gradients of all chunks, before it ends; now without chunks."""
        reduction = self.grads.reduction
        if reduction is None or not reduction.is_sending:
            issue()
            return
        self._begin_backward()  # The callback at its end, which sends what is left, runs before a later one of DDP.
        reduction.defer(issue)

    def _begin_backward(self) -> None:
        """Begin a backward at its first hook, whichever hook that is."""
        if self.context.phase is StepPhase.BACKWARD:
            return
        self.async_step.begin_backward()
        torch.autograd.Variable._execution_engine.queue_callback(_EndOfBackward(self))
        self.direct.begin()  # The user's own recomputations may read, too.
        self.context.begin_backward()

    def _keep_registered(self, block: Block) -> None:
        """Register the device parameters of a block that recomputes a part of itself in its backward, [Note: Calls]."""
        if block.depth or not block.recomputes_itself:
            return
        block.forget_uses()  # The recomputation repeats the uses of the forward.
        block.register_device_params(again=True)
        self._registered = block

    def _register_hosts(self) -> None:
        """Register the host parameters of the block whose backward has ended."""
        block, self._registered = self._registered, None
        if block is not None:
            block.register_hosts()
            block.end_uses()

    def give_up_backward(self) -> None:
        """Register the host parameters again after an exception in backward; `reset` does the rest."""
        self.direct.end()
        self.context.end_backward()
        self._register_hosts()

    def end_backward(self) -> None:
        """End a backward: download every gradient, and release all chunks that no forward is using."""
        self.direct.end()
        self.context.end_backward()
        self._register_hosts()
        self._residency.pins.clear()
        for block in self.context.blocks:
            block.forget_uses()
        with self.context.device.span("stall"):
            self.grads.finish()
            self.settle()

    # --- at any time ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Release all chunks that no forward is using and wait for uploads, before host weights are written."""
        self._residency.release(self._residency.live - self._residency.pinned())
        if self.swap is not None:
            self.swap.settle()
        self.context.device.settle()

    def refresh(self) -> None:
        """Release live chunks, which hold old values after an optimizer step, and fetch those in use again."""
        self.settle()
        self._residency.renew()  # Even if no version has moved: an optimizer may write through `parameter.data`.

    def release_all(self) -> None:
        """Release all chunks between scopes, so that host weights may be written."""
        self._residency.pins.clear()
        self.settle()

    def reset(self) -> None:
        """Register host parameters, release everything and drop pending work, after an exception in a step."""
        self.direct.end()
        for block in self._residency.running:
            block.depth = 0
            block.register_hosts()
        if self._registered is not None:
            self._registered.register_hosts()
            self._registered = None
        self._residency.running.clear()
        self.context.forget()
        try:
            self.grads.start_anew()
            for chunk in self.context.chunks:
                for param in chunk.params:
                    param.drop_gradient()
                    if param.shadow is not None:
                        param.shadow.uses.forget()
            self.release_all()
        finally:  # Even after an error of the device, stop watching weights.
            self.async_step.shadows.forget()

    def _register_device_params(self, block: Block) -> None:
        """Register all device parameters of a block or, after an exception, none."""
        running = self._residency.running
        running[block] = None
        try:
            block.register_device_params()
        except BaseException:
            block.register_hosts()
            del running[block]
            raise


class _EndOfBackward:
    """A callback for the end of a backward; autograd drops it without a call if the backward has failed."""

    def __init__(self, executor: Executor) -> None:
        self._executor: Executor | None = executor

    def __call__(self) -> None:
        executor, self._executor = self._executor, None
        assert executor is not None
        executor.end_backward()

    def __del__(self) -> None:
        if self._executor is not None:
            self._executor.give_up_backward()
