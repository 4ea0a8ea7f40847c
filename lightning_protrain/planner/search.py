"""The fastest plan that fits: the optimum of `simulate` under `ActivationCurve` (paper, section 3.3).

[Note: Search]
A candidate is (swapped blocks, checkpointed blocks, offloaded chunks); the first chunks are resident, the policies are
laid out as in [Note: Layout of policies]. Of the chunk buffers it has as many as fit, or those that are pinned.
A box of candidates is bounded by what has the best of all: the fewest checkpoints and offloaded chunks for the time,
the most of both for the memory, and so for the buffers. Swapped blocks do not checkpoint, so which blocks do depends on
how many swap. A box over several numbers of them has for the time what the fewest swap, and recomputes what all its
candidates recompute; for the memory it has the least of all these numbers. So swapped blocks, checkpoints and offloaded
chunks, which replace one another at nearly the same price, are divided together.
Memory need not rise with resident chunks (the last ones take their buffers with them), so tables of the least from some
number on stand for it. Boxes are cut where with the most checkpoints nothing fits: see [Note: Fewest offloaded]. Among
candidates of equal time, the one with fewer swapped blocks, then checkpoints, then offloaded chunks is taken, and the
first of the sizes of chunks: where everything fits and costs nothing, all stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_protrain.planner.branch import minimize
from lightning_protrain.planner.knobs import Knobs
from lightning_protrain.planner.pins import check_pins
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.policies import check_counts
from lightning_protrain.planner.problem import Packing, Unpacked
from lightning_protrain.planner.problem import Problem as Problem
from lightning_protrain.planner.shortage import NoFeasiblePlan as NoFeasiblePlan
from lightning_protrain.planner.shortage import refuse
from lightning_protrain.planner.space import Space

# More than the arrays of a round take together.
KEPT_BYTES = 16 << 20


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        plan: The fastest plan that fits.
        seconds: Of one of its steps.
        evaluations: How many candidates and sets of them were evaluated.
        rounds: In how many batches.
    """

    plan: Plan
    seconds: float
    evaluations: int
    rounds: int


def search(problem: Problem, knobs: Knobs) -> Plan:
    """Finds the fastest plan that fits, see [Note: Search].

    Args:
        problem: The model, the machine and the budgets.
        knobs: Decisions that are made already.

    Raises:
        ValueError: A knob contradicts the model or another knob.
        NoFeasiblePlan: No plan fits.
    """
    return find(problem, knobs).plan


def find(problem: Problem, knobs: Knobs) -> Found:
    """The same, and what it took.

    Raises:
        ValueError: As `search`.
    """
    _keep_freed_memory()
    spaces = [Space(packing, knobs) for packing in packings(problem, knobs)]
    seconds, best, evaluations, rounds = np.inf, None, 0, 0
    for space in spaces:
        low, high, below, tried = space.begin(seconds)
        found = minimize(space.seconds, space.corner, low, high, below, space.batch, space.cut, space.weights)
        evaluations, rounds = evaluations + tried + found.evaluations, rounds + (tried > 0) + found.rounds
        if found.point:
            seconds, best = found.value, (space, found.point)
    if best is None:
        refuse(problem, knobs, spaces)
    space, point = best
    return Found(space.plan(point), seconds, evaluations, rounds)


def _keep_freed_memory() -> None:
    """Has the C library use memory again that it would give back to the system after each round.

    A block of its own that is freed raises the thresholds of glibc to its size and twice that (mallopt(3)); whoever has
    loaded a model has freed such blocks before. Nothing is written to this one. Else a fifth of a search are page
    faults.
    """
    np.empty(KEPT_BYTES, dtype=np.uint8)


def packings(problem: Problem, knobs: Knobs) -> list[Packing]:
    """The model in chunks of all sizes that the knobs allow, each way of packing it once.

    Raises:
        ValueError: A knob contradicts the model or another knob.
    """
    sizes = problem.chunk_bytes if knobs.chunk_bytes is None else (knobs.chunk_bytes,)
    check_counts(problem.layout, knobs.num_swap_blocks or 0, knobs.num_checkpoint_blocks or 0)
    found: list[Packing] = []
    unpacked = Unpacked(problem, knobs.num_swap_blocks, knobs.leave_policies)
    for size in sizes:
        packing = Packing(problem, size, knobs.num_swap_blocks, unpacked)
        if all(packing.chunks != other.chunks for other in found):
            found.append(packing)
    check_pins(found, knobs)
    return [packing for packing in found if len(packing.chunks) >= (knobs.num_persistent_chunks or 0)]
