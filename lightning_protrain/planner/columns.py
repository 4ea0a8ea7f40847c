"""What a plan does at every position of a step, in seconds: the input of the clock in `planner.steptime`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import InitVar, dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.activity import Columns, Seconds
from lightning_protrain.planner.chunks import chunks_of
from lightning_protrain.planner.hostwork import ADD, NORM, SCALE, Gradients, Steps
from lightning_protrain.planner.landing import Landings
from lightning_protrain.planner.named import come_together
from lightning_protrain.planner.plan import ChunkPlan, Plan
from lightning_protrain.planner.recomputation import again_seconds
from lightning_protrain.planner.training import Training
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.records import ModelLayout, ModelProfile, ParameterInfo, Segment


@dataclass(frozen=True)
class Traffic:
    """Chunks that come in one pass, at each position.

    Attributes:
        nbytes: Of the chunks that the position needs and that are not there.
        late: Of those among them whose buffers are in use until `waits`.
        waits: Position whose computation must have ended before them, -1: none.
        live: Chunks that are there at the end, the one whose last use is longest ago first.
        comes: All that come, in order: the position that each comes for, and the chunk.
    """

    nbytes: tuple[int, ...]
    late: tuple[int, ...]
    waits: tuple[int, ...]
    live: tuple[int, ...]
    comes: tuple[tuple[int, int], ...]


def traffic(
    needs: Sequence[Collection[int]],
    order: Iterable[int],
    sizes: Sequence[int],
    num_buffers: int,
    live: Iterable[int] = (),
) -> Traffic:
    """What has to come if a chunk stays until `num_buffers` others have been needed since.

    Args:
        needs: Chunks that each position needs.
        order: Positions in the order in which the pass goes through them.
        sizes: Bytes of each chunk.
        num_buffers: How many chunks may be there at one time.
        live: What is there at the beginning, the one whose last use is longest ago first.
    """
    nbytes, late, waits = [0] * len(needs), [0] * len(needs), [-1] * len(needs)
    comes: list[tuple[int, int]] = []
    present: dict[int, int] = dict.fromkeys(live, -1)  # and the position of the last use, the longest ago first
    for position in order:
        for chunk in needs[position]:
            if chunk in present:
                del present[chunk]
            else:
                freed = present.pop(next(iter(present))) if len(present) >= num_buffers else -1
                if freed != waits[position]:
                    late[position], waits[position] = 0, freed
                comes.append((position, chunk))
                nbytes[position] += sizes[chunk]
                late[position] += sizes[chunk]
            present[chunk] = position
    return Traffic(tuple(nbytes), tuple(late), tuple(waits), tuple(present), tuple(comes))


def tails_of(
    ups: Traffic, sizes: NDArray[np.int64], steps: Steps, hardware: HardwareProfile, training: Training
) -> Seconds:
    """What `Steps.tails` says of the first upload for each position; 0 where there is none, (2, P)."""
    positions, chunks = np.array(ups.comes, dtype=np.int64).reshape(-1, 2).T
    found = steps.tails(positions, chunks, sizes[chunks], hardware, training)
    places = np.arange(len(ups.nbytes))
    first = np.searchsorted(positions, places)
    return np.where(np.isin(places, positions), found[:, first], 0.0)


def columns_of(
    profile: ModelProfile,
    layout: ModelLayout,
    plan: Plan,
    hardware: HardwareProfile,
    training: Training,
) -> Columns:
    """The one column of a plan.

    Args:
        profile: One step with its backward.
        layout: The model.
        plan: A whole plan.
        hardware: The machine.
        training: How the plan is used.

    Raises:
        ValueError: The profile has no segments, or is one of another model than the layout or the plan; or the rate of
            the machine for a dtype is not known.
    """
    _check(profile, layout, plan)
    blocks = {block.name: block for block in plan.blocks}
    own = [blocks.get(segment.unit) for segment in profile.segments]
    swapped = _column(block.swap_bytes if block else 0 for block in own)
    again = _column(
        again_seconds(segment, block.policy, hardware) if block else 0.0
        for segment, block in zip(profile.segments, own, strict=True)
    )
    forward = _column(hardware.seconds(segment.forward.operations) for segment in profile.segments)
    backward = _column(hardware.seconds(segment.backward.operations) for segment in profile.segments)
    ups, backs = _streams(profile, layout, plan)
    landing = _landing(profile, layout, plan)
    download, upload, upload_again = _column(landing.nbytes), _column(ups.nbytes), _column(backs.nbytes)
    # A link that is busy in both directions is slower in each.
    rate_forward = np.where(_near(swapped), hardware.upload_beside, hardware.upload)
    rate_out = np.where(_near(upload), hardware.download_beside, hardware.download)
    rate_backward = np.where(_near(download), hardware.upload_beside, hardware.upload)
    rate_download = np.where(_near(upload_again + swapped), hardware.download_beside, hardware.download)
    gradients, parts = _gradients(profile, layout, plan)
    works = gradients.works(hardware, training)
    stall, drain, landed, carry, ready, ready_behind = _holding(gradients, parts, works, backward[:, 0], rate_download)
    tail = upload / rate_forward
    if training.overlap == "forward":
        tail = _tails(layout, plan, ups, gradients, hardware, training, rate_forward)
    return Columns(
        compute_forward=forward,
        recompute=again,
        compute_backward=backward,
        upload_forward=upload / rate_forward,
        late_forward=_column(ups.late) / rate_forward,
        wait_forward=np.array(ups.waits)[:, None],
        upload_backward=upload_again / rate_backward,
        late_backward=_column(backs.late) / rate_backward,
        wait_backward=np.array(backs.waits)[:, None],
        download=download / rate_download,
        stall=stall,
        drain=drain,
        landed=landed,
        carry=carry,
        ready=ready,
        ready_behind=ready_behind,
        land=_column(landing.cast_bytes) / hardware.host_memory,
        add=_column(landing.sum_bytes) / hardware.host_memory,
        norm=NORM * _column(landing.stepped_bytes) / hardware.host_memory,
        scale=SCALE * _column(landing.stepped_bytes) / hardware.host_memory,
        # Who steps chunk by chunk writes their copies, too; else they are made afterwards.
        host_step=_column(landing.stepped) / hardware.host_step
        + (training.overlap == "off") * _column(landing.copy_bytes) / hardware.host_memory,
        tail=tail,
        swap_out=swapped / rate_out,
        swap_in=swapped / rate_backward,
        device_step=np.array([_on_device(landing.resident, hardware, training)]),
    )


def _column(values: Iterable[float]) -> Seconds:
    return np.array([float(value) for value in values])[:, None]


def _near(amounts: Seconds) -> NDArray[np.bool_]:
    """Where a position or a neighbour of it has some."""
    some = np.pad(amounts[:, 0] > 0, 1)
    near: NDArray[np.bool_] = (some[:-2] | some[1:-1] | some[2:])[:, None]
    return near


def _streams(profile: ModelProfile, layout: ModelLayout, plan: Plan) -> tuple[Traffic, Traffic]:
    """What comes in forward and in backward."""
    sizes = [chunk.nbytes for chunk in plan.chunks]
    needed = {
        name: [index for index in indices if not plan.chunks[index].resident]
        for name, indices in chunks_of(layout, plan.chunks).items()
    }
    pinned = _pinned(layout, plan)
    tables = {unit.name for unit in layout.units if not unit.is_block and _has_tables_only(layout, unit.parameters)}
    needs, reads = [], []
    for segment in profile.segments:
        chunks = [index for index in needed.get(segment.unit, ()) if index not in pinned]
        looks_up = segment.unit in tables and not any(cost.flops for cost in segment.forward.operations)
        needs.append(chunks)
        reads.append(chunks[::-1] if segment.backward.operations and not looks_up else [])
    num_buffers = max(plan.num_chunk_buffers - len(pinned), 1)
    forward = traffic(needs, range(len(needs)), sizes, num_buffers)
    backward = traffic(reads, reversed(range(len(reads))), sizes, num_buffers, forward.live)
    first = sum(sizes[index] for index in pinned)
    return replace(forward, nbytes=(forward.nbytes[0] + first, *forward.nbytes[1:])), backward


def _pinned(layout: ModelLayout, plan: Plan) -> set[int]:
    """Offloaded chunks of units around others: these come first, and take their buffers for the whole pass."""
    around = {unit.name for unit in layout.units if unit.encloses}
    needed = chunks_of(layout, plan.chunks)
    return {index for name in around for index in needed[name] if not plan.chunks[index].resident}


def _has_tables_only(layout: ModelLayout, names: Iterable[str]) -> bool:
    """Whether all parameters may be tables to look things up in, which no backward reads: they are no vectors."""
    return all(len(layout.parameter(fqn).shape) > 1 for fqn in names)


@dataclass
class _Landing:
    """What becomes of gradients at each position.

    Attributes:
        nbytes: Of the gradients of offloaded chunks that become whole.
        cast_bytes: Bytes read and written to cast them for the host.
        sum_bytes: To add them to older ones.
        stepped: Elements of the chunks that can be stepped.
        stepped_bytes: Bytes of their gradients on the host.
        copy_bytes: Bytes read and written to make what is streamed of them.
        resident: Parameters of resident chunks that have gradients.
    """

    num_positions: InitVar[int]
    resident: list[ParameterInfo] = field(default_factory=list)
    nbytes: list[int] = field(init=False)
    cast_bytes: list[int] = field(init=False)
    sum_bytes: list[int] = field(init=False)
    stepped: list[int] = field(init=False)
    stepped_bytes: list[int] = field(init=False)
    copy_bytes: list[int] = field(init=False)

    def __post_init__(self, num_positions: int) -> None:
        """Nothing as yet."""
        self.nbytes, self.cast_bytes, self.sum_bytes = ([0] * num_positions for _ in range(3))
        self.stepped, self.stepped_bytes, self.copy_bytes = ([0] * num_positions for _ in range(3))


def _landing(profile: ModelProfile, layout: ModelLayout, plan: Plan) -> _Landing:
    found = _Landing(len(profile.segments))
    placed = {fqn: (index, chunk) for index, chunk in enumerate(plan.chunks) for fqn in chunk.parameters}
    last: dict[int, int] = {}
    for position, segment in reversed(list(enumerate(profile.segments))):
        for fqn in segment.gradients:
            info, (index, chunk) = layout.parameter(fqn), placed[fqn]
            if chunk.resident:
                found.resident.append(info)
                continue
            last[index] = position
            nbytes = _streamed_bytes(info, chunk)
            found.nbytes[position] += nbytes
            found.cast_bytes[position] += (nbytes + info.nbytes) if chunk.streamed_dtype else 0
            found.sum_bytes[position] += 2 * info.nbytes + nbytes
    for segment in profile.segments:
        for fqn in segment.gradients:
            info, (index, chunk) = layout.parameter(fqn), placed[fqn]
            if not chunk.resident:
                found.stepped[last[index]] += info.numel
                found.stepped_bytes[last[index]] += info.nbytes
                found.copy_bytes[last[index]] += info.nbytes + 2 * info.numel if chunk.streamed_dtype else 0
    return found


def _gradients(profile: ModelProfile, layout: ModelLayout, plan: Plan) -> tuple[Gradients, Seconds]:
    """Those of offloaded chunks in the order in which they land, and which part of its position each comes after."""
    placed = {fqn: (index, chunk) for index, chunk in enumerate(plan.chunks) for fqn in chunk.parameters}
    found = [
        (position, index, info.numel, info.nbytes, _streamed_bytes(info, chunk), bool(chunk.streamed_dtype), part)
        for position, segment in reversed(list(enumerate(profile.segments)))
        for fqn, part in zip(segment.gradients, _parts(layout, segment), strict=True)
        for info, (index, chunk) in [(layout.parameter(fqn), placed[fqn])]
        if not chunk.resident
    ]
    positions, chunks, numel, own, streamed, low = np.array(found, dtype=np.int64).reshape(-1, 7).T[:6]
    gradients = Gradients(positions, chunks, numel, own, streamed, low.astype(np.bool_))
    return gradients, np.array([entry[-1] for entry in found])


def _holding(
    gradients: Gradients, parts: Seconds, works: Seconds, computes: Seconds, rates: Seconds
) -> tuple[Seconds, ...]:
    """What `Landings.of` says, each position at its rate of downloads, six times (P, 1)."""
    room = np.sort(gradients.streamed)[-2:].sum(keepdims=True)
    known = np.unique(rates)
    each = gradients.positions, gradients.chunks, gradients.streamed, parts, works
    landings = Landings(*each, computes, tuple(known.tolist()))
    at_rates = landings.of(np.zeros_like(room), room, np.zeros(1, dtype=np.bool_))
    durations = at_rates[np.searchsorted(known, rates[:, 0]), :, np.arange(len(rates))]
    return tuple(durations.swapaxes(0, 1))


def _tails(
    layout: ModelLayout,
    plan: Plan,
    ups: Traffic,
    gradients: Gradients,
    hardware: HardwareProfile,
    training: Training,
    rates: Seconds,
) -> Seconds:
    """What `tails_of` says, each position at its rate of uploads, (P, 1)."""
    sizes = np.array([chunk.nbytes for chunk in plan.chunks], dtype=np.int64)
    alone, beside = tails_of(ups, sizes, gradients.steps(len(sizes)), hardware, training)
    found = np.where(rates == hardware.upload_beside, beside[:, None], alone[:, None])
    found[0] += sum(int(sizes[index]) for index in _pinned(layout, plan)) / rates[0]
    return found


def _parts(layout: ModelLayout, segment: Segment) -> list[float]:
    return come_together(segment.gradients, [layout.parameter(fqn).numel for fqn in segment.gradients])


def _streamed_bytes(info: ParameterInfo, chunk: ChunkPlan) -> int:
    return 2 * info.numel if chunk.streamed_dtype else info.nbytes


def _on_device(resident: Sequence[ParameterInfo], hardware: HardwareProfile, training: Training) -> float:
    """Seconds of what the device does once in a step with resident chunks, beside forwards and backwards."""
    nbytes = sum(info.nbytes for info in resident)
    touched = nbytes * (ADD * (training.accumulate - 1) + (NORM + SCALE if training.clips else 0))
    return sum(info.numel for info in resident) / hardware.device_step + touched / hardware.memory


def _check(profile: ModelProfile, layout: ModelLayout, plan: Plan) -> None:
    if not profile.segments:
        raise ValueError(
            "The profile has no segments: the step that was profiled ran no backward. Profile a training step whose "
            "output is a loss that requires a gradient (`profile_model`)."
        )
    parameters = {info.fqn for info in layout.parameters}
    gradients = {fqn for segment in profile.segments for fqn in segment.gradients}
    for kind, named, present in (
        ("profile has units", {segment.unit for segment in profile.segments} - {""}, {u.name for u in layout.units}),
        ("profile has parameters", gradients, parameters),
        ("plan has parameters", {fqn for chunk in plan.chunks for fqn in chunk.parameters}, parameters),
        (
            "model has parameters that the plan lacks:",
            parameters,
            {f for chunk in plan.chunks for f in chunk.parameters},
        ),
        ("plan has blocks", {block.name for block in plan.blocks}, {unit.name for unit in layout.units}),
    ):
        unknown = sorted(named - present)
        if unknown:
            raise ValueError(
                f"The {kind} that are not in the model ({', '.join(map(repr, unknown[:5]))}). It was made for another "
                "model: make it again for this one."
            )
