"""A digest has the name that a manifest gives it, and the value that its algorithm has everywhere."""

from __future__ import annotations

import hashlib
import zlib

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.checkpoint.manifest import _ALGORITHMS, DEFAULT, DIGESTS, Digest, FileEntry

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
