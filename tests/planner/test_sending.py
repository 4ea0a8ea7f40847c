"""Backwards that end with averages, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_protrain.planner.averages import Averages
from lightning_protrain.planner.clock import simulate
from lightning_protrain.planner.training import Training
from tests.planner.test_clock import columns

NOTHING: dict[str, Any] = {
    "lead": 0, "sends": True, "early": 0, "late": 0, "down_early": 0, "down_late": 0, "worked": 0, "resident": 0,
    "older": 0, "held": 99, "least": 0, "waits": True,
}  # fmt: skip
# Two positions that compute backward for 2 each; the later one is the first in backward.
TWO = {"compute_backward": 2}


def averages(**given: Any) -> Averages:
    """One plan at two positions; a number counts for both."""
    kinds = {"sends": np.bool_, "waits": np.bool_}
    each = {
        name: np.array(np.broadcast_to(value, 2), dtype=kinds.get(name, np.float64))[:, None]
        for name, value in (NOTHING | given).items()
    }
    return Averages(**each)


@pytest.mark.parametrize(
    ("given", "sent", "training", "seconds"),
    [
        # 1. Sums of 1 hide behind computation but for the last: computed at 4, sent till 5.
        (TWO, {"late": 1}, Training(), 5),
        # 2. Sums of 3, the first from 2 till 5, the second till 8; downloads of 1 end at 6 and 9.
        (TWO, {"late": 3, "down_late": 1}, Training(), 9),
        # 3. The first gradient of a position comes after 1 of its 2: sent from 3 till 6, and till 9.
        (TWO, {"late": 3, "lead": 1}, Training(), 9),
        # 4. The device waits for all sums of a position but the last: from 2 till 5, computes till 7, then the second
        #    ones till 10; the last ones of each take nothing.
        (TWO, {"early": 3}, Training(), 10),
        # 6. Resident gradients: 3 from 2 till 5, and till 8, then the step of the device, 1.
        ({**TWO, "device_step": 1}, {"resident": 3}, Training(), 9),
        # 7. The host steps for 2 behind each download, which end at 6 and 9.
        ({**TWO, "host_step": 2}, {"late": 3, "down_late": 1}, Training("backward"), 11),
        # 8. Three micro-batches: two backwards of 4 without any sum.
        (TWO, {"late": 3, "down_late": 1}, Training(accumulate=3), 8 + 9),
        # 9. What they have left is uploaded first: 3 from 0 till 3; the next one till 6, and computation with it.
        (TWO, {"late": 1, "older": 3}, Training(), 7),
        # 10. More downloads under way than may be held: 4 from 2 to 6, of which 1 may run beside computation.
        (TWO, {"early": (0, 1e-9), "down_early": (0, 4), "held": 1}, Training(), 7),
        # 11. Sent at the end only: computed at 4, both sums till 10.
        (TWO, {"late": (0, 6), "sends": False}, Training(), 10),
        # 12. In a set the device does not wait as in 4: it computes till 4, sums go from 2 till 5 and till 8.
        (TWO, {"early": 3, "waits": False}, Training(), 8),
        # 13. At least 7 is sent from 2 on.
        (TWO, {"late": 1, "least": (0, 7), "waits": False}, Training(), 9),
    ],
)
def test_cases_by_hand(given: dict[str, Any], sent: dict[str, Any], training: Training, seconds: float) -> None:
    found = simulate(columns(**given), training, averages=averages(**sent))
    assert found == pytest.approx([seconds])


def test_where_nothing_runs_beside_anything_sums_are_added() -> None:
    alone = simulate(columns(**TWO), Training(accumulate=2), asynchronous=False)
    sent = averages(early=1, late=2, resident=(3, 0))
    assert simulate(columns(**TWO), Training(accumulate=2), False, sent) == pytest.approx(alone + 9)


def test_nothing_to_send_takes_no_time() -> None:
    for overlap in ("off", "backward", "forward"):
        training = Training(overlap)  # type: ignore[arg-type]
        assert simulate(columns(**TWO), training, averages=averages()) == simulate(columns(**TWO), training)
