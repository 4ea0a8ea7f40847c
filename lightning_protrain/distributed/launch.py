"""Launch of the processes of a run, and creation of the process groups.

[Note: One thread]
By default, autograd has one thread for the CPU and one for each GPU. With a penalty on weights in host memory, the CPU
thread would add to gradients while the GPU thread downloads into them. So backward runs on one thread.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _destroy_dist_connection,
    _init_dist_connection,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_protrain.config import LaunchOptions, StartMethod
from lightning_protrain.device.device import Device, open_device
from lightning_protrain.device.topology import PeerAccess, numa_node, peers_found
from lightning_protrain.rank_store import naming_wait
from lightning_protrain.runtime.comm.collectives import RankMesh, make_rank_mesh


def choose_launcher(strategy: ParallelStrategy, start_method: StartMethod, num_nodes: int, num_processes: int) -> Any:
    """Return the launcher of a run; None for a single process."""
    if start_method != "popen":
        return _MultiProcessingLauncher(strategy, start_method=start_method)
    if num_nodes * num_processes == 1:
        return None
    assert strategy.cluster_environment is not None
    return _SubprocessScriptLauncher(strategy.cluster_environment, num_processes, num_nodes)


def set_world_ranks(environment: ClusterEnvironment | None, rank: int, world_size: int) -> None:
    """Set the rank of this process and the number of processes in the cluster environment and in `rank_zero_only`.

    Args:
        environment: Cluster environment; None for a single process.
        rank: Global rank of this process.
        world_size: Number of processes on all nodes.
    """
    if environment is None:
        return
    environment.set_global_rank(rank)
    environment.set_world_size(world_size)
    # Lightning has two copies of `rank_zero_only`, which read the rank from this attribute.
    for only in (rank_zero_only, fabric_rank_zero_only):
        setattr(only, "rank", rank)  # noqa: B010 (a function has no such attribute to mypy)


@dataclass(frozen=True)
class ProcessPlace:
    """The ranks and devices of a process.

    Attributes:
        rank: Global rank.
        world_size: Number of processes on all nodes.
        local_rank: Rank on its node.
        devices: Devices of all processes of its node, by local rank.
    """

    rank: int
    world_size: int
    local_rank: int
    devices: Sequence[torch.device]

    @property
    def device(self) -> torch.device:
        """Device of the process."""
        return self.devices[self.local_rank]


def connect(
    environment: ClusterEnvironment, place: ProcessPlace, options: LaunchOptions
) -> tuple[RankMesh, PeerAccess | None]:
    """Create the process groups; every rank calls it.

    Args:
        environment: Cluster environment with the address of rank 0.
        place: Ranks and devices of this process.
        options: The user's options.

    Returns:
        The ranks, and the links between their devices (see [Note: Peer-to-peer] in device/topology.py), or None if the
        links are unknown.

    Raises:
        ValueError: If the backend cannot send tensors of the device.
    """
    device, timeout = place.device, options.timeout
    backend = choose_backend(options.backend, device.type)
    reset_seed()
    starting = naming_wait(f"all {place.world_size} ranks to start", place.rank)
    device_id = device if device.type != "cpu" else None
    with starting, peers_found(environment, place.rank, place.world_size, device, place.devices, timeout) as access:
        _init_dist_connection(environment, backend, timeout=timeout, device_id=device_id)
    if device.type == "cuda":
        # NCCL must be shut down, but Lightning does so only for the backend "nccl".
        atexit.register(_destroy_dist_connection)
    with naming_wait("the other ranks to make process groups"):
        mesh = make_rank_mesh(place.local_rank, len(place.devices), timeout, device)
    return mesh, access if access.link != "unknown" else None


def choose_backend(chosen: str | None, kind: str) -> str:
    """Return the backend of the process group, which must send tensors of the host and of the device.

    Args:
        chosen: The user's choice; None means the default of the device.
        kind: Type of the device, such as `"cuda"` or `"cpu"`.

    Raises:
        ValueError: If the backend cannot send tensors of the device.
    """
    if chosen is None:
        return "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    sends = kind if ":" in chosen else {"nccl": "cuda"}.get(chosen, kind)
    if sends != kind or (":" in chosen and f"{kind}:" not in chosen):
        raise ValueError(
            f"process_group_backend={chosen!r} cannot send tensors on {kind!r}. Remove it, or give "
            f'"{"cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"}".'
        )
    return "cpu:gloo,cuda:nccl" if chosen == "nccl" else chosen


def open_shared_device(
    device: torch.device, devices: Sequence[torch.device] | None, local_rank: int, log_once: Callable[[str], None]
) -> Device:
    """Open the device of this rank; ranks of a node divide the cores on which the host steps the optimizer.

    Args:
        device: Device of this rank.
        devices: Devices of all ranks of this node, by local rank; None for a single rank.
        local_rank: Rank of this process on its node.
        log_once: Called with warnings for the user.
    """
    opened = open_device(device, log_once)
    # Workers use the cores of their GPU's NUMA node, so ranks with GPUs on different NUMA nodes do not share cores.
    nodes = [numa_node(member) if member.type == "cuda" else None for member in devices or (device,)]
    beside = [rank for rank, node in enumerate(nodes) if node == nodes[local_rank]]
    opened.worker.share(beside.index(local_rank), len(beside))
    return opened
