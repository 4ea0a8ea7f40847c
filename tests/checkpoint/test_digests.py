"""Digests have the values that their algorithms have everywhere, and fingerprints are of bits alone."""

from __future__ import annotations

import hashlib
import os
import threading
import zlib

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_protrain.checkpoint import serialize as module
from lightning_protrain.checkpoint.manifest import _ALGORITHMS, DEFAULT, DIGESTS, Digest, FileEntry
from lightning_protrain.checkpoint.serialize import digest_of, same_bits, side_by_side
from tests.checkpoint.strange_tensors import STRANGE, strided

ONE_CALL = {
    "xxh3_128": xxhash.xxh3_128_hexdigest,
    "crc32": lambda data: f"{zlib.crc32(data):08x}",
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
}
# Of no bytes, and of "abc". They are in manifests: a library that has others finds every checkpoint broken.
KNOWN = {
    "xxh3_128": ("99aa06d3014798d86001c324468d497f", "06b05ab6733a618578af5f94892f3950"),
    "crc32": ("00000000", "352441c2"),
    "sha256": (
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    ),
}


def _of(algorithm: str, *pieces: bytes | bytearray | memoryview) -> str:
    digest = Digest(algorithm)
    for piece in pieces:
        digest.update(piece)
    return str(digest)


def test_all_are_known_here_and_the_fast_one_is_the_default() -> None:
    assert set(DIGESTS) == set(_ALGORITHMS) == set(KNOWN) == set(ONE_CALL)
    assert DEFAULT == "xxh3_128"
    assert str(Digest()) == _of(DEFAULT)


@pytest.mark.parametrize("algorithm", KNOWN)
def test_the_values_are_those_that_saved_checkpoints_have(algorithm: str) -> None:
    assert (_of(algorithm), _of(algorithm, b"a", b"bc")) == tuple(f"{algorithm}:{each}" for each in KNOWN[algorithm])


@pytest.mark.parametrize("algorithm", DIGESTS)
@given(pieces=st.lists(st.binary(max_size=300), max_size=5))
def test_pieces_have_the_digest_of_the_whole(algorithm: str, pieces: list[bytes]) -> None:
    digest = _of(algorithm, *pieces)
    assert digest == f"{algorithm}:{ONE_CALL[algorithm](b''.join(pieces))}"
    assert digest == _of(algorithm, *map(bytearray, pieces)) == _of(algorithm, *map(memoryview, pieces))
    assert FileEntry(0, digest).algorithm == algorithm


@pytest.mark.parametrize("algorithm", DIGESTS)
@given(data=st.binary(min_size=1, max_size=300), drawn=st.data())
def test_a_flipped_bit_a_lost_byte_and_a_zero_more_are_seen(algorithm: str, data: bytes, drawn: st.DataObject) -> None:
    bit = drawn.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    others = [flipped, data[:-1], data + b"\0", b"\0" + data]
    assert _of(algorithm, data) not in [_of(algorithm, each) for each in others]


@pytest.mark.parametrize("algorithm", DIGESTS)
def test_asking_changes_nothing(algorithm: str) -> None:
    digest = Digest(algorithm)
    digest.update(b"a")
    assert str(digest) == str(digest) == _of(algorithm, b"a")
    digest.update(b"bc")
    assert str(digest) == _of(algorithm, b"abc")


@pytest.mark.parametrize("algorithm", ["md5", "", "XXH3_128", "xxh3", "xxh3_128:"])
def test_an_algorithm_that_there_is_not_is_refused_by_name(algorithm: str) -> None:
    with pytest.raises(ValueError, match=f"digest='{algorithm}': give one of 'xxh3_128', 'crc32', 'sha256'"):
        Digest(algorithm)


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
