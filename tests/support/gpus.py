"""The device that tests of GPUs run on: a GPU, its stand-in (tests/stand_in_cuda), or else the CPU."""

from __future__ import annotations

from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STAND_IN = torch.cuda.is_available() and torch.cuda.get_device_name() == "Stand-in GPU"
# In PYTHONPATH, it gives processes the stand-in that have STAND_IN_CUDA in their environment.
STAND_IN_PATH = Path(__file__).resolve().parents[1] / "stand_in_cuda" / "every_process"
