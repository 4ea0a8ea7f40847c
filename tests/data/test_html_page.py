"""The page: everything in it is escaped, and it stands alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_protrain.data.batches.preview import PreviewedConversation, TokenSpan, page
from lightning_protrain.data.sources.dataset import count

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
    report = count("<chats>, train", "chatml", [100, 200], 60, 0, {"cut & lost": 3})
    reports = [replace(report, knobs="train_on_eos='<last>'", dropped_rows=("a.jsonl, line 3: <cut>",))]
    text = page([PreviewedConversation("row <1>", PIECES, 40, 12)], reports)
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


def test_knobs_and_dropped_rows_are_listed() -> None:
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
    """What a browser makes of a page."""
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
