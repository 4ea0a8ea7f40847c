"""A result is kept with what is needed to judge and to repeat it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import report

FACTS = {"date": "2020-02-03", "hardware": "8-core CPU", "commit": "0" * 40}


def test_table() -> None:
    assert report.table(("a", "b"), [(1, "x")]) == "| a | b |\n| --- | --- |\n| 1 | x |"


def test_a_result_says_where_when_and_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "environment", lambda: FACTS)
    folder = report.write_result("a-test", "benchmarks.some", ["--pairs", "2"], {"cases": {}}, "The text.")
    assert folder == tmp_path / "benchmarks" / "results" / "2020-02-03-a-test"
    document = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert document == {"environment": FACTS, "command": "python -m benchmarks.some --pairs 2", "cases": {}}
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert all(part in page for part in ("The text.", "python -m benchmarks.some --pairs 2", *FACTS.values()))


def test_every_kept_result_names_its_commit_and_its_command() -> None:
    folders = [path for path in (report.ROOT / "benchmarks" / "results").iterdir() if path.is_dir()]
    assert folders
    for folder in folders:
        document = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+", folder.name)
        assert re.match(r"[0-9a-f]{40}\b", document["environment"]["commit"])
        assert document["command"].startswith("python -m benchmarks.")
        assert (folder / "README.md").is_file()
