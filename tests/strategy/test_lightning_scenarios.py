"""Scenarios with a Trainer end as in a plain run: snapshot, counts, and what callbacks see."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset, RandomIterableDataset
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from lightning_protrain import ProTrainStrategy
from lightning_protrain.report.plan_monitor import PREFIX
from tests.support.parity import snapshot
from tests.support.trainers import QUIET

NewTrainer = Callable[..., L.Trainer]
Scenario = Callable[[NewTrainer, Path], Any]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


class Deep(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"]


class Manual(Deep):
    """Optimizes by hand, with two optimizers of the same snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01), torch.optim.Adam(self.parameters(), lr=0.01)


# --- optimizers -------------------------------------------------------------------------------------------------------


@scenario
def optimizers_that_are_mocked(new: NewTrainer, folder: Path) -> Any:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.step(batch))
                optimizer.step()

    with (
        patch.multiple(torch.optim.SGD, zero_grad=DEFAULT, step=DEFAULT) as sgd,
        patch.multiple(torch.optim.Adam, zero_grad=DEFAULT, step=DEFAULT) as adam,
    ):
        new().fit(Module())
    return [kind[name].call_count for kind in (sgd, adam) for name in ("zero_grad", "step")]


@scenario
def a_step_that_runs_its_closure_first(new: NewTrainer, folder: Path) -> Any:
    class Module(Deep):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any, **_: Any) -> None:
            optimizer_closure()
            if batch_idx % 2 == 0:
                optimizer.step()

    module = Module()
    new().fit(module)
    return snapshot(module)


@scenario
def lbfgs(new: NewTrainer, folder: Path) -> Any:
    class Module(Deep):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    module = Module()
    with patch.object(torch.optim.LBFGS, "zero_grad", autospec=True, side_effect=torch.optim.LBFGS.zero_grad) as zero:
        new().fit(module)
    return snapshot(module), zero.call_count


@scenario
def a_graph_that_is_gone_through_twice(new: NewTrainer, folder: Path) -> Any:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            assert self.layer[0].weight.grad is None
            self.manual_backward(self.step(batch))
            first.step()
            first.zero_grad()
            loss = self.step(batch)
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
            second.step()
            second.zero_grad()

    module = Module()
    trainer = new()
    trainer.fit(module)
    return snapshot(module), trainer.global_step


@scenario
def a_closure_under_manual_optimization(new: NewTrainer, folder: Path) -> Any:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            def closure() -> Tensor:
                loss = self.step(nn.functional.dropout(batch, 0.1))
                self.manual_backward(loss)
                self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
                return loss

            optimizer = self.optimizers()[0]
            optimizer.step(closure=closure)
            optimizer.zero_grad()

    module = Module()
    trainer = new()
    trainer.fit(module)
    return snapshot(module), trainer.progress_bar_metrics


@scenario
def optimizers_that_are_toggled(new: NewTrainer, folder: Path) -> Any:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward(self.step(batch))
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            inner, outer = self.layer[0].parameters(), self.layer[2].parameters()
            return torch.optim.SGD(inner, lr=0.01), torch.optim.Adam(outer, lr=0.01)

    module = Module()
    new().fit(module)
    return snapshot(module)


@scenario
def groups_and_optimizers_that_come_later(new: NewTrainer, folder: Path) -> Any:
    class Module(Deep):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.layer[0].parameters())

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.trainer.optimizers[0].add_param_group({"params": list(self.layer[2].parameters())})
            if self.current_epoch == 2:
                self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.05)]

    module = Module()
    new(max_epochs=3).fit(module)
    return snapshot(module)


@scenario
def schedulers_of_groups(new: NewTrainer, folder: Path) -> Any:
    class Module(Validated):
        def __init__(self, on_plateaus: bool) -> None:
            super().__init__()
            self.on_plateaus = on_plateaus

        def configure_optimizers(self) -> Any:
            matrices, vectors = ([p for p in self.parameters() if (p.dim() > 1) is many] for many in (True, False))
            groups = [{"params": matrices, "weight_decay": 0.3, "lr": 0.02}, {"params": vectors, "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW(groups, lr=0.01)
            if self.on_plateaus:
                scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.02], total_steps=30)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    found = []
    for on_plateaus in (False, True):
        module, trainer = Module(on_plateaus), new(gradient_clip_val=0.7, max_epochs=3)
        trainer.fit(module)
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        assert rates != [0.02, 0.01]
        found.append((snapshot(module), rates))
    return found


@scenario
def gradients_that_a_manual_step_changes(new: NewTrainer, folder: Path) -> Any:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, _ = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(1000 * self.step(batch))
            assert nn.utils.clip_grad_norm_(self.parameters(), 0.01) > 0.01
            optimizer.step()
            loss = self.step(batch)
            self.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.manual_backward(self.step(batch))
            self.layer[0].weight.grad /= 2
            optimizer.step()
            optimizer.zero_grad()
            assert self.layer[0].weight.grad is None

    module = Module()
    new().fit(module)
    return snapshot(module)


# --- callbacks --------------------------------------------------------------------------------------------------------


class Unfreezing(cb.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layer)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.unfreeze_and_add_param_group(pl_module.layer[epoch + 1], optimizer)


@scenario
def layers_that_are_unfrozen_one_by_one(new: NewTrainer, folder: Path) -> Any:
    class Module(Deep):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.layer[0].parameters(), lr=0.1)

    module, finetuning = Module(), Unfreezing()
    new(callbacks=[finetuning], max_epochs=2).fit(module)
    return snapshot(module), [group["params"] for group in finetuning._internal_optimizer_metadata[0]]


@scenario
def pruning(new: NewTrainer, folder: Path) -> Any:
    found = []
    # The "lottery ticket" resets snapshot to a copy that on a CPU is from then on one memory with them.
    common = {"amount": 0.3, "use_lottery_ticket_hypothesis": False}
    structured = {"pruning_fn": "ln_structured", "pruning_dim": 0, "pruning_norm": 1, "parameter_names": ["weight"]}
    for options in ({"pruning_fn": "l1_unstructured"}, {**structured, "use_global_unstructured": False}):
        module = Deep()
        trainer = new(callbacks=[cb.ModelPruning(**common, **options)])
        trainer.fit(module)
        found.append((snapshot(module), trainer.test(module, verbose=False)))
    return found


@scenario
def averages_of_weights(new: NewTrainer, folder: Path) -> Any:
    class FromStep3(cb.WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return step_idx is not None and step_idx >= 3

    found = []
    swa = cb.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
    for average in (FromStep3(), cb.EMAWeightAveraging(decay=0.9), swa):
        module = Deep()
        new(callbacks=[average], max_epochs=3).fit(module)
        found.append(snapshot(module))
    return found


class Validated(Deep):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.step(batch))


@scenario
def runs_that_callbacks_slow_down_or_end(new: NewTrainer, folder: Path) -> Any:
    found = []
    for callback in (
        cb.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4}),
        cb.EarlyStopping("val_loss", min_delta=10.0, patience=1),
    ):
        module = Validated()
        trainer = new(callbacks=[callback], max_epochs=4)
        trainer.fit(module)
        found.append((snapshot(module), trainer.global_step))
    return found


@scenario
def tuning(new: NewTrainer, folder: Path) -> Any:
    class Module(Deep):
        lr = 0.1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    module = Module()
    trainer = new()
    found = Tuner(trainer).lr_find(module, num_training=6)
    trainer.fit(module)
    return snapshot(module), found.suggestion(skip_begin=1, skip_end=1)


@scenario
def profilers(new: NewTrainer, folder: Path) -> Any:
    found = []
    for profiler in ("simple", "advanced"):
        module = Deep()
        new(profiler=profiler).fit(module)
        found.append(snapshot(module))
    return found


# --- loops and data ---------------------------------------------------------------------------------------------------


@scenario
def batches_that_are_left_out(new: NewTrainer, folder: Path) -> Any:
    class Module(Deep):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    module = Module()
    trainer = new()
    trainer.fit(module)
    return snapshot(module), trainer.global_step


@scenario
def batches_that_the_step_takes_itself(new: NewTrainer, folder: Path) -> Any:
    class Module(BoringModel):
        def training_step(self, dataloader_iter: Any) -> Any:
            return sum(self.step(next(dataloader_iter)[0]) for _ in range(2))

    module = Module()
    trainer = new()
    trainer.fit(module)
    return snapshot(module), trainer.global_step


@scenario
def several_loaders(new: NewTrainer, folder: Path) -> Any:
    class Module(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.step(batch["a"]) + self.step(batch["b"])

        def train_dataloader(self) -> Any:
            return {"a": DataLoader(RandomIterableDataset(32, 6)), "b": DataLoader(RandomDataset(32, 9))}

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("loss", self.step(batch))

        def val_dataloader(self) -> Any:
            return [DataLoader(RandomDataset(32, 3)), DataLoader(RandomDataset(32, 4))]

    module = Module()
    trainer = new(limit_train_batches=1.0, limit_val_batches=1.0)
    trainer.fit(module)
    return snapshot(module), dict(trainer.callback_metrics)


@scenario
def one_trainer_after_the_other(new: NewTrainer, folder: Path) -> Any:
    """Fit, evaluation, a longer fit, a copy of the trainer, another trainer that resumes."""
    module = Deep()
    last = cb.ModelCheckpoint(dirpath=folder, save_last=True, filename="{step}")
    trainer = new(callbacks=[last], enable_checkpointing=True)
    trainer.fit(module)
    seen = [trainer.validate(module, verbose=False), trainer.test(module, verbose=False), trainer.predict(module)]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)
    seen.append(snapshot(copy.deepcopy(trainer).lightning_module))
    other = Deep()
    new(max_epochs=4).fit(other, ckpt_path=last.last_model_path)
    return seen, snapshot(other), sorted(os.listdir(folder))


@scenario
def failures_and_interruptions(new: NewTrainer, folder: Path) -> Any:
    class Module(Deep):
        calls = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.calls += 1
            if self.calls == 3:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

        def on_test_start(self) -> None:
            raise LookupError

    module, trainer = Module(), new()
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module)
    with pytest.raises(LookupError):
        trainer.test(module, verbose=False)
    again = new(callbacks=[cb.LambdaCallback(on_train_epoch_end=lambda *_: os.kill(os.getpid(), 2))])
    with pytest.raises(SystemExit):
        again.fit(module)
    return snapshot(module), again.interrupted, again.global_step


@scenario
def nothing_is_kept_alive(new: NewTrainer, folder: Path) -> Any:
    module, trainer = Deep(), new()
    trainer.fit(module)
    kept = [weakref.ref(each) for each in (module, trainer, trainer.strategy, trainer.optimizers[0])]
    kept += [weakref.ref(parameter) for parameter in module.parameters()]
    del module, trainer
    gc.collect()
    return [each() is None for each in kept]


# --- modules ----------------------------------------------------------------------------------------------------------


@scenario
def everything_that_hooks_see(new: NewTrainer, folder: Path) -> Any:
    seen: list[Any] = []

    class Module(Deep):
        def __init__(self) -> None:
            super().__init__()
            for name, module in self.named_modules():
                module.register_forward_hook(lambda _, __, output, name=name: seen.append((name, "forward")))
            for name, each in self.layer.named_children():
                each.register_full_backward_hook(lambda _, __, grads, name=name: seen.append((name, grads[0].sum())))
            for name, parameter in self.named_parameters():
                parameter.register_hook(lambda gradient, name=name: seen.append((name, gradient.sum())))

        def note(self) -> None:
            gradients = [None if each.grad is None else each.grad.sum() for each in self.parameters()]
            seen.append(
                (gradients, str(self.device), self.training, torch.is_grad_enabled(), self.trainer.model is self)
            )

        def on_after_backward(self) -> None:
            self.note()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.note()

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.note()

        def on_train_batch_end(self, *_: Any) -> None:
            self.note()

        def on_validation_start(self) -> None:
            self.note()

        def on_fit_end(self) -> None:
            self.note()

    new(accumulate_grad_batches=2, gradient_clip_val=0.1).fit(Module())
    return seen


@scenario
def weights_that_are_computed_or_odd(new: NewTrainer, folder: Path) -> Any:
    class Module(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.layer[0] = parametrizations.weight_norm(self.layer[0])
            self.layer[1] = parametrizations.spectral_norm(self.layer[1])
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.empty(0))
            self.counts = nn.Parameter(torch.arange(3), requires_grad=False)
            self.phase = nn.Parameter(torch.ones(2, dtype=torch.cfloat))
            self.child = BoringModel()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale + (self.phase * self.phase.conj()).real + self.child(x)

    module = Module()
    new().fit(module)
    return snapshot(module)


@scenario
def weights_that_the_step_itself_reads(new: NewTrainer, folder: Path) -> Any:
    class Module(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.scale

    class ByHand(Manual):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.step(batch))
                self.scale.grad *= 0.5
                optimizer.step()

    modules = Module(), ByHand()
    for module in modules:
        new().fit(module)
    return [snapshot(module) for module in modules]


@scenario
def weights_that_are_written_between_steps(new: NewTrainer, folder: Path) -> Any:
    class Module(Deep):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                self.layer[0].weight.mul_(0.9)
            self.layer[1].weight.data.add_(0.01)
            if batch_idx == 1:
                self.load_state_dict({name: value * 1.01 for name, value in self.state_dict().items()})

        def on_train_epoch_start(self) -> None:
            self.layer[2].requires_grad_(self.current_epoch > 0)

    module = Module()
    new().fit(module)
    return snapshot(module)


@scenario
def weights_that_are_replaced_or_given(new: NewTrainer, folder: Path) -> Any:
    class Module(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            halves = {name: value / 2 for name, value in self.blocks[0].named_parameters()}
            return super().forward(self.blocks[1](torch.func.functional_call(self.blocks[0], halves, (x,))))

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.layer[2].bias = nn.Parameter(torch.full((2,), 0.5))

    module = Module()
    new().fit(module)
    assert module.layer[2].bias.tolist() == [0.5, 0.5]
    return snapshot(module)


@scenario
def modules_without_weights_or_optimizers(new: NewTrainer, folder: Path) -> Any:
    class Untrained(Deep):
        def configure_optimizers(self) -> None:
            return None

    class Empty(L.LightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            return None

        def configure_optimizers(self) -> None:
            return None

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return batch.sum()

    module, trainer = Untrained(), new()
    trainer.fit(module)
    trainer.fit(Empty(), DataLoader(RandomDataset(32, 4)))
    return snapshot(module), trainer.predict(Empty(), DataLoader(RandomDataset(32, 4)))


def equal(first: Any, second: Any) -> bool:
    """Return whether two results are the same, bit for bit; nan is equal to nothing."""
    if isinstance(first, Tensor):
        return isinstance(second, Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(value, second[key]) for key, value in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


def trainers_of(strategy: str, folder: Path) -> NewTrainer:
    def new(**options: Any) -> L.Trainer:
        defaults = dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches"), 2)
        defaults |= {"max_epochs": 2, "limit_train_batches": 4, **QUIET}
        chosen = "auto" if strategy == "auto" else ProTrainStrategy(plan=strategy)
        given = {**defaults, **options}
        return L.Trainer(accelerator="cpu", devices=1, strategy=chosen, default_root_dir=folder, **given)

    return new


@pytest.mark.sample(8)
@pytest.mark.parametrize("plan", ["offload", "resident"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_it_ends_as_in_a_plain_run(name: str, plan: str, tmp_path: Path) -> None:
    found = []
    for index, strategy in enumerate(("auto", plan)):
        folder = tmp_path / str(index)
        folder.mkdir()
        torch.manual_seed(3)
        found.append(SCENARIOS[name](trainers_of(strategy, tmp_path), folder))
    assert equal(*found)


OPTIONS: list[dict[str, Any]] = [
    {"fast_dev_run": True},
    {"fast_dev_run": 3},
    {"overfit_batches": 2, "max_epochs": 3},
    {"limit_val_batches": 3, "val_check_interval": 4, "limit_train_batches": 8},
    {"val_check_interval": 0.25, "limit_train_batches": 8, "check_val_every_n_epoch": 1},
    {"val_check_interval": 5, "check_val_every_n_epoch": None, "num_sanity_val_steps": 2},
    {"limit_train_batches": 0.5, "max_steps": 9, "max_epochs": -1, "accumulate_grad_batches": 2},
    {"detect_anomaly": True},
    {"deterministic": True, "inference_mode": False},
    {"barebones": True},
]


@pytest.mark.leaves("deterministic_algorithms", "CUBLAS_WORKSPACE_CONFIG", "cudnn_flags")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_the_trainer_do_as_in_a_plain_run(options: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for strategy in ("auto", "offload"):
        torch.manual_seed(3)
        module, trainer = Validated(), trainers_of(strategy, tmp_path)(**options)
        trainer.fit(module)
        metrics = {name: value for name, value in trainer.callback_metrics.items() if not name.startswith(PREFIX)}
        found.append((snapshot(module), metrics, trainer.global_step))
    assert found[0][2] > 0
    assert equal(*found)
