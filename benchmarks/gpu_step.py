"""What the strategy costs and saves per training step on a CUDA device, against plain Lightning in the same run.

    python -m benchmarks.gpu_step --params 3e9 --tokens 8x2048 --precision bf16-true
    python -m benchmarks.gpu_step --plan offload half --peer checkpointed --results gpu-step

Both runs of a comparison are on the device at the same time, so the plain one and the planned one must fit together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.pairs import Comparison, compare
from benchmarks.report import table, write_result
from benchmarks.step_overhead import parse_tokens
from benchmarks.subjects import NUM_LAYERS, Facts, Step, Subject, llama_config, states_of_chunks

HEADER = ("plan", "peer", "step / peer (95 %)", "tokens/s", "peer tokens/s", "peak GiB", "peer peak GiB", "planned GiB")
HEADER += ("rest GiB", "uploads hidden", "prefetched")
PLANS = ("resident", "offload", "half")
PEERS = ("plain", "checkpointed")
