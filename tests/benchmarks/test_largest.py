"""The program that looks for the largest models: its steps in a tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import largest, report
from benchmarks.families import FAMILIES, Family, Size
from benchmarks.largest import learn, main
from lightning_protrain.profiler.profile import profile_model

TINY = (Size("tiny", 1e-4, 64, 128, 2, 4, 2, 512, 16), Size("deep", 1e-4, 64, 128, 3, 4, 2, 512, 16))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Family:
    """Families of which two sizes are left, and sequences of 32 tokens."""
    family = Family("qwen3", TINY, FAMILIES["Qwen3"].keys)
    monkeypatch.setitem(FAMILIES, "Qwen3", family)
    monkeypatch.setattr(largest, "SEQUENCE", 32)
    largest.know.cache_clear()
    largest.answer.cache_clear()
    return family


@pytest.mark.parametrize("family", FAMILIES)
def test_published_sizes_rise_and_have_their_parameters(family: str) -> None:
    sizes = FAMILIES[family].sizes
    assert [size.billions for size in sizes] == sorted(size.billions for size in sizes)
    config = FAMILIES[family].config(sizes[0], 64)
    precision = largest.ProTrainPrecision("bf16-true")
    precision.open("cpu")
    module = largest.build(config, "full", precision)
    count = sum(weight.numel() for weight in module.parameters())
    assert count == pytest.approx(sizes[0].billions * 1e9, rel=0.12)
    assert {weight.dtype for weight in module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_without_weights_is_profiled_like_one_with_weights(tied: bool) -> None:
    config = FAMILIES["Llama"].config(Size("", 0.0, 64, 128, 2, 4, 2, 512, tied=tied), 32)
    without = learn(config, "full", "bf16-mixed", 2, 32)
    precision = largest.ProTrainPrecision("bf16-mixed")
    precision.open("cpu")
    module = largest.CausalLMModule(config=config)
    module.configure_model()
    layout = largest.describe_model(module)
    real = profile_model(module, layout, largest.step_of(module, 2, 32), precision.train_step_context)
    assert without.profile == real
    assert without.layout.parameters != layout.parameters, "nothing is streamed in two bytes"


def test_adapters_alone_are_trained() -> None:
    known = learn(FAMILIES["Qwen3"].config(TINY[0], 32), "LoRA", "bf16-true", 1, 32)
    trained = [info for info in known.layout.parameters if info.trainable]
    assert len(trained) == 2 * 7 * TINY[0].layers
    assert all("lora_" in info.fqn for info in trained)
    assert known.state_bytes > 0


@pytest.mark.parametrize(("most", "first"), [(-1, 2), (0, 3), (2, 0), (4, 4), (4, -1)])
def test_the_largest_that_fits(most: int, first: int) -> None:
    assert largest.largest(5, first, lambda index: index <= most) == most


def test_the_program(
    tiny: Family, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "_git", lambda *arguments: "")
    main(["--families=Qwen3", "--machines=RTX 3090", "--precisions=bf16-mixed", "--batches=1", "--results=tiny"])
    printed = capsys.readouterr().out
    assert "## RTX 3090, host of 64 GiB and 16 cores: LoRA, bf16-mixed" in printed
    assert printed.count("| Qwen3 | 1 | deep | 100% |") == 2
    assert printed.count("(no larger one)") == 2
    (result,) = tmp_path.rglob("result.json")
    rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
    assert [row["size"] for row in rows] == ["deep", "deep"]
    assert all(row["answer"]["seconds"] > 0 for row in rows)
