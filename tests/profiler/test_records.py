"""Records of models and hardware are plain values, come back from JSON, and refuse what is no figure."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from mmap import PAGESIZE
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.profiler.records import (
    FORMAT,
    HardwareProfile,
    ModelProfile,
    OperationCost,
    ParameterUse,
    UnitCall,
    castable,
    swapped_bytes,
)
from tests.support import machines

CALL = UnitCall("block", 100, (("a", 8), ("b", 4), ("b", 4)), 0)
PROFILE = ModelProfile(
    calls=(CALL,),
    parameters=(
        ParameterUse("once", ("bfloat16",)),
        ParameterUse("half", ("float16",)),
        ParameterUse("twice", ("bfloat16", "bfloat16")),
        ParameterUse("both", ("bfloat16", "float16")),
        ParameterUse("read", ("bfloat16",), direct_uses=1),
        ParameterUse("saved", ("bfloat16",), saves=1),
        ParameterUse("asked", ("bfloat16",), dtype_reads=1),
        ParameterUse("unused"),
    ),
    saved_bytes=105,
    flops=30,
)


@pytest.mark.parametrize(("dtype", "names"), [("bfloat16", {"once"}), ("float16", {"half"}), ("float32", set())])
def test_only_what_is_cast_once_and_nothing_else_is_castable(dtype: str, names: set[str]) -> None:
    assert castable(PROFILE, dtype) == names


@pytest.mark.parametrize(
    ("nbytes", "pages"), [(0, 0), (PAGESIZE - 1, 0), (PAGESIZE, 1), (PAGESIZE + 1, 2), (9 * PAGESIZE, 9)]
)
def test_swapped_bytes_are_whole_pages(nbytes: int, pages: int) -> None:
    assert swapped_bytes(nbytes) == pages * PAGESIZE


@pytest.mark.parametrize(("streamed", "pages"), [((), (7, 5)), (("a",), (5, 5)), (("a", "b"), (5, 4))])
def test_swapped_bytes_without_copies_of_streamed_weights(streamed: tuple[str, ...], pages: tuple[int, int]) -> None:
    casts = (("a", PAGESIZE + 1), ("b", PAGESIZE - 1)), (("b", PAGESIZE),)
    calls = (
        replace(CALL, saved_casts=casts[0], swap_bytes=7 * PAGESIZE),
        replace(CALL, saved_casts=casts[1], swap_bytes=5 * PAGESIZE),
        replace(CALL, name="other", saved_casts=(), swap_bytes=PAGESIZE),
    )
    assert [call.swap_bytes_without(frozenset(streamed)) // PAGESIZE for call in calls] == [*pages, 1]
    most = replace(PROFILE, calls=calls).swap_bytes(frozenset(streamed))
    assert most == {"block": max(pages) * PAGESIZE, "other": PAGESIZE}


RATES = [
    field.name
    for field in fields(HardwareProfile)
    if field.name not in ("name", "flops", "device_bytes", "host_bytes", "asynchronous", "launch")
]


@given(st.floats(min_value=5e-324, allow_nan=False, allow_infinity=False), st.integers(min_value=1))
def test_every_figure_comes_back_to_the_last_bit(rate: float, nbytes: int) -> None:
    profile = replace(machines.PROFILE, **dict.fromkeys(RATES, rate), flops={"float32": rate}, host_bytes=nbytes)
    assert HardwareProfile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, None, "1e9", True])
@pytest.mark.parametrize("name", [*RATES, "device_bytes", "host_bytes"])
def test_a_missing_figure_is_an_error(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"HardwareProfile\.{name}={value!r}: give .* Measure the hardware again"):
        replace(machines.PROFILE, **{name: value})
    content = json.loads(machines.PROFILE.to_json()) | {name: value}
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
        replace(machines.PROFILE, **change)
    content = json.loads(machines.PROFILE.to_json()) | change
    with pytest.raises(ValueError, match=message):
        HardwareProfile.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"profile"', "null", machines.PROFILE.to_json()[:-1]])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        HardwareProfile.from_json(text)


@pytest.mark.parametrize("written", [None, 0, FORMAT + 1, str(FORMAT), True, float(FORMAT)])
def test_another_format_is_refused(written: Any) -> None:
    content = json.loads(machines.PROFILE.to_json())
    with pytest.raises(ValueError, match=f"format .*, but this version reads {FORMAT}"):
        HardwareProfile.from_json(json.dumps(content | {"format": written}))


@pytest.mark.parametrize("name", [field.name for field in fields(HardwareProfile)])
def test_fields_are_neither_missing_nor_unknown(name: str) -> None:
    content = json.loads(machines.PROFILE.to_json())
    with pytest.raises(ValueError, match=f"unknown .*{name}2"):
        HardwareProfile.from_json(json.dumps(content | {f"{name}2": 1}))
    del content[name]
    with pytest.raises(ValueError, match=f"lacks .*{name}"):
        HardwareProfile.from_json(json.dumps(content))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, None, "1e-6"])
def test_a_launch_takes_time_or_is_unknown(value: Any) -> None:
    assert replace(machines.PROFILE, launch=0).launch == 0
    with pytest.raises(ValueError, match=rf"HardwareProfile\.launch={value!r}: give "):
        replace(machines.PROFILE, launch=value)


def test_operations_take_as_long_as_their_arithmetic_or_their_bytes() -> None:
    product = OperationCost(flops=2 * 10**12, nbytes=10**9, dtype="float32", count=3)
    copy = OperationCost(flops=0, nbytes=10**12, dtype="int64")
    assert machines.PROFILE.seconds((product, copy)) == pytest.approx(3 * 0.1 + 1)
    assert machines.PROFILE.seconds((replace(product, nbytes=10**12),)) == pytest.approx(3)
    assert machines.PROFILE.seconds(()) == 0
    # The host launches four operations, one after the other; their group takes at least that long.
    for launch, expected in ((0.05, 3 * 0.1 + 1), (0.5, 4 * 0.5)):
        slow = replace(machines.PROFILE, launch=launch)
        assert slow.seconds((product, copy)) == pytest.approx(expected)


def test_a_dtype_that_was_not_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="'a device' has no rate for float16, only for float32, bfloat16"):
        machines.PROFILE.seconds((OperationCost(1, 1, "float16"),))
