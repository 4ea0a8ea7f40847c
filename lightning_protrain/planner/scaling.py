"""What a plan gives on many devices: an estimate from bytes and rates, see docs/scaling.md.

[Note: Traffic]
A ring of n devices sums B bytes to all of them when each has sent 2 (n - 1) / n B, and to owners of parts with half of
it (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009). Sums of a node go over the link between its devices; of
what crosses machines every node sends one copy. Sending overlaps with backward, about two thirds of the computation of
the micro-batch that ends the step; what is longer shows. Devices of a node share the memory of one host, and its rate.
Where they gather chunks from parts (see [Note: In parts] in network.py), weights are read there once for all of them,
and cross the link between them beside the sums.

Where M machines divide steps, of B bytes of gradients and of new weights each machine sends and receives (M - 1) / M B:
a sum to one owner is half of one to all. New weights go behind the step, each part of a chunk from one machine to the
others along a binomial tree, one part after the other by each of the L ranks of a machine: no faster than its network,
nor than ceil(log2 M) B / L one after the other. The forward that follows runs beside them, if steps are overlapped at
all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_protrain.planner.plan import ChunkPlan, Plan, Sharding

_SHARE_OF_BACKWARD = 2 / 3


@dataclass(frozen=True)
class Cluster:
    """Devices that train together.

    Attributes:
        gpus_per_node: Of each machine.
        num_nodes: Machines.
        link: Bytes per second that a device sends to another one of its machine.
        network: Bytes per second that a machine sends to another one.
        host_memory: Bytes per second that the memory of a machine moves.
        divides_steps: Whether machines divide the optimizer's steps of offloaded chunks.
        overlaps: Whether these steps run beside what the devices compute.
        divides_weights: Whether machines divide the weights, too: no new ones are sent after steps.
    """

    gpus_per_node: int
    num_nodes: int
    link: float
    network: float
    host_memory: float
    divides_steps: bool = False
    overlaps: bool = True
    divides_weights: bool = False

    @property
    def num_gpus(self) -> int:
        """Of all machines."""
        return self.gpus_per_node * self.num_nodes


@dataclass(frozen=True)
class Scaled:
    """A plan on a cluster.

    Attributes:
        cluster: Where.
        step_seconds: Of one optimizer step.
        sent_seconds: In which gradients are sent, most of it behind backward.
        host_seconds: In which the memory of a host is busy with what its devices stream.
        exchange_seconds: In which machines send each other new weights, some of it behind forward; 0 where each steps
            all of them.
        link_seconds: In which the link between its devices is busy with chunks that they gather, and with sums; 0 where
            they gather none.
        tokens_per_second: Of all devices; None where the tokens of a batch are not known.
        efficiency: Of the step of one device, its part of the step here.
        node_bytes: Host memory that each machine needs.
    """

    cluster: Cluster
    step_seconds: float
    sent_seconds: float
    exchange_seconds: float
    host_seconds: float
    link_seconds: float
    tokens_per_second: float | None
    efficiency: float
    node_bytes: int


def scale(plan: Plan, cluster: Cluster) -> Scaled:
    """Estimates a plan on a cluster.

    Args:
        plan: With a prediction for one device.
        cluster: Where it runs.

    Raises:
        ValueError: Nothing was predicted.
    """
    if plan.prediction is None:
        raise ValueError("The plan has no prediction to scale: make it for a `gpu`, with a batch.")
    prediction = plan.prediction
    sent = _sent_seconds(plan, cluster)
    compute = prediction.busy.get("compute", 0.0) / prediction.accumulate
    backward, forward = _SHARE_OF_BACKWARD * compute, (1 - _SHARE_OF_BACKWARD) * compute
    exchange = _exchange_seconds(plan, cluster)
    shown = max(sent - backward, 0.0) + max(exchange - (forward if cluster.overlaps else 0.0), 0.0)
    moved = _streamed_bytes(plan, prediction.accumulate) * cluster.gpus_per_node / cluster.host_memory
    linked = _linked_seconds(plan, cluster, prediction.accumulate)
    seconds = max(prediction.step_seconds + shown, moved, linked)
    tokens = prediction.tokens * prediction.accumulate * cluster.num_gpus
    copies = 1 if plan.sharding is Sharding.SHARD else cluster.gpus_per_node
    return Scaled(
        cluster=cluster,
        step_seconds=seconds,
        sent_seconds=sent,
        exchange_seconds=exchange,
        host_seconds=moved,
        link_seconds=linked,
        tokens_per_second=tokens / seconds if tokens else None,
        efficiency=prediction.step_seconds / seconds,
        node_bytes=prediction.host_bytes * copies,
    )


def _sent_seconds(plan: Plan, cluster: Cluster) -> float:
    resident, offloaded = _summed_bytes(plan)
    if plan.sharding is Sharding.SHARD:
        here, nodes = cluster.gpus_per_node, cluster.num_nodes
        within = (here - 1) / here * offloaded / cluster.link
        sums = 1 if cluster.divides_steps else 2
        return _all_reduce(resident, cluster) + within + sums * (nodes - 1) / nodes * offloaded / cluster.network
    return _all_reduce(resident + offloaded, cluster)


def exchanged_bytes(plan: Plan, num_nodes: int) -> float:
    """New weights that each machine gets from the others in a step, and as many that it sends, where they divide steps.

    Args:
        plan: Of each machine.
        num_nodes: Machines.
    """
    # Weights have the bytes of their gradients: what is streamed in two bytes is stepped, and sent, in four.
    _, offloaded = _summed_bytes(plan)
    return (num_nodes - 1) / num_nodes * offloaded


def _exchange_seconds(plan: Plan, cluster: Cluster) -> float:
    if not cluster.divides_steps or cluster.divides_weights or plan.sharding is not Sharding.SHARD:
        return 0.0
    _, offloaded = _summed_bytes(plan)
    one_by_one = math.ceil(math.log2(cluster.num_nodes)) * offloaded / cluster.gpus_per_node
    return max(exchanged_bytes(plan, cluster.num_nodes), one_by_one) / cluster.network


def _linked_seconds(plan: Plan, cluster: Cluster, accumulate: int) -> float:
    if plan.gathered_by == 1:
        return 0.0
    resident, offloaded = _summed_bytes(plan)
    here, everywhere = cluster.gpus_per_node, cluster.num_gpus
    gathered = accumulate * 2 * sum(chunk.nbytes for chunk in plan.chunks if not chunk.resident)
    between = (here - 1) / here * (gathered + offloaded) + 2 * (everywhere - 1) / everywhere * resident
    return between / cluster.link


def _all_reduce(nbytes: float, cluster: Cluster) -> float:
    rate = cluster.link if cluster.num_nodes == 1 else min(cluster.link, cluster.network)
    return 2 * (cluster.num_gpus - 1) / cluster.num_gpus * nbytes / rate


def _gradient_bytes(chunks: Sequence[ChunkPlan]) -> int:
    """Gradients are summed in the dtype of the weights; what is streamed in two bytes has four."""
    return sum(chunk.nbytes * (1 if chunk.streamed_dtype is None else 2) for chunk in chunks)


def _summed_bytes(plan: Plan) -> tuple[int, int]:
    """Gradients of resident chunks, and of offloaded ones."""
    trained = [chunk for chunk in plan.chunks if chunk.trainable]
    resident, offloaded = ([chunk for chunk in trained if chunk.resident is kind] for kind in (True, False))
    return _gradient_bytes(resident), _gradient_bytes(offloaded)


def _streamed_bytes(plan: Plan, accumulate: int) -> float:
    """Of one rank: twice a micro-batch its part of every offloaded weight, up; once the gradient, down."""
    offloaded = [chunk for chunk in plan.chunks if not chunk.resident]
    up = 2 * sum(chunk.nbytes for chunk in offloaded) / plan.gathered_by
    return accumulate * (up + _gradient_bytes([chunk for chunk in offloaded if chunk.trainable]))
