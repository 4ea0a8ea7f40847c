"""Plans for any module of the tests, from wholly resident to streamed as tightly as it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from lightning_protrain.config import Knobs, Preset
from lightning_protrain.planner.memory import StatesProblem, memory_terms, minimum_chunk_buffers
from lightning_protrain.planner.packing import with_residency
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, Plan
from lightning_protrain.planner.presets import make_plan
from lightning_protrain.profiler.blocks import describe_model

# Adam's two moments in float32.
STATE_BYTES = 8.0

PlanChoice = Plan | str
PlanMaker = Callable[[nn.Module], PlanChoice]


def preset(module: nn.Module, name: Preset, budget: int | None = None, chunk_bytes: int | None = None) -> Plan:
    """The plan that the strategy makes of `name` for `module` with AdamW."""
    knobs = Knobs(chunk_bytes=chunk_bytes)
    return make_plan(StatesProblem(describe_model(module), STATE_BYTES, budget), name, knobs)


def place(
    module: nn.Module,
    resident: Callable[[int], bool] = lambda index: False,
    checkpointed: Callable[[int], bool] = lambda index: False,
    chunk_bytes: int | None = None,
    swap_bytes: Callable[[int], int] = lambda index: 0,
) -> Plan:
    """A plan by the index of each chunk and each block, with the fewest chunk buffers that can work.

    A block with `swap_bytes` is swapped; if it is checkpointed as well, then its inputs are. The root cannot be.
    """
    layout = describe_model(module)
    offload = preset(module, "offload", chunk_bytes=chunk_bytes)
    chunks = tuple(with_residency(layout, chunk, resident(index)) for index, chunk in enumerate(offload.chunks))
    num_buffers = minimum_chunk_buffers(layout, chunks)
    blocks = []
    for index, block in enumerate(offload.blocks):
        nbytes = swap_bytes(index) if block.name else 0
        without = BlockPolicy.SWAP if nbytes else BlockPolicy.KEEP
        blocks.append(BlockPlan(block.name, BlockPolicy.CHECKPOINT if checkpointed(index) else without, nbytes))
    return replace(
        offload,
        chunks=chunks,
        blocks=tuple(blocks),
        num_chunk_buffers=num_buffers,
        memory=memory_terms(layout, chunks, num_buffers, STATE_BYTES, blocks),
    )


def half(module: nn.Module) -> Plan:
    """The first half of the chunks resident, the rest streamed; all activations kept."""
    num_chunks = len(preset(module, "offload").chunks)
    return place(module, resident=lambda index: index < num_chunks // 2)


def kept(module: nn.Module) -> Plan:
    """Every chunk streamed, no block checkpointed: saved activations outlive their weights."""
    return place(module)


def alternating(module: nn.Module) -> Plan:
    """Every other chunk resident, every other block checkpointed, half of these but for their products."""
    plan = place(module, resident=lambda index: index % 2 == 0, checkpointed=lambda index: index % 2 == 1)
    return _selecting(plan, lambda index: index % 4 == 1)


def selective(module: nn.Module) -> Plan:
    """Every chunk streamed; the blocks keep their products alone, keep all and keep nothing in turns."""
    return _selecting(place(module, checkpointed=lambda index: index % 3 == 2), lambda index: index % 3 == 0)


def _selecting(plan: Plan, chosen: Callable[[int], bool]) -> Plan:
    """Return the plan with some blocks checkpointed selectively."""
    blocks = (
        replace(block, policy=BlockPolicy.SELECTIVE) if block.name and chosen(index) else block
        for index, block in enumerate(plan.blocks)
    )
    return replace(plan, blocks=tuple(blocks))


def plans() -> dict[str, PlanMaker]:
    """Makers of what to give as `plan`, by name."""
    return {
        "resident": lambda module: "resident",
        "offload": lambda module: "offload",
        "half": half,
        "kept": kept,
        "alternating": alternating,
    }
