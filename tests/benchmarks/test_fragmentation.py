from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import fragmentation
from benchmarks.fragmentation import DTYPES, VOCABULARY, Peaks, build, main, row
from lightning_protrain.planner.problem import ALPHA, ALPHA_4BIT


def test_without_a_cuda_device_it_says_so_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "measures the allocator of a CUDA device and there is none" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "constant"), [("float32", ALPHA), ("bfloat16", ALPHA), ("uint8", ALPHA_4BIT)])
def test_the_factor_stands_beside_the_constant(dtype: str, constant: float) -> None:
    assert row(dtype, Peaks(2**30, 5 * 2**28)) == [dtype, "1.000 GiB", "1.250 GiB", "1.250", f"{constant:.2f}"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_is_of_that_dtype_and_trains(dtype: str) -> None:
    model: Any = build(dtype, 128, 1).train()
    assert isinstance(model, LlamaForCausalLM)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    ids = torch.arange(4).reshape(1, 4)
    assert torch.isfinite(model(input_ids=ids, labels=ids).loss)
    assert model.config.vocab_size == VOCABULARY


def test_weights_of_four_bits_are_packed_and_do_not_train() -> None:
    pytest.importorskip("bitsandbytes")
    model: Any = build("uint8", 128, 1).to("cpu").train()
    packed = [parameter for parameter in model.parameters() if parameter.dtype is torch.uint8]
    assert len(packed) == 7
    assert not any(parameter.requires_grad for parameter in packed)
    assert all("lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)


def test_every_dtype_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def measure(dtype: str, args: Any) -> Peaks:
        asked.append(dtype)
        return Peaks(100, 110)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(fragmentation, "measure", measure)
    monkeypatch.setattr(fragmentation.importlib, "util", SimpleNamespace(find_spec=lambda name: True))
    main([])
    assert asked == list(DTYPES)
    shown = capsys.readouterr().out
    assert "a GPU" in shown
    assert shown.count("1.100") == 3


@pytest.mark.parametrize("wrong", [["--hidden", "100"], ["--steps", "0"], ["--dtype", "int3"]])
def test_bad_input(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(wrong)
    assert ended.value.code == 2
