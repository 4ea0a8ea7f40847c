"""A rank waits for the ranks that step a weight before it reads the weight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_protrain.runtime.access_guard import AccessGuard
from lightning_protrain.runtime.comm.shared_memory import num_counters
from lightning_protrain.runtime.comm.step_sync import StepPublisher, StepSync

# Three chunks: one that both of two ranks own, one of rank 0, one of rank 1.
OWNERS = [(0, 1, 0), (0,), (1,)]
UNITS = ["embedding", "layers.0", "layers.1"]
BOTH, FIRST, SECOND = range(3)


class Memory:
    """The shared memory of a node whose ranks are threads."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.counters = memoryview(bytearray(8 * num_counters(len(OWNERS), num_ranks))).cast("q")
        self._lock = threading.Lock()
        self.entered = 0
        self.held = [True] * num_ranks

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._lock:
            self.entered += 1
            yield

    def is_held(self, place: int) -> bool:
        return self.held[place]


class Attendance:
    """Waits without a store; a rank that holds nothing is missing."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, str]] = []

    def wait_for_rank(self, rank: int, reached: Callable[[], bool], is_there: Callable[[], bool], what: str) -> None:
        self.waits.append((rank, what))
        until = time.monotonic() + 20
        while not reached():
            if not is_there():
                raise RuntimeError(f"rank {rank} is gone, and {what} is missing")
            assert time.monotonic() < until, what
            time.sleep(1e-4)


def node(num_ranks: int = 2, first: int = 0) -> tuple[Memory, list[StepSync]]:
    memory: Any = Memory(num_ranks)
    step_sync = []
    for place in range(num_ranks):
        ranks: Any = SimpleNamespace(local_rank=place, local_size=num_ranks, first_of_node=first, store=Attendance())
        step_sync.append(StepSync(memory, ranks, OWNERS, UNITS))
    return memory, step_sync


def waits(*actions: Callable[[], object]) -> list[bool]:
    """Run each action in a thread, and return whether it is still waiting after a moment."""
    pool = ThreadPoolExecutor(len(actions))
    futures: list[Future[object]] = [pool.submit(action) for action in actions]
    time.sleep(0.03)
    found = [not future.done() for future in futures]
    pool.shutdown(wait=False)
    PENDING.extend(futures)
    return found


PENDING: list[Future[object]] = []


@pytest.fixture(autouse=True)
def _all_ends() -> Iterator[None]:
    """Check that no thread of a test is still waiting when the test ends."""
    PENDING.clear()
    yield
    for future in PENDING:
        future.exception(timeout=20)


def test_a_reader_waits_for_every_other_owner() -> None:
    _, (zero, one) = node()
    zero.begin(False)
    one.begin(False)
    assert waits(
        lambda: zero.wait_until_stepped(BOTH, 2),
        lambda: zero.wait_until_stepped(FIRST, 2),
        lambda: zero.wait_until_stepped(SECOND, 2),
    ) == [True, False, True]
    zero.announce([BOTH, FIRST], 2)
    assert not PENDING[0].done()
    one.announce([BOTH], 2)
    assert PENDING[0].exception(timeout=20) is None
    assert not PENDING[2].done()
    one.announce([SECOND], 2)


def test_a_later_step_stands_for_an_earlier_one() -> None:
    _, (zero, one) = node()
    one.announce([SECOND], 7)
    assert waits(lambda: zero.wait_until_stepped(SECOND, 6), lambda: zero.wait_until_stepped(SECOND, 8)) == [
        False,
        True,
    ]
    one.announce([SECOND], 8)


def test_an_owner_waits_until_all_have_left() -> None:
    _, (zero, one, two) = node(3)
    for each in (zero, one, two):
        each.begin(False)
    zero.release_weights()
    one.release_weights()
    assert waits(lambda: zero.wait_until_left(2), lambda: two.wait_until_left(2)) == [True, False]
    two.release_weights()


@pytest.mark.parametrize(("others", "agreed"), [((True, True), True), ((True, False), False), ((False, False), False)])
def test_steps_run_behind_backward_where_all_ranks_may(others: tuple[bool, ...], agreed: bool) -> None:
    _, (zero, *rest) = node(3)
    for _ in range(3):  # What was said of a step before does not count.
        for each in (zero, *rest):
            each.begin(True)
    zero.begin(True)
    for step_sync, behind in zip(rest, others, strict=True):
        step_sync.begin(behind)
    assert zero.all_behind_backward() is agreed


def test_a_rank_that_has_not_begun_is_waited_for() -> None:
    _, (zero, one) = node()
    zero.begin(True)
    assert waits(zero.all_behind_backward) == [True]
    one.begin(True)
    assert PENDING[0].result(timeout=20) is True


def test_numbers_are_written_and_seen_alone() -> None:
    memory, (zero, one) = node()
    one.begin(False)
    one.release_weights()
    one.announce([BOTH, FIRST, SECOND], 2)
    assert memory.entered == 3
    zero.wait_until_left(2)
    zero.wait_until_stepped(SECOND, 2)
    assert memory.entered == 5


def test_a_missing_rank_is_named_once_and_not_waited_for_again() -> None:
    memory, (zero, one) = node(first=4)
    memory.held[1] = False
    with pytest.raises(RuntimeError, match=r"rank 5 is gone, and its part of step 3 of 'layers.1' is missing"):
        zero.wait_until_stepped(SECOND, 4)
    failure = zero.failure
    memory.held[1] = True
    with pytest.raises(RuntimeError, match=r"layers\.1") as caught:
        zero.wait_until_stepped(BOTH, 4)
    assert caught.value is failure
    assert len(zero._ranks.store.waits) == 1  # type: ignore[attr-defined]
    one.announce([SECOND], 4)
    zero.wait_until_stepped(SECOND, 4)  # What has been done is done.


def test_a_rank_that_gives_up_releases_its_threads() -> None:
    _, (zero, _one) = node()
    assert waits(lambda: zero.wait_until_stepped(BOTH, 2)) == [True]
    zero.give_up()
    with pytest.raises(RuntimeError, match="broken off on this rank"):
        PENDING[0].result(timeout=20)


def test_counters_of_other_chunks_are_our_mistake() -> None:
    memory: Any = Memory()
    ranks: Any = SimpleNamespace(local_rank=0, local_size=2)
    with pytest.raises(AssertionError, match="counters of other chunks"):
        StepSync(memory, ranks, OWNERS[:2], UNITS[:2])


def test_what_follows_a_step_waits_for_every_owner_and_passes_errors_on() -> None:
    _, (zero, one) = node()
    zero.begin(True)
    with ThreadPoolExecutor(1) as worker:
        ended = zero.behind(worker.submit(zero.announce, [BOTH], 2), BOTH, 2)
        failed = zero.behind(worker.submit(lambda: 1 // 0), FIRST, 2)
        time.sleep(0.03)
        assert not ended.done()
        one.announce([BOTH], 2)
        assert ended.exception() is None
        assert isinstance(failed.exception(), ZeroDivisionError)
    zero.close()


class Turns:
    """The step sync of one of two ranks: when it announces a step, the other rank's weights are stepped."""

    number = 2

    def __init__(self, theirs: list[nn.Parameter]) -> None:
        self.theirs = theirs
        self.announced: list[list[int]] = []
        self.waits: list[int] = []

    def announce(self, indices: list[int], number: int) -> None:
        assert number == self.number
        self.announced.append(indices)
        for parameter in self.theirs:
            parameter.data.fill_(7.0)

    def wait_until_stepped(self, index: int, number: int) -> None:
        self.waits.append(index)


class Shared:
    """Two weights in each of three chunks, one of this rank and one of another; the step of the second is pending."""

    def __init__(self, shares: bool = True) -> None:
        self.mine, self.theirs = ([nn.Parameter(torch.zeros(2)) for _ in range(3)] for _ in range(2))
        params = [
            [SimpleNamespace(host=host, owned=owned) for host, owned in ((mine, True), (theirs, False))]
            for mine, theirs in zip(self.mine, self.theirs, strict=True)
        ]
        plan, share = SimpleNamespace(trainable=True), object() if shares else None
        chunks: Any = [SimpleNamespace(params=each, share=share, plan=plan) for each in params]
        self.published: list[Any] = []
        copies: Any = SimpleNamespace(publish=self.published.append)
        self.step_sync = Turns(self.theirs)
        step_sync: Any = self.step_sync if shares else None
        self.publishing = StepPublisher(chunks, step_sync, copies, AccessGuard(lambda _: None), {1})


def test_what_others_step_is_published_before_a_hook_reads_it() -> None:
    shared = Shared()
    shared.publishing.begin()
    shared.publishing.end_step()
    assert shared.theirs[0].grad is None
    assert shared.mine[0].tolist() == [0.0, 0.0]
    assert shared.step_sync.announced == []
    assert shared.theirs[2].tolist() == [7.0, 7.0]
    assert shared.step_sync.announced == [[0, 2]]
    assert shared.step_sync.waits == [0, 2]
    assert len(shared.published) == 2
    assert {type(each) for each in shared.theirs} == {nn.Parameter}
    shared.publishing.before_wait()
    assert len(shared.step_sync.announced) == 1


def test_an_optimizer_may_look_at_what_it_does_not_step() -> None:
    shared = Shared()
    shared.publishing.begin()
    assert shared.theirs[0].tolist() == [0.0, 0.0]
    assert shared.step_sync.announced == []
    shared.publishing.publish()
    assert {type(each) for each in shared.theirs} == {nn.Parameter}


def test_what_is_frozen_is_not_watched() -> None:
    shared = Shared()
    shared.theirs[0].requires_grad_(False)
    shared.publishing._chunks[0].plan.trainable = False  # Of all of them.
    shared.publishing.begin()
    assert [type(each) is nn.Parameter for each in shared.theirs] == [True, True, False]
    shared.publishing.end()


def test_nothing_is_published_in_the_middle_of_a_step() -> None:
    shared = Shared()
    shared.publishing.begin()
    shared.publishing.before_wait()
    assert shared.step_sync.announced == []
    shared.publishing.end_step()
    shared.publishing.before_wait()
    assert shared.step_sync.announced == [[0, 2]]


def test_other_threads_publish_nothing() -> None:
    shared = Shared()
    shared.publishing.begin()
    shared.publishing.end_step()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend([shared.publishing.before_wait(), shared.theirs[0].tolist()]))
    thread.start()
    thread.join(timeout=20)
    assert found == [None, [0.0, 0.0]]
    assert shared.step_sync.announced == []
    shared.publishing.end()


def test_a_rank_that_shares_no_weights_publishes_nothing() -> None:
    shared = Shared(shares=False)
    shared.publishing.begin()
    shared.publishing.end_step()
    shared.publishing.before_wait()
    shared.publishing.publish()
    assert shared.published == []
    assert {type(each) for each in shared.theirs} == {nn.Parameter}
