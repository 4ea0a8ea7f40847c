from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.planner.recomputation import WATCHED, Durations, again_seconds, durations, selective_seconds
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.profiler.records import OperationCost, Pass, Segment

CPU = HardwareProfile("CPU", *(1.0,) * 6, {"float32": 10.0}, 4.0, *(1.0,) * 3, 1, 1, asynchronous=False)
GPU = replace(CPU, asynchronous=True)
FORWARD = (OperationCost(100, 8, "float32", 3), OperationCost(0, 8, "float32", 2))
SEGMENT = Segment("block", Pass(operations=FORWARD, again_operations=FORWARD[1:]))


def test_products_are_not_computed_again() -> None:
    assert again_seconds(SEGMENT, BlockPolicy.CHECKPOINT, GPU) == 3 * 10.0 + 2 * 2.0
    assert again_seconds(SEGMENT, BlockPolicy.SELECTIVE, GPU) == 2 * 2.0
    assert again_seconds(SEGMENT, BlockPolicy.KEEP, GPU) == again_seconds(SEGMENT, BlockPolicy.SWAP, GPU) == 0.0


def test_a_device_that_waits_for_python_waits_for_its_looks() -> None:
    assert selective_seconds(SEGMENT, CPU) == pytest.approx(4.0 + 2 * 5 * WATCHED)


@pytest.mark.parametrize(
    ("speed", "seconds"),
    [
        (1.0, 4.0),  # Python is hidden behind both runs,
        (4.0 / (2.5 * WATCHED), 5 * WATCHED),  # behind the first run only,
        (34.0 / (2.5 * WATCHED), 5 * WATCHED + 2.5 * WATCHED),  # behind half of the first run.
    ],
)
def test_a_device_that_computes_beside_python_waits_for_what_is_longer(speed: float, seconds: float) -> None:
    faster = replace(GPU, flops={"float32": 10.0 * speed}, memory=4.0 * speed)
    assert selective_seconds(SEGMENT, faster) == pytest.approx(seconds)


def test_segments_that_share_their_operations_are_summed_once() -> None:
    other = replace(SEGMENT, backward=Pass(operations=FORWARD[:1]))
    whole = Durations(34.0, 34.0, 4.0, 0.0)
    assert durations([SEGMENT, replace(SEGMENT, unit="next"), other], GPU) == [
        whole,
        whole,
        whole._replace(backward=30.0),
    ]


def test_segments_of_the_same_tuples_but_other_passes_are_told_apart() -> None:
    swapped = replace(SEGMENT, forward=Pass(operations=FORWARD[1:], again_operations=FORWARD))
    assert durations([SEGMENT, swapped], GPU)[1] == Durations(4.0, 4.0, 34.0, 0.0)
