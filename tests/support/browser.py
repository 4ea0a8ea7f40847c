"""A headless Chromium that says how a page looks: what is too wide, too small, too pale or on top of something else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
# WCAG 2.1, success criterion 1.4.3; and the smallest letters, in pixels.
CONTRAST, SMALLEST = 4.5, 11

_LOOK = """
window.onload = () => {
  const frame = document.querySelector("iframe"), page = frame.contentDocument, faults = [];
  const view = frame.contentWindow, root = page.documentElement;
  frame.style.height = root.scrollHeight + "px";
  if (root.scrollWidth > root.clientWidth) faults.push("wider than the window: " + root.scrollWidth);
  const light = text => {
    const part = text.match(/[\\d.]+/g).slice(0, 3).map(n => n / 255);
    const [r, g, b] = part.map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = at => {
    for (; at; at = at.parentElement) {
      const colour = view.getComputedStyle(at).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  let texts = 0;
  const boxes = [];
  for (const at of page.body.querySelectorAll("*")) {
    const own = [...at.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join("");
    const box = at.getBoundingClientRect(), style = view.getComputedStyle(at);
    if (!own || !box.width || at.closest("svg") || style.visibility === "hidden") continue;
    texts += 1;
    if (parseFloat(style.fontSize) < %(smallest)s) faults.push("small: " + own);
    const pair = [light(style.color), light(behind(at))].sort((a, b) => b - a);
    if ((pair[0] + 0.05) / (pair[1] + 0.05) < %(contrast)s) faults.push("pale: " + own);
    if (at.closest(".axis, .marks")) boxes.push([at.parentElement, box, own]);
  }
  boxes.forEach(([parent, box, own], index) => boxes.slice(index + 1).forEach(([other, it, text]) => {
    const apart = box.right <= it.left || it.right <= box.left || box.bottom <= it.top || it.bottom <= box.top;
    if (parent === other && !apart) faults.push("on top of each other: " + own + ", " + text);
  }));
  const drawn = [...page.querySelectorAll("svg")].filter(one => one.getBoundingClientRect().height > 10).length;
  document.body.textContent = JSON.stringify({faults, texts, drawn, dark: light(behind(page.body)) < 0.5});
};
"""


def look_at(page: str, width: int, dark: bool, folder: Path) -> dict[str, object]:
    """Return measurements of a page that Chromium shows in a window of this width.

    Args:
        page: The page, as HTML.
        width: Width of the window, pixels.
        dark: Whether the user prefers dark colours.
        folder: Folder for files of the browser.
    """
    assert CHROMIUM is not None
    look = _LOOK % {"smallest": SMALLEST, "contrast": CONTRAST}
    frame = f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{escape(page)}"></iframe>'
    (folder / "frame.html").write_text(f"<script>{look}</script>{frame}", encoding="utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    given = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}", "--dump-dom"]
    found = subprocess.run(
        [CHROMIUM, *given, "--window-size=1400,1000", *scheme, f"file://{folder / 'frame.html'}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    text = re.search(r"<body>(\{.*\})</body>", found.stdout, re.DOTALL)
    assert text is not None, found.stdout[-500:]
    content: dict[str, object] = json.loads(unescape(text[1]))
    return content
