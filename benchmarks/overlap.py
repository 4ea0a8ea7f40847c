"""Simulation of the overlap of host work and transfers with computation, on the simulated device.

    python -m benchmarks.overlap --results overlap
    python -m benchmarks.overlap --blocks 8 --accumulate 1 --host 0.5 --link 0.5

The runtime trains a small GPT on the simulated device, whose virtual clock advances at given rates, so the results are
the same on every machine. Two ratios are given: the time of the optimizer step on the host to the time of one forward
and backward (`--host`), and the time of uploading all chunks to the time of one forward (`--link`; downloads have the
same rate). With fp32 weights, 100 TFLOP/s, 8192 tokens, a link of 25 GB/s and a host of 150 GB/s, they are about 0.4
and 1.

[Note: Bound]
The lower bound of a step follows the paper's equations 2 to 7: in forward and backward, a chunk takes the longer of its
computation and its copies, and the host steps during the last backward. Unlike in the paper, uploads and downloads
overlap, because PCI Express carries both at the same time. A step behind forward overlaps with the next forward in the
same way. Other work of the host counts at the earliest possible time: sums over micro-batches and norms in the backward
of their gradients, scaling in the step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.report import table, write_result
from lightning_protrain.config import Knobs
from lightning_protrain.planner.memory import StatesProblem
from lightning_protrain.planner.presets import make_plan
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.runtime.apply import RunOptions, Runtime, apply_plan
from lightning_protrain.runtime.optim.async_step import Overlap
from lightning_protrain.runtime.optim.step import fused_host_step
from tests.support.simulated.device import Rates, SimulatedDevice

HEADER = ("overlap", "clipped", "micro-batches", "host", "link", "step", "device busy", "host busy", "up", "down",
          "hidden", "of what fits", "step / bound", "met")  # fmt: skip
# Targets: hidden fraction of the work that fits behind backward and behind forward; ratio of the step to its bound.
WANTED = {Overlap.BACKWARD: 0.90, Overlap.FORWARD: 0.80}
WANTED_RATIO = 1.05
WAYS = (
    (Overlap.OFF, False),
    (Overlap.BACKWARD, False),
    (Overlap.FORWARD, False),
    (Overlap.OFF, True),
    (Overlap.FORWARD, True),
)
WIDTH = 32
VOCABULARY = 256  # The embedding has two thirds of a block's weights, as in a Llama of 7 billion.
NUM_BUFFERS = 3
# The first two steps of a run are not typical, because no optimizer step precedes them.
NUM_STEPS = 4
FLOPS, UNLIMITED = 1e9, 1e30
# Costs for each element on the virtual clock, relative to the 16 bytes of a step: weight, gradient, and two moments.
# Scaling happens in the cache during the step, and only writes the scaled gradient to memory.
SUM, NORM, SCALE = 12 / 16, 4 / 16, 4 / 16


class Block(nn.Module):
    """A GPT block without attention scores: maps (B, S, WIDTH) to (B, S, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        queries, keys, values = self.qkv(self.first(hidden)).chunk(3, dim=-1)
        hidden = hidden + self.out(torch.sigmoid(queries * keys) * values)
        return hidden + self.down(nn.functional.gelu(self.up(self.second(hidden))))


class GPT(nn.Module):
    """An embedding, blocks and an untied head."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        overlap: Phase during which the host steps.
        clipped: True clips gradients by norm.
        accumulate: Micro-batches in a step.
        host: Time of the optimizer step relative to one micro-batch.
        link: Time of uploading all chunks relative to one forward.
        num_blocks: Number of blocks of the model.
    """

    overlap: Overlap = Overlap.OFF
    clipped: bool = False
    accumulate: int = 1
    host: float = 0.0
    link: float = 0.0
    num_blocks: int = 32


@dataclass(frozen=True)
class Busy:
    """Working time of each resource until the end of a backward, and the time on the compute stream then."""

    time: float
    device: float
    host: float
    up: float
    down: float

    def __sub__(self, before: Busy) -> Busy:
        names = asdict(self)
        return Busy(**{name: value - getattr(before, name) for name, value in names.items()})


@dataclass(frozen=True)
class Model:
    """The figures of a model that the bound needs.

    Attributes:
        nbytes: Bytes of each chunk, in execution order.
        weights: Bytes of all parameters, without padding in chunks.
        forward: Virtual seconds of each chunk's forward computation, with unlimited links and host.
        backward: Virtual seconds of each chunk's backward computation, with unlimited links and host.
    """

    nbytes: tuple[int, ...]
    weights: int
    forward: tuple[float, ...]
    backward: float


@dataclass(frozen=True)
class Row:
    """Results of a case; seconds are virtual.

    Attributes:
        case: The case.
        computing: Seconds of the device's computation in one micro-batch: the unit of the printed figures.
        busy: Working times of one step.
        hidden: Share of the host's work that made the step no longer.
        hidden_of_fitting: Hidden share of the work that the bound hides; None if it hides none.
        ratio: Time of a step over the bound.
    """

    case: Case
    computing: float
    busy: Busy
    hidden: float
    hidden_of_fitting: float | None
    ratio: float

    @property
    def met(self) -> bool | None:
        """True if the targets are met; None without a target."""
        if self.case.overlap is Overlap.OFF or self.hidden_of_fitting is None:
            return None
        return self.ratio <= WANTED_RATIO and self.hidden_of_fitting >= WANTED[self.case.overlap]


def measure(case: Case) -> Row:
    """Train, and compare the virtual time with the bound."""
    model = describe(case.num_blocks)
    busy = run(case)
    unhindered = _time_without_host(case.accumulate, case.link, case.num_blocks)
    hidden = busy.host - (busy.time - unhindered)
    fits = busy.host - (bound(case, model) - bound(replace(case, host=0.0), model))
    return Row(
        case=case,
        computing=sum(model.forward) + model.backward,
        busy=busy,
        hidden=hidden / busy.host,
        hidden_of_fitting=hidden / fits if fits > 0.01 * busy.host else None,
        ratio=busy.time / bound(case, model),
    )


def bound(case: Case, model: Model) -> float:
    """Return the lower bound of one step in virtual seconds, see [Note: Bound]."""
    seconds = [nbytes * case.link * sum(model.forward) / sum(model.nbytes) for nbytes in model.nbytes]
    shares = [forward / sum(model.forward) for forward in model.forward]
    forward = sum(map(max, model.forward, seconds))
    # Missing uploads of the last chunks and the embedding do not matter, because downloads take as long as uploads.
    backward = sum(max(share * model.backward, copy) for share, copy in zip(shares, seconds, strict=True))
    update = case.host * (sum(model.forward) + model.backward)
    adding = SUM * update if case.accumulate > 1 else 0.0
    norm, scale = (NORM * update, SCALE * update) if case.clipped else (0.0, 0.0)
    others = (case.accumulate - 1) * forward
    if case.accumulate > 1:
        others += backward + (case.accumulate - 2) * max(backward, adding)
    if case.overlap is Overlap.BACKWARD:
        return others + forward + max(backward, adding + update)
    if case.overlap is Overlap.FORWARD:
        return others + max(forward, scale + update) + max(backward, adding + norm)
    return others + forward + max(backward, adding) + norm + scale + update


@cache
def describe(num_blocks: int) -> Model:
    """Return the model's figures on a device whose links and host take no time."""
    gpt, device = GPT(num_blocks), SimulatedDevice(Rates(UNLIMITED, UNLIMITED, FLOPS, UNLIMITED, UNLIMITED))
    compute, spent, began = device.compute_stream(), {}, {}

    def begin(name: str, *_: Any) -> None:
        began[name] = compute.busy

    def end(name: str, *_: Any) -> None:
        spent[name] = compute.busy - began[name]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        runtime = _apply(gpt, device)
    names = [chunk.unit for chunk in runtime.plan.chunks]
    for name in names:
        gpt.get_submodule(name).register_forward_pre_hook(partial(begin, name))
        gpt.get_submodule(name).register_forward_hook(partial(end, name))
    with device:
        loss = runtime.run_step(gpt, (_tokens(),), {}, True)
        rest = compute.busy - sum(spent.values())  # The loss belongs to the last unit.
        spent[names[-1]] += rest
        before = compute.busy
        with runtime.backward():
            loss.backward()
    backward = compute.busy - before
    nbytes = tuple(chunk.nbytes for chunk in runtime.plan.chunks)
    runtime.remove()
    weights = sum(parameter.nbytes for parameter in gpt.parameters())
    return Model(nbytes, weights, tuple(spent[name] for name in names), backward)


def run(case: Case) -> Busy:
    """Return the work of one step, between the ends of two backwards."""
    model = describe(case.num_blocks)
    total, forward = sum(model.nbytes), sum(model.forward)
    link = total / (case.link * forward) if case.link else UNLIMITED
    # A fused step reads four numbers for each weight.
    host = 4 * model.weights / (case.host * (forward + model.backward)) if case.host else UNLIMITED
    torch.manual_seed(0)
    gpt, device = GPT(case.num_blocks), SimulatedDevice(Rates(link, link, FLOPS, UNLIMITED, host))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        runtime = _apply(gpt, device)
    optimizer = torch.optim.AdamW(gpt.parameters(), fused=True)
    ends = []
    with device:
        for _ in range(NUM_STEPS):
            _step(case, gpt, runtime, optimizer)
            ends.append(_busy(device))
        runtime.async_step.finish_all()
    runtime.remove()
    return ends[-1] - ends[-2]


@cache
def _time_without_host(accumulate: int, link: float, num_blocks: int) -> float:
    return run(Case(accumulate=accumulate, link=link, num_blocks=num_blocks)).time


def _apply(gpt: GPT, device: SimulatedDevice) -> Runtime:
    layout = describe_model(gpt)
    knobs = Knobs(
        num_persistent_chunks=0,
        num_chunk_buffers=NUM_BUFFERS,
        num_swap_blocks=0,
        num_checkpoint_blocks=0,
        num_keep_offloaded_blocks=len(gpt.blocks),
    )
    plan = make_plan(StatesProblem(layout, 8.0), "auto", knobs, min_num_params=1 << 40)
    return apply_plan(gpt, plan, layout, device, RunOptions(print))


def _step(case: Case, gpt: GPT, runtime: Runtime, optimizer: torch.optim.Optimizer) -> None:
    """Run one step in Lightning's order: gradients are set to zero between the first forward and its backward."""

    def forward_and_backward(first: bool) -> None:
        loss = runtime.run_step(gpt, (_tokens(),), {}, True)
        if first:
            optimizer.zero_grad()
        with runtime.backward():
            loss.backward()

    def closure() -> None:
        forward_and_backward(case.accumulate == 1)
        if case.clipped:
            runtime.async_step.clip_norm(gpt.parameters(), 1e-3)
        runtime.settle()

    for index in range(case.accumulate - 1):
        forward_and_backward(index == 0)
    runtime.async_step.arm(optimizer, case.overlap, None, case.clipped)
    with fused_host_step(optimizer, closure, "cpu", runtime.async_step.launch) as final:
        optimizer.step(final)
    runtime.refresh()


def _busy(device: SimulatedDevice) -> Busy:
    compute, copying = device.compute_stream(), device._copying
    host = device.host_stream.busy + device.worker.stream.busy
    return Busy(compute.time, compute.busy, host, copying["up"].busy, copying["down"].busy)


def _tokens() -> Tensor:
    return torch.arange(16).view(1, 16)


def main(arguments: Sequence[str]) -> None:
    args = _parse(arguments)
    rows = []
    for accumulate, host, link in itertools.product(args.accumulate, args.host, args.link):
        for overlap, clipped in WAYS:
            rows.append(measure(Case(overlap, clipped, accumulate, host, link, args.blocks)))
            print(" | ".join(_cells(rows[-1])), flush=True)
    text = (
        f"A GPT of {args.blocks} blocks, every chunk streamed through {NUM_BUFFERS} buffers, activations kept, AdamW. "
        f"Times are multiples of the device's computation in one micro-batch. Wanted: of what fits, "
        f"{WANTED[Overlap.BACKWARD]:.0%} behind backward and {WANTED[Overlap.FORWARD]:.0%} behind forward; "
        f"step / bound <= {WANTED_RATIO}.\n\n{table(HEADER, [_cells(row) for row in rows])}"
    )
    print(f"\n{text}")
    results = {"rows": [{**asdict(row), "met": row.met} for row in rows]}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.results:
        print(write_result(args.results, "benchmarks.overlap", arguments, results, text))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=32, help="number of blocks of the model")
    parser.add_argument("--accumulate", type=int, nargs="+", default=[1, 4], help="micro-batches in a step")
    parser.add_argument(
        "--host", type=float, nargs="+", default=[0.25, 0.5, 1.0], help="time of the optimizer step / of a micro-batch"
    )
    parser.add_argument("--link", type=float, nargs="+", default=[0.1, 0.5], help="time of all uploads / of a forward")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--results", help="name of the folder in benchmarks/results")
    args = parser.parse_args(arguments)
    if min(args.blocks, *args.accumulate, *args.host, *args.link) <= 0:
        parser.error("give positive numbers")
    return args


def _cells(row: Row) -> list[str]:
    case, busy = row.case, row.busy
    times = (busy.time, busy.device, busy.host, busy.up, busy.down)
    return [
        case.overlap,
        "by norm" if case.clipped else "no",
        str(case.accumulate),
        f"{case.host:g}",
        f"{case.link:g}",
        *(f"{seconds / row.computing:.3f}" for seconds in times),
        f"{row.hidden:.0%}",
        "-" if row.hidden_of_fitting is None else f"{row.hidden_of_fitting:.0%}",
        f"{row.ratio:.3f}",
        {True: "yes", False: "no", None: "-"}[row.met],
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
