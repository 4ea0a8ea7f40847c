"""Plans and predictions of known cases stay as they are, unless a change is meant to move them."""

from __future__ import annotations

import json

import pytest

from tests.support.goldens import BATCHES, MODELS, PATH, predictions


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_predictions_stay_within_one_per_cent(model: str, batch: tuple[int, int]) -> None:
    known = json.loads(PATH.read_text(encoding="utf-8"))
    for case, found in predictions(model, batch):
        assert found == pytest.approx(known[case], rel=0.01), case
