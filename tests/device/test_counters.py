"""What has been moved is counted up, and the most that was there is kept."""

from __future__ import annotations

from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.device.device import TransferCounters


def test_all_begins_at_zero() -> None:
    assert not any(asdict(TransferCounters()).values())


@given(st.lists(st.integers(0, 1000), max_size=30))
def test_the_peak_is_the_most_that_was_live(sizes: list[int]) -> None:
    counters, levels = TransferCounters(), [0]
    for index, size in enumerate(sizes):
        change = size if index % 2 == 0 else -min(size, levels[-1])
        counters.add_live(change)
        levels.append(levels[-1] + change)
    assert (counters.live_bytes, counters.peak_live_bytes) == (levels[-1], max(levels))
