"""The preview of a data set: every token once in its colour, escaped HTML, and counts."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lightning_protrain.data.batches.preview import PreviewedConversation, TokenSpan, page, render, show, table, visible
from lightning_protrain.data.batches.tokenizer import train_tokenizer
from lightning_protrain.data.sources.dataset import DatasetReport, quartet


def _report(lengths: list[int], num_trained: int, dropped: dict[str, int], **counts: Any) -> DatasetReport:
    entries, name = tuple(dropped.items()), counts.pop("name", "chats, train")
    totals = {"num_tokens": sum(lengths), "num_trained": num_trained, "lengths": quartet(lengths)}
    return DatasetReport(name, "chatml", len(lengths), entries, **totals, **counts)


REPORT = _report([10], 6, {"cut": 3}, knobs="train_on_eos=last", dropped_rows=("a.jsonl, line 3: cut",))
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
    console.print(render([_shown(tokenizer)], [_report([10, 20], 6, {"cut": 1})]))
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[bold]" in output, "no markup is read out of a conversation"
    assert "\x1b[1;32m" in output
    assert "\x1b[1;32m\u00c4 <b>\u21b5" in output, "a trained line break is a sign in the colour of what is trained"
    for part in ("tokens trained", "chats, train", "1 cut", "10, 10, 20, 20", "20.0%"):
        assert part in output


def test_the_table_has_one_line_of_headings_at_80_columns() -> None:
    console = Console(width=80, color_system=None, file=io.StringIO(), record=True)
    console.print(table([replace(REPORT, lengths=(1_000, 2_000, 30_000, 131_072))]))
    title, headings, rule, *_ = console.export_text().splitlines()
    assert title.strip() == "Data; lengths: min, median, 95 %, max"
    assert headings.split() == ["data", "set", "kept", "dropped", "tokens", "trained", "no", "end", "lengths"]
    assert set(rule.strip()) == {"\u2500"}


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
    assert "chats, train: chat format chatml, train_on_eos=last" in output
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


CHROMIUM = shutil.which("chromium")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
# Writes the colours behind the pieces into the page, for a copy of it; the page itself has no script.
COLOURS = """<script>for (const one of document.querySelectorAll("pre, pre span")) {
  one.dataset.back = getComputedStyle(one).backgroundColor; one.dataset.width = one.getBoundingClientRect().width;
} document.body.dataset.fits = document.documentElement.scrollWidth <= innerWidth;</script></body>"""
PIECES = (
    TokenSpan("<|im_start|>user\n", False, "marker"),
    TokenSpan("Is <script>alert('x')</script> & \"y\" safe?", False, "text"),
    TokenSpan("<image> x 576", False, "media"),
    TokenSpan("<|im_start|>assistant\n", False, "marker"),
    TokenSpan("Yes.\nIt is.", True, "text"),
    TokenSpan("<|im_end|>", True, "marker"),
)


class _Reader(HTMLParser):
    """Collects open tags, what the spans hold, and whether all is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.spans: list[tuple[str, str]] = []
        self._open: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self._open.append(tag)
        if tag == "span":
            self.spans.append((dict(attrs)["class"] or "", ""))
            self._inside = True

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.spans[-1] = (self.spans[-1][0], self.spans[-1][1] + data)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self._inside = self._inside and tag != "span"

    def all_closed(self) -> bool:
        return not self._open


def _read() -> tuple[str, _Reader]:
    told = {"name": "<chats>, train", "knobs": "train_on_eos='<last>'", "dropped_rows": ("a.jsonl, line 3: <cut>",)}
    report = _report([100, 200], 60, {"cut & lost": 3}, **told)
    text = page([PreviewedConversation("row <1>", PIECES, 40, 12)], [report])
    reader = _Reader()
    reader.feed(text)
    return text, reader


def test_tags_are_closed_and_nothing_is_fetched() -> None:
    text, reader = _read()
    assert reader.all_closed()
    assert not {"script", "img", "link", "iframe"} & set(reader.tags)
    assert not re.search(r"https?://|url\(|@import", text)


def test_text_is_escaped() -> None:
    text, _ = _read()
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;y&quot;" in text
    for part in ("row &lt;1&gt;", "&lt;chats&gt;, train", "3 cut &amp; lost", "30%", "width:30.0%", "20.0%"):
        assert part in text


def test_knobs_and_dropped_rows_are_listed_on_the_page() -> None:
    text, _ = _read()
    assert "<b>&lt;chats&gt;, train</b>: train_on_eos=&#x27;&lt;last&gt;&#x27;" in text
    assert "<summary>Dropped: 3</summary><ul><li>a.jsonl, line 3: &lt;cut&gt;</li><li>2 more</li></ul>" in text


def test_every_trained_piece_is_marked_as_such() -> None:
    spans = _read()[1].spans
    assert ("trained", "Yes.\u21b5\nIt is.") in spans, "a line break has no colour of its own"
    assert ("marker trained", "<|im_end|>") in spans
    assert ("media", "<image> x 576") in spans
    assert ("marker", "<|im_start|>user\u21b5\n") in spans


def _in_browser(text: str) -> str:
    """Return the text that a browser shows for a page."""
    assert CHROMIUM is not None
    path = Path("page.html").resolve()
    path.write_text(text, encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={path.parent / 'profile'}", "--dump-dom", path.as_uri()]
    # It keeps certificates in the home folder.
    environment = {**os.environ, "HOME": str(path.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_a_browser_shows_what_is_trained() -> None:
    text, ours = _read()
    reader = _Reader()
    reader.feed(_in_browser(text))
    assert reader.all_closed()
    assert reader.spans == ours.spans
    assert "script" not in reader.tags, "what a user wrote is text"

    shown = _in_browser(text.replace("</body>", COLOURS))
    found = re.findall(r'<(pre|span)(?: class="([^"]*)")? data-back="([^"]+)" data-width="([0-9.]+)">', shown)
    assert len(found) == 1 + sum(bool(piece.trained or piece.kind != "text") for piece in PIECES)
    back = {kind: colour for _, kind, colour, _ in found}
    plain, trained = back.pop(""), {colour for kind, colour in back.items() if "trained" in kind}
    assert len(trained) == 1, "text and markers that are trained have one colour"
    assert len({plain, *trained, back["marker"], back["media"]}) == 4
    assert all(float(width) > 0 for *_, width in found)
    assert 'data-fits="true"' in shown


def test_lengths_are_in_four_numbers() -> None:
    assert quartet([10, 30, 20, 40, 50]) == (10, 30, 50, 50)


def test_a_sentence_names_all_of_it() -> None:
    text = _report([10, 30], 10, {"without a trained token": 3}, num_unended=2).describe()
    assert text == (
        "chats, train: 2 conversations, 40 tokens, 25.0% of them trained; 3 dropped (3 without a trained token). "
        "2 trained turns have no end token, because the chat template writes none there."
    )


@pytest.mark.parametrize(
    ("num_unended", "num_cut", "sentence"),
    [
        (1776, 1776, "1,776 assistant turns were cut at max_length, so their end token is not trained."),
        (1, 1, "1 assistant turn was cut at max_length, so its end token is not trained."),
        (1, 0, "1 trained turn has no end token, because the chat template writes none there."),
    ],
)
def test_turns_that_were_cut_are_told_from_turns_that_never_end(num_unended: int, num_cut: int, sentence: str) -> None:
    report = _report([10], 5, {}, num_unended=num_unended, num_cut=num_cut)
    assert report.describe().endswith(f" trained. {sentence}")


def test_nothing_is_kept() -> None:
    report = _report([], 0, {})
    assert report.lengths == (0, 0, 0, 0)
    assert "0 conversations, 0 tokens, 0.0% of them trained." in report.describe()
