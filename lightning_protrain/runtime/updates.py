"""Optimizer steps of offloaded chunks that run on the host's worker while the device computes.

[Note: Overlap]
*Backward*: a chunk is stepped as soon as its last gradient is on the host, while backward runs on. *Forward*: the step
starts when all gradients are known (clipping needs their norm, which is taken as they land) and runs behind the next
forward, the first-needed chunk first. In both a chunk waits for its own step only, when it is needed next; whoever else
looks at a weight waits for all of them, see [Note: Guard]. Nothing is stale: every forward computes with the weights
after the step. Nothing is approximate: the step of a parameter reads its own gradient and state only, so that doing the
same in another order gives the same bits.

[Note: Torn]
When some weights have been stepped and others never will be (an exception in the middle of a backward whose first
chunks have been stepped, an optimizer that raises), the weights belong to no step at all. The run is *torn*: its state
can be neither saved nor trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_protrain.device import Device
from lightning_protrain.host import Job
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.comm import Communicator
from lightning_protrain.runtime.guard import Guard, below_guard, can_be_watched
from lightning_protrain.runtime.hoststep import HostStep, Steps, Update
from lightning_protrain.runtime.kernels import Clip
from lightning_protrain.runtime.norms import clip_over_owners, total_norm
from lightning_protrain.runtime.optimizer import PartGroups, has_step_hooks
from lightning_protrain.runtime.slot import Slot


class Overlap(StrEnum):
    """Behind what the host's optimizer step runs, see [Note: Overlap]."""

    OFF = "off"
    BACKWARD = "backward"
    FORWARD = "forward"


@dataclass(eq=False)
class Pending:
    """The pending step of one chunk: the job that does it, and what it steps."""

    job: Job
    slots: tuple[Slot, ...]


@dataclass
class _Armed:
    """What is known of the micro-batch that ends in an optimizer step.

    Attributes:
        optimizer: Whose step it is.
        groups: Gives groups of some of its parameters.
        overlap: `BACKWARD` or `FORWARD`.
        clip_value: Bound of gradient values, applied in the steps that run behind backward.
        take_norms: Whether norms are taken as gradients land.
        norms: Those that have been taken, by the identity of the parameter.
        landings: Jobs that take them.
        coefficient: Factor of the gradients that steps have still to apply, in the pass in which they read them.
        steps: Those that have been submitted; None: none yet.
        stepped: Chunks whose steps have been submitted.
        parameters: Identities of what they step.
    """

    optimizer: Optimizer
    groups: PartGroups
    overlap: Overlap
    clip_value: float | None
    take_norms: bool
    norms: dict[int, Tensor] = field(default_factory=dict)
    landings: list[Job] = field(default_factory=list)
    coefficient: Tensor | None = None
    steps: Steps | None = None
    stepped: set[int] = field(default_factory=set)
    parameters: set[int] = field(default_factory=set)


class Updates:
    """Steps offloaded chunks behind backward or forward, see [Note: Overlap].

    Args:
        chunks: The offloaded chunks in execution order.
        device: Its worker does the work.

    Attributes:
        torn: Why the weights belong to no step, see [Note: Torn]; None as long as they do.
        when_touched: Called when somebody has looked at a weight whose step was pending.
    """

    def __init__(self, chunks: Sequence[Chunk], device: Device, communicator: Communicator | None = None) -> None:
        self.torn: str | None = None
        self.when_touched: list[Callable[[], None]] = []
        self._chunks = tuple(chunks)
        self._device = device
        self._guard = Guard(self._touched)
        self._host_step = HostStep(device.worker.threads, fuse=device.torch_device.type != "cpu")
        self._pending: dict[int, Pending] = {}
        self._armed: _Armed | None = None
        self._num_steps = 0
        self._num_backwards = 0  # since `arm`
        self._in_step = False
        self._several_backwards = False
        self._sharing = communicator if any(chunk.is_shared for chunk in chunks) else None

    # --- one step -----------------------------------------------------------------------------------------------------

    def arm(
        self, optimizer: Optimizer, overlap: Overlap, clip_value: float | None = None, take_norms: bool = False
    ) -> None:
        """Before the forward and backward that end in a step of `optimizer`.

        The first step of a run is not overlapped: what cannot be streamed exactly is refused in its backward, before
        any weight has changed, and a step of several backwards shows itself.

        Args:
            optimizer: One that steps each of its parameters on its own.
            overlap: When to step.
            clip_value: Bound of gradient values, for steps behind backward.
            take_norms: Whether norms of gradients are wanted, and nobody changes gradients once they have landed.

        Raises:
            RuntimeError: The weights are torn.
        """
        self.refuse_torn()
        self._armed = None
        self._num_steps += 1
        if overlap is not Overlap.OFF and self._num_steps > 1 and self._chunks and not has_step_hooks(optimizer):
            if overlap is Overlap.BACKWARD and (self._several_backwards or self._has_user_hooks()):
                # A hook may read any weight, and must not find it stepped already.
                overlap = Overlap.FORWARD
            self._armed = _Armed(
                optimizer, PartGroups(optimizer), overlap, clip_value, take_norms and not self._several_backwards
            )
        self._num_backwards = 0
        self._in_step = True

    def begin_backward(self) -> None:
        """Every step before has ended: backward may need any weight.

        Raises:
            RuntimeError: It is a second backward, and chunks have been stepped in the first.
        """
        armed = self._armed
        self._num_backwards += 1
        self._several_backwards |= self._in_step and self._num_backwards > 1
        if armed is not None and self._num_backwards > 1:
            if armed.stepped:
                raise RuntimeError(f"A second backward begins after chunks were stepped in the first. {_LESS_OVERLAP}")
            armed.take_norms = False
        self.finish_all()

    @property
    def takes_landings(self) -> bool:
        """Whether gradients may be given to `landed` at all in this backward."""
        armed = self._armed
        return armed is not None and (armed.overlap is Overlap.BACKWARD or armed.take_norms)

    def wants(self, index: int) -> bool:
        """Whether the gradients of a chunk that are on their way should be given to `landed`."""
        return self.takes_landings and self._can_step(self._chunks[index])

    def landed(self, index: int, land: Callable[[], None]) -> None:
        """Takes the gradients of a chunk, when all are on their way and nothing reads its weights any more.

        Args:
            index: Which chunk.
            land: Waits for the gradients and adds them up; called on the worker.
        """
        armed = self._armed
        assert armed is not None
        if armed.overlap is Overlap.BACKWARD:
            self._submit(index, armed, land)
        else:
            parameters = [slot.host for slot in self._chunks[index].slots]
            armed.landings.append(self._device.worker.submit(lambda: _take_norms(parameters, armed.norms, land)))

    def end_backward(self) -> None:
        """Gradients that have been taken without a step are whole."""
        if self._armed is not None:
            while self._armed.landings:
                self._armed.landings.pop(0).result()

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> None:
        """Bounds the norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` does, bit for bit."""
        if self._sharing is not None:
            shared = {id(slot.host) for chunk in self._chunks for slot in chunk.slots}
            clip_over_owners(list(parameters), shared, max_norm, self._sharing)
            return
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
        armed = self._armed
        if armed is None or not armed.take_norms or len({parameter.dtype for parameter in parameters}) != 1:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            return
        total = total_norm(parameters, armed.norms)
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        later = {id(slot.host) for chunk in self._chunks if self._can_step(chunk) for slot in chunk.slots}
        for parameter in parameters:
            if id(parameter) not in later and parameter.grad is not None:
                parameter.grad.mul_(coefficient.to(parameter.grad.device))
        armed.coefficient = coefficient.cpu()

    def clip_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Bounds the values of gradients, as `torch.nn.utils.clip_grad_value_` does; steps behind backward have."""
        _clip_values([parameter for parameter in parameters if not self._guard.watches(parameter)], clip_value)

    def launch(self) -> set[int]:
        """After backward and clipping: submits the steps of all chunks that are left, the first-needed first.

        Returns:
            Identities of the parameters that are stepped here; the others are left to the caller.
        """
        armed = self._armed
        self._in_step = False
        if armed is None:
            return set()
        for index, chunk in enumerate(self._chunks):
            if index not in armed.stepped and self._can_step(chunk):
                self.finish(index)  # No forward has needed it since the step before.
                self._submit(index, armed, None)
        self._armed = None
        return armed.parameters

    # --- its end ------------------------------------------------------------------------------------------------------

    def job(self, index: int) -> Job | None:
        """The pending step of a chunk."""
        update = self._pending.get(index)
        return update.job if update is not None else None

    def finish(self, index: int) -> None:
        """Waits for the step of one chunk.

        Raises:
            BaseException: What the optimizer raised.
        """
        update = self._pending.pop(index, None)
        if update is None:
            return
        error = update.job.exception()
        self._guard.leave(slot.host for slot in update.slots)
        self._chunks[index].note_step()
        if error is not None:
            self.torn = self.torn or f"the optimizer raised {error!r} for {update.slots[0].fqn!r}"
            error.add_note(f"It was raised by the optimizer, in the step of {update.slots[0].fqn!r} on the host.")
            raise error

    def finish_all(self) -> None:
        """Waits for every step.

        Raises:
            BaseException: What the optimizer raised.
        """
        for index in list(self._pending):
            self.finish(index)

    def abandon(self) -> None:
        """After an exception: waits for what runs, raises nothing, and notes whether the weights are torn."""
        armed, self._armed = self._armed, None
        if armed is not None:
            for landing in armed.landings:
                landing.exception()
            if armed.stepped:
                self.torn = self.torn or "an exception came when the first chunks of a step had been stepped"
        while self._pending:
            _, update = self._pending.popitem()
            error = update.job.exception()
            self._guard.leave(slot.host for slot in update.slots)
            if error is not None:
                self.torn = self.torn or f"the optimizer raised {error!r} for {update.slots[0].fqn!r}"

    def meet(self) -> None:
        """Waits for the ranks that share weights: none of them reads or writes any until it comes here again."""
        if self._sharing is not None:
            self._sharing.meet()

    def publish(self) -> None:
        """After a step of weights that are shared: every rank finds those that others have stepped."""
        if self._sharing is not None:
            for chunk in self._chunks:
                chunk.publish()
            self._sharing.meet()

    def agree_on_overflow(self, found: dict[torch.device, Tensor]) -> None:
        """A gradient that is not finite on the rank that owns it is one on every rank.

        Args:
            found: Of this rank, by device: more than 0 if there is one; changed in place.
        """
        if self._sharing is not None:
            here = sum((each.cpu() for each in found.values()), torch.zeros(1))
            anywhere = self._sharing.sum_of_node(here)
            found.setdefault(torch.device("cpu"), torch.zeros(1))
            for each in found.values():
                each.copy_(anywhere)

    def close(self) -> None:
        """Waits for what runs and ends the threads."""
        self.abandon()
        self._host_step.close()

    def refuse_torn(self) -> None:
        """Lets nobody save or train weights that belong to no step, see [Note: Torn].

        Raises:
            RuntimeError: They do not.
        """
        half_done = self._armed is not None and self._armed.stepped
        torn = self.torn or ("the first chunks of a step have been stepped" if half_done else None)
        if torn is not None:
            raise RuntimeError(
                f"The weights are torn: {torn}, so some are from before that step and some from after it. They "
                f"can be neither saved nor trained on: resume from the last checkpoint. {_LESS_OVERLAP}"
            )

    def _touched(self) -> None:
        if self._armed is not None and self._armed.stepped:
            raise RuntimeError(f"A weight is read in a backward in which it has been stepped already. {_LESS_OVERLAP}")
        touched = [self._chunks[index] for index in self._pending]
        self.finish_all()
        for chunk in touched:
            chunk.distrust_copies()
        for function in self.when_touched:
            function()

    def _submit(self, index: int, armed: _Armed, land: Callable[[], None] | None) -> None:
        slots = tuple(slot for slot in self._chunks[index].slots if armed.groups.has(slot.host))
        parameters = [slot.host for slot in slots]
        groups = armed.groups.of(parameters)
        clip = Clip(armed.clip_value if land is not None else None, armed.coefficient)
        steps = armed.steps = armed.steps or self._host_step.steps(armed.optimizer)
        # With gradients that are there already, it is prepared together with others, see [Note: Ahead].
        portion = steps.add(lambda: _updates(groups, slots), clip) if land is None else None

        def work() -> None:
            with below_guard(), torch.no_grad():
                if land is not None:
                    land()
                steps.finish(portion or steps.add(lambda: _updates(groups, slots), clip))
                for slot in slots:
                    if slot.host.grad is not None:
                        slot.copied_version = slot.host._version

        self._guard.watch(parameters)
        armed.stepped.add(index)
        armed.parameters.update(map(id, parameters))
        self._pending[index] = Pending(self._device.worker.submit(work), slots)

    def _can_step(self, chunk: Chunk) -> bool:
        return chunk.plan.trainable and all(can_be_watched(slot.host) for slot in chunk.slots)

    def _has_user_hooks(self) -> bool:
        with below_guard():  # or to ask would wait for every pending step
            return any(slot.has_user_hooks for chunk in self._chunks for slot in chunk.slots)


def _updates(groups: Iterable[dict[str, Any]], slots: Sequence[Slot]) -> Iterator[tuple[dict[str, Any], list[Update]]]:
    copies = {id(slot.host): slot.copy for slot in slots}
    for group in groups:
        given = [(parameter, parameter.grad) for parameter in group["params"]]
        yield group, [Update(p, gradient, copies[id(p)]) for p, gradient in given if gradient is not None]


_LESS_OVERLAP = 'overlap_optimizer="forward" steps after backward, "off" steps all weights at once.'


def _clip_values(parameters: Sequence[Tensor], clip_value: float) -> None:
    if any(parameter.grad is not None for parameter in parameters):  # PyTorch raises over an empty list
        torch.nn.utils.clip_grad_value_(parameters, clip_value)


def _take_norms(parameters: Sequence[Tensor], norms: dict[int, Tensor], land: Callable[[], None]) -> None:
    with below_guard(), torch.no_grad():
        land()
        for parameter in parameters:
            if parameter.grad is not None:
                norms[id(parameter)] = torch.linalg.vector_norm(parameter.grad)
