"""Plans without a search: three presets, and plans that a user pins with single knobs."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from lightning_protrain.config import Knobs, Preset
from lightning_protrain.planner.memory import (
    ALONE,
    HostUse,
    check_host,
    format_bytes,
    host_bytes,
    memory_terms,
    minimum_chunk_buffers,
)
from lightning_protrain.planner.packing import (
    by_place,
    check_counts,
    chunks_of,
    lay_out,
    pack_chunks,
    spread,
    with_residency,
)
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, ChunkPlan, Plan
from lightning_protrain.profiler.records import ModelLayout


@dataclass(frozen=True)
class _Case:
    """What all plans of one call have in common."""

    layout: ModelLayout
    device_budget: int | None
    host_budget: int | None
    state_bytes: float
    saved_bytes: Mapping[str, int] | None
    use: HostUse
    reserved: int

    def plan(self, chunks: Sequence[ChunkPlan], blocks: Sequence[BlockPlan], num_chunk_buffers: int) -> Plan:
        """The plan of these decisions."""
        return Plan(
            chunks=tuple(chunks),
            blocks=tuple(blocks),
            num_chunk_buffers=num_chunk_buffers,
            memory=memory_terms(self.layout, chunks, num_chunk_buffers, self.state_bytes, blocks),
            shapes={info.fqn: info.shape for info in self.layout.parameters},
        )

    @property
    def keep_all(self) -> tuple[BlockPlan, ...]:
        """Every block keeps its activations."""
        return tuple(BlockPlan(block.name, BlockPolicy.KEEP) for block in self.layout.blocks)

    @property
    def checkpoint_all(self) -> tuple[BlockPlan, ...]:
        """Every block recomputes them, but for the root, which cannot."""
        return tuple(
            BlockPlan(block.name, BlockPolicy.CHECKPOINT if block.name else BlockPolicy.KEEP)
            for block in self.layout.blocks
        )

    def needed(self, plan: Plan) -> int:
        """Bytes of the device, with those that are reserved where something is offloaded."""
        return plan.memory.total + (self.reserved if plan.num_offloaded_chunks else 0)

    def fits(self, plan: Plan) -> bool:
        """Whether the device budget allows it."""
        return self.device_budget is None or self.needed(plan) <= self.device_budget

    def most_buffers(self, chunks: Sequence[ChunkPlan], blocks: Sequence[BlockPlan], least: int, most: int) -> Plan:
        """The plan with as many chunk buffers between `least` and `most` as the device budget allows.

        Raises:
            ValueError: `least` do not fit; names the smallest budget that works.
        """
        plan = self.plan(chunks, blocks, least)
        if self.device_budget is None:
            return self.plan(chunks, blocks, most)
        if not self.fits(plan):
            raise ValueError(
                f"The plan needs at least {format_bytes(self.needed(plan))} on the device for model states, "
                f"{format_bytes(self.device_budget)} are allowed. Raise device_memory to that, or train fewer "
                "parameters."
            )
        more = range(least + 1, most + 1)
        fitting = bisect_right(more, self.device_budget, key=lambda num: self.needed(self.plan(chunks, blocks, num)))
        return self.plan(chunks, blocks, least + fitting)

    def on_host(self, plan: Plan) -> Plan:
        """The same plan.

        Raises:
            ValueError: Its offloaded chunks and swapped activations do not fit the host budget.
        """
        check_host(host_bytes(self.layout, plan.chunks, self.state_bytes, plan.blocks, self.use), self.host_budget)
        return plan


def make_plan(
    layout: ModelLayout,
    preset: Preset,
    knobs: Knobs,
    device_budget: int | None,
    host_budget: int | None,
    state_bytes: float,
    min_num_params: int,
    saved_bytes: Mapping[str, int] | None = None,
    use: HostUse = ALONE,
    reserved: int = 0,
) -> Plan:
    """Makes a plan that fits, or says why there is none.

    Args:
        layout: The model.
        preset: `"resident"`: every chunk stays on the device, every block keeps its activations. `"offload"`: every
            chunk is streamed, every block checkpoints. `"auto"`: resident if that fits, else offload, where units
            outside blocks with at least `min_num_params` parameters are resident as long as they fit; with any knob
            but `chunk_bytes`, what the knobs say.
        knobs: Single decisions, with `"auto"`; `chunk_bytes` also with `"offload"`.
        device_budget: Bytes of model states that the device may hold; `None`: no limit.
        host_budget: Bytes of model states that the host may hold; `None`: no limit.
        state_bytes: Bytes of optimizer states (and master copies) for each trainable element.
        min_num_params: Parameters from which on a unit outside blocks is large, such as an embedding.
        saved_bytes: Bytes that autograd saves in one forward of each block, by its name: of every storage once, without
            weights and buffers, rounded up to whole pages. Needed for `num_swap_blocks` alone.
        use: Who else uses the host.
        reserved: Bytes that the device needs beside a plan that offloads anything.

    Raises:
        ValueError: The plan does not fit, a knob contradicts the model or another knob, or it would be ignored.
    """
    if preset not in get_args(Preset):
        raise ValueError(f"plan={preset!r}: give one of {', '.join(map(repr, get_args(Preset)))}.")
    case = _Case(layout, device_budget, host_budget, state_bytes, saved_bytes, use, reserved)
    if preset == "resident":
        knobs.refuse('"resident"', allowed=knobs.forbids_alone)
        return _resident(case)
    if preset == "offload":
        knobs.refuse('"offload"', allowed=("chunk_bytes", *knobs.forbids_alone))
        return case.on_host(_offload(case, knobs.chunk_bytes))
    if set(knobs.given) - {"chunk_bytes", *knobs.forbids_alone}:
        return case.on_host(_pinned(case, knobs))
    plan = case.plan(_all_resident(layout, pack_chunks(layout, knobs.chunk_bytes)), case.keep_all, 0)
    if not case.fits(plan):
        plan = _keep_large(case, _offload(case, knobs.chunk_bytes), min_num_params)
    return case.on_host(plan)


def _all_resident(layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> list[ChunkPlan]:
    return [with_residency(layout, chunk, True) for chunk in chunks]


def _resident(case: _Case) -> Plan:
    chunks = pack_chunks(case.layout)
    plan = case.plan(_all_resident(case.layout, chunks), case.keep_all, 0)
    if not case.fits(plan):
        assert case.device_budget is not None
        offload = case.plan(chunks, case.checkpoint_all, minimum_chunk_buffers(case.layout, chunks))
        raise ValueError(
            f'plan="resident" needs {format_bytes(plan.memory.total)} on the device for model states, '
            f'{format_bytes(case.device_budget)} are allowed. Give plan="auto", or plan="offload", which needs '
            f"{format_bytes(case.needed(offload))}."
        )
    return plan


def _offload(case: _Case, chunk_bytes: int | None) -> Plan:
    chunks = pack_chunks(case.layout, chunk_bytes)
    return case.most_buffers(chunks, case.checkpoint_all, *_useful_buffers(case.layout, chunks))


def _useful_buffers(layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> tuple[int, int]:
    """Return the fewest chunk buffers, and as many as hold one block while the next one is prefetched."""
    least = minimum_chunk_buffers(layout, chunks)
    offloaded = [index for index, chunk in enumerate(chunks) if not chunk.resident]
    counts = (len({*own}.intersection(offloaded)) for own in chunks_of(layout, chunks).values())
    return least, max(least, min(2 * max(counts, default=0), len(offloaded)))


def _keep_large(case: _Case, plan: Plan, min_num_params: int) -> Plan:
    """`plan` with large units outside blocks resident, one after the other as long as they fit."""
    for unit in case.layout.units:
        numel = sum(case.layout.parameter(fqn).numel for fqn in unit.parameters)
        if not unit.is_block and numel >= min_num_params:
            chunks = [
                with_residency(case.layout, chunk, chunk.resident or chunk.unit == unit.name) for chunk in plan.chunks
            ]
            with_unit = case.plan(chunks, plan.blocks, plan.num_chunk_buffers)
            plan = with_unit if case.fits(with_unit) else plan
    return plan


def _pinned(case: _Case, knobs: Knobs) -> Plan:
    """The plan that the knobs pin; those left open take fixed values, and one warning names them."""
    chunks = pack_chunks(case.layout, knobs.chunk_bytes)
    num_persistent = knobs.num_persistent_chunks or 0
    if num_persistent > len(chunks):
        raise ValueError(f"num_persistent_chunks={num_persistent}: this model has {len(chunks)} chunks.")
    placed = [with_residency(case.layout, chunk, index < num_persistent) for index, chunk in enumerate(chunks)]
    num_swap = knobs.num_swap_blocks or 0
    num_checkpoint, num_keep = _activation_knobs(case.layout, placed, knobs)
    blocks = _interleave(case, num_swap, num_checkpoint)

    least, most = _useful_buffers(case.layout, placed)
    num_buffers = knobs.num_chunk_buffers
    if num_buffers is None:
        plan = case.most_buffers(placed, blocks, least, most)
    elif num_buffers < least:
        raise ValueError(f"num_chunk_buffers={num_buffers}: this model needs at least {least} with these knobs.")
    else:
        plan = case.most_buffers(placed, blocks, num_buffers, num_buffers)
    taken = {
        "num_persistent_chunks": num_persistent,
        "num_chunk_buffers": plan.num_chunk_buffers,
        "num_swap_blocks": num_swap,
        "num_checkpoint_blocks": num_checkpoint,
        "num_keep_offloaded_blocks": num_keep,
    }
    open_knobs = [f"{name}={value}" for name, value in taken.items() if name not in knobs.given]
    if open_knobs and not knobs.are_whole:  # the last one follows from the others
        warnings.warn(f"Knobs that were not given take these values: {', '.join(open_knobs)}.", stacklevel=3)
    return plan


def _interleave(case: _Case, num_swap: int, num_checkpoint: int) -> tuple[BlockPlan, ...]:
    """Swapped blocks spread among the checkpointed ones: how far apart they should be is not known without a search.

    Raises:
        ValueError: It is not known what a block saves, or it saves nothing.
    """
    count = len(case.keep_all)
    policies = lay_out(count, by_place(count), spread(num_swap, num_swap + num_checkpoint), num_checkpoint)
    return tuple(
        BlockPlan(kept.name, policy, _saved_bytes(case, kept.name, num_swap) if policy is BlockPolicy.SWAP else 0)
        for kept, policy in zip(case.keep_all, policies, strict=True)
    )


def _saved_bytes(case: _Case, block: str, num_swap: int) -> int:
    if case.saved_bytes is None:
        raise ValueError(
            f"num_swap_blocks={num_swap}: the activations of this model are not known, so neither is the host memory "
            "they take. Let the model be profiled with a batch, or use num_checkpoint_blocks."
        )
    if case.saved_bytes.get(block, 0) < 1:
        raise ValueError(
            f"num_swap_blocks={num_swap}: no activations of block {block!r} are known that could be swapped (profiled: "
            f"{sorted(case.saved_bytes)}). Use num_checkpoint_blocks, or name other blocks with `blocks`."
        )
    return case.saved_bytes[block]


def _activation_knobs(layout: ModelLayout, chunks: Sequence[ChunkPlan], knobs: Knobs) -> tuple[int, int]:
    """How many blocks checkpoint, and how many of those that keep their activations have offloaded chunks."""
    offloaded = {fqn for chunk in chunks if not chunk.resident for fqn in chunk.parameters}
    streamed = [not offloaded.isdisjoint(block.parameters) for block in layout.blocks]
    keeps = [sum(streamed[num:]) for num in range(len(streamed) + 1)]  # falls to 0 in steps of one at most
    num_checkpoint, num_keep = knobs.num_checkpoint_blocks, knobs.num_keep_offloaded_blocks
    num_swap = knobs.num_swap_blocks or 0
    check_counts(layout, num_swap, num_checkpoint or 0)
    if num_keep is None:
        num_checkpoint = num_checkpoint or 0
        return num_checkpoint, keeps[num_swap + num_checkpoint]
    if num_keep > keeps[0]:
        raise ValueError(
            f"num_keep_offloaded_blocks={num_keep}: {keeps[0]} of {len(streamed)} blocks have offloaded chunks."
        )
    if num_checkpoint is None:
        num_checkpoint = max(keeps.index(num_keep) - num_swap, 0)
    left = keeps[num_swap + num_checkpoint]
    if left != num_keep:
        swapping = f" and num_swap_blocks={num_swap}, which leave" if num_swap else ", which leaves"
        raise ValueError(
            f"num_keep_offloaded_blocks={num_keep} contradicts num_checkpoint_blocks={num_checkpoint}{swapping} {left} "
            "blocks with offloaded chunks that keep their activations. Leave one of them out."
        )
    return num_checkpoint, num_keep
