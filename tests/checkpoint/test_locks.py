"""One writer for each run; who is gone holds nothing."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_protrain.checkpoint import atomic
from lightning_protrain.checkpoint.atomic import Files, RunLock, is_stale


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
    with pytest.raises(ValueError, match=r"a process that has not said who it is.*remove .*\.run\.lock"):
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
