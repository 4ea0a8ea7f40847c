"""The memory model: predicts device and host memory of one plan in every phase of training.

A step goes through the segments of the profile forward, then backward: two *positions* for each segment. The profile
has the bytes of all activations at each position if every block keeps its activations. The timeline subtracts the bytes
that the plan has freed in segments that are between their forward and their backward. A segment without backward frees
its activations anyway, so the plan frees nothing there.

Two terms are added. First, activations that the previous block has swapped out are still on the device while the next
block runs forward. In backward, copies of them are on the device while the next block runs (see [Note: Windows] of the
runtime). The same holds for inputs of checkpointed blocks that go to the host. Second, a checkpointed block runs
forward once more at the start of its backward.

A copy of a weight in the dtype of autocast counts as an activation. A weight that is streamed in that dtype is not
copied. Lightning switches autocast's weight cache off; with the cache, copies would outlive their block.

The runtime fetches chunks in the order of use, and never evicts a chunk that is needed earlier than the fetched one. So
when a unit has begun, the live chunks are its own and those needed next. If there is room, the chunks used last are
also live. Before the first unit that streams, the first chunks in the order of use are live. The number of live chunks
is the number of buffers, and their bytes never exceed the bytes of all buffers. A chunk of an enclosing unit stays live
while the inner units run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import NamedTuple

from lightning_protrain.planner.memory import HostUse, host_terms, loading_terms, offloaded_of, sums_of, sums_of_all
from lightning_protrain.planner.plan import ALIGNMENT, BlockPolicy, ChunkPlan, Plan, gathers_gradients
from lightning_protrain.planner.prediction import CHECKPOINT_COPY
from lightning_protrain.planner.problem import Problem

# Bytes: the training loop holds copies of the loss of this step and of the previous step, which no profile shows.
LOSS_COPIES = 2 * ALIGNMENT
# Lower bound of the fragmentation factor. Factors below 1 occur because a profile counts some tensors twice.
LEAST_ALPHA = 0.5


@dataclass(frozen=True)
class Phase:
    """The memory of one phase at its peak, bytes.

    Attributes:
        name: `"loading"`, `"forward"`, `"backward"`, `"step"` or `"evaluation"`.
        unit: Name of the unit at the peak of the device; `""` between units and in phases without units.
        device: Terms on the device by name, all at the same time.
        host: Terms on the host by name, each at its maximum in the phase.
        fragmentation: Additional memory of a caching allocator for activations and temporaries; negative if the
            fragmentation factor is below 1.
    """

    name: str
    unit: str
    device: Mapping[str, int]
    host: Mapping[str, int]
    fragmentation: int = 0

    @property
    def total(self) -> int:
        """Total device memory, bytes; at least the sum of all terms, even if fragmentation is negative."""
        return sum(self.device.values()) + max(self.fragmentation, 0)


@dataclass(frozen=True)
class MemoryTimeline:
    """All phases of training under one plan.

    Attributes:
        phases: Phases of a step in the order of time.
        unexercised: Units that did not run in the profiled batch, for which estimated memory is reserved.
    """

    phases: tuple[Phase, ...]
    unexercised: tuple[str, ...] = ()

    def phase(self, name: str) -> Phase:
        """Return the phase called `name`.

        Raises:
            KeyError: No phase has this name.
        """
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise KeyError(name)

    @property
    def device_peak(self) -> int:
        """Peak device memory over all phases, bytes."""
        return max(phase.total for phase in self.phases)

    @property
    def host_peak(self) -> int:
        """Peak host memory over all phases, bytes."""
        return max(sum(phase.host.values()) for phase in self.phases)


def memory_timeline(problem: Problem, plan: Plan, counts_host: bool = True) -> MemoryTimeline:
    """Return the memory that `plan` needs in each phase.

    Args:
        problem: The model, the hardware and the training loop.
        plan: A whole plan for the model.
        counts_host: True to predict host memory, too, which takes longer.

    Raises:
        ValueError: The profile has no backward pass.
    """
    if not any(segment.backward.peak_bytes for segment in problem.profile.segments):
        raise ValueError(
            "The profile has no backward, so what it takes is not known. Profile a step that returns the loss."
        )
    model = _Model(problem, plan, counts_host)
    phases = (model.loading(), model.forward(), model.backward(), model.step(), model.evaluation())
    return MemoryTimeline(phases, model.facts.reserve.names)


def memory_course(problem: Problem, plan: Plan) -> list[Phase]:
    """Return the device memory of `plan` over a step: segments of the forward, of the backward, and the optimizer step.

    Raises:
        ValueError: See `memory_timeline`.
    """
    model = _Model(problem, plan, counts_host=False)
    ahead, back = model.forward_bytes(), model.backward_bytes()
    count, in_flight = len(problem.profile.segments), model.placed.in_flight
    return [
        *(model.phase_at("forward", ahead, index) for index in range(count)),
        *(model.phase_at("backward", back, index, in_flight) for index in reversed(range(count))),
        model.step(),
    ]


def measured_alpha(problem: Problem, plan: Plan, peak_bytes: int, steps: bool = True) -> float:
    """Return the fragmentation factor that makes the predicted peak of a step equal the measured peak.

    Args:
        problem: Problem with the profile of the step.
        plan: Plan under which the measured step ran.
        peak_bytes: Measured peak of the device, bytes.
        steps: True if the optimizer step was measured as well, False if forward and backward alone.
    """
    names = ("forward", "backward", "step") if steps else ("forward", "backward")

    def most(alpha: float) -> int:
        phases = memory_timeline(replace(problem, alpha=alpha), plan, counts_host=False).phases
        return max(phase.total for phase in phases if phase.name in names)

    plain = most(1.0)
    grows = most(2.0) - plain
    return max(1.0 + (peak_bytes - plain) / grows, LEAST_ALPHA) if grows else problem.alpha


class _SegmentBytes(NamedTuple):
    """Device memory at each segment of a phase, bytes.

    Attributes:
        levels: Activations and temporaries.
        windows: Swapped activations that are still, or again, on the device.
        gradients: Gradients of resident chunks.
        chunks: Offloaded chunks.
    """

    levels: Sequence[int]
    windows: Sequence[int]
    gradients: Sequence[int]
    chunks: Sequence[int]


class _Model:
    """The memory model of one plan; computes its phases."""

    def __init__(self, problem: Problem, plan: Plan, counts_host: bool) -> None:
        self.problem, self.plan, self._counts_host = problem, plan, counts_host
        self.facts = problem.segment_facts
        self._segments, layout = problem.profile.segments, problem.layout
        self._alpha = problem.alpha if problem.hardware.asynchronous else 1.0
        self.placed = placed = _placed(problem, plan.chunks)
        blocks = {block.name: block for block in plan.blocks}
        planned = [None if index is None else blocks[layout.blocks[index].name] for index in self.facts.block]
        self._policies = [BlockPolicy.KEEP if block is None else block.policy for block in planned]
        self._recomputes = [policy in (BlockPolicy.CHECKPOINT, BlockPolicy.SELECTIVE) for policy in self._policies]
        self._footprints = [
            self.facts.footprint(index, policy, has_casts)
            for index, (policy, has_casts) in enumerate(zip(self._policies, placed.has_casts, strict=True))
        ]
        # A checkpointed block may swap its inputs.
        self._inputs = [
            segment.input_bytes if again and block is not None and block.swap_bytes else 0
            for segment, block, again in zip(self._segments, planned, self._recomputes, strict=True)
        ]
        swap_bytes = problem.profile.swap_bytes(placed.streamed) if BlockPolicy.SWAP in self._policies else {}
        self._swap_bytes = [swap_bytes.get(segment.unit, 0) for segment in self._segments]
        self._live = placed.live(plan)
        self._reserved = self.facts.reserve.total({block.name: block.policy for block in plan.blocks})

    @cached_property
    def _host(self) -> dict[str, int]:
        """Terms of the host during training."""
        if not self._counts_host:
            return {}
        problem = self.problem
        again, asynchronous = problem.training.accumulate, problem.hardware.asynchronous
        terms = host_terms(
            problem.layout, self.plan, problem.state_bytes, HostUse(problem.sharers, again), asynchronous
        )
        if problem.checkpoint_copy:
            terms[CHECKPOINT_COPY] = problem.checkpoint_copy
        return terms

    def loading(self) -> Phase:
        """Return the phase in which the model is placed: resident weights are uploaded, chunks laid out one by one."""
        largest = max((chunk.nbytes for chunk in self.plan.chunks if not chunk.resident), default=0)
        device = {name: self.placed.states[name] for name in ("resident_parameters", "module_buffers")}
        host = {}
        if self._counts_host:
            host = loading_terms(self.problem.layout, self.plan, self.problem.hardware.asynchronous)
        return Phase("loading", "", device | {"chunk_buffers": largest}, host)

    def forward(self) -> Phase:
        """Return the phase of the forward; gradients of the previous step still take memory."""
        return self._phase("forward", self.forward_bytes())

    def forward_bytes(self) -> _SegmentBytes:
        """Return the device memory in each segment of the forward."""
        levels = self._levels([footprint.forward for footprint in self._footprints])
        windows = self._windows(self._freed)
        gradients = [self.placed.all_gradients] * len(levels)
        return _SegmentBytes(levels, windows, gradients, self._live.forward)

    def backward(self) -> Phase:
        """Return the backward phase; resident gradients appear one by one, or exist already if they are accumulated."""
        return self._phase("backward", self.backward_bytes(), self.placed.in_flight)

    def backward_bytes(self) -> _SegmentBytes:
        """Return the device memory in each segment of the backward."""
        levels = self._levels([footprint.backward for footprint in self._footprints])
        windows = self._windows(self._swap_bytes)
        for index, policy in enumerate(self._policies):
            if policy is BlockPolicy.SWAP:
                # A storage that other segments save, too, is in the level only once, but the block swaps its own copy.
                windows[index] += max(self._swap_bytes[index] - self._freed[index], 0)
        return _SegmentBytes(levels, windows, self.placed.gradients_at, self._live.backward)

    def step(self) -> Phase:
        """Return the phase of the optimizer step of resident chunks, during which nothing streams."""
        temporaries = self.placed.all_gradients
        if not self.problem.foreach:
            largest = (sums_of(self.problem.layout, chunk).largest for chunk in self.placed.trained)
            temporaries = 2 * max(largest, default=0)
        device = self.placed.states | {"gradients": self.placed.all_gradients, "temporaries": temporaries}
        return Phase("step", "", device, self._host, self._fragmentation(temporaries))

    def evaluation(self) -> Phase:
        """Return the evaluation phase: a forward that saves nothing, with gradients of the previous step."""
        levels, gone = [], 0
        for index, segment in enumerate(self._segments):
            forgetting = self.facts.footprint(index, BlockPolicy.CHECKPOINT, self.placed.has_casts[index])
            levels.append(forgetting.forward - gone)
            if self.facts.block[index] is not None and segment.backward.peak_bytes > 0:
                # Without autograd, nothing keeps the block's own inputs either.
                gone += max(forgetting.freed, 0) + (segment.input_bytes if segment.input_swap_bytes else 0)
        nothing, gradients = [0] * len(levels), [self.placed.all_gradients] * len(levels)
        phase = self._phase("evaluation", _SegmentBytes(levels, nothing, gradients, self._live.evaluation))
        whole = {"whole_weights": self.placed.whole_weights}
        return Phase("evaluation", phase.unit, {**phase.device, **whole}, phase.host, phase.fragmentation)

    def _levels(self, peaks: Sequence[int]) -> list[int]:
        """Return the peaks of segments, with what the plan keeps alive for others and without what it has freed."""
        held, gone = self._held(), self._freed_before()
        return [level + more - less for level, more, less in zip(peaks, held, gone, strict=True)]

    def _windows(self, swapped: Sequence[int]) -> list[int]:
        """Return the bytes of the previous block on the device at each segment; `swapped` are those if it swaps."""
        moved = [
            nbytes * (policy is BlockPolicy.SWAP) + inputs
            for nbytes, policy, inputs in zip(swapped, self._policies, self._inputs, strict=True)
        ]
        return [0 if before is None else moved[before] for before in self.facts.previous]

    @cached_property
    def _freed(self) -> list[int]:
        """Bytes that each segment frees under its policy between its forward and its backward."""
        freed = zip(self._footprints, self._policies, self.placed.casts, self._inputs, strict=True)
        return [
            footprint.freed + (casts if policy is BlockPolicy.KEEP else inputs)
            for footprint, policy, casts, inputs in freed
        ]

    def _freed_before(self) -> list[int]:
        """Return the bytes that the plan has freed when each segment's forward begins."""
        sums, gone = [], 0
        for segment, freed in zip(self._segments, self._freed, strict=True):
            sums.append(gone)
            # A segment without backward drops its activations at an unknown time, so the plan frees nothing.
            gone += freed if segment.backward.peak_bytes > 0 else 0
        return sums

    def _held(self) -> list[int]:
        """Return the bytes of shared inputs that recomputing blocks keep alive and that are not counted elsewhere.

        The blocks of one list share all inputs except the output of the previous block. The profile counts shared
        inputs at the first block. So nothing is added for a list whose first block recomputes, too.
        """
        held = [0] * len(self._segments)
        for first, sharing in self.facts.lists:
            if self._recomputes[first]:
                continue
            most = 0
            for index in range(len(held)):
                if index in sharing and self._recomputes[index]:
                    most = max(most, self.facts.shared_held[index])
                held[index] += most
        return held

    def _phase(self, name: str, taken: _SegmentBytes, in_flight: int = 0) -> Phase:
        """Return the phase with the memory at its peak."""
        factor = max(self._alpha, 1.0)
        totals = [
            (level + window + self._reserved) * factor + gradient + chunks
            for level, window, gradient, chunks in zip(*taken, strict=True)
        ]
        return self.phase_at(name, taken, totals.index(max(totals)), in_flight)

    def phase_at(self, name: str, taken: _SegmentBytes, index: int, in_flight: int = 0) -> Phase:
        """Return the phase with the memory at one of its segments."""
        device = self.placed.states | {
            "gradients": taken.gradients[index],
            "gradients_in_flight": in_flight,
            "chunk_buffers": taken.chunks[index],
            "activations": taken.levels[index],
            "swapped_activations": taken.windows[index],
            "loss_copies": LOSS_COPIES,
            "unexercised": self._reserved,
        }
        activations = taken.levels[index] + taken.windows[index] + self._reserved
        return Phase(name, self._segments[index].unit, device, self._host, self._fragmentation(activations))

    def _fragmentation(self, nbytes: int) -> int:
        return ceil((self._alpha - 1.0) * nbytes)


class _Placed:
    """The memory that depends on the chunks of a plan alone, so plans with the same chunks share it.

    Attributes:
        streamed: Weights that are streamed in the dtype of autocast, so they are not cast.
        casts: Bytes of casts in each segment.
        has_casts: True for each segment that casts fewer weights than if none were streamed.
        trained: Resident chunks with gradients.
        all_gradients: Bytes of their gradients.
        states: Device memory of resident chunks by term, bytes.
    """

    def __init__(self, problem: Problem, chunks: Sequence[ChunkPlan]) -> None:
        self._problem, self._chunks = problem, chunks
        self._live: dict[tuple[int, int], LiveChunks] = {}
        segments, layout, facts = problem.profile.segments, problem.layout, problem.segment_facts
        self.streamed = frozenset(fqn for chunk in chunks if chunk.streamed_dtype for fqn in chunk.parameters)
        self.casts = [sum(n for fqn, n in at.casts if fqn in self.streamed) if at.casts else 0 for at in segments]
        self.has_casts = [casts < most for casts, most in zip(self.casts, facts.cast_bytes, strict=True)]
        every = zip(chunks, sums_of_all(layout, chunks), strict=True)
        resident = [(chunk, sums) for chunk, sums in every if chunk.resident]
        never = facts.never
        trained = [
            (chunk, sums)
            for chunk, sums in resident
            if chunk.trainable and not (never and never.issuperset(chunk.parameters))
        ]
        self.trained = [chunk for chunk, _ in trained]
        self.all_gradients = sum([sums.own_bytes for _, sums in trained])
        self.states = {
            "resident_parameters": sum([chunk.nbytes for chunk, _ in resident]),
            "optimizer_states": sum(
                [sums.own_bytes + ceil(problem.state_bytes * sums.numel) - chunk.nbytes for chunk, sums in trained]
            ),
            "module_buffers": layout.buffer_bytes,
        }

    def live(self, plan: Plan) -> LiveChunks:
        """Return the live chunks of a plan with these chunks."""
        key = plan.num_chunk_buffers, plan.memory.chunk_buffers
        if key not in self._live:
            self._live[key] = LiveChunks(self._problem, plan)
        return self._live[key]

    @cached_property
    def gradients_at(self) -> list[int]:
        """Bytes of resident gradients at the peak of each segment's backward."""
        count = len(self._problem.profile.segments)
        if self._problem.training.accumulate > 1:
            return [self.all_gradients] * count
        arrivals, whole_at = [0] * (count + 1), self._problem.arrivals
        for chunk in self.trained:
            for fqn in chunk.parameters:
                index, nbytes = whole_at[fqn]
                arrivals[index] += nbytes
        held, later = [0] * count, arrivals[count]
        for index in reversed(range(count)):
            segment = self._problem.profile.segments[index]
            inside = max(segment.backward.peak_with_gradients - segment.backward.peak_bytes, 0)
            held[index] = later + min(arrivals[index], inside)
            later += arrivals[index]
        return held

    @cached_property
    def in_flight(self) -> int:
        """Bytes of gradients on their way to the host, except the one that the profile already counts."""
        layout = self._problem.layout
        sizes, staged = list[int](), 0
        chunks = self._chunks
        every = zip(chunks, gathers_gradients(layout, chunks), sums_of_all(layout, chunks), strict=True)
        for chunk, gathered, sums in every:
            if chunk.trainable and not chunk.resident and gathered:
                sizes.append(chunk.nbytes)
                staged = max(staged, 2 * chunk.nbytes)
            elif chunk.trainable and not chunk.resident:
                sizes += sums.most_streamed
        arriving = sorted(sizes)[-2] if self._problem.hardware.asynchronous and len(sizes) > 1 else 0
        return arriving + staged

    @cached_property
    def whole_weights(self) -> int:
        """Bytes of float32 weights that one unit needs if it is evaluated outside of autocast."""
        if not self.streamed:
            return 0
        layout = self._problem.layout
        return max(
            sum(layout.parameter(fqn).nbytes for fqn in self.streamed.intersection(unit.parameters))
            for unit in layout.units
        )


def _placed(problem: Problem, chunks: Sequence[ChunkPlan]) -> _Placed:
    key = tuple(map(id, chunks))  # The value keeps the chunks, so no others get their ids.
    if key not in problem.placed:
        problem.placed[key] = _Placed(problem, chunks)
    placed: _Placed = problem.placed[key]
    return placed


class LiveChunks:
    """The bytes of the live chunks of a plan, by segment.

    Attributes:
        forward: In forward, when a backward follows.
        backward: In backward.
        evaluation: In forward, when no backward follows.
    """

    def __init__(self, problem: Problem, plan: Plan) -> None:
        layout, units = problem.layout, [segment.unit for segment in problem.profile.segments]
        needed = offloaded_of(layout, plan.chunks)
        ran = set(units)
        around: dict[str, tuple[int, ...]] = {}
        for unit in layout.units:
            for inner in unit.encloses if unit.name and unit.name not in ran else ():
                around[inner] = (*around.get(inner, ()), *needed[unit.name])
        # The weights of the root module are live throughout a step.
        self._pinned = set(needed.get("", ()))
        self._sizes = [chunk.nbytes for chunk in plan.chunks]
        self._plan = plan
        there = [(*needed.get(name, ()), *around.get(name, ())) if name else () for name in units]
        back = there[::-1]
        forward = self._windows(there, ())
        # The first chunks in forward order were used last by the previous backward, so they may still be on the device.
        first = max(forward[:1], default=0)
        self.evaluation = self._walk(there, forward, first)
        self.forward = self._walk(there, self._windows(there, back), first)
        self.backward = self._walk(back, self._windows(back, ()), self.forward[-1])[::-1]

    def _walk(self, uses: Sequence[tuple[int, ...]], windows: Sequence[int], before: int) -> list[int]:
        """Return the live bytes at each of `uses`: the next of `windows`, or as before if no chunk is needed."""
        live, following = [], iter(windows)
        latest = max(before, sum(self._sizes[index] for index in self._pinned))
        for chunks in uses:
            latest = next(following) if chunks else latest
            live.append(latest)
        return live

    def _windows(self, uses: Sequence[tuple[int, ...]], then: Sequence[tuple[int, ...]]) -> list[int]:
        """Return the live bytes at each of `uses` that needs chunks; `then` are the uses that follow."""
        uses = [needs for needs in uses if needs]
        order = [index for needs in (*uses, *then) for index in needs]
        drops = [index for needs in uses for index in needs[::-1]]
        sizes, most = self._sizes, self._plan.num_chunk_buffers
        counts = dict.fromkeys(self._pinned, 1)  # How often each live chunk is used within the window.
        nbytes = sum(sizes[index] for index in self._pinned)
        begin = end = start = 0
        windows = []
        for needs in uses:
            while end < len(order):
                index = order[end]
                if index not in counts:
                    if len(counts) < most:
                        nbytes += sizes[index]
                    elif begin < start:  # Evict a chunk that was used before, for one that is needed next.
                        past = drops[begin]
                        begin, counts[past] = begin + 1, counts[past] - 1
                        if not counts[past]:
                            del counts[past]
                            nbytes -= sizes[past]
                        continue
                    else:
                        break
                counts[index] = counts.get(index, 0) + 1
                end += 1
            start += len(needs)
            windows.append(min(nbytes, self._plan.memory.chunk_buffers))
        return windows
