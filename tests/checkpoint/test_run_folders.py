"""Folders of runs: allowed names, one writer each, and full disks."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.checkpoint import atomic
from lightning_protrain.checkpoint.atomic import (
    Files,
    RunLock,
    check_space,
    check_writable,
    free_bytes,
)
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
    with pytest.raises(ValueError, match=rf"has {2 * 120} bytes\. Give a name of at most {MOST_NAME_BYTES} bytes"):
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


def _lock(root: Path, run: str = "run") -> RunLock:
    return RunLock(root, run)


def test_the_second_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with _lock(tmp_path):
        with pytest.raises(ValueError, match=f"is being written by process {os.getpid()} on {socket.gethostname()}"):
            _lock(tmp_path).take()
        with _lock(tmp_path, "other"):
            assert len(os.listdir(tmp_path)) == 2
    assert os.listdir(tmp_path) == []
    with _lock(tmp_path):
        pass


def test_another_process_is_refused_until_the_holder_is_killed(tmp_path: Path) -> None:
    def hold(lock: RunLock, told: Any) -> None:
        lock.take()
        # A worker that lives on does not hold the lock.
        context.Process(target=time.sleep, args=(60,), daemon=True).start()
        told.set()
        time.sleep(60)

    context = multiprocessing.get_context("fork")
    taken = context.Event()
    holder = context.Process(target=hold, args=(_lock(tmp_path), taken))
    holder.start()
    assert taken.wait(30)
    with pytest.raises(ValueError, match=f"is being written by process {holder.pid} on "):
        _lock(tmp_path).take()
    (worker,) = psutil.Process(holder.pid).children()
    holder.kill()
    holder.join()
    assert worker.is_running()
    assert (tmp_path / ".run.lock").exists()
    with _lock(tmp_path):
        worker.kill()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", [b"", b"[", b"\xff", b'{"host": "another", "process": 1}'])
def test_a_file_that_nobody_holds_is_taken_over(tmp_path: Path, text: bytes) -> None:
    (tmp_path / ".run.lock").write_bytes(text)
    with _lock(tmp_path):
        assert (tmp_path / ".run.lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_file_system_without_locks_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(atomic.fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="file system without locks .*no other process writes run 'run'"):
        _lock(tmp_path).take()


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"{}")
    (tmp_path / ".run.lock").symlink_to("target")
    with pytest.raises(OSError):
        _lock(tmp_path).take()
    assert (tmp_path / "target").read_bytes() == b"{}"


def test_of_many_that_take_and_release_one_at_a_time_holds_it(tmp_path: Path) -> None:
    inside, most, taken = [0], [0], [0]

    def attempt() -> None:
        while taken[0] < 20:
            with contextlib.suppress(ValueError), _lock(tmp_path):
                inside[0] += 1
                most[0], taken[0] = max(most[0], inside[0]), taken[0] + 1
                time.sleep(0.0005)
                inside[0] -= 1

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


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
