"""Two GPUs train a model that reads weights without calling their modules as Lightning's DDP does."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.cuda.marks import needs_two_gpus
from tests.support.gpus import STAND_IN, STAND_IN_PATH

pytestmark = [pytest.mark.cuda, needs_two_gpus]
ROOT = Path(__file__).resolve().parents[2]


@cache
def losses(*words: str) -> list[float]:
    """Return the losses of `tests/cuda/two_ranks.py`, run with these arguments."""
    path = os.pathsep.join([*([str(STAND_IN_PATH)] if STAND_IN else ()), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment["STAND_IN_CUDA_ORDER"] = (
        "1" if words else "0"
    )  # Lightning sets DDP up on a stream that nobody waits for.
    command = [sys.executable, "-m", "tests.cuda.two_ranks", "deberta", *words]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("losses"))
    return [float(word) for word in line.split()[1:]]


@pytest.mark.parametrize("overlap", ["backward", "forward"])
@pytest.mark.parametrize("sharding", ["shard", "replicate"])
def test_training_is_that_of_ddp(sharding: str, overlap: str) -> None:
    assert losses(sharding, overlap) == pytest.approx(losses(), rel=1e-3)
