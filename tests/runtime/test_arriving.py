"""Both ways in which chunks come from several ranks stand for the fence of an upload."""

from __future__ import annotations

from lightning_protrain.runtime.arriving import Arriving
from lightning_protrain.runtime.parts import Arrival
from lightning_protrain.runtime.row_gathers import RowArrival


def test_arrivals_are_of_one_kind_and_nobody_has_abandoned_them_at_first() -> None:
    assert issubclass(Arrival, Arriving)
    assert issubclass(RowArrival, Arriving)
    assert not Arriving.abandoned
