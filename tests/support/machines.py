"""Machines to plan for: round figures, so that a test depends on no measurement."""

from __future__ import annotations

from lightning_protrain.profiler.records import HardwareProfile

GIB = 1 << 30
# The CPU as the device of its own host: copies run beside nothing.
CPU = HardwareProfile(
    name="Test CPU",
    upload=10e9,
    download=10e9,
    upload_beside=10e9,
    download_beside=10e9,
    flops={"float32": 100e9, "bfloat16": 100e9, "float16": 100e9},
    memory=20e9,
    device_step=1e9,
    host_step=1e9,
    host_memory=20e9,
    device_bytes=16 * GIB,
    host_bytes=16 * GIB,
    asynchronous=False,
)
# A GPU whose figures all differ.
PROFILE = HardwareProfile(
    name="a device",
    upload=25e9,
    download=26e9,
    upload_beside=20e9,
    download_beside=21e9,
    flops={"float32": 20e12, "bfloat16": 100e12},
    memory=1e12,
    device_step=3e10,
    host_step=1e9,
    host_memory=30e9,
    device_bytes=24 << 30,
    host_bytes=64 << 30,
)
# Bounds far beyond real hardware; figures outside of them are errors.
PLAUSIBLE = {
    "upload": (1e7, 1e13),
    "download": (1e7, 1e13),
    "upload_beside": (1e6, 1e13),
    "download_beside": (1e6, 1e13),
    "flops": (1e8, 1e17),
    "memory": (1e8, 1e14),
    "device_step": (1e6, 1e13),
    "host_step": (1e6, 1e12),
    "host_memory": (1e8, 1e13),
}


def implausible(profile: HardwareProfile) -> list[str]:
    """Return the names of the rates outside of `PLAUSIBLE`, such as in wrong units."""
    bounds = {name: PLAUSIBLE[name.partition(" ")[0]] for name in profile.rates()}
    return [name for name, rate in profile.rates().items() if not bounds[name][0] <= rate <= bounds[name][1]]
