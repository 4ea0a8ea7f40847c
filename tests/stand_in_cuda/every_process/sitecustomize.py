"""Lets every process that Python starts with this folder in PYTHONPATH use the stand-in for CUDA."""

import os
import sys
from pathlib import Path

if os.environ.get("STAND_IN_CUDA"):
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    import tests.stand_in_cuda  # noqa: F401
