"""The clock: cases worked out by hand, and the properties that a search builds on."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner.activity import Columns
from lightning_protrain.planner.clock import begin, simulate
from lightning_protrain.planner.training import Training

WAYS = [("off", False), ("backward", False), ("forward", False), ("off", True), ("forward", True)]
WAITS = ("wait_forward", "wait_backward")
PER_PLAN = ("device_step",)


def columns(num_positions: int = 2, **given_fields: Any) -> Columns:
    """One column: nothing but what is given, a number for all positions or one for each."""
    full: dict[str, Any] = {}
    for field in fields(Columns):
        value = given_fields.pop(field.name, -1 if field.name in WAITS else 0)
        if field.name in PER_PLAN:
            full[field.name] = np.array([float(value)])
        else:
            kind = np.int64 if field.name in WAITS else np.float64
            full[field.name] = np.array(np.broadcast_to(value, num_positions), dtype=kind)[:, None]
    assert not given_fields
    return Columns(**full)


# Behind a computation of 2, and nothing waits for them.
LANDS = {"download": 3, "landed": 5, "carry": 3, "ready": 5, "ready_behind": 3, "drain": -9}
LANDS_ONE = {"download": 1, "landed": 3, "carry": 1, "ready": 3, "ready_behind": 1, "drain": -9}
STREAMED = {
    "compute_forward": 1, "compute_backward": 2, "upload_forward": 3, "late_forward": 3, "upload_backward": (3, 0),
    "late_backward": (3, 0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("given_fields", "training", "seconds"),
    [
        # 1. Computation alone: (1 + 1) + (2 + 2).
        ({"compute_forward": 1, "compute_backward": 2}, Training(), 6),
        # 2. What is recomputed, twice 1, and the device's step, 4.
        ({"compute_forward": 1, "compute_backward": 2, "recompute": 1, "device_step": 4}, Training(), 12),
        # 3. Two buffers. Forward: uploads end at 3 and 6, so computation at 4 and 7. Backward: the last chunk is there,
        #    2; the first comes meanwhile, till 3, and is computed with till 5. 7 + 5.
        (STREAMED, Training(), 12),
        # 4. One buffer. Forward: upload till 3, computation till 4, upload till 7, till 8. Backward: computation till
        #    2, upload till 5, computation till 7. 8 + 7.
        ({**STREAMED, "wait_forward": (-1, 0), "wait_backward": (1, -1)}, Training(), 15),
        # 5. Half of the second chunk comes early: forward upload till 3, the early part till 4.5, computation till 4,
        #    the late part till 6, computation till 7. 7 + 7.
        (
            {**STREAMED, "late_forward": (3, 1.5), "wait_forward": (-1, 0), "wait_backward": (1, -1)},
            Training(),
            14,
        ),
        # 6. Downloads of 3 behind 2 of computation, and steps of 1 on the host: computation 2, 4; downloads 5 (their
        #    last part, 3, begins at 2) and 8; steps at once 10; then forward, 2.
        ({"compute_forward": 1, "compute_backward": 2, **LANDS, "host_step": 1},
         Training(), 12),
        # 7. The same behind backward: steps end at 6 and 9. Forward begins at 4; its second chunk is there at 6 and its
        #    first at 9: computation 10, 11.
        ({"compute_forward": 1, "compute_backward": 2, **LANDS, "host_step": 1},
         Training("backward"), 11),
        # 8. The same behind forward: gradients are known at 8, steps end at 9 and 10: computation 10, 11.
        ({"compute_forward": 1, "compute_backward": 2, **LANDS, "host_step": 1},
         Training("forward"), 11),
        # 9. Clipped: norms of 1 end at 6 and 9; scaling and steps take 2 each: 11, 13: computation 12, 14.
        ({"compute_forward": 1, "compute_backward": 2, **LANDS, "host_step": 1,
          "norm": 1, "scale": 1}, Training("forward", clips=True), 14),
        # 10. Clipped at once: known at 8, norms 2, scaling and steps 4, forward 2.
        ({"compute_forward": 1, "compute_backward": 2, **LANDS, "host_step": 1,
          "norm": 1, "scale": 1}, Training("off", clips=True), 16),
        # 11. Nothing may be held: computation till 2 waits for its download till 5; then 7 and 10, and forward, 2.
        ({"compute_forward": 1, "compute_backward": 2, **LANDS, "stall": 3}, Training(), 12),
        # 12. Three micro-batches of forwards of 2. Downloads of 1 end at 3 and 5, with which the first backward ends;
        #     in the others the worker adds what has landed, 3 to 4 and 5 to 6.
        ({"compute_forward": 1, "compute_backward": 2, **LANDS_ONE, "add": 1},
         Training(accumulate=3), 6 + 5 + 6 + 6),
        # 13. What swaps: the first block's activations leave in 3 from 0 on, the third position waits for them: 4. They
        #     come back from when the second one's backward begins, at 2, till 5, with which backward ends. 4 + 5 + 1.
        ({"num_positions": 3, "compute_forward": 1, "compute_backward": 2, "swap_out": (3, 0, 0), "swap_in": (4, 0, 0)},
         Training(), 4 + 6),
        # 14. Uploads begin with the forward, not where the first unit that needs one begins: the second position's, of
        #     3, runs beside the first one's computation of 2. Forward 3 + 2.
        ({"compute_forward": 2, "upload_forward": (0, 3), "late_forward": (0, 3)}, Training(), 5),
        # 15. So do those of several chunks, of 1 each at the second and third position, beside the first one's 2.
        ({"num_positions": 3, "compute_forward": 2, "upload_forward": (0, 1, 1), "late_forward": (0, 1, 1)},
         Training(), 6),
        # 16. Behind the host's steps, which overlap forward: downloads of 1 end at 3 and 5, and gradients are known;
        #     steps of 1 end at 6 and 7. Uploads, of 1 each, then end at 7 and 8; computation, of 2 each, at 9 and 11.
        ({"compute_forward": 2, "compute_backward": 2, **LANDS_ONE,
          "host_step": 1, "upload_forward": 1, "late_forward": 1, "tail": 1}, Training("forward"), 11),
        # 17. The second computation ends 1 after the first downloads have, at the earliest: computation 2, downloads 5,
        #     computation 6, downloads 8; forward 2 + 2.
        ({"compute_forward": 2, "compute_backward": 2, **LANDS, "drain": 1}, Training(), 12),
        # 18. It ends 4 after them: computation 9, behind the last downloads; forward 2 + 2.
        ({"compute_forward": 2, "compute_backward": 2, **LANDS, "drain": 4}, Training(), 13),
        # 19. Downloads end at 5 and 8, and the worker has something to do 1 before: steps of 2 till 6 and 9 run behind
        #     backward; uploads are there at 9 and 6, and computation, of 1 each, at 10 and 11.
        ({"compute_forward": 1, "compute_backward": 2, **LANDS, "host_step": 2, "ready": 4, "ready_behind": 2},
         Training("backward"), 11),
        # 20. As 16, with two chunks at each position: the first half of each upload runs beside the second one's step.
        #     Forward begins at 5; uploads end at 6.5 and 7.5; computation, of 2 each, at 8.5 and 10.5.
        ({"compute_forward": 2, "compute_backward": 2, **LANDS_ONE,
          "host_step": 1, "upload_forward": 1, "late_forward": 1, "tail": 0.5}, Training("forward"), 10.5),
    ],
)  # fmt: skip
def test_cases_by_hand(given_fields: dict[str, Any], training: Training, seconds: float) -> None:
    assert simulate(columns(**given_fields), training) == [seconds]


# --- properties -------------------------------------------------------------------------------------------------------

trainings = st.builds(
    lambda way, accumulate: Training(way[0], accumulate, way[1]), st.sampled_from(WAYS), st.integers(1, 4)
)  # fmt: skip


@st.composite
def many_columns(draw: st.DrawFn) -> Columns:
    """A few plans at a few positions; durations are often zero."""
    num_positions, num_columns = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    generator = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    full: dict[str, Any] = {}
    for field in fields(Columns):
        shape = (num_columns,) if field.name in PER_PLAN else (num_positions, num_columns)
        full[field.name] = generator.exponential(size=shape) * (generator.random(shape) < 0.6)
    positions = np.arange(num_positions)[:, None]
    draws = generator.random((num_positions, num_columns))
    full["wait_forward"] = (draws * (positions + 1)).astype(np.int64) - 1
    later = positions + 1 + (draws * (num_positions - positions)).astype(np.int64)
    full["wait_backward"] = np.where(later >= num_positions, -1, later)
    for way in ("forward", "backward"):
        full[f"late_{way}"] = full[f"upload_{way}"] * generator.random((num_positions, num_columns))
    return Columns(**full)


@given(many_columns(), trainings, st.data())
def test_the_result_never_falls_when_an_entry_gets_worse(
    some: Columns, training: Training, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([field.name for field in fields(Columns)]))
    array = getattr(some, name).copy()
    where = tuple(data.draw(st.integers(0, size - 1)) for size in array.shape)
    if name == "wait_forward":
        array[where] = data.draw(st.integers(array[where], where[0] - 1))
    elif name == "wait_backward":
        least, most = where[0] + 1, len(array) - 1 if array[where] < 0 else array[where]
        array[where] = data.draw(st.integers(least, most)) if least <= most else array[where]
    else:
        array[where] += data.draw(st.floats(0, 5))
    assert (simulate(replace(some, **{name: array}), training) >= simulate(some, training)).all()


@given(many_columns(), trainings)
def test_many_columns_at_once_are_each_alone(some: Columns, training: Training) -> None:
    together = simulate(some, training)
    for index in range(len(together)):
        alone = Columns(**{field.name: getattr(some, field.name)[..., index : index + 1] for field in fields(Columns)})
        assert simulate(alone, training) == together[index]


@given(many_columns(), st.booleans(), st.data())
def test_a_backward_bounds_the_step(some: Columns, clips: bool, data: st.DataObject) -> None:
    training = Training("forward", clips=clips)
    begun, computes = begin(some, training), np.cumsum(some.compute_forward[::-1], axis=0)[::-1]
    last = np.array(data.draw(st.lists(st.integers(0, len(computes) - 1))), dtype=np.int64)
    for column, seconds in enumerate(simulate(some, training)):
        least = begun.least(computes[:, column], last, some.tail[last])
        assert least[column] <= seconds * (1 + 1e-12)
    chosen = np.arange(0, some.tail.shape[1], 2)
    of_these = Columns(**{field.name: getattr(some, field.name)[..., chosen] for field in fields(Columns)})
    assert (begun.end(of_these, chosen)[0] == simulate(some, training)[chosen]).all()


def test_a_step_ends_behind_the_last_step_of_the_host() -> None:
    some = columns(
        **{**LANDS_ONE, "compute_forward": 2, "compute_backward": 2, "host_step": 1, "upload_forward": 1, "tail": 1}
    )
    begun = begin(some, Training("forward"))
    assert (
        begun.least(np.array([4.0, 2.0]), np.array([0]), np.ones((1, 1))) == simulate(some, Training("forward")) == [11]
    )


def test_what_is_alike_in_all_columns_is_broadcast() -> None:
    one = columns(3, **{**STREAMED, "upload_backward": 3, "late_backward": 3})
    steps = replace(one, device_step=np.arange(4.0), host_step=np.ones((1, 1)))
    assert simulate(steps, Training()).shape == (4,)
