"""State that only one rank has returns to its rank, for any number of ranks; random states continue."""

from __future__ import annotations

import io
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.checkpoint.rank_state import (
    capture,
    derive_state,
    rescale,
    restore,
    state_of_rank,
    without_duplicates,
)
from tests.checkpoint.contents import same

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


class TwoGPUs:
    """The random states of two GPUs; what names no device means the first."""

    def __init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(number) for number in range(2)]

    def get_rng_state(self, device: Any = "cuda") -> torch.Tensor:
        return self.generators[torch.device(device).index or 0].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = "cuda") -> None:
        self.generators[torch.device(device).index or 0].set_state(state)

    def draw(self) -> list[list[float]]:
        return [torch.rand(5, generator=generator).tolist() for generator in self.generators]


@pytest.mark.parametrize("index", [0, 1])
def test_the_gpu_of_a_rank_goes_on_where_it_was_and_no_other_changes(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, device = TwoGPUs(), torch.device("cuda", index)
    monkeypatch.setattr(torch, "get_device_module", lambda asked: gpus)
    state = capture(device)
    first, second = gpus.draw(), gpus.draw()
    assert restore(state, device) == []
    again, other = gpus.draw(), gpus.draw()
    assert again[index] == first[index]
    assert again[1 - index] not in (first[1 - index], second[1 - index])
    assert other[index] == second[index]


def _state(number: int) -> dict[str, Any]:
    torch.manual_seed(number)
    return {"random": capture(CPU), "data": {"positions": [number]}, "others": {"a": b"%d" % number}}


def _loops(trained: int, ends: bool = False) -> dict[str, Any]:
    counts = {"ready": trained, "completed": trained - 1, "started": trained, "processed": trained}
    total = {name: value + 100 for name, value in counts.items()}
    return {"epoch_loop.batch_progress": {"current": counts, "total": total, "is_last_batch": ends}, "x": 1}


def test_the_same_number_of_ranks_has_its_own() -> None:
    states = [_state(0), _state(1)]
    for rank in range(2):
        assert state_of_rank(states, rank, 2, CPU) is states[rank]
    # A rank reads no other file than its own.
    assert state_of_rank([None, states[1]], 1, 2, CPU) is states[1]


@pytest.mark.parametrize("now", [1, 3, 5])
def test_another_number_of_ranks_has_what_there_is_and_new_numbers(now: int) -> None:
    states = [_state(0), _state(1)]
    new: list[Any] = [state_of_rank(states, rank, now, CPU) for rank in range(now)]
    for rank, own in enumerate(new):
        assert own["data"] == {"positions": [rank % 2], "moved": True}
        assert own["others"] == (states[rank]["others"] if rank < 2 else {})
        if rank < 2:
            assert own["random"] is states[rank]["random"]
        else:
            others = [state["random"] for state in (*new[:rank], *states)]
            assert not any(same(own["random"][name], each[name]) for each in others for name in ("torch", "python"))
            assert not any(same(own["random"]["numpy"][1], each["numpy"][1]) for each in others)
    again: list[Any] = [state_of_rank(states, rank, now, CPU) for rank in range(now)]
    assert same([each["random"] for each in again], [each["random"] for each in new])


@pytest.mark.parametrize("states", [[], [None], [5]])
def test_where_there_is_nothing_there_is_nothing(states: list[Any]) -> None:
    assert state_of_rank(states, 0, 1, CPU) is None


def test_what_is_like_that_of_rank_0_is_kept_once() -> None:
    states = [{"random": 1, "others": {"a": b"1", "b": b"2"}}, {"random": 2, "others": {"a": b"1", "b": b"3"}}]
    assert without_duplicates(states) == [{"random": 1, "others": {}}, {"random": 2, "others": {"b": b"3"}}]


@pytest.mark.parametrize(
    ("trained", "before", "now", "place", "exact"), [(4, 2, 1, 8, True), (8, 1, 4, 2, True), (5, 1, 2, 2, False)]
)
def test_as_many_samples_are_trained_as_were(trained: int, before: int, now: int, place: int, exact: bool) -> None:
    loops = _loops(trained)
    moved, is_exact = rescale(loops, before, now)
    assert is_exact is exact
    assert moved == _loops(place)
    assert loops == _loops(trained)


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 8), st.integers(1, 8))
def test_an_epoch_that_was_over_is_over(samples: int, batch_size: int, before: int, now: int) -> None:
    def batches(ranks: int) -> int:
        return math.ceil(math.ceil(samples / ranks) / batch_size)

    moved, exact = rescale(_loops(batches(before), ends=True), before, now)
    assert exact
    assert moved == _loops(math.ceil(batches(before) * before / now), ends=True)
    assert moved["epoch_loop.batch_progress"]["current"]["ready"] >= batches(now)
