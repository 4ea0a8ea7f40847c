"""What a plan takes on the host while it trains, and while the model is placed.

[Note: Sharers]
Ranks of a machine that share one copy of what is offloaded (*sharers*) need one budget, that of the machine. Weights,
their copies of lower precision and optimizer states are there once. Swapped activations are each rank's own. Where
micro-batches are accumulated, so are gradients, which stay with their rank until the last one, and those that wait to
be added. Averages come to their owners only, cast already, into a block of each rank for each chunk: the same bytes
once, in so many blocks of whole pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil
from mmap import PAGESIZE

from lightning_protrain.planner.memory import sums_of
from lightning_protrain.planner.plan import ChunkPlan, Plan, unit_bytes
from lightning_protrain.planner.prediction import OTHER_RANKS
from lightning_protrain.profiler.records import ModelLayout


def host_terms(
    layout: ModelLayout,
    plan: Plan,
    state_bytes: float,
    accumulate: int = 1,
    asynchronous: bool = True,
    sharers: int = 1,
) -> dict[str, int]:
    """Bytes of host memory by purpose at the end of a step, in whole pages where it is given in pages.

    - parameters: of offloaded chunks; low_precision_copies: what is streamed in place of them.
    - gradients: of all offloaded chunks at one time, but for those that lie in the memory of copies.
    - optimizer_states: of their parameters.
    - landing_gradients: gradients that wait to be added to older ones, or to be cast: those of two of the largest
      units, and the chunk that is landing. A block of memory is used again only for one of the same size. Those in the
      memory of copies are cast for their norms, or for steps that take no tiles, at most those of a chunk at one time.
    - swapped_activations: what one call of every block swaps.
    - other_ranks: what the other sharers have of their own, see [Note: Sharers]; missing where there are none.

    Args:
        layout: The model.
        plan: Made for it.
        state_bytes: Bytes of optimizer states (and master copies) for each trainable element.
        accumulate: Micro-batches in a step.
        asynchronous: Whether copies run beside computation.
        sharers: Ranks of the machine that share one copy.
    """
    offloaded = [chunk for chunk in plan.chunks if not chunk.resident]
    trainable = [chunk for chunk in offloaded if chunk.trainable]
    elements = sum(sums_of(layout, chunk).numel for chunk in trainable)
    casts = sharers == 1
    lends = layout.lends_copies and sharers == 1
    lent = [chunk for chunk in trainable if lends and chunk.streamed_dtype is not None]
    kept = [chunk for chunk in trainable if not lends or chunk.streamed_dtype is None]
    waiting = [chunk.nbytes for chunk in kept if accumulate > 1 or (casts and chunk.streamed_dtype is not None)]
    pending = 2 * max(unit_bytes(offloaded), default=0) if asynchronous else 0
    terms = {
        "parameters": sum(_weights(layout, chunk) for chunk in offloaded),
        "low_precision_copies": sum(_pages(chunk.nbytes) for chunk in offloaded if chunk.streamed_dtype is not None),
        "gradients": sum(_pages(_own_bytes(layout, chunk)) for chunk in kept),
        "optimizer_states": ceil(state_bytes * elements),
        "landing_gradients": _pool(waiting, pending) + max((_own_bytes(layout, chunk) for chunk in lent), default=0),
        "swapped_activations": sum(block.swap_bytes for block in plan.blocks),
    }
    if sharers > 1:
        own = terms["landing_gradients"] + terms["swapped_activations"] + (terms["gradients"] if accumulate > 1 else 0)
        averages = 0 if accumulate > 1 else sum(min(sharers, len(chunk.parameters)) - 1 for chunk in trainable)
        terms[OTHER_RANKS] = (sharers - 1) * own + averages * PAGESIZE
    return terms


def loading_terms(layout: ModelLayout, plan: Plan, asynchronous: bool) -> dict[str, int]:
    """The same while the model is placed: all its weights come from the host, chunk by chunk into their own memory."""
    offloaded = [chunk for chunk in plan.chunks if not chunk.resident]
    terms = host_terms(layout, plan, 0.0, asynchronous=asynchronous)
    placed = terms["parameters"] + max((_pages(_own_bytes(layout, chunk)) for chunk in offloaded), default=0)
    weights = sum(info.nbytes for info in layout.parameters)
    resident = weights - sum(sums_of(layout, chunk).nbytes for chunk in offloaded)
    return {
        "parameters": max(weights, placed if asynchronous else placed + resident),
        "low_precision_copies": terms["low_precision_copies"],
    }


def _pool(sizes: Iterable[int], pending: int) -> int:
    """Bytes of blocks, of which those of one size may be wanted for `pending` bytes and one more at one time."""
    return sum(_pages(size) * min(count, pending // max(size, 1) + 2) for size, count in Counter(sizes).items())


def _weights(layout: ModelLayout, chunk: ChunkPlan) -> int:
    if chunk.streamed_dtype is None:
        return _pages(chunk.nbytes)
    return sums_of(layout, chunk).nbytes


def _own_bytes(layout: ModelLayout, chunk: ChunkPlan) -> int:
    return sums_of(layout, chunk).own_bytes


def _pages(nbytes: int) -> int:
    return max(-(-nbytes // PAGESIZE), 1) * PAGESIZE
