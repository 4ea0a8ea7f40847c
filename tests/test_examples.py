"""Every example runs, in a small size."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_protrain import ChatDataModule, Plan
from tests.data.conftest import conversation
from tests.whole_runs import support

EXAMPLES = Path(__file__).parent.parent / "examples"
# Seeding writes these variables, as in any program that seeds.
pytestmark = pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


def _run(monkeypatch: pytest.MonkeyPatch, name: str, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *args])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_all_examples_are_tested() -> None:
    tested = {line for line in Path(__file__).read_text(encoding="utf-8").split('"') if line.endswith(".py")}
    assert {path.name for path in EXAMPLES.glob("*.py")} <= tested


@pytest.mark.slow
def test_inspect_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 100, "intermediate_size": 192}))
    model = str(tmp_path / "config.json")
    _run(monkeypatch, "inspect_plan.py", model, "--gpu=RTX 4090", "--length=64", f"--save={tmp_path / 'plan.json'}")
    shown = capsys.readouterr().out
    assert re.findall(r"^(\w+): [\d,]+ tokens/s", shown, re.MULTILINE) == ["full", "lora", "qlora"]
    assert re.search(r"model\.layers\.0-5 .* device .* keep", shown)
    prediction = Plan.load(tmp_path / "plan.json").prediction
    assert prediction.tokens == 64 * prediction.samples
    _run(monkeypatch, "inspect_plan.py", model, "--gpu=RTX 4090", "--length=64", "--host-memory=1MiB")
    assert re.findall(r"^(\w+): No plan fits", capsys.readouterr().out, re.MULTILINE) == ["full", "lora", "qlora"]


def _main(name: str) -> Callable[..., None]:
    return runpy.run_path(str(EXAMPLES / name))["main"]


@pytest.fixture
def tiny() -> dict[str, str]:
    """A model and conversations."""
    support.make_model(Path("tiny"))
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in support.conversations()[:40]))
    return {"model": "tiny", "data": "chats.jsonl"}


def test_they_are_short_and_use_public_names_alone() -> None:
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") < 60, path.name
        assert not re.search(r"(from|import) lightning_protrain\.", text), path.name


@pytest.mark.parametrize("plan", ["resident", "offload"])
def test_own_module(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    _main("own_module.py")(width=16, depth=2, max_steps=2, plan=plan)
    assert re.search(r"train_loss 1\.\d{4}", capsys.readouterr().out)  # of four quarters, so about log 4


@pytest.mark.slow
def test_lora_chat(tiny: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    _main("lora_chat.py")(**tiny, device_memory="1MiB", epochs=1)
    output = capsys.readouterr().out
    assert re.search(r"layers\..* streamed", output)
    assert re.search("prompt.*before.*after", output)
    assert Path("adapters", "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(("name", "rows"), [("pirate", 116), ("capitals", 176)])
def test_the_data_of_the_examples_are_conversations_whose_answers_are_trained(name: str, rows: int) -> None:
    support.make_model(Path("tiny"))
    data = ChatDataModule(str(EXAMPLES / "data" / f"{name}.jsonl"), tokenizer="tiny", max_length=400, cache_dir="cache")
    data.setup("fit")
    train, validation = data.reports
    assert (train.num_kept + validation.num_kept, train.num_dropped) == (rows, 0)
    assert not train.num_cut


@pytest.mark.slow
def test_full_finetune_and_again(tiny: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for _ in range(2):
        _main("full_finetune.py")(**tiny, device_memory="8MiB", max_steps=2)
    assert list(Path("checkpoints").glob("*step=2.ckpt"))
    assert caplog.text.count("Restored all states from the checkpoint") == 1


def test_qlora(tiny: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bitsandbytes")
    _main("qlora.py")(**tiny, max_steps=2)
    assert " on the device, 0 B streamed" in capsys.readouterr().out
    assert Path("adapters", "adapter_model.safetensors").is_file()


def test_evaluate(tiny: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    _main("evaluate.py")(**tiny, device_memory="1MiB")
    output = capsys.readouterr().out
    assert re.findall(r"^(\w+) \d+\.\d{4}$", output, re.MULTILINE) == ["loss", "perplexity", "accuracy", "top5"]
    assert re.search(r"^from token 4 of an answer: loss \d\.\d{4}, accuracy [01]\.\d{4}$", output, re.MULTILINE)


@pytest.mark.slow
def test_two_ranks(tiny: dict[str, str]) -> None:
    given = {**tiny, "device_memory": "1MiB", "max_steps": 2}
    path = EXAMPLES / "two_ranks.py"
    # Lightning starts the program again for the second rank.
    Path("run.py").write_text(f"import runpy\nrunpy.run_path({str(path)!r})['main'](**{given!r})\n")
    ended = support.run(sys.executable, "run.py")
    assert ended.status == 0, ended.output
    assert re.search(r"^train_loss \d\.\d{4} on 2 ranks$", ended.output, re.MULTILINE)


def test_quickstart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps(conversation(f"Question {i}?", f"Answer {i}.")) + "\n" for i in range(60)))
    sizes = ["--hidden-size=64", "--num-layers=4", "--max-epochs=1", "--device-memory=3MiB"]
    _run(monkeypatch, "quickstart.py", *sizes, f"--dataset={chats}", f"--cache-dir={tmp_path / 'cache'}")
    output = capsys.readouterr().out
    assert re.search(r"model\.layers\..* streamed", output)
    assert "ProTrain streamed" in output
    assert "Answers after" in output
    assert re.search(r"val_loss \d\.\d+ -> \d\.\d+", output)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    book = nbformat.read(EXAMPLES / "first_plan.ipynb", as_version=4)
    Path("data").symlink_to(EXAMPLES / "data")
    client.NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    # Rich shows tables as display data where it finds a notebook.
    said = "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs)
    assert re.search(r"val_loss \d\.\d+ -> \d\.\d+\nThe model predicts", said)
    assert "streamed" in said
    assert re.search(r"^\d+ MiB of weights were streamed", said, re.MULTILINE)
    assert not any(cell.get("outputs") for cell in nbformat.read(EXAMPLES / "first_plan.ipynb", 4).cells)  # as it ships
