"""What the module logs in validation and test."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_protrain.models.module import CausalLMModule
from tests.support.module_runs import LLAMA, Sequences, trainer


def test_evaluation_does_not_depend_on_the_batch_size(tmp_path):
    module = CausalLMModule(config=LLAMA)
    results = []
    for size in (1, 3, 7):
        data = Sequences(batch_size=size)
        data.rows[0] = {**data.rows[0], "labels": data.rows[0]["labels"].index_fill(0, torch.arange(9), -100)}
        assert trainer(tmp_path).validate(module, data, verbose=False)
        results += trainer(tmp_path).test(module, data, verbose=False)
    assert set(results[0]) == {"test_loss", "test_perplexity", "test_accuracy"}
    assert all(result == pytest.approx(results[0], rel=1e-6) for result in results)


@pytest.mark.parametrize(("policy", "warns"), [("exclude", True), ("keep", False)])
def test_a_batch_that_is_not_finite_counts_in_all_metrics_or_in_none(tmp_path, policy, warns):
    class Broken(CausalLMModule):
        def validation_step(self, batch, batch_idx=0, dataloader_idx=0):
            with torch.no_grad():
                weight = self.model.lm_head.weight
                before = weight.clone()
                weight.mul_(math.nan if batch_idx == 1 else 1.0)
                super().validation_step(batch, batch_idx)
                weight.copy_(before)

    results = []
    for kind, batches in ((Broken, 2), (CausalLMModule, 1)):
        torch.manual_seed(0)
        fit = trainer(tmp_path, limit_val_batches=batches)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results += fit.validate(kind(config=LLAMA, nonfinite=policy), Sequences(batch_size=2), verbose=False)
        found = [str(each.message) for each in caught if "1 batches are not finite" in str(each.message)]
        assert bool(found) == (warns and kind is Broken)
    if policy == "exclude":
        assert results[0] == results[1]
    else:
        assert all(math.isnan(value) for value in results[0].values())


def test_a_batch_that_is_not_finite_can_end_the_run(tmp_path):
    class Broken(CausalLMModule):
        def validation_step(self, batch, batch_idx=0, dataloader_idx=0):
            torch.nn.init.constant_(self.model.lm_head.weight, math.inf)
            super().validation_step(batch, batch_idx)

    with pytest.raises(ValueError, match="batches are not finite"):
        trainer(tmp_path).validate(Broken(config=LLAMA, nonfinite="error"), Sequences(), verbose=False)


@pytest.mark.filterwarnings("ignore:.* batches are not finite")
def test_a_metric_without_a_value_is_not_the_one_before(tmp_path):
    class Collapsing(CausalLMModule):
        def on_validation_start(self):
            if self.trainer.global_step == 2:
                torch.nn.init.constant_(self.model.lm_head.weight, math.nan)

    # Lightning takes an interval of one batch for one epoch, and would save at its end.
    best = ModelCheckpoint(
        tmp_path, monitor="val_loss", save_top_k=-1, filename="{step}", save_on_train_epoch_end=False
    )
    fit = trainer(
        tmp_path, max_steps=2, val_check_interval=1, num_sanity_val_steps=0, callbacks=[best], enable_checkpointing=True
    )
    with pytest.raises(MisconfigurationException, match="val_loss"):
        fit.fit(Collapsing(config=LLAMA, warmup_steps=0), Sequences())
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=1.ckpt"]
    assert "val_loss" not in fit.callback_metrics
