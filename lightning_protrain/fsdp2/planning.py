"""Prediction of the memory of a fit with FSDP2, and choice of the device mesh; rank 0 decides for all ranks."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from lightning.pytorch import Trainer

from lightning_protrain.cgroup_limits import free_host_bytes
from lightning_protrain.config import FSDPOptions, plural
from lightning_protrain.distributed.failures import failing_together
from lightning_protrain.distributed.rank_sync import RankSync, least_memory, refuse_differences
from lightning_protrain.fsdp2.units import ShardUnits, parameters_by_unit
from lightning_protrain.planner.free_memory import FreeMemory
from lightning_protrain.planner.fsdp_memory import (
    SHARE_OF_DEVICE,
    FSDPMemory,
    FSDPProblem,
    FSDPRanks,
    FSDPTooLarge,
    fit_fsdp,
)
from lightning_protrain.planner.problem import layout_alpha
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.runtime.optim.bnb_optimizers import mean_state_bytes
from lightning_protrain.strategy.profile_step import profile_training_step

# Fraction of the free device memory that a plan may use without a profile of activations.
SHARE_OF_STATES = 0.7
_STATES_ALONE = 'Only weights, gradients and optimizer states are planned, and with "auto" all blocks are checkpointed.'
# Hardware of a node, by GPU name; None means this node.
Nodes = Mapping[str, HardwareProfile | None]
FSDPAnswers = dict[str, FSDPMemory | ValueError]


@dataclass(frozen=True)
class FSDPDryRun:
    """Hardware to plan for without training, and the answers.

    Attributes:
        nodes: Hardware of a node, by GPU name; None means this node.
        ranks: Number of nodes, and of ranks on each node.
        answers: Result of the fit: memory of a rank, or the error if the model does not fit, by GPU name.
    """

    nodes: Nodes
    ranks: FSDPRanks
    answers: FSDPAnswers = field(default_factory=dict)


class FSDPSession:
    """The planning of `ProTrainFSDP2Strategy`: from the user's options to the predicted memory.

    Args:
        options: The user's options.
        sync: The ranks.

    Attributes:
        memory: Predicted memory of the last fit; None before the first fit.
        dry_run: Hardware to plan for without training; None trains.
        loads_once: True if one rank of each node loads the model, see [Note: Meta init] in distributed/meta_init.py.
    """

    def __init__(self, options: FSDPOptions, sync: RankSync) -> None:
        self.options = options
        self.memory: FSDPMemory | None = None
        self.dry_run: FSDPDryRun | None = None
        self.loads_once = False
        self._sync = sync

    @contextmanager
    def planning_only(self, nodes: Nodes, ranks: FSDPRanks) -> Generator[FSDPAnswers]:
        """Let a fit within this context only plan, without weights; yield the answers, which the fit fills."""
        self.meshes(ranks)
        self.dry_run = FSDPDryRun(nodes, ranks)
        try:
            yield self.dry_run.answers
        finally:
            self.dry_run = None

    def meshes(self, ranks: FSDPRanks) -> tuple[FSDPRanks, ...]:
        """Return the meshes that the user's options allow, the preferred one first.

        Raises:
            ValueError: If the user's `device_mesh` has another number of ranks.
        """
        nodes, here = ranks.num_nodes, ranks.ranks_per_node
        ranks = FSDPRanks(nodes, here, None, self.options.cpu_offload)
        if self.options.device_mesh is not None:
            copies, shards = self.options.device_mesh
            if copies * shards != ranks.num_ranks:
                raise ValueError(
                    f"device_mesh={(copies, shards)} needs {plural(copies * shards, 'rank')}, but there are "
                    f"{ranks.num_ranks} ({nodes} x {here}). Give two numbers whose product is {ranks.num_ranks}, or "
                    "remove it."
                )
            return (FSDPRanks(nodes, here, shards, self.options.cpu_offload),)
        if self.options.sharding_strategy == "HYBRID_SHARD":
            return ranks.meshes[:1]
        return ranks.meshes[-1:] if self.options.sharding_strategy == "FULL_SHARD" else ranks.meshes

    def describe(
        self, trainer: Trainer, device: torch.device, names: tuple[str, ...], units: ShardUnits, ranks: FSDPRanks
    ) -> FSDPProblem:
        """Return a record of the model, its optimizers and the ranks, without activations.

        Args:
            trainer: The Trainer in `Strategy.setup`, with its optimizers.
            device: Device of this rank.
            names: Modules that can be checkpointed.
            units: Modules that become FSDP units.
            ranks: Number of nodes, and of ranks on each node.
        """
        model, optimizers = trainer.lightning_module, trainer.optimizers
        layout = describe_model(model, list(names) or None)
        on_gpu = device.type != "cpu" or (self.dry_run is not None and any(self.dry_run.nodes.values()))
        return FSDPProblem(
            layout=layout,
            ranks=ranks,
            state_bytes=mean_state_bytes(optimizers),
            compute_dtype="bfloat16" if trainer.precision_plugin.precision == "bf16-mixed" else None,
            accumulates=trainer.accumulate_grad_batches > 1 and not self.options.sync_each_batch,
            foreach=any(group.get("foreach") for optimizer in optimizers for group in optimizer.param_groups),
            on_gpu=on_gpu,
            alpha=layout_alpha(layout) if on_gpu else 1.0,
            groups=parameters_by_unit(model, units),
            loads_once=self.loads_once,
        )

    def decide(self, trainer: Trainer, device: torch.device, problem: FSDPProblem, count: int | None) -> None:
        """Predict the memory of the fit on rank 0, and set `memory` on all ranks; every rank calls it.

        Args:
            trainer: The Trainer in `Strategy.setup`.
            device: Device of this rank.
            problem: Result of `describe`.
            count: Number of checkpointed modules; None means as few as the memory allows.

        Raises:
            FSDPTooLarge: If the model does not fit; raised on all ranks.
        """
        limit, meshes = self.options.device_bytes, self.meshes(problem.ranks)
        weights = sum(each.nbytes for each in trainer.lightning_module.parameters() if not each.is_meta)
        free = FreeMemory(
            free_device_bytes(device) if limit is None else None,
            free_host_bytes() if self.options.cpu_offload else None,
            weights,
        )
        if self._sync.mesh is not None:
            refuse_differences({"arguments of ProTrainFSDP2Strategy": str(self.options)})
            free = least_memory(free, self._sync.mesh)
        is_open = count is None or len(meshes) > 1
        if limit is not None or (free.device is not None and is_open):
            with failing_together("Profiling a training step"):
                profile = profile_training_step(trainer, problem.layout, otherwise=_STATES_ALONE)
            problem = replace(problem, profile=profile)
            if limit is None and free.device is not None:
                limit = int(free.device * (SHARE_OF_STATES if problem.profile is None else SHARE_OF_DEVICE))
            if problem.profile is None and count is None:
                count = len(problem.block_names)
        # Weights that are on the host now are freed when the model is sharded.
        host_bytes = None if free.host is None else free.host + free.weights
        found: FSDPMemory | ValueError | None = None
        if trainer.is_global_zero:
            try:
                found = fit_fsdp(problem, limit, host_bytes, meshes, count)
            except FSDPTooLarge as error:
                found = error
                if self.options.device_bytes is None and is_open:
                    ways = "activation_checkpointing and sharding_strategy"
                    found = FSDPTooLarge(f"{error} Or set {ways} to train without a prediction, which may fail.")
        found = self._sync.broadcast(found)
        if isinstance(found, ValueError):
            raise found
        self.memory = found

    def answer(self, trainer: Trainer, device: torch.device, problem: FSDPProblem, count: int | None) -> None:
        """Fill in the answers of the dry run; the arguments are those of `decide`."""
        assert self.dry_run is not None
        meshes = self.meshes(self.dry_run.ranks)
        for name, node in self.dry_run.nodes.items():
            profile = profile_training_step(trainer, problem.layout, "A plan", node)
            limit = self.options.device_bytes
            if limit is None:
                free = node.device_bytes if node is not None else free_device_bytes(device)
                limit = None if free is None else int(SHARE_OF_DEVICE * free)
            host_bytes = node.host_bytes if node is not None else free_host_bytes()
            try:
                found = fit_fsdp(replace(problem, profile=profile), limit, host_bytes, meshes, count)
                self.dry_run.answers[name] = found
            except FSDPTooLarge as error:
                self.dry_run.answers[name] = error

    def checkpointed(self, names: tuple[str, ...], count: int | None, device: torch.device) -> tuple[str, ...]:
        """Return the modules to checkpoint in this fit.

        Args:
            names: Modules that can be checkpointed.
            count: Number of checkpointed modules; None means the modules in `memory`.
            device: Device of this rank.
        """
        if count is not None:
            return names[:count]
        if self.memory is None:  # The model was sharded in an evaluation, without a prediction.
            return names if self.options.device_bytes is not None or device.type != "cpu" else ()
        return self.memory.checkpointed


def free_device_bytes(device: torch.device) -> int | None:
    """Return the free device memory of this process in bytes, or None on the CPU."""
    if device.type == "cpu":
        return None
    free, _ = torch.accelerator.get_memory_info(device)
    return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
