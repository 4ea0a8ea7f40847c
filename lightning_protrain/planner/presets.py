"""Plans without a search: three presets, and plans that the user's knobs determine."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from lightning_protrain.config import MIN_NUM_PARAMS, NO_KNOBS, Knobs, Preset, format_bytes, plural
from lightning_protrain.planner.memory import (
    StatesProblem,
    check_host,
    gradient_buffers_of,
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
class _Draft:
    """The problem of one call, and the plans to choose from."""

    problem: StatesProblem

    @property
    def layout(self) -> ModelLayout:
        """The model."""
        return self.problem.layout

    def plan(self, chunks: Sequence[ChunkPlan], blocks: Sequence[BlockPlan], num_chunk_buffers: int) -> Plan:
        """Return the plan with these decisions."""
        return Plan(
            chunks=tuple(chunks),
            blocks=tuple(blocks),
            num_chunk_buffers=num_chunk_buffers,
            memory=memory_terms(self.layout, chunks, num_chunk_buffers, self.problem.state_bytes, blocks),
            shapes={info.fqn: info.shape for info in self.layout.parameters},
        )

    @property
    def keep_all(self) -> tuple[BlockPlan, ...]:
        """Every block keeps its activations."""
        return tuple(BlockPlan(block.name, BlockPolicy.KEEP) for block in self.layout.blocks)

    @property
    def checkpoint_all(self) -> tuple[BlockPlan, ...]:
        """Every block checkpoints, except the root, which cannot."""
        return tuple(
            BlockPlan(block.name, BlockPolicy.CHECKPOINT if block.name else BlockPolicy.KEEP)
            for block in self.layout.blocks
        )

    def needed(self, plan: Plan) -> int:
        """Return the device memory that a plan needs, bytes, including a reserve if a chunk is offloaded."""
        return plan.memory.total + (self.problem.reserved if plan.num_offloaded_chunks else 0)

    def fits(self, plan: Plan) -> bool:
        """Return True if the plan fits the device budget."""
        return self.problem.device_bytes is None or self.needed(plan) <= self.problem.device_bytes

    def most_buffers(self, chunks: Sequence[ChunkPlan], blocks: Sequence[BlockPlan], least: int, most: int) -> Plan:
        """Return the plan with the most chunk buffers, from `least` to `most`, that fit the device budget.

        Raises:
            ValueError: `least` buffers do not fit; the message names the smallest budget that works.
        """
        plan, limit = self.plan(chunks, blocks, least), self.problem.device_bytes
        if limit is None:
            return self.plan(chunks, blocks, most)
        if not self.fits(plan):
            raise ValueError(
                f"The plan needs at least {format_bytes(self.needed(plan))} on the device for model states, "
                f"{format_bytes(limit)} are allowed. Raise device_memory to that, or train fewer parameters."
            )
        more = range(least + 1, most + 1)
        fitting = bisect_right(more, limit, key=lambda num: self.needed(self.plan(chunks, blocks, num)))
        return self.plan(chunks, blocks, least + fitting)

    def on_host(self, plan: Plan) -> Plan:
        """Return the plan if it fits the host.

        Raises:
            ValueError: The offloaded chunks and swapped activations exceed the host budget.
        """
        problem = self.problem
        needed = host_bytes(self.layout, plan.chunks, problem.state_bytes, plan.blocks, problem.use)
        if problem.host_bytes is not None and needed > problem.host_bytes:
            buffers = gradient_buffers_of(self.layout, plan.chunks, problem.state_bytes)
            plan, use = replace(plan, gradient_buffers=buffers), replace(problem.use, gradient_buffers=buffers)
            needed = host_bytes(self.layout, plan.chunks, problem.state_bytes, plan.blocks, use)
        check_host(needed, problem.host_bytes)
        return plan


def make_plan(
    problem: StatesProblem,
    preset: Preset = "auto",
    knobs: Knobs = NO_KNOBS,
    min_num_params: int = MIN_NUM_PARAMS,
) -> Plan:
    """Make a plan that fits, or raise an error that says why none does.

    Args:
        problem: The model and its budgets.
        preset: `"resident"`: every chunk stays on the device, every block keeps its activations. `"offload"`: every
            chunk is streamed, every block checkpoints. `"auto"`: resident if that fits; else offload, but large units
            outside blocks stay resident while they fit. With any knob but `chunk_bytes`, `"auto"` follows the knobs.
        knobs: Decisions that the user pinned, for `"auto"`; `"offload"` accepts only `chunk_bytes`.
        min_num_params: A unit outside blocks, such as an embedding, is large from this number of parameters on.

    Raises:
        ValueError: The plan does not fit, a knob contradicts the model or another knob, or a knob would have no effect.
    """
    if preset not in get_args(Preset):
        raise ValueError(f"plan={preset!r}: give one of {', '.join(map(repr, get_args(Preset)))}.")
    draft, layout = _Draft(problem), problem.layout
    if preset == "resident":
        knobs.refuse('"resident"', allowed=knobs.forbids_alone)
        return _resident(draft)
    if preset == "offload":
        knobs.refuse('"offload"', allowed=("chunk_bytes", *knobs.forbids_alone))
        return draft.on_host(_offload(draft, knobs.chunk_bytes))
    if set(knobs.given) - {"chunk_bytes", *knobs.forbids_alone}:
        return draft.on_host(_pinned(draft, knobs))
    plan = draft.plan(_all_resident(layout, pack_chunks(layout, knobs.chunk_bytes)), draft.keep_all, 0)
    if not draft.fits(plan):
        plan = _keep_large(draft, _offload(draft, knobs.chunk_bytes), min_num_params)
    return draft.on_host(plan)


def _all_resident(layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> list[ChunkPlan]:
    return [with_residency(layout, chunk, True) for chunk in chunks]


def _resident(draft: _Draft) -> Plan:
    chunks = pack_chunks(draft.layout)
    plan = draft.plan(_all_resident(draft.layout, chunks), draft.keep_all, 0)
    if not draft.fits(plan):
        assert draft.problem.device_bytes is not None
        offload = draft.plan(chunks, draft.checkpoint_all, minimum_chunk_buffers(draft.layout, chunks))
        raise ValueError(
            f'plan="resident" needs {format_bytes(plan.memory.total)} on the device for model states, '
            f'{format_bytes(draft.problem.device_bytes)} are allowed. Give plan="auto", or plan="offload", which '
            f"needs {format_bytes(draft.needed(offload))}."
        )
    return plan


def _offload(draft: _Draft, chunk_bytes: int | None) -> Plan:
    chunks = pack_chunks(draft.layout, chunk_bytes)
    return draft.most_buffers(chunks, draft.checkpoint_all, *_useful_buffers(draft.layout, chunks))


def _useful_buffers(layout: ModelLayout, chunks: Sequence[ChunkPlan]) -> tuple[int, int]:
    """Return the minimum number of chunk buffers, and the number that holds one block while the next is prefetched."""
    least = minimum_chunk_buffers(layout, chunks)
    offloaded = [index for index, chunk in enumerate(chunks) if not chunk.resident]
    counts = (len({*indices}.intersection(offloaded)) for indices in chunks_of(layout, chunks).values())
    return least, max(least, min(2 * max(counts, default=0), len(offloaded)))


def _keep_large(draft: _Draft, plan: Plan, min_num_params: int) -> Plan:
    """Return `plan` with large units outside blocks resident, one after the other while they fit."""
    for unit in draft.layout.units:
        numel = sum(draft.layout.parameter(fqn).numel for fqn in unit.parameters)
        if not unit.is_block and numel >= min_num_params:
            chunks = [
                with_residency(draft.layout, chunk, chunk.resident or chunk.unit == unit.name) for chunk in plan.chunks
            ]
            with_unit = draft.plan(chunks, plan.blocks, plan.num_chunk_buffers)
            plan = with_unit if draft.fits(with_unit) else plan
    return plan


def _pinned(draft: _Draft, knobs: Knobs) -> Plan:
    """Return the plan that the knobs determine; other knobs take fixed values, and one warning names them."""
    chunks = pack_chunks(draft.layout, knobs.chunk_bytes)
    num_persistent = knobs.num_persistent_chunks or 0
    if num_persistent > len(chunks):
        raise ValueError(
            f"num_persistent_chunks={num_persistent}: this model has "
            f"{plural(len(chunks), 'chunk')}. Give at most {len(chunks)}."
        )
    placed = [with_residency(draft.layout, chunk, index < num_persistent) for index, chunk in enumerate(chunks)]
    num_swap = knobs.num_swap_blocks or 0
    num_checkpoint, num_keep = _activation_knobs(draft.layout, placed, knobs)
    blocks = _interleave(draft, num_swap, num_checkpoint)

    least, most = _useful_buffers(draft.layout, placed)
    num_buffers = knobs.num_chunk_buffers
    if num_buffers is None:
        plan = draft.most_buffers(placed, blocks, least, most)
    elif num_buffers < least:
        raise ValueError(f"num_chunk_buffers={num_buffers}: this model needs at least {least} with these settings.")
    else:
        plan = draft.most_buffers(placed, blocks, num_buffers, num_buffers)
    taken = {
        "num_persistent_chunks": num_persistent,
        "num_chunk_buffers": plan.num_chunk_buffers,
        "num_swap_blocks": num_swap,
        "num_checkpoint_blocks": num_checkpoint,
        "num_keep_offloaded_blocks": num_keep,
    }
    open_knobs = [f"{name}={value}" for name, value in taken.items() if name not in knobs.given]
    if open_knobs and not knobs.are_whole:  # the last open knob follows from the others
        warnings.warn(
            f"Settings of the plan that were not given take these values: {', '.join(open_knobs)}.", stacklevel=3
        )
    return plan


def _interleave(draft: _Draft, num_swap: int, num_checkpoint: int) -> tuple[BlockPlan, ...]:
    """Return the blocks with swapped blocks spread evenly among checkpointed ones, as their best distance is unknown.

    Raises:
        ValueError: The saved bytes of a block are unknown or zero.
    """
    count = len(draft.keep_all)
    policies = lay_out(count, by_place(count), spread(num_swap, num_swap + num_checkpoint), num_checkpoint)
    return tuple(
        BlockPlan(block.name, policy, _saved_bytes(draft, block.name, num_swap) if policy is BlockPolicy.SWAP else 0)
        for block, policy in zip(draft.keep_all, policies, strict=True)
    )


def _saved_bytes(draft: _Draft, block: str, num_swap: int) -> int:
    if draft.problem.saved_bytes is None:
        raise ValueError(
            f"num_swap_blocks={num_swap}: the activations of this model are not known, so neither is the host memory "
            "they take. Let the model be profiled with a batch, or use num_checkpoint_blocks."
        )
    if draft.problem.saved_bytes.get(block, 0) < 1:
        raise ValueError(
            f"num_swap_blocks={num_swap}: no activations of block {block!r} are known that could be swapped (profiled: "
            f"{sorted(draft.problem.saved_bytes)}). Use num_checkpoint_blocks, or name other blocks with `blocks`."
        )
    return draft.problem.saved_bytes[block]


def _activation_knobs(layout: ModelLayout, chunks: Sequence[ChunkPlan], knobs: Knobs) -> tuple[int, int]:
    """Return the number of blocks that checkpoint, and of blocks with offloaded chunks that keep their activations."""
    offloaded = {fqn for chunk in chunks if not chunk.resident for fqn in chunk.parameters}
    streamed = [not offloaded.isdisjoint(block.parameters) for block in layout.blocks]
    keeps = [sum(streamed[num:]) for num in range(len(streamed) + 1)]  # falls to 0 by at most one each
    num_checkpoint, num_keep = knobs.num_checkpoint_blocks, knobs.num_keep_offloaded_blocks
    num_swap = knobs.num_swap_blocks or 0
    check_counts(layout, num_swap, num_checkpoint or 0)
    if num_keep is None:
        num_checkpoint = num_checkpoint or 0
        return num_checkpoint, keeps[num_swap + num_checkpoint]
    if num_keep > keeps[0]:
        raise ValueError(
            f"num_keep_offloaded_blocks={num_keep}: {keeps[0]} of {len(streamed)} blocks have "
            f"offloaded chunks. Give at most {keeps[0]}."
        )
    if num_checkpoint is None:
        num_checkpoint = max(keeps.index(num_keep) - num_swap, 0)
    left = keeps[num_swap + num_checkpoint]
    if left != num_keep:
        swapping = f" and num_swap_blocks={num_swap}, which leave" if num_swap else ", which leaves"
        raise ValueError(
            f"num_keep_offloaded_blocks={num_keep} contradicts num_checkpoint_blocks={num_checkpoint}{swapping} "
            f"{plural(left, 'block')} with offloaded chunks that keep their activations. Leave one of them out."
        )
    return num_checkpoint, num_keep
