"""Contracts are compared term by term, and every difference is named with what was and what is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.checkpoint.contract import TERMS, check_drift, compare, describe, refusal

CONTRACT: dict[str, Any] = {
    "model": {"a.weight": [2, 3], "a.bias": [2]},
    "dtype": {"a.weight": "float32", "a.bias": "float32"},
    "optimizer": [{"class": "torch.optim.adamw.AdamW", "groups": [["a.weight", "a.bias"]]}],
    "precision": "32-true",
    "accumulation": 4,
    "batch_size": [8],
    "data": [{"rows": 100, "shuffled": True}],
    "lr_schedule": [{"T_max": 20, "lambdas": [[1.0, 0.5]]}],
}


def _changed(term: str, *path: Any, to: Any) -> dict[str, Any]:
    contract = copy.deepcopy(CONTRACT)
    place: Any = contract
    for key in (term, *path)[:-1]:
        place = place[key]
    place[(term, *path)[-1]] = to
    return contract


CHANGES = [
    (_changed("model", "a.bias", to=[3]), "model a.bias[0]: saved 2, now 3"),
    (_changed("model", "b", to=[1]), "model b: saved nothing, now [1]"),
    (_changed("dtype", "a.bias", to="bfloat16"), "dtype a.bias: saved 'float32', now 'bfloat16'"),
    (
        _changed("optimizer", 0, "groups", 0, to=["a.bias", "a.weight"]),
        "optimizer [0].groups[0][0]: saved 'a.weight', now 'a.bias'",
    ),
    (
        _changed("optimizer", 0, "groups", 0, to=["a.bias"]),
        "optimizer [0].groups[0]: saved ['a.weight', 'a.bias'], now ['a.bias']",
    ),
    (_changed("precision", to="bf16-true"), "precision: saved '32-true', now 'bf16-true'"),
    (_changed("accumulation", to=2), "accumulation: saved 4, now 2"),
    (_changed("batch_size", 0, to=16), "batch_size [0]: saved 8, now 16"),
    (_changed("data", 0, "shuffled", to=False), "data [0].shuffled: saved True, now False"),
    (_changed("lr_schedule", 0, "T_max", to=40), "lr_schedule [0].T_max: saved 20, now 40"),
    (_changed("lr_schedule", to=[]), "lr_schedule: saved [{'T_max': 20, 'lambdas': [[1.0, 0.5]]}], now []"),
]


def test_what_is_the_same_is_no_drift() -> None:
    assert compare(CONTRACT, copy.deepcopy(CONTRACT)) == {}
    assert set(CONTRACT) == set(TERMS)


@pytest.mark.parametrize(("current", "message"), CHANGES, ids=[message for _, message in CHANGES])
def test_each_difference_is_named_with_both_values(current: dict[str, Any], message: str) -> None:
    ((term, lines),) = compare(CONTRACT, current).items()
    assert message in lines
    assert term == message.split(":")[0].split(" ")[0]


@pytest.mark.parametrize("absent", [{}, {"batch_size": None}])
def test_a_setting_that_one_side_lacks_is_not_compared(absent: dict[str, Any]) -> None:
    known = {name: value for name, value in CONTRACT.items() if name != "batch_size"} | absent
    assert compare(known, CONTRACT) == compare(CONTRACT, known) == {}


def test_a_message_has_an_end() -> None:
    many = {"model": {f"layer{index}": [index] for index in range(1000)}}
    found = compare(many, {"model": {f"layer{index}": [index + 1] for index in range(1000)}})
    assert len(found["model"]) == 1000
    assert describe(found).count("\n") < 10
    assert "model: and 994 more" in describe(found)
    assert len(describe(compare({"data": ["x" * 9999]}, {"data": ["y"]}))) < 300


def test_weights_that_had_adapters_are_to_be_merged() -> None:
    adapted, whole = {"model": {"x.lora_A.weight": [2, 4]}}, {"model": {"x.weight": [4, 4]}}
    assert "`lightning-protrain merge`" in refusal(compare(adapted, whole), "it")
    assert "merge" not in refusal(compare(whole, adapted), "it")


@pytest.mark.parametrize("names", ["batch_size", ["batchsize"], ["data", "x"]])
def test_only_terms_can_be_allowed_to_differ(names: Any) -> None:
    with pytest.raises(ValueError, match=r"allow_drift=.*give a list of model, dtype"):
        check_drift(names)
    assert check_drift(["data"]) == {"data"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(VALUES, VALUES)
def test_two_values_differ_if_and_only_if_a_difference_is_found(one: Any, other: Any) -> None:
    assert bool(compare({"data": [one]}, {"data": [other]})) == (one != other)
