"""Every example runs, in a small size."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from lightning_protrain import Plan
from tests.data.conftest import conversation

EXAMPLES = Path(__file__).parent.parent / "examples"
# Seeding writes these variables, as in any program that seeds.
pytestmark = pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


def _run(monkeypatch: pytest.MonkeyPatch, name: str, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *args])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_all_examples_are_tested() -> None:
    tested = {line for line in Path(__file__).read_text(encoding="utf-8").split('"') if line.endswith(".py")}
    assert {path.name for path in EXAMPLES.glob("*.py")} <= tested


def test_inspect_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 100, "intermediate_size": 192}))
    model = str(tmp_path / "config.json")
    _run(monkeypatch, "inspect_plan.py", model, "--gpu=RTX 4090", "--length=64", f"--save={tmp_path / 'plan.json'}")
    shown = capsys.readouterr().out
    assert re.findall(r"^(\w+): [\d,]+ tokens/s", shown, re.MULTILINE) == ["full", "lora", "qlora"]
    assert re.search(r"model\.layers\.0-11 .* device .* keep", shown)
    assert Plan.load(tmp_path / "plan.json").prediction.tokens == 64
    _run(monkeypatch, "inspect_plan.py", model, "--gpu=RTX 4090", "--length=64", "--host-memory=1MiB")
    assert re.findall(r"^(\w+): No plan fits", capsys.readouterr().out, re.MULTILINE) == ["full", "lora", "qlora"]


def test_own_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _run(monkeypatch, "own_module.py", "--width=16", "--depth=2", "--max-steps=2")
    assert re.search(r"train_loss \d+\.\d{4}", capsys.readouterr().out)


def test_train_python_docs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(conversation(f"Question {i}?", f"Answer {i}.")) + "\n" for i in range(20)))
    sizes = ["--hidden-size=64", "--num-layers=4", "--max-steps=3", "--device-memory=3MiB"]
    _run(monkeypatch, "train_python_docs.py", *sizes, f"--dataset={chats}", f"--cache-dir={tmp_path / 'cache'}")
    output = capsys.readouterr().out
    assert re.search(r"model\.layers\.0-2 .* streamed .* checkpoint", output)
    assert "ProTrain streamed" in output
    assert "Answers after" in output
    assert re.search(r"val_loss \d\.\d+ -> \d\.\d+", output)
