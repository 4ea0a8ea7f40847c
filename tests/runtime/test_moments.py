"""Moments of 8 bits, tile by tile: the codes and scales of the library; whole steps are in `test_blockwise`."""

from __future__ import annotations

import math

import bitsandbytes as bnb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_protrain.runtime.optim.adam8bit import BLOCK, Adam8bitSettings, codebook_of, quantise

SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 5e-41, 2.9e-39, 3e-39, 1e-20, 1.0, -1.0, 3e38, math.inf, -math.inf, math.nan]


def values(signed: bool) -> Tensor:
    return bnb.functional.create_dynamic_map(signed=signed)


def assert_as_the_library(given: Tensor, signed: bool, positive: bool = False) -> None:
    codes, scales = torch.ops.bitsandbytes.quantize_blockwise(given, values(signed), BLOCK)
    tables = codebook_of(values(signed))
    assert tables is not None
    found = quantise(given, tables, positive)
    assert torch.equal(found[0], codes)
    assert torch.equal(found[1].view(torch.int32), scales.view(torch.int32))


@pytest.mark.parametrize("signed", [True, False])
@settings(max_examples=150, deadline=None)
@given(
    exponents=st.lists(st.integers(-45, 38), min_size=1, max_size=8),
    special=st.lists(st.tuples(st.integers(0, 2047), st.sampled_from(SPECIAL)), max_size=6),
    size=st.one_of(st.integers(1, BLOCK), st.sampled_from([2 * BLOCK, 8 * BLOCK])),
    seed=st.integers(0, 99),
)
def test_codes_are_those_of_the_library(
    signed: bool, exponents: list[int], special: list[tuple[int, float]], size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    powers = torch.tensor(exponents, dtype=torch.float64)[torch.randint(len(exponents), (size,), generator=generator)]
    tile = (torch.randn(size, generator=generator, dtype=torch.float64) * 10**powers).float()
    for at, value in special:
        tile[at % size] = value
    assert_as_the_library(tile, signed)
    assert_as_the_library(tile.abs(), signed, positive=True)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("value", SPECIAL)
def test_a_block_of_one_value_is_that_of_the_library(signed: bool, value: float) -> None:
    assert_as_the_library(torch.full((BLOCK,), value), signed)
    assert_as_the_library(torch.full((7,), value), signed)


@pytest.mark.parametrize(
    ("name", "decay", "first"), [("adam", 0.99, False), ("lion", 0.99, False), ("momentum", 1.0, True)]
)
def test_settings(name: str, decay: float, first: bool) -> None:
    config = {"lr": 0.1, "betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.1}
    found = Adam8bitSettings.of(name, config, 1)
    assert found.decay == pytest.approx(decay)
    assert found.first is first
    assert found.size == pytest.approx(-0.2 if name == "adam" else -0.1)
    assert found.root == pytest.approx(0.5 if name == "adam" else 1.0)
    assert Adam8bitSettings.of("momentum", config, 2).first is False
