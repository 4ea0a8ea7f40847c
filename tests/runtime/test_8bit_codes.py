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
from lightning_protrain.runtime.optim.adam8bit import BLOCK, quantise, table_of

SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 5e-41, 2.9e-39, 3e-39, 1e-20, 1.0, -1.0, 3e38, math.inf, -math.inf, math.nan]


def values(signed: bool) -> Tensor:
    return bnb.functional.create_dynamic_map(signed=signed)


def assert_as_the_library(given: Tensor, signed: bool) -> None:
    codes, scales = torch.ops.bitsandbytes.quantize_blockwise(given, values(signed), BLOCK)
    table = table_of(values(signed))
    assert table is not None
    found = torch.empty_like(codes), torch.empty_like(scales)
    quantise(given.clone(), table, found, torch.empty(3, len(given)))
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
    assert_as_the_library(tile.abs(), signed)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("value", SPECIAL)
def test_a_block_of_one_value_is_that_of_the_library(signed: bool, value: float) -> None:
    assert_as_the_library(torch.full((BLOCK,), value), signed)
    assert_as_the_library(torch.full((7,), value), signed)


def content(signed: bool = True) -> bytes:
    return bytes(values(signed).numpy().tobytes())


@pytest.mark.parametrize("signed", [True, False])
def test_codes_agree_around_every_place(signed: bool) -> None:
    """Floats on both sides of the beginning of each place, in blocks whose largest element is one."""
    begins = (torch.arange(adam8bit.PLACES, dtype=torch.float64) / 65535 - 1).float()
    near = [begins, *(begins.nextafter(torch.tensor(to)) for to in (-2.0, 2.0)), begins - 2**-24, begins + 2**-24]
    quotients = torch.cat(near).clamp_(-1.0, 1.0)
    blocks = torch.nn.functional.pad(quotients, (0, -quotients.numel() % 255)).view(-1, 255)
    assert_as_the_library(torch.nn.functional.pad(blocks, (1, 0), value=1.0).view(-1), signed)


def test_values_of_another_shape_or_dtype_have_no_table() -> None:
    assert table_of(values(True)[:16]) is None
    assert table_of(values(True).double()) is None


def test_another_quantiser_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that looks for the nearest value changes its mind in the midst of a place."""
    real = adam8bit._quantised

    def nearest(blocks: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        _, scales = real(blocks, known)
        quotients = (blocks.view(-1, BLOCK) / scales[:, None]).view(blocks.shape)
        return torch.bucketize(quotients, (known[1:] + known[:-1]) / 2).to(torch.uint8), scales

    assert adam8bit._table.__wrapped__(content()) is not None
    monkeypatch.setattr(adam8bit, "_quantised", nearest)
    assert adam8bit._table.__wrapped__(content()) is None


def test_another_division_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library multiplies by the reciprocal, which does not round as a division does."""
    real = adam8bit._quantised

    def divided(blocks: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = real(blocks, known)
        quotients = blocks.view(-1, BLOCK) / scales[:, None]
        ordinary = (blocks.view(-1, BLOCK).isfinite() & quotients.isfinite()).all(1)
        unit = torch.where(ordinary[:, None], quotients, 1.0)
        return torch.where(ordinary[:, None], real(unit, known)[0], codes.view(-1, BLOCK)).view(codes.shape), scales

    monkeypatch.setattr(adam8bit, "_quantised", divided)
    assert adam8bit._table.__wrapped__(content()) is None


def test_another_default_dtype_changes_no_table() -> None:
    """`precision="bf16-true"` changes the default dtype while the model computes, and steps may run then."""
    expected = adam8bit._table.__wrapped__(content())
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = adam8bit._table.__wrapped__(content())
    finally:
        torch.set_default_dtype(torch.float32)
    assert expected is not None
    assert found is not None
    assert torch.equal(expected, found)
