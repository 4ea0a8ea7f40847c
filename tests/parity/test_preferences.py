"""PreferenceModule trains under every plan, and on two ranks, as in plain Lightning, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_protrain import ProTrainFSDP2Strategy, ProTrainStrategy
from lightning_protrain.planner.plan import Plan
from tests.support.machines import CPU
from tests.support.module_runs import trainer
from tests.support.plans import place, plans
from tests.support.preference_runs import LORA, Pairs, built, module
from tests.support.ranks import run_ranks, trainer_on_rank, values

ROWS = {**LORA, "trainable_token_indices": [3, 5], "lora_dropout": 0.2}
# Loss, adapters, and further arguments of the module.
RUNS: dict[str, dict[str, Any]] = {
    "dpo, full": {},
    "dpo, adapters": {"lora": LORA},
    "dpo, adapters with rows and dropout": {"lora": ROWS, "disable_dropout": False},
    "ipo, adapters computed before": {"lora": LORA, "loss": "ipo", "precompute_ref_log_probs": True},
    "kto, full": {"loss": "kto"},
    "kto, adapters": {"loss": "kto", "lora": LORA},
    "orpo, full": {"loss": "orpo"},
}


class Losses(Callback):
    """Records the loss of every micro-batch."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *rest: Any) -> None:
        self.losses.append(outputs["loss"].detach().clone())


def swapped(model: nn.Module) -> Plan:
    """Every chunk streamed, and the activations of every block swapped."""
    return place(model, swap_bytes=lambda index: 1 << 16)


PLANS = {**plans(), "swapped": swapped}


def outcome(folder: Path, run: str, strategy: Any = "auto", **options: Any) -> dict[str, Tensor]:
    """Weights, losses and metrics of a run of two windows, with validation before and after it."""
    made, recorded, loss = module(**RUNS[run]), Losses(), RUNS[run].get("loss", "dpo")
    fit = trainer(folder, strategy=strategy, callbacks=[recorded], accumulate_grad_batches=3, max_steps=2, **options)
    fit.fit(made, Pairs(folder / "cache", loss=loss, accumulate=3))
    assert len(recorded.losses) == 6
    metrics = {name: torch.as_tensor(value) for name, value in fit.callback_metrics.items()}
    assert "val_loss" in metrics
    weights = {name: value.clone() for name, value in made.state_dict().items()}
    return weights | metrics | {"losses": torch.stack(recorded.losses)}


def differences(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


@pytest.mark.sample(5)
@pytest.mark.parametrize("plan", ["alternating", "swapped"])
@pytest.mark.parametrize("run", RUNS)
def test_parity(run: str, plan: str, tmp_path: Path) -> None:
    found = outcome(tmp_path / "plan", run, ProTrainStrategy(plan=PLANS[plan](built(**RUNS[run]))))
    assert differences(outcome(tmp_path / "plain", run), found) == []


@pytest.mark.parametrize("run", ["kto, full", pytest.param("dpo, adapters", marks=pytest.mark.slow)])
def test_parity_in_mixed_precision(run: str, tmp_path: Path) -> None:
    found = outcome(tmp_path / "plan", run, ProTrainStrategy(plan="offload"), precision="bf16-mixed")
    assert differences(outcome(tmp_path / "plain", run, precision="bf16-mixed"), found) == []


@pytest.mark.slow
@pytest.mark.parametrize("run", ["dpo, full", "dpo, adapters", "kto, adapters"])
@pytest.mark.parametrize("rehearse", [False, True])
def test_parity_of_a_plan_that_was_searched_for(run: str, rehearse: bool, tmp_path: Path) -> None:
    """The step is profiled, and rehearsed, before the reference is computed."""
    options: dict[str, Any] = {"device_memory": "1MiB", "num_persistent_chunks": 1, "hardware": CPU, "monitor": False}
    strategy = ProTrainStrategy(**options, rehearse=rehearse)
    found = outcome(tmp_path / "plan", run, strategy)
    assert strategy.plan is not None
    assert strategy.plan.prediction is not None
    assert strategy.plan.num_offloaded_chunks > 0
    assert differences(outcome(tmp_path / "plain", run), found) == []


def on_rank(rank: int, folder: Path, run: str, plan: str | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    made, loss = module(**RUNS[run]), RUNS[run].get("loss", "dpo")
    kinds = {
        "offload": {"kind": partial(ProTrainStrategy, plan="offload", monitor=False)},
        "fsdp2": {"kind": partial(ProTrainFSDP2Strategy, min_num_params=600)},
    }
    kind: dict[str, Any] = kinds.get(str(plan), {})
    options: dict[str, Any] = {"max_steps": 2, "accumulate_grad_batches": 3, "use_distributed_sampler": False}
    fit = trainer_on_rank(rank, 2, **kind, **options)
    fit.fit(made, Pairs(folder / str(plan), loss=loss, accumulate=3, place=(rank, 2)))
    metrics = {
        name: float(value) for name, value in fit.callback_metrics.items() if name.startswith(("val", "train_l"))
    }
    weights = {} if plan == "fsdp2" else {name: value.numpy() for name, value in made.state_dict().items()}
    return {"weights": weights, "metrics": metrics}


@pytest.mark.slow
@pytest.mark.parametrize("run", ["dpo, full", "dpo, adapters", "kto, full"])
def test_two_ranks_are_ddp_bit_for_bit_and_have_the_metrics_of_one_process(run: str, tmp_path: Path) -> None:
    found = []
    for plan in (None, "offload", "fsdp2"):
        (meeting := tmp_path / f"meeting {plan}").mkdir()
        found.append(values(run_ranks(on_rank, 2, meeting, tmp_path, run, plan)))
    (ddp, _), (first, second), (sharded, _) = found
    assert first["metrics"] == second["metrics"] == ddp["metrics"]
    assert sharded["metrics"] == pytest.approx(ddp["metrics"], abs=1e-4)
    for name, value in ddp["weights"].items():
        assert (value == first["weights"][name]).all(), name
        assert (value == second["weights"][name]).all(), name
    alone = outcome(tmp_path / "alone", run)
    assert first["metrics"] == pytest.approx({name: float(alone[name]) for name in first["metrics"]}, abs=1e-4)
