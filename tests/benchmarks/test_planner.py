"""Predicted peaks are those that another process measures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.logical import LogicalBytes
from benchmarks.models import MODELS, Subject
from benchmarks.planner import PLANS, ROWS, WANTED, compare, main, predict, render
from lightning_protrain.device.device import CPUDevice


def test_rows_name_models_and_plans() -> None:
    names = [row.split("/") for row in ROWS]
    assert {model for model, _, _ in names} == set(MODELS)
    assert {plan for _, plan, _ in names} == set(PLANS)
    assert {precision for _, _, precision in names} == {"fp32", "bf16"}


def test_a_prediction_names_its_terms() -> None:
    prediction = predict("llama/keep/fp32")
    assert sum(prediction.terms.values()) == prediction.peak
    assert prediction.phase == "backward"


def test_the_table() -> None:
    entry = {"row": "llama/keep/fp32", "peak": 2000, "measured": 1990, "ratio": 0.995, "phase": "step", "unit": ""}
    assert "| llama | keep | fp32 | 2,000 | 1,990 | 0.9950 | step |  | yes |" in render([entry])
    assert render([{**entry, "ratio": 1.001}]).endswith("| no |")


@pytest.mark.slow
def test_measured_over_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["gpt2/resident/fp32", "llama/keep/fp32", "gemma2/offload/fp32", "lora/keep/bf16"]
    for entry in compare(rows):
        assert WANTED[0] <= entry["ratio"] <= WANTED[1], entry["row"]
    main(["memory", "--rows", "bert/half/fp32"])
    assert capsys.readouterr().out.strip().endswith("| yes |")


def test_logical_bytes_of_autograd_and_of_the_host() -> None:
    weight, host, inputs = nn.Parameter(torch.ones(64, 64)), torch.ones(64, 64), torch.ones(8, 64)
    device = CPUDevice(torch.device("cpu"))
    with LogicalBytes([weight], [inputs], device) as counted:
        static = counted.now
        hidden: Tensor = (inputs @ weight).relu()  # Autograd keeps it.
        host.mul(2)
        assert counted.peak == static + 2 * hidden.nbytes
        storage = torch.UntypedStorage(0)
        device.resize(storage, 10_000)
        assert counted.peak == static + hidden.nbytes + 10_000
        device.resize(storage, 0)
        counted.restart([])
        assert counted.now == static + hidden.nbytes
        hidden.sum().backward()
        del hidden
        counted.restart([])
        assert counted.now == static + weight.nbytes
    assert "resize" not in vars(device)


def test_subjects_have_no_cache() -> None:
    subject = Subject("llama")
    assert subject.network(**subject.batch).past_key_values is None
