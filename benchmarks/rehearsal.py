"""Benchmark of predicted step times on the CPU, with and without a rehearsal: predicted over measured.

    python -m benchmarks.rehearsal --results rehearsal

Each row plans with the measured rates of this machine, multiplied by a factor. A run trains a small Llama whose weights
are streamed; its first steps do not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks.report import quiet, table, write_result
from lightning_protrain import CausalLMModule, ProTrainStrategy
from lightning_protrain.device.device import CPUDevice
from lightning_protrain.profiler.hardware import profile_hardware
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.strategy import plan_session

HEADER = ("rates of the hardware", "without a rehearsal", "with a rehearsal", "of runs", "step")
CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 1536,
    "num_attention_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
WARMUP = 3


class Ends(L.Callback):
    """Keeps when steps end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds.append(time.perf_counter())


def scaled(rates: HardwareProfile, by: float) -> HardwareProfile:
    """Return the rates with those of computation, link and host multiplied by a factor."""
    names = (
        "memory", "upload", "upload_beside", "download", "download_beside", "device_step", "host_step", "host_memory",
    )  # fmt: skip
    changed = {name: getattr(rates, name) * by for name in names}
    return replace(rates, **changed, flops={name: rate * by for name, rate in rates.flops.items()})


@quiet()
def predicted_and_measured(hardware: HardwareProfile, rehearse: bool, steps: int) -> tuple[float, float]:
    """Return the predicted step time of one run and the median of the measured ones, seconds."""
    strategy = ProTrainStrategy(device_memory="64MiB", hardware=hardware, rehearse=rehearse, monitor=False)
    ends = Ends()
    options: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, max_steps=steps + WARMUP, callbacks=[ends], limit_val_batches=0, **options
    )
    ids = torch.randint(0, 300, (4, 72))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    loader = DataLoader([batch] * (steps + WARMUP), batch_size=None)  # type: ignore[arg-type]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(plan_session, "user_folder", return_value=Path(folder)),
    ):
        trainer.fit(CausalLMModule(config=CONFIG, learning_rate=1e-3), loader)
    assert strategy.plan is not None
    assert strategy.plan.prediction is not None
    took = [end - begin for begin, end in pairwise(ends.seconds)]
    return strategy.plan.prediction.step_seconds, statistics.median(took[WARMUP - 1 :])


def row(rates: HardwareProfile, by: float, runs: int, steps: int) -> tuple[str, ...]:
    """Return the row of a factor."""
    ratios: dict[bool, list[float]] = {}
    for rehearse in (False, True):
        found = [predicted_and_measured(scaled(rates, by), rehearse, steps) for _ in range(runs)]
        ratios[rehearse] = [predicted / measured for predicted, measured in found]
    shown = [f"{statistics.median(each):.3f}" for each in ratios.values()]
    each_run = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios[True]))
    return (f"{by:g} of the measured ones", *shown, each_run, f"{found[-1][1]:.3g} s")


def main(arguments: Sequence[str]) -> None:
    """Print a row for each factor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", type=float, nargs="+", default=[0.25, 1.0, 4.0])
    parser.add_argument("--runs", type=int, default=5, help="runs of each case")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", help="name of the folder in benchmarks/results")
    args = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        with closing(CPUDevice(torch.device("cpu"))) as device:
            rates = profile_hardware(device, [torch.float32])
        rows = [row(rates, by, args.runs, args.steps) for by in args.factors]
    finally:
        torch.set_num_threads(threads)
    text = f"Predicted over measured step time, median of {args.runs} runs.\n\n{table(HEADER, rows)}"
    print(text)
    if args.results:
        print(write_result(args.results, "benchmarks.rehearsal", arguments, {"rows": rows}, text))


if __name__ == "__main__":
    main(sys.argv[1:])
