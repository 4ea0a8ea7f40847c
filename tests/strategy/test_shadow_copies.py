"""Copies in low precision are cast once in an optimizer step, and again after every write that no version tells of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, default_collate

from lightning_protrain import ProTrainStrategy
from lightning_protrain.runtime.shadow import ShadowWeight
from lightning_protrain.runtime.shadow_cache import ShadowCache
from tests.support.models import LanguageModel, Mlp, MultiOptimizerModule, ParityModule, ValidationModule, fit
from tests.support.parity import Result, differences, snapshot

OVERLAPS = ["off", "backward", "forward"]
ACCUMULATE = 2
BATCHES = 8
STEPS = BATCHES // ACCUMULATE
each_overlap = pytest.mark.parametrize("overlap", OVERLAPS)


def network() -> nn.Module:
    torch.manual_seed(0)
    return LanguageModel([Mlp() for _ in range(4)])


def run(module: ParityModule, overlap: str | None = None, **options: Any) -> tuple[Result, ProTrainStrategy | None]:
    """Trains in bf16-mixed, plainly without `overlap`, and validates within the epoch and after it."""
    strategy = None
    if overlap is not None:
        options["strategy"] = strategy = ProTrainStrategy(plan="offload", overlap_optimizer=overlap)
    given = {"limit_train_batches": BATCHES, "limit_val_batches": 2, "val_check_interval": BATCHES // 2}
    if module.automatic_optimization:
        given["accumulate_grad_batches"] = ACCUMULATE
    fit(module, precision="bf16-mixed", **{**given, **options})
    losses = (*module.losses, *getattr(module, "val_losses", ()))
    return Result(losses, snapshot(module)), strategy


# --- how often --------------------------------------------------------------------------------------------------------


class Casts:
    """Counts casts on the main thread: before the first step, after each one, and in evaluation."""

    def __init__(self, module: L.LightningModule, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_step: dict[int, int] = {}
        self.in_validation = 0
        renew = ShadowWeight.renew

        def counted(shadow: ShadowWeight) -> None:
            renew(shadow)
            if module.trainer.validating or not module.training:
                self.in_validation += 1
            else:
                step = module.trainer.global_step
                self.by_step[step] = self.by_step.get(step, 0) + 1

        monkeypatch.setattr(ShadowWeight, "renew", counted)


def num_low(strategy: ProTrainStrategy) -> int:
    return sum(len(chunk.parameters) for chunk in strategy.plan.chunks if chunk.streamed_dtype)


class Passive(L.Callback):
    """Has a hook behind every step, and touches no weight; notes how many steps of chunks are pending there."""

    def __init__(self) -> None:
        self.pending: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if isinstance(trainer.strategy, ProTrainStrategy):
            self.pending.append(len(trainer.strategy._runtime.async_step._pending))


class Holding(Passive):
    """Holds the memory of all weights, and touches none."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.memory = [parameter.data for parameter in pl_module.parameters()]


@pytest.mark.parametrize(("make", "ends"), [(Passive, False), (Holding, True)])
def test_steps_run_beside_a_callback_unless_it_holds_memory_of_weights(make: type[Passive], ends: bool) -> None:
    callback = make()
    found, _ = run(ValidationModule(network()), "forward", callbacks=[callback])
    # Steps end in every second batch; no forward follows the second one and the last one.
    assert [pending > 0 for pending in callback.pending] == [False] * 5 + [not ends, False, False]
    assert differences(run(ValidationModule(network()))[0], found) == []


@pytest.mark.sample(4)
@pytest.mark.parametrize("callbacks", [[], [Passive()]], ids=["alone", "beside a callback"])
@each_overlap
def test_a_weight_is_cast_once_in_an_optimizer_step(
    overlap: str, callbacks: list[L.Callback], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ValidationModule(network())
    casts = Casts(module, monkeypatch)
    found, strategy = run(module, overlap, callbacks=callbacks)
    low = num_low(strategy)
    assert low > 8
    if overlap == "off":
        # Validation comes after the second step and after the last one: it is first to fetch what they have stepped.
        assert casts.by_step == {1: low, 3: low}
        assert casts.in_validation == 3 * low
    else:
        # The first validation is before any step; the first step is not overlapped.
        assert casts.by_step == {1: low}
        assert casts.in_validation == low
    monkeypatch.undo()
    assert differences(run(ValidationModule(network()))[0], found) == []


# --- writes that only the watch can tell of ---------------------------------------------------------------------------


def scale(module: L.LightningModule) -> None:
    """Changes every weight of the blocks without a version."""
    for parameter in module.network.blocks.parameters():
        parameter.data.mul_(0.9)


def replace(module: L.LightningModule) -> None:
    for parameter in module.network.blocks.parameters():
        parameter.data = parameter.data * 0.9


class Writing(ValidationModule):
    """Writes at some place of every step but those that begin with weights that have just been stepped."""

    def __init__(self, place: str, write: Callable[[L.LightningModule], None]) -> None:
        super().__init__(network())
        self.place, self.write = place, write
        self.network.blocks[3].requires_grad_(False)

    def reach(self, place: str, batch_idx: int = 1) -> None:
        if place == self.place and batch_idx % 2 and self.losses:  # The loader is asked for a batch to plan with, too.
            self.write(self)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.reach("begin", batch_idx)
        loss = super().training_step(batch, batch_idx)
        if self.place == "end" and batch_idx:  # Not in the step that is traced: the weight would be streamed whole.
            self.network.blocks[3].up.weight.data.mul_(0.9)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.reach("validation", batch_idx)
        super().validation_step(batch, batch_idx)

    def loader(self, batches: DataLoader, place: str) -> DataLoader:
        def collate(items: list[Any]) -> Any:
            self.reach(place)
            return default_collate(items)

        return DataLoader(batches.dataset, batch_size=batches.batch_size, collate_fn=collate)

    def train_dataloader(self) -> DataLoader:
        return self.loader(super().train_dataloader(), "loader")

    def val_dataloader(self) -> DataLoader:
        return self.loader(super().val_dataloader(), "validation loader")


PLACES = ["begin", "end", "validation", "loader", "validation loader"]
each_place = pytest.mark.parametrize("place", PLACES)


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    ("write", "overlap"), [(scale, "off"), (scale, "backward"), (scale, "forward"), (replace, "backward")]
)
@each_place
def test_a_write_is_seen_wherever_it_is_made(write: Callable[..., None], place: str, overlap: str) -> None:
    expected, _ = run(Writing(place, write))
    assert differences(expected, run(Writing(place, write), overlap)[0]) == []


@each_place
def test_without_the_watch_old_copies_are_computed_with(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug."""
    expected, _ = run(Writing(place, scale))
    monkeypatch.setattr(ShadowCache, "touched", lambda self, hosts: None)
    assert differences(expected, run(Writing(place, scale), "backward")[0]) != []


# --- hooks ------------------------------------------------------------------------------------------------------------


class Writer(L.Callback):
    """Writes in one of its hooks, through the weights or through memory that it has taken before."""

    def __init__(self, hook: str, through: str) -> None:
        self.through = through
        self.memory: list[Tensor] = []
        setattr(self, hook, self.write)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.memory = [parameter.data for parameter in pl_module.network.blocks.parameters()]

    def write(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if self.through == "weights":
            scale(pl_module)
        for memory in self.memory if self.through == "memory" else ():
            memory.mul_(0.9)


HOOKS = ["on_train_batch_start", "on_train_batch_end", "on_validation_batch_start", "on_validation_epoch_end",
         "on_validation_start", "on_train_epoch_end"]  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(("through", "overlap"), [("weights", "backward"), ("memory", "forward"), ("memory", "off")])
def test_hooks_may_write(through: str, hook: str, overlap: str) -> None:
    expected, _ = run(ValidationModule(network()), callbacks=[Writer(hook, through)], max_epochs=2)
    found, _ = run(ValidationModule(network()), overlap, callbacks=[Writer(hook, through)], max_epochs=2)
    assert differences(expected, found) == []


class Reloading(L.Callback):
    """Goes back to the first weights in the middle of an epoch."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.state = snapshot(pl_module)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        if index == 5:
            pl_module.load_state_dict(self.state)


@each_overlap
@pytest.mark.parametrize(
    "make", [lambda: EMAWeightAveraging(decay=0.9), Reloading, lambda: ModelCheckpoint(every_n_train_steps=1)],
    ids=["averages", "load_state_dict", "checkpoints"],
)  # fmt: skip
def test_callbacks_that_read_and_write(make: Callable[[], L.Callback], overlap: str, tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return {"callbacks": [make()], "enable_checkpointing": True, "default_root_dir": tmp_path}

    expected, _ = run(ValidationModule(network()), **options())
    assert differences(expected, run(ValidationModule(network()), overlap, **options())[0]) == []


class Manual(MultiOptimizerModule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        scale(self)


def test_manual_optimization() -> None:
    assert differences(run(Manual(network()))[0], run(Manual(network()), "auto")[0]) == []


# --- recomputations of the model's own --------------------------------------------------------------------------------


class CheckpointsItself(Mlp):
    """A block that recomputes a part of its forward."""

    use_reentrant = True

    def forward(self, hidden: Tensor) -> Tensor:
        def inner(given: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(self.norm(given))))

        return hidden + checkpoint(inner, hidden, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("num_checkpoint_blocks", [0, 4])
def test_a_block_that_recomputes_a_part_of_itself_trains(
    num_checkpoint_blocks: int, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointsItself, "use_reentrant", use_reentrant)
    knobs = {"num_persistent_chunks": 0, "num_chunk_buffers": 3, "num_swap_blocks": 0}
    results = []
    knobs |= {"num_checkpoint_blocks": num_checkpoint_blocks, "num_keep_offloaded_blocks": 4 - num_checkpoint_blocks}
    for strategy in ("auto", ProTrainStrategy(**knobs)):
        torch.manual_seed(0)
        module = ParityModule(LanguageModel([CheckpointsItself() for _ in range(4)]))
        fit(module, precision="bf16-mixed", strategy=strategy, limit_train_batches=4)
        results.append(Result((*module.losses,), snapshot(module)))
    assert differences(*results) == []


# --- ends -------------------------------------------------------------------------------------------------------------


class Failing(ValidationModule):
    at = -1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == self.at:
            raise KeyError("broken")
        return super().training_step(batch, batch_idx)


def resumed(folder: Path, overlap: str | None) -> Result:
    """Return the result of a run that resumes from the last checkpoint of an interrupted run."""
    saving = ModelCheckpoint(folder, every_n_train_steps=1)
    module = Failing(network())
    module.at = 5
    with pytest.raises(KeyError, match="broken"):
        run(module, overlap, callbacks=[saving], enable_checkpointing=True)
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    module = Failing(network())
    found, _ = run(module, overlap, ckpt_path=saving.best_model_path)
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    return found


@each_overlap
def test_a_run_that_broke_off_goes_on(overlap: str, tmp_path: Path) -> None:
    assert differences(resumed(tmp_path / "plain", None), resumed(tmp_path / "ours", overlap)) == []
