"""Plans of machines that are not here: who shares, what no node holds, and what is left when the plans are made."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_protrain import ProTrainStrategy
from lightning_protrain.planner.memory import HostTooSmall
from lightning_protrain.planner.plan import Plan, RankLayout, Sharding
from lightning_protrain.strategy.joint_plan import DryRun
from lightning_protrain.trainer import PlanningTrainer
from tests.support.machines import CPU
from tests.support.rank_models import Module

WEIGHTS = sum(each.nbytes for each in Module("full").parameters())
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def planned(folder: Path, share: float, num_nodes: int = 2, here: int = 1, **how: Any) -> Plan | None:
    """Plan for nodes whose hosts have so many times the bytes of the weights."""
    given: dict[str, Any] = {"device_memory": "60KiB", "chunk_bytes": 4096, "num_persistent_chunks": 0, **how}
    trainer: Any = PlanningTrainer(accelerator="cpu", devices=1, strategy=ProTrainStrategy(**given), **QUIET)
    path, many = folder / "plans.json", {"num_gpus": num_nodes * here, "num_nodes": num_nodes}
    trainer.plan(Module("full"), gpu=("RTX 3090",), **many, host_memory=int(share * WEIGHTS), json=str(path))
    found = json.loads(path.read_text())["RTX 3090"]
    return None if found is None else Plan.from_json(json.dumps(found))


# Of the bytes of the weights, each node needs about four times as many under a plan, and fewer if all nodes share them.
@pytest.mark.parametrize(
    ("num_nodes", "share", "said"),
    [
        (
            8,
            3.5,
            r'With cpu_offload=True, strategy="protrain_fsdp2" takes .* on each device and .* on the host of each',
        ),
        (2, 0.5, r'With cpu_offload=True, strategy="protrain_fsdp2" does not fit: .* on the host of each node'),
    ],
)
@pytest.mark.parametrize("how", [{}, {"plan": "offload"}], ids=["searched", "given"])
def test_what_no_node_holds_is_refused_with_what_fsdp2_would_take(
    num_nodes: int, share: float, said: str, how: dict[str, Any], tmp_path: Path
) -> None:
    if how:
        how |= {"device_memory": "auto", "num_persistent_chunks": None}
    with pytest.raises(HostTooSmall, match=said):
        planned(tmp_path, share, num_nodes, **how)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_plan_for_several_nodes_says_what_fsdp2_would_take(num_nodes: int, tmp_path: Path) -> None:
    plan = planned(tmp_path, 20.0, num_nodes)
    assert plan is not None
    assert plan.prediction is not None
    said = [sentence for sentence in plan.prediction.advice if "protrain_fsdp2" in sentence]
    assert len(said) == num_nodes - 1
    assert all(re.match('With cpu_offload=True, strategy="protrain_fsdp2" takes .* on each device', it) for it in said)


def test_a_single_rank_is_not_told_to_shard(tmp_path: Path) -> None:
    with pytest.raises(HostTooSmall) as caught:
        planned(tmp_path, 0.5, num_nodes=1)
    assert "protrain_fsdp2" not in str(caught.value)


def test_what_is_planned_for_on_paper_is_forgotten() -> None:
    strategy: Any = ProTrainStrategy(overlap_optimizer="forward")
    dry_run = DryRun({"": {Sharding.SHARD: CPU}}, RankLayout(3, 2))
    with strategy.session.planning_only(dry_run) as answers:
        assert strategy.session.dry_run is dry_run
    assert strategy.session.dry_run is None
    assert answers == {}
