"""Hardware to plan for that need not be present: GPUs of the data sheets, their hosts, and links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_protrain.cgroup_limits import free_host_bytes
from lightning_protrain.config import format_bytes, parse_bytes
from lightning_protrain.device.host import usable_cores
from lightning_protrain.planner.advice import without_gains
from lightning_protrain.planner.explain import short_bytes
from lightning_protrain.planner.memory import HostTooSmall
from lightning_protrain.planner.plan import Plan, RankLayout, Sharding
from lightning_protrain.planner.scaling import Cluster, scale
from lightning_protrain.planner.sharding_choice import choose
from lightning_protrain.profiler.gpu_specs import gpu as gpu_called
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.strategy.joint_plan import DryRun, Targets

NETWORK = "25GB"  # per second, between nodes


@dataclass(frozen=True)
class DryRunHardware:
    """Hardware to plan for.

    Attributes:
        gpu: Names of GPUs to plan for, one plan each; empty: the device of this node.
        num_gpus: Number of GPUs on all nodes.
        num_nodes: Number of nodes; all have the same number of GPUs.
        host_memory: Memory of a node's host, such as "64GiB"; "auto": the free memory of this host.
        host_cores: Number of cores of a node's host; None: as many as this host has.
        gpu_link: Bytes per second that a GPU sends to another GPU of its node, such as "250GB"; None: the rate of its
            link to the host.
        network: Bytes per second that a node sends to another node.

    Raises:
        ValueError: A value is out of range.
    """

    gpu: Sequence[str] = ()
    num_gpus: int = 1
    num_nodes: int = 1
    host_memory: str | int = "auto"
    host_cores: int | None = None
    gpu_link: str | None = None
    network: str = NETWORK

    def __post_init__(self) -> None:
        """Check the values that need no model."""
        for name in ("num_gpus", "host_cores", "num_nodes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r}: give a positive number.")
        if self.num_gpus % self.num_nodes:
            raise ValueError(
                f"num_gpus={self.num_gpus} counts the GPUs of all nodes, and num_nodes={self.num_nodes} does not "
                f"divide it. Give a multiple of {self.num_nodes}."
            )

    def refuse_unused(self, counts_gpus: bool) -> None:
        """Refuse settings that no plan depends on.

        Args:
            counts_gpus: True if `num_gpus` has a meaning only together with `gpu`.

        Raises:
            ValueError: A setting is given without a GPU, or for a link that does not exist.
        """
        counted = self if counts_gpus else replace(self, num_gpus=1, num_nodes=1)
        if not self.gpu and counted != DryRunHardware():
            named = "host_memory, host_cores, num_gpus, num_nodes, gpu_link and network"
            raise ValueError(
                f"{named} describe the hardware around a `gpu`, but none is given. Give one, or leave them out."
            )
        if self.gpu_link is not None and self.ranks.ranks_per_node == 1:
            raise ValueError(
                "gpu_link connects the GPUs of a node, but each node has one. Give more num_gpus, or no gpu_link."
            )
        if self.network != NETWORK and self.num_nodes == 1:
            raise ValueError("`network` connects nodes, but there is one. Give more num_nodes, or no `network`.")

    @property
    def ranks(self) -> RankLayout:
        """The ranks that train together."""
        return RankLayout(self.num_nodes, self.num_gpus // self.num_nodes)

    @cached_property
    def nodes(self) -> Mapping[str, HardwareProfile]:
        """Hardware of a node with one of its GPUs, by the GPU's name; empty: this node.

        Raises:
            ValueError: No data sheet lists the GPU.
        """
        if not self.gpu:
            return {}
        nbytes = free_host_bytes() if self.host_memory == "auto" else parse_bytes(self.host_memory)
        profiles = [gpu_called(name, nbytes, self.host_cores or usable_cores()) for name in self.gpu]
        return {profile.name: profile for profile in profiles}

    def alone(self, gpu: str) -> DryRunHardware:
        """Return the hardware with only this kind of GPU."""
        return replace(self, gpu=(gpu,))

    def dry_run(self, shardings: Sequence[Sharding], draws: bool = False) -> DryRun:
        """Return the dry run to hand to a strategy.

        Args:
            shardings: Allowed shardings.
            draws: True if charts of the plans are wanted.
        """
        here = self.ranks.ranks_per_node
        targets: Targets = {"": {shardings[0]: None}}
        if self.nodes:
            targets = {
                name: {sharding: _for_rank(node, sharding, here) for sharding in shardings}
                for name, node in self.nodes.items()
            }
        return DryRun(targets, self.ranks, self._clusters(), draws=draws)

    def answers(self, found: DryRun) -> dict[str, Plan | ValueError]:
        """Return the plan with the shortest step for each GPU model, or the error that says why no plan fits."""
        best = {name: _best(under, found.clusters.get(name)) for name, under in found.answers.items()}
        best = {name: _among_all(answer, found.clusters.get(name)) for name, answer in best.items()}
        return {name: _on_host(answer, self.nodes.get(name)) for name, answer in best.items()}

    def describe_host(self, of_strategy: int | None) -> str:
        """Return a sentence that says which host the plans are for, and where its figures come from.

        Args:
            of_strategy: The strategy's `host_memory`, bytes; None: not set.
        """
        here = f"{usable_cores()} cores (those of this machine)"
        cores = f"{self.host_cores} cores (host_cores)" if self.host_cores else here
        if of_strategy is not None:
            return f"Host: {cores}, {short_bytes(of_strategy)} of memory (host_memory of the strategy)."
        if self.host_memory != "auto":
            return f"Host: {cores}, {short_bytes(parse_bytes(self.host_memory))} of memory (host_memory)."
        return f"Host: {cores}, {short_bytes(free_host_bytes())} of memory (free on this machine now)."

    def _clusters(self) -> dict[str, Cluster]:
        if self.ranks.num_ranks == 1:
            return {}
        link = parse_bytes(self.gpu_link) if self.gpu_link is not None else None
        network, here = parse_bytes(self.network), self.ranks.ranks_per_node
        return {
            name: Cluster(here, self.num_nodes, link or node.download, network, node.host_memory)
            for name, node in self.nodes.items()
        }


def _for_rank(node: HardwareProfile, sharding: Sharding, here: int) -> HardwareProfile:
    """Return a node as one of `here` ranks sees it: ranks that share a copy step together, others divide its cores."""
    if sharding is Sharding.SHARD:
        return node
    return replace(node, host_step=node.host_step / here, host_memory=node.host_memory / here)


def _best(found: Mapping[Sharding, Plan | ValueError], cluster: Cluster | None) -> Plan | ValueError:
    """Return the plan with the shortest step on all GPUs, or the error that says why no plan fits."""

    def seconds(plan: Plan) -> float | None:
        return scale(plan, cluster).step_seconds if cluster is not None and plan.prediction is not None else None

    try:
        return choose(found, seconds, " on all GPUs").plan
    except ValueError as error:
        return error


def _among_all(answer: Plan | ValueError, cluster: Cluster | None) -> Plan | ValueError:
    """Return a plan whose step time is that on all GPUs, which share the memory of their host."""
    if isinstance(answer, ValueError) or cluster is None or answer.prediction is None:
        return answer
    seconds = scale(answer, cluster).step_seconds
    if seconds <= answer.prediction.step_seconds:
        return answer
    advice = without_gains(answer.prediction.advice)
    now = replace(answer.prediction, step_seconds=seconds, bound="host memory", advice=advice)
    return replace(answer, prediction=now)


def _on_host(answer: Plan | ValueError, node: HardwareProfile | None) -> Plan | ValueError:
    """Return a plan, or the error that the host is too small to load a resident plan's weights."""
    if isinstance(answer, ValueError) or node is None or answer.prediction is None or answer.num_offloaded_chunks:
        return answer
    needed = answer.prediction.host_bytes
    if needed <= node.host_bytes:
        return answer
    return HostTooSmall(
        f"No plan fits: the host needs {format_bytes(needed)} to load the weights, and has "
        f"{format_bytes(node.host_bytes)}. Raise host_memory to {format_bytes(needed)}."
    )
