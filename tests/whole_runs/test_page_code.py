"""Code on the pages that needs an extra runs as it stands there; tests/documented.py runs all other code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.documented import INSTALLS, NEEDS_EXTRA, ROOT, Block, blocks, pages

BLOCKS = {page.relative_to(ROOT).as_posix(): list(blocks(page)) for page in pages()}
RUN = [page for page, found in BLOCKS.items() if any(each.reason == NEEDS_EXTRA for each in found)]


@pytest.mark.slow
@pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
@pytest.mark.usefixtures("_furnished")
@pytest.mark.parametrize("page", RUN)
def test_code_that_needs_an_extra_runs(page: str) -> None:
    pytest.importorskip("bitsandbytes")
    names: dict[str, Any] = {"__name__": "page"}
    for block in BLOCKS[page]:
        if block.language == "python" and block.reason in ("", NEEDS_EXTRA):
            exec(compile(block.code, page, "exec"), names)


@pytest.mark.parametrize(
    ("page", "reasons"),
    [
        ("```bash\ntrue\n```\n", [""]),
        ("<!-- not run: two GPUs -->\n```bash\ntrue\n```\n", ["two GPUs"]),
        ("<!-- not run: two GPUs -->\n\n```python\n1\n```\n", ["two GPUs"]),
        ('Run `pip install "lightning-protrain[bnb]"`:\n\n```python\n1\n```\n\n```python\n2\n```\n', [NEEDS_EXTRA, ""]),
        (f"```bash\n{INSTALLS} .venv\n```\n", ["an installation"]),
        ("```mermaid\nflowchart\n```\n", []),
    ],
)
def test_a_block_says_why_it_is_not_run(page: str, reasons: list[str], tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(page)
    found: list[Block] = list(blocks(tmp_path / "page.md", tmp_path))
    assert [each.reason for each in found] == reasons
