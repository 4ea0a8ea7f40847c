"""Free host memory and processors of this process, within the limits of its control groups.

In a container, or under a batch system, a process belongs to control groups whose limits may be far below the memory of
the host; a process that exceeds them is killed. The limits of all groups up to the root apply, each to the memory of
all its processes. Unused pages of the file cache (`inactive_file`) count as free, because Linux reclaims them first.
Version 1 of control groups has a hierarchy for each resource, version 2 has one hierarchy; some hosts use both.
A quota of processor time counts as a number of processors: with more threads, all stop for a part of each period.
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html, https://docs.kernel.org/admin-guide/cgroup-v2.html and
https://docs.kernel.org/scheduler/sched-bwc.html
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil


@dataclass(frozen=True)
class _Version:
    """The file names of one version of control groups: limits, usage, and statistics of reclaimable memory."""

    limits: tuple[str, ...]
    usage: str
    inactive: str


# Version 1 reports a huge number instead of "max" if there is no limit; its value depends on the page size.
_NO_LIMIT = 1 << 60
_VERSIONS = {
    "cgroup": _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": _Version(("memory.max", "memory.high"), "memory.current", "inactive_file"),
}


def free_host_bytes(proc: Path = Path("/proc/self"), root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process may still allocate, at least 0.

    Args:
        proc: Folder of the process in Linux' procfs.
        root: Prefix of all paths.
    """
    free = int(psutil.virtual_memory().available)
    group = group_free_bytes(proc, root)
    return free if group is None else min(free, group)


def group_free_bytes(proc: Path = Path("/proc/self"), root: Path = Path("/")) -> int | None:
    """Return the bytes of host memory that control groups still allow; None if there are no limits.

    Args:
        proc: Folder of the process in Linux' procfs.
        root: Prefix of all paths.
    """
    groups = (_left(folder, _VERSIONS[kind]) for kind, folder in _folders("memory", proc, root))
    free = [left for left in groups if left is not None]
    return max(min(free), 0) if free else None


def cpu_quota(proc: Path = Path("/proc/self"), root: Path = Path("/")) -> float | None:
    """Return the number of processors whose time control groups allow this process; None if there is no limit.

    Args:
        proc: Folder of the process in Linux' procfs.
        root: Prefix of all paths.
    """
    quotas = []
    for kind, folder in _folders("cpu", proc, root):
        names = ("cpu.max",) if kind == "cgroup2" else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        if all((folder / name).is_file() for name in names):
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if quota not in ("max", "-1"):
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _folders(resource: str, proc: Path, root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the version and the folder of each group that may limit a resource, up to the roots."""
    for kind, top, group in _hierarchies(resource, proc, root):
        for folder in (group, *group.parents):
            yield kind, folder
            if folder == top:
                break


def _hierarchies(resource: str, proc: Path, root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield each hierarchy that may limit a resource: version, mount point, folder of this process' group."""
    if not (proc / "cgroup").is_file() or not (proc / "mountinfo").is_file():
        return
    paths = {}
    for line in (proc / "cgroup").read_text().splitlines():
        number, names, path = line.split(":", 2)
        if number == "0":
            paths["cgroup2"] = path
        elif resource in names.split(","):
            paths["cgroup"] = path
    for line in (proc / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        if kind not in paths or (kind == "cgroup" and resource not in options.split()[-1].split(",")):
            continue
        shown, mounted = before.split(" ")[3:5]
        top = root / mounted.lstrip("/")
        group = PurePosixPath(paths[kind])
        # In a container, the process' own group is mounted as the root of the hierarchy.
        inside = group.relative_to(shown) if group.is_relative_to(shown) and ".." not in group.parts else ""
        yield kind, top, top / inside


def _left(folder: Path, version: _Version) -> int | None:
    """Return the bytes that one group may still allocate, or None if it has no limit."""
    texts = [(folder / name).read_text().strip() for name in version.limits if (folder / name).is_file()]
    limits = [int(limit) for limit in texts if limit != "max" and int(limit) < _NO_LIMIT]
    usage, statistics = folder / version.usage, folder / "memory.stat"
    if not limits or not usage.is_file():
        return None
    inactive = 0
    for line in statistics.read_text().splitlines() if statistics.is_file() else ():
        name, _, value = line.partition(" ")
        if name == version.inactive:
            inactive = int(value)
    return min(limits) - int(usage.read_text()) + inactive
