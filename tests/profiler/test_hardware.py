"""Measurements of a node are plausible, respect limits of control groups, and leave nothing allocated."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from lightning_protrain.cgroup_limits import cpu_quota, free_host_bytes, group_free_bytes
from lightning_protrain.device.device import CPUDevice, StreamDevice, TransferCounters, open_device
from lightning_protrain.device.host import HostMemory
from lightning_protrain.profiler import hardware
from lightning_protrain.profiler.hardware import cpu_name, free_bytes, profile_hardware
from lightning_protrain.profiler.records import HardwareProfile
from tests.support.machines import implausible

SMALL = hardware._ProbeSizes(1 << 16, 1 << 16, 1 << 12)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time, and say nothing."""
    monkeypatch.setattr(hardware, "DEVICE_SIZES", SMALL)
    monkeypatch.setattr(hardware, "HOST_SIZES", SMALL)
    monkeypatch.setattr(hardware, "CPU_SIZES", SMALL)
    monkeypatch.setattr(hardware, "LEAST_ROWS", 8)
    monkeypatch.setattr(hardware, "MOST_ROWS", 16)
    monkeypatch.setattr(hardware, "REPEAT_SECONDS", 0.0)


@pytest.fixture
def cpu() -> Iterator[CPUDevice]:
    device = CPUDevice(torch.device("cpu"))
    yield device
    device.close()


class Event:
    """A point in a stream that has been passed."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class Stream:
    """Does everything at once."""

    def wait_event(self, event: Event) -> None:
        return

    def wait_stream(self, stream: Stream) -> None:
        return

    def record_event(self) -> Event:
        return Event()


class LockingDevice(StreamDevice):
    """A GPU made of the CPU's memory, which locks pages as far as `locks` says."""

    def __init__(self, locks: Callable[[int, int], bool], free: int | None = 1 << 30) -> None:
        self.locked: list[int] = []
        self._free = free
        self._locks = locks
        self._stream = Stream()
        super().__init__(torch.device("cpu"), self.new_host_memory(), lambda name: Stream())

    def compute_stream(self) -> Stream:
        return self._stream

    def copy(self, stream: Stream, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def free_bytes(self) -> int | None:
        return self._free

    def new_host_memory(self) -> HostMemory:
        return HostMemory(self._lock, self.locked.remove)

    def _lock(self, address: int, size: int) -> bool:
        locked = self._locks(address, size)
        self.locked += [address] if locked else []
        return locked


def always(address: int, size: int) -> bool:
    return True


def within_the_bound(address: int, size: int) -> bool:
    bound, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return bound == resource.RLIM_INFINITY or size <= bound


@pytest.fixture
def _bounded() -> Iterator[None]:
    """A bound on what may be locked: one MiB."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_the_cpu_is_measured_as_it_is(cpu: CPUDevice) -> None:
    profile = profile_hardware(cpu, [torch.float32, torch.bfloat16])
    assert implausible(profile) == []
    assert list(profile.flops) == ["float32", "bfloat16"]
    assert profile.name == cpu_name()
    assert not profile.asynchronous
    assert HardwareProfile.from_json(profile.to_json()) == profile


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_host_of_a_gpu_is_measured_past_its_caches(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    large = hardware._ProbeSizes(SMALL.copy, SMALL.sum + 1, SMALL.elements + 1)
    monkeypatch.setattr(hardware, "HOST_SIZES", large)
    measured: list[hardware._ProbeSizes] = []
    monkeypatch.setattr(hardware, "_host_rates", lambda device, sizes: (measured.append(sizes), (1.0, 1.0))[1])
    device = LockingDevice(always) if asynchronous else CPUDevice(torch.device("cpu"))
    profile_hardware(device, [torch.float32])
    device.close()
    assert measured == [large if asynchronous else SMALL]


def test_the_working_set_of_the_host_is_a_gigabyte() -> None:
    bytes_of_a_step = 16 * hardware.HOST_SIZES.elements  # A weight, its gradient and two moments, in four bytes each.
    assert min(3 * hardware.HOST_SIZES.sum, bytes_of_a_step) >= 1 << 30


@pytest.mark.usefixtures("_small")
def test_a_device_with_streams_is_measured_both_ways_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device, issued = LockingDevice(always), ""

    def copy(self: StreamDevice, stream: Stream, source: Tensor, target: Tensor) -> None:
        nonlocal issued
        issued += "u" if stream is self._in else "d"

    monkeypatch.setattr(LockingDevice, "copy", copy)
    monkeypatch.setattr(hardware, "_seconds", lambda work, finish: 1.0)
    profile = profile_hardware(device, [torch.float32])
    rows = hardware.ROW, hardware.ROWS
    # Those beside were given first and go on for longer.
    assert issued == ("d" * 2 * rows[0] + "u" * rows[0]) * rows[1] + ("u" * 2 * rows[0] + "d" * rows[0]) * rows[1]
    assert profile.asynchronous
    assert profile.device_bytes == 1 << 30
    assert (profile.upload, profile.download) == (SMALL.copy, SMALL.copy)
    assert (profile.device_step, profile.host_memory) == (SMALL.elements, 3 * SMALL.sum)
    assert profile.flops == {"float32": 2 * 8**3}
    device.close()


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("locks", [always, lambda address, size: False], ids=["locked", "pageable"])
def test_nothing_is_left_behind(locks: Callable[[int, int], bool]) -> None:
    device, state = LockingDevice(locks), torch.get_rng_state()
    counters = device.counters
    bound = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    profile_hardware(device, [torch.float32])
    assert device.locked == []
    assert device.host.allocated_bytes == 0
    assert device.counters is counters
    assert counters == TransferCounters()
    assert torch.equal(torch.get_rng_state(), state)
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == bound
    device.close()


@pytest.mark.parametrize(
    ("seconds", "sizes", "best"),
    [
        (lambda rows: rows**3 / 1e12, [256, 512, 1024, 2048], 2e12),
        (lambda rows: rows**3 / 1e9, [256, 512], 2e9),
        (lambda rows: rows**3 / 1e8, [256], 2e8),
        (lambda rows: 0.030 + rows**3 / 1e12, [256, 512, 1024, 2048, 4096], None),
        (lambda rows: 1e-6, [256, 512, 1024, 2048, 4096, 8192], None),
    ],
    ids=["fast", "slow", "very slow", "busy", "very fast"],
)
def test_matrices_grow_until_a_product_takes_long_and_gains_nothing(
    seconds: Callable[[int], float],
    sizes: list[int],
    best: float | None,
    cpu: CPUDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def measure(work: Any, finish: object) -> float:
        seen.append(len(work.args[0]))
        return seconds(seen[-1])

    monkeypatch.setattr(hardware, "_normal", lambda rows, *others: torch.empty(rows, 1))
    monkeypatch.setattr(hardware, "_seconds", measure)
    rate = hardware._matmul_rate(cpu, torch.float32, 1 << 40)
    assert seen == sizes
    assert rate == pytest.approx(best or max(2 * rows**3 / seconds(rows) for rows in sizes))
    seen.clear()
    hardware._matmul_rate(cpu, torch.float32, 64 << 20)
    assert max(seen) <= 1024
    assert 3 * 4 * max(seen) ** 2 < 64 << 20


@pytest.mark.usefixtures("_small")
def test_it_measures_where_gradients_are_off(cpu: CPUDevice) -> None:
    with torch.inference_mode():
        assert profile_hardware(cpu, [torch.float32]).host_step > 0


@pytest.mark.usefixtures("_small")
def test_a_dtype_that_cannot_be_multiplied_is_named(cpu: CPUDevice) -> None:
    counters = cpu.counters
    with pytest.raises(ValueError, match="in bool fails on") as caught:
        profile_hardware(cpu, [torch.float32, torch.bool])
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert cpu.counters is counters


def test_no_dtype_is_an_error(cpu: CPUDevice) -> None:
    with pytest.raises(ValueError, match="No dtype to measure"):
        profile_hardware(cpu, [])


@pytest.mark.parametrize(("free", "said"), [(0, "0 bytes"), (1 << 20, r"1\.00 MiB \(1048576 bytes\)")])
def test_a_device_without_room_is_an_error(free: int, said: str) -> None:
    device = LockingDevice(always, free)
    with pytest.raises(ValueError, match=f"Only {said} of the device are free"):
        profile_hardware(device, [torch.float32])
    device.close()


def test_a_full_host_is_an_error(cpu: CPUDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "free_host_bytes", lambda: 0)
    with pytest.raises(ValueError, match="Only 0 bytes of"):
        profile_hardware(cpu, [torch.float32])


def test_what_does_not_fit_is_made_smaller() -> None:
    sizes = hardware.DEVICE_SIZES.within(64 << 20)
    assert 5 * sizes.copy + 16 * sizes.elements + 3 * sizes.sum < 3 * (64 << 20)
    assert max(5 * sizes.copy, 16 * sizes.elements, 3 * sizes.sum) < 64 << 20
    assert hardware.DEVICE_SIZES.within(1 << 40) == hardware.DEVICE_SIZES


@pytest.mark.usefixtures("_bounded")
@pytest.mark.parametrize(
    ("locks", "expected"),
    [(within_the_bound, 1 << 20), (always, 1 << 40), (lambda address, size: False, 1 << 40)],
    ids=["bounded", "past the bound", "not at all"],
)
def test_what_may_be_locked_bounds_the_host_if_it_is_bounded(
    locks: Callable[[int, int], bool], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "free_host_bytes", lambda: 1 << 40)
    device = LockingDevice(locks)
    assert free_bytes(device) == (1 << 30, expected)
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == 1 << 20
    held = device.host.empty(1 << 19)
    assert free_bytes(device)[1] == (expected - (1 << 19) if expected == 1 << 20 else expected)
    del held
    device.close()


@pytest.mark.parametrize(
    ("text", "name"),
    [("processor : 0\nmodel name\t: A CPU @ 3 GHz\nmodel name: B\n", "A CPU @ 3 GHz"), ("model name :\n", None)],
)
def test_the_cpu_has_a_name(text: str, name: str | None, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    found = cpu_name(tmp_path / "cpuinfo")
    assert found == name if name else found == cpu_name(tmp_path / "not there") != ""


@pytest.mark.cuda
def test_a_gpu_is_measured() -> None:
    device = open_device(torch.device("cuda", 0), print)
    profile = profile_hardware(device, [torch.float32, torch.bfloat16])
    assert implausible(profile) == []
    assert profile.asynchronous
    device.close()


MIB = 1 << 20
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
V2 = "41 31 0:38 {root} /sys/fs/cgroup/unified rw,relatime shared:4 - cgroup2 cgroup2 rw\n"


def process(tmp_path: Path, groups: str, mounts: str) -> Path:
    """A folder like /proc/self."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text(mounts)
    return proc


def version_1(tmp_path: Path, folder: str, limit: int, usage: int, inactive: int = 0) -> None:
    group = tmp_path / "sys/fs/cgroup/memory" / folder
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (group / "memory.stat").write_text(f"cache 5\ninactive_file 1\ntotal_inactive_file {inactive}\n")


def version_2(tmp_path: Path, folder: str, limit: int | str, usage: int, inactive: int = 0) -> None:
    group = tmp_path / "sys/fs/cgroup/unified" / folder
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{usage}\n")
    (group / "memory.stat").write_text(f"anon 7\ninactive_file {inactive}\n")


BOTH = V1.format(root="/") + V2.format(root="/")
UNIFIED = V2.format(root="/")
# Groups of the process, mounts, and by version: folder, limit, use and what of it may be dropped; and what is free.
GROUPS: dict[str, tuple[str, str, list[tuple[Any, ...]], list[tuple[Any, ...]], int | None]] = {
    "version 1": (
        "4:memory:/job/step\n1:cpu:/\n0::/\n",
        CPU + BOTH,
        [("job/step", 100 * MIB, 30 * MIB, 10 * MIB)],
        [],
        80,
    ),
    "version 2": ("0::/user.slice/a b\n", UNIFIED, [], [("user.slice/a b", 100 * MIB, 30 * MIB, 10 * MIB)], 80),
    "the tightest on the way up": (
        "0::/a/b/c\n",
        UNIFIED,
        [],
        [
            ("a/b/c", "max", 30 * MIB),
            ("a/b", 200 * MIB, 150 * MIB),
            ("a", 300 * MIB, 280 * MIB),
            ("beside", 10 * MIB, 10 * MIB),
        ],
        20,
    ),
    "the tighter version": ("4:memory,cpu:/a\n0::/a\n", BOTH, [("a", 100 * MIB, 0)], [("a", 50 * MIB, 0)], 50),
    **{
        f"a container in {group}": (
            f"4:memory:{group}\n",
            V1.format(root="/docker/abc"),
            [("", 100 * MIB, 30 * MIB)],
            [],
            70,
        )
        for group in ("/docker/abc", "/../outside", "/elsewhere")
    },
    "over its limit": ("0::/a\n", UNIFIED, [], [("a", 100 * MIB, 130 * MIB)], 0),
    "no limit": ("4:memory:/a\n0::/a\n", BOTH, [("a", 9223372036854771712, MIB)], [("a", "max", MIB)], None),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_tightest_limit_of_the_groups_of_a_process_counts(name: str, tmp_path: Path) -> None:
    groups, mounts, first, second, free = GROUPS[name]
    proc = process(tmp_path, groups, mounts)
    for each in first:
        version_1(tmp_path, *each)
    for each in second:
        version_2(tmp_path, *each)
    assert group_free_bytes(proc, tmp_path) == (None if free is None else free * MIB)
    if free is not None:
        assert free_host_bytes(proc, tmp_path) == free * MIB


def test_where_a_group_is_slowed_down_is_a_limit_too(tmp_path: Path) -> None:
    proc = process(tmp_path, "0::/a\n", V2.format(root="/"))
    version_2(tmp_path, "a", "max", 30 * MIB)
    high = tmp_path / "sys/fs/cgroup/unified/a/memory.high"
    high.write_text("max\n")
    assert group_free_bytes(proc, tmp_path) is None
    high.write_text(f"{40 * MIB}\n")
    assert group_free_bytes(proc, tmp_path) == 10 * MIB


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "quota"),
    [
        ("0::/\n", UNIFIED, {"unified/cpu.max": "1600000 100000"}, 16.0),  # a container sees its own group as the root
        ("0::/a/b\n", UNIFIED, {"unified/a/cpu.max": "250000 100000", "unified/a/b/cpu.max": "max 100000"}, 2.5),
        ("0::/a/b\n", UNIFIED, {"unified/a/cpu.max": "max 100000", "unified/b/cpu.max": "50000 100000"}, None),
        ("1:cpu:/a\n", CPU, {"cpu/a/cpu.cfs_quota_us": "400000", "cpu/a/cpu.cfs_period_us": "100000"}, 4.0),
        ("1:cpu:/a\n", CPU, {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
        ("4:memory:/a\n", V1.format(root="/"), {"memory/a/cpu.max": "100000 100000"}, None),
    ],
)
def test_the_least_quota_of_processor_time_counts(
    groups: str, mounts: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    proc = process(tmp_path, groups, mounts)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert cpu_quota(proc, tmp_path) == quota
    assert cpu_quota(tmp_path / "not there", tmp_path) is None


def test_the_machine_is_a_limit_too(tmp_path: Path) -> None:
    proc = process(tmp_path, "0::/a\n", UNIFIED)
    version_2(tmp_path, "a", 1 << 59, 0)
    assert 0 < free_host_bytes(proc, tmp_path) <= psutil.virtual_memory().total
    assert 0 < free_host_bytes() <= psutil.virtual_memory().total
    assert group_free_bytes(tmp_path / "not there", tmp_path) is None
