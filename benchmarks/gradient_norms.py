"""Time to take the norm of a bf16 gradient in the dtype of its weight: cast into kept memory, or into fresh memory.

    python -m benchmarks.gradient_norms
    python -m benchmarks.gradient_norms --elements 45e6 --repeats 9

One thread; the two ways take turns, and the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_protrain.runtime.optim.step import NormScratch
from lightning_protrain.runtime.shadow import InPlaceGrad


def main(arguments: Sequence[str]) -> None:
    """Print the seconds of both ways and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=lambda text: int(float(text)), default=45_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    parameter = nn.Parameter(torch.empty(args.elements))
    gradient = InPlaceGrad(parameter, torch.randn(args.elements).bfloat16())
    scratch = NormScratch()
    ways: dict[str, Callable[[], Tensor]] = {
        "kept": lambda: scratch.norm(gradient),
        "fresh": lambda: torch.linalg.vector_norm(gradient.cast()),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    norms = {name: way() for name, way in ways.items()}
    assert torch.equal(*norms.values())
    for _ in range(args.repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    kept, fresh = (statistics.median(seconds[name]) for name in ways)
    print(f"{args.elements:,} elements: kept {1e3 * kept:.1f} ms, fresh {1e3 * fresh:.1f} ms, ratio {kept / fresh:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
