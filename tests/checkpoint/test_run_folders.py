"""Folders of runs: allowed names, one writer each, and full disks."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

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
    is_stale,
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
    return RunLock(root, run, Files())


def test_the_second_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with _lock(tmp_path) as first:
        assert first.is_held
        with pytest.raises(ValueError, match=f"is being written by process {os.getpid()} on "):
            _lock(tmp_path).take()
        with _lock(tmp_path, "other") as other:
            assert other.is_held
    assert os.listdir(tmp_path) == []
    with _lock(tmp_path):
        pass


def _in_process(action: Callable[[], None]) -> int:
    process = os.fork()
    if process == 0:
        action()
        os.kill(os.getpid(), signal.SIGKILL)
    return process


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    process = _in_process(lambda: _lock(tmp_path).take())
    os.waitpid(process, 0)
    assert json.loads((tmp_path / ".run.lock").read_bytes())["process"] == process
    with _lock(tmp_path):
        assert json.loads((tmp_path / ".run.lock").read_bytes())["process"] == os.getpid()


def test_a_process_that_is_dead_and_not_yet_buried_holds_nothing(tmp_path: Path) -> None:
    process = _in_process(lambda: _lock(tmp_path).take())
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    with _lock(tmp_path) as lock:
        assert lock.is_held
    os.waitpid(process, 0)


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        ({}, False),
        ({"birth": "1"}, True),  # Another process has the number by now.
        ({"boot": "another"}, True),
        ({"host": "another"}, False),
        ({"host": "another", "boot": "another", "process": 1 << 22, "birth": "1"}, False),
    ],
    ids=str,
)
def test_what_is_stale(change: dict[str, object], stale: bool) -> None:
    owner = {**atomic._owner(), **change}
    assert is_stale(owner) is stale


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"host": 1}', b"\xff", b"[" * 5000, b'{"process": "x"}'])
def test_a_text_that_was_never_finished_holds_nothing(tmp_path: Path, text: bytes) -> None:
    (tmp_path / ".run.lock").write_bytes(text)
    with _lock(tmp_path) as lock:
        assert lock.is_held


def test_without_locks_of_the_system_an_unfinished_text_may_be_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(atomic.fcntl, "flock", refuse)
    with _lock(tmp_path):
        pass
    (tmp_path / ".run.lock").write_bytes(b"")
    with pytest.raises(ValueError, match=r"an unknown process.*remove .*\.run\.lock"):
        _lock(tmp_path).take()


def test_what_another_has_taken_over_is_not_given_back(tmp_path: Path) -> None:
    lock = _lock(tmp_path)
    lock.take()
    (tmp_path / ".run.lock").write_bytes(b"another")
    lock.release()
    lock.release()
    assert (tmp_path / ".run.lock").read_bytes() == b"another"


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"{}")
    (tmp_path / ".run.lock").symlink_to("target")
    with pytest.raises(OSError):
        _lock(tmp_path).take()
    assert (tmp_path / "target").read_bytes() == b"{}"


def test_of_many_at_once_one_takes_over_a_stale_lock(tmp_path: Path) -> None:
    (tmp_path / ".run.lock").write_text(json.dumps({**atomic._owner(), "birth": "1"}))
    taken, barrier = [], threading.Barrier(8)

    def attempt() -> None:
        lock = _lock(tmp_path)
        barrier.wait()
        try:
            lock.take()
            taken.append(lock)
        except ValueError:
            pass

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1


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
