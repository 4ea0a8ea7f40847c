"""On simulated devices: ranks gather what all expect to fetch, and whoever does something else holds up nobody.

A fence that is left out is found, see [Note: Gathers].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.planner.plan import Sharding
from lightning_protrain.runtime import parts
from lightning_protrain.runtime.comm import Communicator
from lightning_protrain.runtime.gathers import Gathers
from lightning_protrain.runtime.parts import Parts
from lightning_protrain.runtime.script import Walk
from lightning_protrain.runtime.updates import Overlap
from lightning_protrain.simulation.device import Rates
from lightning_protrain.simulation.streams import RaceError
from tests.runtime.applied import ROWS, WIDTH
from tests.simulation import ranked

# Of a step, and of those before the first in which ranks gather: two that are alike.
STEPS, LEARNING = 6, 2


@dataclass(frozen=True)
class Case(ranked.Case):
    """A run in which ranks gather.

    Attributes:
        who: Rank, step and micro-batch in which the last block is left out.
    """

    sharding: Sharding = Sharding.SHARD
    skips: bool = False
    num_steps: int = STEPS
    gathers: bool = True
    who: tuple[tuple[int, int, int], ...] = ()

    def loss(self, model: nn.Module, rank: int, step: int, micro: int) -> Tensor:
        seed = 100 * step + 10 * micro + rank
        batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
        outputs: Tensor = model(batch, (rank, step, micro) in self.who)
        return outputs.square().mean()


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "WINDOW", 1024)


@pytest.fixture
def leaving(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Of every script that was agreed on: whether a rank has left it."""
    found: list[bool] = []
    end = Walk.end

    def noting(walk: Walk) -> list[int]:
        owed = end(walk)
        found.append(walk.left)
        return owed

    monkeypatch.setattr(Walk, "end", noting)
    return found


def trained(case: Case, seed: int | None = None) -> list[ranked.Trained]:
    found = ranked.train(case, seed=seed)
    ranked.assert_exact(case, found)
    return found


def each(found: list[ranked.Trained], name: str) -> list[int]:
    return [getattr(rank.device.counters, name) for rank in found]


RUNS = [(1, 2), (1, 3), (2, 2)]
WAYS = [(nodes, size, overlap, accumulate) for nodes, size in RUNS for overlap in Overlap for accumulate in (1, 2)]


@pytest.mark.parametrize(
    ("nodes", "size", "overlap", "accumulate"),
    [
        pytest.param(*way, marks=() if at % 7 == 0 else pytest.mark.slow, id="-".join(map(str, way)))
        for at, way in enumerate(WAYS)
    ],
)
def test_ranks_that_gather_come_to_the_same_bits(
    nodes: int, size: int, overlap: Overlap, accumulate: int, leaving: list[bool]
) -> None:
    case = Case(nodes=nodes, node_size=size, overlap=overlap, accumulate=accumulate)
    (first, *others) = each(trained(case, seed=1), "gathers")
    assert first > 0
    assert others == [first] * (len(others))
    assert not any(leaving)
    assert len(leaving) == nodes * size * (STEPS - LEARNING) * accumulate


def test_a_part_is_uploaded_by_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not divide into parts by every rank; nothing else."""
    whole, (a, b) = trained(Case(gathers=False)), trained(Case())
    chunks: list[tuple[int, int]] = []
    upload = Parts.upload

    def noting(own: Parts, source: Tensor, *more: Any) -> Any:
        chunks.append((own._place, source.numel()))
        return upload(own, source, *more)

    monkeypatch.setattr(Parts, "upload", noting)
    trained(Case())
    for place, rank in enumerate((a, b)):
        fetched = [nbytes for who, nbytes in chunks if who == place]
        assert rank.device.counters.uploads == whole[0].device.counters.uploads
        saved = whole[place].device.counters.uploaded_bytes - rank.device.counters.uploaded_bytes
        assert saved == sum(nbytes - nbytes // 2 for nbytes in fetched)
        assert rank.device.counters.gathers == sum(-(-nbytes // 1024) for nbytes in fetched)
        assert rank.device.counters.peak_live_bytes == whole[place].device.counters.peak_live_bytes


LEAVERS = {
    "one rank": ((1, 3, 0),),
    "the other rank": ((0, 3, 0),),
    "both in turn": ((0, 2, 0), (1, 3, 0)),
    "both together": ((0, 3, 0), (1, 3, 0)),
}


@pytest.mark.parametrize(
    ("overlap", "seed"),
    [
        (Overlap.BACKWARD, None),
        *(pytest.param(overlap, seed, marks=pytest.mark.slow) for overlap in Overlap for seed in (1, 2)),
    ],
)
@pytest.mark.parametrize("who", LEAVERS)
def test_whoever_does_something_else_still_takes_part(
    who: str, overlap: Overlap, seed: int | None, leaving: list[bool]
) -> None:
    found = trained(Case(overlap=overlap, who=LEAVERS[who]), seed)
    assert sum(leaving) == (2 if who == "both together" else 1)
    assert len(set(each(found, "gathers"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("nodes_and_size", [(1, 3), (2, 2)])
@pytest.mark.parametrize("overlap", Overlap)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_so_do_those_of_more_ranks(
    nodes_and_size: tuple[int, int], overlap: Overlap, accumulate: int, leaving: list[bool]
) -> None:
    nodes, size = nodes_and_size
    for micro in range(accumulate):
        for seed in range(3):
            case = Case(nodes=nodes, node_size=size, overlap=overlap, accumulate=accumulate, who=((1, 3, micro),))
            trained(case, seed)
    assert sum(leaving) == 3 * accumulate


def test_ranks_gather_again_when_two_steps_were_alike(leaving: list[bool]) -> None:
    """The rank that left says first that it knows nothing, then that it does."""
    case = Case(num_steps=9, who=((1, 4, 0),))
    found = trained(case)
    never = trained(Case(num_steps=9))
    assert leaving.count(True) == 1
    lost = (each(never, "gathers")[0] - each(found, "gathers")[0]) / (each(never, "gathers")[0] / 7)
    assert lost == 2  # Behind step 4: there is another order, and then this one has been seen once only.


def test_ranks_that_never_do_the_same_gather_nothing() -> None:
    who = tuple((rank, step, 0) for step in range(STEPS) for rank in range(2) if (rank + step) % 2)
    assert each(trained(Case(who=who)), "gathers") == [0, 0]


# --- planted bugs -----------------------------------------------------------------------------------------------------


def begin_at_once(own: Parts, gather: Any) -> None:
    with own.device.beside:
        gather.work = own._communicator.begin_gather(gather.whole, gather.part)


def finish_at_once(own: Parts) -> None:
    own._given.clear()
    FINISH(own)


def give_in_front(own: Parts, source: Tensor) -> None:
    own._given = Forgetful(own._given)
    GIVE(own, source)


GIVE, FINISH = Parts.give, Parts.finish


class Forgetful(list):  # type: ignore[type-arg]
    """Never says that it holds anything."""

    def __bool__(self) -> bool:
        return False


BUGS: dict[str, tuple[type, str, Callable[..., Any], str]] = {
    "a gather that does not wait for its part": (
        Parts, "_begin", begin_at_once, "gathering writes in all_gather what (up|compute) wrote",
    ),
    "computing that does not wait for a gather": (
        Communicator, "end_gather", lambda own, work: None, "compute reads in .* what gathering wrote in all_gather",
    ),
    "a part for others in memory of a gather that runs": (
        Parts, "give", give_in_front, "up writes in copy what gathering wrote in all_gather",
    ),
    "memory for others that is freed at once": (
        Parts, "finish", finish_at_once, "compute writes in resize what gathering wrote in all_gather",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement, message = BUGS[bug]
    case = Case(overlap=Overlap.BACKWARD, who=((0, 2, 0), (1, 3, 0)))
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(RaceError, match=message):
        ranked.train(case)


def test_links_to_the_host_carry_less() -> None:
    """Where they are what a step waits for, it takes less time."""
    rates = Rates(upload=1e6, latency=0.0)
    whole, parted = (ranked.train(Case(gathers=gathers), rates) for gathers in (False, True))
    steps = [ends[-1] - ends[-2] for ends in (rank.ends for rank in (*whole, *parted))]
    assert max(steps[2:]) < 0.7 * min(steps[:2])


def test_what_is_owed_to_others_may_not_wait_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else both ranks wait for each other: for a part here, and for gradients there."""
    give = Gathers._give

    def late(own: Gathers, indices: list[int]) -> None:
        if own._walk is None:
            give(own, indices)

    monkeypatch.setattr(Gathers, "_give", late)
    with pytest.raises((RuntimeError, AssertionError)):
        trained(Case(who=((1, 3, 0),)))
