"""Reading, checking and dividing conversations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lightning_protrain.data.conversation import fingerprint, text_of
from lightning_protrain.data.sources.load import split_indices
from tests.data.conftest import conversation

GOOD = conversation("Why?", "Because.")


def test_the_fingerprint_changes_with_text_order_and_settings() -> None:
    other = conversation("Why?", "Because!")
    prints = [
        fingerprint([GOOD, other], size=1),
        fingerprint([other, GOOD], size=1),
        fingerprint([GOOD, GOOD], size=1),
        fingerprint([GOOD, other], size=2),
        fingerprint([GOOD], size=1),
    ]
    assert len(set(prints)) == len(prints)
    assert fingerprint([GOOD, other], size=1) == prints[0]


def test_the_fingerprint_sees_images() -> None:
    red, blue = Image.new("RGB", (2, 2), "red"), Image.new("RGB", (2, 2), "blue")
    prints = [fingerprint([{**GOOD, "images": [image]}]) for image in (b"1", b"2", "1.png", "2.png", red, blue)]
    assert len(set(prints)) == len(prints)
    assert fingerprint([{**GOOD, "images": [red.copy()]}]) == prints[4]


@pytest.mark.parametrize(
    ("content", "text"),
    [("a", "a"), ("", ""), ([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}], "ab")],
)
def test_the_text_of_a_message(content: Any, text: str) -> None:
    assert text_of({"role": "user", "content": content}) == text


@given(count=st.integers(2, 60), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**32))
def test_a_split_is_a_partition_in_order(count: int, fraction: float, seed: int) -> None:
    parts = split_indices(count, fraction, seed)
    train, val = [part.tolist() for part in parts]
    assert sorted(train + val) == list(range(count))
    assert all(part == sorted(part) and part for part in (train, val))
    assert abs(len(val) - count * fraction) <= 1
    assert [part.tolist() for part in split_indices(count, fraction, seed)] == [train, val]
    assert all(part.dtype == np.int64 for part in parts)


def test_another_seed_chooses_other_rows() -> None:
    assert split_indices(100, 0.2, 0)[1].tolist() != split_indices(100, 0.2, 1)[1].tolist()


def test_one_row_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match=r"1 conversation cannot be divided.*Give at least 2"):
        split_indices(1, 0.5, 0)
