"""Ranks exchange values and fail together; a rank that is gone is named, and one that is only late is waited for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_protrain import rank_store
from lightning_protrain.rank_store import RankStore
from tests.support.ranks import kill_this_rank, run_ranks, values


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"_EVERY": 0.05, "_AT_FIRST": 0.01, "_TO_ANSWER": 0.3}.items():
        monkeypatch.setattr(rank_store, name, seconds)


class Work:
    """A collective that ends after some seconds; None: never."""

    def __init__(self, seconds: float | None = None, error: str | None = None) -> None:
        self._end = float("inf") if seconds is None else time.monotonic() + seconds
        self._error = error

    def is_completed(self) -> bool:
        return time.monotonic() > self._end

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None:
            time.sleep(max(min(self._end - time.monotonic(), timeout.total_seconds()), 0.0))
        if not self.is_completed():
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise RuntimeError(self._error)


class Store:
    """A store whose host is gone."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer")


def together(*actions: Callable[[], object]) -> list[str]:
    """Call all actions at the same time, and return what each raised."""

    def run(action: Callable[[], object]) -> str:
        try:
            action()
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(run, actions))


def ranks(count: int) -> list[RankStore]:
    store = dist.HashStore()
    return [RankStore(store, rank, count) for rank in range(count)]


def test_a_collective_that_ends_leaves_no_word() -> None:
    store = dist.HashStore()
    RankStore(store, 0, 2).wait(Work(0.0), "a barrier")
    assert store.num_keys() == 0


def test_a_long_wait_takes_its_word_back() -> None:
    one, other = ranks(2)
    one.wait(Work(0.2), "a barrier")
    assert other._read("waits/0") == ""


def test_a_wait_leaves_the_core_to_others() -> None:
    one, _ = ranks(2)
    work = Work(0.4)
    asked = work.is_completed
    calls: list[bool] = []
    work.is_completed = lambda: (calls.append(asked()), calls[-1])[1]  # type: ignore[method-assign]
    one.wait(work, "a barrier")
    assert calls[-1]
    assert len(calls) <= 0.4 / rank_store._EVERY * 4


def test_a_failed_rank_is_named() -> None:
    one, other = ranks(2)
    one.doing = "Training at step 7"
    other.sign_off("failed (training at step 6) with ValueError: boom")
    found = together(lambda: one.wait(Work(), "batch 7"))
    assert found == ["Training at step 7 ends on rank 0: rank 1 failed (training at step 6) with ValueError: boom"]


def test_a_rank_that_fails_meanwhile_is_named() -> None:
    one, other = ranks(2)

    def fail() -> None:
        time.sleep(0.15)
        other.sign_off("failed")

    assert together(lambda: one.wait(Work(), "batch 7"), fail)[0].endswith("on rank 0: rank 1 failed")


def test_ranks_that_wait_in_different_places_name_each_other() -> None:
    one, other = ranks(2)
    found = together(lambda: one.wait(Work(), "batch 5"), lambda: other.wait(Work(), "averages of gradients"))
    pairs = (("averages of gradients", "batch 5"), ("batch 5", "averages of gradients"))
    assert found == [
        f"Setting up ends on rank {rank}: rank {1 - rank} waits for {its}, but this rank waits for {mine}. Check that "
        "all ranks have the same number of batches."
        for rank, (its, mine) in enumerate(pairs)
    ]


def test_ranks_that_wait_in_the_same_place_are_waited_for() -> None:
    one, other = ranks(2)
    assert together(lambda: one.wait(Work(0.6), "batch 5"), lambda: other.wait(Work(0.6), "batch 5")) == ["", ""]


def test_a_rank_that_is_elsewhere_and_comes_is_waited_for() -> None:
    one, other = ranks(2)

    def goes_on() -> None:  # From one short wait to the next, each with a word of its own.
        for number in range(8):
            other.wait(Work(0.08), f"batch {number}")

    assert together(lambda: one.wait(Work(0.7), "something else"), goes_on)[0] == ""


# Four ranks, two on each node: who waits for whom, and whether neither can come.
PAIRS = [
    ((0, range(2)), (2, range(4)), False),  # Rank 0 waits for its node alone, rank 2 for all: rank 0 may still come.
    ((0, range(2)), (3, range(2, 4)), False),
    ((0, range(2)), (1, range(2)), True),
    ((0, range(2)), (1, range(4)), True),
    ((0, None), (3, None), True),
]


@pytest.mark.parametrize(("first", "second", "stuck"), PAIRS, ids=str)
def test_only_those_who_wait_for_each_other_are_stuck(first: Any, second: Any, stuck: bool) -> None:
    all_ranks = ranks(4)
    seconds = None if stuck else 0.5
    waits = [
        lambda rank=rank, members=members: all_ranks[rank].wait(Work(seconds), f"word of {rank}", members)
        for rank, members in (first, second)
    ]
    assert ["waits for word of" in text for text in together(*waits)] == [stuck, stuck]


def _live(store: RankStore) -> None:
    for _ in range(8):  # As the thread of `open` does.
        store._store.add(f"alive/{store._rank}", 1)
        time.sleep(0.05)


def test_a_rank_that_is_gone_without_a_word_is_named() -> None:
    one, _, third = ranks(3)
    failing = Work(0.0, "Connection closed by peer")
    found = together(lambda: one.wait(failing, "batch 5"), lambda: _live(third))
    assert found[0] == (
        "Setting up ends on rank 0: rank 1 is gone without a word (killed, or out of memory? see its log)."
    )


def test_what_failed_is_chained() -> None:
    one, _ = ranks(2)
    with pytest.raises(RuntimeError, match="rank 1 is gone") as caught:
        one.wait(Work(0.0, "Connection closed by peer"), "batch 5")
    assert "Connection closed by peer" in str(caught.value.__cause__)


def test_a_failed_rank_explains_a_failed_collective() -> None:
    one, other = ranks(2)
    other.sign_off("failed")
    assert str(one.explain()) == "Setting up ends on rank 0: rank 1 failed."


def test_a_collective_that_failed_although_all_are_there() -> None:
    one, other = ranks(2)
    answers: list[str] = []
    together(lambda: answers.append(str(one.explain())), lambda: _live(other))
    assert answers[0].endswith("all ranks are there, and a collective has failed (see above).")


def test_a_store_that_is_gone_is_a_word_of_its_rank() -> None:
    store: Any = Store()
    attending = RankStore.__new__(RankStore)
    attending.__dict__.update(vars(RankStore(dist.HashStore(), 1, 2)), _store=store)
    attending.sign_off("failed")  # Nobody can read it.
    found = together(lambda: attending.wait(Work(), "batch 5"))
    assert found == ["Setting up ends on rank 1: rank 0 is gone, and the store of the process group with it"]


def test_without_looks_a_rank_that_comes_is_taken_for_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_store, "_LOOKS", 1)
    one, other = ranks(2)
    found = together(lambda: one.wait(Work(0.6), "a"), lambda: other.wait(Work(0.3), "b"))
    assert "waits for b" in found[0]


# --- what another rank does by itself ---------------------------------------------------------------------------------


def after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def never() -> bool:
    return False


def always() -> bool:
    return True


STEP = "its part of step 3 of 'layers.0'"


@pytest.mark.parametrize("seconds", [0.0, 0.2])
def test_what_a_rank_does_by_itself_is_waited_for(seconds: float) -> None:
    one, _ = ranks(2)
    reached = after(seconds)
    one.wait_for_rank(1, reached, always, STEP)
    assert reached()


def test_a_rank_that_ends_without_a_word_is_named_with_the_missing_part() -> None:
    one, _ = ranks(2)
    one.doing = "Training at step 3"
    found = together(lambda: one.wait_for_rank(1, never, never, STEP))
    gone = "rank 1 is gone without a word (killed, or out of memory? see its log)"
    assert found == [f"Training at step 3 ends on rank 0: {gone}, and its part of step 3 of 'layers.0' is missing."]


def test_a_failed_rank_is_no_error_if_its_part_still_arrives() -> None:
    one, other = ranks(2)
    other.sign_off("failed with ValueError: boom")
    one.wait_for_rank(1, after(0.15), always, STEP)
    found = together(lambda: one.wait_for_rank(1, never, always, STEP))
    assert found[0].endswith(f"rank 1 failed with ValueError: boom, and {STEP} is missing.")


def test_a_word_counts_more_than_silence() -> None:
    one, other = ranks(2)
    other.sign_off("failed with ValueError: boom")
    assert "rank 1 failed with" in together(lambda: one.wait_for_rank(1, never, never, STEP))[0]


def test_the_last_thing_that_a_rank_has_done_counts() -> None:
    one, _ = ranks(2)
    seen: list[bool] = []

    def gone() -> bool:
        seen.append(True)
        return False

    one.wait_for_rank(1, lambda: bool(seen), gone, STEP)
    assert seen == [True]


def test_no_rank_is_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = ranks(2)
    one._patience = 0.1
    assert "rank 1 has not come for 0 s" in together(lambda: one.wait_for_rank(1, never, always, STEP))[0]
    monkeypatch.setattr(rank_store, "_TO_END", 0.1)
    one._patience = 1e9
    one.sign_off("failed")  # Who has failed itself waits for nobody for long.
    assert "rank 1 has not come for 0 s" in together(lambda: one.wait_for_rank(1, never, always, STEP))[0]


# --- values ---------------------------------------------------------------------------------------------------------

SHORT = 1.5


def test_a_single_rank_exchanges_without_a_thread() -> None:
    threads = threading.active_count()
    exchange = RankStore.open("x")
    assert exchange.gather(5, "Counting") == [5]
    assert exchange.broadcast("a", "Telling") == "a"
    with exchange.together("Trying"):
        pass
    with pytest.raises(ZeroDivisionError), exchange.together("Trying"):
        raise ZeroDivisionError
    assert threading.active_count() == threads


def _speak(rank: int) -> list[Any]:
    exchange = RankStore.open("x")
    found: list[Any] = [exchange.gather((rank, b"\xff"), f"Round {number}") for number in range(3)]
    found.append(exchange.broadcast(f"of {rank}", "Telling"))
    with exchange.together("Trying"):
        pass
    again = RankStore.open("x")  # What the first one has left does not count.
    found.append(again.gather(rank, "Again"))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_values_come_in_the_order_of_the_ranks(tmp_path: Path, world_size: int) -> None:
    expected = [(rank, b"\xff") for rank in range(world_size)]
    result = [expected] * 3 + ["of 0", list(range(world_size))]
    assert values(run_ranks(_speak, world_size, tmp_path)) == [result] * world_size


@pytest.mark.parametrize("failing", [0, 2])
def test_what_fails_on_one_rank_fails_on_all_with_its_name(tmp_path: Path, failing: int) -> None:
    def act(rank: int) -> list:
        exchange = RankStore.open("x")
        try:
            with exchange.together("Saving"):
                if rank == failing:
                    raise OSError(28, "No space left on device")
        except (OSError, RuntimeError) as error:
            # They go on together.
            return [f"{type(error).__name__}: {error}", exchange.gather(rank, "Afterwards")]
        return []

    found = values(run_ranks(act, 3, tmp_path))
    for rank, (error, after) in enumerate(found):
        assert "No space left on device" in error
        assert after == [0, 1, 2]
        if rank != failing:
            assert error.startswith(f"FailedElsewhere: Saving failed on rank {failing} (OSError: ")
            assert f"rank {rank} stops with it" in error


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_is_gone_is_named_within_the_bound(tmp_path: Path, dies: int) -> None:
    def act(rank: int) -> Any:
        exchange = RankStore.open("x", SHORT)
        exchange.gather(rank, "Meeting")
        if rank == dies:
            kill_this_rank()
        try:
            exchange.gather(rank, "Saving x.ckpt")
        except RuntimeError as error:
            return str(error)
        return None

    outcomes = run_ranks(act, 3, tmp_path)
    assert outcomes[dies].error == "killed"
    for rank in {0, 1, 2} - {dies}:
        expected = f"Saving x.ckpt ends on rank {rank}: rank {dies} has not responded for 1.5 s. Look for an error"
        assert expected in outcomes[rank].value


def test_a_rank_that_is_slow_or_stopped_for_a_while_is_waited_for(tmp_path: Path) -> None:
    def act(rank: int) -> list[int]:
        exchange = RankStore.open("x", SHORT)
        if rank == 1:
            time.sleep(2 * SHORT)
        found = exchange.gather(rank, "Saving")
        if rank == 1:
            # Somebody else has to wake it.
            if os.fork() == 0:
                time.sleep(SHORT / 3)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        return found + exchange.gather(rank, "Saving again")

    assert values(run_ranks(act, 2, tmp_path)) == [[0, 1, 0, 1]] * 2


def test_without_the_signs_a_slow_rank_would_be_taken_for_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_store._Heart, "_beat", lambda self: None)

    def act(rank: int) -> None:
        exchange = RankStore.open("x", 0.3)
        time.sleep(rank)
        exchange.gather(rank, "Saving")

    assert "rank 1 has not responded" in (run_ranks(act, 2, tmp_path)[0].error or "")


def test_a_rank_that_has_left_is_not_waited_for(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        exchange = RankStore.open("x")
        if rank == 1:
            exchange.sign_off("has failed with KeyError: 'x'")
            dist.barrier()
            return None
        with pytest.raises(RuntimeError, match="Saving ends on rank 0: rank 1 has failed with KeyError: 'x'"):
            exchange.gather(rank, "Saving")
        dist.barrier()

    assert values(run_ranks(act, 2, tmp_path)) == [None, None]


def test_ranks_that_do_different_things_are_told(tmp_path: Path) -> None:
    def act(rank: int) -> None:
        RankStore.open("x").gather(rank, ("Saving", "Loading")[rank])

    for outcome in run_ranks(act, 2, tmp_path):
        assert "Ranks do different things: rank 0 'Saving', rank 1 'Loading'" in (outcome.error or "")


def test_nothing_piles_up_in_the_store(tmp_path: Path) -> None:
    def act(rank: int) -> int:
        store = dist.distributed_c10d._get_default_store()
        exchange = RankStore.open("x")
        for _ in range(3):
            exchange.gather(rank, "Meeting")
        before = store.num_keys()
        for _ in range(20):
            exchange.gather(rank, "Meeting")
        dist.barrier()
        return store.num_keys() - before

    assert max(values(run_ranks(act, 2, tmp_path))) < 6
