"""What Lightning's loops, callbacks and tuner do, they do under a plan as they do without one: bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_protrain.callbacks.plan_monitor import PREFIX
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.models import (
    LanguageModel,
    Mlp,
    MultiOptimizerModule,
    ParityModule,
    ValidationModule,
    fit,
    token_batches,
)
from tests.support.parity import snapshot
from tests.support.plans import PlanChoice, alternating, kept
from tests.support.trainers import QUIET

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


class GanModule(ParityModule):
    """Two optimizers that take turns, one of them toggled, and two more backwards that both accumulate into."""

    def __init__(self, network: nn.Module, **arguments: Any) -> None:
        super().__init__(network, **arguments)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        blocks, rest = self.optimizers()
        for optimizer in (blocks, rest):
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch[0], batch_idx)
            self.manual_backward(loss)
            self.losses.append(loss.detach().clone())
            if batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        for _ in range(2):
            self.manual_backward(self.loss(batch[0], batch_idx) / 2)
        self.clip_gradients(rest, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        rest.step()

    def configure_optimizers(self) -> Any:
        outer = [p for name, p in self.named_parameters() if ".blocks." not in name]
        return torch.optim.AdamW(self.network.blocks.parameters(), lr=0.01), torch.optim.SGD(
            outer, lr=0.1, momentum=0.9
        )


@plans
@pytest.mark.parametrize("kind", [GanModule, MultiOptimizerModule])
def test_manual_optimization(kind: type[ParityModule], plan: str) -> None:
    _compare(lambda: _make(kind), plan, max_epochs=2)


class TwoLossesModule(ParityModule):
    """One forward, two backwards through the same graph."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        logits = self.network(batch[0])
        first = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())
        second = logits.square().mean()
        self.manual_backward(first, retain_graph=True)
        self.manual_backward(second)
        self.losses += [first.detach().clone(), second.detach().clone()]
        optimizer.step()


@pytest.mark.parametrize("plan", ["kept"])
def test_two_backwards_through_one_graph(plan: str) -> None:
    _compare(lambda: _make(TwoLossesModule), plan)


class LbfgsModule(ParityModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.3, max_iter=3, history_size=3)


@pytest.mark.parametrize("plan", ["offload", "kept"])
def test_lbfgs_calls_its_closure_several_times(plan: str) -> None:
    plain, _ = _compare(lambda: _make(LbfgsModule), plan)
    assert len(plain.lightning_module.losses) > 2 * len(token_batches())


# --- callbacks --------------------------------------------------------------------------------------------------------


class UnfreezeBlocks(BaseFinetuning):
    """Trains the head first, the blocks from the second epoch on."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze([pl_module.network.embedding, pl_module.network.blocks, pl_module.network.norm])

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.network.blocks, optimizer, lr=0.02)


@plans
def test_blocks_unfrozen_in_the_second_epoch(plan: str) -> None:
    def make() -> L.LightningModule:
        # A Plan is for the model as it is set up, so with what the callback freezes frozen.
        module = _make()
        UnfreezeBlocks().freeze_before_training(module)
        return module

    plain, found = _compare(make, plan, callbacks=lambda: [UnfreezeBlocks()], max_epochs=3)
    groups = [[len(group["params"]) for group in trainer.optimizers[0].param_groups] for trainer in (plain, found)]
    assert groups[0] == groups[1] == [1, 18]
    assert not torch.equal(found.lightning_module.network.blocks[0].up.weight, _make().network.blocks[0].up.weight)


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


class StepCounts(L.Callback):
    """How often every hook of a step fired."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def on_before_zero_grad(self, *args: Any) -> None:
        self._count("zero_grad")

    def on_before_backward(self, *args: Any) -> None:
        self._count("before_backward")

    def on_after_backward(self, *args: Any) -> None:
        self._count("after_backward")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self._count("optimizer_step")


@plans
def test_the_hooks_of_a_step_fire_once(plan: str) -> None:
    counters: list[StepCounts] = []

    def count() -> list[L.Callback]:
        counters.append(StepCounts())
        return [counters[-1]]

    _compare(_make, plan, callbacks=count, accumulate_grad_batches=2)
    assert counters[0].counts == counters[1].counts
    assert counters[1].counts["optimizer_step"] == 7
    assert counters[1].counts["before_backward"] == counters[1].counts["after_backward"] == 14


def _quarter(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.25)


class GradientScaling(L.Callback):
    """Hooks of the user: on gradients, on modules, on accumulation; and a change of gradients before the step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.handles: list[Any] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for parameter in pl_module.network.blocks[1].parameters():
            self.handles.append(parameter.register_hook(lambda grad: grad * 0.5))
            self.handles.append(parameter.register_post_accumulate_grad_hook(_quarter))
        block = pl_module.network.blocks[0]
        self.handles.append(block.register_forward_hook(lambda module, args, output: output * 1.5))
        self.handles.append(block.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.75,)))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            assert parameter.device.type == "cpu"
            assert parameter.grad is not None
            self.seen.append(parameter.grad.clone())
            parameter.grad.clamp_(-0.01, 0.01)

    def on_train_end(self, *args: Any) -> None:
        for handle in self.handles:
            handle.remove()


@plans
def test_hooks_of_the_user_see_and_change_the_same_gradients(plan: str) -> None:
    callbacks: list[GradientScaling] = []

    def scale() -> list[L.Callback]:
        callbacks.append(GradientScaling())
        return [callbacks[-1]]

    _compare(_make, plan, callbacks=scale)
    assert len(callbacks[0].seen) == len(callbacks[1].seen) > 0
    assert all(torch.equal(one, other) for one, other in zip(callbacks[0].seen, callbacks[1].seen, strict=True))


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


@plans
def test_learning_rate_finder(plan: str) -> None:
    found, modules = [], []
    for planned in (False, True):
        module = _make()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            strategy=ProTrainStrategy(plan=PLANS[plan](module)) if planned else "auto",
            **QUIET,
        )
        torch.manual_seed(0)
        finder = Tuner(trainer).lr_find(module, num_training=12, min_lr=1e-4, max_lr=0.5, early_stop_threshold=None)
        assert finder is not None
        found.append((finder.results["loss"], finder.suggestion(skip_begin=2, skip_end=1), module.lr))
        trainer.fit(module)
        modules.append(module)
    assert found[0] == found[1]
    _assert_equal(*modules)
