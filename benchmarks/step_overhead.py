"""Benchmark of a training step with the strategy on the CPU, relative to plain Lightning in the same run.

    python -m benchmarks.step_overhead --case resident --pairs 16
    python -m benchmarks.step_overhead --results step-overhead

On the CPU, device and host have the same memory, so streaming has only costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.pairs import Comparison, compare
from benchmarks.report import table, write_result
from benchmarks.subjects import Subject

HEADER = ("case", "step / peer (95 %)", "wanted", "met", "CPU time / peer (95 %)", "peer step", "same losses")


@dataclass(frozen=True)
class Case:
    """A comparison and its target.

    Attributes:
        plan: Arguments of `ProTrainStrategy`; None compares plain Lightning with itself, to show the accuracy.
        checkpointed: True if the peer checkpoints its blocks.
        wanted: Maximum of the upper limit of the interval.
        hooked: True if the strategy may attach hooks to the model.
    """

    plan: dict[str, Any] | None
    checkpointed: bool
    wanted: float
    hooked: bool


CASES = {
    "plain": Case(None, checkpointed=False, wanted=1.03, hooked=False),
    "resident": Case({"plan": "resident"}, checkpointed=False, wanted=1.03, hooked=False),
    "offload": Case({"plan": "offload"}, checkpointed=True, wanted=1.15, hooked=True),
    "keep": Case(
        {"num_persistent_chunks": 0, "num_checkpoint_blocks": 0, "num_swap_blocks": 0},
        checkpointed=False,
        wanted=1.15,
        hooked=True,
    ),
}


def main(arguments: Sequence[str]) -> None:
    args = _parse(arguments)
    batch, sequence = args.tokens
    common = Subject(
        name="peer",
        plan=None,
        num_params=args.params,
        batch=batch,
        sequence=sequence,
        steps=args.warmup + args.pairs,
        threads=args.threads,
    )
    rows, results = [], {}
    for name in args.case:
        case = CASES[name]
        comparison = compare(
            replace(common, name=name, plan=case.plan),
            replace(common, checkpointed=case.checkpointed),
            args.warmup,
            args.launches,
        )
        _check(name, case, comparison)
        results[name] = _as_json(case, comparison)
        rows.append(_row(name, case, comparison))
        print(table(HEADER, rows[-1:]), flush=True)
    shape = f"{comparison.facts.num_params / 1e6:.1f} million parameters, {batch} x {sequence} tokens, AdamW, fp32, "
    pairs = f"{args.launches} x {args.pairs} pairs of steps"
    text = f"{shape}{args.threads} thread(s), {pairs}.\n\n{table(HEADER, rows)}"
    print(f"\n{text}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.results:
        print(write_result(args.results, "benchmarks.step_overhead", arguments, {"cases": results}, text))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument(
        "--params",
        type=lambda text: int(float(text)),
        default=100_000_000,
        help="approximate number of parameters, e.g. 1e8",
    )
    parser.add_argument("--tokens", type=parse_tokens, default=(4, 128), help="sequences x tokens, e.g. 4x128")
    parser.add_argument("--pairs", type=int, default=6, help="timed pairs of each launch")
    parser.add_argument("--launches", type=int, default=3, help="number of launches")
    parser.add_argument("--warmup", type=int, default=2, help="pairs for warm-up in each launch")
    parser.add_argument("--threads", type=int, default=1, help="number of PyTorch's threads")
    parser.add_argument("--json", type=Path, help="file for all times")
    parser.add_argument("--results", help="name of the folder in benchmarks/results")
    args = parser.parse_args(arguments)
    if min(args.pairs, args.launches, args.threads, args.params, *args.tokens) < 1 or args.warmup < 0:
        parser.error("give positive numbers")
    return args


def parse_tokens(text: str) -> tuple[int, int]:
    """Parse text such as `"4x128"` to (sequences, tokens of a sequence)."""
    batch, _, sequence = text.partition("x")
    return int(batch), int(sequence)


def _check(name: str, case: Case, comparison: Comparison) -> None:
    hooks = comparison.facts.num_hooks
    if bool(hooks) is not case.hooked:
        raise RuntimeError(f"{name}: {hooks} hooks, {'some' if case.hooked else 'none'} expected.")
    if not comparison.same_losses:
        raise RuntimeError(f"{name}: the losses differ from those of plain Lightning; no time means anything.")


def _row(name: str, case: Case, comparison: Comparison) -> list[str]:
    met = "yes" if comparison.wall.upper <= case.wanted else "no"
    peer = statistics.median(step.wall_seconds for step in comparison.peer_steps)
    return [
        name,
        str(comparison.wall),
        f"<= {case.wanted}",
        met,
        str(comparison.cpu),
        f"{peer:.3g} s",
        "yes" if comparison.same_losses else "no",
    ]


def _as_json(case: Case, comparison: Comparison) -> dict[str, Any]:
    ratios = {"wall": asdict(comparison.wall), "cpu": asdict(comparison.cpu), "wanted": case.wanted}
    return {**ratios, "same_losses": comparison.same_losses, **asdict(comparison)}


if __name__ == "__main__":
    main(sys.argv[1:])
