"""What the strategy costs and saves per training step on a CUDA device, against plain Lightning and other systems.

    python -m benchmarks.gpu_step --params 3e9 --tokens 8x2048 --results gpu-step
    python -m benchmarks.gpu_step --plan offload half --peer checkpointed --system

Both runs of a comparison (`--plan`) are on the device at the same time: the planned one and the plain one must fit
together. The systems (`--system`) run one after the other, each alone, with gradients clipped by norm where they can.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.pairs import Comparison, compare, run_alone
from benchmarks.report import table, write_result
from benchmarks.step_overhead import parse_tokens
from benchmarks.subjects import NUM_LAYERS, Facts, PrecisionName, Step, Subject
from benchmarks.systems import SYSTEMS

PLANS: dict[str, dict[str, Any]] = {
    "resident": {"plan": "resident"},
    "offload": {"plan": "offload"},
    # The embedding and the first half of the blocks stay; what is streamed keeps its activations.
    "half": {"num_persistent_chunks": 1 + NUM_LAYERS // 2, "num_checkpoint_blocks": 0, "num_swap_blocks": 0},
}
TIMES = ("plan", "step / peer (95 %)", "tokens/s", "peer tokens/s", "largest difference of a loss")
MEMORY = ("plan", "peak", "peer's peak", "planned states", "peak beyond the plan")
ALONE = ("system", "clipped by norm", "tokens/s", "step", "peak", "largest difference of a loss")
CLIP = 1.0
TRANSFERS = ("plan", "uploaded per step", "downloaded per step", "uploads hidden", "prefetched")


def main(arguments: Sequence[str]) -> None:
    args = _parse(arguments)
    if not torch.cuda.is_available():
        sys.exit(
            "gpu_step measures a CUDA device and there is none. On a CPU run `python -m benchmarks.step_overhead`."
        )
    batch, sequence = args.tokens
    peer = Subject(
        name="peer",
        plan=None,
        checkpointed=args.peer == "checkpointed",
        num_params=args.params,
        batch=batch,
        sequence=sequence,
        steps=args.warmup + args.pairs,
        probed_steps=args.probed,
        accelerator="cuda",
        precision=args.precision,
    )
    comparisons = {}
    for name in args.plan:
        subject = replace(peer, name=name, plan=PLANS[name], checkpointed=False)
        comparisons[name] = compare(subject, peer, args.warmup, args.launches)
        print(f"{name}: {comparisons[name].wall}", flush=True)
    alone = {}
    for name in args.system:
        alone[name] = measure_alone(name, replace(peer, checkpointed=False, probed_steps=0), args.warmup)
        print(_alone(name, alone[name], None, batch * sequence), flush=True)
    text = (
        f"About {args.params / 1e6:.1f} million parameters, {batch} x {sequence} tokens, AdamW, {args.precision}; "
        f"the peer {args.peer}, {args.launches} x {args.pairs} pairs of steps.\n\n"
        f"{render(comparisons, batch * sequence, args)}\n\n{render_alone(alone, batch * sequence)}"
    )
    print(f"\n{text}")
    results = {
        "plans": {name: asdict(comparison) for name, comparison in comparisons.items()},
        "systems": {
            name: run if isinstance(run, str) else [asdict(part) for part in run[0]] for name, run in alone.items()
        },
    }
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.results:
        print(write_result(args.results, "benchmarks.gpu_step", arguments, results, text))


Alone = tuple[tuple[Step, ...], Facts] | str


def measure_alone(name: str, subject: Subject, warmup: int) -> Alone:
    """The steps and facts of one of `SYSTEMS`, or why there are none."""
    system = SYSTEMS[name]
    if not system.is_installed:
        return "not installed"
    try:
        return run_alone(replace(subject, name=name, system=name, clip=CLIP if system.clips else None), warmup)
    except RuntimeError:  # Out of memory, most likely: the message of the process is above.
        return "ended early"


def render_alone(runs: dict[str, Alone], tokens: int) -> str:
    """One row for each system; losses are set against those of the first run that clips and has any.

    Args:
        runs: By the name of the system.
        tokens: Tokens in a step.
    """
    clipped = (run for name, run in runs.items() if SYSTEMS[name].clips and not isinstance(run, str))
    first = next((steps for steps, _ in clipped), None)
    return table(ALONE, [_alone(name, run, first, tokens) for name, run in runs.items()])


def render(comparisons: dict[str, Comparison], tokens: int, args: argparse.Namespace) -> str:
    """Three tables: times, memory, transfers; of plans against the peer.

    Args:
        comparisons: By the name of the plan.
        tokens: Tokens in a step.
        args: How many steps `warmup`, `pairs` and `probed` were.
    """
    if not comparisons:
        return ""
    items = comparisons.items()
    steps = args.warmup + args.pairs + args.probed
    return "\n\n".join(
        (
            table(TIMES, [_times(name, comparison, tokens) for name, comparison in items]),
            table(MEMORY, [_memory(name, comparison.facts, comparison.peer_facts) for name, comparison in items]),
            table(TRANSFERS, [_transfers(name, comparison.facts, steps) for name, comparison in items]),
        )
    )


def _times(name: str, comparison: Comparison, tokens: int) -> list[str]:
    pairs = zip(comparison.steps, comparison.peer_steps, strict=True)
    difference = max(abs(step.loss - peer.loss) for step, peer in pairs)
    return [
        name,
        str(comparison.wall),
        _rate(comparison.steps, tokens),
        _rate(comparison.peer_steps, tokens),
        f"{difference:.2g}",
    ]


def _alone(name: str, run: Alone, first: Sequence[Step] | None, tokens: int) -> list[str]:
    clipped = "yes" if SYSTEMS[name].clips else "no"
    if isinstance(run, str):
        return [name, clipped, run, "-", "-", "-"]
    steps, facts = run
    seconds = statistics.median(step.wall_seconds for step in steps)
    difference = "-"
    if first is not None and SYSTEMS[name].clips:
        difference = f"{max(abs(step.loss - other.loss) for step, other in zip(steps, first, strict=True)):.2g}"
    return [name, clipped, _rate(steps, tokens), f"{seconds:.3g} s", _gib(facts.peak_bytes), difference]


def _memory(name: str, facts: Facts, peer: Facts) -> list[str]:
    assert facts.peak_bytes is not None
    assert facts.planned_bytes is not None
    beyond = facts.peak_bytes - facts.planned_bytes
    return [name, *map(_gib, (facts.peak_bytes, peer.peak_bytes, facts.planned_bytes, beyond))]


def _transfers(name: str, facts: Facts, steps: int) -> list[str]:
    counters = facts.counters
    hits, misses = counters["prefetch_hits"], counters["prefetch_misses"]
    return [
        name,
        _gib(counters["uploaded_bytes"] / steps),
        _gib(counters["downloaded_bytes"] / steps),
        "-" if facts.hidden_share is None else f"{facts.hidden_share:.1%}",
        f"{hits / (hits + misses):.1%}" if hits + misses else "-",
    ]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", nargs="*", choices=PLANS, default=list(PLANS), help="all by default")
    parser.add_argument("--system", nargs="*", choices=SYSTEMS, default=list(SYSTEMS), help="all by default")
    parser.add_argument("--peer", choices=("plain", "checkpointed"), default="plain", help="compared with what")
    parser.add_argument("--params", type=lambda text: int(float(text)), default=1_000_000_000, help="about, e.g. 1e9")
    parser.add_argument("--tokens", type=parse_tokens, default=(8, 1024), help="sequences x tokens, e.g. 8x1024")
    parser.add_argument("--precision", choices=get_args(PrecisionName), default="bf16-true", help="as in the Trainer")
    parser.add_argument("--pairs", type=int, default=15, help="timed pairs of each launch")
    parser.add_argument("--launches", type=int, default=2, help="how often both are started")
    parser.add_argument("--warmup", type=int, default=5, help="pairs of each launch before those")
    parser.add_argument("--probed", type=int, default=3, help="steps after those, in which transfers are traced")
    parser.add_argument("--json", type=Path, help="file for every single time")
    parser.add_argument("--results", help="name of a folder for benchmarks/results")
    args = parser.parse_args(arguments)
    if min(args.pairs, args.launches, args.params, args.probed, *args.tokens) < 1 or args.warmup < 0:
        parser.error("give positive numbers")
    return args


def _rate(steps: Sequence[Step], tokens: int) -> str:
    return f"{tokens / statistics.median(step.wall_seconds for step in steps):.0f}"


def _gib(nbytes: float | None) -> str:
    assert nbytes is not None
    return f"{nbytes / 2**30:.3f} GiB"


if __name__ == "__main__":
    main(sys.argv[1:])
