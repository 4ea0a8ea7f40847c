"""Draw the page of a plan and its step: `python docs/pictures/page.py` writes docs/img/plan-page.png and lanes.svg.

The plan is for all weights of a Llama of 8 billion parameters on one RTX 4090. It needs Chromium, and no GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

IMAGES = Path(__file__).parents[1] / "img"
SIZES = "hidden_size: 4096, num_hidden_layers: 32, intermediate_size: 14336, num_attention_heads: 32"
MODEL = f"{{model_type: llama, {SIZES}, num_key_value_heads: 8, vocab_size: 128256}}"
PLAN = ("--gpu=RTX 4090", "--host_memory=192GiB", "--host_cores=16", "--batch_size=4", "--length=2048", "--data=null")
WINDOW = (1200, 1820)  # pixels
LEFT, WIDE, ROW, RIGHT = 80, 700, 30, 80  # of lanes.svg, pixels
STYLE = """
text{font:13px sans-serif;fill:#1c2024}
:root{--a:#3e63dd;--b:#12a594;--c:#e5841c;--d:#8e4ec6;--e:#d6409f;--f:#46a758;--g:#8b8d98}
@media(prefers-color-scheme:dark){text{fill:#edeef0}}
"""


def lanes(page: str) -> str:
    """Return the lanes of a page as a picture of their own."""
    rows = re.findall(
        r'<div class="row"><span>(\w+)</span><svg class="lane".*?>(.*?)</svg><span>(.*?)</span>', page, re.DOTALL
    )
    below = page.split('class="lane"')[-1].split("<h3>")[0]
    ticks = re.findall(r'<span style="left:([0-9.]+)%">(.*?)</span>', below)
    legend = re.findall(r'background:var\(--(\w)\)"></i>(.*?)</span>', below)
    height = ROW * len(rows) + 58
    parts = []
    for number, (name, shapes, seconds) in enumerate(rows):
        y = ROW * number
        shapes = re.sub(r"><title>.*?</title></rect>", "/>", shapes)
        parts.append(
            f'<text x="0" y="{y + 18}">{name}</text><text x="{LEFT + WIDE + 12}" y="{y + 18}">{seconds}</text>'
        )
        parts.append(
            f'<svg x="{LEFT}" y="{y + 2}" width="{WIDE}" height="24" viewBox="0 0 1000 10" preserveAspectRatio="none">'
            f'<rect width="1000" height="10" fill="#8b8d98" fill-opacity=".12"/>{shapes}</svg>'
        )
    y = ROW * len(rows) + 14
    for share, text in ticks:
        parts.append(f'<text x="{LEFT + WIDE * float(share) / 100:g}" y="{y}" text-anchor="middle">{text}</text>')
    x = float(LEFT)
    for colour, text in legend:
        parts.append(f'<rect x="{x:g}" y="{y + 16}" width="11" height="11" rx="2" fill="var(--{colour})"/>')
        parts.append(f'<text x="{x + 16:g}" y="{y + 26}">{text}</text>')
        x += 32 + 6.6 * len(text)
    width = max(LEFT + WIDE + RIGHT, round(x))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    label = "A predicted step: when the GPU, the link to the host and the host work"
    return f'{head} role="img" aria-label="{label}"><style>{STYLE}</style>{"".join(parts)}</svg>\n'


def main() -> None:
    """Make the plan, and write both pictures."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("Chromium is not installed: apt-get install chromium")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "plan.html", Path(folder) / "plan.png"
        command = [str(Path(sys.executable).with_name("lightning-protrain")), "plan", f"--model.config={MODEL}", *PLAN]
        options = ["--trainer.max_epochs=1", "--trainer.precision=bf16-mixed", f"--html={page}"]
        subprocess.run([*command, *options], check=True)
        view = [f"--screenshot={shot}", f"--window-size={WINDOW[0]},{WINDOW[1]}", "--hide-scrollbars"]
        subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", *view, f"file://{page}"], check=True)
        (IMAGES / "lanes.svg").write_text(lanes(page.read_text(encoding="utf-8")), encoding="utf-8")
        Image.open(shot).convert("RGB").quantize(64).save(IMAGES / "plan-page.png", optimize=True)


if __name__ == "__main__":
    main()
