"""A rank that loads reads what all share and its own file, once for the digest, and no byte of any other rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.checkpoint.atomic import Files
from lightning_protrain.checkpoint.consolidation import load_folder
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.checkpoint.manifest import MANIFEST, STATE, Manifest
from lightning_protrain.checkpoint.save import save_folder
from lightning_protrain.checkpoint.serialize import RANK_STATES, files_for, rank_file
from tests.checkpoint.contents import content
from tests.support.ranks import run_ranks, trainer_on_rank, values
from tests.support.recorded_runs import Recorded, Samples

# Bytes that only each rank has; all that is read beside checkpoints is less.
OWN, BESIDE = 1_000_000, 64 << 10

pytestmark = pytest.mark.skipif(not Path("/proc/self/io").is_file(), reason="nobody counts what is read")


class Range(NamedTuple):
    """Of bytes."""

    least: int
    most: int


def read_so_far() -> int:
    """Bytes that this process has asked the system for; maps do not count."""
    counts = Path("/proc/self/io").read_text(encoding="ascii")
    return int(counts.split("rchar: ")[1].split()[0])


def allowed(folder: Path, manifest: Manifest, rank: int | None) -> Range:
    """Every file of the rank once, by its size in the manifest, and once more what is no tensor."""
    names = files_for(manifest.files.keys(), rank)
    once = sum(manifest.files[name].size for name in names)
    again = sum(entry.size for name, entry in manifest.files.items() if name in names and name.endswith(".pt"))
    return Range(once, once + again + 5 * (folder / MANIFEST).stat().st_size + BESIDE)


def saved(folder: Path, ranks: int) -> Manifest:
    """A checkpoint in which each rank has a million bytes of its own, and all share four."""
    states = [{"random": None, "data": torch.randint(256, (OWN,), dtype=torch.uint8), "others": {}}] * ranks
    large = {"large": torch.randn(OWN)}
    return save_folder({**content(1), **large, RANK_STATES: states}, folder, "run", 1, Files())


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_rank_reads_its_part(tmp_path: Path, ranks: int) -> None:
    manifest = saved(tmp_path / "a", ranks)
    for rank in range(ranks):
        before = read_so_far()
        states = load_folder(tmp_path / "a", rank=rank)[RANK_STATES]
        assert [state is not None for state in states] == [each == rank for each in range(ranks)]
        least, most = allowed(tmp_path / "a", manifest, rank)
        assert least <= read_so_far() - before <= most
        shared = sum(entry.size for name, entry in manifest.files.items() if not name.startswith("rank"))
        assert least == shared + manifest.files[rank_file(rank)].size


@pytest.mark.parametrize("ranks", [2, 4])
def test_who_reads_all_is_found(tmp_path: Path, ranks: int) -> None:
    manifest = saved(tmp_path / "a", ranks)
    before = read_so_far()
    load_folder(tmp_path / "a")
    read = read_so_far() - before
    assert read > allowed(tmp_path / "a", manifest, 0).most
    least, most = allowed(tmp_path / "a", manifest, None)
    assert least <= read <= most


class Large(L.Callback):
    """Has as much as a rank may have for itself, other bytes on each."""

    def state_dict(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        return {"own": torch.randint(256, (OWN,), dtype=torch.uint8, generator=generator)}


class Counts(ProTrainCheckpointIO):
    """Remembers how much was read to load."""

    read = 0

    def load_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        before = read_so_far()
        found = super().load_checkpoint(*args, **options)
        self.read += read_so_far() - before
        return found


def _fit(rank: int, ranks: int, root: Path, steps: int, path: str | None) -> int:
    plugin = Counts()
    saver = ProTrainCheckpoint(root, every_n_train_steps=1, save_top_k=-1)
    options = {"plugins": [plugin], "callbacks": [Large(), saver], "enable_checkpointing": True}
    trainer = trainer_on_rank(rank, ranks, max_steps=steps, **options)
    trainer.fit(Recorded(), torch.utils.data.DataLoader(Samples(48, noisy=False), 2), ckpt_path=path)
    return plugin.read


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_in_a_run_each_rank_reads_its_part(tmp_path: Path, ranks: int) -> None:
    root = tmp_path / "root"
    for number, (steps, path) in enumerate(((1, None), (2, "last"))):
        meeting = tmp_path / str(number)
        meeting.mkdir()
        read = values(run_ranks(_fit, ranks, meeting, ranks, root, steps, path))
        if path is None:
            assert read == [0] * ranks
    newest, resumed = find_checkpoints(root).found
    assert newest.manifest.step == 2
    # What rank 0 has is in the files that all share.
    assert all(resumed.manifest.files[rank_file(rank)].size > OWN for rank in range(1, ranks))
    for rank in range(ranks):
        least, most = allowed(resumed.path, resumed.manifest, rank)
        assert least <= read[rank] <= most
    assert STATE in resumed.manifest.files
