"""One plan for several ranks, and plans for machines that are not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_protrain.planner.explain import short_bytes
from lightning_protrain.planner.network import Network, Route
from lightning_protrain.planner.plan import ONE_RANK, Plan, RankLayout, Sharding
from lightning_protrain.planner.problem import Workload
from lightning_protrain.planner.request import SHARE_OF_ALL, PlanRequest
from lightning_protrain.planner.scaling import Cluster
from lightning_protrain.planner.search import NoFeasiblePlan
from lightning_protrain.profiler.gpu_specs import gpu
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.runtime.comm.shared_memory import shared_bytes
from lightning_protrain.strategy import joint_plan
from lightning_protrain.strategy.dry_run_hardware import DryRunHardware
from lightning_protrain.strategy.joint_plan import DryRun, DryRunAnswers, Targets, plan_jointly
from lightning_protrain.strategy.profile_step import once_for_each_kind
from tests.support.machines import CPU, GIB
from tests.support.plan_cases import WHOLE, case

SHARD, REPLICATE = Sharding.SHARD, Sharding.REPLICATE
# What ranks send to an owner takes long, what they send to all does not; and the other way round.
FAST, SLOW = Route(1e-6, 1e12), Route(1e-3, 1e6)
TO_ALL, TO_OWNERS = Network(FAST, SLOW, owners=2), Network(SLOW, FAST, owners=2)


class Alone:
    """Stands for the ranks of a run: what rank 0 says is what all mean."""

    world_size = local_size = 2

    def meet(self, what: str, flag: bool) -> bool:
        assert what == "the search for a plan"
        return flag


def jointly(
    found: PlanRequest,
    network: Network,
    monkeypatch: pytest.MonkeyPatch,
    among: tuple[Sharding, ...] = (SHARD, REPLICATE),
    **shares: Any,
) -> tuple[PlanRequest, Plan, Any]:
    """Return the joint plan of two ranks of a node, and the sharding under which the network was measured."""
    asked: list[Sharding] = []

    def gauge(_: Any, sharding: Sharding) -> Network:
        asked.append(sharding)
        return network

    monkeypatch.setattr(joint_plan, "decide", lambda make: make())
    monkeypatch.setattr(joint_plan, "least_memory", lambda mine, _: replace(mine, **shares))
    ranks: Any = Alone()
    said = replace(found, ranks=RankLayout(1, 2, SHARD))
    return *plan_jointly(said, ranks, among, (), gauge), asked


@pytest.mark.parametrize(("network", "chosen"), [(TO_ALL, REPLICATE), (TO_OWNERS, SHARD)], ids=["to all", "to owners"])
def test_the_network_decides_who_holds_what(
    network: Network, chosen: Sharding, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        found, plan, asked = jointly(case(device_memory=60_000), network, monkeypatch)
    other = REPLICATE if chosen is SHARD else SHARD
    assert plan.sharding is chosen
    assert asked == [SHARD]
    assert (found.ranks.copies, found.ranks.sharers) == ((1, 2) if chosen is SHARD else (2, 1))
    assert caplog.text.count(f'sharding="auto" takes "{chosen}"') == 1
    assert plan.prediction is not None
    sentence = plan.prediction.advice[-1]
    times = [
        each.prediction.step_seconds
        for each in (
            found.under(SHARD, network).plan(),
            found.under(REPLICATE, network.without_owners()).plan(),
        )
        if each.prediction is not None
    ]
    assert plan.prediction.step_seconds == min(times)
    assert f'under "{other}"' in sentence


def shared_by(found: PlanRequest) -> int:
    """Bytes that two ranks would share of the plan of a case."""
    plan = replace(found, ranks=RankLayout(1, 2)).under(SHARD, TO_OWNERS).plan()
    offloaded = [chunk for chunk in plan.chunks if not chunk.resident]
    return shared_bytes(offloaded, {info.fqn: info.nbytes for info in found.workload.layout.parameters}, 2)


@pytest.mark.parametrize("plan_request", [{"device_memory": 60_000}, {"choice": "offload"}], ids=["searched", "given"])
@pytest.mark.parametrize(("short", "chosen"), [(0, SHARD), (1, REPLICATE)], ids=["enough", "a byte less"])
def test_where_the_memory_that_can_be_shared_is_small_each_has_a_copy(
    plan_request: dict[str, Any],
    short: int,
    chosen: Sharding,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = case(**plan_request)
    needs = shared_by(found)
    with caplog.at_level("INFO"):
        _, plan, _ = jointly(found, TO_OWNERS, monkeypatch, shared=needs - short, shared_at=1)
    assert plan.sharding is chosen
    assert plan.num_offloaded_chunks > 0
    why = (
        f'under "shard" there is no plan (/dev/shm has {short_bytes(needs - 1)} free on the node of rank 1, needs '
        f"{short_bytes(needs)} for the weights that ranks share)."
    )
    assert caplog.text.count(why) == short
    assert caplog.text.count('takes "replicate"') == short


def test_what_can_be_shared_does_not_matter_where_everything_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        _, plan, _ = jointly(case(GIB), TO_OWNERS, monkeypatch, shared=0)
    assert (plan.sharding, plan.num_offloaded_chunks) == (SHARD, 0)
    assert "sharding=" not in caplog.text


def test_what_is_asked_for_is_left_to_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    found = case(device_memory=60_000)
    _, plan, _ = jointly(found, TO_ALL, monkeypatch, among=(SHARD,), shared=0)
    assert plan.sharding is SHARD
    assert plan.num_offloaded_chunks > 0


def test_neither_room_to_share_nor_for_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = case(device_memory=60_000).under(SHARD).plan().prediction
    assert one is not None
    found = case(device_memory=60_000, host_memory=int(1.2 * one.host_bytes))
    with pytest.raises(ValueError, match=r"^/dev/shm has 0 B free on the node of rank 0, .*docker run --shm-size"):
        jointly(found, TO_ALL, monkeypatch, shared=0)


def test_a_host_that_holds_one_copy_only_is_shared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = case(device_memory=60_000).under(SHARD).plan().prediction
    assert one is not None
    with caplog.at_level("INFO"):
        _, plan, _ = jointly(case(device_memory=60_000, host_memory=int(1.2 * one.host_bytes)), TO_ALL, monkeypatch)
    assert plan.sharding is SHARD
    assert 'under "replicate" there is no plan (No plan fits: the ' in caplog.text


@pytest.mark.parametrize("plan_request", [{"choice": "offload"}, {"choice": "resident"}, {}], ids=str)
def test_what_leaves_nothing_to_decide_is_not_planned_twice(
    plan_request: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        _, plan, asked = jointly(case(GIB, **plan_request), TO_ALL, monkeypatch)
    assert plan.sharding is SHARD
    assert asked == ([] if plan_request else [SHARD])
    assert "sharding=" not in caplog.text


def test_one_rank_tells_nobody() -> None:
    asked = case(GIB)
    found, plan = plan_jointly(asked, None, (REPLICATE,), (), lambda *_: pytest.fail("measured"))
    assert (plan.sharding, found) == (REPLICATE, asked)


# --- other machines ---------------------------------------------------------------------------------------------------


def answers(
    found: PlanRequest,
    targets: Targets,
    ranks: RankLayout = ONE_RANK,
    clusters: Mapping[str, Cluster] | None = None,
    dtype: torch.dtype | None = None,
) -> DryRunAnswers:
    """Return the plan for each target under each sharding, or why there is none."""
    dry_run = DryRun(targets, ranks, clusters or {})
    dry_run.answer(found, None if dtype is None else dtype.itemsize)
    return dry_run.answers


def test_another_machine_gets_its_own_plan() -> None:
    found = case(GIB)
    tiny = replace(CPU, name="tiny", device_bytes=60_000)
    none = replace(CPU, name="none", device_bytes=1000)
    machines = {"this": None, "tiny": tiny, "none": none}
    answered = answers(found, {name: {REPLICATE: machine} for name, machine in machines.items()})
    plans: Any = {name: plan[REPLICATE] for name, plan in answered.items()}
    assert plans["this"].num_offloaded_chunks == 0
    assert plans["tiny"].num_offloaded_chunks > 0
    assert plans["tiny"].prediction.device_bytes <= 60_000 * SHARE_OF_ALL
    assert isinstance(plans["none"], NoFeasiblePlan)


def test_each_kind_of_gpu_is_planned_for_with_the_profile_of_its_own_kernels() -> None:
    asked: list[Any] = []
    found = case(GIB)
    profile = found.workload.profile
    assert profile is not None

    @once_for_each_kind
    def profile_on(hardware: HardwareProfile | None) -> Workload:
        asked.append(None if hardware is None else hardware.name)
        return replace(found.workload, profile=replace(profile, attention=((str(asked[-1]), 1),)))

    several = replace(found, workload=replace(found.workload, profile=None), profile_on=profile_on)
    names = ("RTX 3090", "RTX A6000", "H100 SXM")
    gpus = [gpu(name, 64 * GIB, 8) for name in names]
    plans: Any = answers(several, {machine.name: {REPLICATE: machine} for machine in gpus} | {"": {REPLICATE: None}})
    assert asked == ["RTX 3090", "H100 SXM", None]
    assert all(plan[REPLICATE].prediction is not None for plan in plans.values())
    seen: Any = several.on(gpus[1]).workload.profile
    assert seen.attention == (("RTX 3090", 1),)
    assert case().on(gpus[0]).workload.profile == profile  # nothing can be profiled again


@pytest.mark.parametrize(
    ("plan_request", "device_bytes", "under"),
    [({}, 60_000, [SHARD, REPLICATE]), ({}, GIB, [SHARD]), ({"choice": "offload"}, 60_000, [SHARD])],
    ids=["searched", "resident", "given"],
)
def test_machines_are_planned_for_under_what_a_run_would_choose_from(
    plan_request: dict[str, Any], device_bytes: int, under: list[Sharding]
) -> None:
    machine = replace(CPU, device_bytes=device_bytes)
    found = case(**plan_request)
    plans = answers(found, {"": {SHARD: machine, REPLICATE: machine}}, RankLayout(1, 4))
    assert list(plans[""]) == under
    assert [plan.sharding for plan in plans[""].values() if isinstance(plan, Plan)] == under


# Between its two machines goes next to nothing.
SLOW_CLUSTER = Cluster(2, 2, 1e9, 1e6, 1e12)


def there(cluster: Cluster | None, dtype: torch.dtype | None = None, **plan_request: Any) -> dict[Sharding, Any]:
    """Return the plans for a GPU of the cluster, or for a single GPU."""
    machine = replace(CPU, device_bytes=GIB)
    found = case(**{"device_memory": 80_000, **plan_request})
    clusters = {"there": cluster} if cluster is not None else None
    return answers(found, {"there": {SHARD: machine, REPLICATE: machine}}, RankLayout(2, 2), clusters, dtype)["there"]


@pytest.mark.parametrize("sharding", [SHARD, REPLICATE])
def test_plans_on_paper_are_those_that_know_the_network(sharding: Sharding) -> None:
    alone, found = there(None)[sharding], there(SLOW_CLUSTER)[sharding]
    assert found.prediction.busy["network"] > 0
    assert found.prediction.alone_seconds < found.prediction.step_seconds
    assert "network" not in alone.prediction.busy
    assert (found.chunks, found.blocks) != (alone.chunks, alone.blocks)
    several = case(device_memory=80_000, ranks=RankLayout(2, 2))
    network = SLOW_CLUSTER.network_under(sharding)
    own = several.under(sharding, network).plan(replace(CPU, device_bytes=GIB))
    assert found == own


def test_on_a_slow_network_the_plan_of_one_gpu_is_slower() -> None:
    alone, found = there(None)[SHARD], there(SLOW_CLUSTER)[SHARD]
    kept = there(SLOW_CLUSTER, choice=alone)[SHARD]
    assert (kept.chunks, kept.blocks) == (alone.chunks, alone.blocks)
    assert found.prediction.step_seconds < 0.99 * kept.prediction.step_seconds


def test_sums_on_paper_have_the_dtype_of_the_run() -> None:
    whole, half = (there(SLOW_CLUSTER, dtype, choice="offload")[SHARD] for dtype in (None, torch.bfloat16))
    assert half.prediction.busy["network"] == pytest.approx(whole.prediction.busy["network"] / 2, rel=0.05)


@pytest.mark.parametrize("kind", ["offload", "resident", "knobs", "given"])
def test_what_nobody_searches_for_is_timed_on_the_cluster(kind: str) -> None:
    plan_request: dict[str, Any] = {"choice": kind}
    if kind == "knobs":
        plan_request = {"knobs": WHOLE}
    if kind == "given":
        plan_request = {"choice": there(replace(SLOW_CLUSTER, network=1e12))[SHARD]}
    if kind == "resident":
        plan_request["device_memory"] = GIB
    alone, found = there(None, **plan_request), there(SLOW_CLUSTER, **plan_request)
    assert list(found) == [SHARD]
    plan, before = found[SHARD], alone[SHARD]
    assert (plan.chunks, plan.blocks) == (before.chunks, before.blocks)
    assert plan.prediction.step_seconds > plan.prediction.busy["network"] > 0
    assert plan.memory == before.memory
    assert plan.prediction.step_seconds > before.prediction.step_seconds


@pytest.mark.parametrize(("host_memory", "bound"), [(1e12, None), (1e5, "host memory")])
def test_a_step_on_all_gpus_has_no_advice_from_a_shorter_one(host_memory: float, bound: str | None) -> None:
    gain = "accumulate_grad_batches=2 is expected to train 9 % more tokens per second."
    plan = there(SLOW_CLUSTER)[SHARD]
    plan = replace(plan, prediction=replace(plan.prediction, advice=(gain, "Stay.")))
    cluster = replace(SLOW_CLUSTER, host_memory=host_memory)
    found = DryRun({}, clusters={"there": cluster}, answers={"there": {SHARD: plan}})
    plan_on_all: Any = DryRunHardware().answers(found)["there"]
    now, before = plan_on_all.prediction, plan.prediction
    assert (now.step_seconds > before.step_seconds) == (bound is not None)
    assert now.bound == (bound or before.bound)
    assert now.advice == (("Stay.",) if bound else (gain, "Stay."))


def test_copies_of_a_machine_share_its_host() -> None:
    def makes_plan(host_bytes: int) -> list[bool]:
        machine: HardwareProfile = replace(CPU, device_bytes=60_000, host_bytes=host_bytes)
        found = answers(case(), {"": {SHARD: machine, REPLICATE: machine}}, RankLayout(1, 4))[""]
        return [isinstance(plan, Plan) for plan in found.values()]

    one: Any = case().under(SHARD).plan(replace(CPU, device_bytes=60_000))
    assert makes_plan(8 * one.prediction.host_bytes) == [True, True]
    assert makes_plan(2 * one.prediction.host_bytes) == [True, False]
