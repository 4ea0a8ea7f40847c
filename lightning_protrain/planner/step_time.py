"""The time model: predicts the seconds of one optimizer step of a plan (paper, equations 2 to 7).

The paper takes the longer of computation and copies for each chunk. This model instead simulates a clock. It visits the
*positions* of a step, which are the segments of the profile, and records when each operation ends. Operations run on
the device, on each direction of the link, on the host's worker and on the network. Each direction of the link copies
chunks and swapped activations one after the other, in the order of request. An operation starts as soon as all that it
depends on has ended.

Work left over from one step overlaps the next step. So a step is timed from the beginning of the last micro-batch's
backward to the end of the forward before the next such backward; training repeats this period.

[Note: Gradients in flight]
The device has room for the two largest gradients of offloaded chunks: for gradients being copied to the host, and for
the next gradient. After a gradient is computed, the device waits until enough copies have ended to make room for the
next gradient. If gradients pass through buffers on the host, the first gradient of a chunk also waits until the host
has stepped enough earlier chunks, see [Note: Gradients in passing]. All gradients of a module appear together, when its
backward ends; the backward time of a segment is divided among its modules by their numbers of elements.

[Note: Sends]
If ranks average gradients, chunks are sent in the backward that ends a step. A chunk is sent when the first gradient of
a later position has been computed, because backward has left the chunk by then. The remaining chunks are sent at the
end of backward. When a chunk is sent, the device waits until the chunk sent before has been reduced. So if one position
has several chunks, the device waits for all of them but the last, whose all-reduce overlaps computation. Each download
begins when its all-reduce ends. The device also waits for downloads if too many bytes would be in flight. Gradients of
resident chunks are sent as they are computed, and nothing waits for them before the optimizer step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import neg
from typing import Literal, NamedTuple

from lightning_protrain.planner.lanes import Lane, Work, WorkLog, rotated
from lightning_protrain.planner.memory import offloaded_of
from lightning_protrain.planner.network import Network
from lightning_protrain.planner.plan import BlockPolicy, Plan
from lightning_protrain.planner.problem import Problem
from lightning_protrain.profiler.records import HardwareProfile

NEVER = float("-inf")
# Bytes read and written for each byte of a gradient. Scaling is part of the optimizer step, so it adds only the
# write-back.
ADD, NORM, SCALE = 3, 1, 1
# Kinds of work in the timeline of a step.
FORWARD, BACKWARD, RECOMPUTE, UPDATE = "forward", "backward", "recomputation", "optimizer step"
WEIGHTS, GRADIENTS, SWAP_OUT, SWAP_IN = "weights", "gradients", "activations out", "activations back"
CASTS, ADDS, NORMS, SUMS, OLDER = "casts", "sums of micro-batches", "norms", "all-reduce", "earlier sums"


@dataclass(frozen=True)
class StepTime:
    """The times of one optimizer step with all its micro-batches, seconds.

    Attributes:
        seconds: Time from one step to the next.
        compute: Computation of the device, including the optimizer step of resident chunks.
        upload: Time of host-to-device copies, hidden or not.
        download: Time of device-to-host copies, hidden or not.
        host: Time in which the host's worker computes, hidden or not.
        network: Time of collectives that average gradients, hidden or not.
    """

    seconds: float
    compute: float
    upload: float
    download: float
    host: float
    network: float = 0.0

    @property
    def bound(self) -> Literal["compute", "link", "host", "network"]:
        """The resource that is busy longest: only a faster one makes the step much faster."""
        busy: dict[Literal["compute", "link", "host", "network"], float] = {
            "compute": self.compute,
            "link": max(self.upload, self.download),
            "host": self.host,
            "network": self.network,
        }
        return max(busy, key=lambda name: busy[name])


@dataclass(frozen=True)
class Busy:
    """The busy time of each resource in forward and backward of one micro-batch, seconds, hidden or not.

    Attributes:
        compute: Computation of the device.
        upload: Host-to-device copies.
        download: Device-to-host copies.
    """

    compute: float
    upload: float
    download: float

    def correct(self, hardware: HardwareProfile, measured: Busy) -> HardwareProfile:
        """Return corrected hardware rates, with which the prediction would equal the measured seconds.

        The rate of an idle resource does not change.

        Args:
            hardware: Rates from which these seconds were predicted.
            measured: Measured seconds.
        """

        def factor(name: str) -> float:
            predicted, took = getattr(self, name), getattr(measured, name)
            return predicted / took if predicted > 0 and took > 0 else 1.0

        compute, up, down = factor("compute"), factor("upload"), factor("download")
        return replace(
            hardware,
            flops={dtype: rate * compute for dtype, rate in hardware.flops.items()},
            memory=hardware.memory * compute,
            launch=hardware.launch / compute,
            upload=hardware.upload * up,
            upload_beside=hardware.upload_beside * up,
            download=hardware.download * down,
            download_beside=hardware.download_beside * down,
        )


def step_time(problem: Problem, plan: Plan) -> StepTime:
    """Return the predicted times of one optimizer step, once training has settled.

    Args:
        problem: The model, the hardware, the training loop and the network.
        plan: A plan for this model.

    Raises:
        ValueError: The plan was made for another model, or the hardware has no rate for a dtype.
    """
    step = _Step(problem, plan)
    again, host = problem.training.accumulate, step.host
    update = host.step + (host.norm + host.scale if problem.training.clips else 0.0)
    upload, download = again * step.upload, again * step.download
    worked = host.cast + (again - 1) * host.add
    if step.network is not None and problem.hardware.asynchronous:
        # Gradients of the last micro-batch are averaged over ranks and downloaded as sums, see [Note: Sends].
        upload += step.network.older
        download += step.network.down - sum(step.gradients.download)
        worked = host.cast + (again - 2) * host.add if again > 1 else 0.0
    return StepTime(
        seconds=(_beside if problem.hardware.asynchronous else _in_turn)(step),
        compute=again * step.compute + step.device_step,
        upload=upload,
        download=download,
        host=worked + update,
        network=step.network.sent if step.network is not None else 0.0,
    )


def lanes(problem: Problem, plan: Plan) -> list[Work]:
    """Return the work of each resource in the step that `step_time` predicts; time 0 is the beginning of a forward.

    Raises:
        ValueError: See `step_time`.
    """
    step = _Step(problem, plan)
    log = step.log = WorkLog([segment.unit for segment in problem.profile.segments])
    if not problem.hardware.asynchronous:
        _log_in_turn(step, log)
        return rotated(log.spans, 0.0, 0.0)
    ended = _ended(step, _backward(step) if step.network is None else None)
    begun, stepped = _update(step, ended)
    seconds = _forward(step, begun, ended.down, stepped)
    for number in range(1, problem.training.accumulate):
        log.origin = seconds
        seconds += _other(step, _backward(step), adds=number > 1)
        log.origin = seconds
        seconds += _forward(step, 0.0, 0.0, {})
    return rotated(log.spans, begun, seconds)


def micro_batch(problem: Problem, plan: Plan) -> Busy:
    """Return the busy time of each resource in one micro-batch, without the optimizer step."""
    step = _Step(problem, plan)
    return Busy(step.compute, step.upload, step.download)


# --- work of a plan at every position -------------------------------------------------------------------------------


# The upload of a chunk: its index, and the position whose computation must end before the upload, because it uses the
# same buffer; -1: no such position.
Upload = tuple[int, int]


@dataclass
class _Gradients:
    """Gradients of offloaded chunks in the order of computation; one list element for each gradient, times in seconds.

    Attributes:
        computed: Time from the beginning of the position's backward until the gradient is computed.
        waits: Index of the earlier gradient that must have arrived on the host before the device goes on; -1: none.
        places: Position in backward at which the gradient is computed.
        add: Time for the worker to add the gradient to that of the previous micro-batch.
        update: Time for the worker, in the backward that ends a step, to step the chunk or to compute a norm.
        stepped: Chunk that is complete with this gradient, so that the worker can step it during backward; -1: none.
        buffers: Number of buffers on the host through which gradients pass; 0: gradients do not pass.
        passing: Indices of the chunks whose gradients pass.
        opens: Indices of gradients that are the first of a chunk in `passing`.
    """

    computed: list[float] = field(default_factory=list)
    download: list[float] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    cast: list[float] = field(default_factory=list)
    add: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    stepped: list[int] = field(default_factory=list)
    buffers: int = 0
    passing: set[int] = field(default_factory=set)
    opens: set[int] = field(default_factory=set)


@dataclass
class _Position:
    """The work at one segment of the profile, seconds.

    Attributes:
        compute_backward: Computation in backward, after `recompute`.
        recompute: Recomputed forward, before backward.
        rate_forward, rate_backward: Bytes per second of the uploads.
        inputs_in: Copy of a checkpointed block's inputs back to the device, before `recompute`.
        gradients: Indices of the gradients that are copied to the host in backward.
    """

    compute_forward: float
    compute_backward: float
    recompute: float = 0.0
    uploads_forward: list[Upload] = field(default_factory=list)
    uploads_backward: list[Upload] = field(default_factory=list)
    rate_forward: float = 1.0
    rate_backward: float = 1.0
    swap_out: float = 0.0
    swap_in: float = 0.0
    inputs_in: float = 0.0
    gradients: range = range(0)


@dataclass
class _Host:
    """The total work of the host's worker in one step, seconds.

    Attributes:
        cast: Casts of gradients; with accumulation, only in the first micro-batch.
        add: Additions of gradients, in each later micro-batch.
    """

    cast: float = 0.0
    add: float = 0.0
    norm: float = 0.0
    scale: float = 0.0
    step: float = 0.0


class _ChunkStep(NamedTuple):
    """The optimizer step of one offloaded chunk on the host.

    Attributes:
        position: Position at which the chunk's last gradient is computed.
        seconds: The step itself; with overlap "off" also the new low-precision copy.
    """

    position: int
    chunk: int
    seconds: float
    scale: float
    norm: float


class _NoLog:
    """A `WorkLog` that records nothing."""

    def add(self, lane: Lane, begin: float, end: float, what: str, position: int = -1) -> None:
        """Do nothing."""


class _Step:
    """The work of a plan in one step.

    Attributes:
        steps: Optimizer steps of offloaded chunks, in the order of forward.
        network: Traffic to other ranks; None if there are no other ranks.
        device_step: Device seconds for resident chunks, once a step: optimizer step, sums, norm, scaling.
        compute: Device seconds of computation in one micro-batch.
        upload: Seconds of copies to the device in one micro-batch.
        download: Seconds of copies to the host in one micro-batch.
        log: Records the work of each resource; by default nothing is recorded.
    """

    log: WorkLog | _NoLog = _NoLog()

    def __init__(self, problem: Problem, plan: Plan) -> None:
        _check(problem, plan)
        self.problem, self.plan = problem, plan
        self.positions = [_Position(*seconds) for seconds in problem.computes]
        self.host = _Host()
        self.sizes = [chunk.nbytes for chunk in plan.chunks]
        self.gradients, self.steps = _Gradients(), list[_ChunkStep]()
        self._chunk_of = {fqn: index for index, chunk in enumerate(plan.chunks) for fqn in chunk.parameters}
        self._place_uploads()
        self._place_activations()
        self._place_gradients()
        every = self.positions
        self.compute = sum(at.compute_forward + at.recompute + at.compute_backward for at in every)
        comes = [self.seconds_of(at.uploads_forward, at.rate_forward) for at in every]
        comes += [self.seconds_of(at.uploads_backward, at.rate_backward) for at in every]
        self.upload = sum(comes) + sum(at.swap_in + at.inputs_in for at in every)
        self.download = sum(at.swap_out for at in every) + sum(self.gradients.download)
        self.network = _sends(self) if problem.network is not None else None

    def seconds_of(self, chunks: Iterable[Upload], rate: float) -> float:
        """Return the duration of uploads."""
        return sum([self.sizes[chunk] for chunk, _ in chunks]) / rate

    def _place_uploads(self) -> None:
        """Set the chunks to upload at each position; if buffers run out, the least recently used chunk is evicted."""
        layout, plan, segments = self.problem.layout, self.plan, self.problem.profile.segments
        needed = offloaded_of(layout, plan.chunks)
        # The chunks of enclosing units are fetched first, and keep their buffers during the whole pass.
        pinned = {index for unit in layout.units if unit.encloses for index in needed[unit.name]}
        indices = [[index for index in needed.get(segment.unit, ()) if index not in pinned] for segment in segments]
        tables = self.problem.lookups
        read = [
            chunks[::-1] if segment.backward.operations and index not in tables else []
            for index, (segment, chunks) in enumerate(zip(segments, indices, strict=True))
        ]
        num_buffers = max(plan.num_chunk_buffers - len(pinned), 1)
        ahead, live = uploads(indices, range(len(indices)), num_buffers)
        back, _ = uploads(read, reversed(range(len(indices))), num_buffers, live)
        for at, come, come_back in zip(self.positions, ahead, back, strict=True):
            at.uploads_forward, at.uploads_backward = come, come_back
        self.positions[0].uploads_forward[:0] = [(index, -1) for index in sorted(pinned)]

    def _place_activations(self) -> None:
        """Set the swaps and recomputations of each position."""
        problem, hardware = self.problem, self.problem.hardware
        blocks = {block.name: block for block in self.plan.blocks}
        swapped, runs_again = list[int](), list[bool]()
        for at, segment, (whole, selective) in zip(
            self.positions, problem.profile.segments, problem.recomputes, strict=True
        ):
            block = blocks.get(segment.unit)
            policy = block.policy if block is not None else BlockPolicy.KEEP
            at.recompute = {BlockPolicy.CHECKPOINT: whole, BlockPolicy.SELECTIVE: selective}.get(policy, 0.0)
            swapped.append(block.swap_bytes if block is not None else 0)
            runs_again.append(policy is BlockPolicy.CHECKPOINT)
        arriving = [False] * len(swapped)
        for fqn, position in problem.gradient_positions:
            arriving[position] |= not self.plan.chunks[self._chunk_of[fqn]].resident
        # Copies in both directions at the same time slow each other down.
        near_swaps, near_arriving = _near(map(bool, swapped)), _near(arriving)
        near_uploads = _near(bool(at.uploads_forward) for at in self.positions)
        near_back = _near(
            bool(at.uploads_backward) or nbytes > 0 for at, nbytes in zip(self.positions, swapped, strict=True)
        )
        self._download_rates = [hardware.download_beside if near else hardware.download for near in near_back]
        for index, (at, nbytes) in enumerate(zip(self.positions, swapped, strict=True)):
            at.rate_forward = hardware.upload_beside if near_swaps[index] else hardware.upload
            at.rate_backward = hardware.upload_beside if near_arriving[index] else hardware.upload
            at.swap_out = nbytes / (hardware.download_beside if near_uploads[index] else hardware.download)
            back = nbytes / at.rate_backward
            at.swap_in, at.inputs_in = (0.0, back) if runs_again[index] else (back, 0.0)

    def _place_gradients(self) -> None:
        """Set the downloads of gradients, and the work that gradients cause on the host and on the device."""
        hardware, training, chunks = self.problem.hardware, self.problem.training, self.plan.chunks
        low, resident = [chunk.streamed_dtype is not None for chunk in chunks], [chunk.resident for chunk in chunks]
        numel, nbytes_of = [0] * len(chunks), [0] * len(chunks)
        places, numbers, nbytes, streamed = list[int](), list[int](), list[int](), list[int]()
        every, chunk_of = self.gradients, self._chunk_of
        for index, fqn, count, size, computed in self.problem.arriving:
            number = chunk_of[fqn]
            numel[number] += count
            nbytes_of[number] += size
            if not resident[number]:
                places.append(index)
                numbers.append(number)
                nbytes.append(size)
                streamed.append(2 * count if low[number] else size)
                every.computed.append(computed)
        every.waits, every.places = _waits(streamed), places
        layout = self.problem.layout
        if layout.passes_gradients and self.plan.gradient_buffers:
            every.buffers = self.plan.gradient_buffers
            every.passing = {number for number in numbers if not (layout.lends_copies and low[number])}
            firsts = {number: place for place, number in reversed([*enumerate(numbers)])}
            every.opens = {firsts[number] for number in every.passing}
        every.download = [size / self._download_rates[index] for index, size in zip(places, streamed, strict=True)]
        for index, at in enumerate(self.positions):  # Positions in `places` are in falling order.
            at.gradients = range(bisect_left(places, -index, key=neg), bisect_left(places, 1 - index, key=neg))
        last = {number: place for place, number in enumerate(numbers)}
        self._add_steps({number: places[place] for number, place in last.items()}, numel, nbytes_of)
        cast = add = 0.0
        for place, number in enumerate(numbers):
            add += 2 * nbytes[place] + streamed[place]
            cast += streamed[place] + nbytes[place] if low[number] else 0
            # The worker starts when the last gradient of a chunk at this position has arrived.
            ends = numbers[place + 1 : place + 2] != [number] or places[place + 1] != places[place]
            every.cast.append(cast / hardware.host_memory if ends else 0.0)
            every.add.append(add / hardware.host_memory if ends else 0.0)
            cast, add = (0.0, 0.0) if ends else (cast, add)
        every.update, every.stepped = [0.0] * len(numbers), [-1] * len(numbers)
        if training.works_in_backward:
            for step in self.steps:
                place = last[step.chunk]
                every.update[place] = step.norm if training.clips else step.seconds
                every.stepped[place] = step.chunk
        self.host.cast, self.host.add = sum(every.cast), sum(every.add)
        touched = sum([size for size, here in zip(nbytes_of, resident, strict=True) if here])
        touched *= ADD * (training.accumulate - 1) + (NORM + SCALE if training.clips else 0)
        stepped = sum([count for count, here in zip(numel, resident, strict=True) if here])
        self.device_step = stepped / hardware.device_step + touched / hardware.memory

    def _add_steps(self, positions: Mapping[int, int], numel: Sequence[int], nbytes: Sequence[int]) -> None:
        """Add the optimizer steps of offloaded chunks, from the elements and bytes of each chunk's gradients."""
        hardware, chunks = self.problem.hardware, self.plan.chunks
        # With overlap "off", low-precision copies are made after the step; otherwise the step writes them, too, and
        # shares the host's memory with copies from and to the device.
        copies = self.problem.training.overlap == "off"
        rate = hardware.host_step * (1.0 if copies else hardware.host_beside)
        for chunk, position in sorted(positions.items()):
            seconds, read = numel[chunk] / rate, nbytes[chunk] / hardware.host_memory
            if copies and chunks[chunk].streamed_dtype is not None:
                seconds += read + 2 * numel[chunk] / hardware.host_memory
            self.steps.append(_ChunkStep(position, chunk, seconds, SCALE * read, NORM * read))
        self.steps.sort()
        self.host.step = sum([step.seconds for step in self.steps])
        self.host.norm = sum([step.norm for step in self.steps])
        self.host.scale = sum([step.scale for step in self.steps])


def uploads(
    needs: Sequence[Collection[int]], order: Iterable[int], num_buffers: int, live: Iterable[int] = ()
) -> tuple[list[list[Upload]], list[int]]:
    """Return the chunks uploaded at each position, and the live chunks at the end, least recently used first.

    Args:
        needs: Chunks that each position needs.
        order: Positions in the order of the pass.
        num_buffers: Maximum number of live chunks.
        live: Live chunks at the beginning, least recently used first.
    """
    coming: list[list[Upload]] = [[] for _ in needs]
    present = dict.fromkeys(live, -1)  # Position of each live chunk's last use, least recently used first.
    for position in order:
        come = coming[position]
        for chunk in needs[position]:
            if present.pop(chunk, None) is None:
                freed = present.pop(next(iter(present))) if len(present) >= num_buffers else -1
                come.append((chunk, freed))
            present[chunk] = position
    return coming, list(present)


def _waits(sizes: Sequence[int]) -> list[int]:
    """Return the index of the gradient that each gradient waits for, see [Note: Gradients in flight]; -1: none."""
    room = sum(sorted(sizes)[-2:])
    before = [0, *accumulate(sizes)]
    waits = []
    for place, (nbytes, following) in enumerate(pairwise([*sizes, 0])):
        under_way = max(room - nbytes - following, 0)
        waits.append(bisect_left(before, before[place] - under_way) - 1)
    return waits


def _near(some: Iterable[bool]) -> list[bool]:
    """Return for each position whether it or a neighbour is true."""
    there = [False, *some, False]
    return [any(there[index : index + 3]) for index in range(len(there) - 2)]


# --- the clock --------------------------------------------------------------------------------------------------------


@dataclass
class _Ended:
    """The times at which the parts of a backward have ended, seconds.

    Attributes:
        known: Time at which the worker has processed all gradients.
        down: Time at which all copies to the host have ended.
        stepped: Time at which the host has stepped each chunk, by index; empty if it steps no chunk during backward.
    """

    computed: float
    known: float
    down: float
    stepped: dict[int, float]


# End of a backward's computation, end of its last download, and the arrival of each gradient on the host.
_Backward = tuple[float, float, list[float]]


def _beside(step: _Step) -> float:
    """Return the seconds of a step whose copies and host work overlap computation."""
    again = step.problem.training.accumulate
    back = _backward(step) if step.network is None or again > 1 else None
    ended = _ended(step, back)
    begun, stepped = _update(step, ended)
    end = _forward(step, begun, ended.down, stepped)
    if again == 1 or back is None:
        return end
    others = _other(step, back, adds=False) + (again - 2) * _other(step, back, adds=True)
    return end + (again - 1) * _forward(step, 0.0, 0.0, {}) + others


def _ended(step: _Step, back: _Backward | None) -> _Ended:
    """Return the times of the backward that ends a step; with a network they differ from `back`."""
    if step.network is not None or back is None:
        return _averaged(step)
    computed, down, arrived = back
    adds = step.problem.training.accumulate > 1
    known, stepped = _worked(step, arrived, adds=adds, ends_step=True)
    return _Ended(computed, max(down, known), down, stepped)


def _other(step: _Step, back: _Backward, adds: bool) -> float:
    """Return the end of a backward that ends no step; the worker adds its gradients if `adds`, else it casts them."""
    computed, down, arrived = back
    return max(computed, down, _worked(step, arrived, adds)[0])


def _in_turn(step: _Step) -> float:
    """Return the seconds of a step in which nothing overlaps."""
    again, host, clips = step.problem.training.accumulate, step.host, step.problem.training.clips
    forward = backward = 0.0
    for at in step.positions:
        forward += at.compute_forward + at.swap_out
        forward += step.seconds_of(at.uploads_forward, at.rate_forward)
        backward += at.recompute + at.compute_backward + at.swap_in + at.inputs_in
        backward += step.seconds_of(at.uploads_backward, at.rate_backward)
    backward += sum(step.gradients.download)
    update = host.cast + (again - 1) * host.add + host.step + (host.norm + host.scale if clips else 0.0)
    sent = step.network.sent if step.network is not None else 0.0
    return again * (forward + backward) + update + step.device_step + sent


def _log_in_turn(step: _Step, log: WorkLog) -> None:
    """Log a step in which nothing overlaps; time 0 is the beginning of a forward."""
    training, every, time = step.problem.training, step.gradients, 0.0

    def log_next(lane: Lane, seconds: float, what: str, position: int = -1) -> None:
        nonlocal time
        log.add(lane, time, time + seconds, what, position)
        time += seconds

    for number in range(training.accumulate):
        for index, at in enumerate(step.positions):
            log_next("upload", step.seconds_of(at.uploads_forward, at.rate_forward), WEIGHTS, index)
            log_next("compute", at.compute_forward, FORWARD, index)
            log_next("download", at.swap_out, SWAP_OUT, index)
        for index, at in reversed([*enumerate(step.positions)]):
            log_next("upload", step.seconds_of(at.uploads_backward, at.rate_backward), WEIGHTS, index)
            log_next("upload", at.swap_in + at.inputs_in, SWAP_IN, index)
            log_next("compute", at.recompute, RECOMPUTE, index)
            log_next("compute", at.compute_backward, BACKWARD, index)
            log_next("download", sum(every.download[gradient] for gradient in at.gradients), GRADIENTS, index)
            works, what = (every.add, ADDS) if number else (every.cast, CASTS)
            log_next("host", sum(works[gradient] for gradient in at.gradients), what, index)
    log_next("network", step.network.sent if step.network is not None else 0.0, SUMS)
    log_next("compute", step.device_step, UPDATE)
    log_next("host", step.host.norm if training.clips else 0.0, NORMS)
    for chunk_step in step.steps:
        seconds = chunk_step.seconds + (chunk_step.scale if training.clips else 0.0)
        log_next("host", seconds, UPDATE, chunk_step.position)


def _forward(step: _Step, begun: float, down: float, stepped: dict[int, float]) -> float:
    """Return the time at which a forward ends; earlier copies to the host end at `down`, chunks' steps at `stepped`."""
    sizes, ends, log = step.sizes, [NEVER] * (len(step.positions) + 1), step.log  # `ends[-1]`: no wait.
    up, out, time = begun, max(begun, down), begun
    gone = before = NEVER  # End of swap-out up to the previous position, and up to the position before that.
    for index, at in enumerate(step.positions):
        for chunk, freed in at.uploads_forward:
            starts = max(up, ends[freed], stepped.get(chunk, NEVER))
            up = starts + sizes[chunk] / at.rate_forward
            log.add("upload", starts, up, WEIGHTS, index)
        # Swapped activations of a position are freed when the next position has ended.
        start = max(time, up, before)
        time = ends[index] = start + at.compute_forward
        before = gone
        if at.swap_out > 0:
            out = max(max(out, start) + at.swap_out, time)
            gone = max(gone, out)
        log.add("compute", start, time, FORWARD, index)
        log.add("download", out - at.swap_out, out, SWAP_OUT, index)
    return max(time, before)


def _backward(step: _Step) -> _Backward:
    """Return the times of a backward that begins at 0."""
    ends, log = [NEVER] * (len(step.positions) + 1), step.log
    up = down = time = before = 0.0
    arrived, every = list[float](), step.gradients
    buffers = _GradientBuffers(every)
    for index in reversed(range(len(step.positions))):
        at, entered = step.positions[index], time
        up = _uploaded(step, index, up, ends, before)
        starts = max(entered, up)
        begins = since = starts + at.recompute
        stall = 0.0
        for number in at.gradients:
            now, wait = begins + every.computed[number] + stall, every.waits[number]
            free = max(arrived[wait] if wait >= 0 else NEVER, buffers.free_at(number))
            if free > now:
                log.add("compute", since, now, BACKWARD, index)
                stall += free - now
                now = since = free
            down = (down if down > now else now) + every.download[number]
            arrived.append(down)
            buffers.arrive(number, down)
            log.add("download", down - every.download[number], down, GRADIENTS, index)
        time = begins + at.compute_backward + stall
        log.add("compute", starts, begins, RECOMPUTE, index)
        log.add("compute", since, time, BACKWARD, index)
        if at.swap_in > 0:
            # The previous position requests these activations when it begins; they arrive in the order of use.
            up = max(up, before) + at.swap_in
            time = max(time, up)
            log.add("upload", up - at.swap_in, up, SWAP_IN, index)
        ends[index], before = time, entered
    return time, down, arrived


def _uploaded(step: _Step, index: int, up: float, ends: Sequence[float], asked: float) -> float:
    """Return the time at which the chunks and inputs that a position needs in backward have been uploaded.

    Earlier uploads end at `up`. The previous position begins, and requests the inputs, at `asked`.
    """
    at = step.positions[index]
    for chunk, freed in at.uploads_backward:
        starts = max(up, ends[freed])
        up = starts + step.sizes[chunk] / at.rate_backward
        step.log.add("upload", starts, up, WEIGHTS, index)
    if at.inputs_in > 0:
        up = max(up, asked) + at.inputs_in
        step.log.add("upload", up - at.inputs_in, up, SWAP_IN, index)
    return up


class _GradientBuffers:
    """The buffers through which gradients pass in one backward, see [Note: Gradients in flight]."""

    def __init__(self, every: _Gradients) -> None:
        self._every = every
        self._opened = 0
        self._host = 0.0  # Time at which the worker has done all work so far.
        self._freed: list[float] = []

    def free_at(self, number: int) -> float:
        """Return the time at which there is a buffer for a gradient."""
        if number not in self._every.opens:
            return NEVER
        self._opened += 1
        needed = self._opened - self._every.buffers - 1
        return self._freed[needed] if 0 <= needed < len(self._freed) else NEVER

    def arrive(self, number: int, time: float) -> None:
        """Note that a gradient has arrived; the worker steps its chunk if that is complete."""
        every = self._every
        if every.buffers:
            work = every.cast[number] + every.update[number]
            self._host = max(self._host, time) + work if work > 0 else self._host
            if every.stepped[number] in every.passing:
                self._freed.append(self._host)


def _worked(
    step: _Step, arrived: Sequence[float], adds: bool, ends_step: bool = False
) -> tuple[float, dict[int, float]]:
    """Return when the host's worker has processed a backward's gradients, and when it has stepped each chunk.

    It casts the gradients, or adds them to those of an earlier micro-batch. If the backward ends a step, it also steps
    chunks or computes norms.
    """
    every, log = step.gradients, step.log
    works = every.add if adds else every.cast
    host, stepped = 0.0, dict[int, float]()
    sorts = ends_step and step.problem.training.overlap == "backward"
    sorted_at, later = max(arrived, default=0.0), list[tuple[int, float, int]]()
    for number, (there, work) in enumerate(zip(arrived, works, strict=True)):
        update = every.update[number] if ends_step else 0.0
        chunk = every.stepped[number] if ends_step else -1
        if work + update > 0:
            starts = max(host, there)
            waits = sorts and starts >= sorted_at > there
            host = starts + work + (0.0 if waits else update)
            log.add("host", starts, starts + work, ADDS if adds else CASTS, every.places[number])
            if waits and chunk >= 0:
                later.append((chunk, update, every.places[number]))
                continue
            what = NORMS if step.problem.training.clips else UPDATE
            log.add("host", starts + work, host, what, every.places[number])
        if chunk >= 0:
            stepped[chunk] = host
    # When all gradients have arrived, chunks are stepped in the order in which the next forward needs them.
    for chunk, update, place in sorted(later):
        log.add("host", host, host + update, UPDATE, place)
        host = stepped[chunk] = host + update
    return host, stepped


def _update(step: _Step, ended: _Ended) -> tuple[float, dict[int, float]]:
    """Return when the forward after the optimizer step begins, and when the host has stepped each chunk."""
    training, begun, log = step.problem.training, ended.computed + step.device_step, step.log
    log.add("compute", ended.computed, begun, UPDATE)
    if training.overlap == "backward":
        return begun, ended.stepped
    host = ended.known
    if training.clips:
        # The total norm includes gradients on the device.
        norm = step.host.norm if training.overlap == "off" else 0.0
        log.add("host", host, host + norm, NORMS)
        host = max(host + norm, ended.computed)
    known, stepped = host, {}
    for chunk_step in step.steps:
        starts = host
        host += chunk_step.seconds + (chunk_step.scale if training.clips else 0.0)
        stepped[chunk_step.chunk] = host
        log.add("host", starts, host, UPDATE, chunk_step.position)
    return (max(begun, known), stepped) if training.overlap == "forward" else (max(begun, host), {})


# --- the network ------------------------------------------------------------------------------------------------------


@dataclass
class _Sent:
    """Durations of transfers of the gradients that backward computes at one position, seconds.

    Attributes:
        sends: True if a gradient of an offloaded chunk is computed here, which triggers the sums of earlier chunks.
        early: All-reduces of all chunks except the last one.
        late: All-reduce of the last chunk.
        down_early: Downloads of all chunks except the last one.
        down_late: Download of the last chunk.
        worked: Fraction of `work` that is for all chunks except the last one.
        resident: All-reduces of resident gradients.
        older: Uploads of the sums of earlier micro-batches.
    """

    sends: bool = False
    early: float = 0.0
    late: float = 0.0
    down_early: float = 0.0
    down_late: float = 0.0
    worked: float = 0.0
    resident: float = 0.0
    older: float = 0.0
    work: float = 0.0


@dataclass
class _Sends:
    """The traffic of a plan to other ranks in the backward that ends a step, see [Note: Sends].

    Attributes:
        held: Seconds of downloads that may be pending while the device continues.
    """

    positions: list[_Sent]
    held: float
    sent: float
    down: float = 0.0
    older: float = 0.0


def _sends(step: _Step) -> _Sends:
    problem, plan, network = step.problem, step.plan, step.problem.network
    assert isinstance(network, Network)
    hardware, last = problem.hardware, dict(reversed(problem.gradient_positions))
    sends = [_Sent() for _ in step.positions]
    # For each position, two lists of chunks, collectives, elements and bytes. The second list is that of the chunk sent
    # last, the first list has the sums over all other chunks.
    amounts = [([0, 0, 0, 0], [0, 0, 0, 0]) for _ in sends]
    resident, largest = [0] * len(sends), 0
    for chunk in plan.chunks:
        infos = [problem.layout.parameter(fqn) for fqn in chunk.parameters if fqn in last]
        if not infos:
            continue
        index, nbytes = min(last[info.fqn] for info in infos), sum(info.nbytes for info in infos)
        if chunk.resident:
            resident[index] += nbytes
            continue
        largest = max(largest, *(info.nbytes for info in infos))
        amount = amounts[index][0 if amounts[index][1][0] else 1]
        for place, more in enumerate((1, network.calls(len(infos)), sum(info.numel for info in infos), nbytes)):
            amount[place] += more
    for index, (sent, (early, late)) in enumerate(zip(sends, amounts, strict=True)):
        sent.sends = len(step.positions[index].gradients) > 0
        sent.early, sent.late = network.sum_of_chunks(*early), network.sum_of_chunks(*late)
        sent.down_early, sent.down_late = (
            amount[3] / (hardware.download_beside * network.owners) for amount in (early, late)
        )
        sent.worked = early[2] / max(early[2] + late[2], 1)
        sent.resident = network.sum_of_resident(resident[index])
        if problem.training.accumulate > 1:
            sent.older = (early[3] + late[3]) / hardware.upload_beside
    if problem.training.works_in_backward:
        for chunk_step in step.steps:
            sends[chunk_step.position].work += chunk_step.norm if problem.training.clips else chunk_step.seconds
    total = sum(sent.early + sent.late + sent.resident for sent in sends)
    down = sum(sent.down_early + sent.down_late for sent in sends)
    older = sum(sent.older for sent in sends)
    return _Sends(sends, largest / hardware.download_beside, total, down, older)


class _Sending:
    """The progress of the traffic to other ranks during a backward; times in seconds.

    Attributes:
        free: Time at which the network has sent everything so far.
        down: Time at which the downloads of all reduced chunks have ended.
        host: Time at which the worker has processed all downloaded chunks.
        stepped: Time at which the worker has processed the chunks of each position.
    """

    def __init__(self, sends: _Sends, step: _Step) -> None:
        self.free = self.down = self.host = 0.0
        self.stepped: dict[int, float] = {}
        self._sends, self._log = sends, step.log
        self._work_is = NORMS if step.problem.training.clips else UPDATE
        # The position whose chunks are complete but not sent, and the position whose last chunk is sent but not
        # downloaded.
        self._complete = self._under_way = -1
        self._sent, self._down, self._work = NEVER, 0.0, 0.0

    def complete(self, index: int, time: float) -> None:
        """Note that all gradients of a position have been computed."""
        sent = self._sends.positions[index]
        if sent.resident > 0:
            self.free = max(self.free, time) + sent.resident
            self._log.add("network", self.free - sent.resident, self.free, SUMS, index)
        if sent.early + sent.late > 0:
            self._complete = index

    def send(self, time: float) -> float:
        """Send the complete chunks, and return the time until which the device must wait."""
        if self._complete < 0:
            return NEVER
        sent, waits = self._sends.positions[self._complete], self._sent
        self._land(time)
        begun = max(self.free, time) + sent.early
        if sent.down_early > 0:
            self.down = max(self.down, begun) + sent.down_early
        first = sent.worked * sent.work
        if first > 0:
            self.host = max(self.host + first, self.down)
        self.free = begun + sent.late
        self._log.add("network", begun - sent.early, self.free, SUMS, self._complete)
        self._log.add("download", self.down - sent.down_early, self.down, GRADIENTS, self._complete)
        self._log.add("host", self.host - first, self.host, self._work_is, self._complete)
        if sent.early > 0:
            waits = max(waits, begun)
        waits = max(waits, self.down - self._sends.held)
        self._sent, self._down, self._work = self.free, sent.down_late, sent.work - first
        self._under_way, self._complete = self._complete, -1
        return waits

    def finish(self, time: float) -> None:
        """Sum the remaining gradients over the ranks after backward, then download and process the last ones."""
        self.send(time)
        self._land(time)

    def _land(self, time: float) -> None:
        if self._under_way >= 0:
            self.down = max(self.down, time, self._sent) + self._down
            self.host = max(self.host, self.down) + self._work
            self._log.add("download", self.down - self._down, self.down, GRADIENTS, self._under_way)
            self._log.add("host", self.host - self._work, self.host, self._work_is, self._under_way)
            self.stepped[self._under_way] = self.host
            self._under_way = -1


def _averaged(step: _Step) -> _Ended:
    """Return the times of a backward in which ranks average gradients, see [Note: Sends]."""
    assert step.network is not None
    ends, log = [NEVER] * (len(step.positions) + 1), step.log
    sending = _Sending(step.network, step)
    up = time = before = 0.0
    for index in reversed(range(len(step.positions))):
        at, sent, entered = step.positions[index], step.network.positions[index], time
        up = _uploaded(step, index, up, ends, before)
        gradients = step.problem.gradients[index]
        lead = gradients[0][1] * at.compute_backward if gradients else 0.0
        starts = max(entered, up)
        first = starts + at.recompute + lead
        held = sending.send(first) if sent.sends else NEVER
        time = max(first, held) + at.compute_backward - lead
        log.add("compute", starts, starts + at.recompute, RECOMPUTE, index)
        log.add("compute", starts + at.recompute, first, BACKWARD, index)
        log.add("compute", max(first, held), time, BACKWARD, index)
        for seconds, asked, what in ((sent.older, first, OLDER), (at.swap_in, before, SWAP_IN)):
            if seconds > 0:
                up = max(up, asked) + seconds
                time = max(time, up)
                log.add("upload", up - seconds, up, what, index)
        sending.complete(index, time)
        ends[index], before = time, entered
    sending.finish(time)
    stepped = {
        chunk_step.chunk: sending.stepped[chunk_step.position]
        for chunk_step in step.steps
        if chunk_step.position in sending.stepped
    }
    return _Ended(max(time, sending.free), max(sending.down, sending.host), sending.down, stepped)


def _check(problem: Problem, plan: Plan) -> None:
    """Refuse a plan that was made for another model."""
    layout = problem.layout
    parameters = {info.fqn for info in layout.parameters}
    placed = {fqn for chunk in plan.chunks for fqn in chunk.parameters}
    for kind, named, present in (
        ("plan has parameters that the model lacks", placed, parameters),
        ("model has parameters that the plan lacks", parameters, placed),
        ("plan has blocks that the model lacks", {it.name for it in plan.blocks}, {it.name for it in layout.units}),
    ):
        if unknown := sorted(named - present):
            raise ValueError(
                f"The {kind}: {', '.join(map(repr, unknown[:5]))}. The plan was made for another model: make it again "
                "for this one."
            )
