"""Seconds of sums over ranks and of chunks in parts, by hand, and figures that are none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_protrain.planner.network import DDP_BUCKET, Gathering, Network, Route, incoming
from lightning_protrain.profiler.machine import HardwareProfile
from tests.machines import CPU

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


def test_new_weights_go_one_after_the_other_from_each_rank() -> None:
    network = Network(ALL, OWNER, PEERS, owners=2, element=2, exchange=Route(0.25, 40.0))
    assert network.exchange_of(4, 400) == pytest.approx(2 * 0.25 + 200 / 40)
    assert network.without_owners().exchange_of(4, 400) == 0.0
    assert "new weights to other machines" in network.describe()


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


# A chunk of 1200 bytes: up in 12 seconds by one rank, and in 15 beside downloads.
MACHINE = replace(CPU, upload=100.0, upload_beside=80.0, download=200.0, download_beside=150.0, asynchronous=True)
CHUNK = 1200


@pytest.mark.parametrize(
    ("gathering", "seconds", "beside"),
    [
        (None, 12.0, 15.0),
        # Half of it up, half from the other: the longer of both.
        (Gathering(2, 1000.0), 6.0, 7.5),
        (Gathering(2, 90.0), 600 / 90, 7.5),
        (Gathering(2, 50.0), 12.0, 12.0),
        # A quarter up, three from others.
        (Gathering(4, 1000.0), 3.0, 3.75),
        (Gathering(4, 300.0), 3.0, 3.75),
        (Gathering(4, 100.0), 9.0, 9.0),
        # As fast as to the host.
        (Gathering(3), 4.0, 5.0),
        (Gathering(8), 1050 / 200, 1050 / 200),
    ],
    ids=str,
)
def test_chunks_in_parts_by_hand(gathering: Gathering | None, seconds: float, beside: float) -> None:
    found = incoming(MACHINE, gathering)
    assert CHUNK / found.upload == pytest.approx(seconds)
    assert CHUNK / found.upload_beside == pytest.approx(beside)
    assert replace(found, upload=100.0, upload_beside=80.0) == MACHINE


def test_where_nothing_runs_beside_anything_parts_are_uploaded_and_then_gathered() -> None:
    machine: HardwareProfile = replace(MACHINE, asynchronous=False)
    assert CHUNK / incoming(machine, Gathering(4, 100.0)).upload == pytest.approx(3.0 + 9.0)


@pytest.mark.parametrize("figures", [(1, 1.0), (0, None), (2, 0.0), (2, math.nan), (2, math.inf), (2, -1.0)], ids=str)
def test_what_is_no_gathering_is_refused(figures: tuple[int, float | None]) -> None:
    with pytest.raises(ValueError, match=r"fewer than two ranks: [01]\.|measure it again"):
        Gathering(*figures)
