"""Keeps what was measured, and believes it only while everything it depends on is the same.

[Note: Belief]
A file is named after a digest of its *key*: all that the figures depend on. It holds the key itself, the profile, and a
digest of both. It is believed if all three agree, the profile is a valid one, and no figure is beyond what hardware can
do. Otherwise the hardware is measured again, and the file replaced as a whole, so that whoever reads at the same time
sees the old one or the new one. What is free changes by the minute, and is never taken from a file. What is measured
while more wants to run than there are cores is used, and not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_protrain.device import Device
from lightning_protrain.profiler.hardware import cpu_name, describe_device, free_bytes, locks_memory, profile_hardware
from lightning_protrain.profiler.machine import HardwareProfile

FORMAT = 1
# A file has about two thousand characters.
MOST_CHARACTERS = 1 << 16
# What hardware can do at the least and at the most, far beyond any that there is: other figures are mistakes.
PLAUSIBLE = {
    "upload": (1e7, 1e13),
    "download": (1e7, 1e13),
    "upload_beside": (1e6, 1e13),
    "download_beside": (1e6, 1e13),
    "upload_pageable": (1e7, 1e13),
    "download_pageable": (1e7, 1e13),
    "flops": (1e8, 1e17),
    "memory": (1e8, 1e14),
    "device_step": (1e6, 1e13),
    "host_step": (1e6, 1e12),
    "host_memory": (1e8, 1e13),
}


def cached_profile(
    device: Device,
    dtypes: Iterable[torch.dtype],
    folder: Path | str,
    measure: Callable[[Device, Iterable[torch.dtype]], HardwareProfile] = profile_hardware,
) -> HardwareProfile:
    """The profile of `device` from `folder` if one there can be believed, else measured and kept.

    See [Note: Belief]. A folder that cannot be written to costs a warning, and a measurement every time.

    Args:
        device: As for `profile_hardware`.
        dtypes: The same.
        folder: Where profiles are kept; made if it is not there. `user_folder()` is the usual one.
        measure: What measures.

    Raises:
        ValueError: What `measure` raises.
    """
    kinds = tuple(dict.fromkeys(dtypes))
    key = cache_key(device, kinds)
    path = entry_path(Path(folder), key)
    profile = read_entry(path, key)
    if profile is not None:
        device_bytes, host_bytes = free_bytes(device)
        return replace(profile, device_bytes=device_bytes, host_bytes=host_bytes)
    profile = measure(device, kinds)
    if is_busy():
        return profile
    try:
        write_entry(path, key, profile)
    except OSError as error:
        warnings.warn(f"The hardware is measured in every run, because {path} cannot be written: {error}", stacklevel=2)
    return profile


def is_busy() -> bool:
    """Whether more has wanted to run in the last minute than this machine has cores for."""
    return psutil.getloadavg()[0] > (psutil.cpu_count() or 1)


def user_folder() -> Path:
    """Where this user keeps caches; not made here."""
    try:
        import platformdirs
    except ImportError:
        return Path.home() / ".cache" / "lightning_protrain"
    return platformdirs.user_cache_path("lightning_protrain")


def cache_key(device: Device, dtypes: Iterable[torch.dtype]) -> dict[str, Any]:
    """All that a profile depends on, as JSON has it: versions, device, host, and how PyTorch is set."""
    return {
        "format": FORMAT,
        "device": describe_device(device),
        "torch": str(torch.__version__),
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(),
        "allowed_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "host_bytes": psutil.virtual_memory().total,
        "threads": [torch.get_num_threads(), device.worker.threads],
        "lockable_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "locks": locks_memory(device),
        "float32_precision": torch.get_float32_matmul_precision(),
        "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in dtypes),
    }


def entry_path(folder: Path, key: dict[str, Any]) -> Path:
    """The file in `folder` that holds the profile of `key`."""
    return folder / f"hardware-{_digest(key)[:24]}.json"


def read_entry(path: Path, key: dict[str, Any]) -> HardwareProfile | None:
    """The profile in `path`; None if there is none that can be believed, see [Note: Belief]."""
    try:
        with path.open(encoding="utf-8") as file:
            content = json.loads(file.read(MOST_CHARACTERS))
        if not isinstance(content, dict) or content.keys() != {"key", "profile", "digest"}:
            return None
        if content["key"] != key or content["digest"] != _digest([key, content["profile"]]):
            return None
        profile = HardwareProfile.from_json(json.dumps(content["profile"]))
    except (OSError, ValueError, RecursionError):
        return None
    right = sorted(profile.flops) == key["dtypes"] and profile.name == key["device"]["name"]
    return profile if right and not implausible(profile) else None


def write_entry(path: Path, key: dict[str, Any], profile: HardwareProfile) -> None:
    """Replaces `path` as a whole.

    Raises:
        OSError: It cannot be written; then it is as before.
    """
    content = json.loads(profile.to_json())
    entry = {"key": key, "profile": content, "digest": _digest([key, content])}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(entry, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def implausible(profile: HardwareProfile) -> list[str]:
    """Figures that no hardware can have, with their bounds: mistaken units, or a file that somebody has written to."""
    figures = {name: getattr(profile, name) for name in PLAUSIBLE if name != "flops"}
    figures |= {f"flops[{dtype!r}]": rate for dtype, rate in profile.flops.items()}
    found = []
    for name, value in figures.items():
        least, most = PLAUSIBLE[name.partition("[")[0]]
        if not least <= value <= most:
            found.append(f"{name}={value:g} is not within {least:g} and {most:g} per second")
    return found


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
