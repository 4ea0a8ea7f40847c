"""Predictions beside runs that others have measured and published.

    python -m benchmarks.published_runs --results published-runs

Each row is planned as its authors trained: the model, the GPU, the micro-batch and its accumulation, the length, and
the bytes of weights and optimizer states. Their hosts are not described in full: 448 GiB and 64 cores are assumed. What
differs is in `WHY`. No row has several GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

from benchmarks.report import quiet, table, write_result
from lightning_protrain.models.published import find_config
from lightning_protrain.plans import TrainingOptions
from lightning_protrain.strategy.dry_run_hardware import DryRunHardware
from lightning_protrain.strategy.repeated_blocks import planner_for

HOST_MEMORY, CORES = "448GiB", 64
LLMQ = "https://github.com/IST-DASLab/llmq/tree/b77d969/benchmarks"
SLIDEFORMER = "SlideFormer's table at 062322f"
TORCHTUNE = "https://github.com/pytorch/torchtune (README)"
HEADER = (
    "system",
    "GPU",
    "model",
    "training",
    "micro-batch",
    "measured tok/s",
    "predicted tok/s",
    "predicted / measured",
)
Method = Literal["full", "lora", "qlora"]
# What a system does that the plan does not.
WHY = {
    "LLMQ": "bf16 weights and moments with stochastic rounding, CUDA graphs, fused kernels",
    "LLaMA-Factory": "DeepSpeed ZeRO-2 or 3 with offload from 3B on, Liger's fused kernels; float32 masters",
    "DeepSpeed": "ZeRO-3 with offload; the GPU is not named: 24 GB",
    "torchtune": "compiled; full training: 8-bit paged AdamW in backward, here bf16 moments on the host",
}


@dataclass(frozen=True)
class Run:
    """A measured training on one GPU.

    Attributes:
        system: What trained.
        gpu: Name of the GPU in the catalogue.
        model: Name on the Hub.
        tokens_per_second: Measured throughput.
        batch_size: Sequences in a micro-batch.
        accumulate: Micro-batches in a step.
        precision: As in the Trainer.
        method: What is trained.
        length: Tokens of a sequence.
        source: Where the figure is published.
    """

    system: str
    gpu: str
    model: str
    tokens_per_second: int
    batch_size: int
    accumulate: int = 1
    precision: str = "bf16-true"
    method: Method = "full"
    length: int = 1024
    source: str = LLMQ


def _qwen(system: str, gpu: str, precision: str, rows: Sequence[tuple[str, int, int, int]]) -> list[Run]:
    return [Run(system, gpu, f"Qwen/Qwen2.5-{size}", rate, batch, more, precision) for size, rate, batch, more in rows]


_LLAMA = "meta-llama/Llama-3.1-8B"
RUNS = (
    *_qwen(
        "LLMQ",
        "RTX 4090",
        "bf16-true",
        [
            ("0.5B", 39860, 16, 32),
            ("1.5B", 14076, 4, 128),
            ("3B", 7004, 4, 128),
            ("7B", 2779, 16, 32),
            ("14B", 1349, 32, 16),
        ],
    ),
    *_qwen(
        "LLMQ",
        "H100 SXM",
        "bf16-true",
        [("1.5B", 58875, 32, 16), ("3B", 30916, 16, 32), ("7B", 13818, 4, 128), ("14B", 6315, 8, 64)],
    ),
    *_qwen(
        "LLaMA-Factory",
        "RTX 4090",
        "bf16-mixed",
        [
            ("0.5B", 30183, 128, 4),
            ("1.5B", 9419, 32, 16),
            ("3B", 5448, 48, 11),
            ("7B", 2523, 32, 16),
            ("14B", 1135, 20, 26),
        ],
    ),
    *(
        Run("DeepSpeed", "RTX 4090", _LLAMA, rate, batch, precision="bf16-mixed", source=SLIDEFORMER)
        for batch, rate in ((8, 914), (16, 1373), (32, 1791))
    ),
    *(
        Run("torchtune", "RTX 4090", _LLAMA, rate, 2, 1, precision, method, 2048, TORCHTUNE)
        for method, precision, rate in (
            ("lora", "bf16-true", 3083),
            ("qlora", "bf16-true", 2413),
            ("full", "bf16-true", 1650),
        )
    ),
)


def predict(run: Run) -> float | None:
    """Return the predicted tokens per second of a run; None if no plan fits."""
    hardware = DryRunHardware((run.gpu,), host_memory=HOST_MEMORY, host_cores=CORES)
    options = TrainingOptions(run.method, run.precision, run.batch_size, run.length)
    planner = planner_for(options.of(find_config(run.model), run.gpu), hardware)
    workload = planner.known[run.gpu]
    assert workload.training is not None
    if run.accumulate > 1:
        workload = replace(
            workload,
            training=replace(workload.training, accumulate=run.accumulate),
            layout=replace(workload.layout, lends_copies=False),
        )
    request = replace(planner.request, workload=workload, profile_on=None)
    try:
        plan = request.plan(hardware.nodes[run.gpu])
    except ValueError as error:
        print(f"{run.system}, {run.model}, {run.gpu}: {error}")
        return None
    assert plan.prediction is not None
    return plan.prediction.tokens_per_second


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table, the median deviation, and what the systems do that the plans do not."""
    lines = []
    for row in rows:
        rate = row["predicted"]
        lines.append(
            (
                row["system"],
                row["gpu"],
                row["model"].rpartition("/")[2],
                f"{row['method']}, {row['precision']}",
                f"{row['batch_size']} x {row['length']}, {row['accumulate']} to a step",
                f"{row['tokens_per_second']:,}",
                "no plan fits" if rate is None else f"{rate:,.0f}",
                "" if rate is None else f"{rate / row['tokens_per_second']:.2f}",
            )
        )
    off = [abs(row["predicted"] / row["tokens_per_second"] - 1) for row in rows if row["predicted"] is not None]
    about = "\n".join(f"- {system}: {text}." for system, text in WHY.items())
    return f"{table(HEADER, lines)}\n\nMedian deviation: {100 * median(off):.0f} %.\n\n{about}"


@quiet()
def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--systems", nargs="+", default=list(WHY), choices=WHY)
    parser.add_argument("--results", help="name of the folder in benchmarks/results")
    options = parser.parse_args(arguments)
    rows = [{**asdict(run), "predicted": predict(run)} for run in RUNS if run.system in options.systems]
    text = render(rows)
    print(text)
    if options.results:
        write_result(options.results, "benchmarks.published_runs", arguments or [], {"rows": rows}, text)


if __name__ == "__main__":
    main()
