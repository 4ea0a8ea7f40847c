"""The record of a machine refuses what is no figure, and comes back from JSON as it went."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.profiler.records import FORMAT, HardwareProfile, OperationCost
from tests.profiler.machine import PROFILE

RATES = [
    field.name
    for field in fields(HardwareProfile)
    if field.name not in ("name", "flops", "device_bytes", "host_bytes", "asynchronous")
]


def test_it_comes_back_from_json() -> None:
    assert HardwareProfile.from_json(PROFILE.to_json()) == PROFILE
    synchronous = replace(PROFILE, flops=MappingProxyType({"float16": 1}), asynchronous=False)
    assert HardwareProfile.from_json(synchronous.to_json()) == synchronous


@given(st.floats(min_value=5e-324, allow_nan=False, allow_infinity=False), st.integers(min_value=1))
def test_every_figure_comes_back_to_the_last_bit(rate: float, nbytes: int) -> None:
    profile = replace(PROFILE, **dict.fromkeys(RATES, rate), flops={"float32": rate}, host_bytes=nbytes)
    assert HardwareProfile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, None, "1e9", True])
@pytest.mark.parametrize("name", [*RATES, "device_bytes", "host_bytes"])
def test_a_missing_figure_is_an_error(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"HardwareProfile\.{name}={value!r}: give .* Measure the hardware again"):
        replace(PROFILE, **{name: value})
    content = json.loads(PROFILE.to_json()) | {name: value}
    with pytest.raises(ValueError, match=rf"HardwareProfile\.{name}="):
        HardwareProfile.from_json(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops": {}}, "flops={}"),
        ({"flops": 1e12}, "flops=1000000000000"),
        ({"flops": {"float32": math.nan}}, r"flops\['float32'\]=nan"),
        ({"flops": {"float32": 1e12, "bfloat16": 0}}, r"flops\['bfloat16'\]=0"),
        ({"device_bytes": 1.5e9}, "device_bytes=1500000000.0: give a whole number"),
        ({"name": ""}, "name=''"),
        ({"name": 3}, "name=3"),
        ({"asynchronous": 1}, "asynchronous=1"),
    ],
)
def test_other_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PROFILE, **change)
    content = json.loads(PROFILE.to_json()) | change
    with pytest.raises(ValueError, match=message):
        HardwareProfile.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"profile"', "null", PROFILE.to_json()[:-1]])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        HardwareProfile.from_json(text)


@pytest.mark.parametrize("written", [None, 0, FORMAT + 1, str(FORMAT), True, float(FORMAT)])
def test_another_format_is_refused(written: Any) -> None:
    content = json.loads(PROFILE.to_json())
    with pytest.raises(ValueError, match=f"format .*; this version reads {FORMAT}"):
        HardwareProfile.from_json(json.dumps(content | {"format": written}))


@pytest.mark.parametrize("name", [field.name for field in fields(HardwareProfile)])
def test_fields_are_neither_missing_nor_unknown(name: str) -> None:
    content = json.loads(PROFILE.to_json())
    with pytest.raises(ValueError, match=f"unknown .*{name}2"):
        HardwareProfile.from_json(json.dumps(content | {f"{name}2": 1}))
    del content[name]
    with pytest.raises(ValueError, match=f"without .*{name}"):
        HardwareProfile.from_json(json.dumps(content))


def test_operations_take_as_long_as_their_arithmetic_or_their_bytes() -> None:
    product = OperationCost(flops=2 * 10**12, nbytes=10**9, dtype="float32", count=3)
    copy = OperationCost(flops=0, nbytes=10**12, dtype="int64")
    assert PROFILE.seconds((product, copy)) == pytest.approx(3 * 0.1 + 1)
    assert PROFILE.seconds((replace(product, nbytes=10**12),)) == pytest.approx(3)
    assert PROFILE.seconds(()) == 0


def test_a_dtype_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="'a device' multiplies float16 is not known, only float32, bfloat16"):
        PROFILE.seconds((OperationCost(1, 1, "float16"),))
