"""A trained model is exported to a folder that other libraries read."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, GenerationConfig, LlavaProcessor

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.samples import SampleCompletion
from lightning_protrain.callbacks.save_pretrained import SavePretrained
from lightning_protrain.checkpoint.verification import verify
from lightning_protrain.data.batches.tokenizer import CHAT_TEMPLATE, END, PAD
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.models.export import export, merge
from lightning_protrain.models.lora import save_model
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.callbacks.stand_ins import Speaker, chat_data, fit, tokenizer_folder
from tests.data import llava

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


TEMPLATE = "{{ 'Be brief.' }}" + CHAT_TEMPLATE


@pytest.fixture
def published(tmp_path: Path, base: str) -> str:
    """A pretrained model without a chat template; its generation settings would be refused if they were new."""
    tokenizer_folder(tmp_path, None, "base")
    Path(base, "chat_template.jinja").unlink()
    Path(base, "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "temperature": 0.5}))
    return base


def _assert_is_the_format_of_the_run(folder: Path, template: str = TEMPLATE) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == template
    assert tokenizer.eos_token == PAD
    settings = GenerationConfig.from_pretrained(folder)
    assert settings.eos_token_id == tokenizer.convert_tokens_to_ids([PAD, END])
    assert settings.temperature == 0.5


@pytest.mark.sample(4)
@pytest.mark.parametrize("given", ["text", "file", "name"])
@pytest.mark.parametrize("saver", [ProTrainCheckpoint, ModelCheckpoint])
def test_a_model_is_saved_with_the_chat_format_of_its_run(
    tmp_path: Path, published: str, given: str, saver: type[ModelCheckpoint]
) -> None:
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    folder = tokenizer_folder(tmp_path, {"default": "{{ 1 }}", "short": TEMPLATE} if given == "name" else "{{ 1 }}")
    template = {"text": TEMPLATE, "file": str(tmp_path / "t.jinja"), "name": "short"}[given]
    module = CausalLMModule(model=published, warmup_steps=0)
    data = chat_data(tmp_path, tokenizer=folder, chat_template=template)
    callbacks = [SavePretrained(str(tmp_path / "saved")), saver(tmp_path / "checkpoints", every_n_train_steps=2)]
    fit(module, data, *callbacks, enable_checkpointing=True)
    shutil.rmtree(folder)
    (checkpoint,) = (tmp_path / "checkpoints").glob("*.ckpt")
    export(checkpoint, tmp_path / "exported")
    export(checkpoint, tmp_path / "explicit", tokenizer=tokenizer_folder(tmp_path, "{{ 2 }}", "explicit tokenizer"))
    _assert_is_the_format_of_the_run(tmp_path / "saved")
    _assert_is_the_format_of_the_run(tmp_path / "exported")
    _assert_is_the_format_of_the_run(tmp_path / "explicit", "{{ 2 }}")


@pytest.mark.filterwarnings("ignore:.*may compute its logits outside its head")
def test_adapters_are_saved_and_merged_with_the_chat_format_of_their_run(tmp_path: Path, published: str) -> None:
    module = CausalLMModule(model=published, lora={"r": 2}, warmup_steps=0)
    callbacks = [SavePretrained(str(tmp_path / "saved")), ProTrainCheckpoint(tmp_path / "all", every_n_train_steps=2)]
    data = chat_data(tmp_path, tokenizer=published, chat_template=TEMPLATE)
    fit(module, data, *callbacks, enable_checkpointing=True)
    merge(next((tmp_path / "all").glob("*.ckpt")), tmp_path / "merged", adapter=tmp_path / "adapters")
    for name in ("saved", "merged", "adapters"):
        _assert_is_the_format_of_the_run(tmp_path / name)


def test_a_processor_is_exported_with_the_template_of_texts(tmp_path: Path) -> None:
    config = llava.config(llava.processor())
    module = CausalLMModule(config=config, loss_chunk_tokens=None, warmup_steps=0)
    llava.save(tmp_path / "model", "{{ 1 }}")
    data = chat_data(tmp_path, tokenizer=str(tmp_path / "model"), chat_template=llava.TEMPLATE)
    fit(module, data, SavePretrained(str(tmp_path / "base")))
    llava.save(tmp_path / "base", "{{ 1 }}")
    module = CausalLMModule(model=str(tmp_path / "base"), loss_chunk_tokens=None, warmup_steps=0)
    saver = ProTrainCheckpoint(tmp_path / "all", every_n_train_steps=2)
    fit(module, data, saver, enable_checkpointing=True)
    export(next((tmp_path / "all").glob("*.ckpt")), tmp_path / "exported")
    processor = AutoProcessor.from_pretrained(tmp_path / "exported")
    assert type(processor) is LlavaProcessor
    assert processor.chat_template == processor.tokenizer.chat_template == llava.TEMPLATE


def test_a_checkpoint_without_a_chat_format_gives_the_tokenizer_of_the_model(tmp_path: Path, published: str) -> None:
    class Older(ChatDataModule):
        def state_dict(self) -> dict[str, Any]:
            return {}

    data = chat_data(tmp_path, tokenizer=tokenizer_folder(tmp_path, TEMPLATE))
    data.__class__ = Older
    saver = ProTrainCheckpoint(tmp_path / "all", every_n_train_steps=2)
    fit(CausalLMModule(model=published, warmup_steps=0), data, saver, enable_checkpointing=True)
    export(next((tmp_path / "all").glob("*.ckpt")), tmp_path / "exported")
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").chat_template is None
    assert GenerationConfig.from_pretrained(tmp_path / "exported").eos_token_id == 0


class Failing(Callback):
    """Fails in one hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._fail)

    def _fail(self, *_: object, **__: object) -> None:
        raise KeyError("of another callback")


@pytest.mark.parametrize(
    ("hook", "options", "is_saved"),
    [
        ("on_train_end", {}, True),
        ("on_train_end", {"strategy": ProTrainStrategy(plan="offload", overlap_optimizer="forward")}, True),
        ("on_fit_end", {}, True),
        ("on_validation_end", {"val_check_interval": 2, "num_sanity_val_steps": 0}, True),
        ("on_train_epoch_end", {"max_steps": -1, "max_epochs": 1}, True),
        ("on_validation_end", {"val_check_interval": 1, "num_sanity_val_steps": 0}, False),
        ("on_train_epoch_end", {"max_steps": -1, "max_epochs": 2}, False),
        ("on_sanity_check_end", {}, False),
    ],
)
def test_a_callback_that_fails_after_the_last_step_does_not_cost_the_model(
    tmp_path: Path, hook: str, options: dict[str, Any], is_saved: bool
) -> None:
    module = CausalLMModule(config=CONFIG, warmup_steps=0)
    with pytest.raises(KeyError, match="of another callback"):
        fit(module, chat_data(tmp_path), Failing(hook), SavePretrained(str(tmp_path / "out")), **options)
    assert (tmp_path / "out").exists() is is_saved
    if is_saved:
        weights = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
        assert all(torch.equal(weights[name], value) for name, value in module.model.state_dict().items())


def test_an_answer_that_fails_does_not_cost_the_model(tmp_path: Path) -> None:
    class Mute(CausalLMModule):
        def generate(self, *_: object, **__: object) -> torch.Tensor:
            raise RuntimeError("broken")

    callbacks = [SampleCompletion(["One?"], in_validation=True), SavePretrained(str(tmp_path / "out"))]
    with pytest.warns(UserWarning, match="the run goes on without. RuntimeError: broken"):
        fit(Mute(config=CONFIG, warmup_steps=0), chat_data(tmp_path), *callbacks)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


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
