"""The operations do what they say, and nothing of a checkpoint reaches the disk beside them."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from lightning_protrain.checkpoint.atomic import Files, retire
from tests.checkpoint.contents import RUN, save
from tests.checkpoint.disks import Journal

FILES = Files()


def test_nothing_is_opened_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            FILES.create(tmp_path / name)
    with pytest.raises(FileExistsError):
        FILES.make_directory(tmp_path / "file")
    assert not (tmp_path / "nowhere").exists()


def test_a_system_that_writes_little_at_a_time_writes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    descriptor = FILES.create(tmp_path / "file")
    FILES.write(descriptor, memoryview(b"0123456789"))
    FILES.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"0123456789"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_without_sync_of_folders_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    FILES.sync_directory(tmp_path)
    with pytest.raises(OSError):
        FILES.sync(os.open(tmp_path, os.O_RDONLY))


def test_an_error_of_the_disk_is_none_that_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        FILES.sync_directory(tmp_path)


def test_nothing_is_done_that_is_not_recorded(tmp_path: Path) -> None:
    """Python reports every change of a file system; the recordings of the crash tests must have all of them."""
    seen: list[str] = []
    watching = True

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if not watching or event not in (
            "open",
            "os.mkdir",
            "os.rename",
            "os.remove",
            "os.rmdir",
            "os.truncate",
            "os.link",
        ):
            return
        if event == "open" and not int(arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):  # type: ignore[call-overload]
            return
        seen.append("create" if event == "open" else event)

    sys.addaudithook(watch)
    journal = Journal(tmp_path)
    save(tmp_path, 1, journal, name="last")
    save(tmp_path, 2, journal, name="last")
    retire(tmp_path / "last", RUN, journal)
    watching = False
    names = {"os.mkdir": "make_directory", "os.rename": "rename", "os.remove": "remove", "os.rmdir": "remove_directory"}
    recorded = [each.kind for each in journal.operations if each.kind not in ("write", "sync", "sync_directory")]
    assert [names.get(event, event) for event in seen] == recorded
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_hint_changes_nothing_and_fails_nowhere(tmp_path: Path, kind: str) -> None:
    files = Files()
    if kind == "pipe":  # It takes no advice.
        end, descriptor = os.pipe()
    else:
        descriptor = files.create(tmp_path / "x")
        end = os.open(tmp_path / "x", os.O_RDONLY)
    files.write(descriptor, memoryview(b"12345678"))
    files.start_sync(descriptor, 0, 8)
    assert os.read(end, 9) == b"12345678"
    files.close(descriptor)
    os.close(end)
