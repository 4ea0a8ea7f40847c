"""A cached profile is used only if it is whole, plausible, and of this machine and package.

Otherwise the hardware is measured again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_protrain.device.device import CPUDevice, Device
from lightning_protrain.profiler import cache_files, hardware
from lightning_protrain.profiler.hardware import (
    cache_key,
    cached_profile,
    cpu_name,
    entry_path,
    read_entry,
    write_entry,
)
from lightning_protrain.profiler.records import HardwareProfile
from tests.support.machines import PROFILE

DTYPES = (torch.float32, torch.bfloat16)
MEASURED = replace(PROFILE, name=cpu_name())


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that no other process uses the CPU."""
    monkeypatch.setattr(hardware.psutil, "getloadavg", lambda: (0.1, 0.1, 0.1))


@pytest.fixture
def device() -> Iterator[CPUDevice]:
    device = CPUDevice(torch.device("cpu"))
    yield device
    device.close()


class Measurement:
    """A measurement that counts how often it is made."""

    def __init__(self, profile: HardwareProfile = MEASURED) -> None:
        self.profile = profile
        self.count = 0

    def __call__(self, device: Device, dtypes: Any) -> HardwareProfile:
        self.count += 1
        assert tuple(dtypes) == DTYPES
        return self.profile


def rates(profile: HardwareProfile) -> HardwareProfile:
    """Without what is free."""
    return replace(profile, device_bytes=1, host_bytes=1)


def kept(device: Device, folder: Path) -> Path:
    """The file of a measurement, which is believed."""
    path = entry_path(folder, cache_key(device, DTYPES))
    write_entry(path, cache_key(device, DTYPES), MEASURED)
    assert read_entry(path, cache_key(device, DTYPES)) == MEASURED
    return path


def expect_measured_again(device: Device, folder: Path) -> None:
    """Whatever is there now, the measurement is asked, and its answer is kept."""
    measure = Measurement(replace(MEASURED, upload=12.5e9))
    assert cached_profile(device, DTYPES, folder, measure) == measure.profile
    assert measure.count == 1
    assert rates(cached_profile(device, DTYPES, folder, measure)) == rates(measure.profile)
    assert measure.count == 1


def test_it_is_measured_once(device: CPUDevice, tmp_path: Path) -> None:
    measure = Measurement()
    first = cached_profile(device, DTYPES, tmp_path / "a" / "b", measure)
    second = cached_profile(device, iter((*DTYPES, torch.float32)), str(tmp_path / "a" / "b"), measure)
    assert measure.count == 1
    assert rates(first) == rates(second) == rates(MEASURED)
    assert [path.suffix for path in (tmp_path / "a" / "b").iterdir()] == [".json"]


def test_what_is_free_is_never_taken_from_a_file(
    device: CPUDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(device, tmp_path)
    monkeypatch.setattr(hardware, "free_bytes", lambda device: (123, 456))
    profile = cached_profile(device, DTYPES, tmp_path, Measurement())
    assert (profile.device_bytes, profile.host_bytes) == (123, 456)
    monkeypatch.setattr(hardware, "free_bytes", lambda device: (123, 0))
    with pytest.raises(ValueError, match="host_bytes=0"):
        cached_profile(device, DTYPES, tmp_path, Measurement())


def test_what_a_busy_machine_measures_is_not_kept(
    device: CPUDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware.psutil, "getloadavg", lambda: (hardware.psutil.cpu_count() + 0.5, 0.0, 0.0))
    measure = Measurement()
    for count in (1, 2):
        assert cached_profile(device, DTYPES, tmp_path, measure) == MEASURED
        assert measure.count == count
    assert list(tmp_path.iterdir()) == []
    # What has been kept before is believed.
    kept(device, tmp_path)
    cached_profile(device, DTYPES, tmp_path, measure)
    assert measure.count == 2


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "device": lambda patch: patch.setattr(hardware, "describe_device", lambda device: {"name": "another"}),
    "driver": lambda patch: patch.setattr(
        hardware, "describe_device", lambda device: {"name": cpu_name(), "driver": "2"}
    ),
    "torch": lambda patch: patch.setattr(torch, "__version__", "9.9"),
    "cpu": lambda patch: patch.setattr(hardware, "cpu_name", lambda: "another"),
    "cores": lambda patch: patch.setattr(hardware.psutil, "cpu_count", lambda: 999),
    "allowed cores": lambda patch: patch.setattr(os, "sched_getaffinity", lambda process: set(range(99))),
    "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: 99),
    "lockable": lambda patch: patch.setattr(hardware.resource, "getrlimit", lambda which: (12345, 12345)),
    "locking": lambda patch: patch.setattr(hardware, "locks_memory", lambda device: True),
    "format": lambda patch: patch.setattr(hardware, "FORMAT", 99),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_it_depends_on_is_measured(
    change: str, device: CPUDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept(device, tmp_path)
    before = path.read_bytes()
    CHANGES[change](monkeypatch)
    key = cache_key(device, DTYPES)
    other = entry_path(tmp_path, key)
    assert other != path
    # Not even under the name of the other one.
    other.write_bytes(before)
    assert read_entry(other, key) is None
    assert path.read_bytes() == before


def test_another_precision_of_products_is_measured(device: CPUDevice) -> None:
    """Set for one backend, as PyTorch advises, no other precision can be read any more."""
    key, products = cache_key(device, DTYPES), torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        assert cache_key(device, DTYPES) != key
    finally:
        products.fp32_precision = before


def test_other_dtypes_are_measured(device: CPUDevice) -> None:
    key = cache_key(device, DTYPES)
    assert cache_key(device, DTYPES[:1]) != key
    assert cache_key(device, DTYPES[::-1]) == key


@pytest.mark.parametrize("part", [0.0, 0.01, 0.25, 0.5, 0.75, 0.99, -1])
def test_a_truncated_file_is_measured_again(part: float, device: CPUDevice, tmp_path: Path) -> None:
    path = kept(device, tmp_path)
    text = path.read_text()
    path.write_text(text[:-1] if part == -1 else text[: int(part * len(text))])
    assert read_entry(path, cache_key(device, DTYPES)) is None
    expect_measured_again(device, tmp_path)


def test_no_flipped_bit_is_believed(device: CPUDevice, tmp_path: Path) -> None:
    path, key = kept(device, tmp_path), cache_key(device, DTYPES)
    whole = path.read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        # Blanks between the tokens may be others; nothing else.
        assert read_entry(path, key) in (None, MEASURED)
        if chr(whole[place]).isalnum():
            assert read_entry(path, key) is None
    expect_measured_again(device, tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b"null", b"[]", b"{}", b"3", b'{"format": 1}', b"[" * 60_000, b'"' + b"x" * 200_000 + b'"'],
    ids=["empty", "no text", "null", "list", "object", "number", "other object", "deep", "long"],
)
def test_a_foreign_file_is_measured_again(content: bytes, device: CPUDevice, tmp_path: Path) -> None:
    kept(device, tmp_path).write_bytes(content)
    expect_measured_again(device, tmp_path)


def forged(device: Device, folder: Path, **change: Any) -> None:
    """A file with a right digest over wrong content."""
    key = cache_key(device, DTYPES)
    content = json.loads(MEASURED.to_json()) | change
    content = {name: value for name, value in content.items() if value is not None}
    entry = {"key": key, "profile": content, "digest": cache_files.digest([key, content])}
    path = entry_path(folder, key)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(entry))


@pytest.mark.parametrize(
    "change",
    [
        {"upload": 0.0},
        {"upload": float("nan")},
        {"format": 99},
        {"memory": None},
        {"more": 1},
    ],
    ids=str,
)
def test_an_invalid_profile_is_measured_again(change: dict[str, Any], device: CPUDevice, tmp_path: Path) -> None:
    forged(device, tmp_path)
    assert read_entry(entry_path(tmp_path, cache_key(device, DTYPES)), cache_key(device, DTYPES)) == MEASURED
    forged(device, tmp_path, **change)
    expect_measured_again(device, tmp_path)


def test_a_folder_that_cannot_be_written_costs_a_warning(device: CPUDevice, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    measure = Measurement()
    with pytest.warns(UserWarning, match="measured in every run, because .* cannot be written"):
        assert cached_profile(device, DTYPES, tmp_path / "file", measure) == MEASURED
    assert measure.count == 1


def test_a_failed_write_changes_nothing(device: CPUDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, key = kept(device, tmp_path), cache_key(device, DTYPES)

    def fail(*names: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        write_entry(path, key, replace(MEASURED, upload=1e9))
    assert read_entry(path, key) == MEASURED
    assert list(tmp_path.iterdir()) == [path]


def test_what_fails_to_measure_is_not_kept(device: CPUDevice, tmp_path: Path) -> None:
    def measure(device: Device, dtypes: Any) -> HardwareProfile:
        raise ValueError("too small")

    with pytest.raises(ValueError, match="too small"):
        cached_profile(device, DTYPES, tmp_path, measure)
    assert list(tmp_path.iterdir()) == []


def write_many(path: Path, key: dict[str, Any], upload: float) -> None:
    for _ in range(30):
        write_entry(path, key, replace(MEASURED, upload=upload))


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_reader_sees_one_whole_file_while_others_write(kind: str, device: CPUDevice, tmp_path: Path) -> None:
    path, key = kept(device, tmp_path), cache_key(device, DTYPES)
    start = threading.Thread if kind == "threads" else multiprocessing.get_context("fork").Process
    writers = [start(target=write_many, args=(path, key, upload)) for upload in (1e9, 2e9)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        profile = read_entry(path, key)
        assert profile is not None
        seen.add(profile.upload)
    for writer in writers:
        writer.join()
    assert seen <= {MEASURED.upload, 1e9, 2e9}
    last = read_entry(path, key)
    assert last is not None
    assert last.upload in (1e9, 2e9)
    assert list(tmp_path.iterdir()) == [path]
