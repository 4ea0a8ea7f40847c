"""Benchmark of the forecast of the host's optimizer step: predicted beside measured, in processor time of one thread.

    python -m benchmarks.host_rate --results host-rate

The prediction is what a plan is made with: AdamW's rate on the host, and the optimizer's time for each element beside
it. The measurement is the step of a training under `plan="offload"`.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Muon, NAdam, Optimizer
from torch.utils.data import DataLoader

from benchmarks.report import quiet, table, write_result
from lightning_protrain import ProTrainStrategy
from lightning_protrain.device.host import HostWorker
from lightning_protrain.runtime.optim import host_rate

SIDE, LAYERS, STEPS, ROUNDS = 2048, 4, 7, 3
WANTED = 0.15
HEADER = ("optimizer", "of AdamW's time", "predicted s", "measured s", "predicted / measured", "met")


def eight_bit(parameters: Any) -> Optimizer:
    """Return AdamW with states of 8 bits."""
    import bitsandbytes  # An extra.

    return bitsandbytes.optim.AdamW8bit(parameters)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": partial(AdamW, fused=True),
    "NAdam": NAdam,
    "Adafactor": Adafactor,
    "Muon": Muon,
    "AdamW8bit": eight_bit,
}


class Stepping(L.LightningModule):
    """Takes the processor time of each optimizer step."""

    def __init__(self, make: Callable[..., Optimizer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS))
        self.make, self.seconds, self.began = make, list[float](), 0.0

    def training_step(self, batch: Tensor) -> Tensor:
        """Return the sum of the outputs."""
        for layer in self.layers:
            batch = layer(batch)
        return batch.sum()

    def configure_optimizers(self) -> Optimizer:
        """Return the optimizer to time."""
        return self.make(self.parameters())

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Start the clock."""
        self.began = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        """Stop the clock."""
        self.seconds.append(time.process_time() - self.began)


def measure(name: str) -> dict[str, Any]:
    """Return predicted and measured seconds of a step of an optimizer, medians."""
    module, worker = Stepping(OPTIMIZERS[name]), HostWorker(1)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=ProTrainStrategy(plan="offload", monitor=False),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.ones(STEPS, SIDE), 1))
    adamw, slowdowns, rates = AdamW(module.parameters(), fused=True), [], []
    for _ in range(ROUNDS):
        size = (host_rate.MOST_ELEMENTS,)
        job = worker.submit(partial(host_rate._seconds, adamw, adamw.param_groups[0], size, torch.float32))
        rates.append(job.result())
        with warnings.catch_warnings(action="error"):  # An optimizer that cannot be measured would count as AdamW.
            slowdowns.append(host_rate.host_slowdown([module.make(module.parameters())], worker))
    worker.close()
    elements = sum(weight.numel() for weight in module.parameters())
    predicted = median(rate * slowdown * elements for rate, slowdown in zip(rates, slowdowns, strict=True))
    return {
        "optimizer": name,
        "slowdown": median(slowdowns),
        "predicted": predicted,
        "measured": median(module.seconds[1:]),  # The first step also makes the states.
    }


@quiet()
def main(arguments: list[str] | None = None) -> None:
    """Print a row for each optimizer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--results", help="name of the folder in benchmarks/results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    host_rate._clock = time.thread_time
    rows = [measure(name) for name in options.optimizers]
    lines = []
    for row in rows:
        ratio = row["predicted"] / row["measured"]
        times = (f"{row[key]:.3f}" for key in ("predicted", "measured"))
        met = "yes" if abs(ratio - 1) <= WANTED else "no"
        lines.append((row["optimizer"], f"{row['slowdown']:.2f}", *times, f"{ratio:.3f}", met))
    text = table(HEADER, lines)
    print(text)
    if options.results:
        write_result(options.results, "benchmarks.host_rate", arguments or [], {"rows": rows}, text)


if __name__ == "__main__":
    main()
