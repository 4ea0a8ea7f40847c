from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lightning_protrain.planner.knobs import Knobs
from lightning_protrain.planner.network import Gathering
from lightning_protrain.planner.problem import Packing, Problem
from lightning_protrain.planner.search import NoFeasiblePlan, search
from tests.planner.brute import all_candidates
from tests.planner.problems import random_problem


def least(problem: Problem, what: str) -> int:
    return min(getattr(candidate, what) for candidate in all_candidates(problem, Knobs()))


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


def test_the_refusal_names_the_share_of_the_batch_that_fits() -> None:
    shares = 0
    for seed in range(30):
        problem = random_problem(seed, 4, 8)
        short = replace(problem, device_bytes=int(0.9 * least(problem, "device")))
        with pytest.raises(NoFeasiblePlan) as caught:
            search(short, Knobs())
        share = re.search(r"at most (\d+) % of this size", str(caught.value))
        assert share or "No smaller batch would help" in str(caught.value)
        shares += share is not None
    assert shares > 5


@pytest.mark.parametrize(("window", "terms"), [(0, "gradient_buckets 900 bytes"), (640, "gradient_buckets 260 bytes")])
def test_the_refusal_names_what_is_held_for_other_ranks(window: int, terms: str) -> None:
    problem = replace(random_problem(0, 4, 8), gathering=Gathering(2, spare=window), reserved=900)
    with pytest.raises(NoFeasiblePlan) as caught:
        search(replace(problem, device_bytes=0), Knobs())
    assert terms in str(caught.value)
    assert ("gathers_for_others 640 bytes" in str(caught.value)) is (window > 0)


def test_the_refusal_names_the_knob_that_is_in_the_way() -> None:
    problem = replace(random_problem(3, 4, 8), chunk_bytes=(1,))
    count = len(Packing(problem, 1, None).chunks)
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
