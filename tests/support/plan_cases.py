"""Requests to a plan session, and the cases of its budgets."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_protrain.cgroup_limits import free_host_bytes
from lightning_protrain.config import Knobs, PlanOptions
from lightning_protrain.planner.free_memory import FreeMemory
from lightning_protrain.planner.problem import Training, Workload
from lightning_protrain.planner.request import LocalNode, PlanRequest
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from tests.support.machines import CPU
from tests.support.models import zoo

WHOLE = Knobs(
    num_persistent_chunks=0, num_chunk_buffers=3, num_swap_blocks=0, num_checkpoint_blocks=1, chunk_bytes=1 << 20
)


def case(free: int | None = None, profiled: bool = True, **said: Any) -> PlanRequest:
    """Ask for a plan of the model "reused", on a device with so many free bytes."""
    module = zoo()["reused"]()
    layout = describe_model(module)
    batch = module.train_dataloader().dataset[0:2]
    profile = profile_model(module, layout, lambda: module.training_step(batch, 0)) if profiled else None
    workload = Workload(layout, profile, state_bytes=8.0, training=Training())
    node = LocalNode(FreeMemory(free, free_host_bytes(), workload.weight_bytes), False, lambda _: CPU)
    return asking(PlanRequest("auto", PlanOptions(), workload, node, rank_zero_info), **said)


def asking(found: PlanRequest, **said: Any) -> PlanRequest:
    """Return the request with other settings of the user."""
    names = {each.name for each in fields(PlanOptions)}
    options = replace(found.options, **{name: said.pop(name) for name in names & said.keys()})
    return replace(found, options=options, **said)
