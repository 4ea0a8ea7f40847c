"""What it takes to sum gradients over ranks, and to gather chunks: the planner's record of the network.

[Note: In parts]
Where each of L ranks uploads a part of every chunk, its link to the host carries B / L bytes of one that has B, and its
link to the other devices brings (L - 1) / L B. Windows of a chunk are gathered while the next ones are uploaded, and
chunks follow each other, so a chunk takes as long as the slower of both; where nothing runs beside anything, as long as
both together. That is a rate of uploads: one of the machine's figures, in which what is predicted is monotone.

Of the faster of both one window is behind the other or before it. Where chunks follow each other it runs beside them;
where they wait for their buffers, it is added to what is held back. With b bytes held back that is a slope of their
seconds up to a window, so these stay monotone, and more of b takes no longer than at `slowest`, see [Note: Held back].
Left out is that sums of gradients may take the same link.

Where M machines have rows of each weight, that is the same with M for L, the network for the link, and chunks that are
not divided into windows.

Imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from lightning_protrain.profiler.machine import HardwareProfile

# One, or an array of them.
Number = Any
# Bytes that DDP puts into one sum, unless it is told otherwise.
DDP_BUCKET = 25 << 20
# Bytes of a chunk that are gathered at once, at most.
WINDOW = 64 << 20
# More than any chunk has.
_WHOLE = 1 << 60


@dataclass(frozen=True)
class Route:
    """How fast one kind of collective is.

    Attributes:
        latency: Seconds of one of a few bytes.
        rate: Bytes of its tensor per second beside that.

    Raises:
        ValueError: A figure is no finite number; the rate is not above zero, or the latency is below.
    """

    latency: float
    rate: float

    def __post_init__(self) -> None:
        """A zero or NaN would rule out every plan, or let any pass."""
        for name, value, least in (("latency", self.latency, 0.0), ("rate", self.rate, math.ulp(0.0))):
            if not math.isfinite(value) or value < least:
                raise ValueError(f"The {name} of a collective is {value!r}: measure it again.")

    def seconds(self, calls: Number, nbytes: Number) -> Number:
        """Of so many collectives that sum so many bytes together."""
        return calls * self.latency + nbytes / self.rate


@dataclass(frozen=True)
class Network:
    """How gradients of offloaded chunks are summed, see [Note: Nodes] in runtime/comm.py.

    Attributes:
        everyone: A sum over all ranks, to all of them: gradients of resident chunks, and without owners those of
            offloaded ones.
        owner: A sum over the ranks of a node, to one of them; None: chunks have no owners.
        peers: A sum over the owners of a parameter on all nodes, to all of them, or where nodes divide steps to one;
            None: there is one node, or there are no owners.
        owners: Ranks of a node among which parameters are dealt out; 1: none are.
        element: Bytes in which an element is sent; None: as many as its parameter has.
        exchange: New weights of one node to the peers of a rank, from host memory; None: each node steps all of them.
    """

    everyone: Route
    owner: Route | None = None
    peers: Route | None = None
    owners: int = 1
    element: int | None = None
    exchange: Route | None = None

    def without_owners(self) -> Network:
        """The same where every rank needs all sums."""
        return Network(self.everyone, element=self.element)

    def describe(self) -> str:
        """The rates in words."""
        routes = {"to all": self.everyone, "to an owner": self.owner, "among owners": self.peers}
        routes["new weights to other machines"] = self.exchange
        each = [(name, route) for name, route in routes.items() if route is not None]
        return ", ".join(f"{name} {r.rate / 1e9:.3g} GB/s behind {1e6 * r.latency:.3g} us" for name, r in each)

    def calls(self, num_parameters: int) -> int:
        """How many collectives sum a chunk with so many trained parameters within a node, or over all ranks."""
        return 1 if self.owner is None else min(self.owners, num_parameters)

    def sum_of_chunks(self, chunks: Number, calls: Number, numel: Number, nbytes: Number) -> Number:
        """Seconds from when the sums of chunks begin until they have ended, if nothing else is sent.

        Args:
            chunks: How many.
            calls: Collectives of all of them, as of `calls`.
            numel: Elements of what is trained in them.
            nbytes: Their bytes.
        """
        sent = nbytes if self.element is None else self.element * numel
        if self.owner is None:
            return self.everyone.seconds(chunks, sent)
        seconds = self.owner.seconds(calls, sent)
        # Nodes sum what each rank owns at the same time.
        return seconds + (self.peers.seconds(chunks, sent / self.owners) if self.peers is not None else 0.0)

    def exchange_of(self, num_parameters: int, nbytes: int) -> float:
        """Seconds in which new weights go from the nodes that have stepped them to the others; 0 where each steps all.

        A rank sends and receives one after the other what it owns, and ranks of a node do so at the same time.

        Args:
            num_parameters: Trained ones of offloaded chunks.
            nbytes: Of all of them.
        """
        if self.exchange is None:
            return 0.0
        return self.exchange.seconds(num_parameters / self.owners, nbytes / self.owners)

    def sum_of_resident(self, nbytes: Number) -> Number:
        """Seconds of the sums of so many bytes, in buckets as DDP makes them."""
        return self.everyone.seconds(nbytes / DDP_BUCKET, nbytes)


@dataclass(frozen=True)
class Gathering:
    """Chunks that ranks of a machine upload in parts, which they gather on their devices, see [Note: In parts].

    Attributes:
        ranks: Of a machine, each of which uploads a part.
        link: Bytes per second that come to a device from the others; None: not known, as many as it sends to its host.
        spare: Bytes of the device for gathers that a rank makes for the sake of others.
        window: The most bytes of a chunk that are gathered at once.
        rows: Whether `ranks` are those of one place on each machine, which has rows of every weight.

    Raises:
        ValueError: There are no other ranks, or the rate is no finite number above zero.
    """

    ranks: int
    link: float | None = None
    spare: int = 0
    window: int = WINDOW
    rows: bool = False

    @classmethod
    def of_rows(cls, machines: int, link: float | None = None) -> Gathering:
        """That of machines that divide weights; `link` is what comes to each device from the other machines."""
        return cls(machines, link, window=_WHOLE, rows=True)

    def __post_init__(self) -> None:
        """Of a rank alone nothing would come from others."""
        if self.ranks < 2:
            raise ValueError(f"Chunks cannot be gathered from the parts of fewer than two ranks: {self.ranks}.")
        if self.link is not None and (not math.isfinite(self.link) or self.link <= 0):
            raise ValueError(f"The rate of gathers is {self.link!r}: measure it again.")

    @property
    def others(self) -> float:
        """Which part of a chunk comes from the other ranks."""
        return (self.ranks - 1) / self.ranks


def last_window(hardware: HardwareProfile, gathering: Gathering | None) -> float:
    """Seconds of the faster of uploads and gathers for each byte of a window; 0 where chunks are uploaded whole."""
    if gathering is None or not hardware.asynchronous:
        return 0.0
    link = gathering.link or hardware.download
    return min(1 / (gathering.ranks * hardware.upload), gathering.others / link)


def incoming(hardware: HardwareProfile, gathering: Gathering | None) -> HardwareProfile:
    """The machine as chunks come to its device; activations that come back are uploaded as ever.

    Args:
        hardware: The machine.
        gathering: How chunks are gathered; None: each rank uploads all of them.
    """
    if gathering is None:
        return hardware
    gathered = (gathering.link or hardware.download) / gathering.others

    def rate(upload: float) -> float:
        uploaded = gathering.ranks * upload
        return min(uploaded, gathered) if hardware.asynchronous else 1 / (1 / uploaded + 1 / gathered)

    return replace(hardware, upload=rate(hardware.upload), upload_beside=rate(hardware.upload_beside))
