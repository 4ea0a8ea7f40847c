"""Truncation against a search over all lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.data.batches.encode import Dropped, Encoded, cut_before, truncate
from tests.support.encoded_rows import encoded

_RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=8)


def _borders(ranges: list[tuple[int, int]]) -> np.ndarray:
    return np.array([(first, first + size) for first, size in ranges], np.int32).reshape(-1, 2)


@given(_RANGES, st.integers(0, 40))
def test_the_cut_is_the_longest_that_halves_nothing(ranges: list[tuple[int, int]], length: int) -> None:
    borders = _borders(ranges)
    whole = [n for n in range(length + 1) if not any(first < n < stop for first, stop in borders)]
    assert cut_before(borders, length) == max(whole)


@given(_RANGES, st.integers(1, 50), st.integers(0, 5))
def test_what_is_left_is_a_prefix(ranges: list[tuple[int, int]], max_length: int, seed: int) -> None:
    example = encoded(40, seed, borders=_borders(ranges), weights=np.arange(40, dtype=np.float32))
    left = truncate(example, max_length)
    if isinstance(left, Encoded):
        assert len(left) == 40 if max_length >= 40 else len(left) == cut_before(example.borders, max_length)
        assert np.array_equal(left.input_ids, example.input_ids[: len(left)])
        assert np.array_equal(left.trained, example.trained[: len(left)])
        assert np.array_equal(left.weights, example.weights[: len(left)])
        assert (left.borders[:, 1] <= len(left)).all()
        assert left.num_trained
    else:
        assert left is Dropped.NOTHING_TRAINED
        assert not example.trained[1 : cut_before(example.borders, max_length)].any()


def test_a_marker_at_the_cut_goes_whole() -> None:
    borders = np.array([[2, 4], [7, 10]], np.int32)
    example = encoded(12, borders=borders, trained=np.ones(12, bool))
    assert [len(truncate(example, n)) for n in (4, 5, 7, 8, 9, 10, 11, 12)] == [4, 5, 7, 7, 7, 10, 11, 12]


def test_short_rows_are_left_alone_even_untrained() -> None:
    example = encoded(5).untrained()
    assert truncate(example, 5) is example
    assert len(truncate(example, 3)) == 3, "there was nothing to lose"
    assert truncate(encoded(5, borders=np.array([[0, 5]], np.int32)).untrained(), 3) is Dropped.NOTHING_TRAINED


@pytest.mark.parametrize(("images_stop", "expected"), [(6, 8), (8, 8), (9, Dropped.IMAGE_CUT), (0, Dropped.IMAGE_CUT)])
def test_an_image_is_never_lost(images_stop: int, expected: object) -> None:
    extras = {"token_type_ids": torch.ones(1, 12, dtype=torch.int64), "pixel_values": torch.ones(1, 3, 4, 4)}
    example = encoded(12, images=1, images_stop=images_stop, extras=extras, trained=np.ones(12, bool))
    left = truncate(example, 8)
    if isinstance(expected, Dropped):
        assert left is expected
    else:
        assert len(left) == expected
        assert left.extras["token_type_ids"].shape == (1, expected)
        assert left.extras["pixel_values"] is extras["pixel_values"]


def test_no_room_is_refused() -> None:
    with pytest.raises(ValueError, match="max_length=0: give at least 1"):
        truncate(encoded(3), 0)
