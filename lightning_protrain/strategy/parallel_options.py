"""What the user says of several ranks that train one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from lightning.pytorch import Trainer

from lightning_protrain.distributed.ddp import DDPOptions, GradSync
from lightning_protrain.planner.plan import REMOVED

ShardingChoice = Literal["auto", "resident", "replicate", "shard"]


def refuse_removed(given: Mapping[str, object]) -> None:
    """Refuse keywords of a strategy that it does not have, or has no more.

    Raises:
        ValueError: Names one that has been taken out, and what to use in its place.
        TypeError: Names one that there has never been.
    """
    for name, value in given.items():
        if name in REMOVED:
            raise ValueError(f"{name}={value!r} {REMOVED[name]}")
        raise TypeError(f"ProTrainStrategy has no keyword {name!r}.")


@dataclass(frozen=True)
class Parallelism:
    """What the user says of several ranks.

    Attributes:
        sharding: Who holds offloaded chunks.
        reduce_dtype: In which gradients of offloaded chunks are summed; None: in that of their weights.
        adapter_grad_sync: Who averages the gradients of few resident parameters.
        ddp: For DistributedDataParallel.
    """

    sharding: ShardingChoice = "auto"
    reduce_dtype: Literal["float32", "bfloat16"] | None = None
    adapter_grad_sync: GradSync = "auto"
    ddp: DDPOptions = field(default_factory=DDPOptions)

    def __post_init__(self) -> None:
        """Refuses what is no choice."""
        choices = {
            "sharding": get_args(ShardingChoice),
            "reduce_dtype": (None, "float32", "bfloat16"),
            "adapter_grad_sync": get_args(GradSync),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: give one of {', '.join(map(repr, allowed))}.")
        if self.adapter_grad_sync == "flat" and self.ddp.comm_hook is not None:
            raise ValueError(
                'adapter_grad_sync="flat" averages gradients of resident weights without DDP, and ddp_comm_hook is '
                'called by DDP. Leave one of them out, or set adapter_grad_sync="ddp".'
            )

    def settings(self, trainer: Trainer) -> dict[str, str]:
        """What decides in which collectives ranks meet, so that it is the same on all of them: by name, in plural."""
        found = {each.name: repr(getattr(self, each.name)) for each in fields(self) if each.name != "ddp"}
        found |= {name: repr(getattr(self.ddp, name)) for name in ("find_unused_parameters", "static_graph")}
        found["ddp_comm_hook"] = "none" if self.ddp.comm_hook is None else "one"
        of_trainer = ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
        found |= {name: repr(getattr(trainer, name)) for name in of_trainer}
        return {f"values of {name}": value for name, value in found.items()}
