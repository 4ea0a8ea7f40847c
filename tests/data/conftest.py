"""Conversations and a tokenizer small enough to train in every session."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_protrain.data.conversations import Conversation
from lightning_protrain.data.tokenizer import train_tokenizer


def conversation(question: str, *answers: str) -> Conversation:
    """The same question before every answer."""
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


@pytest.fixture(scope="session")
def tokenizer(rows: list[Conversation]) -> PreTrainedTokenizerFast:
    """A byte-level BPE with the chat template of the package."""
    return train_tokenizer(rows, vocab_size=300)
