"""Collectives of simulated devices: what `torch.distributed` does with NCCL, and for host tensors with gloo.

[Note: Collectives]
A collective of device tensors runs on a stream that its group has on each rank (the *communicator*), in the order of
issue. That stream first waits for what the compute stream has been given; `wait` makes the compute stream wait for it,
and the host goes on. Without `async_op` it runs on the compute stream itself. It holds its tensor until it has been
waited for. So it is in `ProcessGroupNCCL::collective` of PyTorch 2.12. To the checker it writes its tensor from its
first moment to its last. Until it runs, that is poisoned; what somebody else writes there meanwhile is sent.

It begins when the last rank is ready for it on its own virtual clock, and ends on all ranks at the same time. So that
this is known at once, ranks meet where they issue it; it runs where the first of them needs it.

PyTorch forbids to use a group while collectives of another one may still run on the device. So a collective is refused
that does not wait, on the device, for the latest one of every other group.

Sums are taken in the order of ranks. A rank that is not the root of a `reduce` finds poison in its tensor afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.simulated.device import SimulatedDevice, poison
from tests.support.simulated.network import SimulatedNetwork
from tests.support.simulated.streams import RaceError, SimulatedEvent, SimulatedStream


@dataclass(eq=False)
class _Part:
    """The part of one rank in a collective.

    Attributes:
        kind: Kind of the collective, equal on all ranks.
        tensor: Tensor of this rank.
        sent: Values of the tensor when the collective was issued.
        ready: Earliest time at which this rank can begin, in virtual seconds.
        begin: Event before the collective in its stream; None: nothing is before it.
        taken: Values that other ranks have received; None: none have yet.
    """

    kind: str
    tensor: Tensor
    sent: Tensor
    ready: float
    begin: SimulatedEvent | None = None
    taken: Tensor | None = None

    def take(self) -> Tensor:
        """Return the contribution of this rank, as it is when the first rank needs the result."""
        if self.taken is None:
            if self.begin is not None:
                self.begin.stream.run_until(self.begin)
            floats = self.tensor.is_floating_point()
            self.taken = torch.where(self.tensor.isnan(), self.sent, self.tensor) if floats else self.sent
        return self.taken


@dataclass(eq=False)
class _Sum:
    """A queued collective: its end on one rank."""

    device: SimulatedDevice
    parts: list[_Part]
    target: Tensor | None
    largest: bool = False

    def __call__(self) -> None:
        with self.device.unattributed(), torch.no_grad():
            # All are read before any is written to.
            first, *others = [part.take() for part in self.parts]
            if self.target is not None:
                total = first.clone()
                for other in others:
                    total = torch.maximum(total, other) if self.largest else total.add_(other)
                self.target.copy_(total)


@dataclass(eq=False)
class SimulatedWork:
    """A collective of device tensors that has been issued, see [Note: Collectives]."""

    device: SimulatedDevice
    ended: SimulatedEvent

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return self.ended.query()

    def wait(self) -> bool:
        """Makes the compute stream wait for it."""
        self.device.compute_stream().wait_event(self.ended)
        return True


@dataclass(eq=False)
class _HostWork:
    """A collective on host tensors, which ends when the last rank arrives."""

    device: SimulatedDevice
    ended: float
    end: _Sum

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        self.end()
        self.device.host_stream.time = max(self.device.host_stream.time, self.ended)
        return True


class SimulatedGroup(dist.ProcessGroup):
    """A group of ranks as one of them sees it, for `all_reduce` and `reduce` of PyTorch.

    Args:
        name: Name of the group and of its stream on the device, unique among the groups of these ranks.
        network: Network over which the ranks meet.
        device: Device of this rank.
        rank: This rank.
        members: All ranks of the group.
    """

    def __init__(
        self, name: str, network: SimulatedNetwork, device: SimulatedDevice, rank: int, members: Sequence[int]
    ) -> None:
        super().__init__(list(members).index(rank), len(members))  # type: ignore[call-arg]
        self._name = f"{name} {min(members)}"
        self._network = network
        self._device = device
        self._rank = rank
        self._members = tuple(members)
        self._stream = device.add_stream(name)
        self._latest: SimulatedEvent | None = None
        self._num_issued = 0

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]
        """Sums a tensor over all ranks, or takes the largest of each element."""
        return self._issue(tensors[0], "all_reduce", None, options)

    def reduce(self, tensors: list[Tensor], options: Any) -> Any:  # type: ignore[override]
        """Sums a tensor over all ranks to one of them."""
        return self._issue(tensors[0], "reduce", options.rootRank, options)

    def _issue(self, tensor: Tensor, what: str, root: int | None, options: Any) -> SimulatedWork | _HostWork:
        largest = options.reduceOp == dist.ReduceOp.MAX
        assert largest or options.reduceOp == dist.ReduceOp.SUM, f"no simulation of {options.reduceOp}"
        receives = root is None or self._members[root] == self._rank
        kind = f"{what} of {tuple(tensor.shape)}, {tensor.dtype}, root {root}, largest {largest}"
        if self._device.place(tensor) != "device":
            return self._on_host(tensor, kind, receives, largest)

        def meet(ready: float, begin: SimulatedEvent) -> list[_Part]:
            return self._meet(_Part(kind, tensor, tensor.clone(), ready, begin), lambda: poison(tensor))

        target = tensor if receives else None
        stream = self._begin(what, tensor, options)
        return self._run(stream, tensor, meet, lambda parts: _Sum(self._device, parts, target, largest))

    def _begin(self, what: str, written: Tensor, options: Any) -> SimulatedStream:
        """The stream that runs a collective, which has noted what that touches."""
        stream = self._stream if options.asyncOp else self._device.compute_stream()
        if options.asyncOp:
            stream.wait_stream(self._device.compute_stream())
        if self._latest is not None:
            stream.wait_event(self._latest)
        for name, event in self._device.collectives.items():
            if name != self._name and stream.clock.get(event.stream.name, 0) < event.clock[event.stream.name]:
                raise RaceError(f"{self._name} begins {what} while a collective of {name} may still run")
        with self._device.unattributed():
            self._device.access(stream, stream.step(), written, True, what)
        return stream

    def _run(
        self,
        stream: SimulatedStream,
        tensor: Tensor,
        meet: Callable[[float, SimulatedEvent], list[_Part]],
        end: Callable[[list[_Part]], Callable[[], None]],
    ) -> SimulatedWork:
        with self._device.unattributed():
            parts = meet(max(stream.time, self._device.host_stream.time), stream.record_event())
            seconds = self._device.rates.latency + tensor.nbytes / self._device.rates.network
            stream.time = max(part.ready for part in parts) + seconds
            self._stream.busy += seconds
            stream.launch(end(parts))
        self._latest = self._device.collectives[self._name] = stream.record_event()
        self._device.hasten()
        return SimulatedWork(self._device, self._latest)

    def _on_host(self, tensor: Tensor, kind: str, receives: bool, largest: bool) -> _HostWork:
        with self._device.unattributed():
            part = _Part(f"host {kind}", tensor, tensor.clone(), self._device.host_stream.time)
            parts = self._meet(part, lambda: poison(tensor), self._let_worker_go_on)
        end = _Sum(self._device, parts, tensor if receives else None, largest)
        return _HostWork(self._device, max(part.ready for part in parts), end)

    def _let_worker_go_on(self) -> None:
        """Let the worker run while the main thread waits for another rank, which may itself wait for the worker."""
        if self._device.host_stream is not self._device.worker.stream:
            self._device.worker.drain()

    def _meet(self, part: _Part, hide: Callable[[], None], idle: Callable[[], object] = lambda: None) -> list[_Part]:
        """Hides what will be written, and waits until all ranks have issued the same collective.

        While it waits for a sum of device tensors, the worker stays as late as it can be.

        Raises:
            RuntimeError: Another one has issued something else in its place.
        """
        hide()
        self._num_issued += 1
        place = f"collective {self._num_issued} of {self._name}"
        parts: list[_Part] = self._network.exchange(place, self._rank, self._members, part, idle)
        if len({each.kind for each in parts}) > 1:
            each = ", ".join(f"rank {rank}: {part.kind}" for rank, part in zip(self._members, parts, strict=True))
            raise RuntimeError(f"{place} is another one on each rank: {each}.")
        return parts
