"""LoRA settings, models with adapters, and adapters in the module under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from peft import PeftModel, PrefixTuningConfig, get_peft_model
from torch import Tensor

from lightning_protrain.models.lora import base_of, lora_config, with_lora
from lightning_protrain.models.loss import chunked_cross_entropy
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.module_runs import LLAMA, Sequences
from tests.support.tiny_networks import tiny_config, tiny_model
from tests.support.trainers import QUIET, SILENT


def test_all_linear_layers_but_the_head_by_default() -> None:
    model = with_lora(tiny_model("llama"), {"r": 4})
    adapted = {name.rpartition(".")[2] for name, each in model.named_modules() if hasattr(each, "lora_A")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all("lora_" in name for name, each in model.named_parameters() if each.requires_grad)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "mixtral", "gemma3_text"])
def test_only_adapters_are_trained(name: str) -> None:
    model = with_lora(tiny_model(name), {"r": 2})
    trained = [each for each, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in each for each in trained)


def test_modules_to_save_are_trained_whole() -> None:
    model = with_lora(tiny_model("llama"), {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]})
    trained = {name for name, each in model.named_parameters() if each.requires_grad and "lora_" not in name}
    assert trained == {"base_model.model.lm_head.modules_to_save.default.weight"}


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"use_rslora": True}, {"lora_alpha": 32, "bias": "all"}])
def test_settings_reach_peft(settings: dict[str, Any]) -> None:
    config = lora_config({"r": 3, **settings})
    assert config.r == 3
    assert all(getattr(config, name) == value for name, value in settings.items())


def test_the_base_without_the_container() -> None:
    base = tiny_model("llama")
    model = with_lora(base, {"r": 2})
    assert isinstance(model, PeftModel)
    assert base_of(model) is base
    assert base_of(base) is base
    ids = torch.arange(6).reshape(1, 6)
    assert torch.equal(model(input_ids=ids).logits, base(input_ids=ids).logits)


def test_prompts_that_are_learned_need_their_container() -> None:
    model = get_peft_model(tiny_model("llama"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert base_of(model) is model


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 4}, r"key 'rank'.* Try: r, lora_alpha"),
        ({"lora_alfa": 4}, r"key 'lora_alfa'.* Try: lora_alpha"),
        ({"r": 0}, "lora.r is 0"),
        ({"r": "many"}, "lora.r is 'many'"),
        ({"target_modules": ["query"]}, r"does not fit the model: .*query.* Its linear layers are: down_proj, gate"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_lora(tiny_model("llama"), settings)


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
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=4, strategy=strategy, callbacks=list(callbacks), **QUIET)
    trainer.fit(one, datamodule=Sequences())
    return {name: value.clone() for name, value in one.state_dict().items()}


@pytest.mark.parametrize("settings", SETTINGS)
def test_streaming_gives_the_weights_of_plain_training(settings: str) -> None:
    plain = fit(module(SETTINGS[settings]))
    streamed = fit(module(SETTINGS[settings]), ProTrainStrategy(plan="offload", monitor=False))
    assert streamed.keys() == plain.keys()
    assert all(torch.equal(streamed[name], plain[name]) for name in plain)


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
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=2, **SILENT)
    trainer.fit(one, datamodule=Sequences())
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    loaded = CausalLMModule.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in one.state_dict().items())
