"""Seconds of sums over ranks and of chunks in parts, by hand, and figures that are none."""

from __future__ import annotations

import math

import pytest

from lightning_protrain.planner.network import DDP_BUCKET, Network, Route

ALL, OWNER, PEERS = Route(1.0, 100.0), Route(0.5, 200.0), Route(2.0, 50.0)


@pytest.mark.parametrize(
    ("network", "seconds"),
    [
        # 100 elements of 4 bytes in 3 parameters, to all ranks.
        (Network(ALL), 1 + 400 / 100),
        (Network(ALL, element=2), 1 + 200 / 100),
        # To two owners, in as many sums; to four, of whom three have one.
        (Network(ALL, OWNER, owners=2), 2 * 0.5 + 400 / 200),
        (Network(ALL, OWNER, owners=4), 3 * 0.5 + 400 / 200),
        # Then each owner's half among the nodes.
        (Network(ALL, OWNER, PEERS, owners=2), 2 * 0.5 + 400 / 200 + 2 + 200 / 50),
        (Network(ALL, OWNER, PEERS, owners=2, element=2), 2 * 0.5 + 200 / 200 + 2 + 100 / 50),
    ],
    ids=str,
)
def test_sums_of_a_chunk_by_hand(network: Network, seconds: float) -> None:
    assert network.sum_of_chunks(1, network.calls(3), 100, 400) == pytest.approx(seconds)


def test_resident_gradients_go_to_all_in_buckets() -> None:
    fast = Network(Route(1.0, DDP_BUCKET), OWNER, owners=2)
    assert fast.sum_of_resident(2 * DDP_BUCKET) == pytest.approx(2 + 2)


@pytest.mark.parametrize("figures", [(0.0, 0.0), (0.0, -1.0), (-1.0, 1.0), (math.nan, 1.0), (0.0, math.inf)], ids=str)
def test_what_is_no_figure_is_refused(figures: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="measure it again"):
        Route(*figures)


def test_rates_are_said() -> None:
    said = Network(Route(1e-5, 25e9), Route(2e-6, 1.5e9), owners=2).describe()
    assert said == "to all 25 GB/s behind 10 us, to an owner 1.5 GB/s behind 2 us"
