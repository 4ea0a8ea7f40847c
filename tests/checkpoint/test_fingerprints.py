"""A fingerprint is of bits alone, bits are compared as such, and threads change nothing."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_protrain.checkpoint import serialize as module
from lightning_protrain.checkpoint.serialize import digest_of, same_bits, side_by_side
from tests.checkpoint.strange_tensors import STRANGE, strided


@given(st.integers(0, 300), st.integers(1, 64), st.booleans())
def test_the_digest_is_of_elements_and_of_no_place(numel: int, piece: int, strided: bool) -> None:
    tensor = torch.arange(numel, dtype=torch.float32)
    wanted = digest_of(tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        assert digest_of(torch.stack([tensor, tensor], dim=1)[:, 0] if strided else tensor.clone()) == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.bool, torch.float64])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    raw = torch.zeros(8, dtype=torch.uint8)
    digests = {digest_of(raw.view(dtype))}
    for bit in range(8 if dtype is not torch.bool else 1):
        flipped = raw.clone()
        flipped[3] ^= 1 << bit
        digests.add(digest_of(flipped.view(dtype)))
    assert len(digests) == (9 if dtype is not torch.bool else 2)


def test_signed_zeros_and_nans_are_bits_like_others() -> None:
    zero, negative = torch.tensor([0.0]), torch.tensor([-0.0])
    assert torch.equal(zero, negative)
    assert digest_of(zero) != digest_of(negative)
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, negative)


@given(strided(), st.integers(1, 64))
def test_bits_are_the_same_where_digests_are(tensor: Tensor, piece: int) -> None:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", piece)
        assert same_bits(tensor, copy)
        assert digest_of(tensor) == digest_of(copy)
        for place in range(copy.numel()):
            other = copy.clone()
            bits = other.view(-1).view(torch.uint8) if other.dim() else other.view(1).view(torch.uint8)
            bits[place * copy.element_size()] ^= 1
            assert not same_bits(tensor, other)
            assert digest_of(other) != digest_of(tensor)


@pytest.mark.parametrize("name", STRANGE)
def test_strange_layouts_have_the_digest_of_a_copy(name: str) -> None:
    tensor = STRANGE[name]
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    assert digest_of(tensor) == digest_of(copy)
    assert same_bits(tensor, copy)


def test_other_kinds_are_not_the_same() -> None:
    tensor = torch.zeros(2, 3)
    assert not same_bits(tensor, torch.zeros(3, 2))
    assert not same_bits(tensor, torch.zeros(2, 3, dtype=torch.int32))
    assert not same_bits(tensor, torch.zeros(2, 3, device="meta"))


def test_a_view_that_begins_between_words_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.arange(100, dtype=torch.uint8), torch.arange(100, dtype=torch.uint8)
    for begin in range(9):
        assert same_bits(one[begin:], other[begin:])
        assert not same_bits(one[begin:-9], other[9:][: 91 - begin])


@pytest.mark.parametrize("processors", [1, 2, 40])
def test_things_are_done_side_by_side_and_told_in_order(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)), raising=False)
    together = min(processors, module.MOST_THREADS)
    meeting = threading.Barrier(together)

    def meet(number: int) -> int:
        meeting.wait(20)  # Fewer would never get past it.
        return -number

    assert side_by_side(meet, range(2 * together)) == [-number for number in range(2 * together)]
    assert side_by_side(meet, []) == []


def test_what_fails_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda number: 1 // number, [2, 1, 0])
