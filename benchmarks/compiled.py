"""Benchmark of compiled blocks on the CPU: compilation time, and time of steps relative to blocks without compilation.

    TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) python -m benchmarks.compiled --results compiled
    python -m benchmarks.compiled --params 1e7 --pairs 6

Both runs alternate step by step. The first step of each includes compilation, and does not count for the ratio. The
compiler caches its results: with an empty cache, the first row compiles everything, and the second row only little.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.pairs import compare, median_ratio
from benchmarks.report import table, write_result
from benchmarks.subjects import Subject

HEADER = ("blocks", "compiler", "step / not compiled (95 %)", "step, not compiled", "losses differ by at most")
PLANS = {"resident": "resident", "streamed": "offload"}


def main(arguments: Sequence[str]) -> None:
    """Print a row for resident and for streamed blocks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=lambda text: int(float(text)), default=30_000_000)
    parser.add_argument("--pairs", type=int, default=12, help="timed pairs of steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", help="name of the folder in benchmarks/results")
    args = parser.parse_args(arguments)
    rows = []
    for name, plan in PLANS.items():
        common = Subject(name, {"plan": plan}, num_params=args.params, steps=args.pairs + 1, threads=args.threads)
        found = compare(replace(common, compiled=True), common, warmup=0)
        (first, *steps), (peer_first, *peers) = found.steps, found.peer_steps
        ratio = median_ratio([a.wall_seconds / b.wall_seconds for a, b in zip(steps, peers, strict=True)])
        differ = max(abs(a.loss / b.loss - 1) for a, b in zip(found.steps, found.peer_steps, strict=True))
        peer = statistics.median(step.wall_seconds for step in peers)
        seconds = first.wall_seconds - peer_first.wall_seconds
        rows.append((name, f"{seconds:.0f} s", str(ratio), f"{peer:.3g} s", f"{differ:.0e}"))
    text = table(HEADER, rows)
    print(text)
    if args.results:
        print(write_result(args.results, "benchmarks.compiled", arguments, {"rows": rows}, text))


if __name__ == "__main__":
    main(sys.argv[1:])
