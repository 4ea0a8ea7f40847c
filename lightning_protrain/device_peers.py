"""Where the GPUs of a machine are, and the ways between them; beside `device.py` the only file that names CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


def reaches(gpu: int, other: int) -> bool:
    """Whether the driver lets one GPU of this machine read the memory of another one.

    Raises:
        AssertionError: There is no GPU of that index; from PyTorch.
        RuntimeError: CUDA does not work.
    """
    try:
        return bool(torch.cuda.can_device_access_peer(gpu, other))
    except torch.cuda.DeferredCudaCallError as error:  # No RuntimeError: CUDA was asked for something before it began.
        raise RuntimeError(str(error)) from error


def nvlink_counts() -> Sequence[Sequence[int]] | None:
    """For each pair of visible GPUs, how many NVLinks join them, through a switch or not; None if nothing tells."""
    detect = getattr(torch._C._distributed_c10d, "_detect_dma_connectivity", None)
    if detect is None:
        return None
    try:
        found: Sequence[Sequence[int]] = detect(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    except RuntimeError:  # No NVML, or a build without CUDA.
        return None
    return found


def pci_address(gpu: torch.device) -> str | None:
    """Its place on the bus, as Linux writes it; None where PyTorch does not tell it."""
    properties = torch.cuda.get_device_properties(gpu)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, device = (f"{part or 0:02x}" for part in parts)
    return None if None in parts else f"{domain:0>4}:{bus}:{device}.0"


def numa_node(gpu: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node that a GPU hangs on, where PyTorch tells its address and Linux the node.

    Args:
        gpu: Which one.
        devices: Where Linux describes what is on the bus.
    """
    told = devices / str(pci_address(gpu)) / "numa_node"
    return int(told.read_text()) if told.is_file() else None
