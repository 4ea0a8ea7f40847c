"""A draft becomes a checkpoint as a whole: saves survive a crash at any operation, and a full or failing disk."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from lightning_protrain.checkpoint import atomic as drafting
from lightning_protrain.checkpoint.atomic import Draft, Files, open_draft, refuse_foreign, retire, set_aside
from lightning_protrain.checkpoint.discover import find_checkpoints, newest_good
from lightning_protrain.checkpoint.manifest import DIGESTS, MANIFEST, Digest, FileEntry, Manifest, reserved_name
from lightning_protrain.checkpoint.serialize import split
from tests.checkpoint.contents import RUN, content, load, same, save
from tests.checkpoint.crashes import Mark, Quick, UnsyncedData, UnsyncedNames, _Failing, _Full, _judge, _prepare, _run
from tests.checkpoint.disks import Journal, Operation, crash_images, order_violations

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


@pytest.mark.parametrize("algorithm", DIGESTS)
@pytest.mark.parametrize("sizes", [[], [0], [1], [3, 5], [7, 8, 9], [100], [8, 8], [3, 40, 3]])
def test_what_is_written_in_pieces_is_digested_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, sizes: list[int]
) -> None:
    monkeypatch.setattr(drafting, "PIECE", 8)
    pieces = [os.urandom(size) for size in sizes]
    with open_draft(tmp_path / "x", RUN, Files(), algorithm) as draft:
        with draft.create("file") as file:
            assert [file.write(piece) for piece in pieces] == sizes
        data = b"".join(pieces)
        assert (draft.folder / "file").read_bytes() == data
        digest = Digest(algorithm)
        digest.update(data)
        assert draft.entries == {"file": FileEntry(len(data), str(digest))}


def test_an_algorithm_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="digest='md5': give one of"), open_draft(tmp_path / "x", RUN, Files(), "md5"):
        pass
    assert os.listdir(tmp_path) == []


class NothingOpen(Journal):
    """A network file system keeps the name of a file that is open, and so its folder."""

    def remove(self, path: Path) -> None:
        assert not self._names
        super().remove(path)


def test_nothing_is_left_of_a_draft_that_fails(tmp_path: Path) -> None:
    def interrupted() -> None:
        with open_draft(tmp_path / "x", RUN, NothingOpen(tmp_path)) as draft, draft.create("a") as file:
            file.write(b"1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []


def test_everything_is_staged_in_the_folder_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "there is no such folder"))
    (tmp_path / "root").mkdir()
    journal = Journal(tmp_path)
    save(tmp_path / "root", 1, journal)
    made = [each.path for each in journal.operations if each.kind in ("make_directory", "create")]
    assert all(path.startswith("root/.step=1~") for path in made)
    assert os.listdir(tmp_path) == ["root"]


@pytest.mark.parametrize("name", ["..", ".run.lock", "x" * 300])
def test_a_bad_name_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "root").mkdir()
    with pytest.raises(ValueError, match="checkpoint"), open_draft(tmp_path / "root" / name, RUN, Files()):
        pass
    assert os.listdir(tmp_path / "root") == []


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step=1").mkdir()
    (tmp_path / "step=1" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is a folder with files, but not a checkpoint"):
        save(tmp_path, 1)
    assert os.listdir(tmp_path) == ["step=1"]
    assert os.listdir(tmp_path / "step=1") == ["thesis.tex"]


@pytest.mark.parametrize("kind", ["file", "link", "dangling", "empty", "torn"])
def test_what_may_be_replaced_is(tmp_path: Path, kind: str) -> None:
    target, elsewhere = tmp_path / "step=1", tmp_path / "elsewhere"
    if kind == "file":
        target.write_bytes(b"old")
    elif kind == "link":
        elsewhere.mkdir()
        (elsewhere / "kept").touch()
        target.symlink_to("elsewhere")
    elif kind == "dangling":
        target.symlink_to("nowhere")
    elif kind == "empty":
        target.mkdir()
    else:
        save(tmp_path, 2, name="step=1")
        (target / MANIFEST).unlink()
    refuse_foreign(target)
    save(tmp_path, 1)
    assert same(load(target), content(1))
    assert sorted(os.listdir(tmp_path)) == (["elsewhere", "step=1"] if kind == "link" else ["step=1"])
    assert kind != "link" or os.listdir(elsewhere) == ["kept"]


class Scenario(NamedTuple):
    """The content of a disk, and the saves that are recorded.

    `mark` gets the sequence number of each completed save.
    """

    before: Callable[[Path], object]
    action: Callable[[Path, Files, Mark], object]


def _after(root: Path, step: int) -> set[str]:
    return {each.manifest.identity for each in find_checkpoints(root, RUN).found if each.manifest.step > step}


def _go_back(root: Path, files: Files, mark: Mark) -> None:
    """Resume from step 1 while steps 2 and 3 exist."""
    mark(0)
    assert set_aside(root, RUN, _after(root, 1), files) == ["step=3.aside", "step=2.aside"]
    mark(save(root, 2, files).sequence)


def _interrupted(root: Path) -> None:
    """Leave the files of a save that was killed between its two renames."""
    save(root, 1, Quick(), name="last")
    (root / "last").rename(root / reserved_name("last", RUN, "old"))
    shutil.copytree(next(root.iterdir()), root / reserved_name("last", RUN, "staged"))


SCENARIOS = {
    "first": Scenario(lambda root: None, lambda root, files, mark: _run(root, files, mark, 1)),
    "second": Scenario(_prepare(1), lambda root, files, mark: _run(root, files, mark, 2)),
    "same name": Scenario(_prepare(1, name="last"), lambda *all: _run(*all, 2, name="last")),
    "same name twice": Scenario(_prepare(1, name="last"), lambda *all: _run(*all, 1, 2, name="last")),
    "keep 1": Scenario(_prepare(1), lambda *all: _run(*all, 2, 3, keep=1)),
    "keep 2": Scenario(_prepare(1, 2), lambda *all: _run(*all, 3, 4, keep=2)),
    "go back": Scenario(_prepare(1, 2, 3), _go_back),
    "interrupted": Scenario(_interrupted, lambda *all: _run(*all, 2, name="last")),
}


def _record(scenario: Scenario, folder: Path, journal: type[Journal] = Journal) -> tuple[Path, list[Operation], int]:
    """A copy of the disk before the action, the recording, and the sequence of the latest save before it, or -1."""
    root, before = folder / "root", folder / "before"
    root.mkdir()
    scenario.before(root)
    shutil.copytree(root, before)
    found = find_checkpoints(root, RUN).found
    recording = journal(root)
    scenario.action(root, recording, recording.mark)
    return before, recording.operations, found[0].manifest.sequence if found else -1


def _crash_everywhere(scenario: Scenario, folder: Path, journal: type[Journal] = Journal) -> tuple[list[str], int]:
    before, operations, durable = _record(scenario, folder, journal)
    bad = []
    for place, root, mark in crash_images(before, operations, folder / "images"):
        bad += [f"{place}: {what}" for what in _judge(root, durable if mark is None else mark)]
    return bad, len(operations) + 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_crash_at_any_operation_loses_no_save_that_returned(name: str, tmp_path: Path) -> None:
    bad, points = _crash_everywhere(SCENARIOS[name], tmp_path)
    assert not bad, "\n".join(bad)
    assert points >= 20  # in each of 8 scenarios


def test_a_crash_while_later_checkpoints_are_set_aside_loses_none(tmp_path: Path) -> None:
    before, operations, _ = _record(SCENARIOS["go back"], tmp_path)
    for place, root, _ in crash_images(before, operations, tmp_path / "images"):
        kept = {load(path)["global_step"] for path in root.glob("step=*")}
        assert kept == {1, 2, 3}, place


class Fine(Journal):
    pieces = 32


def test_a_crash_at_any_of_many_bytes_loses_nothing(tmp_path: Path) -> None:
    before, operations, durable = _record(SCENARIOS["same name"], tmp_path, Fine)
    ends = [len(each.argument) for each in operations if each.kind == "write"]
    assert sum(length > 0 for length in ends) >= 64
    images = crash_images(before, operations, tmp_path / "images", ("killed", "random-1"))
    bad = [
        f"{place}: {what}" for place, root, mark in images for what in _judge(root, durable if mark is None else mark)
    ]
    assert not bad, "\n".join(bad)


class Unsynced(Journal):
    """A disk that is never asked to keep anything."""

    def sync(self, descriptor: int) -> None: ...

    def sync_directory(self, path: Path) -> None: ...


@pytest.mark.sample(4)
@pytest.mark.parametrize("journal", [Unsynced, UnsyncedNames, UnsyncedData])
@pytest.mark.parametrize("name", ["second", "same name", "keep 1"])
def test_without_syncs_the_same_harness_finds_losses(journal: type[Journal], name: str, tmp_path: Path) -> None:
    bad, _ = _crash_everywhere(SCENARIOS[name], tmp_path, journal)
    assert bad
    (tmp_path / "again").mkdir()
    before, operations, _ = _record(SCENARIOS[name], tmp_path / "again", journal)
    assert order_violations(before, operations)


def _naive(root: Path, files: Files, mark: Mark) -> None:
    """Writes under the final name, after making room for it."""
    listing = find_checkpoints(root, RUN)
    retire(root / "last", RUN, files)
    files.make_directory(root / "last")
    draft = Draft(root / "last", root / "last", RUN, files)
    split(content(2)).write(draft)
    sequence = listing.found[0].manifest.sequence + 1
    manifest = Manifest(RUN, 2, sequence, draft.identity, dict(draft.entries))
    draft._seal(manifest)
    files.sync_directory(root / "last")
    files.sync_directory(root)
    mark(sequence)


def test_a_naive_writer_fails_the_harness_however_much_it_syncs(tmp_path: Path) -> None:
    bad, _ = _crash_everywhere(Scenario(_prepare(1, name="last"), _naive), tmp_path)
    assert any("nothing is left" in what for what in bad)
    assert any("killed" in what for what in bad)


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_gets_its_name_before_it_is_on_the_disk(name: str, tmp_path: Path) -> None:
    before, operations, _ = _record(SCENARIOS[name], tmp_path)
    assert sum(operation.kind == "rename" for operation in operations) >= 1
    assert order_violations(before, operations) == []


def _kill_at(number: int, name: str, root: Path) -> bool:
    """Return whether the process was killed at the operation; False: it had ended before."""
    process = os.fork()
    if process == 0:
        SCENARIOS[name].action(root, _Failing(number, None), lambda _: None)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


@pytest.mark.parametrize("name", ["same name", pytest.param("keep 1", marks=pytest.mark.slow)])
def test_a_process_that_is_killed_at_any_operation_loses_nothing(name: str, tmp_path: Path) -> None:
    bad, number = [], 0
    while True:
        number += 1
        root = tmp_path / str(number)
        root.mkdir()
        SCENARIOS[name].before(root)
        killed = _kill_at(number, name, root)
        bad += [f"{number}: {what}" for what in _judge(root, 0)]
        if not killed:
            break
    assert not bad, "\n".join(bad)
    assert number > 20


@pytest.mark.parametrize("name", ["first", "same name"])
def test_an_error_of_any_operation_leaves_what_was_there(name: str, tmp_path: Path) -> None:
    number = 0
    while True:
        number += 1
        root = tmp_path / str(number)
        root.mkdir()
        SCENARIOS[name].before(root)
        saved: list[int] = []
        try:
            SCENARIOS[name].action(root, _Failing(number, errno.EIO), saved.append)
            raised = None
        except OSError as caught:
            raised = caught.errno
        assert raised in (None, errno.EIO)
        before = [0] if name == "same name" else []
        # It is never reported as saved and gone, nor as failed with the former one gone.
        assert _judge(root, max([*saved, *before], default=-1)) == []
        if raised is None and number > 40:
            break
    assert saved


@pytest.mark.parametrize("part", range(16))
def test_a_disk_that_is_full_at_any_size_leaves_the_former_one_and_no_debris(part: int, tmp_path: Path) -> None:
    save(tmp_path, 1, name="last")
    size = sum(each.stat().st_size for each in (tmp_path / "last").iterdir())
    with pytest.raises(OSError, match="No space left") as caught:
        save(tmp_path, 2, _Full(size * part // 16), name="last")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["last"]
    assert same(load(tmp_path / "last"), content(1))
    save(tmp_path, 2, _Full(2 * size), name="last")
    assert same(load(tmp_path / "last"), content(2))


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*disk[:3], 5, 5, *disk[5:])))
    with pytest.raises(OSError, match=r"iB \(\d+ bytes\), but the disk has \d+\.\d+ KiB \(\d+ bytes\) free") as caught:
        save(tmp_path, 1, Journal(tmp_path))
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == []


def test_later_checkpoints_are_set_aside_when_a_run_goes_back(tmp_path: Path) -> None:
    _prepare(1, 2, 3)(tmp_path)
    save(tmp_path, 9, run="other")
    (tmp_path / "last").symlink_to("step=3")
    assert set_aside(tmp_path, RUN, (), FILES) == []
    assert set_aside(tmp_path, RUN, _after(tmp_path, 1), FILES) == ["step=3.aside", "step=2.aside"]
    assert save(tmp_path, 2).sequence == 1
    chosen = newest_good(tmp_path, RUN).chosen
    assert chosen is not None
    assert chosen.path.name == "step=2"
    assert set_aside(tmp_path, RUN, _after(tmp_path, -1), FILES) == ["step=2-v1.aside", "step=1.aside"]
    assert sorted(os.listdir(tmp_path)) == [*(f"step={name}.aside" for name in ("1", "2-v1", "2", "3")), "step=9"]
    assert same(load(tmp_path / "step=3.aside"), content(3))
