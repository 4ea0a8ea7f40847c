"""Layouts of presets, and the policies of their plans."""

from __future__ import annotations

import warnings
from typing import Any

from lightning_protrain.config import Preset
from lightning_protrain.planner.memory import StatesProblem, check_fits
from lightning_protrain.planner.plan import BlockPolicy, Plan, check_plan
from lightning_protrain.planner.presets import Knobs, make_plan
from lightning_protrain.profiler.records import ModelLayout

STATE_BYTES = 8.0


KEEP, CHECKPOINT, SWAP = BlockPolicy.KEEP, BlockPolicy.CHECKPOINT, BlockPolicy.SWAP


SAVED = {f"layers.{index}": 4096 * (index + 1) for index in range(8)}


def plan_of(
    layout: ModelLayout,
    preset: Preset = "auto",
    device: int | None = None,
    host: int | None = None,
    min_num_params: int = 10**8,
    saved: dict[str, int] | None = SAVED,
    **knobs: int,
) -> Plan:
    problem = StatesProblem(layout, STATE_BYTES, device, host, saved)
    plan = make_plan(problem, preset, Knobs(**knobs), min_num_params)
    check_plan(plan, layout)
    check_fits(plan, problem)
    return plan


def pinned(layout: ModelLayout, device: int | None = None, **knobs: Any) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return plan_of(layout, device=device, **knobs)


def policies(plan: Plan) -> list[BlockPolicy]:
    return [block.policy for block in plan.blocks]
