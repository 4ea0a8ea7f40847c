"""Predicts device and host memory of each rank under FSDP2, and how many blocks have to recompute.

Each rank holds a shard of every parameter, gradient and optimizer state, on the device or (`cpu_offload`) on the host.
A *unit* is a group of parameters that is gathered at one time. Each block is a unit. The root unit has all other
parameters and stays gathered from the begin of forward to the end of backward. Parameters are sharded along the first
dimension and padded to equal shards. Besides the root, the device holds these buffers, each as large as the largest
unit:
- in forward three: the gathered buffer of the running unit, that of the next unit, and the parameters that are copied
  out of the buffer;
- in backward two of these: the parameters of the running unit, and the gathered buffer of the next unit. In addition,
  the gradients of the running unit, and the input of the previous unit's reduce-scatter in the dtype of the reduction.
The root's gradients stay until the end of backward. Gradient accumulation without a reduction leaves gradients of the
whole model on each rank. Activations and temporaries come from `memory_timeline`, for a plan that streams every chunk.
The prediction is an upper bound: it adds up terms that need not peak at the same time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod
from typing import Any

from lightning_protrain.config import format_bytes, plural
from lightning_protrain.planner.explain import short_bytes
from lightning_protrain.planner.memory import memory_terms, minimum_chunk_buffers
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.network import Route
from lightning_protrain.planner.packing import pack_chunks, users_of
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, Plan
from lightning_protrain.planner.prediction import PhasePrediction
from lightning_protrain.planner.problem import Problem, Training
from lightning_protrain.planner.step_time import micro_batch
from lightning_protrain.profiler.records import HardwareProfile, ModelLayout, ModelProfile, ParameterInfo

# Fraction of the free device memory for everything, if activations are known: NCCL and kernels allocate memory later.
SHARE_OF_DEVICE = 0.92
# The memory model reads only one property of the hardware: whether copies run beside computation.
_DEVICE = HardwareProfile("any", *(1.0,) * 4, {"float32": 1.0}, *(1.0,) * 4, 1, 1)


class FSDPTooLarge(ValueError):
    """A model needs more memory under FSDP2 than devices or hosts have."""


@dataclass(frozen=True)
class FSDPRanks:
    """The division of a model among ranks under FSDP2.

    Attributes:
        num_nodes: Number of nodes.
        ranks_per_node: Number of ranks on each node.
        shard_size: Number of ranks that together hold one copy of all states; `ranks_per_node` for HSDP with one copy
            on each node; None means all ranks.
        cpu_offload: True if the shards are on the host.

    Raises:
        ValueError: The number of ranks is not a multiple of `shard_size`.
    """

    num_nodes: int = 1
    ranks_per_node: int = 1
    shard_size: int | None = None
    cpu_offload: bool = False

    def __post_init__(self) -> None:
        """Check that `shard_size` divides the number of ranks."""
        if self.num_ranks < 1 or self.divisor < 1 or self.num_ranks % self.divisor:
            raise ValueError(
                f"{plural(self.num_ranks, 'rank')} ({self.num_nodes} x {self.ranks_per_node}) cannot be divided into "
                f"groups of {self.divisor}, each with one copy of the model. Give a divisor of {self.num_ranks}."
            )

    @property
    def num_ranks(self) -> int:
        """Total number of ranks on all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def name(self) -> str:
        """Name of this division in error messages."""
        return f"FSDP2 over {plural(self.num_ranks, 'rank')}" if self.num_ranks > 1 else "FSDP2 on one rank"

    @property
    def meshes(self) -> tuple[FSDPRanks, ...]:
        """The meshes to try by default: with several nodes HSDP (least traffic between nodes), then all ranks."""
        whole = replace(self, shard_size=None)
        return (replace(self, shard_size=self.ranks_per_node), whole) if self.num_nodes > 1 else (whole,)

    def describe(self) -> str:
        """Return how the model is sharded, as a part of a sentence."""
        if self.num_ranks == 1:
            return "on one rank"
        if self.divisor == self.num_ranks:
            return f"sharded over all {plural(self.num_ranks, 'rank')}"
        shares = f"each sharded over {plural(self.divisor, 'rank')}" if self.divisor > 1 else "each whole on one rank"
        return f"HSDP: {self.num_ranks // self.divisor} copies, {shares}"

    @property
    def divisor(self) -> int:
        """Number of shards of each parameter."""
        return self.num_ranks if self.shard_size is None else self.shard_size


@dataclass(frozen=True)
class FSDPProblem:
    """A model to be trained under FSDP2.

    Attributes:
        layout: The model; its blocks can recompute.
        ranks: Division of the model among ranks.
        state_bytes: Bytes of optimizer states for each trained element.
        profile: Profile of one step with its backward; None: activations are unknown and not counted.
        compute_dtype: Two-byte dtype in which `"bf16-mixed"` gathers floats; None: each parameter's own dtype.
        accumulates: True if each rank accumulates unsharded gradients before the reduction.
        foreach: True if the optimizer steps all shards at once, with temporaries as large as the shards.
        on_gpu: True if the device has a caching allocator and host shards are pinned.
        alpha: Fragmentation factor of the caching allocator.
        groups: First names of the parameters of each unit except the root; None: each block is a unit.
        loads_once: True if one rank of each node loads the model's values; False if every rank does.
    """

    layout: ModelLayout
    ranks: FSDPRanks
    state_bytes: float
    profile: ModelProfile | None = None
    compute_dtype: str | None = None
    accumulates: bool = False
    foreach: bool = True
    on_gpu: bool = True
    alpha: float = 1.0
    groups: tuple[tuple[str, ...], ...] | None = None
    loads_once: bool = False

    @property
    def block_names(self) -> tuple[str, ...]:
        """Names of the blocks that can recompute, in order; the root cannot recompute."""
        return tuple(block.name for block in self.layout.blocks if block.name)

    @cached_property
    def units(self) -> tuple[tuple[ParameterInfo, ...], tuple[tuple[ParameterInfo, ...], ...]]:
        """The parameters of the root, and the parameters of every other unit."""
        groups = self.groups
        if groups is None:  # A parameter that two blocks need belongs to the root.
            users = users_of(self.layout)
            blocks = [block for block in self.layout.blocks if block.name]
            groups = tuple(tuple(fqn for fqn in block.parameters if len(users[fqn]) == 1) for block in blocks)
        inside = {fqn for group in groups for fqn in group}
        root = tuple(info for info in self.layout.parameters if info.fqn not in inside)
        return root, tuple(tuple(map(self.layout.parameter, group)) for group in groups if group)

    def shard_numel(self, info: ParameterInfo) -> int:
        """Return the number of elements of a parameter that each rank holds, padding included."""
        return -(-info.shape[0] // self.ranks.divisor) * prod(info.shape[1:])


@dataclass(frozen=True)
class FSDPMemory:
    """Memory of each rank under FSDP2.

    Attributes:
        phases: `"loading"`, `"forward"`, `"backward"`, `"step"`, `"evaluation"`, each with bytes of one rank by term.
        ranks: Division of the model among ranks.
        checkpointed: Names of the blocks that recompute.
        num_blocks: Number of blocks that can recompute.
        counts_activations: True if the bytes include activations; False if no profile says how large they are.
    """

    phases: tuple[PhasePrediction, ...]
    ranks: FSDPRanks
    checkpointed: tuple[str, ...]
    num_blocks: int
    counts_activations: bool

    @property
    def peak(self) -> PhasePrediction:
        """The phase with the most device memory."""
        return max(self.phases, key=lambda phase: phase.device_bytes)

    @property
    def device_bytes(self) -> int:
        """Peak device memory of one rank, bytes."""
        return self.peak.device_bytes

    @property
    def host_bytes(self) -> int:
        """Peak host memory of one rank, bytes, with its share of the copies that the node's ranks load."""
        return max(phase.host_bytes for phase in self.phases)

    @property
    def node_host_bytes(self) -> int:
        """Peak host memory of all ranks of a node, bytes."""
        return self.ranks.ranks_per_node * self.host_bytes

    def describe(self) -> str:
        """Return one sentence for the user: memory of a rank and of a node, the mesh, and the recomputed blocks."""
        unknown = "" if self.counts_activations else ", activations not counted"
        return (
            f'strategy="protrain_fsdp2" takes {format_bytes(self.device_bytes)} on each device and '
            f"{format_bytes(self.node_host_bytes)} on the host of each node at most ({self.ranks.describe()}, "
            f"{len(self.checkpointed)} of {self.num_blocks} blocks recomputed{unknown})."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as a dict for JSON."""
        return {
            "mesh": [self.ranks.num_ranks // self.ranks.divisor, self.ranks.divisor],
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
            "node_host_bytes": self.node_host_bytes,
            "checkpointed": list(self.checkpointed),
            "phases": {phase.name: {"device": dict(phase.device), "host": dict(phase.host)} for phase in self.phases},
        }


def fsdp_memory(problem: FSDPProblem, checkpointed: Iterable[str] = ()) -> FSDPMemory:
    """Return the memory that each rank needs.

    Args:
        problem: The model and the ranks.
        checkpointed: Names of the blocks that recompute their activations.

    Raises:
        ValueError: The profile has no backward pass.
    """
    names = frozenset(checkpointed)
    shards, host = _states(problem)
    active = _activations(problem, names)
    root, units = problem.units
    size = _Sizes(problem)
    gathered, unit = size.gathered(root), max(map(size.gathered, units), default=0)
    buffers = 0 if problem.ranks.divisor == 1 else 1  # A single rank needs no buffer for collectives.
    # The buffer of the first unit replaces the one that the root is gathered into.
    begin = {"gathered_root": (1 + buffers) * gathered, "gathered_units": (1 + buffers) * unit}
    forward = {"gathered_root": gathered, "gathered_units": (1 + 2 * buffers) * unit}
    running = {
        "gathered_root": gathered,
        "gathered_units": (1 + buffers) * unit,
        "unreduced_gradients": size.gradients(root)
        + max((size.gradients(each) + size.reduced(each) for each in units), default=0),
    }
    end = {"unreduced_gradients": size.gradients(root) + size.reduced(root)}
    step = 0 if problem.ranks.cpu_offload else shards["gradients"] if problem.foreach else 2 * size.largest_gradient()
    moments: dict[str, tuple[Mapping[str, int], ...]] = {
        "forward": (begin, forward | active["forward"]),
        "backward": (running | active["backward"], end),
        "step": ({"temporaries": step},),
        "evaluation": (begin, forward | active["evaluation"]),
    }
    whole = size.reduced(problem.layout.parameters) if problem.accumulates else 0
    during = shards | {"gradients": max(whole, shards["gradients"])}
    weights = {name: shards[name] for name in ("sharded_parameters", "module_buffers")}
    fresh = {"whole_unit": max(sum(info.nbytes for info in each) for each in (root, *units))}
    builders = problem.ranks.ranks_per_node if problem.loads_once else 1
    model = {"whole_model": -(-sum(info.nbytes for info in problem.layout.parameters) // builders)}
    phases = [PhasePrediction("loading", "", weights | fresh, model)]
    for name, each in moments.items():
        peak = max(each, key=lambda terms: sum(terms.values()))
        states = shards if name == "step" else during
        phases.append(PhasePrediction(name, "", {**states, **peak}, host))
    recomputed = tuple(name for name in problem.block_names if name in names)
    return FSDPMemory(tuple(phases), problem.ranks, recomputed, len(problem.block_names), problem.profile is not None)


def fit_fsdp(
    problem: FSDPProblem,
    device_bytes: int | None,
    host_bytes: int | None = None,
    meshes: Sequence[FSDPRanks] | None = None,
    count: int | None = None,
) -> FSDPMemory:
    """Return the memory under the first mesh that fits, with the fewest recomputed blocks.

    Args:
        problem: The model and the ranks.
        device_bytes: Bytes that the device of each rank may hold; None means no limit.
        host_bytes: Bytes that the host of each node may hold; None means no limit.
        meshes: Meshes to try, in order; None means `problem.ranks.meshes`.
        count: Number of blocks that recompute, the first ones; None: as few as fit.

    Raises:
        FSDPTooLarge: No mesh fits; the message is about the last one.
    """
    *others, last = meshes or problem.ranks.meshes
    for ranks in others:
        try:
            return _fit(replace(problem, ranks=ranks), device_bytes, host_bytes, count)
        except FSDPTooLarge:
            pass
    return _fit(replace(problem, ranks=last), device_bytes, host_bytes, count)


def fsdp_seconds(
    problem: FSDPProblem, memory: FSDPMemory, hardware: HardwareProfile, everyone: Route, accumulate: int = 1
) -> float | None:
    """Return the predicted time of an optimizer step, seconds; None if it is not predicted (offload, HSDP).

    Forward gathers all weights beside computation. Backward gathers them again and reduces gradients to their owners;
    an accumulation reduces once. A gather or a reduction sends half of what an all-reduce sends, see scaling.py.

    Args:
        problem: The model and the ranks, with the profile of a step.
        memory: The prediction, whose blocks recompute.
        hardware: Rates of each device.
        everyone: Speed of an all-reduce over all ranks.
        accumulate: Number of micro-batches in a step.
    """
    if problem.profile is None or memory.ranks.cpu_offload or memory.ranks.divisor < memory.ranks.num_ranks:
        return None
    case, size, infos = _as_problem(problem, hardware), _Sizes(problem), problem.layout.parameters
    forward = sum(ahead for ahead, _ in case.computes)
    backward = micro_batch(case, _as_plan(case.layout, memory.checkpointed)).compute - forward
    calls = 1 + len(problem.units[1])
    gather, reduction = (everyone.seconds(calls, sent(infos) / 2) for sent in (size.gathered, size.reduced))
    stepped = sum(problem.shard_numel(info) for info in infos if info.trainable) / hardware.device_step
    reduced = 1 if problem.accumulates else accumulate
    last, others = max(backward, gather + reduction), max(backward, gather)
    return accumulate * max(forward, gather) + reduced * last + (accumulate - reduced) * others + stepped


def _fit(problem: FSDPProblem, device_bytes: int | None, host_bytes: int | None, count: int | None) -> FSDPMemory:
    if count is None:
        memory = fewest_checkpointed(problem, device_bytes)
    else:
        memory = fsdp_memory(problem, problem.block_names[:count])
        if device_bytes is not None and memory.device_bytes > device_bytes:
            raise FSDPTooLarge(_refusal(problem, memory, device_bytes))
    if host_bytes is not None and memory.node_host_bytes > host_bytes:
        offloads = "Leave cpu_offload out, train" if problem.ranks.cpu_offload else "Train"
        raise FSDPTooLarge(
            f"{problem.ranks.name} needs {format_bytes(memory.node_host_bytes)} on the host of each node, "
            f"{format_bytes(host_bytes)} are available. {offloads} on more nodes, or with fewer ranks on each."
        )
    return memory


def fewest_checkpointed(problem: FSDPProblem, device_bytes: int | None) -> FSDPMemory:
    """Return the memory with the fewest recomputed blocks, counted from the first block, that fits each device.

    The last blocks keep their activations: backward frees these first, which makes room for gradients.

    Args:
        problem: The model and the ranks, with the profile of a step.
        device_bytes: Bytes that the device of each rank may hold; None means no limit, so that no block recomputes.

    Raises:
        FSDPTooLarge: The model does not fit even if all blocks recompute.
    """
    names = problem.block_names

    def memory(count: int) -> FSDPMemory:
        return fsdp_memory(problem, names[:count])

    if device_bytes is None:
        return memory(0)
    # More recomputed blocks need less memory, except if a recomputation raises a small peak elsewhere.
    count = bisect_left(range(len(names)), True, key=lambda count: memory(count).device_bytes <= device_bytes)
    least = memory(count)
    if least.device_bytes > device_bytes:
        raise FSDPTooLarge(_refusal(problem, least, device_bytes))
    return least


def _refusal(problem: FSDPProblem, memory: FSDPMemory, device_bytes: int) -> str:
    peak = memory.peak
    terms = ", ".join(f"{name} {short_bytes(nbytes)}" for name, nbytes in peak.device.items() if nbytes)
    instead = []
    if problem.accumulates:
        instead.append(("sync_each_batch=True", replace(problem, accumulates=False)))
    if problem.ranks.divisor < problem.ranks.num_ranks:
        whole = replace(problem.ranks, shard_size=None)
        instead.append(('sharding_strategy="FULL_SHARD"', replace(problem, ranks=whole)))
    if not problem.ranks.cpu_offload:
        offloaded = replace(problem.ranks, cpu_offload=True)
        instead.append(("cpu_offload=True", replace(problem, ranks=offloaded)))
    ways = [(name, fsdp_memory(other, memory.checkpointed).device_bytes) for name, other in instead]
    if len(memory.checkpointed) < len(problem.block_names):
        ways.insert(0, ('activation_checkpointing="auto"', fsdp_memory(problem, problem.block_names).device_bytes))
    fitting = [f"{name} ({format_bytes(nbytes)})" for name, nbytes in ways if nbytes <= device_bytes]
    remedy = f"Give {' or '.join(fitting)}." if fitting else "Train on more ranks, or with a smaller batch."
    count, every = len(memory.checkpointed), len(problem.block_names)
    recomputed = f"all {every}" if count == every else f"{count} of {every}"
    return (
        f"{problem.ranks.name} needs {format_bytes(memory.device_bytes)} on each device with {recomputed} blocks "
        f"recomputed ({peak.name}: {terms}), {format_bytes(device_bytes)} are allowed. {remedy}"
    )


@dataclass(frozen=True)
class _Sizes:
    """Computes the bytes of unsharded units; gathered weights and reduced gradients are padded to equal shards."""

    problem: FSDPProblem

    def gathered(self, infos: Iterable[ParameterInfo]) -> int:
        """Return the bytes of parameters in the dtype in which the step uses them."""
        return sum(self._padded(info) * self._used(info) for info in infos)

    def gradients(self, infos: Iterable[ParameterInfo]) -> int:
        """Return the bytes of gradients in the dtype in which backward computes them."""
        return sum(info.numel * self._used(info) for info in infos if info.trainable)

    def reduced(self, infos: Iterable[ParameterInfo]) -> int:
        """Return the bytes of gradients in the dtype of the reduction: float32 if they are computed in two bytes."""
        size = None if self.problem.compute_dtype is None else 4
        return sum(self._padded(info) * (size or _itemsize(info)) for info in infos if info.trainable)

    def largest_gradient(self) -> int:
        """Return the bytes of the largest gradient shard."""
        layout = self.problem.layout
        return max(
            (self.problem.shard_numel(info) * _itemsize(info) for info in layout.parameters if info.trainable),
            default=0,
        )

    def _padded(self, info: ParameterInfo) -> int:
        return self.problem.ranks.divisor * self.problem.shard_numel(info)

    def _used(self, info: ParameterInfo) -> int:
        return 2 if self.problem.compute_dtype is not None else _itemsize(info)


def _itemsize(info: ParameterInfo) -> int:
    return info.nbytes // max(info.numel, 1)


def _states(problem: FSDPProblem) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes of one rank's shards on its device, and on the host."""
    numels = [(info, problem.shard_numel(info)) for info in problem.layout.parameters]
    # PyTorch rounds pinned allocations up to powers of two.
    granted = _power_of_two if problem.ranks.cpu_offload and problem.on_gpu else int
    terms = {
        "sharded_parameters": sum(granted(numel * _itemsize(info)) for info, numel in numels),
        "gradients": sum(granted(numel * _itemsize(info)) for info, numel in numels if info.trainable),
        "optimizer_states": ceil(problem.state_bytes * sum(numel for info, numel in numels if info.trainable)),
    }
    buffers = {"module_buffers": problem.layout.buffer_bytes}
    none = dict.fromkeys(terms, 0)
    return (none | buffers, terms) if problem.ranks.cpu_offload else (terms | buffers, none)


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _activations(problem: FSDPProblem, checkpointed: Collection[str]) -> dict[str, dict[str, int]]:
    """Return activations and temporaries by phase, as `memory_timeline` predicts them if every chunk is streamed."""
    phases = ("forward", "backward", "evaluation")
    if problem.profile is None:
        return {name: {} for name in phases}
    case = _as_problem(problem, replace(_DEVICE, asynchronous=problem.on_gpu))
    timeline = memory_timeline(case, _as_plan(case.layout, checkpointed))
    return {
        name: {term: timeline.phase(name).device[term] for term in ("activations", "loss_copies", "unexercised")}
        | {"fragmentation": max(timeline.phase(name).fragmentation, 0)}
        for name in phases
    }


def _as_problem(problem: FSDPProblem, hardware: HardwareProfile) -> Problem:
    """Return the problem of one device that streams every chunk; the profile must be known."""
    assert problem.profile is not None
    layout = problem.layout
    if problem.compute_dtype is not None:  # Autocast does not copy a weight that is gathered in its dtype.
        floats = {info.fqn for info in layout.parameters if info.dtype == "float32"}
        layout = layout.streaming(floats, problem.compute_dtype)
    return Problem(problem.profile, layout, hardware, Training(), 0.0, None, None, alpha=problem.alpha)


def _as_plan(layout: ModelLayout, checkpointed: Collection[str]) -> Plan:
    """Return the plan that streams every chunk and keeps the activations of blocks that do not recompute."""
    blocks = tuple(
        BlockPlan(block.name, BlockPolicy.CHECKPOINT if block.name in checkpointed else BlockPolicy.KEEP)
        for block in layout.blocks
    )
    chunks = pack_chunks(layout)
    buffers = minimum_chunk_buffers(layout, chunks)
    shapes = {info.fqn: info.shape for info in layout.parameters}
    return Plan(chunks, blocks, buffers, memory_terms(layout, chunks, buffers, 0.0, blocks), shapes)
