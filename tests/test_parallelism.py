"""When ranks gather chunks from parts: as the user says, where it can be, and by itself over NVLink."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_protrain import ProTrainStrategy, parallelism
from lightning_protrain.parallelism import Parallelism, gathers_parts
from lightning_protrain.peers import Link, PeerAccess
from lightning_protrain.planner.network import WINDOW, Gathering
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


WHERE_NOTHING_IS_SHARED: dict[str, tuple[dict[str, Any], str]] = {
    "alone": ({"sends": None}, "there is one rank"),
    "resident": ({"plan": plan_of(Sharding.SHARD, "resident")}, "the plan offloads nothing"),
    "replicate": (
        {"plan": plan_of(Sharding.REPLICATE, "offload")},
        'every rank holds what the plan offloads (sharding="replicate")',
    ),
}


@pytest.mark.parametrize("where", WHERE_NOTHING_IS_SHARED)
def test_where_nothing_is_shared_it_is_said_once(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(parallelism, "rank_zero_info", said.append)
    given, why = WHERE_NOTHING_IS_SHARED[where]
    assert not gathers("auto", **given)
    assert not gathers("host", **given)
    assert said == []
    assert not gathers("device", **given)
    assert said == [f'gather="device": {why}, so there are no parts to gather.']


@pytest.mark.parametrize("sends", ["nccl", None])
def test_under_manual_optimization_it_is_refused(sends: str | None) -> None:
    assert not gathers("auto", manual=True, sends=sends)
    assert not gathers("host", manual=True, sends=sends)
    with pytest.raises(ValueError, match="under manual optimization nobody knows where a step begins and ends"):
        gathers("device", manual=True, sends=sends)


@pytest.mark.parametrize(
    ("choice", "ranks", "link", "expected"),
    [
        ("device", 4, None, Gathering(4, None, WINDOW)),
        ("device", 4, 5.0, Gathering(4, 5.0, WINDOW)),
        ("device", 1, 5.0, None),
        ("auto", 4, None, None),
        ("auto", 4, 25.0, None),
        ("auto", 4, 26.0, Gathering(4, 26.0, WINDOW)),
        ("host", 4, 1000.0, None),
    ],
)
def test_on_paper_it_takes_a_link_that_is_faster_than_that_to_the_host(
    choice: Any, ranks: int, link: float | None, expected: Gathering | None
) -> None:
    assert Parallelism(gather=choice).gathering_on_paper(ranks, 1, link, 1.0, 25.0) == expected


@pytest.mark.parametrize("sharding", ["auto", "resident", "replicate"])
def test_steps_of_what_is_not_shared_are_not_divided(sharding: Any) -> None:
    with pytest.raises(ValueError, match=rf'under sharding="{sharding}" they may share nothing'):
        Parallelism(sharding=sharding, shard_optimizer="world")
    assert Parallelism(sharding="shard", shard_optimizer="world").shard_optimizer == "world"


def test_on_paper_rows_come_over_the_network_that_ranks_of_a_machine_share() -> None:
    chosen = Parallelism(sharding="shard", shard_weights="world")
    assert chosen.gathering_on_paper(1, 8, None, 20.0, 5.0) == Gathering.of_rows(8, 20.0)
    # Three quarters of them come from the other ranks of the machine.
    assert chosen.gathering_on_paper(4, 8, None, 20.0, 25.0) == Gathering.of_rows(8, 20.0)
    assert chosen.gathering_on_paper(4, 8, None, 20.0, 12.0) == Gathering.of_rows(8, 16.0)
    assert chosen.gathering_on_paper(4, 8, 6.0, 20.0, 12.0) == Gathering.of_rows(8, 8.0)
    assert chosen.gathering_on_paper(4, 1, None, 20.0, 25.0) is None


@pytest.mark.parametrize(
    ("given", "known", "expected"),
    [
        ({"shard_weights": "world"}, (1, 3, None, "gloo", "cpu"), Gathering.of_rows(3)),
        ({"shard_weights": "world"}, (4, 1, None, "gloo", "cpu"), None),
        ({"gather": "device"}, (4, 1, None, "gloo", "cpu"), Gathering(4)),
        ({"gather": "device"}, (4, 1, None, "nccl", "cuda"), Gathering(4, spare=WINDOW)),
        ({"gather": "device"}, (1, 4, None, "gloo", "cpu"), None),
        ({}, (4, 1, None, "gloo", "cpu"), None),
    ],
)
def test_how_chunks_come_from_other_ranks(given: Any, known: Any, expected: Gathering | None) -> None:
    assert Parallelism(sharding="shard", **given).gathering(*known) == expected


def test_on_paper_steps_are_divided_among_the_machines_that_ranks_fill() -> None:
    assert Parallelism(sharding="shard", shard_optimizer="world").machines_on_paper(16, 8) == 2
    assert Parallelism(sharding="shard").machines_on_paper(16, 8) == 1


@pytest.mark.parametrize("sharding", ["resident", "replicate"])
def test_what_shares_nothing_is_refused_at_once(sharding: Any) -> None:
    with pytest.raises(ValueError, match=rf'under sharding="{sharding}" they share none'):
        ProTrainStrategy(sharding=sharding, gather="device", plan="auto")
    ProTrainStrategy(sharding=sharding, gather="auto")


def test_a_hook_of_ddp_is_not_forgotten() -> None:
    with pytest.raises(ValueError, match=r'adapter_grad_sync="flat" .* ddp_comm_hook'):
        ProTrainStrategy(adapter_grad_sync="flat", ddp_comm_hook=print)
    ProTrainStrategy(ddp_comm_hook=print)


@pytest.mark.parametrize("sharding", ["auto", "resident", "replicate"])
def test_weights_are_divided_of_what_ranks_share_only(sharding: Any) -> None:
    with pytest.raises(ValueError, match=f'shard_weights="world" .* sharding="{sharding}"'):
        Parallelism(sharding=sharding, shard_weights="world")
    with pytest.raises(ValueError, match="shard_weights='node': give one of 'auto', 'machine', 'world'"):
        Parallelism(sharding="shard", shard_weights="node")  # type: ignore[arg-type]
    assert Parallelism(sharding="shard", shard_weights="world").machines_on_paper(16, 8) == 2


@pytest.mark.parametrize("gather", ["auto", "device"])
def test_rows_of_machines_and_parts_of_ranks_do_not_go_together(gather: Any) -> None:
    with pytest.raises(ValueError, match=f'shard_weights="world" .* gather="{gather}"'):
        Parallelism(sharding="shard", shard_weights="world", gather=gather)


def _ways(num_nodes: int, **given: Any) -> list[tuple[str, str, str]]:
    found = Parallelism(**given).ways(num_nodes)
    return [(each.sharding, each.shard_optimizer, each.shard_weights) for each in found]


WHOLE, STEPS = ("machine", "machine"), ("world", "machine")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [("auto", *WHOLE), ("shard", *STEPS), ("shard", "machine", "world")]),
        ({"sharding": "shard"}, [("shard", *WHOLE), ("shard", *STEPS), ("shard", "machine", "world")]),
        ({"sharding": "replicate"}, [("replicate", *WHOLE)]),
        ({"sharding": "resident"}, [("resident", *WHOLE)]),
        ({"gather": "device"}, [("auto", *WHOLE), ("shard", *STEPS)]),
        ({"shard_weights": "machine"}, [("auto", *WHOLE), ("shard", *STEPS)]),
        ({"shard_optimizer": "machine"}, [("auto", *WHOLE), ("shard", "machine", "world")]),
        ({"shard_optimizer": "machine", "shard_weights": "machine"}, [("auto", *WHOLE)]),
        ({"sharding": "shard", "shard_optimizer": "world"}, [("shard", *STEPS), ("shard", "machine", "world")]),
        ({"sharding": "shard", "shard_weights": "world"}, [("shard", "machine", "world")]),
    ],
    ids=str,
)
def test_machines_divide_no_more_than_they_have_to(given: Any, expected: list[tuple[str, str, str]]) -> None:
    assert _ways(2, **given) == expected
    assert _ways(1, **given) == expected[:1]
