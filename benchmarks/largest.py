"""Predictions of the largest model of a family that has a plan on a machine of the catalogue.

    python -m benchmarks.largest
    python -m benchmarks.largest --families Qwen3 --machines "RTX 3090" --batches 1
    python -m benchmarks.largest --machines "RTX 3090 of the paper" "A100 of the paper" --methods full --batches 1

Every model is built without weights by `CausalLMModule`, in a published size, and its training step is traced in the
precision of the strategy. LoRA means adapters of rank 16 on all linear layers of the blocks. The search is that of
`plan="auto"` with AdamW, no clipping, one micro-batch in a step, and the memory budget of `Trainer.plan`.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from math import ceil
from typing import Any, Literal

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import PreTrainedModel

from benchmarks.families import FAMILIES, Size
from benchmarks.report import quiet, table, write_result
from lightning_protrain.config import Knobs
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.planner.memory import StatesProblem
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.presets import make_plan
from lightning_protrain.planner.problem import Training, layout_alpha
from lightning_protrain.planner.request import SHARE_OF_ALL
from lightning_protrain.planner.search import NoFeasiblePlan, Problem, search_with_evaluation
from lightning_protrain.planner.step_time import step_time
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.gpu_specs import gpu
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.records import HardwareProfile, ModelLayout, ModelProfile
from lightning_protrain.runtime.optim.step import state_bytes_per_element
from lightning_protrain.strategy.precision import ProTrainPrecision
from lightning_protrain.strategy.profile_step import streamable

GIB = 1 << 30
SEQUENCE = 1024
RANK = 16
Method = Literal["full", "LoRA"]
PrecisionName = Literal["bf16-mixed", "bf16-true"]
# GPU, and memory and cores of its host. The machines of the paper (section 5.1) have four GPUs, of which one is used.
MACHINES = {
    "RTX 3090": ("RTX 3090", 64 * GIB, 16),
    "A100": ("A100 80GB SXM", 512 * GIB, 32),
    "RTX 3090 of the paper": ("RTX 3090", 384 * 10**9, 24),
    "A100 of the paper": ("A100 80GB SXM", 10**12, 112),
}
OURS = ("RTX 3090", "A100")
METHODS: tuple[Method, ...] = ("full", "LoRA")
PRECISIONS: tuple[PrecisionName, ...] = ("bf16-mixed", "bf16-true")
HEADER = (
    "family", "micro-batch", "largest with a plan", "resident", "device GiB", "host GiB", "host bytes / parameter",
    "step s", "tokens/s", "bound", "first without", "what is short",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One model, method and machine.

    Attributes:
        family: Name of the family.
        size: One of its sizes.
        method: Full training or LoRA.
        precision: As in the Trainer.
        batch: Sequences in a micro-batch.
        machine: Key of `MACHINES`.
        sequence: Tokens in a sequence.
    """

    family: str
    size: Size
    method: Method
    precision: PrecisionName
    batch: int
    machine: str
    sequence: int = SEQUENCE


@dataclass(frozen=True)
class Answer:
    """Result of a search.

    Attributes:
        params: Parameters of the model; 0 if there is no plan.
        resident: Share of the bytes of all chunks that stay on the device.
        device_bytes: Predicted peak of device memory.
        host_bytes: Predicted peak of host memory.
        seconds: Predicted time of a step, seconds.
        tokens_per_second: Predicted throughput.
        bound: Resource that limits the step.
        short: Reason why there is no plan; empty if there is one.
    """

    params: int = 0
    resident: float = 0.0
    device_bytes: int = 0
    host_bytes: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    bound: str = ""
    short: str = ""


class Adapted(CausalLMModule):
    """A causal language model of which only adapters are trained."""

    def configure_model(self) -> None:
        """Build the model and its adapters."""
        super().configure_model()
        assert self.model is not None
        linear = r".*(layers|h)\.\d+\..*(proj|c_attn|c_fc)"
        inject_adapter_in_model(LoraConfig(r=RANK, target_modules=linear), self.model)


@dataclass(frozen=True)
class Known:
    """The planner's knowledge of a model.

    Attributes:
        layout: Its modules and parameters.
        profile: Its training step.
        state_bytes: Bytes of optimizer states for each trained element.
    """

    layout: ModelLayout
    profile: ModelProfile
    state_bytes: float


def build(config: dict[str, Any], method: Method, precision: ProTrainPrecision) -> CausalLMModule:
    """Return a model without weights, built under a precision."""
    kind = CausalLMModule if method == "full" else Adapted
    module = kind(config=config)
    with torch.device("meta"), precision.tensor_init_context():
        module.configure_model()
    _give_memory_to_the_head(module.model)
    precision.convert_module(module)
    return module


def learn(config: dict[str, Any], method: Method, precision_name: PrecisionName, batch: int, sequence: int) -> Known:
    """Build a model and profile a step of it."""
    precision = ProTrainPrecision(precision_name)
    precision.open("cpu")
    module = build(config, method, precision)
    trained = [weight for weight in module.parameters() if weight.requires_grad]
    layout = describe_model(module)
    profile = profile_model(module, layout, step_of(module, batch, sequence), precision.train_step_context)
    if precision.low_dtype_name is not None:
        streamed = streamable(profile, module, precision.low_dtype_name)
        layout = replace(layout.streaming(streamed, precision.low_dtype_name), lends_copies=True)
    return Known(layout, profile, state_bytes_per_element([torch.optim.AdamW(trained)]))


def step_of(module: CausalLMModule, batch: int, sequence: int) -> Callable[[], torch.Tensor]:
    """Return a training step of a module on random tokens (batch, sequence)."""
    tokens = torch.zeros(batch, sequence, dtype=torch.int64)
    return partial(module.training_step, {"input_ids": tokens, "labels": tokens}, 0)


@cache
def know(family: str, size: Size, method: Method, precision: PrecisionName, batch: int, sequence: int) -> Known:
    """Return the planner's knowledge of a published model; cached for several machines."""
    return learn(FAMILIES[family].config(size, sequence), method, precision, batch, sequence)


def _give_memory_to_the_head(model: PreTrainedModel | None) -> None:
    """Allocate the head's weight: the loss runs the head in backward, where autocast fails on a meta tensor.

    The memory is never written, so no pages are used.
    """
    assert model is not None
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = module.weight
        module.weight = nn.Parameter(torch.empty_like(weight, device="cpu"), weight.requires_grad)
    model.tie_weights()


def problem_of(known: Known, hardware: HardwareProfile) -> Problem:
    """Return the search problem for a model on a machine, as `Trainer.plan` makes it."""
    return Problem(
        profile=known.profile,
        layout=known.layout,
        hardware=hardware,
        training=Training("backward"),
        state_bytes=known.state_bytes,
        device_bytes=int(hardware.device_bytes * SHARE_OF_ALL),
        host_bytes=hardware.host_bytes,
        alpha=layout_alpha(known.layout),
        foreach=True,
    )


@cache
def answer(case: Case) -> Answer:
    """Search for a plan of a case."""
    if case.batch > 1:
        alone = answer(replace(case, batch=1))
        if alone.short:
            return alone
    known = know(case.family, case.size, case.method, case.precision, case.batch, case.sequence)
    problem = problem_of(known, gpu(*MACHINES[case.machine]))
    # Prefer a plan that keeps everything on the device, even if offloading has a shorter predicted step.
    plan = make_plan(StatesProblem(known.layout, known.state_bytes), "resident")
    if memory_timeline(problem, plan).device_peak > (problem.device_bytes or 0):
        try:
            plan = search_with_evaluation(problem, Knobs(), print)
        except NoFeasiblePlan as error:
            return Answer(short=what_is_short(str(error)))
    timeline = memory_timeline(problem, plan)
    spent = step_time(problem, plan)
    total = sum(chunk.nbytes for chunk in plan.chunks)
    return Answer(
        params=sum(info.numel for info in known.layout.parameters),
        resident=sum(chunk.nbytes for chunk in plan.chunks if chunk.resident) / total,
        device_bytes=timeline.device_peak,
        host_bytes=timeline.host_peak,
        seconds=spent.seconds,
        tokens_per_second=case.batch * case.sequence / spent.seconds,
        bound=spent.bound,
    )


def what_is_short(message: str) -> str:
    """Return the shortage that a message reports, in a few words."""
    found = re.findall(r"the (device|host) would need at least ([\d.]+ \w+)", message)
    found += [("host", need) for need in re.findall(r"Or raise host_memory to ([\d.]+ \w+)", message)]
    return " or ".join(f"{place}: {need} needed" for place, need in found) or message


def largest(count: int, first: int, fits: Callable[[int], bool]) -> int:
    """Return the index of the largest of `count` sizes that fits, or -1; begin with the guess `first`."""
    index = min(max(first, 0), count - 1)
    if fits(index):
        while index + 1 < count and fits(index + 1):
            index += 1
        return index
    while index >= 0 and not fits(index):
        index -= 1
    return index


def rows_of(
    families: Sequence[str], machine: str, method: Method, precision: PrecisionName, batches: Sequence[int]
) -> list[dict[str, Any]]:
    """Return one row for each family and size of a micro-batch."""
    rows = []
    for family in families:
        sizes = FAMILIES[family].sizes
        index = guess(sizes, machine, method, precision)
        for batch in batches:
            cases = [Case(family, size, method, precision, batch, machine) for size in sizes]
            index = largest(len(sizes), index, lambda at, cases=cases: not answer(cases[at]).short)
            found = {"family": family, "batch": batch, "size": "none", "answer": Answer(), "next": "", "short": ""}
            if index >= 0:
                found |= {"size": sizes[index].name, "answer": answer(cases[index])}
            if index + 1 < len(sizes):
                found |= {"next": sizes[index + 1].name, "short": answer(cases[index + 1]).short}
            rows.append(found)
    return rows


def guess(sizes: Sequence[Size], machine: str, method: Method, precision: PrecisionName) -> int:
    """Return a guess of the largest size, from the host memory per parameter."""
    full = {"bf16-mixed": 18, "bf16-true": 8}
    frozen = {"bf16-mixed": 6, "bf16-true": 2}
    per_parameter = (full if method == "full" else frozen)[precision]
    return sum(size.billions * 1e9 * per_parameter < MACHINES[machine][1] for size in sizes) - 1


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table."""
    lines = []
    for row in rows:
        found: Answer = row["answer"]
        figures = ("-",) * 7
        if found.params:
            figures = (
                f"{found.resident:.0%}",
                f"{found.device_bytes / GIB:.1f}",
                f"{found.host_bytes / GIB:.1f}",
                f"{found.host_bytes / found.params:.1f}",
                f"{found.seconds:.3g}",
                f"{found.tokens_per_second:,.0f}",
                found.bound,
            )
        missing = (row["next"] or "(no larger one)", row["short"])
        lines.append((row["family"], row["batch"], row["size"], *figures, *missing))
    return table(HEADER, lines)


@quiet()
def main(arguments: Sequence[str]) -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description="The largest models that have a plan.")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--machines", nargs="+", default=list(OURS), choices=list(MACHINES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="from small to large")
    parser.add_argument("--results", help="name of the folder in benchmarks/results")
    options = parser.parse_args(arguments)
    begin, texts, kept = time.perf_counter(), [], []
    for machine, method, precision in product(options.machines, options.methods, options.precisions):
        rows = rows_of(options.families, machine, method, precision, options.batches)
        name, nbytes, cores = MACHINES[machine]
        title = f"## {name}, host of {nbytes // GIB} GiB and {cores} cores: {method}, {precision}"
        texts.append(f"{title}\n\n{render(rows)}")
        print(texts[-1], end="\n\n", flush=True)
        where = {"machine": machine, "method": method, "precision": precision}
        kept += [{**where, **row, "answer": asdict(row["answer"])} for row in rows]
        if options.results:  # After every table: all of them take long.
            write_result(options.results, "benchmarks.largest", arguments, {"rows": kept}, "\n\n".join(texts))
    print(f"{ceil(time.perf_counter() - begin)} seconds")


if __name__ == "__main__":
    main(sys.argv[1:])
