"""Settings of a plan; which of them need a profile, measured hardware or a search, and the budget."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_protrain import ProTrainStrategy
from lightning_protrain.cgroup_limits import free_host_bytes
from lightning_protrain.config import Knobs
from lightning_protrain.planner import request
from lightning_protrain.planner.memory import HostUse, host_bytes, host_terms, memory_terms
from lightning_protrain.planner.plan import BlockPolicy, RankLayout, Sharding
from lightning_protrain.planner.prediction import GRADIENT_BUCKETS, OTHER_RANKS
from lightning_protrain.planner.problem import Training
from lightning_protrain.planner.request import SHARE_OF_ALL, SHARE_OF_STATES, PlanRequest
from lightning_protrain.planner.search import NoFeasiblePlan
from tests.support.machines import CPU, GIB
from tests.support.models import zoo
from tests.support.plan_cases import WHOLE, asking, case
from tests.support.plans import half


@pytest.mark.parametrize("source", ["command line", "config"])
@pytest.mark.parametrize("name", ["auto", "offload", "plan.json", "none.json"])
def test_parsers_of_command_lines_leave_names_and_paths(name: str, source: str, tmp_path: Path) -> None:
    """A parser would read an existing file of that name as a config."""
    half(next(iter(zoo().values()))()).save(tmp_path / "plan.json")
    given = str(tmp_path / name) if name.endswith(".json") else name
    parser = pytest.importorskip("jsonargparse").ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(ProTrainStrategy, "strategy")
    (tmp_path / "config.yaml").write_text(f"strategy:\n  plan: {given}\n")
    options = [f"--strategy.plan={given}"] if source == "command line" else [f"--config={tmp_path / 'config.yaml'}"]
    found = parser.parse_args(options)
    assert found.strategy.plan == given
    assert f"plan: {given}\n" in parser.dump(found)


def training(found: PlanRequest, **changes: Any) -> PlanRequest:
    """Ask for a plan of another training loop."""
    return replace(found, workload=replace(found.workload, training=Training(**changes)))


def copies(ranks: int) -> RankLayout:
    """Return ranks of one node that each hold a copy."""
    return RankLayout(1, ranks, Sharding.REPLICATE)


def sharers(ranks: int) -> RankLayout:
    """Return ranks of one node that share one copy."""
    return RankLayout(1, ranks, Sharding.SHARD)


@pytest.mark.parametrize(
    ("free", "plan_request", "searches"),
    [
        (None, {}, False),
        (GIB, {}, True),
        (None, {"device_memory": GIB}, True),
        (GIB, {"knobs": WHOLE}, False),
        (GIB, {"knobs": Knobs(num_checkpoint_blocks=1)}, True),
        (GIB, {"choice": "offload"}, False),
        (GIB, {"choice": "resident"}, False),
    ],
    ids=str,
)
def test_it_searches_where_something_is_left_to_decide(
    free: int | None, plan_request: dict[str, Any], searches: bool
) -> None:
    found = case(free, **plan_request)
    assert found.searches() == searches
    assert (found.plan().prediction is not None) == searches


def test_what_a_device_has_free_is_the_budget_but_for_a_part() -> None:
    assert case().budget() is None
    assert case(1000).budget() == 1000 * SHARE_OF_ALL
    assert case(1000, profiled=False).budget() == 1000 * SHARE_OF_STATES
    assert case(1000, choice="offload").budget() == 1000 * SHARE_OF_STATES
    assert case(1000, device_memory=77).budget() == 77
    assert case().budget(CPU) == int(CPU.device_bytes * SHARE_OF_ALL)


@pytest.mark.parametrize("free", [60_000, 80_000, 100_000, GIB])
def test_a_plan_that_was_found_may_be_given_again(free: int) -> None:
    found = case(free).plan()
    again = case(free, choice=found)
    assert again.budget() == case(free).budget() == int(free * SHARE_OF_ALL)
    assert again.plan() == found


def test_a_plan_that_knows_no_activations_leaves_room_for_them() -> None:
    plan = case(GIB, choice="offload").plan()
    assert case(GIB, choice=plan).budget() == int(GIB * SHARE_OF_STATES)


def test_the_host_has_what_is_free_and_what_the_weights_take() -> None:
    found = case()
    weights = found.workload.weight_bytes
    assert found.host_bytes() == pytest.approx(free_host_bytes() + weights, rel=0.2)
    assert found.host_bytes(CPU) == CPU.host_bytes
    assert case(host_memory=55).host_bytes(CPU) == 55


@pytest.mark.parametrize("choice", ["offload", "resident"])
def test_what_a_plan_leaves_to_the_host(choice: str) -> None:
    found = case(GIB, choice=choice, host_memory=GIB)
    plan = found.plan()
    taken = sum(host_terms(found.workload.layout, plan, found.workload.state_bytes).values())
    assert found.spare_host_bytes(plan) == GIB - taken
    assert (taken > 0) == (choice == "offload")
    if choice == "offload":
        assert asking(found, host_memory=taken).spare_host_bytes(plan) == 0
        assert asking(found, host_memory=taken // 2).spare_host_bytes(plan) == 0


def test_ranks_that_share_a_host_count_their_own_and_part_what_is_spare() -> None:
    found = case(GIB, choice="offload", host_memory=GIB)
    plan = found.plan()
    blocks = tuple(replace(block, policy=BlockPolicy.SWAP, swap_bytes=4096) for block in plan.blocks)
    memory = memory_terms(
        found.workload.layout, plan.chunks, plan.num_chunk_buffers, found.workload.state_bytes, blocks
    )
    swapping = replace(plan, blocks=blocks, memory=memory)
    shared = training(asking(found, ranks=sharers(4)), accumulate=2)
    taken = sum(host_terms(found.workload.layout, swapping, found.workload.state_bytes, HostUse(4, 2)).values())
    assert shared.spare_host_bytes(swapping) == (GIB - taken) // 4
    least = host_bytes(found.workload.layout, plan.chunks, found.workload.state_bytes, swapping.blocks, HostUse(4, 2))
    assert least > host_bytes(found.workload.layout, plan.chunks, found.workload.state_bytes, swapping.blocks)
    for limit, fits in ((least, True), (least - 1, False)):
        limited = asking(shared, choice=swapping, host_memory=limit)
        with nullcontext() if fits else pytest.raises(ValueError, match="host memory"):
            limited.plan()


def test_a_search_counts_all_ranks_that_share_a_host() -> None:
    tiny = replace(CPU, name="tiny", device_bytes=60_000)
    one = case(GIB, host_memory=GIB)
    four = training(asking(one, ranks=sharers(4)), accumulate=2)
    phase = four.plan(tiny).prediction.phases[-1]
    assert phase.host["gradients"] > 0
    assert phase.host[OTHER_RANKS] == 3 * (
        phase.host["gradients"] + phase.host["landing_gradients"] + phase.host["swapped_activations"]
    )
    refused = asking(four, host_memory=1000)
    with pytest.raises(NoFeasiblePlan, match="for all 4 ranks of the node"):
        refused.plan(tiny)


def test_gradients_that_are_summed_over_ranks_have_room_on_the_device() -> None:
    """The memory is counted in the terms of the plan, in the predicted backward, and in the budget."""
    tiny = replace(CPU, name="tiny", device_bytes=80_000)
    alone, several = case(GIB, host_memory=GIB), case(GIB, host_memory=GIB, ranks=RankLayout(4))
    assert GRADIENT_BUCKETS not in alone.plan(tiny).prediction.phases[2].device
    plan = several.plan(tiny)
    assert plan.num_offloaded_chunks
    backward = plan.prediction.phases[2]
    offloaded = [chunk for chunk in plan.chunks if not chunk.resident and chunk.trainable]
    assert (backward.name, backward.device[GRADIENT_BUCKETS]) == (
        "backward",
        3 * max(sum(several.workload.layout.parameter(fqn).nbytes for fqn in chunk.parameters) for chunk in offloaded),
    )
    assert plan.prediction.budget == several.budget(tiny)
    assert plan.prediction.device_bytes <= plan.memory.total <= plan.prediction.budget


@pytest.mark.parametrize(("element_bytes", "taken"), [(None, 12), (4, 12), (2, 12), (8, 24)])
def test_room_for_summed_gradients_is_counted_in_the_dtype_in_which_they_are_sent(
    element_bytes: int | None, taken: int
) -> None:
    """Three buckets of float32, or two of the weights and two of another dtype."""
    found = case(GIB, choice="offload", host_memory=GIB, ranks=RankLayout(4))
    plan = replace(found, element_bytes=element_bytes).plan()
    most = max(sum(found.workload.layout.parameter(fqn).numel for fqn in chunk.parameters) for chunk in plan.chunks)
    alone = case(GIB, choice="offload", host_memory=GIB).plan().memory.gradients_in_flight
    assert plan.memory.gradients_in_flight - alone == taken * most


def least_named(found: PlanRequest) -> int:
    """The least `device_memory` that the refusal of a plan asks for."""
    with pytest.raises(ValueError, match="device") as caught:
        found.plan()
    (needed,) = re.findall(r"needs? at least .*?\((\d+) bytes\)", str(caught.value))
    return int(needed)


@pytest.mark.parametrize("choice", ["auto", "offload"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_refusal_asks_for_room_for_gradients_that_are_summed(choice: str, ranks: int) -> None:
    def on(nbytes: int) -> PlanRequest:
        return case(device_memory=nbytes, choice=choice, ranks=copies(ranks))

    needed = least_named(on(1000))
    assert least_named(on(needed - 1)) == needed
    assert on(needed).plan().num_offloaded_chunks > 0
    with pytest.raises(ValueError, match=rf"\({needed - 1} bytes\) (are|is) allowed"):
        on(needed - 1).plan()


def test_what_ranks_offload_nothing_of_needs_no_room_for_sums() -> None:
    found = case(device_memory=GIB, choice="resident")
    total = found.plan().memory.total
    tight = asking(found, device_memory=total, ranks=copies(2))
    assert tight.plan().memory.total == total


@pytest.mark.parametrize(("made_by", "given_to"), [(2, 2), (1, 2), (2, 1)])
def test_a_plan_that_is_given_back_has_room_for_the_sums_of_these_ranks(made_by: int, given_to: int) -> None:
    def among(ranks: int, **plan_request: Any) -> PlanRequest:
        return case(ranks=copies(ranks), **plan_request)

    made = among(made_by, choice="offload").plan()
    expected = among(given_to, choice="offload").plan().memory
    given = among(given_to, choice=made, device_memory=expected.total)
    assert given.plan().memory == expected
    with pytest.raises(ValueError, match=rf"needs .*\({expected.total} bytes\) on the device"):
        among(given_to, choice=made, device_memory=expected.total - 1).plan()


def test_ranks_that_share_one_copy_step_it_together() -> None:
    found = case(GIB)
    assert found.workload.profile is not None
    for ranks in (1, 4):
        shared = asking(found, ranks=sharers(ranks))
        assert shared.measured(found.workload.profile) == replace(CPU, host_step=ranks * CPU.host_step)


def test_swapped_activations_and_accumulated_gradients_are_not_spare() -> None:
    offload = case(GIB, host_memory=GIB, choice="offload")
    plan = offload.plan()
    swapping = replace(plan, blocks=tuple(replace(block, swap_bytes=4096) for block in plan.blocks))
    assert offload.spare_host_bytes(plan) - offload.spare_host_bytes(swapping) == 4096 * len(plan.blocks)
    accumulating = training(offload, accumulate=2)
    assert accumulating.spare_host_bytes(accumulating.plan()) < offload.spare_host_bytes(offload.plan())


def test_without_a_limit_the_host_gives_what_it_has_free() -> None:
    found = case(GIB, choice="offload")
    assert 0 < found.spare_host_bytes(found.plan()) <= 1.5 * free_host_bytes()


def test_a_search_counts_what_weights_take_of_the_host_already() -> None:
    found = case(60_000)
    weights, roomy = found.workload.weight_bytes, found.plan().prediction
    assert roomy is not None

    def limited(free: int, lockable: int) -> PlanRequest:
        measured = replace(CPU, host_bytes=min(free, lockable))
        memory = replace(found.node.free, host=free)
        return replace(found, node=replace(found.node, free=memory, measure=lambda _: measured))

    assert limited(roomy.host_bytes - weights, GIB).plan().prediction == roomy
    with pytest.raises(NoFeasiblePlan):
        limited(GIB, weights).plan()  # What may be locked beside them is too little.


def test_pins_hold_in_the_search() -> None:
    plan = case(GIB, knobs=Knobs(num_checkpoint_blocks=2)).plan()
    assert sum(block.policy is BlockPolicy.CHECKPOINT for block in plan.blocks) == 2


def test_what_fits_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    monkeypatch.setattr(request, "search_with_evaluation", lambda *each: searched.append(each))
    plan = case(GIB).plan()
    assert (searched, plan.num_offloaded_chunks) == ([], 0)
    assert {block.policy for block in plan.blocks} == {BlockPolicy.KEEP}
    monkeypatch.undo()
    needed = plan.prediction.device_bytes
    assert case(device_memory=needed).plan().num_offloaded_chunks == 0
    tight = case(device_memory=needed - 1).plan()
    assert (tight.chunks, tight.blocks) != (plan.chunks, plan.blocks)


def test_without_a_profile_presets_decide() -> None:
    found = case(GIB, profiled=False).plan()
    assert (found.num_offloaded_chunks, found.prediction) == (0, None)
    assert case(40_000, profiled=False).plan().num_offloaded_chunks > 0
