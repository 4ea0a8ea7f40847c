"""A step is profiled before the plan is made; it leaves nothing behind, and the run is bit for bit the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from lightning_protrain.planner import request
from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.gpu_specs import gpu
from lightning_protrain.profiler.records import HardwareProfile, ModelProfile
from lightning_protrain.strategy import describe, plan_session
from lightning_protrain.strategy.profile_step import profile_training_step, streamable
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.machines import CPU
from tests.support.models import (
    SEQUENCE,
    VOCABULARY,
    LanguageModel,
    Mlp,
    ParityModule,
    fit,
    token_batches,
    variants,
    zoo,
)
from tests.support.parity import Result, differences, snapshot
from tests.support.plans import kept
from tests.support.profiled_runs import Profiling, batches, train
from tests.support.trainers import QUIET

WHOLE = {
    "num_persistent_chunks": 1,
    "num_chunk_buffers": 3,
    "num_swap_blocks": 0,
    "num_checkpoint_blocks": 1,
    "chunk_bytes": 1 << 20,
}
SWAPPING = {"num_swap_blocks": 2, "num_checkpoint_blocks": 1}
BLOCKS = {"lstm": {"num_checkpoint_blocks": 0}, "frozen": {"blocks": [f"network.model.layers.{i}" for i in (1, 2, 3)]}}

pytestmark = pytest.mark.filterwarnings("ignore:Settings of the plan that were not given")


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", sorted({**zoo(), **variants()}.keys() - {"moe"}))
def test_parity_with_swapped_blocks(name: str) -> None:
    make = {**zoo(), **variants()}[name]
    plain = train(make())
    strategy = ProTrainStrategy(**SWAPPING | BLOCKS.get(name, {}))
    assert differences(plain, train(make(), strategy)) == []
    assert strategy.plan is not None
    planned = [block.swap_bytes for block in strategy.plan.blocks if block.policy is BlockPolicy.SWAP]
    assert len(planned) == 2
    # What "reused" runs twice, it swaps twice; all that is saved here is a whole number of pages.
    calls = [1 + (name == "reused" and index == 1) for index in range(2)]
    steps = len(batches())
    assert strategy.counters.swapped_out_bytes == steps * sum(a * b for a, b in zip(planned, calls, strict=True)) > 0
    assert strategy.counters.swapped_in_bytes > 0


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> list[ModelProfile | None]:
    """Return the profiles that strategies make."""
    profiles: list[ModelProfile | None] = []

    def profile(*arguments: Any) -> ModelProfile | None:
        profiles.append(profile_training_step(*arguments))
        return profiles[-1]

    monkeypatch.setattr(describe, "profile_training_step", profile)
    return profiles


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({}, 0),
        ({"plan": "resident"}, 0),
        ({"plan": "offload"}, 0),
        ({"num_checkpoint_blocks": 2}, 0),
        ({"num_swap_blocks": 0}, 0),
        ({"num_swap_blocks": 1}, 1),
        ({"device_memory": "1GiB", "hardware": CPU}, 1),
        ({"device_memory": "1GiB", "hardware": CPU, "num_checkpoint_blocks": 2}, 1),
        ({"device_memory": "1GiB", "hardware": CPU, **WHOLE}, 0),
        ({"device_memory": "1GiB", "plan": "offload"}, 0),
        ({"device_memory": "1GiB", "plan": "resident"}, 0),
    ],
    ids=str,
)
def test_only_what_is_needed_is_profiled(arguments: dict[str, Any], count: int, profiled: list[Any]) -> None:
    train(zoo()["reused"](), ProTrainStrategy(**arguments), max_steps=1)
    assert len(profiled) == count


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("num_swap_blocks", [0, 1])
def test_whole_knobs_are_profiled_for_swapped_blocks_and_in_mixed_precision_only(
    num_swap_blocks: int, precision: Any, profiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((request, "search_with_evaluation"), (request, "predict"), (plan_session, "cached_profile")):
        monkeypatch.setattr(module, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
    knobs = {**WHOLE, "num_persistent_chunks": 0, "num_swap_blocks": num_swap_blocks}
    strategy = ProTrainStrategy(device_memory="1GiB", **knobs)
    train(zoo()["reused"](), strategy, max_steps=1, precision=precision)
    assert len(profiled) == (num_swap_blocks > 0 or precision == "bf16-mixed")
    assert sum(block.policy is BlockPolicy.SWAP for block in strategy.plan.blocks) == num_swap_blocks


def test_a_plan_is_not_profiled_again(profiled: list[Any]) -> None:
    module = zoo()["reused"]()
    train(module, ProTrainStrategy(plan=kept(module)), max_steps=1)
    assert profiled == []


def test_a_dtype_that_only_backward_multiplies_in_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inverting(ParityModule):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            square = self.network.head.weight[:16, :16].double() + torch.eye(16).double()
            return super().training_step(batch, batch_idx) + torch.linalg.inv(square).sum().float()

    def measured(device: Any, dtypes: list[torch.dtype], folder: Any) -> HardwareProfile:
        return replace(CPU, flops={str(dtype).removeprefix("torch."): 1e11 for dtype in dtypes})

    monkeypatch.setattr(plan_session, "cached_profile", measured)
    train(Inverting(LanguageModel([Mlp(), Mlp()])), ProTrainStrategy(device_memory="1GiB"))


def test_evaluation_swaps_nothing(profiled: list[Any]) -> None:
    module = variants()["val"]()
    module.train_dataloader = batches
    strategy = ProTrainStrategy(num_swap_blocks=1, num_checkpoint_blocks=1, num_keep_offloaded_blocks=1)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **QUIET)
    swapped = []
    for run in (trainer.validate, trainer.fit, trainer.validate):
        run(module)
        swapped.append(strategy.counters.swapped_out_bytes > 0)
    assert swapped == [False, True, False]
    assert len(profiled) == 1


TRANSFERS = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
HOOKS = [
    *("prepare_data", "setup", "configure_model", "configure_optimizers", "train_dataloader", *TRANSFERS, "teardown"),
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "optimizer_step", "on_train_batch_end"),
    *("on_train_epoch_end", "on_train_end", "on_fit_end"),
]


class Hooks(L.Callback):
    """The names of all hooks, in the order of their calls."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def watch(self, module: L.LightningModule) -> None:
        for name in HOOKS:
            setattr(module, name, self._recording(name, getattr(module, name)))

    def _recording(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.called.append(name)
            return hook(*args, **kwargs)

        return recorded


def test_hooks_are_called_in_the_order_of_ever() -> None:
    orders = []
    for strategy in ("auto", ProTrainStrategy(num_checkpoint_blocks=1), ProTrainStrategy(num_swap_blocks=1)):
        module, hooks = zoo()["reused"](), Hooks()
        module.train_dataloader = batches
        hooks.watch(module)
        fit(module, strategy=strategy)
        orders.append(hooks.called)
    plain, checkpointed, swapped = orders
    assert plain == checkpointed
    assert plain.count("train_dataloader") == swapped.count("train_dataloader") == 1
    start = swapped.index("train_dataloader")
    assert swapped[start + 1 : start + 4] == TRANSFERS
    del swapped[start : start + 4]
    plain.remove("train_dataloader")
    assert plain == swapped


# --- the step alone ---------------------------------------------------------------------------------------------------
def both(
    make: Callable[[], Any], run: Callable[..., Any] = train, needed_for: str = "this=1"
) -> tuple[list[Any], ModelProfile | None]:
    """Return the modules of a run without and one with a profile ahead, bit for bit the same, and the profile."""
    modules, results = [], []
    for callbacks in ([], [Profiling(needed_for)]):
        torch.manual_seed(0)
        modules.append(make())
        run(modules[-1], callbacks=callbacks)
        results.append(Result(tuple(modules[-1].losses), snapshot(modules[-1])))
    assert differences(*results) == []
    return modules, callbacks[0].profile


class Recording(CSVLogger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(".")
        self.given: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.given.append((dict(metrics), step))
        super().log_metrics(metrics, step)


class Busy(ParityModule):
    """Does in a step whatever a step may do."""

    def __init__(self) -> None:
        super().__init__(LanguageModel([Mlp(), Mlp()]))
        self.accuracy = MulticlassAccuracy(VOCABULARY)
        self.scores = MetricCollection([MulticlassAccuracy(VOCABULARY), MulticlassF1Score(VOCABULARY)], prefix="a_")
        self.steps = 0
        self.modes: list[bool] = []
        self.notes: dict[str, Any] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        self.modes.append(self.network.training)
        self.notes[f"step {self.steps}"] = batch_idx
        torch.rand(3)
        logits = self.network(batch[0])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[0].flatten())
        self.losses.append(loss.detach().clone())
        self.log("loss", loss, on_epoch=True)
        self.log("accuracy", self.accuracy(logits.flatten(0, 1), batch[0].flatten()).item())
        self.log_dict(self.scores(logits.argmax(-1).flatten(), batch[0].flatten()))
        self.scores.update(logits.argmax(-1).flatten(), batch[0].flatten())
        self.log("now", self.scores.compute()["a_MulticlassAccuracy"])
        self.logger.log_metrics({"direct": self.steps}, step=self.steps)
        self.print("step", self.steps)
        return loss


@pytest.mark.parametrize("training", [True, False])
def test_a_step_that_does_much_leaves_no_trace(training: bool, capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for callbacks in ([], [Profiling("this=1")]):
        torch.manual_seed(0)
        module = Busy()
        module.network.train(training)
        module.train_dataloader = batches
        trainer = fit(module, callbacks=callbacks, logger=Recording(), log_every_n_steps=1)
        metrics = trainer.logger.given, {k: v.item() for k, v in trainer.callback_metrics.items()}
        notes = module.steps, module.modes, module.notes, capsys.readouterr().out, type(trainer.logger)
        runs.append((Result(tuple(module.losses), snapshot(module)), metrics, notes, sorted(vars(module))))
    assert differences(runs[0][0], runs[1][0]) == []
    assert runs[0][1:] == runs[1][1:]
    assert runs[1][2][1] == [training] * len(batches())
    assert callbacks[0].profile is not None
    assert callbacks[0].profile.swap_bytes()["network.blocks.0"] > 0


class Manual(ParityModule):
    """Two optimizers and their schedulers, stepped by hand, one with a closure."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:
        inner, outer = self.optimizers()
        self.toggle_optimizer(inner)
        loss = self.loss(batch[0], 0)
        self.losses.append(loss.detach().clone())
        inner.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(inner, 0.1, "norm")
        inner.step()
        self.untoggle_optimizer(inner)

        def closure() -> Tensor:
            outer.zero_grad()
            loss = self.loss(batch[0], 0)
            self.manual_backward(loss)
            return loss

        outer.step(closure=closure)
        outer.param_groups[0]["lr"] *= 0.9
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        blocks = list(self.network.blocks.parameters())
        others = [parameter for name, parameter in self.named_parameters() if ".blocks." not in name]
        optimizers = [torch.optim.AdamW(blocks, lr=0.01), torch.optim.SGD(others, lr=0.01)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]


def test_manual_optimization_steps_nothing() -> None:
    modules, profile = both(lambda: Manual(LanguageModel([Mlp(), Mlp()])))
    assert all(parameter.requires_grad for module in modules for parameter in module.parameters())
    assert profile is not None
    assert [call.name for call in profile.calls].count("network.blocks.0") == 2


class Failing(ParityModule):
    """Raises what its owner has made."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        raise self.error


@pytest.mark.parametrize("error", [KeyError("mine"), ValueError("mine"), RuntimeError("mine")], ids=repr)
def test_what_the_model_raises_is_raised(error: Exception) -> None:
    module = Failing(LanguageModel([Mlp(), Mlp()]))
    module.error = error
    with pytest.raises(type(error), match="mine") as raised:
        fit(module, callbacks=[Profiling("this=1")])
    assert raised.value is error
    assert "ran for its shapes, before training" in error.__notes__[0]


# --- what cannot be known ---------------------------------------------------------------------------------------------
class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from token_batches().dataset


class Fetches(ParityModule):
    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, index, _ = next(dataloader_iter)
        return super().training_step(batch, index)


def _streaming() -> ParityModule:
    module = zoo()["reused"]()
    module.train_dataloader = lambda: DataLoader(Stream(), 2)
    return module


UNKNOWN: dict[str, tuple[Callable[[], ParityModule], str]] = {
    "iterable": (_streaming, r"No batch can be taken ahead of training: Stream is an iterable dataset\."),
    "fetches": (lambda: Fetches(LanguageModel([Mlp(), Mlp()])), "takes batches itself, from `dataloader_iter`"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_known_is_said(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, message = UNKNOWN[name]
    caplog.set_level("INFO", "lightning.pytorch.utilities.rank_zero")
    assert both(make, fit, "")[1] is None
    said = [line for line in caplog.messages if line.startswith("The training step could not be profiled: ")]
    assert len(said) == 1
    assert pytest.raises(ValueError, match=message).matches(ValueError(said[0]))
    with pytest.raises(ValueError, match=rf"num_x=3 needs a profile .* there is none: .*{message}.* Leave num_x out"):
        fit(make(), callbacks=[Profiling("num_x=3")])
    with pytest.raises(ValueError, match=rf"^A plan needs a profile.*{message}.*without data \(`data: null`\)\.$"):
        fit(make(), callbacks=[Profiling("A plan")])


def test_what_cannot_be_traced_is_measured_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch.utilities.rank_zero")
    (module, _), profile = both(zoo()["moe"], fit, "num_x=3")
    assert profile is not None
    assert "_local_scalar_dense" in profile.measured
    assert profile.saved_bytes > 0
    mixed = replace(profile, parameters=tuple(replace(use, casts=("bfloat16",)) for use in profile.parameters))
    assert streamable(mixed, module, "bfloat16") == frozenset()  # another batch may use them otherwise
    assert sum(line.startswith("The training step is run once on 'cpu'") for line in caplog.messages) == 1


@pytest.mark.parametrize(("name", "kernel"), [(None, "flash_cpu"), ("RTX 3090", "math"), ("T4", "efficient")])
def test_a_gpu_that_is_not_here_has_its_own_kernels(name: str | None, kernel: str) -> None:
    hardware = None if name is None else gpu(name, 64 << 30, 8)
    found: list[ModelProfile] = []

    class Elsewhere(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            found.append(profile_training_step(trainer, describe_model(pl_module), "x", hardware))

    fit(Attending(), callbacks=[Elsewhere()])
    assert found[0].attention == ((kernel, 2),)


class Attending(ParityModule):
    """Heads of seven elements in float32: tensor cores of Ampere cannot take them."""

    def __init__(self) -> None:
        super().__init__(LanguageModel([HeadsOfSeven(), HeadsOfSeven()]))


class HeadsOfSeven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 3 * 14)
        self.back = nn.Linear(14, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (2, 7)).transpose(1, 2) for part in self.project(hidden).chunk(3, -1)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return hidden + self.back(mixed.transpose(1, 2).flatten(2))


# --- what holds a state -----------------------------------------------------------------------------------------------
class Anneal:
    """A schedule that counts how often it was asked."""

    asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return 0.9**self.asked


class Scheduled(ParityModule):
    """Weighs its loss by what an object, generators and the data module say, and takes its batch apart."""

    def __init__(self) -> None:
        super().__init__(LanguageModel([Mlp(), Mlp()]))
        self.anneal = Anneal()
        self.generators = (random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        python, numpy, own = self.generators
        self.trainer.datamodule.steps += 1
        weight = self.anneal() + python.random() + numpy.random() + torch.rand(1, generator=own).item()
        loss = super().training_step([batch.pop()], batch_idx) * (weight / self.trainer.datamodule.steps)
        self.losses[-1] = loss.detach().clone()
        return loss


class Stepping(L.LightningDataModule):
    """Counts steps."""

    steps = 0

    def train_dataloader(self) -> DataLoader:
        return batches()


@pytest.mark.parametrize("caching", [False, True])
def test_what_modules_and_data_modules_hold_is_put_back(caching: bool) -> None:
    def run(module: Scheduled, callbacks: list[L.Callback]) -> None:
        data, module.network.config = Stepping(), SimpleNamespace(use_cache=caching)
        trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=callbacks, **QUIET)
        trainer.fit(module, datamodule=data)
        assert module.anneal.asked == data.steps == len(batches())
        assert module.network.config.use_cache is caching

    assert both(Scheduled, run)[1] is not None


class Warming(ParityModule):
    """Sets learning rates in its step, by way of the trainer."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9
            group["warmed"] = True
        return super().training_step(batch, batch_idx)


def test_settings_of_optimizers_are_put_back() -> None:
    modules, profile = both(lambda: Warming(LanguageModel([Mlp(), Mlp()])))
    for module in modules:
        assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.9 ** len(batches()))
    assert profile is not None


# --- what is swapped --------------------------------------------------------------------------------------------------
class NeoX(ParityModule):
    """A model of transformers that keeps other tensors for backward with its cache on."""

    def __init__(self, use_cache: bool) -> None:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = GPTNeoXConfig(vocab_size=VOCABULARY, max_position_embeddings=64, use_cache=use_cache, **sizes)
        super().__init__(GPTNeoXForCausalLM(config))

    def logits(self, tokens: Tensor, batch_idx: int) -> Tensor:
        mask = torch.ones_like(tokens)
        mask[0, SEQUENCE // 2 :] = 0
        return self.network(input_ids=tokens, attention_mask=mask).logits


@pytest.mark.parametrize(("use_cache", "num_checkpointed"), [(False, 1), (True, 0), (True, 1)])
def test_what_a_cache_changes_fits(use_cache: bool, num_checkpointed: int) -> None:
    results = []
    for strategy in ("auto", ProTrainStrategy(num_swap_blocks=2, num_checkpoint_blocks=num_checkpointed)):
        torch.manual_seed(0)
        results.append(train(NeoX(use_cache), strategy))
    assert differences(*results) == []
    assert strategy.counters.swapped_out_bytes > 0


class Thawing(BaseFinetuning):
    """Trains the blocks from the second epoch on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        if self.first:
            self.freeze(pl_module.network.blocks)

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if self.first and epoch == self.first:
            self.unfreeze_and_add_param_group(pl_module.network.blocks, optimizer, lr=0.01)


def test_blocks_that_are_unfrozen_need_another_plan(caplog: pytest.LogCaptureFixture) -> None:
    class Module(ParityModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)

    caplog.set_level("INFO")
    swapping = {"num_swap_blocks": 2, "num_checkpoint_blocks": 0}
    results = []
    for strategy in ("auto", ProTrainStrategy(**swapping)):
        torch.manual_seed(0)
        module = Module(LanguageModel([Mlp() for _ in range(3)]))
        results.append(train(module, strategy, callbacks=[Thawing(1)], max_epochs=2))
    assert differences(*results) == []
    said = [record.message for record in caplog.records if "saves more than planned" in record.message]
    assert len(said) == 1
    assert "has unfrozen parameters after the plan was made. Then begin another fit, which plans again" in said[0]
    caplog.clear()
    module.network.requires_grad_(True)
    strategy = ProTrainStrategy(**swapping)
    train(module, strategy, callbacks=[Thawing(0)], max_epochs=2)
    assert strategy.counters.swapped_out_bytes > 0
    assert not any("saves more than planned" in record.message for record in caplog.records)
