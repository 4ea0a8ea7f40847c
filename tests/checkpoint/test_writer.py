"""Jobs run in order on one thread; an asynchronous save survives the same crashes as a synchronous one."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_protrain.checkpoint.atomic import Files, retire, sweep
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.checkpoint.save import NewCheckpoint, Snapshot, Writer, save_payload
from lightning_protrain.checkpoint.serialize import split
from tests.checkpoint.contents import RUN, content
from tests.checkpoint.crashes import Mark, UnsyncedData, UnsyncedNames, _Full, _judge, _prepare
from tests.checkpoint.disks import Journal, crash_images, order_violations


def test_jobs_are_done_in_order_on_another_thread() -> None:
    writer, done, gate = Writer(), [], threading.Event()
    first = writer.submit(lambda: (gate.wait(), done.append(1), threading.current_thread().name)[2])
    second = writer.submit(lambda: done.append(2))
    assert not first.done()
    assert done == []
    gate.set()
    assert writer.settle(first).startswith("checkpoint")
    writer.settle(second)
    assert done == [1, 2]
    assert writer.close() is None


def test_what_comes_after_a_failure_is_not_done() -> None:
    writer, done = Writer(), []

    def fail() -> None:
        raise OSError(5, "Input/output error")

    writer.submit(fail)
    later = writer.submit(lambda: done.append(1))
    writer.join()
    with pytest.raises(OSError, match="Input/output error"):
        writer.settle(later)
    assert done == []
    # It was told; what comes now is done again.
    writer.settle(writer.submit(lambda: done.append(2)))
    assert done == [2]
    assert writer.close() is None


def test_an_error_that_nobody_waited_for_is_returned_by_close() -> None:
    writer = Writer()
    writer.submit(lambda: [][0])
    assert isinstance(writer.close(), IndexError)
    assert writer.close() is None
    assert writer.settle(writer.submit(lambda: 3)) == 3
    writer.close()


def _behind(root: Path, files: Files, mark: Mark, *steps: int, keep: int = 99, name: str | None = None) -> None:
    """Saves as an asynchronous run does: a copy, the write and the removals behind it, one under way at a time."""
    sweep(root, RUN, files)
    writer, snapshot = Writer(), Snapshot(lambda: 1 << 40)

    def save(step: int) -> Callable[[], None]:
        payload = split(content(step))
        copied = snapshot.take(payload)
        for tensors in (payload.weights, payload.tensors):
            for tensor in tensors.values():
                tensor.zero_()  # The training goes on.

        def write() -> None:
            target = root / (name or f"step={step}")
            mark(save_payload(copied, target, NewCheckpoint(RUN, step), files).sequence)
            for each in find_checkpoints(root, RUN).found[keep:]:
                retire(each.path, RUN, files)

        return write

    try:
        for step in steps:
            writer.settle(writer.submit(save(step)))
    finally:
        writer.close()


SCENARIOS: dict[str, tuple[Callable[[Path], object], Callable[[Path, Files, Mark], None]]] = {
    "first": (lambda root: None, lambda *all: _behind(*all, 1)),
    "same name": (_prepare(1, name="last"), lambda *all: _behind(*all, 2, name="last")),
    "keep 1": (_prepare(1), lambda *all: _behind(*all, 2, 3, keep=1)),
}


def _crashes(name: str, folder: Path, journal: type[Journal] = Journal) -> list[str]:
    before, action = SCENARIOS[name]
    root = folder / "root"
    root.mkdir()
    before(root)
    shutil.copytree(root, folder / "before")
    found = find_checkpoints(root, RUN).found
    durable = found[0].manifest.sequence if found else -1
    recording = journal(root)
    action(root, recording, recording.mark)
    bad = order_violations(folder / "before", recording.operations)
    for place, image, mark in crash_images(folder / "before", recording.operations, folder / "images"):
        bad += [f"{place}: {what}" for what in _judge(image, durable if mark is None else mark)]
    return bad


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_crash_at_any_operation_behind_the_program_loses_no_save_that_has_ended(name: str, tmp_path: Path) -> None:
    assert _crashes(name, tmp_path) == []


@pytest.mark.parametrize("journal", [UnsyncedData, UnsyncedNames])
def test_without_syncs_the_same_harness_finds_losses(journal: type[Journal], tmp_path: Path) -> None:
    assert _crashes("same name", tmp_path, journal)


@pytest.mark.parametrize("part", [0, 8, 15])
def test_a_disk_that_is_full_behind_the_program_is_told_and_leaves_the_former_one(part: int, tmp_path: Path) -> None:
    _prepare(1, name="last")(tmp_path)
    size = sum(each.stat().st_size for each in (tmp_path / "last").iterdir())
    with pytest.raises(OSError, match="No space left"):
        _behind(tmp_path, _Full(size * part // 16), lambda _: None, 2, name="last")
    assert os.listdir(tmp_path) == ["last"]
    assert _judge(tmp_path, 0) == []


def test_the_program_ends_after_the_last_job(tmp_path: Path) -> None:
    process = os.fork()
    if process == 0:
        writer = Writer()
        writer.submit(lambda: (time.sleep(0.3), (tmp_path / "done").touch()))
        threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter does when it ends
        os._exit(0)
    os.waitpid(process, 0)
    assert (tmp_path / "done").exists()
