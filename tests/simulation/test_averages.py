"""Ranks average gradients on simulated devices: exact on any schedule, and every fence that is taken away is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_protrain.device.device import StreamDevice
from lightning_protrain.planner.plan import Sharding
from lightning_protrain.runtime.comm import reduce
from lightning_protrain.runtime.comm.collectives import Collectives
from lightning_protrain.runtime.comm.reduce import GradReducer
from lightning_protrain.runtime.optim.async_step import Overlap
from tests.runtime.applied import ROWS, WIDTH, Block
from tests.simulation.ranked import Case, Skipping, assert_exact, train
from tests.support.plans import alternating, half, place
from tests.support.simulated.device import Rates
from tests.support.simulated.streams import RaceError, SimulatedStream

SHARD = Sharding.SHARD
CASES = {
    "replicate": Case(),
    "replicate, accumulate": Case(accumulate=3),
    "replicate, clip": Case(clips=True, plan=half),
    "replicate, accumulate, clip, bfloat16": Case(accumulate=3, clips=True, reduce_dtype=torch.bfloat16),
    "replicate, one by one": Case(plan=lambda module: place(module, chunk_bytes=1), skips=False),
    "replicate, mixture": Case(plan=alternating, accumulate=3),
    "replicate, two nodes": Case(nodes=2),
    "replicate, behind backward": Case(overlap=Overlap.BACKWARD, plan=half, num_steps=4),
    "replicate, behind backward, accumulate": Case(overlap=Overlap.BACKWARD, accumulate=3),
    "replicate, behind forward, clip": Case(overlap=Overlap.FORWARD, clips=True, accumulate=3),
    "shard": Case(sharding=SHARD),
    "shard, accumulate, clip": Case(sharding=SHARD, accumulate=3, clips=True),
    "shard, mixture, bfloat16": Case(sharding=SHARD, plan=alternating, reduce_dtype=torch.bfloat16),
    "shard, half, clip": Case(sharding=SHARD, plan=half, clips=True, accumulate=3),
    "shard, two nodes": Case(sharding=SHARD, nodes=2, accumulate=3),
    "shard, behind backward": Case(sharding=SHARD, overlap=Overlap.BACKWARD, plan=half, accumulate=3),
    "shard, behind forward, clip": Case(sharding=SHARD, overlap=Overlap.FORWARD, clips=True),
    "shard, two nodes, bfloat16": Case(sharding=SHARD, nodes=2, reduce_dtype=torch.bfloat16, clips=True),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_ranks_are_free_of_races_and_exact_as_late_as_it_goes(name: str) -> None:
    assert_exact(CASES[name], train(CASES[name]))


schedules = given(st.sampled_from(sorted(CASES)), st.integers(0, 10**6))
# Without looking for a simpler one: a schedule is a seed.
anything = partial(settings, deadline=None, phases=[Phase.explicit, Phase.generate])


@anything(max_examples=6)
@schedules
def test_ranks_are_free_of_races_and_exact_on_any_schedule(name: str, seed: int) -> None:
    assert_exact(CASES[name], train(CASES[name], seed=seed))


@pytest.mark.slow
@anything(max_examples=50)
@schedules
def test_ranks_are_free_of_races_and_exact_on_many_schedules(name: str, seed: int) -> None:
    assert_exact(CASES[name], train(CASES[name], seed=seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, None], ids=str)
def test_buckets_that_were_sent_take_no_more_than_what_was_sent(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    def send(self: GradReducer, index: int) -> None:
        SEND(self, index)
        for region in self._sent[-1].regions:
            tensors = {id(tensor): tensor for tensor in (region.flat, region.sent)}
            held.append(sum(tensor.element_size() for tensor in tensors.values()))

    monkeypatch.setattr(GradReducer, "_send", send)
    train(Case(reduce_dtype=dtype, num_steps=1))
    assert set(held) == {(dtype or torch.float32).itemsize}


# --- planted bugs -----------------------------------------------------------------------------------------------------


EACH, END, SEND, LAND = Collectives.begin_each, Collectives.end, GradReducer._send, GradReducer._land


def one_by_one(begin: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `begin_each` that begins each sum by `begin`."""
    return lambda self, parts: [begin(self, flat, owner) for flat, owner in parts]


ISSUE = Collectives._issue
INIT, WAIT_STREAM = reduce._Region.__init__, SimulatedStream.wait_stream


def follows_nobody(self: SimulatedStream, other: SimulatedStream) -> None:
    if self.name not in ("everyone", "node", "peers"):
        WAIT_STREAM(self, other)


def never_waits(self: Collectives, work: Any, flat: Tensor, owner: int | None, *_: Any) -> None:
    return


def never_waits_on_rank_1(self: Collectives, work: Any, flat: Tensor, owner: int | None) -> None:
    if self.ranks.rank != 1:
        END(self, work, flat, owner)


def waits_for_the_first(self: Collectives, work: Any, flat: Tensor, owner: int | None) -> None:
    first = vars(self).setdefault("first", work)
    END(self, first, flat, owner)


def receives_first(self: GradReducer) -> Iterator[Any]:
    bucket = self._sent[0]
    for region in bucket.regions:
        yield from self._land_region(bucket, region)
    yield from LAND(self)


def writes_what_is_sent(self: GradReducer, index: int) -> None:
    SEND(self, index)
    for region in self._sent[-1].regions:
        region.sent.mul_(1.0)


def reads_what_is_sent(self: GradReducer, index: int) -> None:
    SEND(self, index)
    for region in self._sent[-1].regions:
        region.sent.isfinite()


def frees_what_is_sent(self: GradReducer, index: int) -> None:
    SEND(self, index)
    for region in self._sent[-1].regions:
        self._context.device.resize(region.sent.untyped_storage(), 0)


def adds_before_it_is_there(self: reduce._Bucket, param: Any, gradient: Tensor) -> None:
    view = self._places[param].view(param)
    view.copy_(view + gradient if param in self.filled else gradient)
    self.filled.add(param)


def takes_the_same_memory(self: Any, owner: int | None, params: Any, device: Any) -> None:
    INIT(self, owner, params, device)
    same = vars(device).setdefault("same", {}).setdefault(self.flat.shape, self.flat)
    self.sent = self.flat = same


def sums_between_nodes_first(self: Collectives, flat: Tensor, owner: int | None, *_: Any) -> Any:
    if owner == self.ranks.local_rank:
        self._begin_between_nodes(flat)
    return dist.reduce(flat, group=self.ranks.node, async_op=True, group_dst=owner)


def sums_between_nodes_without_waiting(self: Collectives, flat: Tensor, owner: int | None) -> Any:
    work = dist.reduce(flat, group=self.ranks.node, async_op=True, group_dst=owner)
    return self._begin_between_nodes(flat) if owner == self.ranks.local_rank else work


def sum_of_node(self: Collectives, flat: Tensor, owner: int | None) -> Any:
    return self._issue(self.ranks.node, lambda group: dist.reduce(flat, group=group, async_op=True, group_dst=owner))


def waits_for_the_node_only(self: Collectives, flat: Tensor, owner: int | None, *_: Any) -> Any:
    work = sum_of_node(self, flat, owner)
    if owner == self.ranks.local_rank:
        self._begin_between_nodes(flat)
    return work


def waits_for_no_group(self: Collectives, group: Any, collective: Callable[[Any], Any]) -> Any:
    return collective(group)


def waits_for_the_node_and_never_for_peers(self: Collectives, group: Any, collective: Callable[[Any], Any]) -> Any:
    if group is self.ranks.peers:
        return ISSUE(self, group, collective)
    self._latest = group, collective(group)
    return self._latest[1]


SUMMED = "down reads in copy what everyone wrote in all_reduce"
# By what is wrong: what is replaced, the run that shows it, and what the checker says.
BUGS: dict[str, tuple[Any, str, Callable[..., Any], Case, str]] = {
    "a collective that does not wait for compute": (
        SimulatedStream,
        "wait_stream",
        follows_nobody,
        Case(),
        "everyone writes in all_reduce what compute wrote",
    ),
    "a reduction that does not wait for compute": (
        SimulatedStream,
        "wait_stream",
        follows_nobody,
        Case(sharding=SHARD),
        "everyone writes in reduce what compute wrote",
    ),
    "averages that leave the device before they are there": (Collectives, "end", never_waits, Case(), SUMMED),
    "sums that are cast before they are there": (
        Collectives,
        "end",
        never_waits,
        Case(reduce_dtype=torch.bfloat16),
        "compute reads in aten::_to_copy what everyone wrote in all_reduce",
    ),
    "one rank that does not wait": (Collectives, "end", never_waits_on_rank_1, Case(), SUMMED),
    "an owner that does not wait": (
        Collectives,
        "end",
        never_waits,
        Case(sharding=SHARD),
        "down reads in copy what everyone wrote in reduce",
    ),
    "a wait for another chunk": (Collectives, "end", waits_for_the_first, Case(), SUMMED),
    "a bucket that lands before it is waited for": (GradReducer, "_land", receives_first, Case(skips=False), SUMMED),
    "a bucket that is written after it was sent": (
        GradReducer,
        "_send",
        writes_what_is_sent,
        Case(),
        "compute writes in aten::mul_ what everyone wrote in all_reduce",
    ),
    "a bucket that is read after it was sent": (
        GradReducer,
        "_send",
        reads_what_is_sent,
        Case(),
        "compute reads in .* what everyone wrote in all_reduce",
    ),
    "a bucket that is freed while it is sent": (
        GradReducer,
        "_send",
        frees_what_is_sent,
        Case(),
        "compute writes in resize what everyone wrote in all_reduce",
    ),
    "older gradients that are added to before they are there": (
        reduce._Bucket,
        "add",
        adds_before_it_is_there,
        Case(accumulate=3),
        "compute reads in .* what up wrote in copy",
    ),
    "older gradients that are sent before they are there": (
        reduce._Bucket,
        "wait",
        lambda self: None,
        Case(accumulate=3),
        "compute .* what up wrote in copy",
    ),
    "a bucket in memory that is being sent": (
        reduce._Region,
        "__init__",
        takes_the_same_memory,
        Case(),
        "compute writes in .* what everyone wrote in all_reduce",
    ),
    "a sum between nodes before that of the node": (
        Collectives,
        "begin_each",
        one_by_one(sums_between_nodes_first),
        Case(sharding=SHARD, nodes=2),
        "node . begins reduce while a collective of peers . may still run",
    ),
    "a sum between nodes that does not wait for that of the node": (
        Collectives,
        "begin_each",
        one_by_one(sums_between_nodes_without_waiting),
        Case(sharding=SHARD, nodes=2),
        "peers . begins all_reduce while a collective of node . may still run",
    ),
    "two groups at a time": (
        Collectives,
        "_issue",
        waits_for_no_group,
        Case(sharding=SHARD, nodes=2),
        "peers . begins all_reduce while a collective of node . may still run",
    ),
    "a sum of the node that does not wait for that between nodes": (
        Collectives,
        "_issue",
        waits_for_the_node_and_never_for_peers,
        Case(sharding=SHARD, nodes=2),
        "node . begins reduce while a collective of peers . may still run",
    ),
    "a sum between nodes that nobody waits for": (
        Collectives,
        "begin_each",
        one_by_one(waits_for_the_node_only),
        Case(sharding=SHARD, nodes=2),
        "down reads in copy what peers wrote in all_reduce",
    ),
    "a step before the averages are on the host": (
        StreamDevice,
        "wait_host",
        lambda self, fence: None,
        Case(),
        "host .* what down",
    ),
    "a step behind backward before the averages are on the host": (
        StreamDevice,
        "wait_host",
        lambda self, fence: None,
        Case(overlap=Overlap.BACKWARD),
        " what down",
    ),
}


@cache
def check_control(case: Case) -> None:
    """Without a bug nothing is caught."""
    assert_exact(case, train(case))


@pytest.mark.sample(8)
@pytest.mark.parametrize("bug", BUGS)
def test_a_missing_fence_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement, case, match = BUGS[bug]
    check_control(case)
    monkeypatch.setattr(owner, name, replacement)
    for seed in (None, 0, 1):
        with pytest.raises(RaceError, match=match):
            train(case, seed=seed)


# --- the virtual clock ------------------------------------------------------------------------------------------------


NUM_BLOCKS = 24
FLOPS, UNLIMITED = 1e6, 1e15


def deep() -> nn.Module:
    torch.manual_seed(0)
    return Skipping([Block() for _ in range(NUM_BLOCKS)])


def seconds(case: Case, ratio: float) -> tuple[float, float, float]:
    """Return the duration of a step, and its parts that a rank computes and communicates, seconds.

    Args:
        case: The run.
        ratio: Time of a block's gradients on the network over the time that its backward computes.
    """
    size = ROWS * WIDTH * 2 * WIDTH
    backward = 2 * 2 * 2 * size / FLOPS
    nbytes = 4 * (sum(parameter.numel() for parameter in Block().parameters()) + len(list(Block().parameters())))
    rates = Rates(UNLIMITED, UNLIMITED, FLOPS, UNLIMITED, UNLIMITED, nbytes / (ratio * backward), latency=0.0)
    found = train(case, rates, build=deep)
    device = found[0].device
    streams = [stream for name, stream in device._copying.items() if name in ("everyone", "node", "peers")]
    communicating = sum(stream.busy for stream in streams)  # One group after the other.
    step = max(trained.ends[-1] - trained.ends[-2] for trained in found)
    return step, device.compute_stream().busy / case.num_steps, communicating / case.num_steps


def bound(computing: float, communicating: float) -> float:
    """Return a lower bound of the step: nothing is sent in forward, which is a third of all computing."""
    return max(computing, computing / 3 + communicating)


TOGETHER = {
    "replicate": Case(skips=False, num_steps=2),
    "shard": Case(skips=False, num_steps=2, sharding=SHARD),
    "shard, two nodes": Case(skips=False, num_steps=2, sharding=SHARD, nodes=2),
    "bfloat16": Case(skips=False, num_steps=2, reduce_dtype=torch.bfloat16),
}


QUICK = [("replicate", 0.5), ("replicate", 2.0), ("shard, two nodes", 0.5)]
OTHERS = [(name, ratio) for name in TOGETHER for ratio in (0.5, 2.0) if (name, ratio) not in QUICK]


@pytest.mark.parametrize(
    ("name", "ratio"), [*QUICK, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)]
)
def test_sending_and_computing_overlap(name: str, ratio: float) -> None:
    step, computing, communicating = seconds(TOGETHER[name], ratio)
    assert name == "bfloat16" or (communicating > computing) is (ratio == 2.0)
    assert bound(computing, communicating) <= step <= 1.05 * bound(computing, communicating)


def begins_and_waits(self: Collectives, flat: Tensor, owner: int | None, *_: Any) -> Any:
    (work,) = EACH(self, [(flat, owner)])
    work.wait()
    return work


def waits_for_the_node_while_computing(self: Collectives, flat: Tensor, owner: int | None) -> Any:
    work = sum_of_node(self, flat, owner)
    if owner != self.ranks.local_rank:
        return work
    work.wait()
    return self._begin_between_nodes(flat)


@pytest.mark.parametrize(
    ("begin", "name"),
    [
        (begins_and_waits, "replicate"),
        (waits_for_the_node_while_computing, "shard, two nodes"),
    ],
)
def test_waiting_too_early_shows_on_the_clock(begin: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collectives, "begin_each", one_by_one(begin))
    step, computing, communicating = seconds(TOGETHER[name], 0.5)
    assert step > 1.2 * bound(computing, communicating)
