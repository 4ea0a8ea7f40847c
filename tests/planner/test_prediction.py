"""The prediction that a plan carries: its sums, and JSON that is whole or refused."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from lightning_protrain.planner.prediction import PhasePrediction, Prediction

PREDICTION = Prediction(
    hardware="Test GPU",
    budget=150,
    phases=(
        PhasePrediction("forward", "layers.1", {"activations": 70, "chunk buffers": 30}, {"weights": 500}),
        PhasePrediction("backward", "layers.0", {"activations": 90, "chunk buffers": 30}, {"weights": 400, "slab": 1}),
    ),
    step_seconds=2.0,
    busy={"compute": 1.5, "upload": 2.0, "download": 0.5, "host": 0.25},
    bound="link",
    samples=4,
    tokens=1000,
    accumulate=3,
    advice=("Buy memory.",),
)


def test_the_peaks_are_those_of_the_worst_phase() -> None:
    assert PREDICTION.device_bytes == 120
    assert PREDICTION.host_bytes == 500


def test_tokens_per_second_count_all_micro_batches() -> None:
    assert PREDICTION.tokens_per_second == 1500
    assert replace(PREDICTION, tokens=0).tokens_per_second is None


def test_advice_is_added() -> None:
    assert PREDICTION.with_advice("Sell it.").advice == ("Buy memory.", "Sell it.")
    assert PREDICTION.advice == ("Buy memory.",)


def test_what_ranks_sum_is_a_term_of_backward() -> None:
    among = PREDICTION.among_ranks(7)
    forward, backward = among.phases
    assert forward == PREDICTION.phases[0]
    assert backward.device == {**PREDICTION.phases[1].device, "gradient_buckets": 7}
    assert among.among_ranks(0) == PREDICTION
    assert among.among_ranks(3) == PREDICTION.among_ranks(3) != PREDICTION


@pytest.mark.parametrize("alone", [None, 1.5])
def test_json_goes_round(alone: float | None) -> None:
    among = replace(PREDICTION, alone_seconds=alone)
    assert Prediction.from_dict(json.loads(json.dumps(asdict(among)))) == among


def test_what_was_written_before_ranks_were_timed_alone_is_read() -> None:
    content = json.loads(json.dumps(asdict(PREDICTION)))
    del content["alone_seconds"]
    assert Prediction.from_dict(content) == PREDICTION


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("hardware",), 3),
        (("phases",), []),
        (("phases",), {}),
        (("phases", 0), "forward"),
        (("phases", 0, "device"), [1]),
        (("phases", 0, "device", "activations"), -1),
        (("phases", 0, "device", "activations"), 1.5),
        (("phases", 1, "unit"), None),
        (("step_seconds",), -1.0),
        (("step_seconds",), float("nan")),
        (("step_seconds",), True),
        (("busy", "host"), float("inf")),
        (("busy",), 1.0),
        (("bound",), 0),
        (("tokens",), -1),
        (("budget",), None),
        (("accumulate",), "3"),
        (("advice",), [1]),
        (("alone_seconds",), -1.0),
        (("alone_seconds",), "1"),
    ],
    ids=str,
)
def test_what_is_no_prediction_is_refused_by_name(path: tuple[Any, ...], value: Any) -> None:
    content = copy.deepcopy(json.loads(json.dumps(asdict(PREDICTION))))
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    name = next(key for key in reversed(path) if isinstance(key, str))
    with pytest.raises(ValueError, match=rf"prediction.*{name}.*Make the plan again\.") as refusal:
        Prediction.from_dict(content)
    shown = value[0] if path == ("advice",) else value
    assert repr(shown) in str(refusal.value) or type(value).__name__ in str(refusal.value)


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_fields_are_exactly_those(change: str) -> None:
    content = asdict(PREDICTION)
    if change == "missing":
        del content["bound"]
    else:
        content["more"] = 1
    with pytest.raises(ValueError, match=r"prediction has the fields .*Make the plan again"):
        Prediction.from_dict(content)
    with pytest.raises(ValueError, match="prediction"):
        Prediction.from_dict([])
