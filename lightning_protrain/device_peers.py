"""What PyTorch knows of the ways between the GPUs of a machine; beside `device.py` the only file that names CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def reaches(gpu: int, other: int) -> bool:
    """Whether the driver lets one GPU of this machine read the memory of another one.

    Raises:
        AssertionError: There is no GPU of that index; from PyTorch.
        RuntimeError: CUDA does not work.
    """
    return bool(torch.cuda.can_device_access_peer(gpu, other))


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
