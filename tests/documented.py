"""Run every documented block in an environment with the documented installation alone; `.ci/run` does so.

Each page runs in a folder of its own, block after block, with a new home. A block that cannot run has its reason above
it: `<!-- not run: needs two GPUs -->`. A block below a line that installs an extra runs in the environment of the tests
(tests/whole_runs/test_page_code.py). Commands of README.md that install are run by `.ci/run` itself.

    python -m tests.documented [PAGE ...]
    python -m tests.documented --third 0     README.md and a third of the other pages: 0, 1 or 2
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

ROOT = Path(__file__).resolve().parent.parent
LANGUAGES = ("bash", "python", "yaml", "json")
INSTALLS = "python -m venv"
NEEDS_EXTRA = "needs an extra"
_BLOCK = re.compile(r"(?:<!-- not run: (.+?) -->\n\n?)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# A part of a config file is no config.
_CHECK_YAML = "import sys, yaml; content = yaml.safe_load(sys.stdin); assert isinstance(content, (dict, list)), content"
_CHECK_JSON = "import json, sys; [json.loads(line) for line in sys.stdin if line.strip()]"


class Block(NamedTuple):
    """A block of code on a page.

    Attributes:
        page: Path of the page in the repository.
        language: Language, such as `bash`.
        code: The code.
        reason: Why it is not run here; empty if it is.
    """

    page: str
    language: str
    code: str
    reason: str


def blocks(page: Path, root: Path = ROOT) -> Iterator[Block]:
    """Yield the blocks of a page in LANGUAGES."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        reason, language, code = found.groups()
        above = re.split(r"^(?:#+ .*|```)$", text[: found.start()], flags=re.MULTILINE)[-1]
        if not reason and re.search(r"pip install .*lightning-protrain\[", above):
            reason = NEEDS_EXTRA
        if not reason and INSTALLS in code:
            reason = "an installation"
        if language in LANGUAGES and "--8<--" not in code:
            yield Block(page.relative_to(root).as_posix(), language, code, reason or "")


def pages() -> list[Path]:
    """Return all pages that document code."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


# Runs blocks of Python one after the other: reads each as a line of JSON, and answers with an exit code.
_SESSION = """
import json, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
names = {"__name__": "page"}
for line in sys.stdin:
    try:
        exec(compile(json.loads(line), "page", "exec"), names)
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    print(status, file=answers, flush=True)
"""


# At the end of the epoch: packed rows may be one batch.
_VALIDATION = ("val_check_interval 1.0", "limit_val_batches 2")


class Result(NamedTuple):
    """How a block has ended.

    Attributes:
        block: The block.
        status: Exit code; None if the block was not run.
        seconds: Duration.
        output: What the block has printed; for Python, what its page has printed so far.
    """

    block: Block
    status: int | None
    seconds: float = 0.0
    output: str = ""


def commands(code: str, already: frozenset[str]) -> list[str]:
    """Return the commands of a block, with a few steps of training, and without those in `already`."""
    lines = re.sub(r"\\\n\s*", "", code).splitlines()
    few = "".join(f" --trainer.{option}" for option in ("limit_train_batches 2", "max_epochs 1", *_VALIDATION))
    return [line + few if " fit --config " in line else line for line in lines if line not in already]


def by_name(code: str) -> set[str]:
    """Return the commands that only print plans of models by name: one run serves all pages."""
    lines = re.sub(r"\\\n\s*", "", code).splitlines()
    return {line for line in lines if re.match(r"lightning-protrain (fits|plan (?!--))", line)}


def run_page(page: Path, furnished: Path, already: frozenset[str]) -> list[Result]:
    """Run the blocks of a page in a copy of a furnished folder.

    Args:
        page: The page.
        furnished: Folder with the files that pages name, and in `adapters` a checkpoint for commands that name one.
        already: Commands that another page runs.
    """
    folder = furnished.with_name(page.relative_to(ROOT).as_posix().replace("/", "-"))
    shutil.copytree(furnished, folder, symlinks=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_", "PYTHON"))}
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    surroundings: dict[str, Any] = {
        "cwd": folder,
        "env": {**kept, "HOME": str(folder), "PATH": binaries, "HF_HUB_OFFLINE": "1"},
        "text": True,
    }
    log, found = folder / "python.log", []
    with (
        log.open("w") as written,
        subprocess.Popen(
            [sys.executable, "-c", _SESSION], stdin=-1, stdout=-1, stderr=written, **surroundings
        ) as session,
    ):
        assert session.stdin is not None
        assert session.stdout is not None
        for block in blocks(page):
            if block.reason:
                found.append(Result(block, None))
                continue
            begun = time.monotonic()
            if block.language == "python":
                session.stdin.write(json.dumps(block.code) + "\n")
                session.stdin.flush()
                status, output = int(session.stdout.readline() or -1), log.read_text()
            else:
                ended = _run_other(block, folder, already, surroundings)
                status, output = ended.returncode, ended.stdout
            found.append(Result(block, status, time.monotonic() - begun, output))
        session.stdin.close()
    return found


def _run_other(
    block: Block, folder: Path, already: frozenset[str], surroundings: dict[str, Any]
) -> subprocess.CompletedProcess[str]:
    """Run a block of commands, or read one of YAML or JSON."""
    words = [sys.executable, "-c", _CHECK_YAML if block.language == "yaml" else _CHECK_JSON]
    if block.language == "bash":
        shutil.copy(ROOT / "configs" / "chat.yaml", folder / "mine.yaml")  # A reader has edited what was printed.
        given = commands(block.code, already)
        for path in re.findall(r"(?<!\S)checkpoints\S*", "\n".join(given)):
            if not (folder / path).exists() and " fit " not in block.code:
                name = "epoch=0-step=1.ckpt"
                shutil.copytree(folder / "adapters", folder / path / ("" if path.endswith(".ckpt") else name))
        words = ["bash", "-euo", "pipefail", "-c", "\n".join(given)]
    return subprocess.run(words, input=block.code, stdout=-1, stderr=subprocess.STDOUT, check=False, **surroundings)


def main() -> None:
    """Run the pages, print a line for each block, and exit with 1 if one failed."""
    from tests.whole_runs import support

    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    parser = ArgumentParser()
    parser.add_argument("pages", nargs="*")
    parser.add_argument("--third", type=int)
    options = parser.parse_args()
    asked = [ROOT / name for name in options.pages] or pages()
    if options.third is not None:
        asked = [page for page in asked if crc32(page.name.encode()) % 3 == options.third or page.name == "README.md"]
    plans: dict[str, Path] = {}
    for page in asked:
        for block in blocks(page):
            for line in by_name(block.code):
                plans.setdefault(line, page)
    failed, begun = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        model, furnished = Path(place, "models", "tiny"), Path(place, "furnished")
        support.make_model(model)
        checkpoint = support.train_adapters(model, Path(place, "trained"))
        furnished.mkdir()
        os.chdir(furnished)
        support.furnish(model)
        shutil.copytree(checkpoint, "adapters")
        with ThreadPoolExecutor(2) as pool:
            runs = []
            for page in asked:
                elsewhere = frozenset(line for line, runner in plans.items() if runner != page)
                runs.append(pool.submit(run_page, page, furnished, elsewhere))
            for run in as_completed(runs):
                for block, status, seconds, output in run.result():
                    line = block.code.strip().partition("\n")[0]
                    said = f"not run: {block.reason}" if status is None else f"exit {status}, {seconds:.0f} s"
                    print(f"{block.page} | {block.language} | {line:.70} | {said}", flush=True)
                    if status not in (None, 0):
                        failed += 1
                        print(output[-4000:], flush=True)
    print(f"documented blocks: {time.monotonic() - begun:.0f} s")
    sys.exit(f"{failed} documented blocks failed" if failed else 0)


if __name__ == "__main__":
    main()
