"""What people see of a conversation: every token once, in its colour."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lightning_protrain.data.batches.preview import PreviewedConversation, TokenSpan, render, show, visible
from lightning_protrain.data.batches.tokenizer import train_tokenizer
from lightning_protrain.data.sources.dataset import count

REPORT = replace(
    count("chats, train", "chatml", [10], 6, 0, {"cut": 3}),
    knobs="train_on_eos=last",
    dropped_rows=("a.jsonl, line 3: cut",),
)
USER = "<|im_start|>user<|im_sep|>Gr\u00fc\u00dfe [bold] <|im_end|>"
CHAT = USER + "<|im_start|>assistant<|im_sep|>\u00c4 <b>\n yes<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return train_tokenizer([{"messages": [{"role": "user", "content": "hello yes"}]}], 300)


def _shown(tokenizer: object) -> PreviewedConversation:
    ids = np.array(tokenizer(CHAT)["input_ids"])  # type: ignore[operator]
    markers = np.isin(ids, tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_sep|>", "<|im_end|>"]))  # type: ignore[attr-defined]
    trained = np.arange(len(ids)) > np.flatnonzero(markers)[-2]
    return show("chats", tokenizer, ids, trained, markers.astype(np.int8))


def test_all_text_is_there_once(tokenizer: object) -> None:
    shown = _shown(tokenizer)
    assert "".join(piece.text for piece in shown.pieces) == CHAT
    assert "".join(piece.text for piece in shown.pieces if piece.trained) == "\u00c4 <b>\n yes<|im_end|>"
    assert [piece.kind for piece in shown.pieces[-2:]] == ["text", "marker"]
    assert shown.num_trained == len(tokenizer("\u00c4 <b>\n yes<|im_end|>")["input_ids"])  # type: ignore[operator]


def test_media_are_counted(tokenizer: object) -> None:
    pad = tokenizer.convert_tokens_to_ids("<|pad|>")  # type: ignore[attr-defined]
    ids = np.array([pad, pad, pad, tokenizer.convert_tokens_to_ids("<|im_end|>")])  # type: ignore[attr-defined]
    pieces = show("x", tokenizer, ids, np.zeros(4, bool), np.array([2, 2, 2, 1], np.int8)).pieces
    assert pieces == (TokenSpan("<|pad|> x 3", False, "media"), TokenSpan("<|im_end|>", False, "marker"))


def test_the_terminal_shows_text_as_it_is(tokenizer: object) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="truecolor")
    console.print(render([_shown(tokenizer)], [count("chats, train", "chatml", [10, 20], 6, 0, ["cut"])]))
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[bold]" in output, "no markup is read out of a conversation"
    assert "\x1b[1;32m" in output
    assert "\x1b[1;32m\u00c4 <b>\u21b5" in output, "a trained line break is a sign in the colour of what is trained"
    for part in ("tokens trained", "chats, train", "1 cut", "10 / 10 / 20 / 20", "20.0%"):
        assert part in output


@pytest.mark.parametrize("how", [{}, {"force_terminal": True, "no_color": True}])
def test_a_terminal_without_colours_has_brackets_around_what_is_trained(tokenizer: object, how: dict[str, Any]) -> None:
    console = Console(file=io.StringIO(), width=100, **how)
    console.print(render([_shown(tokenizer)], []))
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "<|im_sep|>[[\u00c4 <b>\u21b5" in output
    assert "yes<|im_end|>]]" in output
    assert output.count("[[") == 2, "the legend, and one answer"


def test_knobs_and_dropped_rows_are_listed() -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(render([], [REPORT]))
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "chats, train: train_on_eos=last" in output
    assert "dropped: a.jsonl, line 3: cut" in output
    assert "dropped: 2 more" in output


@pytest.mark.parametrize(
    ("piece", "text"),
    [
        (TokenSpan("a\n\nb", True, "text"), "a\u21b5\n\u21b5\nb"),
        (TokenSpan("a\nb", False, "text"), "a\nb"),
        (TokenSpan("<|user|>\n", False, "marker"), "<|user|>\u21b5\n"),
        (TokenSpan("</s>\n", True, "marker"), "</s>\u21b5\n"),
    ],
)
def test_line_breaks_that_count_are_visible(piece: TokenSpan, text: str) -> None:
    assert visible(piece) == text
