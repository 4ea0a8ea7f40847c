"""The speed of the network over which ranks sum gradients, for the planner. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Default bucket size of DDP.
DDP_BUCKET = 25 << 20


@dataclass(frozen=True)
class Route:
    """The speed of one kind of collective.

    Attributes:
        latency: Time of a collective of very few bytes, seconds.
        rate: Additional bytes of the tensor per second.

    Raises:
        ValueError: A figure is not finite, the rate is not positive, or the latency is negative.
    """

    latency: float
    rate: float

    def __post_init__(self) -> None:
        """Check the figures: a zero or NaN would exclude every plan, or accept any."""
        for name, value, least in (("latency", self.latency, 0.0), ("rate", self.rate, math.ulp(0.0))):
            if not math.isfinite(value) or value < least:
                raise ValueError(
                    f"The measured {name} of a collective is {value!r}, which no network has. Measure it again."
                )

    def seconds(self, calls: float, nbytes: float) -> float:
        """Return the time of `calls` collectives that move `nbytes` in total, seconds."""
        return calls * self.latency + nbytes / self.rate


@dataclass(frozen=True)
class Network:
    """The collectives that sum gradients of offloaded chunks, see [Note: Nodes] in runtime/comm/collectives.py.

    Attributes:
        everyone: Speed of an all-reduce over all ranks, for gradients of resident chunks and, without owners, of
            offloaded chunks.
        owner: Speed of a reduce over the ranks of a node to one of them; None means that chunks have no owners.
        peers: Speed of an all-reduce over the owners of a parameter, one on each node; None: one node, or no owners.
        owners: Number of ranks of a node that own a part of the parameters; 1 means no owners.
        element: Bytes of a gradient element in the collective; None means the element size of the parameter.
    """

    everyone: Route
    owner: Route | None = None
    peers: Route | None = None
    owners: int = 1
    element: int | None = None

    def without_owners(self) -> Network:
        """Return the network with every rank receiving all sums."""
        return Network(self.everyone, element=self.element)

    def describe(self) -> str:
        """Return the rates as text."""
        routes = {"all-reduce": self.everyone, "reduce": self.owner, "all-reduce between nodes": self.peers}
        measured = [(name, route) for name, route in routes.items() if route is not None]
        return ", ".join(f"{name} {r.rate / 1e9:.3g} GB/s (latency {1e6 * r.latency:.3g} us)" for name, r in measured)

    def calls(self, num_parameters: int) -> int:
        """Return the number of collectives for a chunk with `num_parameters` gradients, in a node or over all ranks."""
        return 1 if self.owner is None else min(self.owners, num_parameters)

    def sum_of_chunks(self, chunks: float, calls: float, numel: float, nbytes: float) -> float:
        """Return the time to sum the gradients of chunks on an idle network, seconds.

        Args:
            chunks: Number of chunks.
            calls: Number of collectives for all these chunks, from the method `calls`.
            numel: Trained elements of the chunks.
            nbytes: Bytes of the gradients.
        """
        sent = nbytes if self.element is None else self.element * numel
        if self.owner is None:
            return self.everyone.seconds(chunks, sent)
        seconds = self.owner.seconds(calls, sent)
        # All ranks of a node send the parts that they own at the same time.
        return seconds + (self.peers.seconds(chunks, sent / self.owners) if self.peers is not None else 0.0)

    def sum_of_resident(self, nbytes: float) -> float:
        """Return the time to all-reduce `nbytes` in DDP's buckets, seconds."""
        return self.everyone.seconds(nbytes / DDP_BUCKET, nbytes)
