"""Columns as arrays of one shape."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from lightning_protrain.planner.activity import Backward, Columns, Forward, broadcast


def test_columns_are_a_forward_and_a_backward() -> None:
    names = [{field.name for field in fields(kind)} for kind in (Forward, Backward, Columns)]
    assert not names[0] & names[1]
    assert names[0] | names[1] == names[2]


@pytest.mark.parametrize("kind", [Forward, Backward, Columns])
def test_all_arrays_get_the_same_shape(kind: type[Forward | Backward]) -> None:
    shapes = [(3, 1), (1, 4), (1, 1), (3, 4)]
    arrays = {field.name: np.ones(shapes[index % 4]) for index, field in enumerate(fields(kind))}
    if "device_step" in arrays:
        arrays["device_step"] = np.ones(1)
    found = vars(broadcast(kind(**arrays)))
    assert {name: values.shape for name, values in found.items()} == {
        name: (4,) if name == "device_step" else (3, 4) for name in arrays
    }
    whole = [name for name, values in arrays.items() if values.shape == (3, 4)]
    assert all(found[name] is arrays[name] for name in whole)


def test_arrays_that_do_not_go_together_are_refused() -> None:
    arrays = {field.name: np.ones((3, 4)) for field in fields(Forward)}
    with pytest.raises(ValueError, match="shape"):
        broadcast(Forward(**{**arrays, "tail": np.ones((2, 4))}))
