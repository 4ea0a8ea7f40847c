"""The record of a machine."""

from __future__ import annotations

from lightning_protrain.profiler.records import HardwareProfile

PROFILE = HardwareProfile(
    name="a device",
    upload=25e9,
    download=26e9,
    upload_beside=20e9,
    download_beside=21e9,
    upload_pageable=8e9,
    download_pageable=9e9,
    flops={"float32": 20e12, "bfloat16": 100e12},
    memory=1e12,
    device_step=3e10,
    host_step=1e9,
    host_memory=30e9,
    device_bytes=24 << 30,
    host_bytes=64 << 30,
)
