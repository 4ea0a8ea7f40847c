"""What a plan takes in every phase of training, on the device and on the host, term by term (paper, section 3.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from lightning_protrain.planner.activations import ActivationCurve
from lightning_protrain.planner.host import host_terms, loading_terms
from lightning_protrain.planner.live import LiveChunks
from lightning_protrain.planner.memory import resident_bytes
from lightning_protrain.planner.plan import BlockPolicy, Plan, chunk_offsets, gathers_gradients
from lightning_protrain.planner.positions import LOSS_COPIES, NOWHERE, Integers, Positions, before
from lightning_protrain.planner.prediction import CHECKPOINT_COPY
from lightning_protrain.planner.unexercised import Reserve, without_gradients
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.records import ModelLayout, ModelProfile

__all__ = ["CHECKPOINT_COPY", "ActivationCurve", "MemoryTimeline", "Phase", "memory_timeline"]


@dataclass(frozen=True)
class Phase:
    """What one phase takes at its peak, in bytes.

    Attributes:
        name: `"loading"`, `"forward"`, `"backward"`, `"step"` or `"evaluation"`.
        unit: Name of the unit at the peak of the device; `""` between units and where no unit runs.
        device: Terms by name; they are all there at one time.
        host: The same on the host; the most in the phase.
        fragmentation: What a caching allocator adds to activations and temporaries; negative if its factor is below 1.
    """

    name: str
    unit: str
    device: Mapping[str, int]
    host: Mapping[str, int]
    fragmentation: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device; never less than the sum of all terms, whatever the fragmentation."""
        return sum(self.device.values()) + max(self.fragmentation, 0)

    @property
    def host_total(self) -> int:
        """Bytes on the host."""
        return sum(self.host.values())


@dataclass(frozen=True)
class MemoryTimeline:
    """All phases of training under one plan.

    Attributes:
        phases: In the order in which they come.
        unexercised: Units that the profiled batch did not run, for which an estimate is reserved.
    """

    phases: tuple[Phase, ...]
    unexercised: tuple[str, ...] = ()

    def phase(self, name: str) -> Phase:
        """The phase called `name`.

        Raises:
            KeyError: There is none.
        """
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise KeyError(name)

    @property
    def device_peak(self) -> int:
        """The most bytes on the device: what is checked against a budget."""
        return max(phase.total for phase in self.phases)

    @property
    def host_peak(self) -> int:
        """The most bytes on the host."""
        return max(phase.host_total for phase in self.phases)


def memory_timeline(
    profile: ModelProfile,
    layout: ModelLayout,
    plan: Plan,
    hardware: HardwareProfile,
    state_bytes: float,
    accumulate: int = 1,
    alpha: float = 1.0,
    foreach: bool = False,
    checkpoint_copy: int = 0,
    sharers: int = 1,
) -> MemoryTimeline:
    """What `plan` takes, phase by phase.

    Args:
        profile: One step with forward and backward.
        layout: The model.
        plan: Made for `layout`.
        hardware: Whether copies run beside computation.
        state_bytes: Bytes of optimizer states (and master copies) for each trainable element.
        accumulate: Micro-batches in a step.
        alpha: Fragmentation factor of a caching allocator, for activations and temporaries on an asynchronous device.
        foreach: Whether the optimizer steps all resident parameters at once, with temporaries as large as they are.
        checkpoint_copy: Bytes of the host for the copy of a checkpoint, which is kept from the first save on.
        sharers: Ranks of a machine that share one copy of what is offloaded; then the host is that of all of them.

    Raises:
        ValueError: The profile has no backward.
    """
    copies = checkpoint_copy, sharers
    model = _Model(profile, layout, plan, hardware.asynchronous, state_bytes, accumulate, alpha, *copies)
    phases = (model.loading(), model.forward(), model.backward(), model.step(foreach), model.evaluation())
    return MemoryTimeline(phases, model.reserve.names)


class _Model:
    """What all phases of one plan have in common."""

    def __init__(
        self,
        profile: ModelProfile,
        layout: ModelLayout,
        plan: Plan,
        asynchronous: bool,
        state_bytes: float,
        accumulate: int,
        alpha: float,
        checkpoint_copy: int,
        sharers: int,
    ) -> None:
        self.reserve = Reserve.of(profile, layout)
        # Casts of these are not made: the copy comes in their place.
        streamed = frozenset(fqn for chunk in plan.chunks if chunk.streamed_dtype for fqn in chunk.parameters)
        self._at = Positions.of(profile, layout, streamed)
        self._casts = self._at.casts(streamed)
        self._layout = layout
        self._plan = plan
        self._asynchronous = asynchronous
        self._accumulates = accumulate > 1
        self._alpha = alpha if asynchronous else 1.0
        self._units = [segment.unit for segment in profile.segments]
        self._live = LiveChunks(layout, plan, self._units)
        self._reserved = self.reserve.total({block.name: block.policy for block in plan.blocks})
        resident = [chunk for chunk in plan.chunks if chunk.resident]
        never = without_gradients(profile, layout)
        trained = [chunk for chunk in resident if chunk.trainable and not never.issuperset(chunk.parameters)]
        self._gradients = {
            fqn: chunk_offsets([layout.parameter(fqn).nbytes])[1] for chunk in trained for fqn in chunk.parameters
        }
        states = sum(resident_bytes(layout, chunk, state_bytes) - chunk.nbytes for chunk in trained)
        self._states = {
            "resident_parameters": sum(chunk.nbytes for chunk in resident),
            "optimizer_states": states,
            "module_buffers": layout.buffer_bytes,
        }
        self._host = host_terms(layout, plan, state_bytes, accumulate, asynchronous, sharers)
        if checkpoint_copy:
            self._host[CHECKPOINT_COPY] = checkpoint_copy
        policies = [plan.policy(block.name) for block in layout.blocks]
        self._selective = self._at.policies(policies, BlockPolicy.SELECTIVE)
        self._checkpoints = (self._at.policies(policies, BlockPolicy.CHECKPOINT) | self._selective)[:, None]
        self._swaps = self._at.policies(policies, BlockPolicy.SWAP)[:, None]
        moved = np.array([*(plan.block(block.name).swap_bytes > 0 for block in layout.blocks), False])
        inputs = self._checkpoints[:, 0] & moved[self._at.block]
        self._inputs = np.where(inputs, self._at.input_bytes, 0)[:, None]

    def loading(self) -> Phase:
        """Resident weights come, and chunks are laid out one after the other."""
        names = ("resident_parameters", "module_buffers")
        largest = max((chunk.nbytes for chunk in self._plan.chunks if not chunk.resident), default=0)
        device = {name: self._states[name] for name in names} | {"chunk_buffers": largest}
        return Phase("loading", "", device, loading_terms(self._layout, self._plan, self._asynchronous))

    def forward(self) -> Phase:
        """The gradients of the step before are still there: they are dropped when the loss is known."""
        at = self._at
        freed = self._freed()
        kept, unsaved = at.forward_peak - self._own(at.forward_casts), at.unsaved_peak - self._own(at.unsaved_casts)
        levels = np.where(self._checkpoints[:, 0], unsaved, kept)
        levels = np.where(self._selective, at.selective_peak - self._own(at.selective_casts), levels)
        levels += (at.held(self._checkpoints, self._checkpoints) - at.freed_before(freed))[:, 0]
        window = at.window(freed, self._swaps) + at.window(self._inputs, self._inputs > 0)
        gradients = np.full_like(levels, self._all_gradients)
        return self._phase("forward", levels, window[:, 0], gradients, self._live.forward)

    def backward(self) -> Phase:
        """Gradients of resident chunks come one after the other, or are there if micro-batches are accumulated."""
        at = self._at
        kept = at.backward_peak - self._own(at.backward_casts)
        recomputed = at.recomputation() - self._own(at.forward_casts) - self._inputs[:, 0]
        levels = np.where(self._checkpoints[:, 0], np.maximum(kept + at.newly_held, recomputed), kept)
        recomputed = at.selective_recomputation() - self._own(at.again_casts)
        selective = np.maximum(kept + at.newly_held + at.idle_products, recomputed)
        levels = np.where(self._selective, selective, levels)
        freed = self._freed()
        levels += (at.held(self._checkpoints, self._checkpoints) - before(freed * at.reached[:, None]))[:, 0]
        window = at.window(at.swap_bytes[:, None], self._swaps) + at.window(self._inputs, self._inputs > 0)
        window += np.where(self._swaps, at.copies()[:, None], 0)
        return self._phase(
            "backward", levels, window[:, 0], self._gradients_at(), self._live.backward, self._in_flight()
        )

    def step(self, foreach: bool) -> Phase:
        """Nothing streams; the optimizer steps what is resident."""
        sizes = [*self._gradients.values(), 0]
        temporaries = sum(sizes) if foreach else 2 * max(sizes)
        device = self._states | {"gradients": self._all_gradients, "temporaries": temporaries}
        return Phase("step", "", device, self._host, self._fragmentation(temporaries))

    def evaluation(self) -> Phase:
        """A forward that saves nothing; gradients of the step before are still there."""
        at = self._at
        saved = np.maximum(at.checkpoint_saving, 0)
        saved = np.where(at.block == NOWHERE, 0, saved)
        levels = at.unsaved_peak - self._own(at.unsaved_casts) - at.freed_before(saved[:, None])[:, 0]
        gradients = np.full_like(levels, self._all_gradients)
        nothing = np.zeros_like(levels)
        phase = self._phase("evaluation", levels, nothing, gradients, self._live.evaluation)
        whole = {"whole_weights": self._whole_weights()}
        return Phase("evaluation", phase.unit, {**phase.device, **whole}, phase.host, phase.fragmentation)

    def _own(self, casts: Integers) -> Integers:
        """Those of `casts`, the segments' own, that are not made."""
        own: Integers = np.where(self._casts == self._at.castable, casts, 0)
        return own

    def _freed(self) -> Integers:
        """What every segment frees under its policy, (S, 1)."""
        at = self._at
        checkpointed = (at.checkpoint_saving - np.where(self._selective, at.products, 0))[:, None]
        kept = np.where(self._checkpoints, checkpointed + self._inputs, self._casts[:, None])
        freed: Integers = np.where(self._swaps, at.swap_saving[:, None], kept)
        return freed

    def _gradients_at(self) -> Integers:
        count = len(self._units)
        if self._accumulates:
            return np.full(count, self._all_gradients, dtype=np.int64)
        whole_at = {fqn: index for index, segment in enumerate(self._at.segments) for fqn in segment.gradients}
        arrivals = np.zeros(count + 1, dtype=np.int64)
        for fqn, nbytes in self._gradients.items():
            arrivals[whole_at.get(fqn, count)] += nbytes
        later = arrivals[::-1].cumsum()[::-1][1:]
        own: Integers = np.minimum(arrivals[:-1], self._at.own_gradients)
        return later + own

    @property
    def _all_gradients(self) -> int:
        return sum(self._gradients.values())

    def _in_flight(self) -> int:
        """Gradients of offloaded chunks that are held while they land; the one that is computed is in the profile."""
        sizes, staged = list[int](), 0
        for chunk, gathered in zip(self._plan.chunks, gathers_gradients(self._layout, self._plan.chunks), strict=True):
            if chunk.trainable and not chunk.resident and gathered:
                sizes.append(chunk.nbytes)
                staged = max(staged, 2 * chunk.nbytes)
            elif chunk.trainable and not chunk.resident:
                sizes += [self._layout.parameter(fqn).streamed_nbytes for fqn in chunk.parameters]
        return (sorted(sizes)[-2] if self._asynchronous and len(sizes) > 1 else 0) + staged

    def _whole_weights(self) -> int:
        """Weights streamed in two bytes that a unit needs whole, if it is evaluated outside of autocast."""
        low = {fqn for chunk in self._plan.chunks if chunk.streamed_dtype for fqn in chunk.parameters}
        needs = [low.intersection(unit.parameters) for unit in self._layout.units]
        return max((sum(self._layout.parameter(fqn).nbytes for fqn in names) for names in needs), default=0)

    def _phase(
        self,
        name: str,
        levels: Integers,
        window: Integers,
        gradients: Integers,
        live: Sequence[int],
        in_flight: int = 0,
    ) -> Phase:
        """The phase at its peak."""
        fragmented = (levels + window + self._reserved) * max(self._alpha, 1.0)
        peak = int(np.argmax(fragmented + gradients + np.array(live, dtype=np.int64)))
        activations = int(levels[peak] + window[peak]) + self._reserved
        device = self._states | {
            "gradients": int(gradients[peak]),
            "gradients_in_flight": in_flight,
            "chunk_buffers": live[peak],
            "activations": int(levels[peak]),
            "swapped_activations": int(window[peak]),
            "loss_copies": LOSS_COPIES,
            "unexercised": self._reserved,
        }
        return Phase(name, self._units[peak], device, self._host, self._fragmentation(activations))

    def _fragmentation(self, nbytes: int) -> int:
        return ceil((self._alpha - 1.0) * nbytes)
