"""Ranks exchange values; one failure fails all ranks, and a rank that is gone is named without a wait."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_protrain.callbacks.checkpoint import rank_exchange
from lightning_protrain.callbacks.checkpoint.rank_exchange import RankExchange, StepFlags, refuse_unequal
from lightning_protrain.distributed.ranks import gather
from tests.support.ranks import kill_this_rank, run_ranks, values


def test_alone_nothing_is_gathered_or_refused() -> None:
    assert gather(5) == [5]
    refuse_unequal(["a"], "x")


def _means(rank: int, names: tuple[str | None, ...]) -> None:
    refuse_unequal(gather(names[rank]), "They differ")


@pytest.mark.parametrize(("names", "differ"), [(("a", "a"), False), ((None, None), False), (("a", None), True)])
def test_what_ranks_mean_is_compared(tmp_path: Path, names: tuple[str | None, ...], differ: bool) -> None:
    errors = {outcome.error for outcome in run_ranks(_means, 2, tmp_path, names)}
    assert errors == {"ValueError: They differ: rank 0: a, rank 1: None." if differ else None}


def test_one_rank_has_its_own_word() -> None:
    facts = [False, True]
    agreement = StepFlags(lambda: facts)
    agreement.open()
    agreement.start()
    assert agreement.result() == [False, True]
    facts[0] = True
    assert agreement.result() == [True, True]
    agreement.close()


def _answers(rank: int) -> list[list[bool]]:
    facts = [False, False]
    agreement = StepFlags(lambda: facts)
    agreement.open()
    agreement.open()
    answers = [agreement.result()]
    agreement.start()
    facts[rank] = True  # After the question.
    agreement.start()
    answers += [agreement.result(), agreement.result()]
    facts[1] = False
    answers.append(agreement.result())
    agreement.close()
    return answers


def test_all_ranks_get_what_one_knew_when_it_was_asked(tmp_path: Path) -> None:
    expected = [[False, False], [False, False], [True, True], [True, False]]
    assert values(run_ranks(_answers, 2, tmp_path)) == [expected, expected]


@pytest.mark.parametrize("asked", [True, False])
def test_a_rank_that_has_gone_does_not_answer(tmp_path: Path, asked: bool) -> None:
    def wait(rank: int) -> None:
        agreement = StepFlags(lambda: [False])
        agreement.open()
        agreement.result()
        if rank == 1:
            kill_this_rank()
        if asked:
            agreement.start()
        try:
            agreement.result()
        finally:
            agreement.close()

    outcomes = run_ranks(wait, 2, tmp_path)
    assert outcomes[1].error == "killed"
    assert "rank 0: another rank does not respond" in (outcomes[0].error or "")
    assert outcomes[0].error != "hangs"


def test_a_question_that_others_never_hear_keeps_nobody_from_leaving(tmp_path: Path) -> None:
    def leave(rank: int) -> int:
        agreement = StepFlags(lambda: [False])
        agreement.open()
        if rank == 0:
            agreement.start()
            agreement.close()
        return os.getpid()

    outcomes = run_ranks(leave, 2, tmp_path)
    assert len(set(values(outcomes))) == 2
    assert "hangs" not in [outcome.error for outcome in outcomes]


SHORT = 1.5


def test_a_single_rank_exchanges_without_a_thread() -> None:
    threads = threading.active_count()
    exchange = RankExchange.open("x")
    assert exchange.gather(5, "Counting") == [5]
    assert exchange.broadcast("a", "Telling") == "a"
    with exchange.together("Trying"):
        pass
    with pytest.raises(ZeroDivisionError), exchange.together("Trying"):
        raise ZeroDivisionError
    assert threading.active_count() == threads
    exchange.close()


def _speak(rank: int) -> list[Any]:
    exchange = RankExchange.open("x")
    found: list[Any] = [exchange.gather((rank, b"\xff"), f"Round {number}") for number in range(3)]
    found.append(exchange.broadcast(f"of {rank}", "Telling"))
    with exchange.together("Trying"):
        pass
    exchange.close()
    again = RankExchange.open("x")  # What the first one has left does not count.
    found.append(again.gather(rank, "Again"))
    again.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_values_come_in_the_order_of_the_ranks(tmp_path: Path, world_size: int) -> None:
    expected = [(rank, b"\xff") for rank in range(world_size)]
    result = [expected] * 3 + ["of 0", list(range(world_size))]
    assert values(run_ranks(_speak, world_size, tmp_path)) == [result] * world_size


@pytest.mark.parametrize("failing", [0, 2])
def test_what_fails_on_one_rank_fails_on_all_with_its_name(tmp_path: Path, failing: int) -> None:
    def act(rank: int) -> list:
        exchange = RankExchange.open("x")
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
        exchange = RankExchange.open("x", SHORT)
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
    for outcome in outcomes[:dies] + outcomes[dies + 1 :]:
        assert f"Saving x.ckpt cannot be completed: rank {dies} has not responded for 1.5 s." in outcome.value
    assert rank_exchange.BOUND < 10


def test_a_rank_that_is_slow_or_stopped_for_a_while_is_waited_for(tmp_path: Path) -> None:
    def act(rank: int) -> list[int]:
        exchange = RankExchange.open("x", SHORT)
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
    monkeypatch.setattr(RankExchange, "_beat", lambda self: None)

    def act(rank: int) -> None:
        exchange = RankExchange.open("x", 0.3)
        time.sleep(rank)
        exchange.gather(rank, "Saving")

    assert "rank 1 has not responded" in (run_ranks(act, 2, tmp_path)[0].error or "")


def test_a_rank_that_has_left_is_not_waited_for(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        exchange = RankExchange.open("x")
        if rank == 1:
            exchange.close("has failed with KeyError: 'x'")
            dist.barrier()
            return None
        with pytest.raises(RuntimeError, match="Saving cannot be completed: rank 1 has failed with KeyError: 'x'"):
            exchange.gather(rank, "Saving")
        dist.barrier()

    assert values(run_ranks(act, 2, tmp_path)) == [None, None]


def test_ranks_that_do_different_things_are_told(tmp_path: Path) -> None:
    def act(rank: int) -> None:
        RankExchange.open("x").gather(rank, ("Saving", "Loading")[rank])

    for outcome in run_ranks(act, 2, tmp_path):
        assert "Ranks do different things: rank 0 'Saving', rank 1 'Loading'" in (outcome.error or "")


def test_nothing_piles_up_in_the_store(tmp_path: Path) -> None:
    def act(rank: int) -> int:
        store = dist.distributed_c10d._get_default_store()
        exchange = RankExchange.open("x")
        for _ in range(3):
            exchange.gather(rank, "Meeting")
        before = store.num_keys()
        for _ in range(20):
            exchange.gather(rank, "Meeting")
        dist.barrier()
        return store.num_keys() - before

    assert max(values(run_ranks(act, 2, tmp_path))) < 6
