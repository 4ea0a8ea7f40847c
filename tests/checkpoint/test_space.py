"""A folder that cannot be written to, and a disk that is too full, are refused with a reason."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lightning_protrain.checkpoint.atomic import Files, check_space, check_writable, free_bytes, in_gib


def test_a_folder_is_made_and_tried(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b", "run", Files())
    assert os.listdir(tmp_path / "a" / "b") == []


class _ReadOnly(Files):
    def make_directory(self, path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_folder_that_is_read_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be written to .*: Read-only file system"):
        check_writable(tmp_path, "run", _ReadOnly())


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be written to"):
        check_writable(tmp_path / "file", "run", Files())


def test_more_than_the_disk_has_is_refused_with_the_numbers(tmp_path: Path) -> None:
    free = free_bytes(tmp_path)
    check_space(tmp_path, 1)
    with pytest.raises(OSError, match=rf"{2 * free} bytes\), but the disk has") as caught:
        check_space(tmp_path, 2 * free)
    assert caught.value.errno == errno.ENOSPC


def test_sizes_are_said_twice() -> None:
    assert in_gib(3 << 29) == "1.500 GiB (1610612736 bytes)"
