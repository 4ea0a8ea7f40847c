"""Plans without a search: three presets, and plans that a user pins with single knobs."""

from __future__ import annotations

import re
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal, get_args

from lightning_protrain.planner.chunks import chunks_of, pack_chunks
from lightning_protrain.planner.knobs import Knobs
from lightning_protrain.planner.memory import format_bytes, host_bytes, memory_terms, minimum_chunk_buffers
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, ChunkPlan, Plan
from lightning_protrain.profiler.records import ModelLayout

Preset = Literal["auto", "resident", "offload"]
DEFAULT_CHUNK_BUFFERS = 2


@dataclass(frozen=True)
class _Case:
    """What all plans of one call have in common."""

    layout: ModelLayout
    device_budget: int | None
    host_budget: int | None
    state_bytes: float

    def plan(self, chunks: Sequence[ChunkPlan], num_checkpoint_blocks: int, num_chunk_buffers: int) -> Plan:
        """The plan whose first `num_checkpoint_blocks` blocks checkpoint; the root cannot."""
        policies = (
            BlockPolicy.CHECKPOINT if index < num_checkpoint_blocks and block.name else BlockPolicy.KEEP
            for index, block in enumerate(self.layout.blocks)
        )
        return Plan(
            chunks=tuple(chunks),
            blocks=tuple(
                BlockPlan(block.name, policy) for block, policy in zip(self.layout.blocks, policies, strict=True)
            ),
            num_chunk_buffers=num_chunk_buffers,
            memory=memory_terms(self.layout, chunks, num_chunk_buffers, self.state_bytes),
            shapes={info.fqn: info.shape for info in self.layout.parameters},
        )

    def fits(self, plan: Plan) -> bool:
        """Whether the device budget allows it."""
        return self.device_budget is None or plan.memory.total <= self.device_budget

    def most_buffers(self, chunks: Sequence[ChunkPlan], num_checkpoint_blocks: int, least: int, most: int) -> Plan:
        """The plan with as many chunk buffers between `least` and `most` as the device budget allows.

        Raises:
            ValueError: `least` do not fit; names the smallest budget that works.
        """
        plan = self.plan(chunks, num_checkpoint_blocks, least)
        if self.device_budget is None:
            return self.plan(chunks, num_checkpoint_blocks, most)
        if not self.fits(plan):
            raise ValueError(
                f"The plan needs at least {format_bytes(plan.memory.total)} on the device for model states, "
                f"{format_bytes(self.device_budget)} are allowed. Raise device_memory to that, or train fewer "
                "parameters."
            )
        more = range(least + 1, most + 1)
        fitting = bisect_right(more, self.device_budget, key=lambda num: self._total(chunks, num))
        return self.plan(chunks, num_checkpoint_blocks, least + fitting)

    def _total(self, chunks: Sequence[ChunkPlan], num_chunk_buffers: int) -> int:
        return memory_terms(self.layout, chunks, num_chunk_buffers, self.state_bytes).total

    def on_host(self, plan: Plan) -> Plan:
        """The same plan.

        Raises:
            ValueError: Its offloaded chunks do not fit the host budget.
        """
        needed = host_bytes(self.layout, plan.chunks, self.state_bytes)
        if self.host_budget is not None and needed > self.host_budget:
            raise ValueError(
                f"The plan needs {format_bytes(needed)} of host memory, {format_bytes(self.host_budget)} are "
                "available. Raise host_memory, keep more chunks on the device with num_persistent_chunks, or train "
                "fewer parameters."
            )
        return plan


def make_plan(
    layout: ModelLayout,
    preset: Preset,
    knobs: Knobs,
    device_budget: int | None,
    host_budget: int | None,
    state_bytes: float,
    min_num_params: int,
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

    Raises:
        ValueError: The plan does not fit, a knob contradicts the model or another knob, or it would be ignored.
    """
    if preset not in get_args(Preset):
        raise ValueError(f"plan={preset!r}: give one of {', '.join(map(repr, get_args(Preset)))}.")
    case = _Case(layout, device_budget, host_budget, state_bytes)
    if preset == "resident":
        knobs.refuse('"resident"')
        return _resident(case)
    if preset == "offload":
        knobs.refuse('"offload"', allowed=("chunk_bytes",))
        return case.on_host(_offload(case, knobs.chunk_bytes))
    if set(knobs.given) - {"chunk_bytes"}:
        return case.on_host(_pinned(case, knobs))
    plan = case.plan(_all_resident(pack_chunks(layout, knobs.chunk_bytes)), 0, 0)
    if not case.fits(plan):
        plan = _keep_large(case, _offload(case, knobs.chunk_bytes), min_num_params)
    return case.on_host(plan)


def _all_resident(chunks: Sequence[ChunkPlan]) -> list[ChunkPlan]:
    return [replace(chunk, resident=True) for chunk in chunks]


def _resident(case: _Case) -> Plan:
    chunks = pack_chunks(case.layout)
    plan = case.plan(_all_resident(chunks), 0, 0)
    if not case.fits(plan):
        assert case.device_budget is not None
        offload = case.plan(chunks, len(case.layout.blocks), minimum_chunk_buffers(case.layout, chunks))
        raise ValueError(
            f'plan="resident" needs {format_bytes(plan.memory.total)} on the device for model states, '
            f'{format_bytes(case.device_budget)} are allowed. Give plan="auto", or plan="offload", which needs '
            f"{format_bytes(offload.memory.total)}."
        )
    return plan


def _offload(case: _Case, chunk_bytes: int | None) -> Plan:
    chunks = pack_chunks(case.layout, chunk_bytes)
    least = minimum_chunk_buffers(case.layout, chunks)
    most = max(least, 2 * max(map(len, chunks_of(case.layout, chunks).values()), default=0))
    return case.most_buffers(chunks, len(case.layout.blocks), least, most)


def _keep_large(case: _Case, plan: Plan, min_num_params: int) -> Plan:
    """`plan` with large units outside blocks resident, one after the other as long as they fit."""
    for unit in case.layout.units:
        numel = sum(case.layout.parameter(fqn).numel for fqn in unit.parameters)
        if not unit.is_block and numel >= min_num_params:
            chunks = [replace(chunk, resident=chunk.resident or chunk.unit == unit.name) for chunk in plan.chunks]
            with_unit = case.plan(chunks, len(plan.blocks), plan.num_chunk_buffers)
            plan = with_unit if case.fits(with_unit) else plan
    return plan


def _pinned(case: _Case, knobs: Knobs) -> Plan:
    """The plan that the knobs pin; those left open take fixed values, and one warning names them."""
    chunks = pack_chunks(case.layout, knobs.chunk_bytes)
    num_persistent = knobs.num_persistent_chunks or 0
    if num_persistent > len(chunks):
        raise ValueError(f"num_persistent_chunks={num_persistent}: this model has {len(chunks)} chunks.")
    placed = [replace(chunk, resident=index < num_persistent) for index, chunk in enumerate(chunks)]
    num_checkpoint, num_keep = _activation_knobs(case.layout, placed, knobs)

    least = minimum_chunk_buffers(case.layout, placed)
    num_buffers = knobs.num_chunk_buffers
    if num_buffers is None:
        plan = case.most_buffers(placed, num_checkpoint, least, max(least, DEFAULT_CHUNK_BUFFERS))
    elif num_buffers < least:
        raise ValueError(f"num_chunk_buffers={num_buffers}: this model needs at least {least} with these knobs.")
    else:
        plan = case.most_buffers(placed, num_checkpoint, num_buffers, num_buffers)
    taken = {
        "num_persistent_chunks": num_persistent,
        "num_chunk_buffers": plan.num_chunk_buffers,
        "num_swap_blocks": 0,
        "num_checkpoint_blocks": num_checkpoint,
        "num_keep_offloaded_blocks": num_keep,
    }
    open_knobs = [f"{name}={value}" for name, value in taken.items() if name not in knobs.given]
    if open_knobs:
        warnings.warn(f"Knobs that were not given take these values: {', '.join(open_knobs)}.", stacklevel=3)
    return plan


def _activation_knobs(layout: ModelLayout, chunks: Sequence[ChunkPlan], knobs: Knobs) -> tuple[int, int]:
    """How many blocks checkpoint, and how many of the others have offloaded chunks."""
    offloaded = {fqn for chunk in chunks if not chunk.resident for fqn in chunk.parameters}
    streamed = [not offloaded.isdisjoint(block.parameters) for block in layout.blocks]
    keeps = [sum(streamed[num:]) for num in range(len(streamed) + 1)]  # falls to 0 in steps of one at most
    num_checkpoint, num_keep = knobs.num_checkpoint_blocks, knobs.num_keep_offloaded_blocks
    if num_checkpoint and [block.name for block in layout.blocks] == [""]:
        raise ValueError(
            f"num_checkpoint_blocks={num_checkpoint}: this model has no repeated list of blocks, and as a whole it "
            "cannot be run twice. Name blocks with `blocks`."
        )
    if num_checkpoint is not None and num_checkpoint > len(streamed):
        raise ValueError(f"num_checkpoint_blocks={num_checkpoint}: this model has {len(streamed)} blocks.")
    if num_keep is None:
        num_checkpoint = num_checkpoint or 0
        return num_checkpoint, keeps[num_checkpoint]
    if num_keep > keeps[0]:
        raise ValueError(
            f"num_keep_offloaded_blocks={num_keep}: {keeps[0]} of {len(streamed)} blocks have offloaded chunks."
        )
    if num_checkpoint is None:
        num_checkpoint = keeps.index(num_keep)
    if keeps[num_checkpoint] != num_keep:
        raise ValueError(
            f"num_keep_offloaded_blocks={num_keep} contradicts num_checkpoint_blocks={num_checkpoint}, which leaves "
            f"{keeps[num_checkpoint]} blocks with offloaded chunks that keep their activations. Give one of the two."
        )
    return num_checkpoint, num_keep


_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}


def parse_bytes(value: int | str) -> int:
    """Bytes from an integer, plain digits, or a number with a unit: decimal (`GB`) or binary (`GiB`).

    Raises:
        ValueError: Anything else, or less than one byte.
    """
    found = (
        re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?B)?\s*", str(value)) if type(value) in (int, str) else None
    )
    unit = (found[2] or "") if found else None
    nbytes = int(Decimal(found[1]) * _UNITS[unit]) if found and unit in _UNITS else 0
    if nbytes < 1:
        raise ValueError(
            f'{value!r} is no amount of memory. Give e.g. "22GiB", "512MiB", "1.5GB", or a number of bytes.'
        )
    return nbytes
