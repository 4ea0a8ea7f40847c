"""A checkpoint as a stock file: the same to the bit, never half written, never believed unchecked."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_protrain.checkpoint.atomic import Files
from lightning_protrain.checkpoint.consolidation import consolidate, load_folder, load_stock, write_stock
from lightning_protrain.checkpoint.serialize import WEIGHTS
from tests.checkpoint.contents import content, flip, same, save
from tests.checkpoint.disks import Journal, crash_images, order_violations


def test_the_file_has_what_the_folder_has(tmp_path: Path) -> None:
    save(tmp_path, 3)
    consolidate(tmp_path / "step=3", tmp_path / "stock.ckpt")
    assert same(torch.load(tmp_path / "stock.ckpt", weights_only=True), content(3))
    assert same(load_stock(tmp_path / "stock.ckpt"), content(3))
    assert sorted(os.listdir(tmp_path)) == ["step=3", "stock.ckpt"]


def test_shared_weights_are_in_the_file_once(tmp_path: Path) -> None:
    tied = torch.randn(300, 300)
    write_stock({"state_dict": {"a": tied, "b": tied}}, tmp_path / "x", Files())
    loaded = load_stock(tmp_path / "x")["state_dict"]
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert (tmp_path / "x").stat().st_size < 1.1 * tied.nbytes


def test_a_folder_that_is_not_good_is_not_consolidated(tmp_path: Path) -> None:
    save(tmp_path, 3)
    flip(tmp_path / "step=3" / WEIGHTS, 100)
    with pytest.raises(ValueError, match="is a damaged checkpoint: weights"):
        consolidate(tmp_path / "step=3", tmp_path / "stock.ckpt")
    assert os.listdir(tmp_path) == ["step=3"]


def test_the_folder_of_the_file_is_made(tmp_path: Path) -> None:
    save(tmp_path, 3)
    consolidate(tmp_path / "step=3", tmp_path / "a" / "b" / "stock.ckpt")
    assert same(load_stock(tmp_path / "a" / "b" / "stock.ckpt"), content(3))


def test_a_folder_is_never_replaced_by_a_file(tmp_path: Path) -> None:
    save(tmp_path, 3)
    with pytest.raises(ValueError, match="is a folder"):
        consolidate(tmp_path / "step=3", tmp_path / "step=3")
    assert same(load_folder(tmp_path / "step=3"), content(3))


def test_a_crash_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    root, before = tmp_path / "root", tmp_path / "before"
    for folder in (root, before):
        folder.mkdir()
        write_stock(content(1), folder / "x.ckpt", Files())
    journal = Journal(root)
    write_stock(content(2), root / "x.ckpt", journal)
    journal.mark(2)
    points = 0
    for place, image, mark in crash_images(before, journal.operations, tmp_path / "images"):
        found = load_stock(image / "x.ckpt")
        assert same(found, content(2)) or (mark is None and same(found, content(1))), place
        points += 1
    assert points > 5
    assert order_violations(before, journal.operations) == []


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    class Full(Files):
        def write(self, descriptor: int, data: memoryview) -> None:
            super().write(descriptor, data[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_stock(content(1), tmp_path / "x.ckpt", Files())
    with pytest.raises(OSError, match="No space"):
        write_stock(content(2), tmp_path / "x.ckpt", Full())
    assert os.listdir(tmp_path) == ["x.ckpt"]
    assert same(load_stock(tmp_path / "x.ckpt"), content(1))


def test_a_flipped_bit_of_a_tensor_is_found_in_a_stock_file_too(tmp_path: Path) -> None:
    write_stock({"a": torch.zeros(10_000)}, tmp_path / "x.ckpt", Files())
    flip(tmp_path / "x.ckpt", 8 * 20_000)
    assert torch.load(tmp_path / "x.ckpt")["a"].any()  # The control.
    with pytest.raises(ValueError, match=r"the checksum of .*/data/0 does not match"):
        load_stock(tmp_path / "x.ckpt")


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_torn_stock_file_is_refused(tmp_path: Path, part: float) -> None:
    torch.save(content(1), tmp_path / "x.ckpt")
    data = (tmp_path / "x.ckpt").read_bytes()
    (tmp_path / "x.ckpt").write_bytes(data[: int(part * len(data))])
    with pytest.raises(ValueError, match=r"x\.ckpt (.* is truncated|holds more)"):
        load_stock(tmp_path / "x.ckpt")


class _Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("legacy", [True, False])
def test_code_in_a_stock_file_runs_only_if_it_is_asked_for(tmp_path: Path, legacy: bool) -> None:
    canary = tmp_path / "canary"
    torch.save(_Canary(canary), tmp_path / "x.ckpt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ValueError, match=r"weights_only=False, which executes its code\. \(Unsupported \w+"):
        load_stock(tmp_path / "x.ckpt")
    assert not canary.exists()
    load_stock(tmp_path / "x.ckpt", weights_only=False)
    assert canary.exists()


def test_a_bare_pickle_is_refused(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "x.ckpt").write_bytes(pickle.dumps(_Canary(canary), protocol=2))
    with pytest.raises(ValueError):
        load_stock(tmp_path / "x.ckpt")
    assert not canary.exists()


def test_a_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_stock(tmp_path / "none.ckpt")
