"""README.md beside a saved model says how it was trained, and has code that runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from lightning.pytorch import LightningModule
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_protrain.callbacks import save_pretrained
from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.save_pretrained import SavePretrained
from lightning_protrain.models.export import export, merge
from lightning_protrain.models.model_card import TrainingFacts, write_card
from lightning_protrain.models.module import CausalLMModule
from tests.callbacks.stand_ins import chat_data, fit

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2}
CONFIG: dict[str, Any] = {"model_type": "llama", **SIZES}
TARGETS = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole model `base`, adapters of it in `adapters`, and the checkpoints of both."""
    folder = tmp_path_factory.mktemp("secret-place")
    saver = ProTrainCheckpoint(folder / "whole-run", every_n_train_steps=2)
    module = CausalLMModule(config=CONFIG, warmup_steps=0)
    fit(module, chat_data(folder), SavePretrained(str(folder / "base")), saver, enable_checkpointing=True)
    module = CausalLMModule(model=str(folder / "base"), lora={"r": 2, "lora_alpha": 4}, learning_rate=2e-4)
    data = chat_data(folder, tokenizer=str(folder / "base"), max_length=96)
    saver = ProTrainCheckpoint(folder / "adapters-run", every_n_train_steps=3)
    options: dict[str, Any] = {"enable_checkpointing": True, "max_steps": 3, "accumulate_grad_batches": 2}
    fit(module, data, SavePretrained(str(folder / "adapters")), saver, **options)
    return folder


def _table(folder: Path) -> dict[str, str]:
    """Return the rows of a card; check that it says nothing of this host."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "secret-place" not in text
    assert str(Path.home()) not in text
    assert "More Information Needed" not in text
    return dict(re.findall(r"^\| (\S.*?) \| (.*) \|$", text, re.MULTILINE))


def _metadata(folder: Path) -> dict[str, Any]:
    return ModelCard.load(folder / "README.md").data.to_dict()


def test_a_card_of_adapters_has_the_facts_of_the_run(folders: Path) -> None:
    tags = {"tags": ["lightning-protrain", "lora"], "pipeline_tag": "text-generation"}
    assert _metadata(folders / "adapters") == {"library_name": "peft", **tags}
    table = _table(folders / "adapters")
    assert table.pop("hardware").startswith("1 x ")
    assert re.fullmatch(r"val_accuracy \S+, val_loss \S+, val_perplexity \S+", table.pop("validation"))
    assert re.fullmatch(
        r"lightning_protrain \S+, torch \S+, lightning \S+, transformers \S+, peft \S+", table.pop("versions")
    )
    # 11 conversations are 6 batches, so that 3 steps of 2 batches are an epoch; each has 5 to 6 trained tokens.
    assert 50 < int(re.sub(r"\D", "", table.pop("trained tokens"))) < 70
    assert table == {
        "base model": "base",
        "data": "chats.jsonl (11 rows)",
        "method": f"LoRA: r 2, lora_alpha 4, on {TARGETS}",
        "loss": "next-token cross-entropy",
        "precision": "32-true, weights in float32",
        "learning rate": "0.0002, warm-up over 3% of the steps, cosine decay to 10%",
        "steps": "3, 1 epochs",
        "batch": "4 rows (2 x 2 micro-batches x 1 device) of at most 96 tokens",
        "trained parameters": "448",
        "optimizer": "AdamW, betas (0.9, 0.95), weight decay 0.1",
    }


def test_a_card_of_a_model_from_random_weights_names_no_base(folders: Path) -> None:
    assert _metadata(folders / "base")["library_name"] == "transformers"
    table = _table(folders / "base")
    assert "base model" not in table
    assert table["method"] == "full"
    assert table["steps"] == "2, 0.333 epochs"


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("exported", f"LoRA: r 2, lora_alpha 4, on {TARGETS}"),
        ("merged", f"LoRA: r 2, lora_alpha 4, on {TARGETS}, merged into the weights"),
        ("whole", "full"),
    ],
)
def test_a_card_of_a_checkpoint_has_the_facts_in_it(folders: Path, tmp_path: Path, name: str, method: str) -> None:
    run = folders / ("whole-run" if name == "whole" else "adapters-run")
    (merge if name == "merged" else export)(run / "last", tmp_path / name)
    table = _table(tmp_path / name)
    versions = table.pop("versions")
    assert ("peft" in versions) is (name != "whole")
    run_table = _table(folders / ("base" if name == "whole" else "adapters"))
    assert table.pop("optimizer") == "AdamW"
    assert table.pop("method") == method
    assert table == {key: run_table[key] for key in table}
    assert {"loss", "precision", "learning rate", "steps", "batch"} <= table.keys()
    assert _metadata(tmp_path / name)["library_name"] == ("peft" if name == "exported" else "transformers")


@pytest.mark.parametrize("name", ["base", "adapters"])
def test_the_code_of_a_card_runs(
    folders: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folders)
    (code,) = re.findall(r"```python\n(.*?)```", Path(name, "README.md").read_text(encoding="utf-8"), re.DOTALL)
    torch.default_generator.manual_seed(0)
    exec(code, {})
    assert len(capsys.readouterr().out) > 1


def test_names_on_the_hub_are_metadata_and_paths_are_not(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("models--owner--model", "datasets--owner--data"):
        (tmp_path / "hub" / name).mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(folders / "base")
    facts = TrainingFacts(
        "owner/model", ("owner/data", "stdlib", "/data/rows.jsonl", "elsewhere/folder"), rows={"a|b": "c|d"}
    )
    write_card(tmp_path, "me/mine", model, facts)
    data = _metadata(tmp_path)
    assert (data["base_model"], data["datasets"]) == ("owner/model", ["owner/data"])
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "# mine\n\nFine-tuned from owner/model, trained" in text
    assert 'pipeline("text-generation", "me/mine")' in text
    assert 'answer("Once upon a time", max_new_tokens=64)' in text, "there is no chat template"
    assert "| a|b | c&#124;d |" in text


def test_a_module_of_somebody_else_has_a_card_with_what_is_known(folders: Path, tmp_path: Path) -> None:
    class Theirs(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModelForCausalLM.from_pretrained(folders / "base")

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss

        def validation_step(self, *_: Any) -> None:
            pass

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    fit(Theirs(), chat_data(tmp_path), SavePretrained("out"))
    table = _table(Path("out"))
    assert table["optimizer"] == "SGD, weight decay 0"
    assert table["steps"].startswith("2, ")
    assert not {"loss", "learning rate", "validation"} & table.keys()


def test_a_card_that_cannot_be_written_costs_no_model(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise KeyError("a fact")

    monkeypatch.setattr(save_pretrained, "write_card", failing)
    with pytest.warns(UserWarning, match=r"The model card README\.md is incomplete: KeyError: 'a fact'"):
        fit(CausalLMModule(config=CONFIG, warmup_steps=0), chat_data(tmp_path), SavePretrained("out"))
    assert len(AutoTokenizer.from_pretrained("out")) > 0
    assert Path("out", "model.safetensors").exists()
