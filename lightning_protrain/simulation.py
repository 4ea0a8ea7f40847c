"""A device that exists only in tests: streams that copy as late as the fences allow, and a checker of those fences.

[Note: Happens-before]
Work on two streams is ordered only by fences. Each stream, and the host, counts its own steps and knows of every other
stream the last step that a fence has made it wait for: a vector clock (Lamport 1978, Mattern 1989). Of each storage
the checker keeps the last writer and the readers since. An access is right if its stream's clock covers the last
writer, and for a write the readers too. The first that is not covered raises, whether or not the late copy would have
gone wrong this time. The host launches everything, so whatever it has done so far comes before what it launches.

[Note: Lateness]
Copies are queued when they are issued and run when somebody waits for them. Until then their target is poisoned (NaN),
so that a missing fence also shows in the numbers.

Operations are attributed by what they touch: those on host memory to the host, all others to the compute stream. One
that mixes both would fail on a GPU, and raises here.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_protrain.device import HostMemory, StreamDevice

# What may see both places: copies, and operations over lists, which PyTorch would call once for each device.
_MIXED = ("aten::copy_", "aten::_to_copy", "aten::_foreach_")


class RaceError(RuntimeError):
    """Two accesses to one storage that no fence orders, or an operation that a real device could not run."""


@dataclass
class SimulatedEvent:
    """A point in a stream; `clock` is what is known to have ended when it has passed."""

    stream: SimulatedStream
    clock: dict[str, int]
    passed: bool = False

    def query(self) -> bool:
        """Whether everything before it has run."""
        return self.passed

    def synchronize(self) -> None:
        """The host waits for it."""
        self.stream.run_until(self)
        _join(self.stream.device.host_stream.clock, self.clock)


@dataclass(eq=False)
class SimulatedStream:
    """A queue of work; one that is `eager` has run everything it has been given."""

    name: str
    device: SimulatedDevice
    eager: bool
    clock: dict[str, int] = field(default_factory=dict)
    queue: deque[Callable[[], None]] = field(default_factory=deque)

    def step(self) -> int:
        """Counts one more step and returns its number; the host, which launches it, has come this far."""
        _join(self.clock, self.device.host_stream.clock)
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]

    def record_event(self) -> SimulatedEvent:
        """An event after the work given so far."""
        event = SimulatedEvent(self, dict(self.clock), passed=self.eager)
        self.queue.append(lambda: setattr(event, "passed", True))
        self._advance()
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        """Later work comes after `event`."""
        _join(self.clock, event.clock)
        self.queue.append(lambda: event.stream.run_until(event))
        self._advance()

    def wait_stream(self, stream: SimulatedStream) -> None:
        """Later work comes after what `stream` has been given so far."""
        self.wait_event(stream.record_event())

    def launch(self, work: Callable[[], None]) -> None:
        """Gives the stream something to do."""
        self.queue.append(work)
        self._advance()

    def run_until(self, event: SimulatedEvent) -> None:
        """Runs what comes before `event`."""
        while not event.passed:
            self.queue.popleft()()

    def _advance(self) -> None:
        while self.eager and self.queue:
            self.queue.popleft()()


@dataclass
class _History:
    """Who touched a storage: (stream, step, operation) of the last writer, and of the readers since by stream."""

    writer: tuple[str, int, str] | None = None
    readers: dict[str, tuple[int, str]] = field(default_factory=dict)


class SimulatedDevice(StreamDevice):
    """A device of the CPU's memory with the streams of a GPU, see [Note: Lateness] and [Note: Happens-before].

    Use it as a context manager around everything that computes: only then operations are attributed and checked.
    """

    def __init__(self) -> None:
        self.host_stream = SimulatedStream("host", self, eager=True)
        self._compute = SimulatedStream("compute", self, eager=True)
        self._host_ranges: dict[int, int] = {}
        self._places: dict[int, str] = {}
        self._histories: dict[int, _History] = {}
        self._mode = _Attribution(self)
        memory = HostMemory(self._lock, lambda address: None)
        up, down = (SimulatedStream(name, self, eager=False) for name in ("up", "down"))
        super().__init__(torch.device("cpu"), memory, up, down)

    def __enter__(self) -> SimulatedDevice:
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)

    def compute_stream(self) -> SimulatedStream:
        return self._compute

    def free_bytes(self) -> int | None:
        return None

    def copy(self, stream: SimulatedStream, source: Tensor, target: Tensor) -> None:
        with self._mode.unattributed():
            step = stream.step()
            self.access(stream, step, source, False, "copy")
            self.access(stream, step, target, True, "copy")
            target.fill_(float("nan") if target.is_floating_point() else 255 if target.dtype is torch.uint8 else 0)
            # Nobody but the device may be needed to keep the source alive.
            stream.launch(_Copy(self._mode, weakref.ref(source), target))

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Memory is given and taken in the order of the compute stream: both are writes of it."""
        with self._mode.unattributed():
            self._places[storage._cdata] = "device"
            self._record(self._compute, self._compute.step(), storage._cdata, True, "resize")
            storage.resize_(nbytes)
            if nbytes:
                torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,)).fill_(255)

    def place(self, tensor: Tensor) -> str | None:
        """`"host"`, `"device"`, or None for what was made from nothing that is placed."""
        if self._host_key(tensor) is not None:
            return "host"
        return self._places.get(tensor.untyped_storage()._cdata)

    def set_place(self, tensor: Tensor, place: str | None) -> None:
        """Notes where a new tensor lies; its storage begins without a history."""
        if self._host_key(tensor) is None:
            key = tensor.untyped_storage()._cdata
            self._histories.pop(key, None)
            self._places.pop(key, None)
            if place is not None:
                self._places[key] = place

    def access(self, stream: SimulatedStream, step: int, tensor: Tensor, write: bool, operation: str) -> None:
        """Checks and records one access.

        Raises:
            RaceError: No fence orders it after an access it depends on.
        """
        host = self._host_key(tensor)
        self._record(stream, step, tensor.untyped_storage()._cdata if host is None else host, write, operation)

    def _record(self, stream: SimulatedStream, step: int, key: int, write: bool, operation: str) -> None:
        history = self._histories.setdefault(key, _History())
        what = f"{stream.name} {'writes' if write else 'reads'} in {operation}"
        if history.writer is not None:
            name, at, before = history.writer
            if name != stream.name and stream.clock.get(name, 0) < at:
                raise RaceError(f"{what} what {name} wrote in {before}, and no fence is between them.")
        if not write:
            history.readers[stream.name] = (step, operation)
            return
        for name, (at, before) in history.readers.items():
            if name != stream.name and stream.clock.get(name, 0) < at:
                raise RaceError(f"{what} what {name} may still read in {before}, and no fence is between them.")
        self._histories[key] = _History((stream.name, step, operation))

    def _lock(self, address: int, size: int) -> bool:
        self._host_ranges[address] = size
        return True

    def _host_key(self, tensor: Tensor) -> int | None:
        """Address of the host block that a tensor lies in, if it lies in one."""
        pointer = tensor.untyped_storage().data_ptr()
        for address, size in self._host_ranges.items():
            if address <= pointer < address + size:
                return address
        return None


@dataclass
class _Copy:
    """A queued copy; it does not keep its source alive, as a copy on a GPU does not."""

    mode: _Attribution
    source: weakref.ref[Tensor]
    target: Tensor

    def __call__(self) -> None:
        source = self.source()
        if source is None:
            raise RaceError("The source of a copy was freed before the copy ran: hold it until its fence has passed.")
        with self.mode.unattributed(), torch.no_grad():
            self.target.copy_(source)


class _Attribution(TorchDispatchMode):
    """Sees every operation and reports what it reads and writes."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device
        self._silent = 0

    @contextmanager
    def unattributed(self) -> Iterator[None]:
        """What runs inside is the device's own doing."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._silent or func.is_view:
            return func(*args, **kwargs)
        device, name = self._device, func._schema.name
        given = list(zip(func._schema.arguments, args, strict=False))
        given += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
        tensors = [
            (leaf, argument.alias_info is not None and argument.alias_info.is_write)
            for argument, value in given
            for leaf in tree_leaves(value)
            if isinstance(leaf, Tensor)
        ]
        places = {device.place(tensor) for tensor, _ in tensors if tensor.dim() > 0} - {None}
        if len(places) > 1 and not name.startswith(_MIXED):
            raise RaceError(f"{name} is given tensors of the host and of the device: a GPU would refuse.")
        for place in places:
            stream = device.host_stream if place == "host" else device.compute_stream()
            step = stream.step()
            for tensor, write in tensors:
                if len(places) == 1 or device.place(tensor) == place:
                    device.access(stream, step, tensor, write, name)
        place = next(iter(places)) if len(places) == 1 else None
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor, _ in tensors}
        for output in tree_leaves(result):
            if isinstance(output, Tensor) and output.untyped_storage()._cdata not in known:
                device.set_place(output, place)
                if place is not None:
                    device.access(stream, step, output, True, name)
        return result


def _join(clock: dict[str, int], other: Mapping[str, int]) -> None:
    for name, step in other.items():
        clock[name] = max(clock.get(name, 0), step)
