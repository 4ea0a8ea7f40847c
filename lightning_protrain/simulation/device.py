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

[Note: Virtual clock]
Every stream has a time of its own. Work begins when the stream is free and the host has launched it, and lasts what
the given rates say: copies by their bytes, operations by their FLOPs or the bytes they touch, whichever takes longer. A
wait moves a stream's time to that of the event. The same program takes the same time on every machine. PCI Express has
one link in each direction: what goes up shares it with what is swapped in, what goes down with what is swapped out. A
copy has the whole link or waits; the one that was issued first comes first.

Operations are attributed by what they touch: those on host memory to the host, all others to the compute stream. One
that mixes both would fail on a GPU, and raises here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_protrain.device import StreamDevice
from lightning_protrain.host import HostMemory
from lightning_protrain.profiler.machine import HardwareProfile
from lightning_protrain.simulation.streams import Host, Link, RaceError, SimulatedStream, SimulatedWorker

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
    """How fast the simulated machine is, see [Note: Virtual clock].

    Attributes:
        upload: Bytes per second from host to device.
        download: Bytes per second from device to host.
        flops: Floating-point operations per second of the device.
        memory: Bytes per second that the device reads and writes.
        host_memory: Bytes per second that the host reads and writes.
    """

    upload: float = 25e9
    download: float = 25e9
    flops: float = 100e12
    memory: float = 1e12
    host_memory: float = 20e9


@dataclass
class _History:
    """Who touched a storage: (stream, step, operation) of the last writer, and of the readers since by stream."""

    writer: tuple[str, int, str] | None = None
    readers: dict[str, tuple[int, str]] = field(default_factory=dict)


class SimulatedDevice(StreamDevice):
    """A device of the CPU's memory with the streams of a GPU, see [Note: Lateness] and [Note: Happens-before].

    Use it as a context manager around everything that computes: only then operations are attributed and checked.

    Args:
        rates: What the virtual clock goes by.
    """

    def __init__(self, rates: Rates | None = None) -> None:
        self.rates = rates or Rates()
        self._launching = Host()
        self._main = self._launching.stream
        self._compute = SimulatedStream("compute", self._launching, eager=True)
        self._host_ranges: dict[int, int] = {}
        self._places: dict[int, str] = {}
        self._histories: dict[int, _History] = {}
        # A weak reference keeps the address of a storage from being given to another one.
        self._known: dict[int, StorageWeakRef] = {}
        self._mode = _Attribution(self)
        self._copying: dict[str, SimulatedStream] = {}
        self._links = {towards_host: Link() for towards_host in (False, True)}
        super().__init__(torch.device("cpu"), self.new_host_memory(), self._new_stream)
        self.worker: SimulatedWorker = SimulatedWorker(self._launching)

    def __enter__(self) -> SimulatedDevice:
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)

    @property
    def host_stream(self) -> SimulatedStream:
        """What operations on host memory are attributed to: the main thread, or the worker in the middle of a job."""
        return self._launching.stream

    def compute_stream(self) -> SimulatedStream:
        return self._compute

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

    def hardware_profile(self, dtypes: Iterable[str], device_bytes: int, host_bytes: int) -> HardwareProfile:
        """What it can do, as its virtual clock goes. Copies one way do not slow down those the other way.

        Args:
            dtypes: Names of dtypes without `torch.`; it multiplies all of them at one rate.
            device_bytes: What it shall claim to have; it has no bound of its own.
            host_bytes: The same of the host.
        """
        rates = self.rates
        ways = {f"upload{kind}": rates.upload for kind in ("", "_beside", "_pageable")}
        ways |= {f"download{kind}": rates.download for kind in ("", "_beside", "_pageable")}
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
            target.fill_(float("nan") if target.is_floating_point() else 255 if target.dtype is torch.uint8 else 0)
            # Nobody but the device may be needed to keep the source alive.
            stream.launch(_Copy(self._mode, weakref.ref(source), target))

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Memory is given and taken in the order of the compute stream: both are writes of it."""
        with self._mode.unattributed():
            key = self._device_key(storage)
            self._places[key] = "device"
            self._record(self._compute, self._compute.step(), key, True, "resize")
            storage.resize_(nbytes)
            if nbytes:
                torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,)).fill_(255)

    def new_host_memory(self) -> HostMemory:
        """Known as host memory until it is closed."""
        return HostMemory(self._lock, self._unlock)

    def note_host(self, tensor: Tensor) -> None:
        if tensor.numel():
            self._host_ranges[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    def place(self, tensor: Tensor) -> str | None:
        """`"host"`, `"device"`, or None for what was made from nothing that is placed."""
        if self._host_key(tensor) is not None:
            return "host"
        return self._places.get(self._device_key(tensor.untyped_storage()))

    def set_place(self, tensor: Tensor, place: str | None) -> None:
        """Notes where a new tensor lies."""
        if place is not None and self._host_key(tensor) is None:
            self._places[self._device_key(tensor.untyped_storage())] = place

    def access(self, stream: SimulatedStream, step: int, tensor: Tensor, write: bool, operation: str) -> None:
        """Checks and records one access.

        Raises:
            RaceError: No fence orders it after an access it depends on.
        """
        host = self._host_key(tensor)
        key = self._device_key(tensor.untyped_storage()) if host is None else host
        self._record(stream, step, key, write, operation)

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

    def _new_stream(self, name: str) -> SimulatedStream:
        link = self._links[name in _DOWN]
        self._copying[name] = SimulatedStream(name, self._launching, eager=False, link=link)
        return self._copying[name]

    def _lock(self, address: int, size: int) -> bool:
        self._host_ranges[address] = size
        return True

    def _unlock(self, address: int) -> None:
        del self._host_ranges[address]
        self._histories.pop(address, None)  # The system may give the address to anything.

    def _device_key(self, storage: torch.UntypedStorage) -> int:
        """What stands for a storage as long as it lives, and for no other."""
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
            self._histories.pop(key, None)

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
        if len(places) > 1 and name.startswith("aten::_foreach_"):
            self._spend_apart([tensor for tensor, _ in tensors])
        elif places:
            stream.spend(self._seconds(func, args, kwargs, result, [tensor for tensor, _ in tensors], place))
        given_storages = {tensor.untyped_storage()._cdata for tensor, _ in tensors}
        for output in tree_leaves(result):
            if isinstance(output, Tensor) and output.untyped_storage()._cdata not in given_storages:
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

    def _seconds(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        given: list[Tensor],
        place: str | None,
    ) -> float:
        """How long an operation takes, see [Note: Virtual clock]."""
        rates = self._device.rates
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        nbytes = sum(tensor.nbytes for tensor in (*given, *made))
        if place != "device":
            return nbytes / rates.host_memory
        count = flop_registry.get(func._overloadpacket)
        flops = count(*args, **kwargs, out_val=result) if count is not None else 0
        return max(flops / rates.flops, nbytes / rates.memory)
