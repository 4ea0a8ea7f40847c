"""The problem of a plan search: the model, the hardware, the training loop and the budgets.

Also estimates memory for blocks that the profiled batch did not run. A batch of text alone does not run a vision tower,
but the next batch may, unless the data says that it has no media. The planner scales the saved bytes, peak and input of
the most demanding block that ran, in proportion to the bytes of weights. All blocks that did not run count as saved at
the same time if they keep activations, and one of these blocks counts as running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import ceil
from typing import Any, Literal, NamedTuple

from lightning_protrain.planner.network import Network
from lightning_protrain.planner.plan import BlockPolicy, chunk_offsets
from lightning_protrain.planner.replay import (
    Footprint,
    checkpoint_saving,
    footprint,
    recomputed,
    recomputed_beside_products,
    rise,
)
from lightning_protrain.profiler.gpu_specs import CALIBRATION
from lightning_protrain.profiler.records import (
    HardwareProfile,
    ModelLayout,
    ModelProfile,
    ParameterInfo,
    Segment,
    UnitInfo,
)

# Chunk sizes to try; None is one chunk for each unit and kind of parameter (S_chunk; paper, appendix B.1).
CHUNK_BYTES = (None, 256 << 20, 128 << 20, 64 << 20, 32 << 20)
# Seconds of Python for each operation of a block that keeps its products, because PyTorch then intercepts every
# operation. Measured on one slow core. The device waits only if Python takes longer than the operation.
WATCHED = 25e-6
# Ratio of reserved to allocated bytes of a caching allocator (alpha in the paper, equation 11), until it is measured.
# A factor below 1 would leave no margin, so for 4-bit weights it is the least margin and not an estimate.
ALPHA, ALPHA_4BIT = 1.10, 1.05


@dataclass(frozen=True)
class Training:
    """The training loop.

    Attributes:
        overlap: When the host steps offloaded chunks: after backward (`"off"`), during backward (`"backward"`), or
            during the next forward (`"forward"`).
        accumulate: Number of micro-batches in a step.
        clips: True if gradients are clipped by their total norm.
        evaluates: True if the run has validation batches.

    Raises:
        ValueError: The overlap is unknown, `accumulate` is below 1, or gradients are clipped by norm although the host
            steps them during backward, before the norm is known.
    """

    overlap: Literal["off", "backward", "forward"] = "off"
    accumulate: int = 1
    clips: bool = False
    evaluates: bool = True

    def __post_init__(self) -> None:
        """Check the values."""
        if self.overlap not in ("off", "backward", "forward"):
            raise ValueError(f"overlap={self.overlap!r}: give 'off', 'backward' or 'forward'.")
        if self.accumulate < 1:
            raise ValueError(f"accumulate_grad_batches={self.accumulate}: give at least 1.")
        if self.clips and self.overlap == "backward":
            raise ValueError(
                "overlap='backward' cannot clip gradients: it steps chunks before their norm is known. Give 'forward'."
            )

    @property
    def works_in_backward(self) -> bool:
        """True if the host's worker steps chunks, or computes norms of gradients, during backward."""
        return self.overlap == "backward" or (self.overlap == "forward" and self.clips)


def alpha_for_dtype(dtype: str) -> float:
    """Return the fragmentation factor for weights of `dtype`, such as `"bfloat16"` or `"uint8"`.

    Weights of 4 bits are packed into `uint8`.
    """
    assumed = ALPHA_4BIT if dtype == "uint8" else ALPHA
    measured: float = CALIBRATION["alpha"].get(dtype, assumed)
    return measured


def layout_alpha(layout: ModelLayout) -> float:
    """Return the fragmentation factor of a model: the mean over its weights by bytes; 1.0 if it has no weights.

    Weighting by bytes keeps a few bfloat16 normalization layers from changing the factor of a 4-bit model much.
    """
    weights = [(alpha_for_dtype(info.dtype), info.nbytes) for info in layout.parameters]
    nbytes = sum(size for _, size in weights)
    return sum(alpha * size for alpha, size in weights) / nbytes if nbytes else 1.0


@dataclass(frozen=True)
class Workload:
    """The model and its training, independent of the hardware.

    Attributes:
        layout: The model, including which parameters are streamed in `low_dtype`.
        profile: Profile of a training step; None if it is unknown, or the plan does not depend on it.
        streamed: Names of the parameters that are streamed in `low_dtype`.
        low_dtype: Two-byte dtype in which autocast computes; None without autocast.
        state_bytes: Bytes of optimizer states (and master copies) for each trainable element.
        training: The training loop; None if nothing is trained.
        foreach: True if the device's optimizer steps all parameters at once, with temporaries.
        host_slowdown: Time of the optimizer step on the host as a multiple of the time of PyTorch's fused AdamW.
        copied_bytes: Host memory for copies of states that callbacks keep, on one rank of a node, bytes.
        host_step_refusal: Reason why no chunk can be offloaded: the optimizer cannot step on the host. Empty if it can.
        measured_alpha: Measured fragmentation factor; None: use the default for the dtypes.
        optimizers: Full names of the classes of the optimizers.
        clipping_keeps: True if gradients could pass, see [Note: Gradients in passing], were they not clipped by norm.
    """

    layout: ModelLayout
    profile: ModelProfile | None = None
    streamed: frozenset[str] = frozenset()
    low_dtype: str | None = None
    state_bytes: float = 0.0
    training: Training | None = None
    foreach: bool = False
    host_slowdown: float = 1.0
    copied_bytes: int = 0
    host_step_refusal: str = ""
    measured_alpha: float | None = None
    optimizers: tuple[str, ...] = ()
    clipping_keeps: bool = False

    @property
    def has_plain_optimizers(self) -> bool:
        """True if all optimizers are PyTorch's: their states have the dtype of the weights, and FSDP2 takes them."""
        return all(name.startswith("torch.optim.") for name in self.optimizers)

    @property
    def accumulate(self) -> int:
        """Number of micro-batches in a step."""
        return self.training.accumulate if self.training is not None else 1

    @property
    def alpha(self) -> float:
        """Fragmentation factor of a GPU's allocator, as in `memory_timeline`."""
        return layout_alpha(self.layout) if self.measured_alpha is None else self.measured_alpha

    def profiled(self, profile: ModelProfile | None, streamed: frozenset[str]) -> Workload:
        """Return the workload with the profile of its step, and with these parameters streamed in `low_dtype`."""
        layout = self.layout if self.low_dtype is None else self.layout.streaming(streamed, self.low_dtype)
        return replace(self, layout=layout, profile=profile, streamed=streamed)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(info.nbytes for info in self.layout.parameters)

    @property
    def swap_bytes(self) -> Mapping[str, int] | None:
        """Bytes that each block swaps, by block name; None if unknown."""
        return self.profile.swap_bytes(self.streamed) if self.profile is not None else None


@dataclass(frozen=True)
class Problem:
    """The problem that a search solves.

    Attributes:
        profile: Profile of one step with its backward.
        layout: The model.
        hardware: The hardware.
        training: The training loop.
        state_bytes: Bytes of optimizer states (and master copies) for each trainable element.
        device_bytes: Bytes that the device may hold at its peak, including activations; None means no limit. Negative
            if not even the reserved bytes fit.
        host_bytes: Bytes that the host may hold for this plan; None means no limit.
        alpha: Fragmentation factor for activations, as in `memory_timeline`.
        foreach: True if the device's optimizer steps all resident parameters at once.
        chunk_bytes: Chunk sizes to try; None means one chunk per unit and kind of parameter.
        checkpoint_copy: Host memory for the copy of an asynchronous checkpoint, bytes.
        sharers: Number of ranks of the node that share one copy of the offloaded chunks and `host_bytes`.
        network: Network over which ranks sum gradients; None if there is one rank, or it is unknown.
        reserved: Bytes that the device holds in addition to `device_bytes`, for gradients that are summed over ranks.
        evaluates: True if evaluation must fit the device as well.

    Raises:
        ValueError: The profile belongs to another model than the layout, or has no backward pass.
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
    evaluates: bool = False

    def __post_init__(self) -> None:
        """Check that the profile belongs to the model and has a backward pass."""
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
                    f"The profile has {kind} that the model has not ({', '.join(map(repr, unknown[:5]))}): it was "
                    "made for another model. Profile this one."
                )

    @cached_property
    def placed(self) -> dict[tuple[int, ...], Any]:
        """Cache of what depends on the chunks of a plan alone, for `memory_timeline`."""
        return {}

    @cached_property
    def _durations(self) -> list[Durations]:
        return durations(self.profile.segments, self.hardware)

    @cached_property
    def computes(self) -> list[tuple[float, float]]:
        """Device seconds of each segment, in forward and in backward."""
        return [(duration.forward, duration.backward) for duration in self._durations]

    @cached_property
    def recomputes(self) -> list[tuple[float, float]]:
        """Device seconds to recompute each segment: all of it, and all except its products."""
        return [(duration.recomputed, duration.selective) for duration in self._durations]

    @cached_property
    def gradients(self) -> list[list[tuple[ParameterInfo, float]]]:
        """Gradients of each segment in order, each with the fraction of the segment's backward that precedes it."""
        infos = [[self.layout.parameter(fqn) for fqn in segment.gradients] for segment in self.profile.segments]
        return [list(zip(parameters, come_together(parameters), strict=True)) for parameters in infos]

    @cached_property
    def gradient_positions(self) -> list[tuple[str, int]]:
        """First name of each parameter that gets a gradient, with the index of the segment that computes it."""
        return [(fqn, index) for index, segment in enumerate(self.profile.segments) for fqn in segment.gradients]

    @cached_property
    def arriving(self) -> list[tuple[int, str, int, int, float]]:
        """Every gradient in the order of backward: (segment, parameter, elements, bytes, seconds).

        Seconds count from the beginning of the segment's backward until the gradient is computed.
        """
        return [
            (index, info.fqn, info.numel, info.nbytes, part * self.computes[index][1])
            for index in reversed(range(len(self.gradients)))
            for info, part in self.gradients[index]
        ]

    @cached_property
    def arrivals(self) -> dict[str, tuple[int, int]]:
        """Index of the segment where each parameter's gradient becomes complete, and its aligned bytes.

        A parameter without a gradient in the profile gets the number of segments as its index, because another batch
        may have left a gradient.
        """
        at, count = dict(self.gradient_positions), len(self.profile.segments)
        return {it.fqn: (at.get(it.fqn, count), chunk_offsets([it.nbytes])[1]) for it in self.layout.parameters}

    @cached_property
    def movable_inputs(self) -> dict[str, int]:
        """Host memory for the inputs of each block that can move them, bytes; the last block gains nothing by it."""
        nbytes, blocks = self.profile.input_swap_bytes, self.layout.blocks[:-1]
        return {block.name: nbytes[block.name] for block in blocks if block.name and nbytes.get(block.name)}

    @cached_property
    def segment_facts(self) -> SegmentFacts:
        """Facts of the profile that the memory model reads for every plan."""
        return SegmentFacts(self)

    @cached_property
    def lookups(self) -> frozenset[int]:
        """Indices of segments that only look up embeddings, whose backward does not read the weights."""
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


class SegmentFacts:
    """Facts of a profile that the memory model reads for every plan; lists have one element for each segment.

    Args:
        problem: The problem.

    Attributes:
        block: Index of the segment's block in the layout; None outside blocks.
        previous: Index of the nearest earlier segment that belongs to a block; None if there is none.
        cast_bytes: Bytes of casts that are saved unless the weights are streamed in the dtype of autocast.
        shared_held: `lost_inputs` if an earlier segment of the same list holds at least as much, else 0.
        lists: For each list of blocks that share inputs, its first segment and the segments that share the inputs.
        reserve: Estimates for blocks that the profiled batch did not run.
        never: Parameters that get no gradient in any batch.
    """

    def __init__(self, problem: Problem) -> None:
        segments, layout = problem.profile.segments, problem.layout
        index_of = {block.name: index for index, block in enumerate(layout.blocks)}
        self.block = [None if segment.between else index_of.get(segment.unit) for segment in segments]
        self.previous: list[int | None] = []
        latest = None
        for index, block in enumerate(self.block):
            self.previous.append(latest)
            latest = index if block is not None else latest
        self.cast_bytes = [sum([nbytes for _, nbytes in segment.casts]) for segment in segments]
        most: dict[str, int] = {}
        self.shared_held = []
        lists: dict[str, list[int]] = {}
        names = [segment.unit.rpartition(".")[0] for segment in segments]
        for index, (name, segment) in enumerate(zip(names, segments, strict=True)):
            shared = 0 < segment.lost_inputs <= most.get(name, 0)
            self.shared_held.append(segment.lost_inputs if shared else 0)
            most[name] = max(most.get(name, 0), segment.lost_inputs)
            if shared:
                lists.setdefault(name, []).append(index)
        self.lists = [(names.index(name), frozenset(sharing)) for name, sharing in lists.items()]
        self.reserve = Reserve.of(problem.profile, layout)
        self.never = without_gradients(problem.profile, layout)
        self._segments = segments
        self._swap_bytes = problem.profile.swap_bytes()  # If casts are streamed, less is swapped, and less stays.
        self._footprints: dict[tuple[int, BlockPolicy, bool], Footprint] = {}

    def footprint(self, index: int, policy: BlockPolicy, casts: bool) -> Footprint:
        """Return the memory of a segment under a policy; `casts` is False if the plan needs no casts of its weights."""
        key = index, policy, casts
        if key not in self._footprints:
            segment = self._segments[index]
            lost, swap_bytes = segment.lost_inputs - self.shared_held[index], self._swap_bytes.get(segment.unit, 0)
            self._footprints[key] = footprint(segment, policy, lost, casts, swap_bytes)
        return self._footprints[key]


class Durations(NamedTuple):
    """The durations of one segment on the device, seconds.

    Attributes:
        forward: Its forward.
        recomputed: Its forward, recomputed as a whole in backward.
        selective: Its forward, recomputed in backward without the kept products.
        backward: Its backward.
    """

    forward: float
    recomputed: float
    selective: float
    backward: float


def durations(segments: Sequence[Segment], hardware: HardwareProfile) -> list[Durations]:
    """Return the durations of all segments; segments that share operations share one computation."""
    known: dict[tuple[int, ...], Durations] = {}
    made = []
    for segment in segments:
        ahead, back = segment.forward, segment.backward.operations
        shared = id(ahead.operations), id(back)
        if shared not in known:
            known[shared] = Durations(
                forward=hardware.seconds(ahead.operations),
                recomputed=hardware.seconds(recomputed(ahead)),
                selective=selective_seconds(segment, hardware),
                backward=hardware.seconds(back),
            )
        made.append(known[shared])
    return made


def selective_seconds(segment: Segment, hardware: HardwareProfile) -> float:
    """Return the seconds to recompute a forward with its products kept, plus the overhead of keeping them."""
    operations = segment.forward.operations
    again = hardware.seconds(recomputed_beside_products(segment.forward))
    watched = WATCHED * sum(cost.count for cost in operations)
    if not hardware.asynchronous:
        return again + 2 * watched
    return max(again, watched) + max(watched - hardware.seconds(operations), 0.0)


def come_together(parameters: Sequence[ParameterInfo]) -> list[float]:
    """Return the fraction of a segment's backward that has run when the gradient of each parameter is complete."""
    modules = [info.fqn.rpartition(".")[0] for info in parameters]
    sums = list(accumulate(info.numel for info in parameters))
    ends = dict(zip(modules, sums, strict=True))
    whole = max([1, *sums[-1:]])
    return [ends[module] / whole for module in modules]


@dataclass(frozen=True)
class Reserve:
    """Estimated activation memory of the blocks that the profiled batch did not run.

    Attributes:
        names: Units with parameters that did not run, and may run in another batch.
        kept: Bytes that each block leaves on the device if it keeps its activations, by block name.
        checkpointed: Bytes that each block leaves on the device if it checkpoints, by block name.
        running: Additional bytes while each block runs, by block name.
    """

    names: tuple[str, ...]
    kept: Mapping[str, int]
    checkpointed: Mapping[str, int]
    running: Mapping[str, int]

    @classmethod
    def of(cls, profile: ModelProfile, layout: ModelLayout) -> Reserve:
        """Estimate from a profile."""
        ran = {segment.unit for segment in profile.segments}
        around = {unit.name for unit in layout.units if any(inner in ran for inner in unit.encloses)}
        known = ran | around | {*profile.absent}
        idle = [unit for unit in layout.units if unit.parameters and unit.name not in known]
        blocks = {unit.name: _weights(layout, unit) for unit in idle if unit.is_block}
        # The weights of other blocks matter only if an estimate is needed.
        weights = {unit.name: _weights(layout, unit) for unit in layout.blocks} if blocks else {}
        kept, given, running = 0.0, 0.0, 0.0
        for segment in profile.segments:
            if weights.get(segment.unit):
                share, saving = 1 / weights[segment.unit], checkpoint_saving(segment)
                back = segment.backward
                transient = max(rise(segment.forward.storages), back.peak_bytes - back.live_bytes + saving)
                kept = max(kept, (saving + segment.input_bytes) * share)
                given = max(given, segment.input_bytes * share)
                running = max(running, transient * share)
        return cls(
            names=tuple(unit.name for unit in idle),
            kept={name: ceil(max(kept, given) * nbytes) for name, nbytes in blocks.items()},
            checkpointed={name: ceil(given * nbytes) for name, nbytes in blocks.items()},
            running={name: ceil(running * nbytes) for name, nbytes in blocks.items()},
        )

    def total(self, policies: Mapping[str, BlockPolicy]) -> int:
        """Return the bytes to reserve under these policies; blocks that swap or have no policy need none."""
        left = {BlockPolicy.KEEP: self.kept, BlockPolicy.CHECKPOINT: self.checkpointed}
        left[BlockPolicy.SELECTIVE] = self.kept  # The bytes of the products are unknown.
        saved = sum(left[policies[name]][name] for name in self.kept if policies.get(name) in left)
        return saved + max(self.running.values(), default=0)


def without_gradients(profile: ModelProfile, layout: ModelLayout) -> frozenset[str]:
    """Return the parameters that never get a gradient: those of units that ran without any gradient.

    The outputs of such a unit do not reach the loss in any batch. If only a part of a unit got no gradient (an expert),
    it may get one in the next batch.
    """
    ran = {segment.unit for segment in profile.segments}
    reached = {fqn for segment in profile.segments for fqn in segment.gradients}
    users = [unit for unit in layout.units if unit.name not in ran or not reached.isdisjoint(unit.parameters)]
    trained = {fqn for unit in users for fqn in unit.parameters}
    return frozenset(info.fqn for info in layout.parameters) - trained


def _weights(layout: ModelLayout, unit: UnitInfo) -> int:
    return sum(layout.parameter(fqn).nbytes for fqn in unit.parameters)
