"""The score of the latest evaluation, and whether it is that of the weights as they are."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_protrain.callbacks.checkpoint.saving_points import EvaluationScores
from lightning_protrain.checkpoint.discover import Ranking


def _trainer(step: int, **metrics: float) -> Any:
    return SimpleNamespace(
        global_step=step,
        callback_metrics={name: torch.tensor(value) for name, value in metrics.items()},
        is_global_zero=True,
        validating=False,
    )


def test_an_evaluation_counts_for_its_own_step_only() -> None:
    scores = EvaluationScores(Ranking("loss"))
    assert scores.now(_trainer(0)) == (None, False)
    assert scores.note(_trainer(3, loss=2.0), None)
    assert scores.now(_trainer(3)) == (2.0, True)
    assert scores.now(_trainer(4)) == (None, False)


def test_a_second_fit_begins_with_no_score_of_the_first() -> None:
    scores = EvaluationScores(Ranking("loss"))
    assert scores.note(_trainer(3, loss=2.0), None)
    scores.begin(known=True)
    assert scores.now(_trainer(3)) == (None, False)


@pytest.mark.parametrize(("score", "best", "better"), [(1.0, None, True), (1.0, 2.0, True), (2.0, 2.0, False)])
def test_it_says_what_is_better(score: float, best: float | None, better: bool) -> None:
    assert EvaluationScores(Ranking("loss")).note(_trainer(1, loss=score), best) is better


def test_what_is_not_finite_is_said_and_never_better() -> None:
    scores = EvaluationScores(Ranking("loss"))
    with pytest.warns(UserWarning, match="loss is nan at step 7: a value that is not finite is never the best"):
        assert not scores.note(_trainer(7, loss=math.nan), None)


def test_a_metric_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"monitor='los': no metric of that name was logged, but \['loss'\]"):
        EvaluationScores(Ranking("los")).read(_trainer(1, loss=1.0), {"loss": torch.tensor(1.0)})


def test_without_a_metric_there_is_no_score() -> None:
    assert EvaluationScores(Ranking(None)).read(_trainer(1), {}) is None
