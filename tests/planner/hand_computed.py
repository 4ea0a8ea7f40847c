"""A layout and a profile whose memory can be added up by hand."""

from __future__ import annotations

from lightning_protrain.profiler.records import ModelProfile, Pass, Segment, UnitCall
from tests.planner.layouts import transformer

LAYOUT = transformer(num_blocks=2, numel=1024, vocabulary=4096, tied=False)


# Bytes of weights: embedding 16384, each block 2 x 4096, norm 256, head 16384. A block saves 1000 K and makes 100 K.
K, BLOCK, EDGE, NORM, BUFFERS = 1000, 8192, 16384, 256, 96


def block(index: int) -> Segment:
    live, names = 1100 * K * index + 100 * K, (f"layers.{index}.up", f"layers.{index}.down")
    forward, backward = Pass(live, live + 1200 * K), Pass(live + 1200 * K, live + 1500 * K)
    with_gradients, saving = backward.peak_bytes + 4096, 1000 * K
    return Segment(f"layers.{index}", forward, backward, with_gradients, saving, saving, 100 * K, gradients=names)


SEGMENTS = (
    Segment("embed", Pass(0, 100 * K), Pass(100 * K, 200 * K), 200 * K, gradients=("embed.weight",)),
    block(0),
    block(1),
    Segment("head", Pass(2300 * K, 2400 * K), Pass(2400 * K, 2500 * K), 2500 * K, gradients=("head.weight",)),
)


CALLS = tuple(UnitCall(f"layers.{at}", 1000 * K, (), 1000 * K) for at in range(2))


PROFILE = ModelProfile(CALLS, (), 2000 * K, 0, SEGMENTS)
