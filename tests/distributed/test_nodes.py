"""Two nodes of two ranks, with one copy of the weights each, give the results of one rank on the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_protrain import ProTrainStrategy
from lightning_protrain.planner.plan import Sharding
from tests.support.overlap_faults import AT, Faulty, Saving
from tests.support.overlapped_ranks import TwoMachines, differing, module_of, slow_steps
from tests.support.parity import snapshot
from tests.support.plans import half
from tests.support.rank_models import Module, Same
from tests.support.ranks import run_ranks, values
from tests.support.trainers import QUIET

STEPS = 4
CLIP = {"gradient_clip_val": 0.1}


def fit(
    rank: int, module: Module, overlap: str, part: bool = False, path: Path | None = None, **options: Any
) -> tuple[dict[str, Tensor], L.Trainer]:
    """Train as one rank of two on one of two nodes, from a checkpoint if one is given."""
    torch.set_num_threads(1)
    strategy = ProTrainStrategy(
        plan=half(module) if part else "offload",
        sharding="shard",
        monitor=False,
        overlap_optimizer=overlap,  # type: ignore[arg-type]
        adapter_grad_sync="ddp",
        process_group_backend="gloo",
        cluster_environment=TwoMachines(rank),
    )
    given: dict[str, Any] = {**QUIET, "max_steps": STEPS, "max_epochs": -1, "use_distributed_sampler": False, **options}
    trainer = L.Trainer(accelerator="cpu", devices=2, num_nodes=2, strategy=strategy, **given)
    trainer.fit(module, ckpt_path=path)
    assert strategy.plan.sharding is Sharding.SHARD
    return snapshot(module), trainer


def plain_fit(module: Module, path: Path | None = None, **options: Any) -> dict[str, Tensor]:
    """Train as one rank alone."""
    torch.set_num_threads(1)
    given: dict[str, Any] = {**QUIET, "max_steps": STEPS, "max_epochs": -1, **options}
    L.Trainer(accelerator="cpu", devices=1, **given).fit(module, ckpt_path=path)
    return snapshot(module)


# By micro-batches of a step. Behind backward nothing is clipped.
WAYS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [("off", CLIP), ("backward", {}), ("forward", CLIP)],
    2: [("off", {}), ("backward", {}), ("forward", {})],
}


def _compare(rank: int, kind: str, part: bool) -> list[str]:
    wrong = []
    for accumulate, ways in WAYS.items():
        for overlap, clipping in ways:
            given = {"accumulate_grad_batches": accumulate, **clipping}
            expected = plain_fit(module_of(kind, Same), **given)
            with slow_steps(0.002 if rank == accumulate else 0.0):
                found, _ = fit(rank, module_of(kind, Same), overlap, part, **given)
            wrong += [f"{overlap} {given}: {name}" for name in differing(expected, found)[:1]]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "part"),
    [("full", False), pytest.param("tied", True, marks=pytest.mark.slow), pytest.param("lora", False)],
)
def test_two_nodes_give_the_weights_of_one_rank(kind: str, part: bool, tmp_path: Path) -> None:
    assert values(run_ranks(_compare, 4, tmp_path, kind, part)) == [[]] * 4


def _low_precision(rank: int, overlap: str) -> list[str]:
    given = {"precision": "bf16-mixed"}
    expected = plain_fit(module_of(cls=Same), **given)
    found, trainer = fit(rank, module_of(cls=Same), overlap, **given)
    assert any(chunk.streamed_dtype for chunk in trainer.strategy.plan.chunks)
    return differing(expected, found)


def test_copies_in_low_precision_follow_the_weights(tmp_path: Path) -> None:
    assert values(run_ranks(_low_precision, 4, tmp_path, "forward")) == [[]] * 4


class Thawing(Same):
    """Trains the first layers later, and freezes the last one between backward and its step."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.model.layers[:2].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            self.model.layers[:2].requires_grad_(True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 3:
            self.model.layers[2].requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class ByHand(Same):
    """A module with two optimizers that take turns, and one backward that no step follows."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        layers = self.model.layers
        rest = [*self.model.embedding.parameters(), *self.model.head.parameters()]
        return torch.optim.AdamW(layers.parameters(), lr=0.01), torch.optim.SGD(rest, lr=0.1)


def _unusual(rank: int, cls: type[Module]) -> list[str]:
    expected = plain_fit(module_of(cls=cls), max_steps=5)
    found, _ = fit(rank, module_of(cls=cls), "off", max_steps=5)
    return differing(expected, found)


@pytest.mark.parametrize("cls", [Thawing, ByHand])
def test_what_is_trained_may_change(cls: type[Module], tmp_path: Path) -> None:
    assert values(run_ranks(_unusual, 4, tmp_path, cls)) == [[]] * 4


def _save(rank: int, folder: Path) -> list[str]:
    """Save on two nodes and on one rank, resume each under the other, and say what differs from an unbroken run."""
    whole = plain_fit(module_of(cls=Same))
    options: dict[str, Any] = {"max_steps": 2, "enable_checkpointing": True}

    def saving(name: str) -> dict[str, Any]:
        return {**options, "callbacks": [ModelCheckpoint(folder / name, filename="at", every_n_train_steps=2)]}

    fit(rank, module_of(cls=Same), "forward", **saving("nodes"))
    if rank == 0:
        plain_fit(module_of(cls=Same), **saving("plain"))
    dist.barrier()
    wrong = []
    for name in ("nodes", "plain"):
        module = module_of(cls=Same)
        torch.nn.init.zeros_(module.model.head.weight)
        found, _ = fit(rank, module, "forward", path=folder / name / "at.ckpt")
        wrong += [f"{name} on two nodes: {key}" for key in differing(whole, found)[:1]]
    resumed = plain_fit(module_of(cls=Same), folder / "nodes" / "at.ckpt")
    return wrong + [f"nodes on one rank: {key}" for key in differing(whole, resumed)[:1]]


def test_checkpoints_are_those_of_one_rank(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    assert values(run_ranks(_save, 4, tmp_path, folder)) == [[]] * 4
    plain, nodes = (torch.load(folder / name / "at.ckpt", weights_only=False) for name in ("plain", "nodes"))
    assert differing(plain["state_dict"], nodes["state_dict"]) == []
    (one,), (other,) = plain["optimizer_states"], nodes["optimizer_states"]
    assert len(one["state"]) == len(other["state"]) == 17
    for index, state in one["state"].items():
        assert differing(state, other["state"][index]) == []


class BeforeStep(Faulty):
    """Fails between backward and the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.rank == 1 and self.global_step == AT:
            raise ValueError("boom")


class AfterStep(Faulty):
    """Fails when steps have been launched, before anybody has waited for them."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.rank == 1 and self.global_step == AT:
            optimizer.register_step_post_hook(self._raise_behind)

    def _raise_behind(self, *_: Any) -> None:
        raise ValueError("boom")


def _fail(rank: int, cls: type[Faulty], overlap: str) -> tuple[str, str]:
    """Return what this rank raises, and why its weights could not be saved (empty if they could)."""
    module, saving = module_of(cls=cls), Saving()
    assert isinstance(module, Faulty)
    module.rank = rank
    try:
        fit(rank, module, overlap, max_steps=AT + 2, callbacks=[saving])
    except (RuntimeError, ValueError) as error:
        refused = saving.found if isinstance(saving.found, str) else ""
        return f"{type(error).__name__}: {error}", refused
    return "", ""


@pytest.mark.parametrize("overlap", ["off", "forward"])
@pytest.mark.parametrize("cls", [BeforeStep, AfterStep])
def test_a_rank_that_raises_ends_all_nodes(cls: type[Faulty], overlap: str, tmp_path: Path) -> None:
    for rank, (error, refused) in enumerate(values(run_ranks(_fail, 4, tmp_path, cls, overlap))):
        assert ("ValueError: boom" if rank == 1 else f"ends on rank {rank}: ") in error, error
        assert not refused or "partially stepped" in refused or "is missing" in refused
