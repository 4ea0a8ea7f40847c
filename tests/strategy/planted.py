"""Rates of hardware that are planted wrong, by the resource."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lightning_protrain.profiler.records import HardwareProfile

WRONG: dict[str, Callable[[HardwareProfile, float], HardwareProfile]] = {
    "compute": lambda it, by: replace(
        it, memory=it.memory * by, flops={name: rate * by for name, rate in it.flops.items()}
    ),
    "device step": lambda it, by: replace(it, device_step=it.device_step * by),
    "link": lambda it, by: replace(
        it,
        upload=it.upload * by,
        upload_beside=it.upload_beside * by,
        download=it.download * by,
        download_beside=it.download_beside * by,
    ),
    "host": lambda it, by: replace(it, host_step=it.host_step * by, host_memory=it.host_memory * by),
}
