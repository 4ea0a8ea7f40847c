"""The time of a step by cases worked out by hand, what comes when, and the virtual clock of the runtime."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner import step_time as clock
from lightning_protrain.planner.problem import WATCHED, Durations, Training, durations, selective_seconds
from lightning_protrain.planner.step_time import (
    StepTime,
    _ChunkStep,
    _Gradients,
    _Host,
    _Position,
    _Sends,
    _Sent,
    step_time,
    uploads,
)
from lightning_protrain.profiler.records import Forward, HardwareProfile, OperationCost, Segment
from tests.planner.virtual import CHECKPOINT, KEEP, SWAP, Case, measure, plan_of, problem_of, profile_of

# A link that carries one byte a second, and two chunks of 3 bytes.
SIZES = [3, 3, 3]


def position(forward: float = 1, backward: float = 2, **given: Any) -> _Position:
    return _Position(forward, backward, **given)


def plain(number: int = 2, **given: Any) -> list[_Position]:
    return [position(**given) for _ in range(number)]


def streamed(num_buffers: int) -> list[_Position]:
    """Two positions with a chunk each: with two buffers the second one is still there when backward begins."""
    alone = num_buffers == 1
    return [
        position(uploads_forward=[(0, -1)], uploads_backward=[(0, 1 if alone else -1)]),
        position(uploads_forward=[(1, 0 if alone else -1)]),
    ]


def seconds(
    positions: list[_Position],
    training: Training = Training(),  # noqa: B008
    download: float = 0,
    step: float = 0,
    norm: float = 0,
    scale: float = 0,
    add: float = 0,
    device_step: float = 0,
    waits: tuple[int, ...] = (-1, -1),
    sizes: list[int] = SIZES,
    network: _Sends | None = None,
    leads: tuple[float, ...] | None = None,
) -> float:
    """Seconds of a step in which each of two positions computes a gradient of its chunk at the end of its backward."""
    gradients = _Gradients()
    if download:
        for index, at in reversed(list(enumerate(positions))):
            at.gradients = range(len(gradients.computed), len(gradients.computed) + 1)
            gradients.places.append(index)
            gradients.computed.append(at.compute_backward)
            gradients.stepped.append(index if training.works_in_backward and not training.clips else -1)
        number = len(positions)
        gradients.download, gradients.waits = [download] * number, list(waits)
        gradients.cast, gradients.add = [0.0] * number, [add] * number
        behind = norm if training.clips else step
        gradients.update = [behind if training.works_in_backward else 0.0] * number
    steps = [_ChunkStep(index, index, step, scale, norm) for index in range(len(positions))] if step else []
    lead = leads if leads is not None else (1.0,) * len(positions)
    one = SimpleNamespace(
        problem=SimpleNamespace(training=training, gradients=[[("", part)] for part in lead]),
        positions=positions,
        gradients=gradients,
        steps=steps,
        sizes=sizes,
        host=_Host(step=step * len(steps), norm=norm * len(steps), scale=scale * len(steps)),
        network=network,
        device_step=device_step,
        log=clock._NoLog(),
    )
    return clock._beside(one)  # type: ignore[arg-type]


def comes(*chunks: int) -> list[tuple[int, int]]:
    return [(chunk, -1) for chunk in chunks]


@pytest.mark.parametrize(
    ("positions", "given", "expected"),
    [
        # 1. Computation alone: (1 + 1) + (2 + 2).
        (plain(), {}, 6),
        # 2. What is recomputed, twice 1, and the device's step, 4.
        (plain(recompute=1), {"device_step": 4}, 12),
        # 3. Two buffers. Forward: uploads end at 3 and 6, so computation at 4 and 7. Backward: the last chunk is there,
        #    2; the first comes meanwhile, till 3, and is computed with till 5. 7 + 5.
        (streamed(2), {}, 12),
        # 4. One buffer. Forward: upload till 3, computation till 4, upload till 7, till 8. Backward: computation till
        #    2, upload till 5, computation till 7. 8 + 7.
        (streamed(1), {}, 15),
        # 5. Downloads of 3 behind 2 of computation, and steps of 1 on the host: computation 2, 4; downloads 5 and 8;
        #    steps at once 10; then forward, 2.
        (plain(), {"download": 3, "step": 1}, 12),
        # 6. The same behind backward: steps end at 6 and 9. Forward begins at 4; its first chunk is there at 9:
        #    computation 10, 11.
        (
            [position(uploads_forward=comes(0)), position(uploads_forward=comes(1))],
            {"training": Training("backward"), "download": 3, "step": 1, "sizes": [0, 0]},
            11,
        ),
        # 7. The same behind forward: gradients are known at 8, steps end at 9 and 10: computation 10, 11.
        (
            [position(uploads_forward=comes(0)), position(uploads_forward=comes(1))],
            {"training": Training("forward"), "download": 3, "step": 1, "sizes": [0, 0]},
            11,
        ),
        # 8. Clipped: norms of 1 end at 6 and 9; scaling and steps take 2 each: 11, 13: computation 12, 14.
        (
            [position(uploads_forward=comes(0)), position(uploads_forward=comes(1))],
            {"training": Training("forward", clips=True), "download": 3, "step": 1, "norm": 1, "scale": 1,
             "sizes": [0, 0]},
            14,
        ),
        # 9. Clipped at once: known at 8, norms 2, scaling and steps 4, forward 2.
        (plain(), {"training": Training("off", clips=True), "download": 3, "step": 1, "norm": 1, "scale": 1}, 16),
        # 10. The second gradient waits for the first one's download: computed at 4, it goes from 5 till 8. Forward 2.
        (plain(), {"download": 3, "waits": (-1, 0)}, 10),
        # 11. With an optimizer step of the device of 4 that wait counts: from 5 till 9. Forward 2.
        (plain(), {"download": 3, "waits": (-1, 0), "device_step": 4}, 11),
        # 12. Three micro-batches of forwards of 2. Downloads of 1 end at 3 and 5, with which the first backward ends;
        #     in the others the worker adds what has landed, 3 to 4 and 5 to 6.
        (plain(), {"training": Training(accumulate=3), "download": 1, "add": 1}, 6 + 5 + 6 + 6),
        # 13. What swaps: the first block's activations leave in 3 from 0 on, the third position waits for them: 4. They
        #     come back from when the second one's backward begins, at 2, till 6, with which backward ends. 4 + 6.
        ([position(swap_out=3, swap_in=4), position(), position()], {}, 10),
        #     Inputs are needed before the recomputation of 1: they are back at 6, and backward ends at 9. 4 + 9.
        ([position(recompute=1, swap_out=3, inputs_in=4), position(), position()], {}, 13),
        # 14. Uploads begin with the forward, not where the first unit that needs one begins: the second position's, of
        #     3, runs beside the first one's computation of 2. Forward 3 + 2.
        ([position(2, 0), position(2, 0, uploads_forward=comes(1))], {}, 5),
        # 15. So do those of several chunks, of 1 each at the second and third position, beside the first one's 2.
        (
            [position(2, 0), position(2, 0, uploads_forward=comes(1)), position(2, 0, uploads_forward=comes(2))],
            {"sizes": [1, 1, 1]},
            6,
        ),
        # 16. Behind the host's steps, which overlap forward: downloads of 1 end at 3 and 5, and gradients are known;
        #     steps of 1 end at 6 and 7. Uploads, of 1 each, then end at 7 and 8; computation, of 2 each, at 9 and 11.
        (
            [position(2, 2, uploads_forward=comes(0)), position(2, 2, uploads_forward=comes(1))],
            {"training": Training("forward"), "download": 1, "step": 1, "sizes": [1, 1]},
            11,
        ),
    ],
)  # fmt: skip
def test_cases_by_hand(positions: list[_Position], given: dict[str, Any], expected: float) -> None:
    assert seconds([replace(at) for at in positions], **given) == pytest.approx(expected)


def sends(*, held: float = 99, **given: Any) -> _Sends:
    """Return the traffic of two positions; a single number counts for both."""
    both = [
        _Sent(
            sends=True, **{name: value[index] if isinstance(value, tuple) else value for name, value in given.items()}
        )
        for index in range(2)
    ]
    return _Sends(both, held, 0.0)


TWO = [position(0, 2), position(0, 2)]


@pytest.mark.parametrize(
    ("sent", "given", "expected"),
    [
        # 1. Sums of 1 hide behind computation but for the last: computed at 4, sent till 5.
        (sends(late=1), {}, 5),
        # 2. Sums of 3, the first from 2 till 5, the second till 8; downloads of 1 end at 6 and 9.
        (sends(late=3, down_late=1), {}, 9),
        # 3. The first gradient of a position comes after 1 of its 2: sent from 3 till 6, and till 9.
        (sends(late=3), {"leads": (0.5, 0.5)}, 9),
        # 4. The device waits for all sums of a position but the last: from 2 till 5, computes till 7, then the second
        #    ones till 10; the last ones of each take nothing.
        (sends(early=3), {}, 10),
        # 5. Resident gradients: 3 from 2 till 5, and till 8, then the step of the device, 1.
        (sends(resident=3), {"device_step": 1}, 9),
        # 6. Three micro-batches: two backwards of 4 without any sum.
        (sends(late=3, down_late=1), {"training": Training(accumulate=3)}, 8 + 9),
        # 7. What they have left is uploaded first: 3 from 0 till 3; the next one till 6, and computation with it.
        (sends(late=1, older=3), {}, 7),
        # 8. More downloads under way than may be held: 4 from 2 to 6, of which 1 may run beside computation.
        (sends(early=(0, 1e-9), down_early=(0, 4), held=1), {}, 7),
        # 9. Nothing to send takes no time.
        (sends(), {}, 4),
    ],
)
def test_averages_by_hand(sent: _Sends, given: dict[str, Any], expected: float) -> None:
    given = {"leads": (0.0, 0.0), **given}
    assert seconds([replace(at) for at in TWO], network=sent, **given) == pytest.approx(expected)


# --- properties -------------------------------------------------------------------------------------------------------
durations_of = st.floats(0, 5).map(lambda value: round(value, 3))
WAYS = [("off", False), ("backward", False), ("forward", False), ("off", True), ("forward", True)]


@given(
    st.lists(st.tuples(durations_of, durations_of, durations_of), min_size=2, max_size=2),
    st.fixed_dictionaries(dict.fromkeys(("step", "norm", "scale", "add", "device_step"), durations_of)),
    st.sampled_from(WAYS),
    st.integers(1, 3),
    st.data(),
)
def test_the_result_never_falls_when_something_takes_longer(
    computes: list[tuple[float, float, float]],
    times: dict[str, float],
    way: Any,
    accumulate: int,
    data: st.DataObject,
) -> None:
    training = Training(way[0], accumulate, way[1])

    def run(computes: list[tuple[float, float, float]], **times: float) -> float:
        return seconds(
            [
                position(forward, backward, recompute=again, uploads_forward=comes(index))
                for index, (forward, backward, again) in enumerate(computes)
            ],
            training,
            download=1.5,
            **times,
        )

    before, more = run(computes, **times), data.draw(durations_of)
    name = data.draw(st.sampled_from([*times, "compute"]))
    if name == "compute":
        index, place = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 2))
        worse = [list(each) for each in computes]
        worse[index][place] += more
        assert run([tuple(each) for each in worse], **times) >= before - 1e-9  # type: ignore[misc]
    else:
        assert run(computes, **{**times, name: times[name] + more}) >= before - 1e-9


# --- what comes when --------------------------------------------------------------------------------------------------
def test_a_tied_chunk_comes_again_unless_it_is_still_there() -> None:
    needs = [[0], [1], [2], [0]]
    assert uploads(needs, range(4), 3)[0] == [[(0, -1)], [(1, -1)], [(2, -1)], []]
    assert uploads(needs, range(4), 2)[0] == [[(0, -1)], [(1, -1)], [(2, 0)], [(0, 1)]]


def test_chunks_of_one_position_come_as_their_buffers_are_free() -> None:
    found, live = uploads([[0, 1], [2, 3]], range(2), 3)
    assert found == [[(0, -1), (1, -1)], [(2, -1), (3, 0)]]
    assert live == [1, 2, 3]


# --- what is computed again -------------------------------------------------------------------------------------------
CPU = HardwareProfile("CPU", *(1.0,) * 4, {"float32": 10.0}, 4.0, *(1.0,) * 3, 1, 1, asynchronous=False)
GPU = replace(CPU, asynchronous=True)
FORWARD = (OperationCost(100, 8, "float32", 3, is_product=True), OperationCost(0, 8, "float32", 2))
SEGMENT = Segment("block", Forward(operations=FORWARD))


def test_a_device_that_waits_for_python_waits_for_its_looks() -> None:
    assert selective_seconds(SEGMENT, CPU) == pytest.approx(4.0 + 2 * 5 * WATCHED)


@pytest.mark.parametrize(
    ("speed", "expected"),
    [
        (1.0, 4.0),  # Python is hidden behind both runs,
        (4.0 / (2.5 * WATCHED), 5 * WATCHED),  # behind the first run only,
        (34.0 / (2.5 * WATCHED), 5 * WATCHED + 2.5 * WATCHED),  # behind half of the first run.
    ],
)
def test_a_device_that_computes_beside_python_waits_for_what_is_longer(speed: float, expected: float) -> None:
    faster = replace(GPU, flops={"float32": 10.0 * speed}, memory=4.0 * speed)
    assert selective_seconds(SEGMENT, faster) == pytest.approx(expected)


def test_segments_of_other_operations_are_told_apart() -> None:
    short = replace(SEGMENT, forward=Forward(operations=FORWARD[1:]))
    assert durations([SEGMENT, short], GPU)[1] == Durations(4.0, 4.0, 4.0, 0.0)
    assert durations([SEGMENT], GPU) == [Durations(34.0, 34.0, 4.0, 0.0)]


def predict(case: Case) -> StepTime:
    layout, profile = profile_of(case.num_blocks, case.num_tokens, case.tied)
    return step_time(problem_of(case), plan_of(case, layout, profile))


@pytest.mark.parametrize(("overlap", "clips"), WAYS)
def test_a_step_takes_no_less_than_its_computation(overlap: Any, clips: bool) -> None:
    found = predict(Case(Training(overlap, 2, clips), resident=2, link=2.0, host=1.0))
    assert found.compute <= found.seconds


def test_what_bounds_a_step() -> None:
    assert predict(Case(link=0.1, host=0.1)).bound == "compute"
    assert predict(Case(link=9.0, host=0.1)).bound == "link"
    assert predict(Case(link=0.1, host=9.0)).bound == "host"


def test_a_resident_plan_is_computation_and_the_device_step() -> None:
    found = predict(Case(resident=11))
    assert found.seconds == pytest.approx(found.compute)
    assert (found.upload, found.download, found.host) == (0, 0, 0)


@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
def test_a_host_that_steps_beside_copies_shares_its_memory(overlap: Any) -> None:
    case = Case(Training(overlap), host=1.0)
    layout, profile = profile_of(case.num_blocks, case.num_tokens, case.tied)
    problem, plan = problem_of(case), plan_of(case, layout, profile)
    slow = replace(problem, hardware=replace(problem.hardware, host_beside=0.5))
    steps = sum(info.numel for info in layout.parameters) / problem.hardware.host_step
    more = step_time(slow, plan).host - step_time(problem, plan).host
    assert more == pytest.approx(0 if overlap == "off" else steps)


def test_corrected_rates_predict_the_measured_time_of_launches() -> None:
    case = Case()
    layout, profile = profile_of(case.num_blocks, case.num_tokens, case.tied)
    problem, plan = problem_of(case), plan_of(case, layout, profile)
    problem = replace(problem, hardware=replace(problem.hardware, launch=1.0))  # The device waits for every launch.
    told = clock.micro_batch(problem, plan)
    corrected = told.correct(problem.hardware, replace(told, compute=3 * told.compute))
    found = clock.micro_batch(replace(problem, hardware=corrected), plan)
    assert found.compute == pytest.approx(3 * told.compute)


# --- the virtual clock ------------------------------------------------------------------------------------------------
TOLERANCE = 0.03
CASES = [
    *(Case(Training(overlap, accumulate, clips)) for accumulate in (1, 4) for overlap, clips in WAYS),
    *(Case(Training("forward"), num_buffers=number, link=1.0) for number in (2, 4, 6)),
    *(Case(Training("off"), link=link, host=0.25) for link in (0.25, 2.0, 4.0)),
    *(Case(Training("forward", clips=True), host=host) for host in (0.25, 1.0, 4.0)),
    Case(Training("backward"), num_blocks=16, link=1.0),
    # When backward ends, the host has chunks left to step, and begins with those that the next forward needs first.
    *(Case(Training("backward", again), host=host, num_blocks=16) for host in (1.0, 3.0) for again in (1, 2)),
    Case(Training("backward"), host=2.0, link=1.0, resident=3),
    Case(policies=lambda index: CHECKPOINT),
    Case(Training("forward"), policies=lambda index: CHECKPOINT if index < 4 else KEEP),
    Case(policies=lambda index: SWAP if index in (0, 3) else KEEP, num_tokens=64),
    Case(policies=lambda index: SWAP, num_tokens=64, host=0.1),
    Case(Training("backward"), policies=lambda index: SWAP if index % 4 == 0 else CHECKPOINT, num_tokens=64),
    # Inputs on the host: hidden beside computation, and on a link that is too slow for that.
    Case(Training("forward"), policies=lambda index: CHECKPOINT, num_inputs=7, num_tokens=64),
    Case(policies=lambda index: CHECKPOINT, num_inputs=7, num_tokens=256, link=6.0, host=0.05),
    Case(policies=lambda index: SWAP if index % 4 == 0 else CHECKPOINT, num_inputs=3, num_tokens=64, link=2.0),
]


@pytest.mark.sample(10)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.training.overlap}-{CASES.index(case)}")
def test_the_virtual_clock_agrees(case: Case) -> None:
    assert predict(case).seconds == pytest.approx(measure(case), rel=TOLERANCE)
