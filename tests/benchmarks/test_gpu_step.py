"""The GPU program refuses a machine without one, and its tables say what was measured."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks.gpu_step import main, render
from benchmarks.pairs import Comparison
from benchmarks.subjects import Facts, Step

COUNTERS = {"uploaded_bytes": 10 << 30, "downloaded_bytes": 5 << 30, "prefetch_hits": 3, "prefetch_misses": 1}
PLANNED = Facts(
    num_params=1, num_hooks=2, planned_bytes=1 << 30, counters=COUNTERS, peak_bytes=3 << 30, hidden_share=0.75
)
PEER = Facts(num_params=1, peak_bytes=8 << 30)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_it_refuses_without_a_cuda_device() -> None:
    with pytest.raises(SystemExit, match="there is none"):
        main(["--pairs=2"])


def test_the_tables() -> None:
    comparison = Comparison((Step(0.5, 0.1, 1.25),), (Step(0.25, 0.1, 1.0),), PLANNED, PEER)
    text = render({"offload": comparison}, 1000, argparse.Namespace(warmup=1, pairs=3, probed=1))
    assert "| offload | 2.000 (2.000 to 2.000) | 2000 | 4000 | 0.25 |" in text
    assert "| offload | 3.000 GiB | 8.000 GiB | 1.000 GiB | 2.000 GiB |" in text
    assert "| offload | 2.000 GiB | 1.000 GiB | 75.0% | 75.0% |" in text


@pytest.mark.cuda
@pytest.mark.slow
def test_a_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--params=1e6", "--tokens=2x16", "--pairs=2", "--warmup=2", "--probed=1", "--launches=1"])
    printed = capsys.readouterr().out
    assert all(f"| {name} | " in printed for name in ("resident", "offload", "half"))
