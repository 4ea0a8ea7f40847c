"""Metrics of the user in validation and test: what they are given, how they are logged, and what is refused."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy, MulticlassCalibrationError
from torchmetrics.wrappers import ClasswiseWrapper

from lightning_protrain.callbacks.evaluator import Evaluator
from lightning_protrain.cli import ProTrainCLI
from lightning_protrain.models.metrics import PositionScores
from lightning_protrain.models.module import CausalLMModule, positions_in_turn
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.module_runs import LLAMA, VOCAB
from tests.support.ranks import quiet_trainer, run_ranks, trainer_on_rank, values

TOP5 = partial(MulticlassAccuracy, num_classes=VOCAB, top_k=5, average="micro")


def row(index: int) -> dict[str, Tensor]:
    """Two trained turns, of 3 and 2 tokens; a row of index 4 has none."""
    input_ids = (torch.arange(9) * (index + 3)) % VOCAB
    trained = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1]).bool() & torch.tensor(index != 4)
    return {"input_ids": input_ids, "labels": torch.where(trained, input_ids, -100)}


ROWS = [row(index) for index in range(7)]


def build(metrics: Any, **arguments: Any) -> CausalLMModule:
    torch.manual_seed(0)
    module = CausalLMModule(config=LLAMA, metrics=metrics, **{"loss_chunk_tokens": 4, **arguments})
    module.configure_model()
    return module


def tokens(module: CausalLMModule) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits, the targets and the positions of all trained tokens, computed all at once."""
    batch = torch.utils.data.default_collate(ROWS)
    with torch.no_grad():
        logits = module(input_ids=batch["input_ids"]).logits
    trained = batch["labels"][:, 1:] != -100
    position = torch.tensor([0, 1, 2, 0, 1]).repeat(len(ROWS) - 1)
    return logits[:, :-1][trained], batch["labels"][:, 1:][trained], position


def metrics() -> dict[str, Metric]:
    return {
        "top5": TOP5(),
        "calibration": MulticlassCalibrationError(VOCAB),
        "positions": PositionScores(2),
        "classes": ClasswiseWrapper(MulticlassAccuracy(num_classes=VOCAB, average=None), prefix="class_"),
    }


def expected(module: CausalLMModule) -> dict[str, float]:
    logits, target, position = tokens(module)
    losses, correct = F.cross_entropy(logits, target, reduction="none"), logits.argmax(-1) == target
    later = position > 0
    return {
        "top5": float((logits.topk(5).indices == target[:, None]).any(1).float().mean()),
        "calibration": float(MulticlassCalibrationError(VOCAB)(logits, target)),
        "loss_0": float(losses[~later].mean()),
        "loss_1": float(losses[later].mean()),
        "accuracy_0": float(correct[~later].float().mean()),
        "accuracy_1": float(correct[later].float().mean()),
        **{f"class_{index}": float(correct[target == index].float().mean()) for index in target.unique().tolist()},
    }


def evaluated(trainer: Trainer, batch_size: int, split: str = "validate") -> dict[str, float]:
    found = getattr(trainer, split)(build(metrics()), DataLoader(ROWS, batch_size), verbose=False)[0]
    return {name.partition("_")[2]: value for name, value in found.items()}


@pytest.mark.parametrize("split", ["validate", "test"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_they_are_computed_on_the_logits_of_the_trained_tokens(split: str, batch_size: int) -> None:
    found = evaluated(quiet_trainer(), batch_size, split)
    wanted = expected(build(None))
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)
    assert {"loss", "perplexity", "accuracy"} < found.keys()


def on_rank(rank: int, world_size: int) -> dict[str, float]:
    return evaluated(trainer_on_rank(rank, world_size, ProTrainStrategy), batch_size=2)


# With 8 ranks, the one that has the row without a trained token has no other row.
@pytest.mark.parametrize("world_size", [3, 8])
def test_they_are_the_same_on_any_number_of_ranks(world_size: int, tmp_path: Path) -> None:
    wanted = expected(build(None))
    for found in values(run_ranks(on_rank, world_size, tmp_path, world_size)):
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)


def test_each_evaluation_begins_anew_and_leaves_the_metric_of_the_user_alone(tmp_path: Path) -> None:
    mine = TOP5()
    module, loader = build(MetricCollection({"top5": mine})), DataLoader(ROWS, 3)
    first = quiet_trainer().validate(module, loader, verbose=False)
    module.test_metrics["top5"].update(torch.rand(3, VOCAB), torch.arange(3))
    assert quiet_trainer().validate(module, loader, verbose=False) == first
    assert not mine.update_called


def test_without_a_trained_token_nothing_is_logged() -> None:
    assert quiet_trainer().validate(build(metrics()), DataLoader([row(4)]), verbose=False) == [{}]


def test_a_slice_that_is_not_finite_is_left_out() -> None:
    class Broken(CausalLMModule):
        def validation_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
            nn.init.constant_(self.model.lm_head.weight, math.nan if batch_idx else 0.0)
            super().validation_step(batch, batch_idx)

    module = Broken(config=LLAMA, metrics={"positions": PositionScores()}, nonfinite="keep")
    (found,) = quiet_trainer().validate(module, DataLoader(ROWS[:2]), verbose=False)
    assert found["val_loss_0"] == found["val_loss_2"] == pytest.approx(math.log(VOCAB))
    assert math.isnan(found["val_loss"])


def test_an_evaluator_has_them_for_each_data_set() -> None:
    callback = Evaluator({"other": DataLoader(ROWS, 3)}, at_start=True, at_end=False)
    trainer = quiet_trainer(max_steps=1, callbacks=[callback])
    trainer.fit(build({"top5": TOP5()}, warmup_steps=0), DataLoader(ROWS, 3))
    assert float(trainer.callback_metrics["other_top5"]) == pytest.approx(expected(build(None))["top5"])


def test_checkpoints_hold_no_trace_of_them(tmp_path: Path) -> None:
    class Buffered(MulticlassAccuracy):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.add_state("extra", torch.zeros(1), dist_reduce_fx="sum", persistent=True)

    module = build({"top5": Buffered(num_classes=VOCAB)}, warmup_steps=0)
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(module, DataLoader(ROWS, 3))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert all(name.startswith("model.") for name in content["state_dict"])
    assert "metrics" not in content["hyper_parameters"]
    for given, names in ((None, set()), ({"top5": TOP5()}, {"val_top5"})):
        loaded = CausalLMModule.load_from_checkpoint(tmp_path / "a.ckpt", metrics=given)
        (found,) = quiet_trainer().validate(loaded, DataLoader(ROWS, 3), verbose=False)
        assert found.keys() == {"val_loss", "val_perplexity", "val_accuracy"} | names


@pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
def test_a_config_names_them_by_class(tmp_path: Path) -> None:
    given = {"class_path": "torchmetrics.classification.MulticlassAccuracy", "init_args": {"num_classes": VOCAB}}
    positions = {"class_path": "lightning_protrain.PositionScores", "init_args": {"bucket_size": 4}}
    content = {"model": {"init_args": {"config": LLAMA, "metrics": {"mine": given, "positions": positions}}}}
    Path("run.yaml").write_text(yaml.safe_dump(content))
    model = ProTrainCLI(["--config=run.yaml"], run=False).model
    assert isinstance(model.val_metrics["mine"], MulticlassAccuracy)
    assert model.test_metrics["positions"].bucket_size == 4
    assert "metrics" not in model.hparams
    given["init_args"] = {}
    Path("run.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=r"^Argument `num_classes` can only be `None` for `average='micro'`"):
        ProTrainCLI(["--config=run.yaml"], run=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top5": 5}, "'top5' is int. Give a metric of torchmetrics"),
        ([TOP5()], "give a mapping from names to metrics"),
        ({"loss": TOP5()}, "'loss' is always logged"),
        ({"top.5": TOP5()}, "cannot have the name 'top.5'"),
        ({"update": TOP5()}, "cannot have the name 'update'"),
    ],
)
def test_what_cannot_be_named_is_refused_at_once(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLMModule(config=LLAMA, metrics=given)


def test_a_metric_with_parameters_is_refused() -> None:
    metric = TOP5()
    metric.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"'top5' \(MulticlassAccuracy\) has parameters"):
        CausalLMModule(config=LLAMA, metrics={"top5": metric})


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (BinaryAccuracy, rf"'mine' \(BinaryAccuracy\) cannot be computed on logits of shape \[8, {VOCAB}\] and token"),
        (partial(MulticlassAccuracy, num_classes=3), r"should be equal to number of classes"),
        (
            partial(MulticlassAccuracy, num_classes=VOCAB, average=None),
            rf"'mine' computes a tensor of shape \[{VOCAB}\], but only scalars",
        ),
    ],
)
def test_a_metric_that_cannot_be_logged_is_refused_before_the_model_is_built(metric: Any, message: str) -> None:
    module = CausalLMModule(config=LLAMA, metrics={"mine": metric()})
    with pytest.raises(ValueError, match=message):
        quiet_trainer(max_steps=1).fit(module, DataLoader(ROWS, 3))
    assert module.model is None


# Positions


def test_a_position_counts_from_the_begin_of_its_turn() -> None:
    labels = torch.tensor([[-100, 5, 6, -100, -100, 7], [1, 2, 3, -100, 4, 5]])
    assert positions_in_turn(labels).tolist() == [[-1, 0, 1, -1, -1, 0], [0, 1, 2, -1, 0, 1]]


def test_scores_of_draft_heads() -> None:
    """Head 0 is always right, head 1 half of the time; each has its own number of tokens."""
    scores = PositionScores(num_buckets=3)
    right = torch.eye(4)[[0, 1, 2, 3]] * 100
    scores.update(right, torch.tensor([0, 1, 2, 3]), 0)
    scores.update(right[:2], torch.tensor([0, 2]), 1)
    assert scores.compute() == {"loss_0": 0.0, "loss_1": 50.0, "accuracy_0": 1.0, "accuracy_1": 0.5}
    scores.reset()
    scores.update(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), 0)
    assert scores.compute() == {}


def test_later_positions_are_in_the_last_bucket() -> None:
    scores = PositionScores(num_buckets=2, bucket_size=4)
    scores.update(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), torch.tensor([0, 3, 4, 400]))
    assert scores.num_tokens.tolist() == [2, 2]
    assert scores.compute().keys() == {"loss_0", "loss_4", "accuracy_0", "accuracy_4"}
    with pytest.raises(ValueError, match="bucket_size=0: give at least 1"):
        PositionScores(bucket_size=0)
