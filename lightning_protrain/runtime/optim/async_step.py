"""Steps the weights of offloaded chunks on the host, behind backward or forward.

[Note: Overlap]
*Backward*: a chunk is stepped as soon as its last gradient is on the host, while backward continues. *Forward*: steps
start when all gradients are known, because clipping needs their norm, which is computed as they arrive. They run behind
the next forward, starting with the chunk that it needs first. In both modes a block waits only for the steps of its own
chunks; any other access to a weight waits for all steps, see [Note: Guard]. Nothing is stale: every forward computes
with the weights after the step. Nothing is approximate: the step of a parameter reads only its own gradient and state,
so another order gives the same bits. The step of a chunk that ranks share has ended when every owner has stepped its
part, see [Note: Step sync].

[Note: Partial steps]
If some weights have been stepped and others never will be (backward or the optimizer raises after the first steps), the
weights belong to no step. They are *partially stepped*: they can be neither saved nor trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from lightning_protrain.runtime.optim.host_step import Given, HostStep, ParamUpdate
from lightning_protrain.runtime.optim.step import (
    NormScratch,
    PartGroups,
    bound_norm,
    clip_values,
    has_step_hooks,
    take_norms,
)
from lightning_protrain.runtime.param import OffloadedParam
from lightning_protrain.runtime.shadow import stored
from lightning_protrain.runtime.shadow_cache import ShadowCache


class Overlap(StrEnum):
    """The computation that the host's optimizer step runs behind, see [Note: Overlap]."""

    OFF = "off"
    BACKWARD = "backward"
    FORWARD = "forward"


@dataclass
class PendingStep:
    """The state of the micro-batch that ends in an optimizer step.

    Attributes:
        optimizer: Optimizer that steps.
        groups: Returns the optimizer's groups, restricted to given parameters.
        overlap: `BACKWARD` or `FORWARD`.
        clip_value: Bound to which steps behind backward clip gradient values; None: no clipping.
        take_norms: Whether norms are computed as gradients arrive.
        norms: Norms computed so far, by the identity of the parameter.
        arrivals: Jobs that compute norms.
        coefficient: Clipping factor that steps apply as they read gradients; None: no factor.
        step: Makes a step of given parameters; None: none has been submitted.
        stepped: Indices of chunks whose steps have been submitted.
        parameters: Identities of the parameters in submitted steps.
        left: Indices of chunks that this rank no longer reads, so their owners may step them, see [Note: Step sync].
        lends: Whether gradients may lie in the memory of shadow copies, see [Note: Gradients in shadows].
        late_bound: Bound to which steps clip the values of gradients in shadow copies; None: no clipping.
    """

    optimizer: Optimizer
    groups: PartGroups
    overlap: Overlap
    clip_value: float | None
    take_norms: bool
    norms: dict[int, Tensor] = field(default_factory=dict)
    arrivals: list[Job] = field(default_factory=list)
    coefficient: Tensor | None = None
    step: Callable[[Given, Clip], None] | None = None
    stepped: set[int] = field(default_factory=set)
    parameters: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    lends: bool = False
    late_bound: float | None = None

    @property
    def has_begun(self) -> bool:
        """True if some weights may already have been stepped."""
        return bool(self.stepped or self.left)


@dataclass(eq=False)
class ChunkStep:
    """The pending step of one chunk: its job and the parameters that it steps."""

    job: Job
    params: tuple[OffloadedParam, ...]


def param_updates_of(
    groups: Iterable[dict[str, Any]], params: Sequence[OffloadedParam]
) -> Iterator[tuple[dict[str, Any], list[ParamUpdate]]]:
    """Yield each group with the updates of its parameters that have gradients."""
    shadows = {id(param.host): param.shadow.values if param.shadow is not None else None for param in params}
    for group in groups:
        pairs = [(parameter, parameter.grad) for parameter in group["params"]]
        yield group, [ParamUpdate(p, stored(gradient), shadows[id(p)]) for p, gradient in pairs if gradient is not None]


def have_user_hooks(chunks: Iterable[Chunk]) -> bool:
    """Return whether the user has hooks on the gradient of some parameter."""
    with below_guard():  # Otherwise asking would wait for every pending step.
        return any(param.has_user_hooks for chunk in chunks for param in chunk.params)


class AsyncStep:
    """The optimizer step of offloaded chunks, behind backward or forward, see [Note: Overlap].

    Args:
        chunks: Offloaded chunks in execution order.
        device: Device whose worker runs the steps.
        communicator: Reaches the ranks that share chunks; None: a single rank.
        gradient_buffers: Number of chunks whose gradients have host memory at the same time, see [Note: Gradients in
            passing]; 0: gradients of all chunks have.

    Attributes:
        partially_stepped: Reason why the weights belong to no step, see [Note: Partial steps]; None: all are whole.
        guard: Watches weights whose step is pending.
        shadows: Cache of shadow copies, some of which steps renew.
        publishing: Announces steps on the main thread to other ranks.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        device: Device,
        communicator: Collectives | None = None,
        gradient_buffers: int = 0,
    ) -> None:
        self.partially_stepped: str | None = None
        self.gradient_buffers = gradient_buffers
        self._chunks = tuple(chunks)
        self._device = device
        self.guard = AccessGuard(self._touched)
        self.shadows = ShadowCache(chunks, self.guard)
        self._host_step = HostStep(device.worker.threads, fuse=device.torch_device.type != "cpu")
        self._pending: dict[int, ChunkStep] = {}
        self._aliased: set[int] = set()
        self._armed: PendingStep | None = None
        self._norm_scratch = NormScratch()
        self._num_steps = 0
        self._num_backwards = 0  # Since `arm`.
        self._in_step = False
        self._several_backwards = False
        self._sharing = communicator if any(chunk.share is not None for chunk in chunks) else None
        self._step_sync = step_sync_of(chunks, self._sharing) if self._sharing is not None else None
        self.publishing = StepPublisher(chunks, self._step_sync, self.shadows, self.guard, self._pending)
        trained = [index for index, chunk in enumerate(chunks) if chunk.plan.trainable]
        self._steppable = {i for i in trained if all(can_be_watched(param.host) for param in chunks[i].params)}
        self._steps_rest = len(self._steppable) < len(trained)
        has_copies = communicator is None and any(chunk.plan.streamed_dtype for chunk in chunks)
        self._gives_up = has_copies or gradient_buffers > 0

    # --- one step -----------------------------------------------------------------------------------------------------

    def arm(
        self,
        optimizer: Optimizer,
        overlap: Overlap,
        clip_value: float | None = None,
        take_norms: bool = False,
        lends: bool = False,
    ) -> None:
        """Prepare for the forward and backward that end in a step of `optimizer`.

        The first step of a run is not overlapped with backward: the first backward may refuse weights that cannot be
        streamed exactly, and must do so before any weight has changed. The first step is overlapped with forward if
        steps give up gradients. A resumed run with passing gradients overlaps its first step with backward, because it
        can return to its checkpoint.

        Args:
            optimizer: Optimizer that steps each of its parameters on its own.
            overlap: Computation that the step runs behind.
            clip_value: Largest absolute gradient value, for steps behind backward; None: no clipping.
            take_norms: Whether norms of gradients are needed, and no code changes gradients after they have arrived.
            lends: Whether no code reads gradients, so that they may lie in the memory of shadow copies.

        Raises:
            RuntimeError: The weights are partially stepped, or a hook delays steps, see [Note: Gradients in passing].
        """
        self.refuse_partially_stepped()
        self._armed = None
        self._num_steps += 1
        lends = lends and self._gives_up
        passes = lends and overlap is Overlap.BACKWARD and self.gradient_buffers > 0
        first = self._num_steps == 1 and not (passes and self._has_states(optimizer))
        if passes and (has_step_hooks(optimizer) or have_user_hooks(self._chunks)):
            raise self.refusal_to_wait("A hook on a gradient or on the optimizer's step was registered in fit.")
        if overlap is not Overlap.OFF and (lends or not first) and self._chunks and not has_step_hooks(optimizer):
            if overlap is Overlap.BACKWARD and (first or self._several_backwards or have_user_hooks(self._chunks)):
                # A hook may read any weight, so none may be stepped before the hooks have run.
                overlap = Overlap.FORWARD
            take_norms = take_norms and not self._several_backwards
            self._armed = PendingStep(optimizer, PartGroups(optimizer), overlap, clip_value, take_norms, lends=lends)
        if self._step_sync is not None:
            self._step_sync.begin(self._armed is not None and self._armed.overlap is Overlap.BACKWARD)
        self._num_backwards = 0
        self._in_step = True

    def begin_backward(self) -> None:
        """Begin a backward: wait for all pending steps, as it may need any weight.

        Raises:
            RuntimeError: This is a second backward, and chunks were stepped in the first; or a rank is missing.
        """
        armed = self._armed
        self._num_backwards += 1
        self._several_backwards |= self._in_step and self._num_backwards > 1
        if armed is not None and self._num_backwards > 1:
            if self.gradient_buffers and armed.lends:
                raise self.refusal_to_wait("A second backward begins in the same step.")
            if armed.has_begun:
                raise RuntimeError(f"A second backward begins after chunks were stepped in the first. {_LESS_OVERLAP}")
            armed.take_norms = False
        elif self._step_sync is not None and armed is not None and armed.overlap is Overlap.BACKWARD:
            armed.overlap = Overlap.BACKWARD if self._step_sync.all_behind_backward() else Overlap.FORWARD
        self.finish_all()

    @property
    def gives_up(self) -> bool:
        """True if the step that follows this backward gives up its gradients."""
        return self._armed is not None and self._armed.lends

    @property
    def takes_landings(self) -> bool:
        """True if this backward hands any gradients to `arrived`."""
        armed = self._armed
        return armed is not None and (armed.overlap is Overlap.BACKWARD or armed.take_norms)

    def lends_copy(self, index: int, param: OffloadedParam) -> bool:
        """Return whether a gradient may overwrite the shadow copy of its weight, which a step will then renew."""
        armed = self._armed
        return armed is not None and armed.lends and index in self._steppable and armed.groups.has(param.host)

    def wants(self, index: int) -> bool:
        """Return whether the gradients of a chunk should be handed to `arrived` when all are being downloaded."""
        armed = self._armed
        if armed is None or not self.takes_landings or index not in self._steppable:
            return False
        return self._step_sync is None or armed.overlap is Overlap.FORWARD or index in armed.left

    def release_to_owner(self, index: int) -> bool:
        """Leave a chunk before its gradients are sent: if steps run behind backward, its owners may step it now.

        Returns:
            Whether the chunk is stepped behind backward.
        """
        armed = self._armed
        if self._step_sync is None or armed is None or armed.overlap is not Overlap.BACKWARD:
            return False
        if index in self._steppable and index not in armed.left:
            armed.left.add(index)
            self._hand_on(self._params_of(index, armed))
        return index in armed.left

    def arrived(self, index: int, wait: Callable[[], None]) -> None:
        """Take over the gradients of a chunk, when all are being downloaded and nothing reads its weights any more.

        Args:
            index: Index of the chunk.
            wait: Waits for the downloads and adds gradients up; called on the worker.
        """
        armed = self._armed
        assert armed is not None
        if armed.overlap is Overlap.BACKWARD:
            self._submit(index, armed, wait)
        else:
            parameters = [param.host for param in self._chunks[index].params]
            work = partial(take_norms, parameters, armed.norms, wait, self._norm_scratch)
            armed.arrivals.append(self._device.worker.submit(work))

    def end_backward(self) -> None:
        """Wait for norms of gradients, and order pending steps as the next forward needs them."""
        if self._armed is not None:
            while self._armed.arrivals:
                self._armed.arrivals.pop(0).result()
        if self._step_sync is None:
            # Backward submitted the steps from the last chunk to the first, but forward needs the first chunk first.
            # The device may be far behind this thread. Until it has sent the last gradient, keep the order of arrival.
            jobs = [self._pending[index].job for index in sorted(self._pending)]
            self._device.worker.reorder(jobs, self._device.after_downloads())

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> None:
        """Clip the norm of all gradients together, bit for bit as `torch.nn.utils.clip_grad_norm_` does."""
        armed = self._armed
        known = armed.norms if armed is not None and armed.take_norms else None
        later = {id(param.host) for index in self._steppable for param in self._chunks[index].params}
        shared = {id(param.host) for chunk in self._chunks for param in chunk.params} if self._sharing else frozenset()
        coefficient = bound_norm(list(parameters), max_norm, known, later, shared, self._sharing)
        if armed is not None:
            armed.coefficient = coefficient

    def clip_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clip gradient values as `clip_grad_value_` does, except those that steps behind backward have clipped."""
        armed = self._armed
        stepped = armed.parameters if armed is not None else frozenset()
        if armed is not None and armed.lends:
            armed.late_bound = clip_value
        # Weights of chunks that this rank has left are guarded, whether or not this rank steps them.
        with below_guard() if self._step_sync is not None else nullcontext():
            clip_values([parameter for parameter in parameters if id(parameter) not in stepped], clip_value)

    def launch(self) -> set[int]:
        """Submit the remaining steps after backward and clipping, starting with the chunk that is needed first.

        Returns:
            Identities of the parameters that are stepped here; the caller steps the others.
        """
        armed, step_sync = self._armed, self._step_sync
        self._in_step = False
        if step_sync is not None:
            if armed is None:
                self.finish_all()
            self._device.settle()  # The user's hooks may have called a block.
            step_sync.release_weights()
        if armed is not None:
            for index in sorted(self._steppable - armed.stepped):
                self.finish(index)  # No forward has used the chunk since its previous step.
                self._submit(index, armed, None)
            self._armed = None
        if step_sync is not None and (armed is None or self._steps_rest):
            step_sync.wait_until_left(step_sync.number)  # The caller steps the rest on the main thread.
        self.publishing.begin()
        self.shadows.invalidate_stepped()
        return armed.parameters if armed is not None else set()

    # --- its end ------------------------------------------------------------------------------------------------------

    def job(self, index: int) -> Job | None:
        """Return the pending step of a chunk; None: no step is pending."""
        update = self._pending.get(index)
        return update.job if update is not None else None

    def finish(self, index: int) -> None:
        """Wait for the step of one chunk.

        Raises:
            BaseException: The optimizer raised; or a rank that owns a part of the chunk is missing.
        """
        update = self._pending.get(index)
        with self._device.span("stall"):  # The device may run out of work meanwhile.
            error = update.job.exception() if update is not None else None
        if update is None or self._pending.pop(index, None) is None:
            return  # No step was pending, or another thread has waited for it too.
        self.guard.unwatch(param.host for param in update.params)
        self._chunks[index].note_step()
        if error is not None:
            self._note_failure(error, update)
            raise error

    def wait_for_step(self) -> bool:
        """Wait for the oldest pending step that has not ended; return False if there is none.

        The step stays pending, so that its weights stay guarded until backward ends.

        Raises:
            BaseException: The optimizer raised.
        """
        failed = next((index for index, update in self._pending.items() if not update.job.done()), None)
        if failed is None:
            return False
        with self._device.span("stall"):
            error = self._pending[failed].job.exception()
        if error is not None:
            self.finish(failed)
        return True

    def finish_aliased(self) -> None:
        """Wait for steps of weights whose memory has another name, as no guard sees reads through it.

        Raises:
            BaseException: The optimizer raised.
        """
        while self._aliased:
            self.finish(self._aliased.pop())

    def finish_all(self) -> None:
        """Wait for every pending step.

        Raises:
            BaseException: The optimizer raised.
        """
        for index in list(self._pending):
            self.finish(index)

    def abandon(self) -> None:
        """Wait for running steps after an exception, and note whether weights are partially stepped; raise nothing."""
        armed, self._armed = self._armed, None
        if armed is not None:
            for arrival in armed.arrivals:
                arrival.exception()
            if armed.has_begun:
                self.partially_stepped = (
                    self.partially_stepped or "an exception came when the first chunks of a step had been stepped"
                )
                if self._step_sync is not None:
                    self._step_sync.give_up()
            for index in armed.left:
                self.guard.unwatch(param.host for param in self._chunks[index].params)
        self.publishing.end()
        while self._pending:
            _, update = self._pending.popitem()
            error = update.job.exception()
            self.guard.unwatch(param.host for param in update.params)
            if error is not None:
                self._note_failure(error, update)
        if self._step_sync is not None and self._step_sync.failure is not None:
            self.partially_stepped = self.partially_stepped or _MISSING

    @contextmanager
    def noting_exhaustion(self) -> Iterator[None]:
        """Mark weights as partially stepped if memory runs out in this context; the optimizer steps inside it."""
        try:
            yield
        except torch.OutOfMemoryError:
            self.partially_stepped = self.partially_stepped or "memory ran out in the step of the optimizer"
            raise

    def agree_on_overflow(self, found: dict[torch.device, Tensor]) -> None:
        """Report a non-finite gradient of one rank to all ranks that share weights; every rank calls it.

        Args:
            found: Flag of this rank by device, shape (1,), more than 0 if a gradient is not finite; updated in place.
        """
        if self._sharing is not None:
            here = sum((flag.cpu() for flag in found.values()), torch.zeros(1))
            anywhere = self._sharing.sum_of_node(here)
            found.setdefault(torch.device("cpu"), torch.zeros(1))
            for flag in found.values():
                flag.copy_(anywhere[0])

    def refusal_to_wait(self, reason: str) -> RuntimeError:
        """Return the error for gradients that cannot pass, see [Note: Gradients in passing]."""
        return RuntimeError(
            f"{reason} So all gradients wait for the end of backward, but the plan has host memory for those of a few "
            'chunks alone. Set overlap_optimizer="forward", which plans memory for all gradients.'
        )

    def close(self) -> None:
        """Wait for running steps and end the threads."""
        self.abandon()
        self._host_step.close()
        if self._step_sync is not None:
            self._step_sync.close()
        # Each guard refers to its owner. Without this, the memory of the runtime would wait for Python's collector.
        for part in (self.publishing, self.shadows, self.guard):
            part.close()

    def refuse_partially_stepped(self) -> None:
        """Refuse to save or train weights that belong to no step, see [Note: Partial steps].

        Raises:
            RuntimeError: The weights are partially stepped.
        """
        half_done = self._armed is not None and self._armed.has_begun and "the first chunks of a step have been stepped"
        why = self.partially_stepped or half_done
        if why:
            raise RuntimeError(
                f"The weights are partially stepped: {why}, so some are from before that step and some from after it. "
                f"They can be neither saved nor trained on: resume from the last checkpoint. {_LESS_OVERLAP}"
            )

    def _touched(self, hosts: Sequence[Tensor]) -> None:
        if self._armed is not None and self._armed.has_begun:
            raise RuntimeError(
                f"A weight is read in backward after it was stepped in the same backward. {_LESS_OVERLAP}"
            )
        self.publishing.before_wait()
        self.finish_all()
        self.shadows.touched(hosts)

    def _note_failure(self, error: BaseException, update: ChunkStep) -> None:
        if self._step_sync is not None and error is self._step_sync.failure:
            self.partially_stepped = self.partially_stepped or _MISSING
            return
        name = update.params[0].fqn
        self.partially_stepped = self.partially_stepped or f"the optimizer raised {error!r} for {name!r}"
        error.add_note(f"It was raised by the optimizer, in the step of {name!r} on the host.")

    def _has_states(self, optimizer: Optimizer) -> bool:
        return any(param.host in optimizer.state for index in self._steppable for param in self._chunks[index].params)

    def _params_of(self, index: int, armed: PendingStep) -> tuple[OffloadedParam, ...]:
        return tuple(param for param in self._chunks[index].params if armed.groups.has(param.host))

    def _hand_on(self, params: Sequence[OffloadedParam]) -> None:
        """Guard parameters that the worker or another rank may write to from now on."""
        for param in params:
            if not param.owned and param.host.requires_grad:
                param.step_elsewhere()
        self.guard.watch(param.host for param in params)
        self.shadows.watch(params)

    def _submit(self, index: int, armed: PendingStep, wait: Callable[[], None] | None) -> None:
        params, step_sync = self._params_of(index, armed), self._step_sync
        with below_guard():
            if any(is_aliased(param.host) for param in params):  # Asked before the worker makes views, which count.
                self._aliased.add(index)
        number = step_sync.number if step_sync is not None else 0
        groups = armed.groups.of([param.host for param in params])
        clip = Clip(armed.clip_value if wait is not None else armed.late_bound, armed.coefficient)
        step = armed.step = armed.step or self._host_step.of(armed.optimizer)
        for param in params if wait is None else ():
            param.begin_step()

        def work() -> None:
            with below_guard(), torch.no_grad():
                if wait is not None:
                    wait()
                    for param in params:
                        param.begin_step()
                elif step_sync is not None:
                    step_sync.wait_until_left(number)
                with self._device.span("host", "optimizer step"):
                    step(param_updates_of(groups, params), clip)
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
