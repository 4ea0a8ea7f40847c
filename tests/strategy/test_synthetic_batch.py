"""Plans where there is no training data: the batch is made for the model."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.profiler.gpu_specs import gpu
from lightning_protrain.strategy.joint_plan import DryRun, Targets
from lightning_protrain.strategy.profile_step import SyntheticData, batch_to_plan_with
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.profiler.models import TEXT
from tests.support.first_batches import QUIET
from tests.support.machines import CPU, GIB
from tests.support.models import zoo

MACHINES: Targets = {
    "here": {Sharding.REPLICATE: None},
    "there": {Sharding.REPLICATE: gpu("RTX 3090", 64 * GIB, 8)},
}


def module() -> CausalLMModule:
    return CausalLMModule(config={"model_type": "llama", **TEXT})


def plans(model: L.LightningModule, data: SyntheticData) -> dict[str, Plan | ValueError]:
    strategy = ProTrainStrategy(device_memory="1GiB", hardware=CPU)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=1, **QUIET)
    with strategy.session.planning_only(DryRun(MACHINES)) as answers:
        trainer.fit(model, DataLoader(data, batch_size=None))
    return {name: found[Sharding.REPLICATE] for name, found in answers.items()}


@pytest.mark.parametrize(("sizes", "tokens"), [({}, 1024), ({"batch_size": 3, "length": 7}, 21)])
def test_a_plan_needs_no_data(sizes: dict[str, int], tokens: int) -> None:
    found = plans(module(), SyntheticData(**sizes))
    for plan in found.values():
        assert isinstance(plan, Plan)
        assert plan.prediction is not None
        assert plan.prediction.tokens_per_second == pytest.approx(tokens / plan.prediction.step_seconds)


def test_a_batch_has_samples_and_tokens() -> None:
    for name in ("batch_size", "length"):
        found = plans(module(), SyntheticData(**{name: 0}))
        assert all(f"{name}=0: give a whole number above zero" in str(answer) for answer in found.values())


class Seen(Exception):
    """Has the batch."""


class Ahead(L.Callback):
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        raise Seen(batch_to_plan_with(trainer))


def test_the_batch_is_that_of_the_model() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=1, callbacks=[Ahead()], **QUIET)
    with pytest.raises(Seen) as seen:
        trainer.fit(module(), DataLoader(SyntheticData(2, 9), batch_size=None))
    (batch,) = seen.value.args
    assert batch.keys() == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (2, 9)
    assert torch.equal(batch["input_ids"], batch["labels"])


def test_nothing_is_trained_on_it() -> None:
    with pytest.raises(ValueError, match=r"for planning only\. Give data"):
        iter(DataLoader(SyntheticData(), batch_size=None)).__next__()


def test_no_batch_can_be_made_for_just_any_module() -> None:
    found = plans(zoo()["reused"](), SyntheticData())
    assert all("holds no model of transformers" in str(answer) for answer in found.values())
