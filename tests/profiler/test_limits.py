"""Limits of control groups, from the files of Linux as they look in containers and batch systems."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from lightning_protrain.profiler.cgroup_limits import free_host_bytes, group_free_bytes

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


def test_version_1(tmp_path: Path) -> None:
    proc = process(tmp_path, "4:memory:/job/step\n1:cpu:/\n0::/\n", V1.format(root="/") + CPU + V2.format(root="/"))
    version_1(tmp_path, "job/step", 100 * MIB, 30 * MIB, 10 * MIB)
    assert group_free_bytes(proc, tmp_path) == 80 * MIB


def test_version_2(tmp_path: Path) -> None:
    proc = process(tmp_path, "0::/user.slice/a b\n", V2.format(root="/"))
    version_2(tmp_path, "user.slice/a b", 100 * MIB, 30 * MIB, 10 * MIB)
    assert group_free_bytes(proc, tmp_path) == 80 * MIB


def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    proc = process(tmp_path, "0::/a/b/c\n", V2.format(root="/"))
    version_2(tmp_path, "a/b/c", "max", 30 * MIB)
    version_2(tmp_path, "a/b", 200 * MIB, 150 * MIB)
    version_2(tmp_path, "a", 300 * MIB, 280 * MIB)
    version_2(tmp_path, "beside", 10 * MIB, 10 * MIB)
    assert group_free_bytes(proc, tmp_path) == 20 * MIB


def test_where_a_group_is_slowed_down_is_a_limit_too(tmp_path: Path) -> None:
    proc = process(tmp_path, "0::/a\n", V2.format(root="/"))
    version_2(tmp_path, "a", "max", 30 * MIB)
    high = tmp_path / "sys/fs/cgroup/unified/a/memory.high"
    high.write_text("max\n")
    assert group_free_bytes(proc, tmp_path) is None
    high.write_text(f"{40 * MIB}\n")
    assert group_free_bytes(proc, tmp_path) == 10 * MIB


def test_the_tighter_version_counts(tmp_path: Path) -> None:
    proc = process(tmp_path, "4:memory,cpu:/a\n0::/a\n", V1.format(root="/") + V2.format(root="/"))
    version_1(tmp_path, "a", 100 * MIB, 0)
    version_2(tmp_path, "a", 50 * MIB, 0)
    assert group_free_bytes(proc, tmp_path) == 50 * MIB


@pytest.mark.parametrize("group", ["/docker/abc", "/../outside", "/elsewhere"])
def test_a_container_sees_its_own_group_as_the_top(group: str, tmp_path: Path) -> None:
    proc = process(tmp_path, f"4:memory:{group}\n", V1.format(root="/docker/abc"))
    version_1(tmp_path, "", 100 * MIB, 30 * MIB)
    assert group_free_bytes(proc, tmp_path) == 70 * MIB


def test_what_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    proc = process(tmp_path, "0::/a\n", V2.format(root="/"))
    version_2(tmp_path, "a", 100 * MIB, 130 * MIB)
    assert group_free_bytes(proc, tmp_path) == free_host_bytes(proc, tmp_path) == 0


def test_no_limit_is_none(tmp_path: Path) -> None:
    proc = process(tmp_path, "4:memory:/a\n0::/a\n", V1.format(root="/") + V2.format(root="/"))
    version_1(tmp_path, "a", 9223372036854771712, 30 * MIB)
    version_2(tmp_path, "a", "max", 30 * MIB)
    assert group_free_bytes(proc, tmp_path) is None
    assert group_free_bytes(tmp_path / "not there", tmp_path) is None


def test_the_machine_is_a_limit_too(tmp_path: Path) -> None:
    proc = process(tmp_path, "0::/a\n", V2.format(root="/"))
    version_2(tmp_path, "a", 1 << 59, 0)
    assert 0 < free_host_bytes(proc, tmp_path) <= psutil.virtual_memory().total
    assert 0 < free_host_bytes() <= psutil.virtual_memory().total
