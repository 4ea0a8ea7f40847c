"""Marks of tests for a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.gpus import DEVICE, STAND_IN

# Without a GPU the runs are made on the CPU, so that they are ready when there is one.
CUDA = pytest.mark.cuda if torch.cuda.is_available() else pytest.mark.slow
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="looks at the memory or the streams of a GPU")
needs_real_gpu = pytest.mark.skipif(DEVICE == "cpu" or STAND_IN, reason="looks at kernels or times of a real GPU")
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
