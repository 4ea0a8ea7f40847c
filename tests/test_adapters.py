"""LoRA settings, and models with adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftModel, PrefixTuningConfig, get_peft_model

from lightning_protrain.adapters import base_of, lora_config, with_lora
from tests.test_loss import tiny_model


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
