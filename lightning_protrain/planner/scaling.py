"""Predicts speed and traffic of a plan on many devices, from bytes and rates; see docs/how/scaling.md.

In a ring of n devices, each device sends 2 (n - 1) / n B to all-reduce B bytes. It sends half of that to reduce them to
the owners of parts (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009). Sums within a node use the link between
its devices. Between nodes, each of the L owners of a node sends its part of one copy, and they share the node's
network. Each collective also takes the latency of a small one. These figures replace the rates that a run measures. The
rest is as in a run: the search and the time model, see [Note: Sends] in step_time.py. Devices of a node share one
host's memory and its rate.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from lightning_protrain.planner.network import Network, Route
from lightning_protrain.planner.plan import Plan, Sharding

# Assumed seconds of a collective of a few bytes, within a node and between nodes. nccl-tests shows 19 us between A100s
# of two nodes with InfiniBand, one call after the other; more nodes take longer
# (github.com/NVIDIA/nccl-tests/issues/150).
LATENCY_WITHIN, LATENCY_BETWEEN = 20e-6, 40e-6
# A collective with a single rank takes no time.
NO_TIME = Route(0.0, sys.float_info.max)


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices that train together.

    Attributes:
        gpus_per_node: Devices of each node.
        num_nodes: Number of nodes.
        link: Bytes per second that a device sends to another device of its node.
        network: Bytes per second that a node sends to another node.
        host_memory: Bytes per second of a node's memory.
    """

    gpus_per_node: int
    num_nodes: int
    link: float
    network: float
    host_memory: float

    @property
    def num_gpus(self) -> int:
        """Number of devices on all nodes."""
        return self.gpus_per_node * self.num_nodes

    def network_under(self, sharding: Sharding, element: int | None = None) -> Network:
        """Return the network that a run on this cluster would measure.

        Args:
            sharding: Division of the offloaded chunks among ranks.
            element: Bytes of a gradient element in the collective; None means the element size of the parameter.
        """
        here, nodes = self.gpus_per_node, self.num_nodes
        rate, latency = (self.link, LATENCY_WITHIN) if nodes == 1 else (min(self.link, self.network), LATENCY_BETWEEN)
        everyone = _route(latency, 2 * (self.num_gpus - 1) / self.num_gpus / rate)
        if sharding is not Sharding.SHARD:
            return Network(everyone, element=element)
        owner, peers = _route(LATENCY_WITHIN, (here - 1) / here / self.link), None
        if nodes > 1:
            # The rate for one rank: all ranks of its node send equally much at the same time.
            peers = _route(LATENCY_BETWEEN, 2 * ((nodes - 1) / nodes) * (here / self.network))
        return Network(everyone, owner, peers, here, element)


def _route(latency: float, seconds_per_byte: float) -> Route:
    return Route(latency, 1 / seconds_per_byte) if seconds_per_byte else NO_TIME


@dataclass(frozen=True)
class Scaled:
    """The predicted speed and memory of a plan on a cluster.

    Attributes:
        cluster: The cluster.
        step_seconds: Seconds of one optimizer step.
        sent_seconds: Seconds of collectives that sum gradients, mostly during backward.
        tokens_per_second: Tokens per second of all devices; None if the tokens of a batch are unknown.
        efficiency: Step time of the plan on one device alone over `step_seconds`; at most 1.
        node_bytes: Host memory that each node needs.
    """

    cluster: Cluster
    step_seconds: float
    sent_seconds: float
    tokens_per_second: float | None
    efficiency: float
    node_bytes: int


def scale(plan: Plan, cluster: Cluster) -> Scaled:
    """Predict the speed and memory of a plan on a cluster.

    Args:
        plan: Plan for one device of the cluster, predicted with the traffic between devices.
        cluster: The cluster that runs it.

    Raises:
        ValueError: The plan has no prediction, or one for a single device.
    """
    prediction = plan.prediction
    if prediction is None:
        raise ValueError("The plan has no prediction to scale: make it for a `gpu`, with a batch.")
    if prediction.alone_seconds is None:
        raise ValueError("The plan was timed for one GPU alone: make it for `num_gpus`.")
    moved = _streamed_bytes(plan, prediction.accumulate) * cluster.gpus_per_node / cluster.host_memory
    seconds = max(prediction.step_seconds, moved)
    tokens = prediction.tokens * prediction.accumulate * cluster.num_gpus
    copies = 1 if plan.sharding is Sharding.SHARD else cluster.gpus_per_node
    return Scaled(
        cluster=cluster,
        step_seconds=seconds,
        sent_seconds=prediction.busy.get("network", 0.0),
        tokens_per_second=tokens / seconds if tokens else None,
        # Ranks that share gradients save downloads, so the quotient can exceed 1. But a rank alone would have another
        # plan.
        efficiency=min(prediction.alone_seconds / seconds, 1.0),
        node_bytes=prediction.host_bytes * copies,
    )


def _streamed_bytes(plan: Plan, accumulate: int) -> float:
    """Return the bytes that one rank streams in a step: offloaded weights twice and gradients once a micro-batch."""
    offloaded = [chunk for chunk in plan.chunks if not chunk.resident]
    up = 2 * sum(chunk.nbytes for chunk in offloaded)
    # Summed gradients are in float32 if the weights are streamed in two bytes.
    down = sum(chunk.nbytes * (1 if chunk.streamed_dtype is None else 2) for chunk in offloaded if chunk.trainable)
    return accumulate * (up + down)
