"""A change that a refusal names leads to a plan, and plans of several ranks that offload name FSDP2."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from lightning_protrain.planner import alternatives
from lightning_protrain.planner.fsdp_memory import FSDPRanks, fsdp_memory, fsdp_seconds
from lightning_protrain.planner.infeasible import NoFeasiblePlan
from lightning_protrain.planner.network import Network, Route
from lightning_protrain.planner.plan import ONE_RANK, RankLayout, Sharding
from lightning_protrain.planner.problem import Workload
from lightning_protrain.planner.request import PlanRequest
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from tests.planner.test_fsdp_memory import LAYOUT, PROFILE, WEIGHTS, problem
from tests.support.machines import CPU
from tests.support.models import zoo
from tests.support.plan_cases import asking, case

GIB = 1 << 30
GPU = replace(CPU, name="gpu", asynchronous=True)
NAMES = {
    "8-bit": "It fits with an optimizer of 8-bit states",
    "16-bit": "It fits with precision bf16-true",
    "FSDP2": 'strategy="protrain_fsdp2"',
    "alone": "One device alone has a plan",
}


def named(request: PlanRequest, hardware: Any = None) -> set[str] | None:
    """The changes that the refusal of a request names; None: it has a plan."""
    try:
        request.plan(hardware)
    except NoFeasiblePlan as error:
        return {name for name, sentence in NAMES.items() if sentence in str(error)}
    return None


def in_bfloat16(request: PlanRequest) -> PlanRequest:
    """The request for the same model with weights in bfloat16, profiled anew."""
    module = zoo()["reused"]().bfloat16()
    layout, batch = describe_model(module), module.train_dataloader().dataset[0:2]
    profile = profile_model(module, layout, lambda: module.training_step(batch, 0))
    return replace(request, workload=replace(request.workload, layout=layout, profile=profile, state_bytes=4.0))


@pytest.mark.slow
def test_each_change_that_a_refusal_names_leads_to_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives, "SMALL", 1)  # The weights of this model are small.
    said: list[str] = []
    for device_memory, host_memory in product(range(30_000, 150_000, 15_000), (20_000, 60_000, 100_000)):
        request = asking(case(), device_memory=device_memory, host_memory=host_memory)
        found = named(request)
        if found is None:
            continue
        said += found
        small = replace(request, workload=replace(request.workload, state_bytes=2 + 8 / 256))
        assert (named(small) is None) is ("8-bit" in found)
        if "16-bit" in found:
            assert named(in_bfloat16(request)) is None
    assert {"8-bit", "16-bit"} <= set(said)


@pytest.mark.slow
def test_split_masters_are_named_with_the_widest_moments_that_fit() -> None:
    said = set()
    for device_memory, host_memory in product(range(30_000, 150_000, 5_000), (20_000, 40_000, 60_000)):
        request = asking(case(), device_memory=device_memory, host_memory=host_memory)
        try:
            request.plan()
        except NoFeasiblePlan as error:
            text = str(error)
        else:
            continue
        found = re.findall(r'precision bf16-true and SplitAdamW\(moments="(\w+)"\), which keeps float32 masters', text)
        assert ("loses updates" in text) is (not found and "precision bf16-true" in text)
        for moments in found:
            low = in_bfloat16(request)
            workload = replace(low.workload, state_bytes=alternatives.SPLIT_BYTES[moments])
            assert named(replace(low, workload=workload)) is None
            said.add(moments)
    assert said == {"float32", "bfloat16", "8bit"}


def test_a_run_with_split_masters_hears_of_narrower_moments_alone() -> None:
    low = in_bfloat16(case(GIB)).workload
    split = replace(low, state_bytes=6.01, optimizers=("lightning_protrain.runtime.optim.split_adamw.SplitAdamW",))
    assert [moments for moments, _ in alternatives.with_split_masters(split)] == ["bfloat16", "8bit"]
    assert alternatives.with_8_bit_states(split) is None
    assert list(alternatives.with_split_masters(replace(low, optimizers=("torch.optim.AdamW",)))) == []


def test_states_that_are_small_and_weights_that_are_not_float32_stay() -> None:
    workload = case(GIB).workload
    assert alternatives.with_8_bit_states(replace(workload, state_bytes=0.1)) is None
    assert alternatives.with_8_bit_states(workload).state_bytes == 8  # All parameters are small.
    assert alternatives.in_16_bits(in_bfloat16(case(GIB)).workload) is None
    assert alternatives.in_16_bits(replace(workload, low_dtype="float16")) is None  # The GPU has no bfloat16.


def test_weights_of_16_bits_are_named_where_the_device_has_them_and_states_are_known() -> None:
    request = case(device_memory=60_000, host_memory=60_000)
    assert named(request) == {"16-bit"}
    flops = {"float32": 1e12, "float16": 1e12}  # As of a T4.
    old = replace(request, node=replace(request.node, measure=lambda _: replace(CPU, flops=flops)))
    assert named(old) == set()
    workload = replace(request.workload, optimizers=("torch.optim.adamw.AdamW", "theirs.Lion"))
    assert alternatives.in_16_bits(request.workload).state_bytes == 4
    assert alternatives.in_16_bits(workload).state_bytes == 8


@pytest.mark.parametrize("pins", [{}, {"num_chunk_buffers": 3}])
def test_a_refusal_of_pinned_decisions_names_the_pins_alone(pins: dict[str, int]) -> None:
    request = case(device_memory=60_000, host_memory=60_000)
    request = replace(request, node=replace(request.node, measure=lambda _: GPU))
    pinned = asking(request, knobs=replace(request.options.knobs, **pins))
    assert named(pinned) == (set() if pins else {"16-bit", "FSDP2"})


@pytest.mark.sample(2)
@pytest.mark.parametrize("free", [60_000, 80_000, 100_000])
def test_a_refusal_of_several_ranks_says_that_one_would_have_a_plan(free: int) -> None:
    """Gradients that are summed need room on each device."""
    tiny = replace(CPU, name="tiny", device_bytes=free)
    refused = []
    for host_memory in range(20_000, 200_000, 20_000):
        several = case(GIB, host_memory=host_memory, ranks=RankLayout(ranks_per_node=4, sharding=Sharding.SHARD))
        found = named(several, tiny)
        if found is not None:
            refused.append("alone" in found)
            assert refused[-1] is (named(replace(several, ranks=ONE_RANK), tiny) is None)
    assert refused


NETWORK = Network(Route(0.0, 1e9))


def with_scalar(workload: Workload) -> Workload:
    """The workload with a parameter without dimensions."""
    first, *others = workload.layout.parameters
    return replace(workload, layout=replace(workload.layout, parameters=(replace(first, shape=()), *others)))


def test_a_plan_that_offloads_names_fsdp2_with_its_step_time() -> None:
    tiny = replace(GPU, name="tiny", device_bytes=100_000)
    several = case(GIB, host_memory=GIB, ranks=RankLayout(ranks_per_node=8), network=NETWORK)
    plan = several.plan(tiny)
    assert plan.num_offloaded_chunks
    (said,) = [line for line in plan.prediction.advice if line.startswith('strategy="protrain_fsdp2"')]
    assert re.search(r"fits the 8 devices without offload: .* of 3 blocks recomputed, a step of .* \(predicted\)", said)
    (said,) = [
        line for line in replace(several, network=None).plan(tiny).prediction.advice if line.startswith("strategy=")
    ]
    assert "a step of" not in said
    for other in (
        replace(several, ranks=ONE_RANK, network=None),
        # FSDP2 trains none of these.
        replace(several, workload=replace(several.workload, low_dtype="float16")),
        replace(several, workload=with_scalar(several.workload)),
        replace(several, workload=replace(several.workload, optimizers=("bitsandbytes.optim.adamw.AdamW",))),
        asking(several, device_memory=70_000, ranks=RankLayout(ranks_per_node=2)),  # It is too large for FSDP2.
    ):
        assert not [line for line in other.plan(tiny).prediction.advice if line.startswith("strategy=")]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_under_fsdp2_gathers_twice_and_reduces_once(accumulate: int) -> None:
    """Nothing computes here, so that only the network and the step take time."""
    here = problem(profile=PROFILE, accumulates=accumulate > 1)
    hardware = replace(CPU, device_step=1e6)
    memory = fsdp_memory(here)
    found = fsdp_seconds(here, memory, hardware, Route(0.0, 1e6), accumulate)
    sent = WEIGHTS / 2 / 1e6
    numel = sum(info.numel for info in LAYOUT.parameters if info.trainable)
    assert found == pytest.approx((2 * accumulate + 1) * sent + numel / 4 / 1e6, rel=0.01)
    slower = fsdp_seconds(here, memory, hardware, Route(1.0, 1e6), accumulate)
    assert slower - found == pytest.approx((2 * accumulate + 1) * 5)  # The root and four blocks.
    assert fsdp_seconds(replace(here, profile=None), memory, hardware, Route(0.0, 1e6)) is None
    for ranks in (FSDPRanks(2, 2, 2), FSDPRanks(2, 2, cpu_offload=True)):
        other = replace(here, ranks=ranks)
        assert fsdp_seconds(other, fsdp_memory(other), hardware, Route(0.0, 1e6)) is None


def test_a_step_under_fsdp2_takes_at_least_what_plain_training_computes() -> None:
    request = case(GIB, ranks=RankLayout(ranks_per_node=4))
    found = alternatives.FSDP2(request.workload, request.ranks, replace(GPU, device_bytes=GIB), None)
    assert found.memory is not None
    assert alternatives.FSDP2(request.workload, request.ranks, replace(CPU, device_bytes=GIB), None).memory is None
    seconds = fsdp_seconds(found._problem, found.memory, CPU, Route(0.0, 1e15))
    plain = replace(request, ranks=ONE_RANK).plan(replace(CPU, device_bytes=GIB)).prediction
    numel = sum(info.numel for info in request.workload.layout.parameters)
    assert seconds == pytest.approx(plain.busy["compute"] - 0.75 * numel / CPU.device_step, rel=0.1)
