"""A layout and a profile whose memory can be added up by hand."""

from __future__ import annotations

from lightning_protrain.profiler.records import Backward, ModelProfile, Segment, UnitCall
from tests.planner.layouts import forward_of, transformer

LAYOUT = transformer(num_blocks=2, numel=1024, vocabulary=4096, tied=False)


# Bytes of weights: embedding 16384, each block 2 x 4096, norm 256, head 16384. A block saves 1000 K and makes 100 K.
K, BLOCK, EDGE, NORM, BUFFERS = 1000, 8192, 16384, 256, 96


def block(index: int) -> Segment:
    live, names = 1100 * K * index + 100 * K, (f"layers.{index}.up", f"layers.{index}.down")
    forward = forward_of(live, live + 1200 * K, 1000 * K)
    backward = Backward(live + 1200 * K, live + 1500 * K, peak_with_gradients=live + 1500 * K + 4096)
    return Segment(f"layers.{index}", forward, backward, 100 * K, gradients=names)


SEGMENTS = (
    Segment("embed", forward_of(0, 100 * K), Backward(100 * K, 200 * K), gradients=("embed.weight",)),
    block(0),
    block(1),
    Segment("head", forward_of(2300 * K, 2400 * K), Backward(2400 * K, 2500 * K), gradients=("head.weight",)),
)


CALLS = tuple(UnitCall(f"layers.{at}", 1000 * K, (), 1000 * K) for at in range(2))


PROFILE = ModelProfile(CALLS, (), 2000 * K, 0, SEGMENTS)
