"""Draw the lanes of one training step: `python docs/pictures/step.py` writes step.svg beside this file.

One block is resident and three are streamed through two chunk buffers. Durations are an example, not a measurement.
"""

from __future__ import annotations

from pathlib import Path

FORWARD, BACKWARD, UPLOAD, DOWNLOAD, STEP = 3.0, 4.0, 2.4, 1.6, 2.4  # units of time
BLOCKS, BUFFERS = 4, 2  # block 0 is resident
LANES = ("upload", "GPU", "download", "host")
SCALE, ROW, LEFT = 24, 32, 76  # pixels
STYLE = """
text{font:13px sans-serif;fill:#24292f}.bar text{fill:#fff;text-anchor:middle}.rule{stroke:#8c959f;stroke-dasharray:3 3}
.upload{fill:#0969da}.forward{fill:#1a7f37}.backward{fill:#116329}.download{fill:#8250df}.host{fill:#9a6700}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}}
"""

Bar = tuple[str, str, str, float, float]  # lane, class, text, start, end


def schedule() -> list[Bar]:
    """Return the bars of one step: each lane works in order, and waits for what it needs."""
    bars: list[Bar] = []
    free = dict.fromkeys(LANES, 0.0)

    def run(lane: str, kind: str, text: str, ready: float, seconds: float) -> float:
        start = max(free[lane], ready)
        free[lane] = start + seconds
        bars.append((lane, kind, text, start, free[lane]))
        return free[lane]

    there = {0: 0.0}  # block: when its weights are on the GPU
    computed: list[float] = []  # ends of streamed blocks, whose buffers are free from then on
    for block in range(BLOCKS):
        if block and block not in there:
            buffer = computed[block - BUFFERS - 1] if block > BUFFERS else 0.0
            there[block] = run("upload", "upload", f"{block}", buffer, UPLOAD)
        end = run("GPU", "forward", f"forward {block}", there[block], FORWARD)
        computed += [end] if block else []
    freed: list[float] = []
    there = {block: 0.0 for block in range(BLOCKS) if not 0 < block < BLOCKS - BUFFERS}  # still in their buffers
    for block in reversed(range(BLOCKS)):
        if block not in there:
            there[block] = run("upload", "upload", f"{block}", freed[BLOCKS - BUFFERS - 1 - block], UPLOAD)
        end = run("GPU", "backward", f"backward {block}", there[block], BACKWARD)
        freed.append(end)
        if block:
            landed = run("download", "download", f"{block}", end, DOWNLOAD)
            run("host", "host", f"step {block}", landed, STEP)
    run("GPU", "forward", "step 0", 0.0, STEP)
    return bars


def picture(bars: list[Bar]) -> str:
    """Return the SVG of the bars."""
    width = LEFT + round(SCALE * max(end for *_, end in bars)) + 8
    turn = LEFT + SCALE * next(start for _, kind, _, start, _ in bars if kind == "backward")
    height = ROW * len(LANES) + 22
    parts = [f'<line class="rule" x1="{turn:g}" y1="0" x2="{turn:g}" y2="{height - 18}"/>']
    parts += [f'<text x="0" y="{ROW * row + 20}">{lane}</text>' for row, lane in enumerate(LANES)]
    for lane, kind, text, start, end in bars:
        x, y, wide = LEFT + SCALE * start, ROW * LANES.index(lane), SCALE * (end - start) - 2
        parts.append(
            f'<g class="bar"><rect class="{kind}" x="{x:g}" y="{y}" width="{wide:g}" height="26" rx="3"/>'
            f'<text x="{x + wide / 2:g}" y="{y + 18}">{text}</text></g>'
        )
    caption = "One step. Block 0 stays on the GPU; blocks 1 to 3 are streamed through two chunk buffers."
    parts.append(f'<text x="{LEFT}" y="{height - 4}">{caption}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'{head} role="img" aria-label="Lanes of a training step"><style>{STYLE}</style>{"".join(parts)}</svg>\n'


if __name__ == "__main__":
    Path(__file__).with_name("step.svg").write_text(picture(schedule()), encoding="utf-8")
