"""Plans that are searched for in a run of machines that divide steps: what they hold, and what they send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_protrain import ProTrainStrategy
from lightning_protrain.planner.plan import Sharding
from tests.distributed.test_exchange import Machines, module_of
from tests.distributed.test_parity import Module
from tests.machines import CPU
from tests.ranks import run_ranks, values


def _plan(rank: int, local_size: int) -> tuple[Any, Any, Any]:
    """Whether chunks are shared, host memory in the step and seconds of each resource, of "machine" and of "world"."""
    torch.set_num_threads(1)
    found: list[Any] = []
    for way in ("machine", "world"):
        strategy = ProTrainStrategy(
            device_memory="48KiB",
            num_persistent_chunks=0,  # How many fit in best depends on a measured network.
            chunk_bytes=4096,
            hardware=CPU,
            sharding="shard",
            shard_optimizer=way,
            monitor=False,
            process_group_backend="gloo",
            cluster_environment=Machines(rank, 2 * local_size, local_size),
        )
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        given: dict[str, Any] = {**quiet, "max_steps": 1, "devices": local_size, "num_nodes": 2}
        L.Trainer(accelerator="cpu", strategy=strategy, **given).fit(module_of(cls=Module))
        plan = strategy.plan
        assert plan is not None
        assert plan.prediction is not None
        host = {phase.name: phase.host for phase in plan.prediction.phases}["step"]
        found.append((plan.sharding, dict(host), dict(plan.prediction.busy)))
    return tuple(found)


@pytest.mark.parametrize("local_size", [1, 2])
def test_a_search_counts_what_is_divided(local_size: int, tmp_path: Path) -> None:
    (_, whole, before), (sharding, divided, busy) = values(run_ranks(_plan, 2 * local_size, tmp_path, local_size))[0]
    assert sharding is Sharding.SHARD
    assert divided["parameters"] == whole["parameters"]
    assert 0.5 * whole["optimizer_states"] <= divided["optimizer_states"] < 0.8 * whole["optimizer_states"]
    assert busy["host"] == pytest.approx(before["host"] / 2)
    assert busy["exchange"] > 0
    assert "exchange" not in before
