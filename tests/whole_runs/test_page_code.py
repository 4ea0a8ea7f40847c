"""Python code on the pages runs as it stands there, one page after the other, beside the files that pages name.

A block that cannot run has its reason above it: `<!-- not run: needs two GPUs -->`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.whole_runs import support

ROOT = support.ROOT
# Shell commands that are known to run: the first two blocks of the README are what CI does and what its tests time.
SHELL = ("lightning-protrain ", "srun lightning-protrain ", "python -m venv ", "python -m benchmarks.")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [page for page in PAGES if any(not reason for reason, _ in support.blocks(page, "python"))]


@pytest.mark.slow
@pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
@pytest.mark.usefixtures("_furnished")
@pytest.mark.parametrize("page", RUN, ids=[page.relative_to(ROOT).as_posix() for page in RUN])
def test_the_code_of_a_page_runs(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for reason, code in support.blocks(page, "python"):
        if not reason:
            exec(compile(code, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_shell_commands_of_a_page_are_run_elsewhere_or_say_why_not(page: Path) -> None:
    for reason, code in support.blocks(page, "bash"):
        commands = re.sub(r"\\\n\s*", "", code).splitlines()
        assert reason or all(line.startswith(SHELL) for line in commands), code
