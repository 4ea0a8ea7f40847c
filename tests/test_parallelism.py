"""When ranks gather chunks from parts: as the user says, where it can be, and by itself over NVLink."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_protrain import ProTrainStrategy
from lightning_protrain.parallelism import Parallelism, gathers_parts
from lightning_protrain.peers import Link, PeerAccess
from lightning_protrain.planner.plan import Plan, Sharding
from tests.distributed.test_parity import Module
from tests.plans import half, preset


def plan_of(sharding: Sharding, name: Any = None) -> Plan:
    model = Module("full")
    return replace(half(model) if name is None else preset(model, name), sharding=sharding)


def gathers(choice: Any, link: Link | None = "nvlink", sends: str | None = "nccl", **other: Any) -> bool:
    given = {"plan": plan_of(Sharding.SHARD), "manual": False, **other}
    return gathers_parts(choice, peers=None if link is None else PeerAccess(link), sends=sends, **given)


def test_nothing_is_gathered_unless_the_user_says_so() -> None:
    assert Parallelism().gather == "host"
    assert not gathers("host")


@pytest.mark.parametrize("link", ["nvlink", "pcie", "none", "unknown", None])
@pytest.mark.parametrize("sends", ["nccl", "gloo"])
def test_by_itself_it_takes_nvlink_and_nccl(link: Link | None, sends: str) -> None:
    assert gathers("auto", link, sends) is (link == "nvlink" and sends == "nccl")
    assert gathers("device", link, sends)


WHERE_IT_CANNOT_BE: list[tuple[dict[str, Any], str]] = [
    ({"sends": None}, "there is one rank"),
    ({"plan": plan_of(Sharding.SHARD, "resident")}, "the plan offloads nothing"),
    (
        {"plan": plan_of(Sharding.REPLICATE, "offload")},
        r'every rank holds what the plan offloads .sharding="replicate"',
    ),
    ({"manual": True}, "under manual optimization nobody knows where a step begins and ends"),
]


@pytest.mark.parametrize(("where", "why"), WHERE_IT_CANNOT_BE, ids=["alone", "resident", "replicate", "manual"])
def test_where_it_cannot_be_it_is_refused_by_name(where: dict[str, Any], why: str) -> None:
    assert not gathers("auto", **where)
    assert not gathers("host", **where)
    with pytest.raises(ValueError, match=rf'gather="device" makes chunks of parts that ranks share: {why}'):
        gathers("device", **where)


@pytest.mark.parametrize("sharding", ["auto", "resident", "replicate"])
def test_steps_of_what_is_not_shared_are_not_divided(sharding: Any) -> None:
    with pytest.raises(ValueError, match=rf'under sharding="{sharding}" they may share nothing'):
        Parallelism(sharding=sharding, shard_optimizer="world")
    assert Parallelism(sharding="shard", shard_optimizer="world").shard_optimizer == "world"


@pytest.mark.parametrize("sharding", ["resident", "replicate"])
def test_what_shares_nothing_is_refused_at_once(sharding: Any) -> None:
    with pytest.raises(ValueError, match=rf'under sharding="{sharding}" they share none'):
        ProTrainStrategy(sharding=sharding, gather="device", plan="auto")
    ProTrainStrategy(sharding=sharding, gather="auto")
