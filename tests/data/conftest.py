"""Conversations and a tokenizer small enough to train in every session."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_protrain.data.batches.tokenizer import train_tokenizer
from lightning_protrain.data.conversation import Conversation
from tests.data.tokenizers import package_folder


def conversation(question: str, *answers: str) -> Conversation:
    """Return a conversation that repeats one question before every answer."""
    messages = []
    for answer in answers:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


@pytest.fixture(scope="session")
def rows() -> list[Conversation]:
    """Forty different conversations, every fourth with two answers."""
    return [
        conversation(f"What is {i} plus {i}?", *[f"The sum is {2 * i}.\n\nDone."] * (2 if i % 4 == 0 else 1))
        for i in range(40)
    ]


@pytest.fixture
def chats(rows: list[Conversation], tmp_path: Path) -> str:
    """A file of these conversations."""
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="session")
def tokenizer(rows: list[Conversation]) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the chat template of the package."""
    return train_tokenizer(rows, vocab_size=300)


@pytest.fixture(scope="session")
def mistral_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder as Mistral publishes it: its vocabulary for mistral-common, and no file of `tokenizers`."""
    folder = tmp_path_factory.mktemp("mistral")
    (folder / "tekken.json").symlink_to(package_folder("mistral_common") / "data" / "tekken_240911.json")
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    return str(folder)
