"""Names that may be, names that may not, and names that the protocol keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.checkpoint.manifest import (
    MOST_NAME_BYTES,
    check_file,
    check_name,
    check_run,
    parse_reserved,
    reserved_name,
    run_mark,
)

HOSTILE = ["", ".", "..", "../x", "/x", "a/b", "a\\b", "a\0b", "a\nb", "\x7f", "x" * 300]


@pytest.mark.parametrize("name", [*HOSTILE, ".hidden", "a b", "a%b", "[a]", "-a", "\xe9", "x" * 65, None, 5])
def test_a_run_cannot_be_called_so(name: object) -> None:
    with pytest.raises(ValueError, match="run="):
        check_run(name)


@pytest.mark.parametrize("name", ["a", "0", "run-1", "2026.01.02_x", "x" * 64])
def test_a_run_can_be_called_so(name: str) -> None:
    assert check_run(name) == name


@pytest.mark.parametrize(
    "name", [*HOSTILE, "\u2028", ".run.lock", ".x~0123456789abcdef.old", ".x~0123456789abcdef.old~0123456789abcdef.old"]
)
def test_a_checkpoint_cannot_be_called_so(name: str) -> None:
    with pytest.raises(ValueError, match="checkpoint"):
        check_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "epoch=0-step=10.ckpt",
        ".temp.ckpt",
        ".x.old",
        "a b",
        "100%",
        "[x]",
        "-x",
        "\xe9\u4e2d",
        "a~b",
        "x" * MOST_NAME_BYTES,
    ],
)
def test_a_checkpoint_can_be_called_so(name: str) -> None:
    assert check_name(name) == name
    assert len(reserved_name(name, "run", "removed").encode()) <= 255


def test_the_bytes_of_a_name_count_not_its_letters() -> None:
    with pytest.raises(ValueError, match=f"has {2 * 120} bytes; at most {MOST_NAME_BYTES}"):
        check_name("\xe9" * 120)


@pytest.mark.parametrize("name", [*HOSTILE, "a b", ".hidden", None])
def test_a_file_cannot_be_called_so(name: object) -> None:
    with pytest.raises(ValueError, match="cannot be the name"):
        check_file(name)


@given(st.text(min_size=1), st.sampled_from(["staged", "old", "removed"]))
def test_reserved_names_are_read_as_they_were_made(name: str, state: str) -> None:
    made = reserved_name(name, "run", state)  # type: ignore[arg-type]
    assert parse_reserved(made) == (name, run_mark("run"), state)
    assert made != reserved_name(name, "run", state)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "entry", ["x", ".x", ".x~12.old", ".x~0123456789abcdef.new", "x~0123456789abcdef.old", ".run.lock"]
)
def test_other_names_are_not_reserved(entry: str) -> None:
    assert parse_reserved(entry) is None
