"""Adapters in the module of the package, under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_protrain.callbacks.save_pretrained import SavePretrained
from lightning_protrain.models.loss import chunked_cross_entropy
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.module_runs import LLAMA, Sequences
from tests.support.tiny_networks import tiny_config

SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4, "lora_alpha": 16},
    "dora": {"r": 4, "use_dora": True},
    "rslora": {"r": 4, "use_rslora": True, "lora_dropout": 0.1},
    "whole modules": {"r": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
}


def module(lora: dict[str, Any] | None, config: dict[str, Any] | None = None) -> CausalLMModule:
    torch.manual_seed(0)
    return CausalLMModule(config=config or LLAMA, warmup_steps=0, learning_rate=1e-2, lora=lora)


def fit(one: LightningModule, strategy: Any = "auto", *callbacks: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=4,
        strategy=strategy,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(one, datamodule=Sequences())
    return {name: value.clone() for name, value in one.state_dict().items()}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("plan", ["offload", "auto"])
def test_every_plan_gives_the_weights_of_plain_training(settings: str, plan: str) -> None:
    plain = fit(module(SETTINGS[settings]))
    streamed = fit(module(SETTINGS[settings]), ProTrainStrategy(plan=plan, monitor=False))
    assert streamed.keys() == plain.keys()
    assert all(torch.equal(streamed[name], plain[name]) for name in plain)


def test_only_adapters_change() -> None:
    one = module(SETTINGS["lora"])
    one.configure_model()
    before = {name: value.clone() for name, value in one.state_dict().items()}
    after = fit(one)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("lora_" in name for name in changed)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "olmo2", "mixtral"])
def test_the_loss_is_that_of_the_model_with_its_container(name: str) -> None:
    one = module({"r": 4}, tiny_config(name))
    one.configure_model()
    assert one.model is not None
    for each, parameter in one.model.named_parameters():
        if "lora_B" in each:
            torch.nn.init.normal_(parameter)
    ids = torch.randint(40, (2, 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    one.eval()
    scores, head, _ = one._scores(batch)
    ours, number = chunked_cross_entropy(scores, head, ids)
    logits = one.model(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=False).logits
    theirs = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    assert (ours / number).item() == pytest.approx(theirs.item(), rel=1e-5)


def test_a_checkpoint_is_loaded_with_its_adapters(tmp_path: Any) -> None:
    one = module(SETTINGS["lora"])
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=2, logger=False, enable_progress_bar=False)
    trainer.fit(one, datamodule=Sequences())
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    loaded = CausalLMModule.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in one.state_dict().items())


def test_adapters_are_written_for_peft(tmp_path: Any) -> None:
    fit(module(SETTINGS["lora"]), ProTrainStrategy(plan="offload"), SavePretrained(str(tmp_path / "out")))
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_wrong_settings_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="key 'rank'"):
        module({"rank": 4})
