"""A trained model is exported to a folder that other libraries read."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.save_pretrained import SavePretrained
from lightning_protrain.checkpoint.verification import verify
from lightning_protrain.models.lora import save_model
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.strategy.protrain import ProTrainStrategy
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


@pytest.mark.filterwarnings("ignore:.*may compute its logits outside its head")
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


def test_a_folder_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    callback = SavePretrained("~/out", "~/other")
    assert callback.dirpath == str(tmp_path / "out")
    assert callback.fallback_dirpath == str(tmp_path / "other")


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A small pretrained model with the tokenizer of `chat_data`, as a folder."""
    data = chat_data(tmp_path)
    fit(CausalLMModule(config=CONFIG, warmup_steps=0), data, SavePretrained(str(tmp_path / "base")))
    return str(tmp_path / "base")


@pytest.mark.filterwarnings("ignore:.*may compute its logits outside its head")
def test_peft_finds_the_base_of_saved_adapters(tmp_path: Path, base: str) -> None:
    module = CausalLMModule(model=base, lora={"r": 2}, warmup_steps=0)
    fit(module, chat_data(tmp_path), SavePretrained(str(tmp_path / "out")), strategy=_strategy("offload"))
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == base
    loaded = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "out")).eval()
    tokens = torch.arange(6)[None]
    assert module.model is not None
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, module.model.eval()(tokens).logits)


@pytest.mark.parametrize(("rows", "saved"), [(0, False), (8, True)])
def test_the_hub_is_not_asked_for_the_vocabulary(
    tmp_path: Path, base: str, rows: int, saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(model.config.vocab_size + rows)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *_: pytest.fail("it asks"))
    save_model(adapted, tmp_path / "known")
    adapted.active_peft_config.base_model_name_or_path = "nobody/nothing"
    save_model(adapted, tmp_path / "unknown")
    with safe_open(tmp_path / "known" / "adapter_model.safetensors", "pt") as file:
        assert any("embed_tokens" in name for name in file.keys()) is saved  # noqa: SIM118 (no dict)


class Full(ProTrainStrategy):
    """A strategy under which writing the model to some folders fails, as if their disks were full."""

    full: tuple[str, ...] = ()
    error: Exception = OSError(errno.ENOSPC, "No space left on device")

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        model: Any = trainer.lightning_module.model
        save = model.save_pretrained

        def write(folder: Path, **options: Any) -> None:
            folder.mkdir()
            (folder / "half").touch()
            if folder.name.removesuffix(".partial") in self.full:
                raise self.error
            (folder / "half").unlink()
            save(folder, **options)

        model.save_pretrained = write


@pytest.mark.parametrize("error", [Full.error, SafetensorError("I/O error: No space left on device (os error 28)")])
def test_a_full_disk_leaves_the_checkpoint_of_the_last_step_and_says_what_to_do(
    tmp_path: Path, error: Exception
) -> None:
    strategy = Full(plan="resident", monitor=False)
    strategy.full, strategy.error = ("out", "other place"), error
    saver = ProTrainCheckpoint(tmp_path / "checkpoints", save_last=True, every_n_train_steps=100)
    other = str(tmp_path / "other place")
    export = SavePretrained(str(tmp_path / "out"), other)
    options = {"strategy": strategy, "enable_checkpointing": True}
    module = CausalLMModule(config=CONFIG, warmup_steps=0)
    with (
        pytest.warns(UserWarning, match=r"out': .*No space left on device.*It is written to .*other place' instead"),
        pytest.raises(
            OSError,
            match=r"other place': .*No space left on device.*newest checkpoint .*step=2\.ckpt has the trained weights",
        ) as failure,
    ):
        fit(module, chat_data(tmp_path), export, saver, **options)
    assert f"`lightning-protrain export {saver.last_model_path} '{other}'`" in str(failure.value)
    assert verify(Path(saver.last_model_path)) == []
    assert not [each.name for each in tmp_path.iterdir() if each.name.startswith(("out", "other"))]


def test_a_full_disk_without_a_checkpoint_says_what_is_lost(tmp_path: Path) -> None:
    strategy = Full(plan="resident", monitor=False)
    strategy.full = ("out",)
    with pytest.raises(OSError, match="No checkpoint was saved either, so the trained weights are lost"):
        fit(
            CausalLMModule(config=CONFIG), chat_data(tmp_path), SavePretrained(str(tmp_path / "out")), strategy=strategy
        )


def test_a_second_folder_takes_what_the_first_cannot(tmp_path: Path) -> None:
    strategy = Full(plan="resident", monitor=False)
    strategy.full = ("out",)
    export = SavePretrained(str(tmp_path / "out"), str(tmp_path / "other"))
    with pytest.warns(UserWarning, match="It is written to"):
        fit(CausalLMModule(config=CONFIG), chat_data(tmp_path), export, strategy=strategy)
    AutoModelForCausalLM.from_pretrained(tmp_path / "other")
    assert not (tmp_path / "out").exists()


def test_what_a_killed_run_left_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "rubbish").write_text("x")
    fit(CausalLMModule(config=CONFIG, warmup_steps=0), chat_data(tmp_path), SavePretrained(str(tmp_path / "out")))
    assert not (tmp_path / "out" / "rubbish").exists()
    assert not (tmp_path / "out.partial").exists()


def test_a_folder_that_is_there_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    module = CausalLMModule(config=CONFIG, warmup_steps=0)
    with pytest.raises(ValueError, match="out', which already exists"):
        fit(module, chat_data(tmp_path), SavePretrained(str(tmp_path / "out")))
    assert module.global_step == 0


@pytest.mark.parametrize("place", ["a file", "a folder that takes none"])
def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    out = "/proc/out" if place == "a folder that takes none" else str(tmp_path / "file" / "out")
    module = CausalLMModule(config=CONFIG, warmup_steps=0)
    with pytest.raises(ValueError, match=f"SavePretrained cannot write to '{out}': "):
        fit(module, chat_data(tmp_path), SavePretrained(out))
    assert module.global_step == 0


def test_a_module_without_such_a_model_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`model` of Speaker, and finds NoneType"):
        fit(Speaker(), chat_data(tmp_path), SavePretrained(str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def _strategy(plan: str) -> Any:
    return ProTrainStrategy(plan=plan, monitor=False)
