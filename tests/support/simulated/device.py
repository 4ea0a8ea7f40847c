"""A device that exists only in tests: streams that copy as late as the fences allow, see also [Note: Happens-before].

[Note: Lateness]
Copies are queued when they are issued and run when somebody waits for them. Until then their target is poisoned (NaN),
so that a missing fence also shows in the numbers. `hurry` makes some of them run before: any order that the fences
allow may come.

[Note: Virtual clock]
Every stream has a time of its own. Work begins when the stream is free and the host has launched it, and lasts what
the given rates say: copies by their bytes, operations by their FLOPs or the bytes they touch, whichever takes longer. A
wait moves a stream's time to that of the event. The same program takes the same time on every machine. PCI Express has
one link in each direction: what goes up shares it with what is swapped in, what goes down with what is swapped out. A
copy has the whole link or waits; the one that was issued first comes first.

Operations are attributed by what they touch: those on host memory to the host, all others to the compute stream. One
that mixes both would fail on a GPU, and raises here. A plain copy between them takes a link, and both wait for its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_protrain.device.device import StreamDevice
from lightning_protrain.device.host import HostMemory
from lightning_protrain.profiler.records import HardwareProfile
from tests.support.simulated.accesses import Accesses, extent_of, tensors_in
from tests.support.simulated.streams import Host, Link, RaceError, SimulatedEvent, SimulatedStream, SimulatedWorker
from tests.support.simulated.work import work_of

# Storages that are remembered before the dead ones are forgotten.
_MANY = 10_000
# Streams that copy towards the host.
_DOWN = ("down", "out")
# What may see both places: copies, and operations over lists, which PyTorch would call once for each device.
_MIXED = ("aten::copy_", "aten::_to_copy", "aten::_foreach_")

# What a fused step of AdamW touches of each element in float32: weight, gradient and two moments, each counted once.
_STEP_BYTES = 16


@dataclass(frozen=True)
class Rates:
    """Rates of the simulated machine, see [Note: Virtual clock].

    Attributes:
        upload: Bytes per second from host to device.
        download: Bytes per second from device to host.
        flops: Floating-point operations per second of the device.
        memory: Bytes per second that the device reads and writes.
        host_memory: Bytes per second that the host reads and writes.
        network: Bytes per second of a tensor that a collective sums over its ranks.
        latency: Seconds that a collective takes beside the transfer.
    """

    upload: float = 25e9
    download: float = 25e9
    flops: float = 100e12
    memory: float = 1e12
    host_memory: float = 20e9
    network: float = 50e9
    latency: float = 10e-6


class SimulatedDevice(StreamDevice):
    """A device of the CPU's memory with the streams of a GPU, see [Note: Lateness] and [Note: Happens-before].

    Use it as a context manager around everything that computes: only then operations are attributed and checked.

    Args:
        rates: Rates from which the virtual clock is computed.
        hurry: Asked whenever something is given to it: which of so many streams with work queued does its next piece
            of work now; None: none of them, see [Note: Lateness].
    """

    def __init__(self, rates: Rates | None = None, hurry: Callable[[int], int | None] = lambda count: None) -> None:
        self.rates = rates or Rates()
        self._hurry = hurry
        self._launching = Host()
        self._main = self._launching.stream
        self._compute = SimulatedStream("compute", self._launching, eager=True)
        self._current = self._compute
        self._host_ranges: dict[int, int] = {}
        self._host_keys: dict[int, int | None] = {}  # Of addresses, as long as no range comes or goes.
        self._places: dict[int, str] = {}
        self._accesses = Accesses()
        # A weak reference keeps the address of a storage from being given to another one.
        self._known: dict[int, StorageWeakRef] = {}
        self._mode = _Attribution(self)
        self._copying: dict[str, SimulatedStream] = {}
        self.collectives: dict[str, SimulatedEvent] = {}
        self._links = {towards_host: Link() for towards_host in (False, True)}
        super().__init__(torch.device("cpu"), self.new_host_memory(), self._new_stream)
        self.worker: SimulatedWorker = SimulatedWorker(self._launching)
        self.aside = _Aside(self, self.add_stream("aside"))

    def __enter__(self) -> SimulatedDevice:
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)

    @property
    def host_stream(self) -> SimulatedStream:
        """Stream to which operations on host memory are attributed: the main thread, or a worker that runs a job."""
        return self._launching.stream

    def compute_stream(self) -> SimulatedStream:
        return self._current

    @property
    def elapsed(self) -> float:
        """Virtual seconds until the last stream is done."""
        return max(stream.time for stream in (self._main, self.worker.stream, self._compute, *self._copying.values()))

    @property
    def exposed(self) -> float:
        """Virtual seconds in which the compute stream had nothing to do: copies and host work that nothing hid."""
        return self.elapsed - self._compute.busy

    def free_bytes(self) -> int | None:
        return None

    def mark_stream(self, stream: SimulatedStream) -> float:
        return max(stream.time, self.host_stream.time)  # What is launched now begins no earlier.

    def host_clock(self) -> float:
        return self.host_stream.time

    def hardware_profile(self, dtypes: Iterable[str], device_bytes: int, host_bytes: int) -> HardwareProfile:
        """Return the rates of the virtual clock. Copies in one direction do not slow down those in the other.

        Args:
            dtypes: Names of dtypes without `torch.`; it multiplies all of them at one rate.
            device_bytes: Device memory in the profile; the simulated device itself has no bound.
            host_bytes: Host memory in the profile.
        """
        rates = self.rates
        ways = {f"upload{kind}": rates.upload for kind in ("", "_beside")}
        ways |= {f"download{kind}": rates.download for kind in ("", "_beside")}
        return HardwareProfile(
            name="simulated",
            **ways,
            flops=dict.fromkeys(dtypes, rates.flops),
            memory=rates.memory,
            device_step=rates.memory / _STEP_BYTES,
            host_step=rates.host_memory / _STEP_BYTES,
            host_memory=rates.host_memory,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            asynchronous=True,
        )

    def copy(self, stream: SimulatedStream, source: Tensor, target: Tensor) -> None:
        with self._mode.unattributed():
            step = stream.step()
            self.access(stream, step, source, False, "copy")
            self.access(stream, step, target, True, "copy")
            stream.spend(source.nbytes / (self.rates.download if stream.name in _DOWN else self.rates.upload))
            if self._current is self._compute or self.host_stream is not self._main:
                poison(target)  # Asked for aside, somebody who is as late may read what lies there, before this copy.
            # Nobody but the device may be needed to keep the source alive.
            stream.launch(_Copy(self._mode, weakref.ref(source), target))
        self.hasten()

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Resize a storage; allocating and freeing count as writes of the compute stream."""
        with self._mode.unattributed():
            key = self._device_key(storage)
            self._places[key] = "device"
            self._accesses.add(self._compute, self._compute.step(), key, True, "resize")
            storage.resize_(nbytes)
            if nbytes:
                torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,)).fill_(255)

    def new_host_memory(self) -> HostMemory:
        """Return host memory that the device recognises until it is closed."""
        return HostMemory(self._lock, self._unlock)

    def note_host(self, tensor: Tensor) -> None:
        if tensor.numel():
            self._lock(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())

    def place(self, tensor: Tensor) -> str | None:
        """Return `"host"`, `"device"`, or None for a tensor that was made without placed tensors."""
        if self._host_key(tensor) is not None:
            return "host"
        return self._places.get(self._device_key(tensor.untyped_storage()))

    def set_place(self, tensor: Tensor, place: str | None) -> None:
        """Record the place of a new tensor."""
        if place is not None and self._host_key(tensor) is None:
            self._places[self._device_key(tensor.untyped_storage())] = place

    def access(self, stream: SimulatedStream, step: int, tensor: Tensor, write: bool, operation: str) -> None:
        """Checks and records one access.

        Raises:
            RaceError: No fence orders it after an access it depends on.
        """
        host = self._host_key(tensor)
        storage = tensor.untyped_storage()
        # Storages of the host lie in blocks, and several of them in one.
        key, base = (self._device_key(storage), 0) if host is None else (host, storage.data_ptr())
        self._accesses.add(stream, step, key, write, operation, extent_of(tensor, base))

    def new_worker(self, name: str) -> SimulatedWorker:
        """Return another worker thread of the host."""
        return SimulatedWorker(self._launching, name)

    def add_stream(self, name: str, link: Link | None = None) -> SimulatedStream:
        """Return another stream, which works as late as the fences allow.

        Args:
            name: Unique name of the stream.
            link: Link that its copies share with other streams; None: it shares none.
        """
        assert name not in self._copying, f"a second stream {name!r}"
        self._copying[name] = SimulatedStream(name, self._launching, eager=False, link=link)
        return self._copying[name]

    def unattributed(self) -> AbstractContextManager[None]:
        """In this context, operations are the device's own, and are not attributed."""
        return self._mode.unattributed()

    def hasten(self) -> None:
        """Run the work that `hurry` asks for."""
        while queued := [stream for stream in self._copying.values() if stream.queue]:
            chosen = self._hurry(len(queued))
            if chosen is None:
                return
            queued[chosen].queue.popleft()()

    def _new_stream(self, name: str) -> SimulatedStream:
        return self.add_stream(name, self._links[name in _DOWN])

    def _lock(self, address: int, size: int) -> bool:
        self._host_ranges[address] = size
        self._host_keys.clear()
        return True

    def _unlock(self, address: int) -> None:
        del self._host_ranges[address]
        self._host_keys.clear()
        self._accesses.forget(address)  # The system may give the address to anything.

    def _device_key(self, storage: torch.UntypedStorage) -> int:
        """Return an identifier of a storage, unique as long as the storage lives."""
        key: int = storage._cdata
        if key not in self._known:
            if len(self._known) > _MANY:
                self._forget_dead()
            self._known[key] = StorageWeakRef(storage)
        return key

    def _forget_dead(self) -> None:
        for key in [key for key, reference in self._known.items() if reference.expired()]:
            del self._known[key]
            self._places.pop(key, None)
            self._accesses.forget(key)

    def _host_key(self, tensor: Tensor) -> int | None:
        """Address of the host block that a tensor lies in, if it lies in one; the smallest of those that are known."""
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self._host_keys:
            blocks = [(size, at) for at, size in self._host_ranges.items() if at <= pointer < at + size]
            self._host_keys[pointer] = min(blocks)[1] if blocks else None
        return self._host_keys[pointer]


class _Aside(AbstractContextManager[None]):
    """Makes another stream the compute stream of a device for a while."""

    def __init__(self, device: SimulatedDevice, stream: SimulatedStream) -> None:
        self._device = device
        self._stream = stream

    def __enter__(self) -> None:
        self._before, self._device._current = self._device._current, self._stream

    def __exit__(self, *exception: Any) -> None:
        self._device._current = self._before


def poison(tensor: Tensor) -> None:
    """Fill a tensor with values that no test takes for a result."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 255 if tensor.dtype is torch.uint8 else 0)


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
        """In this context, operations are the device's own, and are not attributed."""
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
        device.hasten()
        given = list(zip(func._schema.arguments, args, strict=False))
        given += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
        tensors = [
            (leaf, argument.alias_info is not None and argument.alias_info.is_write)
            for argument, value in given
            for leaf in tensors_in(value)
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
        if len(places) > 1 and name.startswith("aten::_foreach_"):
            self._spend_apart([tensor for tensor, _ in tensors])
        elif len(places) > 1:
            self._spend_together(args[0])
        elif places:
            stream.spend(self._seconds(*work_of(func, args, kwargs, result), place))
        given_storages = {tensor.untyped_storage()._cdata for tensor, _ in tensors}
        for output in tensors_in(result):
            if output.untyped_storage()._cdata not in given_storages:
                device.set_place(output, place)
                if place is not None:
                    device.access(stream, step, output, True, name)
        return result

    def _spend_apart(self, tensors: list[Tensor]) -> None:
        """An operation over a list runs once for each place, on what lies there."""
        device = self._device
        for place, stream, rate in (
            ("host", device.host_stream, device.rates.host_memory),
            ("device", device.compute_stream(), device.rates.memory),
        ):
            stream.spend(sum(tensor.nbytes for tensor in tensors if device.place(tensor) == place) / rate)

    def _spend_together(self, target: Tensor) -> None:
        """A copy between host and device that the host waits for."""
        device = self._device
        host, compute, rates = device.host_stream, device.compute_stream(), device.rates
        compute.spend(target.nbytes / (rates.download if device.place(target) == "host" else rates.upload))
        compute.record_event().synchronize()
        assert host.time == compute.time

    def _seconds(self, flops: int, nbytes: int, place: str | None) -> float:
        """Return the duration of an operation in virtual seconds, see [Note: Virtual clock]."""
        rates = self._device.rates
        return max(flops / rates.flops, nbytes / rates.memory) if place == "device" else nbytes / rates.host_memory
