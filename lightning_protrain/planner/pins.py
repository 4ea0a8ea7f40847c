"""What a user pins against what the model has and what else is pinned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_protrain.planner.knobs import Knobs
from lightning_protrain.planner.problem import Packing
from lightning_protrain.planner.space import Space


def check_pins(packings: Sequence[Packing], knobs: Knobs) -> None:
    """Refuses knobs that no plan can have, however much memory there is.

    Args:
        packings: The model in chunks of all sizes that are allowed.
        knobs: What is pinned; `check_counts` comes first.

    Raises:
        ValueError: More chunks than there are, more swapped blocks than have something to swap, fewer chunk buffers
            than the model needs, or as many kept blocks with offloaded chunks as no other decision leaves.
    """
    resident, swap, buffers = knobs.num_persistent_chunks or 0, knobs.num_swap_blocks or 0, knobs.num_chunk_buffers
    count = max(len(packing.chunks) for packing in packings)
    if resident > count:
        raise ValueError(f"num_persistent_chunks={resident}: this model has {count} chunks.")
    packings = [packing for packing in packings if len(packing.chunks) >= resident]
    places = max(len(packing.places) for packing in packings)
    if swap > places:
        raise ValueError(
            f"num_swap_blocks={swap}: only {places} blocks of this model have activations that could be swapped. Use "
            "num_checkpoint_blocks, or name other blocks with `blocks`."
        )
    if buffers is not None:
        # The more chunks are resident, the fewer buffers are needed.
        most = resident if knobs.num_persistent_chunks is not None else -1
        least = min(int(packing.footprint.buffers.least[most]) for packing in packings)
        if buffers < least:
            raise ValueError(f"num_chunk_buffers={buffers}: this model needs at least {least} with these knobs.")
    if knobs.num_keep_offloaded_blocks is not None:
        _check_keep(packings, knobs)


def _check_keep(packings: Sequence[Packing], knobs: Knobs) -> None:
    """Refuses a number of kept blocks with offloaded chunks that cannot be."""
    possible: set[int] = set()
    for packing in packings:
        low, high = Space(packing, knobs).roots()
        for swap, least, first in low.T.tolist():
            _, most, last = high[:, low[0] == swap][:, 0].tolist()
            offloaded = np.arange(first, last + 1)
            for num_checkpoint in range(least, most + 1):
                counts = np.array([[swap], [num_checkpoint]])
                possible.update(
                    np.unique(packing.keeps(counts[0], counts[1], len(packing.chunks) - offloaded)).tolist()
                )
                if knobs.num_keep_offloaded_blocks in possible:
                    return
    others = [f"{name}={getattr(knobs, name)}" for name in knobs.given if name != "num_keep_offloaded_blocks"]
    num_keep = knobs.num_keep_offloaded_blocks
    if not others:
        most = max(possible)
        raise ValueError(
            f"num_keep_offloaded_blocks={num_keep}: at most {most} blocks have offloaded chunks and can keep their "
            "activations."
        )
    raise ValueError(
        f"num_keep_offloaded_blocks={num_keep} contradicts {' and '.join(others)}, which leave "
        f"{min(possible)} to {max(possible)} blocks with offloaded chunks that keep their activations. Leave one of "
        "them out."
    )
