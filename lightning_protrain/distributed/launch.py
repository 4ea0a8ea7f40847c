"""Who takes part in a run: processes, machines, accelerators, and how they find each other.

[Note: One thread]
Left alone, autograd runs what is on a GPU on a thread of its own, beside what is on the CPU: a penalty over weights in
host memory would add to gradients while others land there. On one thread all goes in one order, on every device.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _destroy_dist_connection,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.accelerators import Accelerator, MPSAccelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message, rank_zero_module, rank_zero_only
from torch import Tensor

from lightning_protrain.device.device import Device, open_device
from lightning_protrain.device.quant_state import accepting_companions
from lightning_protrain.device.topology import PeerAccess, numa_node, peers_found
from lightning_protrain.runtime.comm.rank_health import naming_wait

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


def _number(name: str, alone: int) -> property:
    """Make the property `name` of a strategy: a number that the cluster environment has where there are several ranks.

    A run of one process asks no environment, as in `SingleDeviceStrategy`: SLURM, say, need not have set its variables.

    Args:
        name: Of the property of `ParallelStrategy`.
        alone: Its value in a run of one process, until it is set.
    """

    def read(strategy: ProcessStrategy) -> int:
        if name in strategy._numbers or not strategy.is_distributed:
            return strategy._numbers.get(name, alone)
        return int(getattr(ParallelStrategy, name).fget(strategy))

    def write(strategy: ProcessStrategy, number: int) -> None:
        strategy._numbers[name] = number

    return property(read, write)


class ProcessStrategy(ParallelStrategy):
    """The part of a strategy that knows of processes and of nothing that they train.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As in `DDPStrategy`.
        process_group_backend, timeout, start_method: As in `DDPStrategy`.
    """

    _has_trainer = False

    world_size = _number("world_size", 1)
    global_rank = _number("global_rank", 0)
    local_rank = _number("local_rank", 0)
    node_rank = _number("node_rank", 0)

    def __init__(
        self,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
        process_group_backend: str | None,
        timeout: timedelta | None,
        start_method: StartMethod,
    ) -> None:
        self._numbers: dict[str, int] = {}
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._num_nodes = 1
        self._peers: PeerAccess | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_nodes * self.num_processes > 1

    @property
    def num_nodes(self) -> int:
        """Number of machines, set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of processes on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """The backend that the user asks for; None: the one of the device."""
        return self._process_group_backend

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def accelerator(self) -> Accelerator | None:
        return self._own_accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator

    @property
    def _accelerator(self) -> Accelerator | None:
        # A Trainer reads this of a strategy object that it is given, before it complains of what another has set.
        if self._has_trainer:
            raise ValueError(
                "This ProTrainStrategy belongs to another Trainer already. Make a new one for each Trainer, or give "
                'strategy="protrain".'
            )
        return self._own_accelerator

    @_accelerator.setter
    def _accelerator(self, accelerator: Accelerator | None) -> None:
        if isinstance(accelerator, MPSAccelerator):
            raise ValueError(
                'strategy="protrain" does not run on accelerator="mps": host and device share one memory there, so '
                'nothing can be offloaded. Use accelerator="cpu", or strategy="auto" on MPS.'
            )
        self._own_accelerator = accelerator

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which share of a data set is this rank's; the base class forgets the other machines."""
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        with accepting_companions(self.lightning_module):
            super().load_model_state_dict(checkpoint, strict)

    def _configure_launcher(self) -> None:
        self._has_trainer = True
        if self._start_method != "popen":
            self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)
        elif self.is_distributed:
            assert self.cluster_environment is not None
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Opens the device, and the process group if there are several processes."""
        super().setup_environment()
        if not self.is_distributed:
            return
        assert self.cluster_environment is not None
        reset_seed()
        self.set_world_ranks()
        environment, device = self.cluster_environment, self.root_device
        asked = (environment, self.global_rank, self.world_size, device, self.parallel_devices, self._timeout)
        device_id = device if device.type != "cpu" else None
        starting = naming_wait(f"all {self.world_size} ranks to start", self.global_rank)
        with starting, peers_found(*asked) as found:
            _init_dist_connection(environment, self._backend(), timeout=self._timeout, device_id=device_id)
        if device.type == "cuda":
            # NCCL wants to be told of the end, and Lightning does so only for a backend called "nccl".
            atexit.register(_destroy_dist_connection)
        if found.link != "unknown":
            self._peers = found

    def open_device(self) -> Device:
        """The device of this rank; the ranks of a machine share out the cores on which the host steps optimizers."""
        device = open_device(self.root_device, self._say_of_rank)
        # A worker has the cores beside its GPU: only ranks whose GPUs hang on the same node want the same ones.
        nodes = [_node_of(each) for each in self.parallel_devices or (self.root_device,)]
        beside = [rank for rank, node in enumerate(nodes) if node == nodes[self.local_rank]]
        device.worker.share(beside.index(self.local_rank), len(beside))
        return device

    def _say_of_rank(self, sentence: str) -> None:
        """Says what is true of the machine or the device of this rank, which others need not share."""
        # To where `rank_zero_info` says what is true of all.
        rank_zero_module.log.info(rank_prefixed_message(sentence, self.global_rank if self.is_distributed else None))

    @property
    def peers(self) -> PeerAccess | None:
        """How the devices reach each other, see [Note: Peer-to-peer]; None where that is not known."""
        return self._peers

    def set_world_ranks(self) -> None:
        """Tells the cluster environment which process of how many this is."""
        if self.cluster_environment is None:
            return
        processes = max(self.num_processes, 1)
        self.cluster_environment.set_global_rank(self.node_rank * processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * processes)
        # Both copies of the utility: the environments of a cluster may ignore the setters.
        for only in (rank_zero_only, fabric_rank_zero_only):
            setattr(only, "rank", self.global_rank)  # noqa: B010 (a function has no such attribute to mypy)

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs backward on this thread alone, see [Note: One thread]."""
        with torch.autograd.set_multithreading_enabled(False):
            return super().backward(*args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean or sum of a tensor over all ranks; anything else comes back as it is."""
        if not isinstance(tensor, Tensor) or not _has_group():
            return tensor
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks."""
        if _has_group():
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """What rank `src` has."""
        if not _has_group():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def _backend(self) -> str:
        """What tensors of the host and of the device are sent by; gradients and weights are on both.

        Raises:
            ValueError: A backend that does not send what is on the device.
        """
        chosen, kind = self._process_group_backend, self.root_device.type
        if chosen is None:
            return "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        sends = kind if ":" in chosen else {"nccl": "cuda"}.get(chosen, kind)
        if sends != kind or (":" in chosen and f"{kind}:" not in chosen):
            raise ValueError(
                f"process_group_backend={chosen!r} does not send what is on {kind!r}. Leave it out, or give "
                f'"{"cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"}".'
            )
        return "cpu:gloo,cuda:nccl" if chosen == "nccl" else chosen


def _node_of(device: torch.device) -> int | None:
    return numa_node(device) if device.type == "cuda" else None


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()
