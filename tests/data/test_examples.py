"""An encoded conversation: what it counts and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.encoded_rows import encoded


def test_the_first_token_is_never_counted() -> None:
    assert encoded(4, trained=np.array([True, False, True, True])).num_trained == 2
    assert encoded(1, trained=np.array([True])).num_trained == 0


def test_untrained_keeps_everything_else() -> None:
    example = encoded(9, images=2)
    assert example.untrained().num_trained == 0
    assert example.untrained().images == 2
    assert np.array_equal(example.untrained().input_ids, example.input_ids)
    assert example.num_trained


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trained": np.ones(3, bool)}, r"trained has the shape \(3,\), input_ids \(4,\)"),
        ({"weights": np.ones(5, np.float32)}, r"weights has the shape \(5,\)"),
        ({"borders": np.zeros(2, np.int32)}, r"borders of shape \(2,\): give"),
        ({"input_ids": np.zeros((4, 1), np.int32), "trained": np.zeros((4, 1), bool)}, "give .tokens."),
    ],
)
def test_shapes_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoded(4, **options)
