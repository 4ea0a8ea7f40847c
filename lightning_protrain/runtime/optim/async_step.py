"""Steps the weights of offloaded chunks on the host, behind backward or forward.

[Note: Overlap]
*Backward*: a chunk is stepped as soon as its last gradient is on the host, while backward runs on. *Forward*: the step
starts when all gradients are known (clipping needs their norm, which is taken as they land) and runs behind the next
forward, the first-needed chunk first. In both a chunk waits for its own step only, when it is needed next; whoever else
looks at a weight waits for all of them, see [Note: Guard]. Nothing is stale: every forward computes with the weights
after the step. Nothing is approximate: the step of a parameter reads its own gradient and state only, so that doing the
same in another order gives the same bits. Where ranks share a chunk, its step ends with the last one's, [Note: Step
sync].

[Note: Partial steps]
When some weights have been stepped and others never will be (backward raises behind its first steps, or the optimizer
does), the weights belong to no step. They are *partially stepped*: its state can be neither saved nor trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_protrain.device.device import Device
from lightning_protrain.device.host import Job
from lightning_protrain.runtime.access_guard import AccessGuard, below_guard, can_be_watched, is_aliased
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.comm.collectives import Collectives
from lightning_protrain.runtime.comm.step_sync import StepPublisher, step_sync_of
from lightning_protrain.runtime.optim.fused import Clip
from lightning_protrain.runtime.optim.host_step import HostStep, ParamUpdate, StepSchedule
from lightning_protrain.runtime.optim.step import (
    NormScratch,
    PartGroups,
    bound_norm,
    clip_values,
    has_step_hooks,
    take_norms,
    tell_overflow,
)
from lightning_protrain.runtime.param import OffloadedParam
from lightning_protrain.runtime.shadow import stored
from lightning_protrain.runtime.shadow_cache import ShadowCache


class Overlap(StrEnum):
    """Behind what the host's optimizer step runs, see [Note: Overlap]."""

    OFF = "off"
    BACKWARD = "backward"
    FORWARD = "forward"


@dataclass
class PendingStep:
    """The micro-batch that ends in an optimizer step, and the parts of the step so far.

    Attributes:
        optimizer: Optimizer that steps.
        groups: Returns groups of some of its parameters.
        overlap: `BACKWARD` or `FORWARD`.
        clip_value: Bound of gradient values, applied in the steps that run behind backward.
        take_norms: True if norms are taken as gradients land.
        norms: Norms that have been taken, by the identity of the parameter.
        landings: Jobs that take norms.
        coefficient: Factor of gradients that steps still have to apply, in the pass that reads the gradients.
        steps: The steps that have been submitted; None if there is none yet.
        stepped: Chunks whose steps have been submitted.
        parameters: Identities of the parameters that these step.
        left: Chunks that other ranks may be stepping, see [Note: Step sync].
        lends: True if gradients may lie in the memory of shadow copies, see [Note: Gradients in shadows].
        late_bound: Bound of gradient values that steps still have to apply to gradients in that memory.
    """

    optimizer: Optimizer
    groups: PartGroups
    overlap: Overlap
    clip_value: float | None
    take_norms: bool
    norms: dict[int, Tensor] = field(default_factory=dict)
    landings: list[Job] = field(default_factory=list)
    coefficient: Tensor | None = None
    steps: StepSchedule | None = None
    stepped: set[int] = field(default_factory=set)
    parameters: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    lends: bool = False
    late_bound: float | None = None

    @property
    def has_begun(self) -> bool:
        """True if some weights may have been stepped."""
        return bool(self.stepped or self.left)


@dataclass(eq=False)
class ChunkStep:
    """The pending step of one chunk: the job that does it, and what it steps."""

    job: Job
    params: tuple[OffloadedParam, ...]


def param_updates_of(
    groups: Iterable[dict[str, Any]], params: Sequence[OffloadedParam]
) -> Iterator[tuple[dict[str, Any], list[ParamUpdate]]]:
    """Yield the parameters of these groups that have gradients, with gradient and shadow copy."""
    copies = {id(param.host): param.shadow.values if param.shadow is not None else None for param in params}
    for group in groups:
        given = [(parameter, parameter.grad) for parameter in group["params"]]
        yield group, [ParamUpdate(p, stored(gradient), copies[id(p)]) for p, gradient in given if gradient is not None]


def have_user_hooks(chunks: Iterable[Chunk]) -> bool:
    """Return True if the user has hooks on the gradient of a parameter."""
    with below_guard():  # or to ask would wait for every pending step
        return any(param.has_user_hooks for chunk in chunks for param in chunk.params)


class AsyncStep:
    """Steps offloaded chunks behind backward or forward, see [Note: Overlap].

    Args:
        chunks: The offloaded chunks in execution order.
        device: Its worker does the work.
        communicator: Reaches the ranks that share chunks; None: there is one rank.

    Attributes:
        partially_stepped: Why the weights belong to no step, see [Note: Partial steps]; None as long as they do.
        copies: Trusts copies that steps have made.
        publishing: Tells other ranks of steps, see [Note: Publishing].
    """

    def __init__(self, chunks: Sequence[Chunk], device: Device, communicator: Collectives | None = None) -> None:
        self.partially_stepped: str | None = None
        self._chunks = tuple(chunks)
        self._device = device
        self._guard = AccessGuard(self._touched)
        self.copies = ShadowCache(chunks, self._guard)
        self._host_step = HostStep(device.worker.threads, fuse=device.torch_device.type != "cpu")
        self._pending: dict[int, ChunkStep] = {}
        self._aliased: set[int] = set()
        self._armed: PendingStep | None = None
        self._norm_scratch = NormScratch()
        self._num_steps = 0
        self._num_backwards = 0  # since `arm`
        self._in_step = False
        self._several_backwards = False
        self._sharing = communicator if any(chunk.share is not None for chunk in chunks) else None
        self._step_sync = step_sync_of(chunks, self._sharing) if self._sharing is not None else None
        self.publishing = StepPublisher(chunks, self._step_sync, self.copies, self._guard, self._pending)
        trained = [index for index, chunk in enumerate(chunks) if chunk.plan.trainable]
        self._steppable = {i for i in trained if all(can_be_watched(param.host) for param in chunks[i].params)}
        self._steps_rest = len(self._steppable) < len(trained)
        self._has_copies = communicator is None and any(chunk.plan.streamed_dtype for chunk in chunks)

    # --- one step -----------------------------------------------------------------------------------------------------

    def arm(
        self,
        optimizer: Optimizer,
        overlap: Overlap,
        clip_value: float | None = None,
        take_norms: bool = False,
        lends: bool = False,
    ) -> None:
        """Before the forward and backward that end in a step of `optimizer`.

        The first step of a run is not overlapped, as its backward refuses what cannot be streamed exactly, before any
        weight has changed; only where gradients lie in the memory of copies, it goes chunk by chunk behind forward.

        Args:
            optimizer: One that steps each of its parameters on its own.
            overlap: When to step.
            clip_value: Bound of gradient values, for steps behind backward.
            take_norms: Whether norms of gradients are wanted, and nobody changes gradients once they have landed.
            lends: Whether nobody looks at gradients, so that they may lie in the memory of copies.

        Raises:
            RuntimeError: The weights are partially stepped.
        """
        self.refuse_partially_stepped()
        self._armed = None
        self._num_steps += 1
        first, lends = self._num_steps == 1, lends and self._has_copies
        if overlap is not Overlap.OFF and (lends or not first) and self._chunks and not has_step_hooks(optimizer):
            if overlap is Overlap.BACKWARD and (first or self._several_backwards or have_user_hooks(self._chunks)):
                # A hook may read any weight, and must not find it stepped already.
                overlap = Overlap.FORWARD
            take_norms = take_norms and not self._several_backwards
            self._armed = PendingStep(optimizer, PartGroups(optimizer), overlap, clip_value, take_norms, lends=lends)
        if self._step_sync is not None:
            self._step_sync.begin(self._armed is not None and self._armed.overlap is Overlap.BACKWARD)
        self._num_backwards = 0
        self._in_step = True

    def begin_backward(self) -> None:
        """Every step before has ended: backward may need any weight.

        Raises:
            RuntimeError: It is a second backward, and chunks have been stepped in the first; or a rank is missing.
        """
        armed = self._armed
        self._num_backwards += 1
        self._several_backwards |= self._in_step and self._num_backwards > 1
        if armed is not None and self._num_backwards > 1:
            if armed.has_begun:
                raise RuntimeError(f"A second backward begins after chunks were stepped in the first. {_LESS_OVERLAP}")
            armed.take_norms = False
        elif self._step_sync is not None and armed is not None and armed.overlap is Overlap.BACKWARD:
            armed.overlap = Overlap.BACKWARD if self._step_sync.all_behind_backward() else Overlap.FORWARD
        self.finish_all()

    @property
    def takes_landings(self) -> bool:
        """True if `landed` may get gradients at all in this backward."""
        armed = self._armed
        return armed is not None and (armed.overlap is Overlap.BACKWARD or armed.take_norms)

    def lends_copy(self, index: int, param: OffloadedParam) -> bool:
        """Return True if a gradient may land in the memory of a shadow copy, which a step will write again."""
        armed = self._armed
        return armed is not None and armed.lends and index in self._steppable and armed.groups.has(param.host)

    def wants(self, index: int) -> bool:
        """Return True if the gradients of a chunk that are on their way should be given to `landed`."""
        armed = self._armed
        if armed is None or not self.takes_landings or index not in self._steppable:
            return False
        return self._step_sync is None or armed.overlap is Overlap.FORWARD or index in armed.left

    def leave(self, index: int) -> bool:
        """Before the gradients of a chunk are sent: if it is stepped behind backward, then from now on, by its owners.

        Returns:
            Whether it is.
        """
        armed = self._armed
        if self._step_sync is None or armed is None or armed.overlap is not Overlap.BACKWARD:
            return False
        if index in self._steppable and index not in armed.left:
            armed.left.add(index)
            self._hand_on(self._params_of(index, armed))
        return index in armed.left

    def landed(self, index: int, land: Callable[[], None]) -> None:
        """Take the gradients of a chunk when all are on their way and nothing reads its weights any more.

        Args:
            index: Index of the chunk.
            land: Waits for the gradients and sums them; called on the worker.
        """
        armed = self._armed
        assert armed is not None
        if armed.overlap is Overlap.BACKWARD:
            self._submit(index, armed, land)
        else:
            parameters = [param.host for param in self._chunks[index].params]
            work = partial(take_norms, parameters, armed.norms, land, self._norm_scratch)
            armed.landings.append(self._device.worker.submit(work))

    def end_backward(self) -> None:
        """Wait for gradients that were taken without a step; what is still to be stepped is, as forward needs it."""
        if self._armed is not None:
            while self._armed.landings:
                self._armed.landings.pop(0).result()
        if self._step_sync is None:
            # They were given as backward left them, the one that forward needs first came last.
            self._device.worker.reorder([self._pending[index].job for index in sorted(self._pending)])

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> None:
        """Bounds the norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` does, bit for bit."""
        armed = self._armed
        known = armed.norms if armed is not None and armed.take_norms else None
        later = {id(param.host) for index in self._steppable for param in self._chunks[index].params}
        shared = {id(param.host) for chunk in self._chunks for param in chunk.params} if self._sharing else frozenset()
        coefficient = bound_norm(list(parameters), max_norm, known, later, shared, self._sharing)
        if armed is not None:
            armed.coefficient = coefficient

    def clip_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Bounds the values of gradients, as `torch.nn.utils.clip_grad_value_` does; steps behind backward have."""
        armed = self._armed
        stepped = armed.parameters if armed is not None else frozenset()
        if armed is not None and armed.lends:
            armed.late_bound = clip_value
        # Weights that this rank has left are watched, stepped here or not.
        with below_guard() if self._step_sync is not None else nullcontext():
            clip_values([each for each in parameters if id(each) not in stepped], clip_value)

    def launch(self) -> set[int]:
        """After backward and clipping: submits the steps of all chunks that are left, the first-needed first.

        Returns:
            Identities of the parameters that are stepped here; the others are left to the caller.
        """
        armed, step_sync = self._armed, self._step_sync
        self._in_step = False
        if step_sync is not None:
            if armed is None:
                self.finish_all()
            self._device.settle()  # The user's hooks may have called a block.
            step_sync.leave()
        if armed is not None:
            for index in sorted(self._steppable - armed.stepped):
                self.finish(index)  # No forward has needed it since the step before.
                self._submit(index, armed, None)
            self._armed = None
        if step_sync is not None and (armed is None or self._steps_rest):
            step_sync.wait_until_left(step_sync.number)  # The caller steps the rest at once.
        self.publishing.begin()
        self.copies.invalidate_stepped()
        return armed.parameters if armed is not None else set()

    # --- its end ------------------------------------------------------------------------------------------------------

    def job(self, index: int) -> Job | None:
        """Return the pending step of a chunk; None if there is none."""
        update = self._pending.get(index)
        return update.job if update is not None else None

    def finish(self, index: int) -> None:
        """Wait for the step of one chunk.

        Raises:
            BaseException: The optimizer's error, or that a rank that makes a part of the step is missing.
        """
        update = self._pending.get(index)
        error = update.job.exception() if update is not None else None
        if update is None or self._pending.pop(index, None) is None:
            return  # There is none, or another thread has waited for it, too.
        self._guard.leave(param.host for param in update.params)
        self._chunks[index].note_step()
        if error is not None:
            self._note_failure(error, update)
            raise error

    def finish_aliased(self) -> None:
        """Wait for steps of weights whose memory is held under another name: nobody is told when that is read.

        Raises:
            BaseException: What the optimizer raised.
        """
        while self._aliased:
            self.finish(self._aliased.pop())

    def finish_all(self) -> None:
        """Wait for every step.

        Raises:
            BaseException: The optimizer's error.
        """
        for index in list(self._pending):
            self.finish(index)

    def abandon(self) -> None:
        """After an exception: waits for what runs, raises nothing, notes whether weights are partially stepped."""
        armed, self._armed = self._armed, None
        if armed is not None:
            for landing in armed.landings:
                landing.exception()
            if armed.has_begun:
                self.partially_stepped = (
                    self.partially_stepped or "an exception came when the first chunks of a step had been stepped"
                )
                if self._step_sync is not None:
                    self._step_sync.give_up()
            for index in armed.left:
                self._guard.leave(param.host for param in self._chunks[index].params)
        self.publishing.end()
        while self._pending:
            _, update = self._pending.popitem()
            error = update.job.exception()
            self._guard.leave(param.host for param in update.params)
            if error is not None:
                self._note_failure(error, update)
        if self._step_sync is not None and self._step_sync.failure is not None:
            self.partially_stepped = self.partially_stepped or _MISSING

    def agree_on_overflow(self, found: dict[torch.device, Tensor]) -> None:
        """Tell all ranks of a gradient that is not finite on the rank that owns it.

        Args:
            found: This rank's flags by device, more than 0 for such a gradient; changed in place.
        """
        if self._sharing is not None:
            tell_overflow(found, self._sharing)

    def close(self) -> None:
        """Wait for running work and end the threads."""
        self.abandon()
        self._host_step.close()
        if self._step_sync is not None:
            self._step_sync.close()

    def refuse_partially_stepped(self) -> None:
        """Lets nobody save or train weights that belong to no step, see [Note: Partial steps].

        Raises:
            RuntimeError: They do not.
        """
        half_done = self._armed is not None and self._armed.has_begun and "the first chunks of a step have been stepped"
        why = self.partially_stepped or half_done
        if why:
            raise RuntimeError(
                f"The weights are partially stepped: {why}, so some are from before that step and some "
                f"from after it. They can be neither saved nor trained on: resume from the last checkpoint. "
                f"{_LESS_OVERLAP}"
            )

    def _touched(self, hosts: Sequence[Tensor]) -> None:
        if self._armed is not None and self._armed.has_begun:
            raise RuntimeError(f"A weight is read in a backward in which it has been stepped already. {_LESS_OVERLAP}")
        self.publishing.before_wait()
        self.finish_all()
        self.copies.touched(hosts)

    def _note_failure(self, error: BaseException, update: ChunkStep) -> None:
        if self._step_sync is not None and error is self._step_sync.failure:
            self.partially_stepped = self.partially_stepped or _MISSING
            return
        name = update.params[0].fqn
        self.partially_stepped = self.partially_stepped or f"the optimizer raised {error!r} for {name!r}"
        error.add_note(f"It was raised by the optimizer, in the step of {name!r} on the host.")

    def _params_of(self, index: int, armed: PendingStep) -> tuple[OffloadedParam, ...]:
        return tuple(param for param in self._chunks[index].params if armed.groups.has(param.host))

    def _hand_on(self, params: Sequence[OffloadedParam]) -> None:
        """Watch parameters that the worker or another rank may write to from now on."""
        for param in params:
            if not param.owned and param.host.requires_grad:
                param.step_elsewhere()
        self._guard.watch(param.host for param in params)
        self.copies.watch(params)

    def _submit(self, index: int, armed: PendingStep, land: Callable[[], None] | None) -> None:
        params, step_sync = self._params_of(index, armed), self._step_sync
        with below_guard():
            if any(is_aliased(param.host) for param in params):  # Asked before the worker makes views of it.
                self._aliased.add(index)
        number = step_sync.number if step_sync is not None else 0
        groups = armed.groups.of([param.host for param in params])
        clip = Clip(armed.clip_value if land is not None else armed.late_bound, armed.coefficient)
        steps = armed.steps = armed.steps or self._host_step.steps(armed.optimizer)
        # With gradients that are there already, it is prepared together with others, see [Note: Ahead].
        portion = steps.add(lambda: param_updates_of(groups, params), clip) if land is None else None
        for param in params if land is None else ():
            param.begin_step()

        def work() -> None:
            with below_guard(), torch.no_grad():
                if land is not None:
                    land()
                    for param in params:
                        param.begin_step()
                elif step_sync is not None:
                    step_sync.wait_until_left(number)
                steps.finish(portion or steps.add(lambda: param_updates_of(groups, params), clip))
                for param in params:
                    param.end_step()
            if step_sync is not None:
                step_sync.announce([index], number)

        if index not in armed.left:
            self._hand_on(params)
        armed.stepped.add(index)
        armed.parameters.update(id(param.host) for param in params)
        job = self._device.worker.submit(work)
        self._pending[index] = ChunkStep(job if step_sync is None else step_sync.behind(job, index, number), params)


_MISSING = "another rank has not made its part of a step"
_LESS_OVERLAP = 'overlap_optimizer="forward" steps after backward, "off" steps all weights at once.'
