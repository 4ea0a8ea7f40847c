"""Every rank gets the same answer to a question, whoever knows it, and no rank waits for one that has gone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_protrain.callbacks.checkpoint.rendezvous import StepFlags
from tests.support.ranks import BOUND, kill_this_rank, run_ranks, values


def test_one_rank_has_its_own_word() -> None:
    facts = [False, True]
    agreement = StepFlags(lambda: facts)
    agreement.open()
    agreement.ask()
    assert agreement.answer() == [False, True]
    facts[0] = True
    assert agreement.answer() == [True, True]
    agreement.close()


def _answers(rank: int) -> list[list[bool]]:
    facts = [False, False]
    agreement = StepFlags(lambda: facts)
    agreement.open()
    agreement.open()
    answers = [agreement.answer()]
    agreement.ask()
    facts[rank] = True  # After the question.
    agreement.ask()
    answers += [agreement.answer(), agreement.answer()]
    facts[1] = False
    answers.append(agreement.answer())
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
        agreement.answer()
        if rank == 1:
            kill_this_rank()
        if asked:
            agreement.ask()
        try:
            agreement.answer()
        finally:
            agreement.close()

    outcomes = run_ranks(wait, 2, tmp_path)
    assert outcomes[1].error == "killed"
    assert "rank 0: another rank does not answer any more" in (outcomes[0].error or "")
    assert outcomes[0].seconds < BOUND


def test_a_question_that_others_never_hear_keeps_nobody_from_leaving(tmp_path: Path) -> None:
    def leave(rank: int) -> int:
        agreement = StepFlags(lambda: [False])
        agreement.open()
        if rank == 0:
            agreement.ask()
            agreement.close()
        return os.getpid()

    outcomes = run_ranks(leave, 2, tmp_path)
    assert len(set(values(outcomes))) == 2
    assert max(outcome.seconds for outcome in outcomes) < BOUND
