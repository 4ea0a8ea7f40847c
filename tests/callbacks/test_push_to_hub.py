"""`SavePretrained(push_to_hub=True)`: what arrives on the Hub, and what is refused before training."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from lightning_protrain.callbacks.save_pretrained import SavePretrained
from lightning_protrain.models.module import CausalLMModule
from tests.callbacks.stand_ins import chat_data, fit
from tests.support import stand_in_hub as stand_in
from tests.support.stand_in_hub import StandInHub, stand_in_hub

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 2}
CONFIG: dict[str, Any] = {"model_type": "llama", **SIZES}


class Training(CausalLMModule):
    """Counts its steps."""

    steps = 0

    def training_step(self, *arguments: Any) -> Any:
        self.steps += 1
        return super().training_step(*arguments)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    with stand_in_hub({}, tmp_path, monkeypatch) as hub:
        monkeypatch.setenv("HF_TOKEN", "hf_mine")
        yield hub


def _trained(tmp_path: Path, callback: SavePretrained, **options: Any) -> Training:
    module = Training(**({"config": CONFIG} | options), warmup_steps=0)
    fit(module, chat_data(tmp_path), callback)
    return module


def _files(folder: str) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()
    }


@pytest.mark.parametrize(
    ("options", "name", "visibility"),
    [
        ({}, "me/out", None),
        ({"hub_model_id": "mine", "hub_private_repo": True}, "me/mine", "private"),
        ({"hub_model_id": "team/theirs", "hub_private_repo": False}, "team/theirs", "public"),
    ],
)
def test_the_hub_gets_the_bytes_of_the_folder(
    options: dict[str, Any], name: str, visibility: str | None, server: StandInHub, tmp_path: Path
) -> None:
    _trained(tmp_path, SavePretrained("models/out", push_to_hub=True, **options))
    assert server.repositories == {name: _files("models/out")}
    assert server.visibility == {name: visibility}
    assert "model.safetensors" in _files("models/out")
    assert f'pipeline("text-generation", "{name}")' in Path("models/out/README.md").read_text(encoding="utf-8")
    assert "/api/validate-yaml" in server.asked


def test_adapters_are_pushed_and_a_base_that_others_lack_is_told(server: StandInHub, tmp_path: Path) -> None:
    _trained(tmp_path, SavePretrained("base"))
    assert not server.asked, "nothing is pushed unless it is asked for"
    base = str(tmp_path / "base")
    with pytest.warns(UserWarning, match=re.escape(f"will name their base model as {base!r}, which is only on this")):
        _trained(tmp_path, SavePretrained("out", push_to_hub=True), config=None, model=base, lora={"r": 2})
    assert server.repositories == {"me/out": _files("out")}
    assert "adapter_model.safetensors" in _files("out")
    assert ModelCard.load(Path("out/README.md")).data.library_name == "peft"


def test_a_repository_that_exists_gets_a_further_commit(server: StandInHub, tmp_path: Path) -> None:
    server.repositories["me/out"] = {"LICENSE": b"mine"}
    _trained(tmp_path, SavePretrained("out", push_to_hub=True))
    assert server.repositories["me/out"] == {"LICENSE": b"mine", **_files("out")}


def test_the_repository_of_a_run_has_its_name_and_a_public_one_gets_no_private_model(
    server: StandInHub, tmp_path: Path
) -> None:
    server.repositories["me/tiny-chats"] = {}
    server.visibility["me/tiny-chats"] = "public"
    sentence = "push_to_hub cannot write to 'me/tiny-chats': it is public, but hub_private_repo is true"
    with pytest.raises(ValueError, match=sentence):
        _trained(tmp_path, SavePretrained("runs/tiny-chats/model", push_to_hub=True, hub_private_repo=True))
    assert server.repositories == {"me/tiny-chats": {}}


TOKEN = "the Hub refuses your token (401); log in with `hf auth login`, or replace HF_TOKEN."
DENIED = (
    "your token may not write there (403, Forbidden); give it write access in its settings, or set hub_model_id to a "
    "repository of yours."
)


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        ({"whoami-v2": stand_in.WRONG_TOKEN}, f"push_to_hub cannot write to 'out': {TOKEN}"),
        ({"create": stand_in.DENIED}, f"push_to_hub cannot write to 'me/out': {DENIED}"),
        ({"create": stand_in.DENIED, "preupload": stand_in.DENIED}, f"push_to_hub cannot write to 'me/out': {DENIED}"),
        (
            {"whoami-v2": stand_in.BROKEN},
            "push_to_hub cannot write to 'out': the Hub fails with status 500, Internal Error.",
        ),
    ],
    ids=["wrong token", "no namespace", "read only", "broken"],
)
def test_what_the_hub_refuses_is_told_before_training(
    refused: dict[str, Any], sentence: str, server: StandInHub, tmp_path: Path
) -> None:
    server.refused = refused
    if "preupload" in refused:  # The repository exists, and the token may read it.
        server.repositories["me/out"] = {}
    module = Training(config=CONFIG, warmup_steps=0)
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        fit(module, chat_data(tmp_path), SavePretrained("out", push_to_hub=True))
    assert module.steps == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("token", "'out': there is no token; log in with `hf auth login`, or set HF_TOKEN."),
        ("offline", "'out': HF_HUB_OFFLINE is set; unset it."),
        ("gone", "'out': http://127.0.0.1:1 does not answer."),
        ("name", "'me/a/b': this is no name on the Hugging Face Hub; give hub_model_id, such as owner/name."),
    ],
)
def test_a_hub_that_cannot_be_asked_is_told_before_training(
    change: str, reason: str, server: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change == "token":
        monkeypatch.delenv("HF_TOKEN")
    elif change == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif change == "gone":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
        warnings.filterwarnings("ignore", ".* does not answer: models and data named")
    callback = SavePretrained("out", push_to_hub=True, hub_model_id="me/a/b" if change == "name" else None)
    with pytest.raises(ValueError, match=f"^push_to_hub cannot write to {re.escape(reason)}$"):
        _trained(tmp_path, callback)


@pytest.mark.parametrize("part", ["batch", "lfs", "commit"])
def test_an_upload_that_fails_costs_no_model(
    part: str, server: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.refused = {part: stand_in.BROKEN}
    with pytest.warns(UserWarning, match=r"is not pushed: the Hub fails with status 500") as shown:
        _trained(tmp_path, SavePretrained("my out", push_to_hub=True, hub_model_id="mine"))
    assert str(shown[-1].message).endswith("Push it with `hf upload me/mine 'my out' .`.")
    assert "model.safetensors" in _files("my out")
    assert server.repositories == {"me/mine": {}}
