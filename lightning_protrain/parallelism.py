"""What the user says of several ranks that train one model, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_protrain.peers import PeerAccess
from lightning_protrain.planner.network import WINDOW, Gathering
from lightning_protrain.planner.plan import Plan, Sharding
from lightning_protrain.replicas import DDPOptions, GradSync

ShardingChoice = Literal["auto", "resident", "replicate", "shard"]
GatherChoice = Literal["auto", "host", "device"]
ShardOptimizer = Literal["auto", "machine", "world"]
ShardWeights = Literal["auto", "machine", "world"]


@dataclass(frozen=True)
class Parallelism:
    """What the user says of several ranks.

    Attributes:
        sharding: Who holds offloaded chunks.
        reduce_dtype: In which gradients of offloaded chunks are summed; None: in that of their weights.
        adapter_grad_sync: Who averages the gradients of few resident parameters.
        gather: Where the ranks of a machine make chunks of parts that each of them uploads; `"host"`: nowhere.
        shard_optimizer: Among whom the optimizer's states and steps of offloaded chunks are divided that ranks share:
            the ranks of each machine, or all of them; `"auto"`: see `ways`.
        ddp: For DistributedDataParallel.
        shard_weights: Among whom offloaded chunks themselves are divided, with their gradients, states and steps;
            `"auto"`: see `ways`.
    """

    sharding: ShardingChoice = "auto"
    reduce_dtype: Literal["float32", "bfloat16"] | None = None
    adapter_grad_sync: GradSync = "auto"
    gather: GatherChoice = "host"
    shard_optimizer: ShardOptimizer = "auto"
    ddp: DDPOptions = field(default_factory=DDPOptions)
    shard_weights: ShardWeights = "auto"

    def __post_init__(self) -> None:
        """Refuses what is no choice."""
        choices = {
            "sharding": get_args(ShardingChoice),
            "reduce_dtype": (None, "float32", "bfloat16"),
            "adapter_grad_sync": get_args(GradSync),
            "gather": get_args(GatherChoice),
            "shard_optimizer": get_args(ShardOptimizer),
            "shard_weights": get_args(ShardWeights),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: give one of {', '.join(map(repr, allowed))}.")
        if self.shard_optimizer == "world" and self.sharding != "shard":
            raise ValueError(
                f'shard_optimizer="world" divides the steps of what ranks share, and under sharding="{self.sharding}" '
                'they may share nothing. Set sharding="shard", or leave `shard_optimizer` out.'
            )
        if self.shard_weights == "world" and self.sharding != "shard":
            raise ValueError(
                f'shard_weights="world" divides what the ranks of each machine share, and under sharding='
                f'"{self.sharding}" they may share nothing. Set sharding="shard", or leave `shard_weights` out.'
            )
        if self.shard_weights == "world" and self.gather != "host":
            raise ValueError(
                'shard_weights="world" brings chunks from the machines that have their rows, and '
                f'gather="{self.gather}" from the ranks of one machine that has all of them: both are not built '
                "together. Leave one of them out."
            )
        if self.adapter_grad_sync == "flat" and self.ddp.comm_hook is not None:
            raise ValueError(
                'adapter_grad_sync="flat" averages gradients of resident weights without DDP, and ddp_comm_hook is '
                'called by DDP. Leave one of them out, or set adapter_grad_sync="ddp".'
            )
        if self.gather == "device" and self.sharding in ("resident", "replicate"):
            raise ValueError(
                f'gather="device" makes chunks of parts that ranks share, and under sharding="{self.sharding}" they '
                'share none. Set sharding="shard" or "auto", or leave `gather` out.'
            )

    def settings(self, trainer: Trainer) -> dict[str, str]:
        """What decides in which collectives ranks meet, so that it is the same on all of them: by name, in plural."""
        found = {each.name: repr(getattr(self, each.name)) for each in fields(self) if each.name != "ddp"}
        found |= {name: repr(getattr(self.ddp, name)) for name in ("find_unused_parameters", "static_graph")}
        found["ddp_comm_hook"] = "none" if self.ddp.comm_hook is None else "one"
        of_trainer = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
        found |= {name: repr(getattr(trainer, name)) for name in of_trainer}
        return {f"values of {name}": value for name, value in found.items()}

    def ways(self, num_nodes: int) -> tuple[Parallelism, ...]:
        """What is left open of what machines divide, decided: in the order in which it is tried.

        What is whole on each machine costs the network least, so first nothing is divided that need not be. Where the
        hosts are too small for that, steps and optimizer states are, and then weights.

        Args:
            num_nodes: Machines that train together.
        """
        whole = {name: "machine" for name in ("shard_optimizer", "shard_weights") if getattr(self, name) == "auto"}
        found = [first := replace(self, **whole)]  # type: ignore[arg-type]
        if num_nodes > 1 and self.sharding in ("auto", "shard") and self.shard_weights != "world":
            if self.shard_optimizer == "auto":
                found.append(replace(first, sharding="shard", shard_optimizer="world"))
            if self.shard_weights == "auto" and self.gather == "host":
                found.append(replace(first, sharding="shard", shard_optimizer="machine", shard_weights="world"))
        return tuple(found)

    def gathering(
        self, here: int, machines: int, peers: PeerAccess | None, sends: str | None, kind: str
    ) -> Gathering | None:
        """How chunks come from other ranks in a run, but for rates; None: each rank uploads all of them.

        Args:
            here: Ranks of a machine.
            machines: That train together.
            peers: What joins the devices of a machine.
            sends: What collectives of device tensors are made by; None: there is one rank.
            kind: Of device.
        """
        if self.shard_weights == "world" and machines > 1:
            return Gathering.of_rows(machines)
        gathers = here > 1 and may_gather(self.gather, False, peers, sends)
        return Gathering(here, spare=WINDOW if kind == "cuda" else 0) if gathers else None

    def gathering_on_paper(
        self, here: int, machines: int, link: float | None, network: float, upload: float
    ) -> Gathering | None:
        """The same for machines that are not here, where nobody can look for NVLink.

        Args:
            here: Ranks of a machine.
            machines: That train together.
            link: Bytes per second that a device sends to another one; None: as many as to its host.
            network: Bytes per second that a machine sends to another one.
            upload: Bytes per second from the host, the most that any of the devices takes.
        """
        if self.shard_weights == "world" and machines > 1:
            within = math.inf if here == 1 else (link or upload) * here / (here - 1)
            return Gathering.of_rows(machines, min(network, within))
        wanted = self.gather == "device" or (self.gather == "auto" and link is not None and link > upload)
        return Gathering(here, link, WINDOW) if wanted and here > 1 else None

    def machines_on_paper(self, ranks: int, here: int) -> int:
        """Among how many machines steps are divided, where `here` of `ranks` are on each, see [Note: Machines]."""
        return ranks // here if "world" in (self.shard_optimizer, self.shard_weights) else 1


def gathers_parts(choice: GatherChoice, plan: Plan, manual: bool, peers: PeerAccess | None, sends: str | None) -> bool:
    """Whether each rank uploads parts of chunks, and has the others from other ranks, see [Note: Gathers].

    Where `"device"` finds nothing that ranks share, that is said: the same script may run on one rank or on many.

    Args:
        choice: Of the user.
        plan: That is about to be applied.
        manual: Whether optimization is.
        peers: What joins the devices of a machine.
        sends: What collectives of device tensors are made by; None: there is one rank.

    Raises:
        ValueError: `"device"` under manual optimization.
    """
    if choice == "device" and manual:
        raise ValueError(
            'gather="device" makes chunks of parts that ranks share: under manual optimization nobody knows where a '
            "step begins and ends. Leave `gather` out."
        )
    why = None
    if sends is None:
        why = "there is one rank"
    elif not plan.num_offloaded_chunks:
        why = "the plan offloads nothing"
    elif plan.sharding is not Sharding.SHARD:
        why = f'every rank holds what the plan offloads (sharding="{plan.sharding}")'
    if choice == "device" and why is not None:
        rank_zero_info(f'gather="device": {why}, so there are no parts to gather.')
    return why is None and may_gather(choice, manual, peers, sends)


def may_gather(choice: GatherChoice, manual: bool, peers: PeerAccess | None, sends: str | None) -> bool:
    """The same before there is a plan; arguments as of `gathers_parts`."""
    linked = peers is not None and peers.link == "nvlink"
    wanted = choice == "device" or (choice == "auto" and linked and sends == "nccl")
    return wanted and not manual and sends is not None
