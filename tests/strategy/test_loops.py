"""What Lightning's loops, callbacks and tuner do, they do under a plan as they do without one: bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn

from lightning_protrain.callbacks.plan_monitor import PREFIX
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.models import (
    LanguageModel,
    Mlp,
    ParityModule,
    ValidationModule,
    fit,
)
from tests.support.parity import snapshot
from tests.support.plans import PlanChoice, alternating, kept

PLANS: dict[str, Callable[[nn.Module], PlanChoice]] = {
    "offload": lambda module: "offload",
    "kept": kept,
    "alternating": alternating,
}
Strategy = str | ProTrainStrategy
plans = pytest.mark.parametrize("plan", PLANS)


def _make(kind: type[ParityModule] = ValidationModule, **arguments: Any) -> Any:
    torch.manual_seed(0)
    return kind(LanguageModel([Mlp(), Mlp(), Mlp()]), **arguments)


def _compare(
    make: Callable[[], Any], plan: str, callbacks: Callable[[], list[L.Callback]] = list, **options: Any
) -> tuple[Any, Any]:
    """Trains twice, plainly and under `plan`: losses and weights must be equal; returns both trainers."""
    trainers, modules = [], []
    options = {"limit_val_batches": 3, **options}
    for planned in (False, True):
        module = make()
        strategy: Strategy = ProTrainStrategy(plan=PLANS[plan](module)) if planned else "auto"
        trainers.append(fit(module, strategy=strategy, callbacks=callbacks(), **options))
        modules.append(module)
    _assert_equal(*modules)
    own = [{name for name in trainer.callback_metrics if not name.startswith(PREFIX)} for trainer in trainers]
    assert own[0] == own[1] == trainers[0].callback_metrics.keys()
    for name, value in trainers[0].callback_metrics.items():
        assert torch.equal(value, trainers[1].callback_metrics[name]), name
    assert trainers[0].global_step == trainers[1].global_step > 0
    return trainers[0], trainers[1]


def _assert_equal(plain: Any, found: Any) -> None:
    assert len(plain.losses) == len(found.losses) > 0
    assert torch.equal(torch.stack(plain.losses), torch.stack(found.losses))
    if getattr(plain, "val_losses", None):
        assert torch.equal(torch.stack(plain.val_losses), torch.stack(found.val_losses))
    expected, values = snapshot(plain), snapshot(found)
    assert list(expected) == list(values)
    for name, value in expected.items():
        assert torch.equal(value, values[name]), name


# --- optimizers and schedulers ----------------------------------------------------------------------------------------


class SchedulerModule(ValidationModule):
    kind = "step"

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.3, "lr": 0.02}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        if self.kind == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.02], total_steps=30)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class PlateauModule(SchedulerModule):
    kind = "plateau"


@plans
@pytest.mark.parametrize("kind", [SchedulerModule, PlateauModule])
def test_schedulers_and_parameter_groups(kind: type[ParityModule], plan: str) -> None:
    plain, found = _compare(lambda: _make(kind), plan, max_epochs=2, gradient_clip_val=0.7)
    rates = [[group["lr"] for group in trainer.optimizers[0].param_groups] for trainer in (plain, found)]
    assert rates[0] == rates[1]
    assert rates[0] != [0.02, 0.01]


# --- callbacks --------------------------------------------------------------------------------------------------------


class AveragingFromStep3(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx >= 3


CALLBACKS: dict[str, Callable[[], list[L.Callback]]] = {
    "averaging": lambda: [AveragingFromStep3()],
    "ema": lambda: [EMAWeightAveraging(decay=0.9)],
    "swa": lambda: [StochasticWeightAveraging(swa_lrs=0.005, swa_epoch_start=1, annealing_epochs=1)],
    "early stopping": lambda: [EarlyStopping("val_loss", min_delta=10.0, patience=1)],
    "accumulation": lambda: [GradientAccumulationScheduler({0: 1, 1: 3})],
}


@plans
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_that_change_the_run(name: str, plan: str) -> None:
    _, found = _compare(_make, plan, callbacks=CALLBACKS[name], max_epochs=3)
    untouched = _make()
    fit(untouched, max_epochs=3)
    weights = snapshot(found.lightning_module)
    assert any(not torch.equal(value, weights[key]) for key, value in snapshot(untouched).items()), "it had no effect"


# --- options of the Trainer and the tuner -----------------------------------------------------------------------------


@plans
@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": True},
        {"fast_dev_run": 3},
        {"overfit_batches": 2, "max_epochs": 3},
        {"limit_val_batches": 3, "val_check_interval": 4, "max_epochs": 2},
        {"val_check_interval": 0.25, "limit_train_batches": 8, "check_val_every_n_epoch": 1},
        {"val_check_interval": 5, "check_val_every_n_epoch": None, "max_epochs": 2, "num_sanity_val_steps": 2},
        {"limit_train_batches": 0.5, "max_steps": 9, "max_epochs": -1, "accumulate_grad_batches": 2},
        {"detect_anomaly": True, "max_steps": 3},
        {"deterministic": True, "max_steps": 3, "inference_mode": False},
        {"barebones": True, "max_steps": 5},
    ],
    ids=str,
)
@pytest.mark.leaves("deterministic_algorithms", "CUBLAS_WORKSPACE_CONFIG", "cudnn_flags")
def test_options_of_the_trainer(options: dict[str, Any], plan: str) -> None:
    if options.get("barebones"):
        options = {**options, "callbacks": lambda: None}
        options |= dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), None
        )
    _compare(_make, plan, **options)
