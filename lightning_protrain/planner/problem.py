"""What the search decides over: the model, the machine and the budgets, and one way to pack the model into chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.candidates import Candidates
from lightning_protrain.planner.chunks import chunks_of, pack_chunks, with_residency
from lightning_protrain.planner.footprint import Footprint
from lightning_protrain.planner.named import Named, come_together
from lightning_protrain.planner.network import Network
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, Plan
from lightning_protrain.planner.policies import Recomputation, lay_out, order_steps, swap_interval, swap_places
from lightning_protrain.planner.recomputation import durations
from lightning_protrain.planner.sizes import Sizes
from lightning_protrain.planner.sums import Sums
from lightning_protrain.planner.training import Training
from lightning_protrain.planner.unexercised import Reserve, without_gradients
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.records import ModelLayout, ModelProfile, ParameterInfo, Segment

Integers = NDArray[np.int64]
# Sizes of chunks to try beside whole units (S_chunk; paper, appendix B.1).
CHUNK_BYTES = (None, 256 << 20, 128 << 20, 64 << 20, 32 << 20)


@dataclass(frozen=True)
class Problem:
    """What a plan is searched for.

    Attributes:
        profile: One step with its backward.
        layout: The model.
        hardware: The machine.
        training: How the training loop uses the plan.
        state_bytes: Bytes of optimizer states (and master copies) for each trainable element.
        device_bytes: What the device may hold at its peak, activations included; None: no limit. Negative: what is
            reserved beside it does not even fit.
        host_bytes: What the host may hold for this plan; None: no limit.
        alpha: Fragmentation factor for activations, as in `memory_timeline`.
        foreach: Whether the optimizer steps all resident parameters at once.
        chunk_bytes: Sizes of chunks to try; None: no limit but the unit.
        checkpoint_copy: Bytes of the host for the copy of a checkpoint that is written behind the training.
        sharers: Ranks of the machine that share one copy of what is offloaded; `host_bytes` are for all of them.
        network: How gradients are summed over ranks; None: there is one, or it is not known.
        reserved: Bytes that the device holds beside `device_bytes`, for gradients that are summed over ranks.

    Raises:
        ValueError: The profile is of another model than the layout, or has no backward.
    """

    profile: ModelProfile
    layout: ModelLayout
    hardware: HardwareProfile
    training: Training
    state_bytes: float
    device_bytes: int | None
    host_bytes: int | None
    alpha: float = 1.0
    foreach: bool = False
    chunk_bytes: tuple[int | None, ...] = field(default=CHUNK_BYTES)
    checkpoint_copy: int = 0
    sharers: int = 1
    network: Network | None = None
    reserved: int = 0

    def __post_init__(self) -> None:
        """Refuses a profile of another model."""
        if not self.profile.segments:
            raise ValueError(
                "The profile has no backward, so neither time nor memory of a plan can be told. Profile a training "
                "step that returns the loss."
            )
        names = {info.fqn for info in self.layout.parameters}
        units = {unit.name for unit in self.layout.units}
        for kind, named, present in (
            ("units", {segment.unit for segment in self.profile.segments} - {""}, units),
            ("units", {call.name for call in self.profile.calls}, units | {""}),
            ("parameters", {fqn for segment in self.profile.segments for fqn in segment.gradients}, names),
            ("parameters", {use.fqn for use in self.profile.parameters}, names),
        ):
            if unknown := sorted(named - present):
                raise ValueError(
                    f"The profile has {kind} that the model has not ({', '.join(map(repr, unknown[:5]))}): it is one "
                    "of another model. Profile this one."
                )

    @cached_property
    def computes(self) -> list[tuple[float, float]]:
        """Seconds of the device at each segment, in forward and in backward."""
        return [(each.forward, each.backward) for each in durations(self.profile.segments, self.hardware)]

    @cached_property
    def recomputes(self) -> list[tuple[float, float]]:
        """Seconds of the device to run each segment again, as a whole and but for its products."""
        return [(each.recomputed, each.selective) for each in durations(self.profile.segments, self.hardware)]

    @cached_property
    def gradients(self) -> list[list[tuple[ParameterInfo, float]]]:
        """The gradients of each segment in order, and the part of its backward that has been computed at each."""
        infos = [[self.layout.parameter(fqn) for fqn in segment.gradients] for segment in self.profile.segments]
        return [
            list(zip(own, come_together([it.fqn for it in own], [it.numel for it in own]), strict=True))
            for own in infos
        ]

    @cached_property
    def gradient_positions(self) -> list[tuple[str, int]]:
        """First names of the parameters that get gradients, and the index of the segment of each."""
        return [(fqn, index) for index, one in enumerate(self.profile.segments) for fqn in one.gradients]

    @cached_property
    def segment_facts(self) -> SegmentFacts:
        """What the memory model reads of the profile, whatever the plan."""
        return SegmentFacts(self)

    @cached_property
    def lookups(self) -> frozenset[int]:
        """Indices of segments that only look up tables, which no backward reads: their parameters are no vectors."""
        shapes = {info.fqn: info.shape for info in self.layout.parameters}
        tables = {
            unit.name
            for unit in self.layout.units
            if not unit.is_block and all(len(shapes[fqn]) > 1 for fqn in unit.parameters)
        }
        return frozenset(
            index
            for index, segment in enumerate(self.profile.segments)
            if segment.unit in tables and not any(cost.flops for cost in segment.forward.operations)
        )


def casts_of(segment: Segment, names: frozenset[str]) -> int:
    """Return the bytes of copies of the parameters `names` that a segment saves."""
    return sum(nbytes for fqn, nbytes in segment.casts if fqn in names)


class SegmentFacts:
    """What the memory model reads of a profile, whatever the plan; lists have an element for each segment.

    Args:
        problem: The problem.

    Attributes:
        block: Index among the blocks of the layout; None outside.
        previous: Index of the latest segment of a block before; None if there is none.
        castable: Bytes of copies that are not made if all weights that can come in the dtype in which they are used do.
        shared_held: As `held_bytes` where an earlier segment of the same list was given as much, else 0.
        lists: The first segment of each list of blocks that share what they are given, and those that share it.
        reserve: Estimates for blocks that did not run.
        never: Parameters that get no gradient, whatever the batch.
    """

    def __init__(self, problem: Problem) -> None:
        segments, layout = problem.profile.segments, problem.layout
        index_of = {block.name: index for index, block in enumerate(layout.blocks)}
        self.block = [None if one.between else index_of.get(one.unit) for one in segments]
        self.previous: list[int | None] = []
        latest = None
        for index, block in enumerate(self.block):
            self.previous.append(latest)
            latest = index if block is not None else latest
        self.castable = [casts_of(one, layout.low) for one in segments]
        self.only_castable = [layout.low.issuperset(dict(one.casts)) for one in segments]
        most: dict[str, int] = {}
        self.shared_held = []
        lists: dict[str, list[int]] = {}
        names = [one.unit.rpartition(".")[0] for one in segments]
        for index, (name, one) in enumerate(zip(names, segments, strict=True)):
            shared = 0 < one.held_bytes <= most.get(name, 0)
            self.shared_held.append(one.held_bytes if shared else 0)
            most[name] = max(most.get(name, 0), one.held_bytes)
            if shared:
                lists.setdefault(name, []).append(index)
        self.lists = [(names.index(name), frozenset(sharing)) for name, sharing in lists.items()]
        self.reserve = Reserve.of(problem.profile, layout)
        self.never = without_gradients(problem.profile, layout)


class Unpacked:
    """What all ways of packing have in common.

    Args:
        problem: The problem.
        num_swap: So many blocks must be able to swap; None: as many as transfers can be hidden for.
        selective: Whether blocks may keep their products alone.

    Attributes:
        named: What the profile says of parameters.
        forward: Seconds of the device in the forward of each segment.
        recomputed: The same when it runs again.
        selective: That, but for its products.
        backward: The same in its backward.
        places: Blocks that may swap, in the order in which they are taken.
        steps: What blocks give up, in that order, see [Note: Layout of policies].
    """

    def __init__(self, problem: Problem, num_swap: int | None, selective: bool) -> None:
        self.named = Named.of(problem.profile, problem.layout)
        each = durations(problem.profile.segments, problem.hardware)
        self.forward, self.recomputed, self.selective, self.backward = map(list, zip(*each, strict=True))
        computes = _of_blocks(problem, self.forward)
        self.places = _places(problem, computes, num_swap)
        # A kernel that cannot be traced may write to a product, and neither autograd nor a profile is told.
        selective = selective and not problem.profile.measured
        self.steps = order_steps(_recomputations(problem, self.recomputed, self.selective if selective else None))


class Packing:
    """The model in chunks of one size, and what plans over them take.

    Args:
        problem: The problem.
        chunk_bytes: The most bytes of a chunk; None: no limit.
        num_swap: As in `Unpacked`.
        unpacked: What other ways of packing have in common with this one, if it is known.
        selective: As in `Unpacked`.

    Attributes:
        chunk_bytes: As given.
        chunks: All chunks, offloaded.
        places: As in `Unpacked`.
        steps: As in `Unpacked`.
    """

    def __init__(
        self,
        problem: Problem,
        chunk_bytes: int | None,
        num_swap: int | None,
        unpacked: Unpacked | None = None,
        selective: bool = True,
    ) -> None:
        self.problem, self.chunk_bytes = problem, chunk_bytes
        self.chunks = pack_chunks(problem.layout, chunk_bytes)
        self._unpacked = unpacked or Unpacked(problem, num_swap, selective)
        self.places, self.steps = self._unpacked.places, self._unpacked.steps
        self._needed = chunks_of(problem.layout, self.chunks)
        # The last chunk that each block needs: without it resident the block is streamed.
        last = [max(self._needed[block.name], default=-1) for block in problem.layout.blocks]
        self._last_chunk = np.array([*last, -1], dtype=np.int64)

    @cached_property
    def sizes(self) -> Sizes:
        """Of the chunks and what is in them."""
        return Sizes.of(self.chunks, self._unpacked.named.parameters)

    @cached_property
    def candidates(self) -> Candidates:
        """What takes how long."""
        problem = self.problem
        it = self._unpacked
        computes = it.forward, it.recomputed, it.selective, it.backward
        known = problem.hardware, problem.training
        return Candidates(problem.profile, problem.layout, it.named, self._needed, self.sizes, computes, *known)

    @cached_property
    def sums(self) -> Sums | None:
        """What is sent to other ranks, and how long that takes; None: there are none."""
        problem = self.problem
        if problem.network is None:
            return None
        known = problem.hardware, problem.training.accumulate > 1, problem.network
        return Sums(problem.profile, problem.layout, self.chunks, *known)

    @cached_property
    def footprint(self) -> Footprint:
        """What takes how much memory."""
        problem = self.problem
        return Footprint(
            problem.profile,
            problem.layout,
            self._unpacked.named,
            self.chunks,
            self._needed,
            self.sizes,
            self.places,
            self.steps,
            problem.hardware,
            problem.state_bytes,
            problem.training.accumulate,
            problem.alpha,
            problem.foreach,
            problem.checkpoint_copy,
            problem.sharers,
        )

    def keeps(self, num_swap: Integers, num_steps: Integers, persistent: Integers) -> Integers:
        """How many blocks with offloaded chunks keep their activations, (K,)."""
        others = self.footprint.swaps(num_swap) | self.footprint.recomputes(num_swap, num_steps)
        streamed = self._last_chunk[:, None] >= persistent
        keeps: Integers = (streamed & ~others).sum(axis=0)
        return keeps

    def plan(self, num_swap: int, num_steps: int, persistent: int, buffers: int) -> Plan:
        """The plan of these decisions."""
        layout = self.problem.layout
        resident = (with_residency(layout, chunk, True) for chunk in self.chunks[:persistent])
        chunks = (*resident, *self.chunks[persistent:])
        policies = lay_out(len(layout.blocks), self.steps, self.places[:num_swap], num_steps)
        swapped = self.footprint.swap_bytes[:-1, persistent].tolist()
        blocks = tuple(
            BlockPlan(block.name, policy, nbytes if policy is BlockPolicy.SWAP else 0)
            for block, policy, nbytes in zip(layout.blocks, policies, swapped, strict=True)
        )
        return Plan(
            chunks=chunks,
            blocks=blocks,
            num_chunk_buffers=buffers,
            memory=self.footprint.terms(num_swap, persistent, buffers),
            shapes={info.fqn: info.shape for info in layout.parameters},
        )


def _recomputations(
    problem: Problem, recomputed: Sequence[float], selective: Sequence[float] | None
) -> list[Recomputation]:
    """What each block takes to compute again, given the seconds of each segment; None: only as a whole."""
    segments = problem.profile.segments
    # Copies of weights are not there where the weights are streamed.
    saved = [it.checkpoint_saving - sum(nbytes for _, nbytes in it.casts) for it in segments]
    values = [recomputed, saved]
    if selective is not None:
        pairs = zip(segments, saved, selective, recomputed, strict=True)
        values += [selective, [_left(*each) for each in pairs]]
    return [Recomputation(*each) for each in zip(*(_of_blocks(problem, value) for value in values), strict=True)]


def _left(segment: Segment, saved: int, selective: float, recomputed: float) -> float:
    """What is free of `saved` bytes if products are kept; if that cannot be, the block of the segment cannot do it."""
    products = segment.product_bytes
    return -inf if products is None or products > saved or selective > recomputed else saved - products


def _of_blocks(problem: Problem, values: Iterable[float]) -> list[float]:
    """Sums of what segments take, over those of each block."""
    sums = dict.fromkeys((block.name for block in problem.layout.blocks), 0.0)
    for segment, value in zip(problem.profile.segments, values, strict=True):
        if segment.unit in sums:
            sums[segment.unit] += value
    return list(sums.values())


def _places(problem: Problem, computes: Sequence[float], num_swap: int | None) -> tuple[int, ...]:
    """Blocks that may swap: so far apart that what one swaps is hidden behind those up to the next."""
    names = [block.name for block in problem.layout.blocks]
    swapped = problem.profile.swap_bytes(problem.layout.low)
    nbytes = [max(swapped.get(name, 0), 0) for name in names]
    able = [bool(name) and size > 0 for name, size in zip(names, nbytes, strict=True)]
    rate = min(problem.hardware.upload, problem.hardware.download)
    transfers = [size / rate if can else 0.0 for size, can in zip(nbytes, able, strict=True)]
    return swap_places(able, swap_interval(transfers, computes), num_swap)
