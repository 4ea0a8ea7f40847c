"""What the Hub, the network or the disk prevents is said in one sentence, whatever is loaded."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError
from transformers import AutoConfig

from lightning_protrain.cli import main
from lightning_protrain.data import hub
from lightning_protrain.data.batches.processor import load_media_processor
from lightning_protrain.data.batches.tokenizer import load_tokenizer
from lightning_protrain.data.sources.load import Source
from lightning_protrain.models.loading import StoredModel, check_source, read_config
from lightning_protrain.models.published import find_config
from tests.support import stand_in_hub as stand_in
from tests.support.stand_in_hub import StandInHub, stand_in_hub

pytest.importorskip("datasets")
LLAMA = "meta-llama/Llama-3.1-8B"  # Its config comes with the package.
CONFIG = AutoConfig.for_model(
    "llama", hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=40
)
FILES = {"config.json": CONFIG.to_json_string().encode()}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    with stand_in_hub({}, tmp_path, monkeypatch) as found:
        yield found


def weights(name: str) -> object:
    return StoredModel(name, CONFIG, "float32").load()


def checked(name: str) -> None:
    check_source(name, allow_pickle=False)


def splits(name: str) -> object:
    return Source(name, None).splits


MODELS = [read_config, checked, weights, load_tokenizer, load_media_processor]
LOADS = [*MODELS, splits]


def refused(load: Callable[[str], Any], name: str) -> str:
    with pytest.raises(ValueError) as error:
        load(name)
    said = str(error.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            stand_in.GATED,
            (
                "'some/name' is gated: ask for access on https://huggingface.co/{page}some/name, and log in with `hf"
                " auth login` (the Hub says: 403, Access to model x is restricted)."
            ),
        ),
        (
            stand_in.ABSENT,
            (
                "There is no {kind} 'some/name' on the Hugging Face Hub, and no folder of this name: correct the "
                "name, or, if it is private, log in with `hf auth login`."
            ),
        ),
        (
            stand_in.ABSENT_WITHOUT_LOGIN,
            (
                "There is no {kind} 'some/name' on the Hugging Face Hub, and no folder of this name: correct the "
                "name, or, if it is private, log in with `hf auth login`."
            ),
        ),
        (
            stand_in.WRONG_TOKEN,
            (
                "The Hugging Face Hub refuses your token (401, Invalid credentials in Authorization header), so "
                "'some/name' cannot be loaded: log in again with `hf auth login`, or replace HF_TOKEN."
            ),
        ),
        (
            stand_in.TOO_MANY,
            (
                "The Hugging Face Hub takes no more requests for now (429), so 'some/name' cannot be loaded: try "
                "again in 120 s, or log in with `hf auth login`, which raises the limit."
            ),
        ),
        (
            stand_in.DENIED,
            (
                "Your token may not read 'some/name' (403, Forbidden): give it access to "
                "https://huggingface.co/{page}some/name in its settings."
            ),
        ),
        (
            stand_in.BROKEN,
            (
                "The Hugging Face Hub fails with status 500, Internal Error, so 'some/name' cannot be loaded: try "
                "again later."
            ),
        ),
    ],
    ids=["gated", "absent", "absent without login", "wrong token", "too many", "denied", "broken"],
)
def test_an_error_of_the_hub_is_one_sentence(
    load: Callable[[str], Any], answer: stand_in.Answer, sentence: str, server: StandInHub
) -> None:
    server.repositories["some/name"] = answer
    kind, page = ("data set", "datasets/") if load is splits else ("model", "")
    assert refused(load, "some/name") == sentence.format(kind=kind, page=page)


def test_a_token_that_the_hub_does_not_know_is_no_missing_model(
    server: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repositories["some/name"] = stand_in.ABSENT_WITHOUT_LOGIN
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert refused(read_config, "some/name").endswith(
        "'some/name' cannot be loaded: log in again with `hf auth login`, or replace HF_TOKEN."
    )


@pytest.mark.parametrize("load", LOADS)
def test_offline_mode_is_named(load: Callable[[str], Any], server: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    kind = "data set" if load is splits else "model"
    assert refused(load, "some/name") == (
        f"The {kind} 'some/name' is not in the cache {constants.HF_HUB_CACHE}, or not all of it, and HF_HUB_OFFLINE is "
        "set: unset HF_HUB_OFFLINE, or give a path."
    )
    assert not server.asked


@pytest.mark.parametrize("load", LOADS)
def test_a_hub_that_is_not_reached_is_named(
    load: Callable[[str], Any], server: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/{revision}/{filename}")
    with pytest.warns(UserWarning, match=r"http://127\.0\.0\.1:1 does not answer"):
        hub.look_up("some/name")
    said = refused(load, "some/name")
    assert said.endswith("and http://127.0.0.1:1 does not answer: check the network, or give a path.")


@pytest.mark.parametrize("error", [hub.HUB_ERRORS[-1]("slow"), ConnectionResetError(errno.ECONNRESET, "reset")])
def test_a_connection_that_breaks_is_no_bug(
    error: Exception, server: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(hub, "hf_hub_download", download)
    assert refused(read_config, "some/name").endswith("does not answer: check the network, or give a path.")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/cache/x"),
            (
                "'some/name' cannot be downloaded, because the disk of /cache/x is full: free some space, or set "
                "HF_HOME to a folder on another disk."
            ),
        ),
        (
            RuntimeError("Data processing error: I/O error: No space left on device (os error 28)"),
            (
                "'some/name' cannot be downloaded, because the disk of {cache} is full: free some space, or set "
                "HF_HOME to a folder on another disk."
            ),
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/cache/x"),
            (
                "'some/name' cannot be downloaded, because this process may not write to /cache/x: set HF_HOME to "
                "another folder."
            ),
        ),
    ],
    ids=["full", "full in Rust", "not writable"],
)
def test_the_disk_of_the_cache_is_named(
    error: Exception, sentence: str, server: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(hub, "hf_hub_download", download)
    assert refused(read_config, "some/name") == sentence.format(cache=constants.HF_HUB_CACHE)


def test_a_model_whose_config_is_shipped_is_planned_but_not_trained_without_access(server: StandInHub) -> None:
    server.repositories[LLAMA] = stand_in.GATED
    assert read_config(LLAMA).hidden_size == find_config(LLAMA).config["hidden_size"] == 4096
    for load in (checked, weights):
        assert refused(load, LLAMA).startswith(f"'{LLAMA}' is gated: ask for access on https://huggingface.co/{LLAMA},")


def test_a_model_whose_config_is_shipped_is_planned_but_not_trained_offline(
    server: StandInHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert read_config(LLAMA).hidden_size == 4096
    for load in (checked, weights):
        assert f"The model '{LLAMA}' is not in the cache" in refused(load, LLAMA)


@pytest.mark.parametrize("load", [checked, weights])
@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "There are no weights in 'some/name': no model.safetensors and no model.safetensors.index.json. Give a"),
        ({"model.gguf": b""}, "as in `hf download some/name model.gguf --local-dir .`, and give its path."),
        ({"pytorch_model.bin": b""}, "The weights in 'some/name' are pickled (pytorch_model.bin), and a pickle can"),
        ({"adapter_config.json": b""}, "It has adapters without their base model: give FOLDER"),
    ],
    ids=["none", "gguf", "pickle", "adapters"],
)
def test_weights_that_cannot_be_trained_are_named_and_not_downloaded(
    load: Callable[[str], Any], files: dict[str, bytes], sentence: str, server: StandInHub
) -> None:
    server.repositories["some/name"] = {**FILES, **files}
    assert sentence in refused(load, "some/name")
    assert not any(path.endswith((".bin", ".gguf")) for path in server.asked)


def test_a_repository_without_a_config(server: StandInHub) -> None:
    server.repositories["some/name"] = {"README.md": b""}
    assert refused(read_config, "some/name").startswith("There is no config.json in 'some/name'. Give a model")
    assert "none of the files tokenizer.json, " in refused(load_tokenizer, "some/name")


def test_files_in_the_cache_are_taken_when_the_hub_fails(server: StandInHub) -> None:
    server.repositories["some/name"] = FILES
    assert read_config("some/name").hidden_size == 16
    server.repositories["some/name"] = stand_in.BROKEN
    assert read_config("some/name").hidden_size == 16
    assert "status 500" in refused(weights, "some/name"), "weights that are not in the cache are said to be absent"


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("Qwen/Qwen3-9B", "; did you mean Qwen/Qwen3.5-9B or "),
        ("some/chat-modle", "; did you mean other/chat-model?"),
        ("mine/lama", "; the nearest is 'mined'."),
        ("zzz/zzz", "`hf auth login`."),
    ],
)
def test_a_name_that_does_not_exist_is_told_with_the_nearest(
    name: str, end: str, server: StandInHub, tmp_path: Path
) -> None:
    (tmp_path / "hub" / "models--other--chat-model").mkdir(parents=True)
    Path("mined").mkdir()
    assert end in refused(read_config, name)


def test_a_folder_that_does_not_exist_is_told_with_the_nearest() -> None:
    Path("models/my-lama").mkdir(parents=True)
    for load in [*MODELS[:2], load_tokenizer]:
        assert refused(load, "./models/my-llama").startswith(
            "There is no folder './models/my-llama'; the nearest is 'models/my-lama'. Correct the path"
        )


def test_a_revision_that_does_not_exist(server: StandInHub) -> None:
    server.repositories["some/name"] = (404, {"X-Error-Code": "RevisionNotFound"})
    said = refused(lambda name: Source({"path": name, "revision": "v9"}, None).splits, "some/name")
    assert said == (
        "The data set 'some/name' has no such `revision`: see its branches and tags on "
        "https://huggingface.co/datasets/some/name/tree/main."
    )


@pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
@pytest.mark.parametrize("command", ["fit", "preview", "plan"])
def test_no_command_shows_a_traceback(
    command: str, server: StandInHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.repositories["some/name"] = stand_in.GATED
    Path("rows.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    options = ["--model.model=some/name", "--data.tokenizer=some/name", "--data.dataset=rows.jsonl"]
    options += ["--trainer.accelerator=cpu", "--trainer.logger=false", "--data.val_fraction=0.5"]
    monkeypatch.setattr(sys, "argv", ["lightning-protrain", command, *options])
    with pytest.raises(SystemExit) as stop:
        main()
    assert str(stop.value.code).startswith("lightning-protrain: 'some/name' is gated: ask for access on https://hugg")
    assert "Traceback" not in capsys.readouterr().err


def test_a_cause_is_found_below_the_errors_of_other_libraries(server: StandInHub) -> None:
    server.repositories["some/name"] = stand_in.GATED

    @hub.hub_refusals("some/name")
    def load() -> None:
        try:
            hub.hf_hub_download("some/name", "config.json")
        except GatedRepoError as error:
            try:
                raise OSError("You are trying to access a gated repo.") from error
            except OSError:
                raise ValueError("This is not a string.")  # noqa: B904 (as libraries do)

    with pytest.raises(ValueError, match="'some/name' is gated"):
        load()
