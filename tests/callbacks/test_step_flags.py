"""Ranks take the maximum of their flags at the end of a step; one that is gone is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_protrain.callbacks.checkpoint.saving_points import StepFlags
from lightning_protrain.rank_store import RankStore
from tests.support.ranks import kill_this_rank, run_ranks, values


def test_one_rank_has_its_own_word() -> None:
    facts = [False, True]
    agreement = StepFlags(lambda: facts)
    agreement.open(RankStore.open("x"))
    agreement.start()
    assert agreement.result() == [False, True]
    facts[0] = True
    assert agreement.result() == [True, True]
    agreement.close()


def _answers(rank: int) -> list[list[bool]]:
    facts = [False, False]
    agreement = StepFlags(lambda: facts)
    agreement.open(RankStore.open("x"))
    agreement.open(RankStore.open("x"))
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
        agreement.open(RankStore.open("x"))
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
    assert "rank 1 is gone without a word" in (outcomes[0].error or "")
    assert outcomes[0].error != "hangs"


def test_a_question_that_others_never_hear_keeps_nobody_from_leaving(tmp_path: Path) -> None:
    def leave(rank: int) -> int:
        agreement = StepFlags(lambda: [False])
        agreement.open(RankStore.open("x"))
        dist.barrier()  # Both are connected.
        if rank == 0:
            agreement.start()
            agreement.close()
        return os.getpid()

    outcomes = run_ranks(leave, 2, tmp_path)
    assert len(set(values(outcomes))) == 2
    assert "hangs" not in [outcome.error for outcome in outcomes]
