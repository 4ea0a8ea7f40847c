"""A fit with a non-finite loss ends and names the batch, and good checkpoints stay."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from lightning_protrain import ProTrainCheckpoint, ProTrainFSDP2Strategy, ProTrainStrategy
from lightning_protrain.distributed.finite import MAX_WAITING, FiniteLosses
from tests.support.models import ParityModule, fit, zoo
from tests.support.ranks import run_ranks, trainer_on_rank

NAN, INFINITE = math.nan, math.inf


class Spoiled(ParityModule):
    """Some of its batches have a loss that is multiplied by what `factors` says, or gradients that are."""

    def __init__(self, factors: dict[int, float], gradients: bool = False, harmless: bool = False) -> None:
        super().__init__(zoo()["reused"]().network)
        self.factors, self.gradients, self.harmless = factors, gradients, harmless

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        factor = self.factors.get(batch_idx, 1.0)
        if self.gradients:
            return loss * factor - (loss * (factor - 1.0)).detach().nan_to_num()
        return loss + (factor * loss.detach() - loss.detach() if self.harmless else loss * (factor - 1.0))


class Manual(Spoiled):
    """Runs backward by itself, twice a batch, and returns nothing."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    @property
    def automatic_optimization(self) -> bool:  # type: ignore[override]
        return False


def strategy(plan: str = "offload", **options: Any) -> ProTrainStrategy:
    return ProTrainStrategy(plan=plan, monitor=False, **options)


@pytest.mark.parametrize("kind", [Spoiled, Manual])
@pytest.mark.parametrize("plan", ["offload", "resident"])
@pytest.mark.parametrize("value", [NAN, INFINITE])
def test_two_batches_in_a_row_end_the_fit(value: float, plan: str, kind: type[Spoiled]) -> None:
    module = kind({2: value, 3: value})
    with (
        pytest.warns(UserWarning, match=rf"The loss is {value} in batch 2 of epoch 0 \(step \d\)\. Training stops if"),
        pytest.raises(ValueError, match=r"The loss is (nan|inf) in batch 3 of epoch 0 \(step \d\), as in the batch be"),
    ):
        fit(module, strategy=strategy(plan))
    assert module.trainer.fit_loop.batch_idx == 4


def test_the_end_of_training_is_no_escape() -> None:
    with pytest.warns(UserWarning, match="batch 12"), pytest.raises(ValueError, match="batch 13 of epoch 0"):
        fit(Spoiled({12: NAN, 13: NAN}), strategy=strategy())


@pytest.mark.parametrize("factors", [{2: NAN}, {2: NAN, 4: INFINITE}])
def test_a_lone_batch_is_said_and_training_goes_on(factors: dict[int, float]) -> None:
    module = Spoiled(factors, harmless=True)
    with pytest.warns(UserWarning, match="The loss is") as said:
        fit(module, strategy=strategy())
    assert len(module.losses) == 14
    assert sum("The loss is" in str(each.message) for each in said) == len(factors)


def test_warnings_alone_on_request() -> None:
    module = Spoiled({2: NAN})
    with pytest.warns(UserWarning, match="The loss is nan in batch 2 of epoch 0") as said:
        fit(module, strategy=strategy(on_nonfinite="warn"))
    assert len(module.losses) == 14
    assert sum("The loss is" in str(each.message) for each in said) == 1
    assert "stops" not in str(said[0].message)


def test_another_action_is_refused() -> None:
    with pytest.raises(ValueError, match='on_nonfinite=\'raise\': give "stop" or "warn"'):
        strategy(on_nonfinite="raise")


@pytest.mark.filterwarnings("ignore:The loss is nan")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("checkpoint", [ModelCheckpoint, ProTrainCheckpoint])
def test_no_checkpoint_is_written_of_spoiled_weights(
    tmp_path: Path, checkpoint: type[ModelCheckpoint], gradients: bool
) -> None:
    saves = checkpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=1, save_last=True)
    options = {"enable_checkpointing": True, "callbacks": [saves], "max_steps": 6}
    with pytest.raises(ValueError, match="has NaN or infinite values, so the checkpoint is not written"):
        fit(Spoiled({3: NAN}, gradients), strategy=strategy(), **options)
    resumed = Spoiled({})
    trainer = fit(resumed, ckpt_path="last", strategy=strategy(), **options)
    assert trainer.global_step == 6
    assert len(resumed.losses) == 3
    assert all(map(torch.isfinite, resumed.losses))


def test_after_the_fit_spoiled_weights_may_be_saved(tmp_path: Path) -> None:
    module = Spoiled({})
    trainer = fit(module, strategy=strategy(), max_steps=1)
    weight = next(module.parameters())
    weight.data.fill_(NAN)
    trainer.save_checkpoint(tmp_path / "spoiled.ckpt")
    saved = torch.load(tmp_path / "spoiled.ckpt", weights_only=False)["state_dict"]
    assert any(value.isnan().all() for value in saved.values())


def test_steps_that_a_scaler_skips_are_as_usual(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=1)
    saves = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1)
    module = Spoiled({})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The loss is")
        fit(
            module,
            strategy=strategy(),
            plugins=MixedPrecision("16-mixed", "cpu", scaler),
            enable_checkpointing=True,
            callbacks=[saves],
        )
    assert scaler.get_scale() < 2.0**60
    assert len(module.losses) == 14


def test_a_search_for_a_learning_rate_may_diverge(tmp_path: Path) -> None:
    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path, strategy=strategy(), **options)
    module = Spoiled({6: NAN, 7: NAN})
    Tuner(trainer).lr_find(module, num_training=10, early_stop_threshold=None, update_attr=False)
    assert len(module.losses) == 10


class Far(Tensor):
    """A loss on a GPU, so to say, whose copy comes later."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    def detach(self) -> Far:  # type: ignore[override]
        return self

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        assert (args, kwargs) == (("cpu",), {"non_blocking": True})
        return self.as_subclass(Tensor)


class Later:
    """An event of a GPU that nothing has reached but what has been waited for."""

    waited = 0

    def __init__(self, device: torch.device) -> None:
        self.record = lambda: None

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        Later.waited += 1


def test_a_loss_on_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Later)
    progress = SimpleNamespace(current=SimpleNamespace(ready=0), total=SimpleNamespace(ready=0))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    trainer: Any = SimpleNamespace(callbacks=[], fit_loop=loop, current_epoch=0, global_step=0)
    losses = FiniteLosses()
    losses.begin(trainer)
    for number in range(MAX_WAITING + 2):
        progress.current.ready = progress.total.ready = number + 1
        losses.watch(torch.tensor(NAN if number >= MAX_WAITING else 1.0).as_subclass(Far), trainer)
        assert losses.why_to_stop() == ""
    assert Later.waited == 2
    with pytest.warns(UserWarning, match=f"batch {MAX_WAITING} of epoch 0"):
        assert f"batch {MAX_WAITING + 1} of epoch 0" in losses.why_to_stop(wait=True)


def _spoiled_on_one(rank: int, kinds: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name, make in kinds.items():
        module = Spoiled({3: NAN, 4: NAN} if rank else {}, harmless=True)
        trainer = trainer_on_rank(rank, 2, make, max_epochs=1)
        with pytest.raises(ValueError, match=r"not finite|The loss is nan") as error:
            trainer.fit(module)
        found[name] = f"{trainer.fit_loop.batch_idx}: {error.value}"
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The loss is nan")
def test_all_ranks_stop_at_the_same_batch(tmp_path: Path) -> None:
    kinds = {"protrain": strategy, "fsdp2": ProTrainFSDP2Strategy}
    first, second = (outcome.value for outcome in run_ranks(_spoiled_on_one, 2, tmp_path, kinds))
    for name in kinds:
        assert first[name].partition(":")[0] == second[name].partition(":")[0]
        assert "another rank" in first[name]
        assert "The loss is nan in batch 4 of epoch 0" in second[name]
