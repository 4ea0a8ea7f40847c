"""Measurement of the hardware's performance, which takes two to three seconds, and its cache.

Every measurement runs once untimed and then several times; the shortest time counts. Sizes exceed the processors'
caches and fit the free memory. Afterwards memory is freed, and the device's counters and random state are restored.

The limit on locked memory (`ulimit -l`) often does not apply to GPU drivers, which lock pages themselves. To find out,
one page is locked while the limit is set to zero.

The profile is cached with `cache_files.py`. A cached profile that is invalid is measured again, and free memory
is always measured. A measurement under high load is not cached.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

from lightning_protrain.cgroup_limits import free_host_bytes
from lightning_protrain.config import format_bytes
from lightning_protrain.device.device import Device, StreamDevice, TransferCounters
from lightning_protrain.profiler.cache_files import file_of, read_content, write_content
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.progress import waiting

MIB = 1 << 20
# Number of consecutive copies that are timed while copies run in the other direction, and number of repetitions.
ROW, ROWS = 3, 3
# Minimum and maximum rows of square matrices. Rows are doubled until a product takes at least PRODUCT_SECONDS and its
# FLOP/s have grown by less than the factor FASTER. The time alone is not enough, because small products are slow on a
# busy CPU. Products that might take longer than LONGEST_SECONDS are not tried.
LEAST_ROWS, MOST_ROWS, PRODUCT_SECONDS, FASTER, LONGEST_SECONDS = 256, 8192, 3e-3, 1.3, 0.4
# Every measurement is repeated for REPEAT_SECONDS, from LEAST_REPEATS to MOST_REPEATS times, but slow measurements only
# for MOST_SECONDS.
REPEAT_SECONDS, LEAST_REPEATS, MOST_REPEATS, MOST_SECONDS = 0.04, 5, 40, 0.1
# A measurement uses at most 1 / PART of the free memory.
PART = 4


@dataclass(frozen=True)
class _ProbeSizes:
    """Sizes of the tensors in measurements.

    Attributes:
        copy: Size of a copy, bytes.
        sum: Size of each of the three tensors of an addition, bytes.
        elements: Number of elements of an optimizer step.
    """

    copy: int
    sum: int
    elements: int

    def within(self, free: int) -> _ProbeSizes:
        """Return the sizes, reduced to fit `free` bytes."""
        return _ProbeSizes(
            min(self.copy, free // PART**2), min(self.sum, free // PART**2), min(self.elements, free // PART // 16)
        )


# Large GPUs have caches of more than 100 MiB, CPU chips about 32 MiB for each group of cores. Hosts of GPUs may have
# several hundred MiB, so they are measured with 1 GiB.
DEVICE_SIZES = _ProbeSizes(64 * MIB, 128 * MIB, 16 << 20)
CPU_SIZES = _ProbeSizes(32 * MIB, 32 * MIB, 4 << 20)
HOST_SIZES = _ProbeSizes(64 * MIB, 384 * MIB, 64 << 20)


def profile_hardware(device: Device, dtypes: Iterable[torch.dtype]) -> HardwareProfile:
    """Measure a device and its host, as the module's docstring explains.

    Args:
        device: An idle CPU or CUDA device.
        dtypes: Dtypes of the measured matrix products.

    Raises:
        ValueError: If `dtypes` is empty, a matrix product fails, or too little memory is free.
    """
    kinds = tuple(dict.fromkeys(dtypes))
    if not kinds:
        raise ValueError("No dtype to measure: give at least one dtype in which the model computes.")
    device_bytes, host_bytes = free_bytes(device)
    for place, free in (("the device", device_bytes), ("the host", host_bytes)):
        if free < 64 * MIB:
            raise ValueError(f"Only {format_bytes(free)} of {place} are free: too little to measure it, or to train.")
    asynchronous = isinstance(device, StreamDevice)
    sizes = (DEVICE_SIZES if asynchronous else CPU_SIZES).within(min(device_bytes, host_bytes))
    host_sizes = (HOST_SIZES if asynchronous else CPU_SIZES).within(host_bytes)
    counters, device.counters = device.counters, TransferCounters()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            rates = _copy_rates(device, sizes)
            flops = {str(dtype).removeprefix("torch."): _matmul_rate(device, dtype, device_bytes) for dtype in kinds}
            memory = _sum_rate(device.torch_device, sizes, device.synchronize)
            device_step = _step_rate(device.torch_device, sizes, device.synchronize)
            host_step, host_memory = _host_rates(device, host_sizes)
    finally:
        device.counters = counters
        device.trim()
    return HardwareProfile(
        name=describe_device(device)["name"],
        **rates,
        flops=flops,
        memory=memory,
        device_step=device_step,
        host_step=host_step,
        host_memory=host_memory,
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        asynchronous=asynchronous,
    )


def free_bytes(device: Device) -> tuple[int, int]:
    """Return the free bytes on the device and on the host, which are equal for a CPU.

    The host's free bytes are subject to all limits of this process, including the limit on locked memory for a GPU.
    """
    host = free_host_bytes()
    lockable = _lockable_bytes(device)
    host = host if lockable is None else min(host, lockable)
    free = device.free_bytes()
    return host if free is None else free, host


def describe_device(device: Device) -> dict[str, str]:
    """Return the properties that identify a device: the CPU's name, or the GPU's name, address and driver."""
    if not isinstance(device, StreamDevice):
        return {**device.describe(), "name": cpu_name()}
    driver = Path("/proc/driver/nvidia/version")
    return {**device.describe(), "driver": driver.read_text().partition("\n")[0] if driver.is_file() else ""}


def cpu_name(information: Path = Path("/proc/cpuinfo")) -> str:
    """Return the maker's name of the CPU, or else its architecture.

    Args:
        information: File with the properties of the CPU in Linux' procfs.
    """
    for line in information.read_text().splitlines() if information.is_file() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def _lockable_bytes(device: Device) -> int | None:
    """Return the bytes of host memory that may still be page-locked; None means no limit, or not needed."""
    if resource is None:
        return None
    bound, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if bound == resource.RLIM_INFINITY or not locks_memory(device):
        return None
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, most))
    try:
        past_the_bound = locks_memory(device)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (bound, most))
    return None if past_the_bound else max(bound - device.host.locked_bytes, 0)


def locks_memory(device: Device) -> bool:
    """Return True if one page of host memory can be page-locked for a device."""
    with closing(device.new_host_memory()) as memory:
        memory.empty(1)
        return memory.locked_bytes > 0


def _copy_rates(device: Device, sizes: _ProbeSizes) -> dict[str, float]:
    """Return the rates of copies in bytes per second, by field of HardwareProfile."""
    on_device, also = (torch.full((sizes.copy,), 1, dtype=torch.uint8, device=device.torch_device) for _ in range(2))
    with closing(device.new_host_memory()) as memory:
        source, target = (memory.empty_like(on_device.cpu()).fill_(1) for _ in range(2))

        def download() -> Any:
            device.swap_out(also, target)
            return device.after_swaps()

        ways: dict[str, Callable[[], Any]] = {
            "upload": lambda: device.swap_in([(source, on_device)])[0],
            "download": download,
        }
        rates = {name: sizes.copy / _seconds(copy, device.synchronize) for name, copy in ways.items()}
        for name, other in (("upload", "download"), ("download", "upload")):
            rates[f"{name}_beside"] = rates[name]
            if isinstance(device, StreamDevice):
                # Enough copies in the other direction to continue until after the last timed copy.
                longer = math.ceil(2 * ROW * max(rates[other] / rates[name], 1.0))
                rates[f"{name}_beside"] = ROW * sizes.copy / _seconds_beside(device, ways[name], ways[other], longer)
        device.synchronize()
    return rates


def _seconds_beside(device: Device, copy: Callable[[], Any], other: Callable[[], Any], longer: int) -> float:
    """Return the shortest time of ROW copies while `longer` copies run in the other direction, seconds."""
    best = math.inf
    for _ in range(ROWS):
        for _ in range(longer):
            other()
        begin = time.perf_counter()
        fences = [copy() for _ in range(ROW)]
        device.wait_host(fences[-1])
        best = min(best, time.perf_counter() - begin)
        device.synchronize()
    return best


def _matmul_rate(device: Device, dtype: torch.dtype, free: int) -> float:
    """Return the FLOP/s of products of square matrices, the maximum over sizes."""
    rows, most = LEAST_ROWS, min(MOST_ROWS, math.isqrt(free // (PART * 3 * dtype.itemsize)))
    generator = torch.Generator(device.torch_device).manual_seed(0)
    best = 0.0
    while True:
        before = best
        try:
            left, right = (_normal(rows, dtype, device.torch_device, generator) for _ in range(2))
            multiply = partial(torch.mm, left, right, out=torch.empty_like(left))
            seconds = _seconds(multiply, device.synchronize)
        except RuntimeError as error:
            name = describe_device(device)["name"]
            raise ValueError(
                f"Multiplying two matrices of shape {(rows, rows)} in {str(dtype).removeprefix('torch.')} fails on "
                f"{name!r}. Use another precision, or free memory of the device."
            ) from error
        best = max(best, 2 * rows**3 / seconds)
        enough = seconds >= PRODUCT_SECONDS and best < FASTER * before
        if enough or 2 * rows > most or 8 * seconds > LONGEST_SECONDS:
            return best
        rows *= 2


def _normal(rows: int, dtype: torch.dtype, torch_device: torch.device, generator: torch.Generator) -> Tensor:
    """Return random numbers: GPUs multiply constants faster than typical values, because that takes less power."""
    return torch.randn(rows, rows, device=torch_device, generator=generator).to(dtype)


def _sum_rate(torch_device: torch.device, sizes: _ProbeSizes, finish: Callable[[], None]) -> float:
    """Return the memory bandwidth of adding two tensors, bytes per second read and written."""
    left, right, result = (torch.full((sizes.sum // 4,), 1.0, device=torch_device) for _ in range(3))
    return 3 * left.nbytes / _seconds(lambda: torch.add(left, right, out=result), finish)


def _step_rate(torch_device: torch.device, sizes: _ProbeSizes, finish: Callable[[], None]) -> float:
    """Return the elements per second of PyTorch's fused AdamW in float32."""
    weight = nn.Parameter(torch.full((sizes.elements,), 1.0, device=torch_device))
    weight.grad = torch.full_like(weight, 1e-3)
    return sizes.elements / _seconds(torch.optim.AdamW([weight], fused=True).step, finish)


def _host_rates(device: Device, sizes: _ProbeSizes) -> tuple[float, float]:
    """Return `host_step` and `host_memory` of HardwareProfile, measured on the worker thread."""
    cpu = torch.device("cpu")

    def measure() -> tuple[float, float]:
        return _step_rate(cpu, sizes, lambda: None), _sum_rate(cpu, sizes, lambda: None)

    rates: tuple[float, float] = device.worker.submit(measure).result()
    return rates


def _seconds(work: Callable[[], object], finish: Callable[[], None]) -> float:
    """Return the shortest time of `work` followed by `finish`, seconds."""
    best, spent, count = math.inf, 0.0, 0
    work()
    finish()
    while count == 0 or spent < (
        MOST_SECONDS if count < LEAST_REPEATS else REPEAT_SECONDS if count < MOST_REPEATS else 0.0
    ):
        begin = time.perf_counter()
        work()
        finish()
        took = time.perf_counter() - begin
        best, spent, count = min(best, took), spent + took, count + 1
    return best


FORMAT = 2
# Maximum size of a file; usual files have about two thousand characters.
MOST_CHARACTERS = 1 << 16


def cached_profile(
    device: Device,
    dtypes: Iterable[torch.dtype],
    folder: Path | str,
    measure: Callable[[Device, Iterable[torch.dtype]], HardwareProfile] = profile_hardware,
) -> HardwareProfile:
    """Return the cached profile of a device if it is valid; otherwise measure the hardware and cache the profile.

    Warn if the folder cannot be written to, because every run then measures again.

    Args:
        device: As in `profile_hardware`.
        dtypes: As in `profile_hardware`.
        folder: Folder of cached profiles, made if needed; usually `user_folder()`.
        measure: Function that measures the hardware.

    Raises:
        ValueError: As in `profile_hardware`.
    """
    kinds = tuple(dict.fromkeys(dtypes))
    key = cache_key(device, kinds)
    path = entry_path(Path(folder), key)
    profile = read_entry(path, key)
    if profile is not None:
        device_bytes, host_bytes = free_bytes(device)
        return replace(profile, device_bytes=device_bytes, host_bytes=host_bytes)
    with waiting("Measuring the hardware"):
        profile = measure(device, kinds)
    if is_busy():
        return profile
    try:
        write_entry(path, key, profile)
    except OSError as error:
        warnings.warn(f"The hardware is measured in every run, because {path} cannot be written: {error}", stacklevel=2)
    return profile


def is_busy() -> bool:
    """Return True if the load average of the last minute exceeds the number of cores."""
    return psutil.getloadavg()[0] > (psutil.cpu_count() or 1)


def user_folder() -> Path:
    """Return the cache folder of this user, without making it."""
    try:
        import platformdirs
    except ImportError:
        return Path.home() / ".cache" / "lightning_protrain"
    return platformdirs.user_cache_path("lightning_protrain")


def cache_key(device: Device, dtypes: Iterable[torch.dtype]) -> dict[str, Any]:
    """Return everything that a profile depends on: versions, device, host and settings of PyTorch, as JSON values."""
    return {
        "format": FORMAT,
        "device": describe_device(device),
        "torch": str(torch.__version__),
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(),
        "allowed_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "host_bytes": psutil.virtual_memory().total,
        "threads": [torch.get_num_threads(), device.worker.threads],
        "lockable_bytes": hasattr(resource, "getrlimit") and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "locks": locks_memory(device),
        # `get_float32_matmul_precision` raises if the user sets these instead.
        "float32_precision": [
            backend.matmul.fp32_precision for backend in (torch.backends.cuda, torch.backends.mkldnn)
        ],
        "dtypes": sorted(str(dtype).removeprefix("torch.") for dtype in dtypes),
    }


def entry_path(folder: Path, key: dict[str, Any]) -> Path:
    """Return the file in `folder` for the profile of `key`."""
    return file_of(folder, "hardware", key)


def read_entry(path: Path, key: dict[str, Any]) -> HardwareProfile | None:
    """Return the profile in `path`, or None if the file is missing, invalid, or has another key."""
    try:
        content = read_content(path, key, "profile", MOST_CHARACTERS)
        return HardwareProfile.from_json(json.dumps(content))
    except (OSError, ValueError, RecursionError):
        return None


def write_entry(path: Path, key: dict[str, Any], profile: HardwareProfile) -> None:
    """Replace the cached profile at `path`.

    Raises:
        OSError: If the file cannot be written; it is unchanged.
    """
    write_content(path, key, "profile", json.loads(profile.to_json()))
