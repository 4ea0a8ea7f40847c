"""What looks like a path is never sent to the Hugging Face Hub, and a Hub that does not answer costs one short wait."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, is_offline_mode

from lightning_protrain.data import hub
from lightning_protrain.data.batches.tokenizer import load_tokenizer
from lightning_protrain.data.sources.load import load_splits
from lightning_protrain.models.loading import read_config


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A Hub that takes connections and never answers."""
    monkeypatch.setattr(hub, "SECONDS", 0.3)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    hub.wait_for_hub.cache_clear()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server
    hub.wait_for_hub.cache_clear()


def was_asked(server: socket.socket) -> bool:
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("./mine", True),
        ("/no/where", True),
        ("~/mine", True),
        ("a/b/c", True),
        ("mine/", True),
        ("data\\mine", True),
        ("data/chats.txt", True),
        ("chats.csv", True),
        ("there/mine", True),
        ("there", True),
        ("gpt2", False),
        ("meta-llama/Llama-3.1-8B", False),
        ("Qwen/Qwen2.5-7B", False),
    ],
)
def test_what_is_a_path(name: str, expected: bool) -> None:
    Path("there").mkdir()
    assert hub.is_path(name) is expected


@pytest.mark.parametrize("load", [read_config, load_tokenizer, load_splits])
@pytest.mark.parametrize("name", ["./mine", "/no/where", "there/mine"])
def test_a_path_is_never_sent_to_the_hub(load: object, name: str, silent: socket.socket) -> None:
    assert callable(load)
    Path("there").mkdir()
    with pytest.raises(ValueError, match=name):
        load(name)
    assert not was_asked(silent)


@pytest.mark.parametrize("load", [read_config, load_tokenizer, load_splits])
def test_a_hub_that_does_not_answer_is_waited_for_once(load: object, silent: socket.socket) -> None:
    assert callable(load)
    begin = time.monotonic()
    with pytest.warns(UserWarning, match="does not answer"), pytest.raises(ValueError, match="somebody/model"):
        load("somebody/model")
    assert was_asked(silent)
    with pytest.raises(ValueError, match="somebody/model"):
        load("somebody/model")
    assert not was_asked(silent), "it is asked again"
    assert is_offline_mode()
    assert time.monotonic() - begin < 60  # with the retries of the library it hangs for minutes


def test_offline_mode_is_honoured(silent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for load in (read_config, load_tokenizer, load_splits):
        with pytest.raises(ValueError, match="somebody/model"):
            load("somebody/model")
    assert not was_asked(silent)
