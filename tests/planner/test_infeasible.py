"""Problems and budgets for which there is no plan are refused with what would help."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from math import ceil, floor
from typing import Any

import pytest

from lightning_protrain.config import Knobs
from lightning_protrain.planner.candidates import packings
from lightning_protrain.planner.packing import pack_chunks
from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.planner.problem import Problem, Training
from lightning_protrain.planner.search import NoFeasiblePlan, search
from lightning_protrain.profiler.records import ModelProfile, Segment, UnitCall
from tests.planner.brute import all_candidates
from tests.planner.problems import PAGE, random_problem


def least(problem: Problem, what: str, within: str | None = None) -> int:
    """The least bytes of any plan; `within` names the memory that it has to fit."""
    budget = getattr(problem, f"{within}_bytes") if within is not None else 0
    candidates = all_candidates(problem, Knobs())
    return min(getattr(one, what) for one in candidates if within is None or getattr(one, within) <= budget)


@pytest.mark.sample(14)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("what", ["device", "host"])
def test_the_refusal_names_what_would_do(seed: int, what: str) -> None:
    problem = random_problem(seed, 4, 8)
    needed = least(problem, what)
    name = f"{what}_bytes"
    search(replace(problem, **{name: needed}), Knobs())
    if needed:
        with pytest.raises(
            NoFeasiblePlan, match=rf"{what} would need at least .*\b{needed} bytes.*Raise {what}_memory"
        ):
            search(replace(problem, **{name: needed - 1}), Knobs())


@pytest.mark.parametrize("sharers", [1, 4])
def test_a_refusal_of_host_memory_says_for_how_many_ranks_it_is(sharers: int) -> None:
    with pytest.raises(NoFeasiblePlan, match="the host would need") as refused:
        search(replace(random_problem(0, 4, 8), host_bytes=0, sharers=sharers), Knobs())
    assert ("for all 4 ranks of the node" in str(refused.value)) == (sharers == 4)


@pytest.mark.parametrize(("missing", "may_help"), [(1, True), (None, False)])
def test_slices_are_tried_unless_the_host_is_too_small_for_the_states(missing: int | None, may_help: bool) -> None:
    problem = random_problem(0, 4, 8)
    host_bytes = 0 if missing is None else least(problem, "host") - missing
    with pytest.raises(NoFeasiblePlan, match="the host would need") as refused:
        search(replace(problem, host_bytes=host_bytes), Knobs())
    assert refused.value.slices_may_help is may_help
    with pytest.raises(NoFeasiblePlan, match="the device would need") as refused:
        search(replace(problem, device_bytes=0), Knobs())
    assert refused.value.slices_may_help


@pytest.mark.parametrize(("what", "other"), [("device", "host"), ("host", "device")])
def test_what_would_do_fits_the_other_memory_too(what: str, other: str) -> None:
    """The plan that streams most takes the least device memory and the most host memory."""
    differ = 0
    for seed in range(10):
        problem = random_problem(seed, 4, 8)
        alone = least(problem, what)
        tight = replace(problem, **{f"{other}_bytes": least(problem, other)})
        needed = least(tight, what, other)
        if not alone:
            continue
        message = refusal(replace(tight, **{f"{what}_bytes": alone - 1}), Knobs())
        condition = f" if it is to fit the {other}" if needed > alone else ""
        assert re.search(rf"{what} would need at least .*\b{needed} bytes\)?{condition}, ", message)
        assert re.search(rf"Raise {what}_memory to .*\b{needed} bytes", message)
        search(replace(tight, **{f"{what}_bytes": needed}), Knobs())
        differ += needed > alone
    assert differ > 2


@pytest.mark.parametrize("seed", range(5))
def test_both_are_named_where_both_are_short(seed: int) -> None:
    problem = random_problem(seed, 4, 8)
    device, host = least(problem, "device"), least(problem, "host")
    assert device
    assert host
    message = refusal(replace(problem, device_bytes=device - 1, host_bytes=host - 1), Knobs())
    numbers = r"need at least .*?(\d+) bytes.* The host is short as well: at least .*?(\d+) bytes.*, .*\b{} bytes"
    found = re.search(numbers.format(host - 1), message)
    assert found is not None
    enough = replace(problem, device_bytes=int(found[1]), host_bytes=int(found[2]))
    search(enough, Knobs())
    with pytest.raises(NoFeasiblePlan):
        search(replace(enough, host_bytes=int(found[2]) - 1), Knobs())
    assert "as well" not in refusal(replace(problem, device_bytes=device - 1, host_bytes=host), Knobs())
    assert "as well" not in refusal(replace(problem, device_bytes=device - 1, host_bytes=None), Knobs())


def test_what_a_plan_needs_without_activations_is_no_more_than_what_it_needs() -> None:
    said = 0
    for seed in range(30):
        problem = random_problem(seed, 4, 8)
        message = refusal(replace(problem, device_bytes=0), Knobs())
        whole = re.search(r"would need at least .*?(\d+) bytes", message)
        without = re.search(r"without any activations the plan needs .*?(\d+) bytes", message)
        if without is not None:
            assert whole is not None
            assert int(without[1]) <= int(whole[1])
            said += 1
    assert said > 5


def refusal(problem: Problem, knobs: Knobs) -> str:
    with pytest.raises(NoFeasiblePlan) as caught:
        search(problem, knobs)
    return str(caught.value)


def named_share(message: str, tokens: int) -> float | None:
    """The part of the batch that is said to fit, in tokens where they are known; None: none."""
    named = re.search(r"of at most (?:about ([\d,]+) of ([\d,]+) tokens|(\d+) % of this size)", message)
    if named is None:
        assert "A smaller batch would not help" in message
        return None
    part, whole, percent = (int(number.replace(",", "")) if number else 0 for number in named.groups())
    assert whole == tokens
    return part / whole if whole else percent / 100


def smaller(profile: ModelProfile, share: float) -> ModelProfile:
    """The profile of a step with that part of the batch: all activations shrink with it, whole pages are swapped."""

    def shrunk(record: Any, **changes: Any) -> Any:
        numbers = {field.name: getattr(record, field.name) for field in fields(record)}
        less = {name: floor(value * share) for name, value in numbers.items() if type(value) is int}
        return replace(record, **{**less, **changes})

    def casts(given: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        return tuple((fqn, floor(nbytes * share)) for fqn, nbytes in given)

    def segment(one: Segment) -> Segment:
        backward = shrunk(one.backward, peak_bytes=max(floor(one.backward.peak_bytes * share), 1))
        storages = tuple(it._replace(nbytes=floor(it.nbytes * share)) for it in one.forward.storages)
        forward = shrunk(one.forward, storages=storages, last_saved=one.forward.last_saved)
        return shrunk(one, forward=forward, backward=backward, casts=casts(one.casts))

    def call(one: UnitCall) -> UnitCall:
        pages = ceil(floor(one.swap_bytes * share) / PAGE)
        return replace(one, swap_bytes=pages * PAGE, saved_casts=casts(one.saved_casts))

    return replace(profile, segments=tuple(map(segment, profile.segments)), calls=tuple(map(call, profile.calls)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("tokens", [0, 1_000_003])
@pytest.mark.parametrize("pinned", [False, True])
def test_the_part_of_the_batch_that_the_refusal_names_fits(pinned: bool, tokens: int, foreach: bool) -> None:
    """With resident chunks, the optimizer step on the device takes memory that smaller batches do not reduce."""
    shares = []
    for seed in range(14):
        problem = random_problem(seed, 4, 8)
        problem = replace(problem, foreach=foreach, profile=replace(problem.profile, tokens=tokens), device_bytes=0)
        size = problem.chunk_bytes[0]
        count = len(pack_chunks(problem.layout, size))
        knobs = Knobs(num_persistent_chunks=count, chunk_bytes=size) if pinned else Knobs()
        needed = re.search(r"would need at least .*?(\d+) bytes", refusal(problem, knobs))
        assert needed is not None
        short = replace(problem, device_bytes=int(0.9 * int(needed[1])))
        share = named_share(refusal(short, knobs), tokens)
        if share is not None:
            search(replace(short, profile=smaller(problem.profile, share)), knobs)
            shares.append(share)
    assert len(shares) > 5
    assert max(shares) < 1


def test_the_refusal_names_what_is_held_for_other_ranks() -> None:
    problem = replace(random_problem(0, 4, 8), reserved=900)
    with pytest.raises(NoFeasiblePlan, match="900 B of gradient buckets"):
        search(replace(problem, device_bytes=0), Knobs())


def test_the_refusal_names_the_knob_that_is_in_the_way() -> None:
    problem = replace(random_problem(3, 4, 8), chunk_bytes=(1,))
    count = len(pack_chunks(problem.layout, 1))
    tight = replace(problem, device_bytes=least(problem, "device"))
    with pytest.raises(NoFeasiblePlan, match=rf"Without num_persistent_chunks={count} there is a plan that fits"):
        search(tight, Knobs(num_persistent_chunks=count))


def test_each_fits_alone_but_not_both() -> None:
    for seed in range(30):
        problem = random_problem(seed, 4, 8)
        device, host = least(problem, "device"), least(problem, "host")
        both = replace(problem, device_bytes=device, host_bytes=host)
        if not any(c.device <= device and c.host <= host for c in all_candidates(problem, Knobs())):
            with pytest.raises(NoFeasiblePlan, match=r"if it is to fit the host.*Or raise host_memory to"):
                search(both, Knobs())
            return
    raise AssertionError("no such case")


def test_a_profile_of_another_model() -> None:
    one, other = random_problem(0), next(p for p in map(random_problem, range(1, 99)) if len(p.layout.blocks) == 8)
    assert len(one.layout.blocks) < 8
    with pytest.raises(ValueError, match=r"The profile has units that the model has not .*for another model"):
        replace(one, profile=other.profile)
    with pytest.raises(ValueError, match="no backward"):
        replace(one, profile=replace(one.profile, segments=()))


def test_no_block_keeps_its_products_where_the_step_was_measured() -> None:
    def selects(problem: Problem) -> bool:
        return any(policy is BlockPolicy.SELECTIVE for _, policy in packings(problem, Knobs())[0].steps)

    problem = next(problem for problem in map(random_problem, range(99)) if selects(problem))
    assert not selects(replace(problem, profile=replace(problem.profile, measured="A kernel cannot be traced.")))


@pytest.mark.parametrize("wrong", [("never", 1, False), ("off", 0, False), ("backward", 1, True)])
def test_a_training_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"[Gg]ive"):
        Training(*wrong)
