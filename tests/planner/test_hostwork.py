"""The host's work chunk by chunk: by hand, and against doing one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner.hostwork import Gradients, Steps
from lightning_protrain.planner.training import Training
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.simulation.device import Rates, SimulatedDevice

OFF, BACKWARD, FORWARD = Training(), Training("backward"), Training("forward")
CLIPPED = Training("forward", clips=True)


def machine(**rates: float) -> HardwareProfile:
    """One byte per second of the link and of the host's memory, one element per second of its steps."""
    hardware = SimulatedDevice(Rates()).hardware_profile(("float32",), 1, 1)
    plain = dict.fromkeys(("upload", "upload_beside", "host_memory", "host_step"), 1.0)
    return replace(hardware, **{**plain, **rates})


def integers(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


def gradients(low: bool = False) -> Gradients:
    """Of chunk 2 one gradient at each of two positions, between them one of chunk 1."""
    own = integers(40, 80, 120)
    return Gradients(
        integers(3, 3, 1), integers(2, 1, 2), own // 4, own, own // 2 if low else own, np.full(3, low, dtype=np.bool_)
    )


@pytest.mark.parametrize(
    ("training", "low", "works"),
    [
        (OFF, False, [0, 0, 0]),
        (OFF, True, [60, 120, 180]),  # Each is read and written.
        (FORWARD, False, [0, 0, 0]),
        (BACKWARD, False, [0, 20, 40]),  # A chunk when its last gradient is there: 10 + 30.
        (BACKWARD, True, [60, 140, 220]),
        (CLIPPED, False, [0, 80, 160]),
        (replace(OFF, accumulate=2), False, [120, 240, 360]),
        (replace(OFF, accumulate=2), True, [100, 200, 300]),
        (replace(BACKWARD, accumulate=3), False, [120, 260, 400]),
    ],
)
def test_work_of_gradients(training: Training, low: bool, works: list[int]) -> None:
    assert gradients(low).works(machine(), training).tolist() == works


def test_what_is_of_one_chunk_at_a_position_comes_with_the_last() -> None:
    found = replace(gradients(), chunks=integers(1, 1, 1)).works(machine(), replace(BACKWARD, accumulate=2))
    assert found.tolist() == [0, 360, 420]


def test_no_gradients_no_work() -> None:
    nothing = Gradients(*(integers() for _ in range(5)), np.zeros(0, dtype=np.bool_))
    assert nothing.works(machine(), BACKWARD).tolist() == []
    assert nothing.steps(2).positions.tolist() == [-1, -1]


def test_steps_of_chunks() -> None:
    steps = gradients().steps(4)
    assert steps.positions.tolist() == [-1, 3, 1, -1]
    assert steps.numel.tolist() == [0, 20, 40, 0]
    assert steps.own.tolist() == [0, 80, 160, 0]


@pytest.mark.parametrize(
    ("numel", "tail"),
    [
        ((0, 0, 0), 9.0),  # All at once: all is uploaded then.
        ((9, 1, 1), 7.0),  # The first has been uploaded while the second and the third were stepped.
        ((1, 9, 9), 4.0),  # So have the first two: only the third is left.
        ((9, 9, 1), 6.0),  # The second has to wait for its step.
    ],
)
def test_tails_by_hand(numel: tuple[int, ...], tail: float) -> None:
    """Chunks of 2, 3 and 4 bytes."""
    steps = Steps(integers(5, 5, 5), integers(*numel), integers(0, 0, 0))
    found = steps.tails(integers(5, 5, 5), integers(0, 1, 2), integers(2, 3, 4), machine(), FORWARD)
    assert found[0, 0] == tail
    assert found[0, 2:].tolist() == [4.0, 0.0]


def test_scaling_is_work_and_a_link_beside_downloads_is_slower() -> None:
    steps = Steps(integers(5, 5), integers(1, 1), integers(4, 4))
    options = integers(5, 5), integers(0, 1), integers(8, 2), machine(upload_beside=0.5)
    assert steps.tails(*options, FORWARD)[:, 0].tolist() == [9.0, 19.0]
    assert steps.tails(*options, CLIPPED)[:, 0].tolist() == [5.0, 15.0]


def test_what_is_stepped_elsewhere_is_not_waited_for() -> None:
    """A chunk whose last gradient lands at another position hides nothing here."""
    options = integers(5, 5), integers(0, 1), integers(2, 3), machine(), FORWARD
    assert Steps(integers(5, 5), integers(9, 9), integers(0, 0)).tails(*options)[0, 0] == 3.0
    assert Steps(integers(5, 0), integers(9, 9), integers(0, 0)).tails(*options)[0, 0] == 5.0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.integers(0, 9)), max_size=12), st.integers(0, 3))
def test_uploads_follow_steps(chunks: list[tuple[int, int, int]], skipped: int) -> None:
    """One after the other, for each position, also without its first chunks."""
    chunks.sort(key=lambda chunk: chunk[0])
    positions, nbytes, numel = (integers(*(chunk[place] for chunk in chunks)) for place in range(3))
    own = np.arange(len(chunks))
    found = Steps(positions, numel, np.zeros_like(numel)).tails(positions, own, nbytes, machine(), FORWARD)[0]
    for position in set(positions.tolist()):
        at = np.flatnonzero(positions == position)[skipped:].tolist()
        stepped = uploaded = 0.0
        for chunk in at:
            stepped += float(numel[chunk])
            uploaded = max(uploaded, stepped) + float(nbytes[chunk])
        if at:
            assert found[at[0]] == pytest.approx(uploaded - stepped)
