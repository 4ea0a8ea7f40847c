"""The device that tests of GPUs run on: a GPU, its stand-in (tests/stand_in_cuda), or else the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STAND_IN = torch.cuda.is_available() and torch.cuda.get_device_name() == "Stand-in GPU"
# In PYTHONPATH, it gives processes the stand-in that have STAND_IN_CUDA in their environment.
STAND_IN_PATH = Path(__file__).resolve().parents[1] / "stand_in_cuda" / "every_process"
# Without a GPU the runs are made on the CPU, so that they are ready when there is one.
CUDA = pytest.mark.cuda if torch.cuda.is_available() else pytest.mark.slow
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="looks at the memory or the streams of a GPU")
needs_real_gpu = pytest.mark.skipif(DEVICE == "cpu" or STAND_IN, reason="looks at kernels or times of a real GPU")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
