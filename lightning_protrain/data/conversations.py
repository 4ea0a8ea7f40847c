"""Conversations in the `messages` format: reading, checking, splitting, fingerprinting."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

ROLES = ("system", "user", "assistant", "tool")


class Message(TypedDict):
    """One turn."""

    role: str
    content: str


class Conversation(TypedDict):
    """Turns in order, at least one of them the assistant's."""

    messages: list[Message]


def read_jsonl(path: Path) -> list[Conversation]:
    """Reads a file with one JSON object per line, each with a `messages` list; empty lines are skipped.

    Raises:
        ValueError: A line is not JSON or not a conversation; the line is named, counted from 1.
    """
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: not valid JSON ({error}). Write one JSON object per line.") from error
            rows.append(check_conversation(row, where))
    return rows


def check_conversation(row: Any, where: str) -> Conversation:
    """Returns the conversation in `row`, without any other columns.

    Args:
        row: What the data set holds.
        where: Names the row in messages.

    Raises:
        ValueError: No `messages`, an unknown role, a content that is no text, or no turn of the assistant.
    """
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: no `messages` list with at least one message. Each row needs one.")
    checked: list[Message] = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in ROLES:
            raise ValueError(f"{where}, message {number}: the role is {role!r}. Use one of {', '.join(ROLES)}.")
        if not isinstance(content, str):
            kind = type(content).__name__
            raise ValueError(f"{where}, message {number}: the content is a {kind}. Give text.")
        checked.append({"role": role, "content": content})
    if not any(message["role"] == "assistant" for message in checked):
        raise ValueError(f"{where}: no message of the assistant, so nothing to learn. Remove the row.")
    return {"messages": checked}


def fingerprint(rows: Sequence[Conversation], **settings: Any) -> str:
    """Hash of the conversations, their order included, and of JSON-able `settings`: 32 hexadecimal digits."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True).encode())
        digest.update(b"\n")
    return digest.hexdigest()[:32]


def split_rows(
    rows: Sequence[Conversation], val_fraction: float, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """Divides the rows by chance into training and validation; each keeps the given order.

    Args:
        rows: At least two.
        val_fraction: Share of the validation rows, rounded, at least one row on each side.
        seed: Seed of the choice.

    Raises:
        ValueError: Fewer than two rows.
    """
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} conversations cannot be divided into training and validation. Give at least 2.")
    count = min(max(round(len(rows) * val_fraction), 1), len(rows) - 1)
    chosen = set(np.random.default_rng(seed).permutation(len(rows))[:count].tolist())
    train = [row for index, row in enumerate(rows) if index not in chosen]
    return train, [rows[index] for index in sorted(chosen)]
