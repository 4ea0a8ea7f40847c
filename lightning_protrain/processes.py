"""Who takes part in a run: processes, machines, accelerators. One process and one device in this version."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator, MPSAccelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class ProcessStrategy(ParallelStrategy):
    """The part of a strategy that knows of processes and of nothing that they train.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: As in `DDPStrategy`.
        process_group_backend, timeout, start_method: As in `DDPStrategy`.
    """

    _has_trainer = False

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
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._num_nodes = 1

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

    def _configure_launcher(self) -> None:
        self._has_trainer = True
        if self.is_distributed:
            raise ValueError(
                f'strategy="protrain" runs on one device in this version, {self.num_nodes * self.num_processes} were '
                "asked for. Set Trainer(devices=1, num_nodes=1)."
            )
        if self._start_method != "popen":
            self._launcher = _MultiProcessingLauncher(self, start_method=self._start_method)

    def set_world_ranks(self) -> None:
        """Tells the cluster environment which process of how many this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * max(self.num_processes, 1))

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        pass

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj
