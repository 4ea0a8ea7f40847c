"""What the user says about FSDP2, and what follows from it for a model: the mesh, and the blocks that recompute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_protrain.fsdp2.units import POLICIES, Policy
from lightning_protrain.planner.fsdp_memory import FSDPRanks
from lightning_protrain.planner.presets import parse_bytes

ShardingStrategy = Literal["auto", "FULL_SHARD", "HYBRID_SHARD"]
Checkpointing = bool | int | Literal["auto", "all", "none"]
# Of the memory that a device reports as free, what may be planned with: NCCL and kernels take some later, and
# activations more, where they are not known.
SHARE_OF_ALL, SHARE_OF_STATES = 0.92, 0.7


@dataclass(frozen=True)
class FSDPSettings:
    """Arguments of `ProTrainFSDP2Strategy`, checked.

    Attributes:
        policy, min_num_params, activation_checkpointing, cpu_offload, sync_each_batch, sharding_strategy, device_mesh,
            device_memory: As there.

    Raises:
        ValueError: One is out of its range, or two contradict each other.
    """

    policy: Policy = "transformer"
    min_num_params: int = 100_000_000
    activation_checkpointing: Checkpointing = "auto"
    cpu_offload: bool = False
    sync_each_batch: bool = False
    sharding_strategy: ShardingStrategy = "auto"
    device_mesh: tuple[int, int] | None = None
    device_memory: str | int = "auto"

    def __post_init__(self) -> None:
        """Check what can be checked without a model and without the ranks."""
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r}: give one of {', '.join(map(repr, POLICIES))}.")
        if type(self.min_num_params) is not int or self.min_num_params < 1:
            raise ValueError(f"min_num_params={self.min_num_params!r}: give a positive number of parameters.")
        for name in ("cpu_offload", "sync_each_batch"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: give True or False.")
        wanted = self.activation_checkpointing
        if not (isinstance(wanted, int) and wanted >= 0) and wanted not in ("auto", "all", "none"):
            raise ValueError(
                f'activation_checkpointing={wanted!r}: give "auto", "all" or True, "none" or False, or a number of '
                "blocks."
            )
        names = get_args(ShardingStrategy)
        if self.sharding_strategy not in names:
            raise ValueError(
                f"sharding_strategy={self.sharding_strategy!r}: give one of {', '.join(map(repr, names))}."
            )
        self._check_mesh()
        if self.device_memory != "auto":
            parse_bytes(self.device_memory)

    def _check_mesh(self) -> None:
        if self.device_mesh is None:
            return
        sizes: Sequence[int] = self.device_mesh
        if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(
                f"device_mesh={sizes!r}: give two positive numbers, of copies and of the ranks that shard each."
            )
        if self.sharding_strategy == "FULL_SHARD":
            raise ValueError(
                f'sharding_strategy="FULL_SHARD" shards over all ranks, and device_mesh={tuple(sizes)} says over how '
                "many. Give one of the two."
            )

    @property
    def device_bytes(self) -> int | None:
        """What the device may hold, if the user says it."""
        return None if self.device_memory == "auto" else parse_bytes(self.device_memory)

    def meshes(self, num_nodes: int, ranks_per_node: int) -> tuple[FSDPRanks, ...]:
        """Return what these ranks may do, the best first.

        Args:
            num_nodes: Number of nodes.
            ranks_per_node: Ranks on each of them.

        Raises:
            ValueError: The mesh that is given is one of another number of ranks.
        """
        ranks = FSDPRanks(num_nodes, ranks_per_node, None, self.cpu_offload)
        if self.device_mesh is not None:
            copies, shards = self.device_mesh
            if copies * shards != ranks.num_ranks:
                raise ValueError(
                    f"device_mesh={(copies, shards)} is one of {copies * shards} ranks, and there are "
                    f"{ranks.num_ranks} ({num_nodes} x {ranks_per_node}). Give two numbers whose product is "
                    f"{ranks.num_ranks}, or leave it out."
                )
            return (FSDPRanks(num_nodes, ranks_per_node, shards, self.cpu_offload),)
        if self.sharding_strategy == "HYBRID_SHARD":
            return ranks.meshes[:1]
        return ranks.meshes[-1:] if self.sharding_strategy == "FULL_SHARD" else ranks.meshes

    def num_checkpointed(self, names: Sequence[str], model: nn.Module) -> int | None:
        """Return how many modules recompute, from the first one on; None: as few as the memory allows.

        Args:
            names: Modules that can.
            model: Where they are.

        Raises:
            ValueError: More are wanted than there are.
        """
        wanted = self.activation_checkpointing
        if wanted == "auto":
            return None
        if wanted is False or wanted == "none":
            return 0
        if wanted is True or wanted == "all":
            if not names:
                raise ValueError(
                    f"activation_checkpointing={wanted!r} found nothing to recompute in {type(model).__name__}: it has "
                    f"no repeated list of blocks, and no module inside it has min_num_params={self.min_num_params} "
                    "parameters. Lower min_num_params, or leave activation_checkpointing out."
                )
            return len(names)
        assert isinstance(wanted, int)
        if wanted > len(names):
            raise ValueError(
                f"activation_checkpointing={wanted}: {type(model).__name__} has {len(names)} blocks that can recompute "
                f'their activations. Give at most {len(names)}, or "all".'
            )
        return wanted


def make_mesh(ranks: FSDPRanks, device: torch.device) -> DeviceMesh:
    """Return the mesh that `fully_shard` takes: of one dimension, or of copies and shards; every rank calls it.

    Args:
        ranks: Who holds what; ranks of a node are neighbours.
        device: Of this rank.
    """
    if ranks.divisor == ranks.num_ranks:
        return init_device_mesh(device.type, (ranks.num_ranks,), mesh_dim_names=("shard",))
    copies = ranks.num_ranks // ranks.divisor
    return init_device_mesh(device.type, (copies, ranks.divisor), mesh_dim_names=("replicate", "shard"))


def checkpoints_itself(model: nn.Module) -> bool:
    """Whether the user has switched on the gradient checkpointing of a model of transformers."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def free_device_bytes(device: torch.device) -> int | None:
    """Return what this process may still take of a device; None: nobody counts, on the CPU."""
    if device.type == "cpu":
        return None
    free, _ = torch.accelerator.get_memory_info(device)
    return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
