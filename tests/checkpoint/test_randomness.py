"""What was captured is drawn again, from a state that loads with weights_only."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_protrain.checkpoint.rank_state import capture, derive_state, restore

CPU = torch.device("cpu")


def _draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]  # noqa: NPY002


@pytest.mark.parametrize("before", [0, 1, 2, 700])
def test_every_generator_goes_on_where_it_was(before: int) -> None:
    for _ in range(before):
        _draws()
    file = io.BytesIO()
    torch.save(capture(CPU), file)
    expected = _draws() + _draws()
    _draws()
    file.seek(0)
    assert restore(torch.load(file, weights_only=True), CPU) == []
    assert _draws() + _draws() == expected


@pytest.mark.parametrize(
    "change",
    [{"python": None}, {"python": (3, (1, 2), None)}, {"numpy": (1,)}, {"torch": torch.zeros(3)}, {"torch": 5}],
)
def test_what_is_no_state_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be restored"):
        restore({**capture(CPU), **change}, CPU)
    with pytest.raises(ValueError, match="cannot be restored"):
        restore({}, CPU)


def test_a_device_that_the_state_does_not_have_is_named() -> None:
    assert restore(capture(CPU), torch.device("cuda", 0)) == ["cuda"]


def test_numbers_of_a_new_rank_are_its_own_every_time() -> None:
    torch.manual_seed(3)
    state = capture(CPU)
    drawn = []
    for number in (1, 2, 1):
        assert restore(derive_state(state, number, CPU), CPU) == []
        drawn.append(_draws())
    restore(state, CPU)
    assert drawn[0] == drawn[2] != drawn[1]
    assert not {*drawn[0]} & ({*drawn[1]} | {*_draws()})


@pytest.mark.cuda
def test_the_device_goes_on_where_it_was() -> None:
    device = torch.device("cuda", 0)
    state = capture(device)
    expected = torch.rand(5, device=device)
    assert restore(state, device) == []
    assert torch.equal(torch.rand(5, device=device), expected)
