"""Tables, and dated folders for the results of benchmarks."""

from __future__ import annotations

import json
import logging
import os
import platform
import shlex
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and Lightning's messages, as a context or a decorator."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def environment() -> dict[str, Any]:
    """Return the machine and the versions of packages."""
    import lightning  # Tables are made without these imports, which take seconds.
    import torch

    hardware = f"{os.cpu_count()}-core {platform.machine()} CPU"
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.get_device_name()}, {hardware}"
    return {
        "date": date.today().isoformat(),
        "hardware": hardware,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }


def commit() -> str:
    """Return the commit of the working tree, and "with local changes" if the package has been changed since.

    Outside of a repository it is "unknown".
    """
    if not (ROOT / ".git").exists():
        return "unknown"
    head = _git("rev-parse", "HEAD")
    return f"{head} with local changes" if _git("status", "--porcelain", "--", "lightning_protrain") else head


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write_result(what: str, module: str, arguments: Sequence[str], result: dict[str, Any], text: str) -> Path:
    """Write `benchmarks/results/<date>-<what>/`: `result.json` and a README.md with `text`."""
    facts = environment()
    folder = ROOT / "benchmarks" / "results" / f"{facts['date']}-{what}"
    folder.mkdir(parents=True, exist_ok=True)
    command = f"python -m {module} {shlex.join(arguments)}"
    document = {"environment": facts, "command": command, **result}
    (folder / "result.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    about = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    (folder / "README.md").write_text(f"# {what}\n\n{about}\n\n    {command}\n\n{text}\n", encoding="utf-8")
    return folder


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
