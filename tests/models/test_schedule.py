"""The learning rate has the shape that it is said to have."""

from __future__ import annotations

import pytest

from lightning_protrain.models.module import learning_rate_factor


@pytest.mark.parametrize("num_steps", [None, 10])
@pytest.mark.parametrize("warmup", [0, 1, 4, 10])
def test_learning_rate_rises_to_the_peak_and_falls_to_the_floor(num_steps, warmup):
    factors = [learning_rate_factor(step, warmup, num_steps, 0.2) for step in range(30)]
    peak = max(warmup - 1, 0)
    assert factors[peak] == 1.0
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] == (1.0 if num_steps is None else pytest.approx(0.2))
    assert learning_rate_factor(warmup + 5, warmup, warmup + 10, 0.2) == pytest.approx(0.6)  # half-way down
