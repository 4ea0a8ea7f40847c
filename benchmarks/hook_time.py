"""Benchmark of the runtime's Python time per block: a model of tiny blocks with offloading and without a plan.

    python -m benchmarks.hook_time --results hook-time

Blocks are tiny, so that copies and kernels take almost no time. Both models alternate forward and backward in one
process; the first one changes from pair to pair. The difference of a pair, divided by the number of blocks, is the cost
of hooks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.pairs import Ratio, median_ratio
from benchmarks.report import table, write_result
from lightning_protrain.config import Knobs
from lightning_protrain.device.device import CPUDevice
from lightning_protrain.planner.memory import StatesProblem
from lightning_protrain.planner.presets import make_plan
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.runtime.apply import RunOptions, apply_plan

HEADER = ("block", "parameters", "microseconds per block (95 %)", "wanted", "met", "without a plan")
WANTED = 100.0
WIDTH = 8


class Linear(nn.Module):
    """A residual layer: maps (B, WIDTH) to (B, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(hidden)


class Llama(nn.Module):
    """A block with the parameters of a Llama block, without attention: maps (B, WIDTH) to (B, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norms[0](hidden)
        hidden = hidden + self.o(torch.sigmoid(self.q(normed) * self.k(normed)) * self.v(normed))
        normed = self.norms[1](hidden)
        return hidden + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


BLOCKS: dict[str, Callable[[], nn.Module]] = {"linear": Linear, "llama": Llama}


class Net(nn.Module):
    """A model of equal blocks: maps (B, WIDTH) to a loss."""

    def __init__(self, kind: str, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BLOCKS[kind]() for _ in range(num_blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


def measure(kind: str, num_blocks: int, pairs: int) -> tuple[list[float], list[float]]:
    """Return the seconds of forward and backward with and without a plan, and check that gradients are equal.

    Args:
        kind: One of `BLOCKS`.
        num_blocks: Number of blocks of the model.
        pairs: Number of timed pairs, after three for warm-up.
    """
    torch.manual_seed(0)
    plain, offloaded = Net(kind, num_blocks), Net(kind, num_blocks)
    offloaded.load_state_dict(plain.state_dict())
    layout = describe_model(offloaded)
    knobs = Knobs(0, 3, 0, 0, num_blocks)
    plan = make_plan(StatesProblem(layout, 8.0), "auto", knobs, min_num_params=1 << 40)
    runtime = apply_plan(offloaded, plan, layout, CPUDevice(torch.device("cpu")), RunOptions(print))
    hidden = torch.randn(4, WIDTH)

    def step_offloaded() -> None:
        output = runtime.run_step(offloaded, (hidden,), {}, True)
        with runtime.backward():
            output.backward()

    def step_plain() -> None:
        plain(hidden).backward()

    times: dict[str, list[float]] = {"offloaded": [], "plain": []}
    order = [("offloaded", offloaded, step_offloaded), ("plain", plain, step_plain)]
    try:
        for _ in range(3 + pairs):
            order.reverse()
            for name, model, step in order:
                begin = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - begin)
                model.zero_grad()
        step_offloaded()
        step_plain()
        if not all(
            torch.equal(a.grad, b.grad) for a, b in zip(offloaded.parameters(), plain.parameters(), strict=True)
        ):
            raise RuntimeError(f"{kind}: the gradients differ from those without a plan; no time means anything.")
    finally:
        runtime.remove()
    return times["offloaded"][3:], times["plain"][3:]


def extra(offloaded: Sequence[float], plain: Sequence[float], num_blocks: int) -> Ratio:
    """Return the additional time of an offloaded step in microseconds per block: median over pairs, and interval."""
    return median_ratio([1e6 * (a - b) / num_blocks for a, b in zip(offloaded, plain, strict=True)])


def main(arguments: Sequence[str]) -> None:
    args = _parse(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows, results = [], {}
    try:
        for kind in args.block:
            offloaded, plain = measure(kind, args.blocks, args.pairs)
            cost, base = extra(offloaded, plain, args.blocks), extra(plain, [0.0] * args.pairs, args.blocks)
            results[kind] = {"microseconds": asdict(cost), "offloaded": offloaded, "plain": plain}
            rows.append(_row(kind, cost, base))
    finally:
        torch.set_num_threads(threads)
    text = (
        f"{args.blocks} blocks of width {WIDTH}, every chunk streamed, activations kept, forward and backward, "
        f"1 thread, {args.pairs} pairs.\n\n{table(HEADER, rows)}"
    )
    print(text)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.results:
        print(write_result(args.results, "benchmarks.hook_time", arguments, {"blocks": results}, text))


def _row(kind: str, cost: Ratio, base: Ratio) -> list[str]:
    return [
        kind,
        str(len(list(BLOCKS[kind]().parameters()))),
        f"{cost.median:.0f} ({cost.lower:.0f} to {cost.upper:.0f})",
        f"<= {WANTED:.0f}",
        "yes" if cost.upper <= WANTED else "no",
        f"{base.median:.0f}",
    ]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block", nargs="+", choices=BLOCKS, default=list(BLOCKS), help="default: all")
    parser.add_argument("--blocks", type=int, default=32, help="number of blocks of the model")
    parser.add_argument("--pairs", type=int, default=200, help="timed pairs")
    parser.add_argument("--json", type=Path, help="file for all times")
    parser.add_argument("--results", help="name of the folder in benchmarks/results")
    args = parser.parse_args(arguments)
    if min(args.blocks, args.pairs) < 1:
        parser.error("give positive numbers")
    return args


if __name__ == "__main__":
    main(sys.argv[1:])
