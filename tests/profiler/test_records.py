from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError, asdict, replace
from mmap import PAGESIZE

import pytest

from lightning_protrain.profiler.records import (
    ModelLayout,
    ModelProfile,
    ParameterInfo,
    ParameterUse,
    UnitCall,
    UnitInfo,
    castable,
    swapped_bytes,
)

WEIGHT = ParameterInfo("embed.weight", ("embed.weight", "head.weight"), (4, 3), "bfloat16", 24, True)
SCALE = ParameterInfo("scale", ("scale",), (), "float32", 4, False)
UNITS = (
    UnitInfo("", False, ("scale",), encloses=("embed", "head")),
    UnitInfo("embed", True, ("embed.weight",)),
    UnitInfo("head", False, ("embed.weight",)),
)
LAYOUT = ModelLayout((WEIGHT, SCALE), UNITS, buffer_bytes=8)


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((7,), 7), ((4, 3), 12), ((4, 0, 3), 0)])
def test_numel(shape: tuple[int, ...], numel: int) -> None:
    assert ParameterInfo("w", ("w",), shape, "float32", 4 * numel, True).numel == numel


def test_blocks_are_the_units_that_say_so() -> None:
    assert LAYOUT.blocks == (UNITS[1],)


def test_parameters_are_found_by_their_first_name_only() -> None:
    assert LAYOUT.parameter("embed.weight") is WEIGHT
    assert LAYOUT.parameter("scale") is SCALE
    with pytest.raises(KeyError, match=r"head\.weight"):
        LAYOUT.parameter("head.weight")


def test_records_are_values() -> None:
    LAYOUT.parameter("scale")
    again = ModelLayout((WEIGHT, SCALE), UNITS, buffer_bytes=8)
    assert LAYOUT == again == pickle.loads(pickle.dumps(LAYOUT))
    assert hash(LAYOUT) == hash(again)
    with pytest.raises(FrozenInstanceError):
        LAYOUT.buffer_bytes = 0  # type: ignore[misc]


CALL = UnitCall("block", 0, 100, (("a", 8), ("b", 4), ("b", 4)), 10, 20, 30, 40, 0)
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
    outside_saved_bytes=5,
    outside_saved_casts=(("head", 2),),
    saved_bytes=105,
    flops=30,
    peak_bytes=40,
)


@pytest.mark.parametrize(("dtype", "names"), [("bfloat16", {"once"}), ("float16", {"half"}), ("float32", set())])
def test_only_what_is_cast_once_and_nothing_else_is_castable(dtype: str, names: set[str]) -> None:
    assert castable(PROFILE, dtype) == names


def test_uses_are_casts_and_direct_uses() -> None:
    assert [use.uses for use in PROFILE.parameters] == [1, 1, 2, 2, 2, 1, 1, 0]


@pytest.mark.parametrize(("streamed", "nbytes"), [((), 100), (("a",), 92), (("b",), 92), (("a", "b", "c"), 84)])
def test_saved_bytes_without_copies_of_streamed_weights(streamed: tuple[str, ...], nbytes: int) -> None:
    assert CALL.saved_bytes_without(frozenset(streamed)) == nbytes


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


def test_a_profile_is_plain_values() -> None:
    written = json.loads(json.dumps(asdict(PROFILE)))
    assert written["calls"][0]["saved_casts"] == [["a", 8], ["b", 4], ["b", 4]]
    assert pickle.loads(pickle.dumps(PROFILE)) == PROFILE
    assert hash(PROFILE) == hash(replace(PROFILE))
