"""Codes and scales of 8-bit moments equal the library's for every float; other libraries have no table."""

from __future__ import annotations

import math

import bitsandbytes as bnb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_protrain.runtime.optim import adam8bit
from lightning_protrain.runtime.optim.adam8bit import BLOCK, CutScratch, codebook_of, quantise

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


def content(signed: bool = True) -> bytes:
    return bytes(values(signed).numpy().tobytes())


@pytest.mark.parametrize("signed", [True, False])
def test_codes_agree_on_both_sides_of_every_step(signed: bool) -> None:
    """Every float beside the begin of a place, in blocks whose largest is one."""
    low = adam8bit._lowest()
    orders = torch.cat([low + by for by in (-2, -1, 0, 1)])
    quotients = adam8bit._from_order(orders.clamp(-adam8bit._ORDER_OF_ONE, adam8bit._ORDER_OF_ONE))
    blocks = torch.nn.functional.pad(quotients, (0, -quotients.numel() % 255)).view(-1, 255)
    assert_as_the_library(torch.nn.functional.pad(blocks, (1, 0), value=1.0).view(-1), signed)


def test_tables_of_other_shapes_or_orders_are_none() -> None:
    assert codebook_of(values(True)[:16]) is None
    assert codebook_of(values(True).double()) is None
    assert codebook_of(values(True).flip(0)) is None


def test_another_quantiser_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that looks for the nearest value changes its mind in the midst of a place."""

    def nearest(quotients: Tensor, known: Tensor) -> Tensor:
        middles = (known[1:] + known[:-1]) / 2
        return torch.bucketize(quotients, middles).to(torch.uint8)

    assert adam8bit._tables.__wrapped__(content()) is not None
    monkeypatch.setattr(adam8bit, "_codes_of", nearest)
    assert adam8bit._tables.__wrapped__(content()) is None


def test_another_division_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    real = adam8bit._quotients

    def divided(cut: CutScratch, odd: bool) -> None:
        quotients = cut.blocks / cut.factors
        real(cut, odd)
        ordinary = cut.blocks.isfinite() & quotients.isfinite()
        cut.blocks.copy_(torch.where(ordinary, ((quotients + 1) * 65535).clamp(0, 131070), cut.blocks))

    monkeypatch.setattr(adam8bit, "_quotients", divided)
    assert adam8bit._tables.__wrapped__(content()) is None


def test_another_default_dtype_changes_no_table() -> None:
    """`precision="bf16-true"` changes the default dtype while the model computes, and steps may run then."""
    expected = adam8bit._tables.__wrapped__(content())
    adam8bit._lowest.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = adam8bit._tables.__wrapped__(content())
    finally:
        torch.set_default_dtype(torch.float32)
    assert expected is not None
    assert found is not None
    assert all(map(torch.equal, expected, found))
