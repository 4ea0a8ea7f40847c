from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest

from lightning_protrain.profiler.records import ModelLayout, ParameterInfo, UnitInfo

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
