"""Runs of a model that an earlier run has divided among machines: trained on, evaluated, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_protrain import ProTrainStrategy, strategy
from tests.distributed.test_exchange import Case, Machines, fit, module_of
from tests.distributed.test_overlap import differing
from tests.distributed.test_parity import Module
from tests.ranks import run_ranks, values

ROWS: dict[str, Any] = {"shard_weights": "world"}
SLOW = pytest.mark.slow


class Watched(Module):
    def test_step(self, batch: list[Tensor]) -> None:
        self.log("loss", self.training_step(batch), sync_dist=True)

    def test_dataloader(self) -> DataLoader[Any]:
        tokens = torch.randint(23, (4, 9), generator=torch.Generator().manual_seed(5))
        return DataLoader(TensorDataset(tokens), batch_size=2)


class Way(NamedTuple):
    """How the second run is made; the first divides all weights.

    Attributes:
        kind: Of the model.
        local_size: Ranks of each machine.
        plan: What it streams.
        same_trainer: Whether the Trainer of the first one makes it.
    """

    kind: str = "full"
    local_size: int = 1
    plan: str = "offload"
    same_trainer: bool = False


def _trainer(rank: int, way: Way, plan: str, divides: dict[str, Any], **options: Any) -> L.Trainer:
    among = ProTrainStrategy(
        plan=plan,
        monitor=False,
        sharding="shard",
        overlap_optimizer="off",
        process_group_backend="gloo",
        cluster_environment=Machines(rank, 2 * way.local_size, way.local_size),
        **divides,
    )
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    how: dict[str, Any] = {**quiet, "accelerator": "cpu", "devices": way.local_size, "num_nodes": 2, "max_steps": 3}
    return L.Trainer(strategy=among, **how, **options)


def _run(rank: int, way: Way, divides: dict[str, Any]) -> tuple[dict[str, Tensor], float, L.LightningModule]:
    torch.set_num_threads(1)
    module = module_of(way.kind, Watched)
    trainer = _trainer(rank, way, "offload", divides)
    trainer.fit(module)
    other = trainer if way.same_trainer else _trainer(rank, way, way.plan, divides)
    (found,) = other.test(module, verbose=False)
    if way.same_trainer:
        trainer.fit_loop.epoch_loop.max_steps = 6
    trainer.fit(module) if way.same_trainer else _trainer(rank, way, way.plan, divides).fit(module)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, found["loss"], module


def _compare(rank: int, way: Way) -> tuple[list[str], float]:
    expected, loss, _ = _run(rank, way, {"shard_optimizer": "world"})
    found, other, module = _run(rank, way, ROWS)
    divided = [isinstance(each, DTensor) for each in module.parameters()]
    assert all(divided) if way.plan == "offload" else not any(divided)
    return differing(expected, found), loss - other


WAYS = [
    Way(),
    Way(same_trainer=True),
    Way("tied", 2),
    pytest.param(Way("lora"), marks=SLOW),
    Way(plan="resident"),
    pytest.param(Way("half frozen", 2, "resident"), marks=SLOW),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_model_is_trained_tested_and_trained_again(way: Way, tmp_path: Path) -> None:
    number = 2 * way.local_size
    assert values(run_ranks(_compare, number, tmp_path, way)) == [([], 0.0)] * number


def _refuse(rank: int, error: str, how: dict[str, Any]) -> list[str]:
    case = Case(True, divides=ROWS)
    module = module_of()
    expected, _ = fit(rank, module, case)
    weights = list(module.parameters())
    with pytest.raises(ValueError, match=error):
        fit(rank, module, case._replace(**how))
    assert all(one is other for one, other in zip(weights, module.parameters(), strict=True))
    return differing(expected, {name: value.detach().clone() for name, value in module.state_dict().items()})


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("among 2 machines, and they stay so", {"divides": {"shard_optimizer": "world", "shard_weights": "machine"}}),
    ("overlap_optimizer='forward' is not built", {"overlap": "forward"}),
]


@pytest.mark.parametrize(("error", "how"), REFUSED)
def test_a_run_that_is_refused_leaves_the_weights(error: str, how: dict[str, Any], tmp_path: Path) -> None:
    assert values(run_ranks(_refuse, 2, tmp_path, error, how)) == [[], []]


def _lose(rank: int) -> tuple[int, str]:
    """Of a run that fails when it has read the weights: how many the model has no more, and what the next one says."""
    case = Case(True, divides=ROWS)
    module = module_of()
    fit(rank, module, case)
    applied = strategy.apply_plan
    strategy.apply_plan = _fail  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="out of memory"):
        fit(rank, module, case)
    strategy.apply_plan = applied
    lost = sum(each.is_meta for each in module.parameters())
    with pytest.raises(ValueError, match="is on the meta device") as caught:
        fit(rank, module, case)
    return lost, str(caught.value)


def _fail(*_: Any) -> None:
    raise RuntimeError("out of memory")


def test_weights_that_were_read_and_not_placed_are_not_believed(tmp_path: Path) -> None:
    for lost, error in values(run_ranks(_lose, 2, tmp_path)):
        assert lost == len(list(module_of().parameters()))
        assert "'model.embedding.weight' is on the meta device" in error
