"""Plans of machines that are not here: what they divide, and what is left when the plans are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_protrain import ProTrainStrategy
from lightning_protrain.parallelism import Parallelism
from lightning_protrain.planner.memory import HostTooSmall
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.trainer import PlanningTrainer
from tests.distributed.test_parity import Module
from tests.machines import CPU

WEIGHTS = sum(each.nbytes for each in Module("full").parameters())
QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def planned(folder: Path, share: float, gpus: tuple[str, ...] = ("RTX 3090",), **how: Any) -> list[Plan | None]:
    """Plans for two machines of one GPU each, whose hosts have so many times the bytes of the weights."""
    given: dict[str, Any] = {"device_memory": "60KiB", "chunk_bytes": 4096, "num_persistent_chunks": 0, **how}
    trainer: Any = PlanningTrainer(accelerator="cpu", devices=1, strategy=ProTrainStrategy(**given), **QUIET)
    path, many = folder / "plans.json", {"num_gpus": 2, "num_nodes": 2}
    trainer.plan(Module("full"), gpu=gpus, **many, host_memory=int(share * WEIGHTS), json=str(path))
    found = json.loads(path.read_text())
    return [Plan.from_json(json.dumps(found[name])) if found[name] is not None else None for name in found]


@pytest.mark.parametrize(("share", "way"), [(6.0, "machine"), (3.85, "steps")])
def test_machines_divide_what_they_have_to(share: float, way: str, tmp_path: Path) -> None:
    given = {"machine": {"shard_optimizer": "machine"}, "steps": {"shard_optimizer": "world", "sharding": "shard"}}
    (expected,) = planned(tmp_path, share, **given[way])
    (found,) = planned(tmp_path, share)
    assert found == expected


def test_each_gpu_divides_as_much_as_it_has_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = ("RTX 3090", "RTX 4090")
    pair = planned(tmp_path, 3.85, gpus)
    assert pair == [planned(tmp_path, 3.85, (gpu,))[0] for gpu in gpus]
    assert "divided" in capsys.readouterr().out


def test_hosts_that_are_too_small_for_all_of_it_are_named(tmp_path: Path) -> None:
    with pytest.raises(HostTooSmall, match="All weights are on each machine until they are placed"):
        planned(tmp_path, 1.5)
    with pytest.raises(HostTooSmall, match='"world" divides gradients'):
        planned(tmp_path, 3.6, shard_optimizer="machine", shard_weights="machine")


@pytest.mark.parametrize("way", Parallelism().ways(3), ids=str)
def test_what_is_divided_on_paper_is_forgotten(way: Parallelism) -> None:
    strategy: Any = ProTrainStrategy(overlap_optimizer="forward")
    before = strategy.shardings(1, 3), strategy.divides_steps(3)
    with strategy.dividing(way):
        assert strategy.ways(3) == (way,)
        divides = "world" in (way.shard_optimizer, way.shard_weights)
        assert strategy.divides_steps(3) is divides
        with strategy.planning_only({"": {Sharding.SHARD: CPU}}, 3, 1, None, 1e9):
            assert strategy._wishes.machines == (3 if divides else 1)
            # Machines that divide weights overlap no steps.
            assert strategy._overlap_choice == ("off" if way.shard_weights == "world" else "forward")
    assert (strategy.shardings(1, 3), strategy.divides_steps(3)) == before
    assert strategy._overlap_choice == "forward"
    assert strategy.ways(3) == Parallelism().ways(3)
