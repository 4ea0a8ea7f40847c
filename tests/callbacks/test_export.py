"""What is trained comes out as a folder that others read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_protrain.callbacks.export import SavePretrained
from lightning_protrain.module import CausalLMModule
from lightning_protrain.strategy import ProTrainStrategy
from tests.callbacks.stand_ins import Speaker, chat_data, fit

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 16,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("plan", ["resident", "offload"])
def test_transformers_reads_the_weights_that_were_trained(tmp_path: Path, plan: str) -> None:
    module = CausalLMModule(config=CONFIG, warmup_steps=0)
    data = chat_data(tmp_path)
    fit(module, data, SavePretrained(str(tmp_path / "models" / "out")), strategy=_strategy(plan))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "out")
    assert module.model is not None
    trained = module.model.state_dict()
    assert loaded.state_dict().keys() == trained.keys()
    assert all(torch.equal(loaded.state_dict()[name], trained[name]) for name in trained)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "models" / "out")) == len(data.tokenizer)
    assert [each.name for each in (tmp_path / "models").iterdir()] == ["out"]


class Adapted(CausalLMModule):
    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model = get_peft_model(self.model, LoraConfig(r=2, target_modules=["q_proj"]))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*is not known to make its logits")
def test_adapters_alone_are_written_and_read_back_by_peft(tmp_path: Path) -> None:
    module = Adapted(config=CONFIG, warmup_steps=0)
    fit(module, chat_data(tmp_path), SavePretrained(str(tmp_path / "out")), strategy=_strategy("offload"))
    names = {each.name for each in (tmp_path / "out").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    model: Any = module.model
    base = AutoModelForCausalLM.from_config(model.get_base_model().config)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    trained = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    assert trained
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in trained.items())


def test_what_a_killed_run_left_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "rubbish").write_text("x")
    fit(CausalLMModule(config=CONFIG, warmup_steps=0), chat_data(tmp_path), SavePretrained(str(tmp_path / "out")))
    assert not (tmp_path / "out" / "rubbish").exists()
    assert not (tmp_path / "out.partial").exists()


def test_a_folder_that_is_there_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    module = CausalLMModule(config=CONFIG, warmup_steps=0)
    with pytest.raises(ValueError, match="out', which is there already"):
        fit(module, chat_data(tmp_path), SavePretrained(str(tmp_path / "out")))
    assert module.global_step == 0


def test_a_module_without_such_a_model_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`model` of Speaker, and finds NoneType"):
        fit(Speaker(), chat_data(tmp_path), SavePretrained(str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def _strategy(plan: str) -> Any:
    return ProTrainStrategy(plan=plan, monitor=False)
