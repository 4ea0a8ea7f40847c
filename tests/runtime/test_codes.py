"""Tables of the quantiser: the library's own codes for every float, and none where the library is another one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_protrain.runtime.optim import adam8bit
from lightning_protrain.runtime.optim.adam8bit import CutScratch, codebook_of
from tests.runtime.test_moments import assert_as_the_library, values


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


def test_places_begin_where_they_should() -> None:
    low = adam8bit._lowest()
    assert bool((low[1:] >= low[:-1]).all())
    begin = adam8bit._from_order(low)
    before = adam8bit._from_order(low[1:] - 1)
    assert torch.equal(((begin + 1) * 65535).long(), torch.arange(low.numel()))
    assert bool((((before + 1) * 65535).long() < torch.arange(1, low.numel())).all())


@pytest.mark.parametrize("signed", [True, False])
def test_pairs_are_what_two_codes_mean(signed: bool) -> None:
    tables = codebook_of(values(signed))
    assert tables is not None
    adam8bit = torch.randint(256, (1000,), dtype=torch.uint8)
    found = tables.pairs[adam8bit.view(torch.uint16).long()].view(torch.float32)
    assert torch.equal(found, values(signed)[adam8bit.long()])
    assert codebook_of(values(signed)) is tables


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
    """`precision="bf16-true"` sets it while the model computes, and steps may be taken then."""
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
