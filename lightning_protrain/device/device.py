"""What has been moved between host and device.

Uploads whose bytes are yet to be made by the host's worker.

[Note: In order]
Uploads are asked for in the order in which they are needed, but steps behind backward end in the opposite one. A link
carries one copy after the other: if each were issued as soon as its own bytes are there, what is needed first would
come last. So each is issued when its bytes are there and those that were asked for before it have been issued.

Where bytes live and how they move: beside `device/topology.py` the only file that names `torch.cuda`.

[Note: Streams]
All kernels of the model run on the *compute stream*, and all storages of chunks are allocated and freed on it, so that
they share one heap with the activations and freed memory is reused without fragmentation. Four more streams copy: one
up (host to device) and one down for chunks and gradients, one out and one in for activations that are swapped. These
fences order them:

1. An upload waits for everything the compute stream has been given so far, because the memory it fills may still be
   read by an earlier kernel under another name.
2. The compute stream waits for an upload where its bytes are first used, or where its memory is freed unused.
3. A download waits for everything the compute stream has been given so far; its source is held until it has ended,
   which replaces `record_stream`. Those that are held have `hold_bytes` at most, or it is one alone: else the compute
   stream waits for the oldest, and the host goes on.
4. The host waits for a download before it reads what has landed.
5. The host waits for the uploads before anybody may write to the weights they read: at the end of every backward and
   of every evaluation step.
6. An upload of weights that the host's worker is about to step is issued when that job has ended (see [Note: Jobs])
   and those before it are issued, and the host waits for that where fence 2 needs it.
7. A swap-out waits for everything the compute stream has been given so far.
8. The compute stream waits for a swap-out before its source is freed, or its host memory is read.
9. A swap-in waits for what the compute stream has been given so far: for its memory by fence 1, for its bytes by 8.
10. The compute stream waits for a swap-in where its bytes are first used, or where its memory is freed unused.
11. The host waits for both before it gives their host memory to somebody else.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_protrain.device.host import HostMemory, HostWorker, Job, step_cores, worker_cores
from lightning_protrain.device.topology import numa_node, pci_address


@dataclass
class TransferCounters:
    """What has been moved since the run began; all in bytes unless said otherwise.

    Attributes:
        uploaded_bytes: Host to device, parameters.
        downloaded_bytes: Device to host, gradients and weights changed in a forward.
        uploads: Number of chunk uploads.
        prefetch_hits: Number of uploads that had been issued before the chunk was asked for.
        prefetch_misses: Number of uploads issued only when the chunk was needed at once.
        live_bytes: Offloaded chunks now on the device.
        peak_live_bytes: The most there ever were.
        swapped_out_bytes: Device to host, activations.
        swapped_in_bytes: Host to device, the same.
        waited_seconds: The host has waited for gradients and swapped activations on their way to it.
        collectives: Number of collectives among ranks, those of DDP not counted.
        communicated_bytes: What this rank has given to them.
    """

    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    uploads: int = 0
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    live_bytes: int = 0
    peak_live_bytes: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    waited_seconds: float = 0.0
    collectives: int = 0
    communicated_bytes: int = 0

    def add_live(self, nbytes: int) -> None:
        """Counts `nbytes` more (or fewer, if negative) on the device."""
        self.live_bytes += nbytes
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)


T = TypeVar("T")


class PendingUpload(Generic[T]):
    """An upload behind a job, see [Note: In order].

    Args:
        job: Makes the bytes.
        issue: Issues the upload and returns its event; called on the worker, and not if the job raised.
        before: The pending upload that was asked for before this one.
    """

    def __init__(self, job: Job, issue: Callable[[], T], before: PendingUpload[Any] | None = None) -> None:
        self._job: Job | None = job
        self._issue: Callable[[], T] | None = issue
        self._before = before
        self._event: Future[T | None] = Future()
        job.add_done_callback(self._job_ended)

    @property
    def is_issued(self) -> bool:
        """Whether it has been, or never will be."""
        return self._event.done()

    def event(self) -> T | None:
        """Waits for it to be issued; None: the job has raised, which whoever waits for the job is told.

        Raises:
            RuntimeError: What issuing it raised.
        """
        job, before = self._job, self._before
        if job is not None:
            job.exception()
        if before is not None:
            before.event()
        return self._event.result()

    def _job_ended(self, job: Job) -> None:
        if job.exception() is not None:
            self._job = self._issue = None
            self._event.set_result(None)
        elif self._before is None:
            self._run()
        else:
            self._before._event.add_done_callback(lambda _: self._run())

    def _run(self) -> None:
        issue = self._issue
        assert issue is not None
        # Whoever keeps this one for its event keeps nothing that belonged to the job.
        self._before = self._job = self._issue = None
        try:
            event = issue()
        except RuntimeError as error:
            self._event.set_exception(error)  # Raised in `event`, on the thread that needs it.
        else:
            self._event.set_result(event)


def event_of(fence: T | PendingUpload[T] | None) -> T | None:
    """The event of a copy, once it has been issued; None: there is nothing to wait for.

    Raises:
        RuntimeError: As `PendingUpload.event`.
    """
    return fence.event() if isinstance(fence, PendingUpload) else fence


@dataclass
class Device(ABC):
    """A place to train on: moves bytes between it and the host, and counts them.

    Attributes:
        torch_device: What PyTorch calls it.
        counters: What has been moved.
        host: Host memory that this device can copy to and from at full speed.
        worker: The host's thread beside the main one.
        hold_bytes: The most that sources of downloads under way should take together.
        aside: Within it the compute stream is another one: what waits there holds up no computing.
    """

    torch_device: torch.device
    counters: TransferCounters = field(default_factory=TransferCounters)
    host: HostMemory = field(default_factory=HostMemory)
    worker: HostWorker = field(default_factory=HostWorker)
    hold_bytes: int = 0
    aside: AbstractContextManager[object] = field(default_factory=nullcontext)

    @abstractmethod
    def upload(self, source: Tensor, target: Tensor, after: Job | None = None) -> Any:
        """Copies `source` (host) to `target` (device), once `after` has ended; returns a fence that `wait` takes."""

    @abstractmethod
    def wait(self, fence: Any) -> None:
        """Makes the compute stream wait until the upload behind `fence` has ended."""

    @abstractmethod
    def download(self, source: Tensor, target: Tensor) -> Any:
        """Copies `source` (device) to `target` (host) and holds `source` meanwhile; returns a fence for `land`."""

    @abstractmethod
    def land(self, fence: Any) -> None:
        """Blocks the host until the copy behind `fence` has ended; None: there is none."""

    def note_host(self, tensor: Tensor) -> None:
        """`tensor` is a host weight in memory of its own; of interest to a device that attributes operations."""
        return

    def has_ended(self, fence: Any) -> bool:
        """Whether the copy behind `fence`, of a download or a swap, has ended: `land` would not block."""
        return True

    @abstractmethod
    def settle(self) -> None:
        """Blocks the host until every upload has ended, so that host weights may be written to."""

    @abstractmethod
    def swap_out(self, source: Tensor, target: Tensor) -> Any:
        """Copies `source` (device) to `target` (host); returns a fence for `wait` and `land`.

        The caller holds both until it has waited for the fence: no bound is known here.
        """

    @abstractmethod
    def swap_in(self, source: Tensor, target: Tensor) -> Any:
        """Copies `source` (host) to `target` (device); returns a fence for `wait` and `land`. The caller holds both."""

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Gives `storage` `nbytes` of device memory (0: frees it), in the order of the compute stream."""
        storage.resize_(nbytes)

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Bytes a plan may use, or None where no budget is known (the CPU has only the one it is given)."""

    def peak_bytes(self) -> int | None:
        """The most that was allocated on it since `forget_peak`, or None where nobody counts."""
        return None

    def allocator_stats(self) -> dict[str, int]:
        """Return the most that the allocator has taken since `forget_peak`, and its retries; empty: nobody counts.

        An allocation is retried after cached memory has been given back, which waits for the device.
        """
        return {}

    def forget_peak(self) -> None:
        """Counts the peak anew from what is allocated now."""
        return

    def synchronize(self) -> None:
        """Blocks the host until everything the device has been given has ended."""
        return

    def describe(self) -> dict[str, str]:
        """What tells it from other devices: its `name`, and whatever else its speed depends on."""
        return {"name": self.torch_device.type}

    def new_host_memory(self) -> HostMemory:
        """Memory like `host`, for a while: the caller closes it."""
        return HostMemory()

    def trim(self) -> None:
        """Gives back memory of the device that is kept for later, as if it had never been used."""
        return

    def close(self) -> None:
        """End the worker and release page-locked memory; the device is of no use afterwards."""
        try:
            self.worker.close()
        finally:
            self.host.close()


class CPUDevice(Device):
    """The CPU as a device: copies are synchronous, the budget is the one the user names."""

    def upload(self, source: Tensor, target: Tensor, after: Job | None = None) -> PendingUpload[Tensor] | None:
        self.counters.uploaded_bytes += source.nbytes
        if after is not None:
            return PendingUpload(after, lambda: target.copy_(source))
        target.copy_(source)
        return None

    def wait(self, fence: PendingUpload[Tensor] | None) -> None:
        if fence is not None:
            fence.event()

    def download(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)
        self.counters.downloaded_bytes += source.nbytes

    def land(self, fence: object) -> None:
        return

    def settle(self) -> None:
        return

    def swap_out(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)
        self.counters.swapped_out_bytes += source.nbytes

    def swap_in(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)
        self.counters.swapped_in_bytes += source.nbytes

    def free_bytes(self) -> int | None:
        return None


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether everything before it has ended."""

    def synchronize(self) -> None:
        """Blocks the host until then."""


class Stream(Protocol):
    """A queue of work that runs in order: what `torch.cuda.Stream` and its simulation have in common."""

    def wait_event(self, event: Any) -> None:
        """Holds later work back until `event`."""

    def wait_stream(self, stream: Any) -> None:
        """Holds later work back until what `stream` has been given so far has ended."""

    def record_event(self) -> Any:
        """An event after the work given so far."""


class StreamDevice(Device):
    """A device with a compute stream and four copying streams, see [Note: Streams].

    Args:
        torch_device: What PyTorch calls it.
        host: Host memory that it copies to and from without blocking.
        new_stream: Makes a stream; called once for each kind of copy, with its name.
    """

    def __init__(self, torch_device: torch.device, host: HostMemory, new_stream: Callable[[str], Stream]) -> None:
        super().__init__(torch_device, host=host)
        self._up, self._down = new_stream("up"), new_stream("down")
        self._out, self._in = new_stream("out"), new_stream("in")
        self._uploads: deque[Event | PendingUpload[Event]] = deque()
        self._pending: PendingUpload[Event] | None = None
        self._held: deque[tuple[Event, Tensor]] = deque()

    @abstractmethod
    def compute_stream(self) -> Stream:
        """The stream that runs the model."""

    @abstractmethod
    def copy(self, stream: Any, source: Tensor, target: Tensor) -> None:
        """Gives `stream` a copy that does not block the host."""

    def record(self, stream: Any) -> Event:
        """Return an event after the work that a copying stream has been given so far."""
        event: Event = stream.record_event()
        return event

    def upload(self, source: Tensor, target: Tensor, after: Job | None = None) -> Event | PendingUpload[Event]:
        self.counters.uploaded_bytes += source.nbytes
        given = self.compute_stream().record_event()

        def issue() -> Event:
            self._up.wait_event(given)
            self.copy(self._up, source, target)
            return self.record(self._up)

        while self._uploads and not isinstance(self._uploads[0], PendingUpload) and self._uploads[0].query():
            self._uploads.popleft()
        if after is None:
            self._uploads.append(issue())
        else:
            before = None if self._pending is None or self._pending.is_issued else self._pending
            self._pending = PendingUpload(after, issue, before)
            self._uploads.append(self._pending)
        return self._uploads[-1]

    def wait(self, fence: Event | PendingUpload[Event]) -> None:
        if (event := event_of(fence)) is not None:
            self.compute_stream().wait_event(event)

    def download(self, source: Tensor, target: Tensor) -> Event:
        # The host runs ahead: without a bound all gradients would pile up on the device. What the compute stream has
        # waited for may be let go: whoever gets the memory next computes after that.
        self._let_go(max(self.hold_bytes - source.nbytes, 0))
        self._down.wait_stream(self.compute_stream())
        self.copy(self._down, source, target)
        self.counters.downloaded_bytes += source.nbytes
        fence = self.record(self._down)
        self._held.append((fence, source))
        return fence

    def land(self, fence: Event | PendingUpload[Event] | None) -> None:
        began = time.perf_counter()
        _block(fence)
        self.counters.waited_seconds += time.perf_counter() - began

    def has_ended(self, fence: Event) -> bool:
        return fence.query()

    def settle(self) -> None:
        while self._uploads:
            _block(self._uploads[0])
            self._uploads.popleft()
        self._let_go()

    def swap_out(self, source: Tensor, target: Tensor) -> Event:
        self.counters.swapped_out_bytes += source.nbytes
        return self._swap(self._out, source, target)

    def swap_in(self, source: Tensor, target: Tensor) -> Event:
        self.counters.swapped_in_bytes += source.nbytes
        return self._swap(self._in, source, target)

    def synchronize(self) -> None:
        for stream in (self._up, self._down, self._out, self._in, self.compute_stream()):
            stream.record_event().synchronize()

    def close(self) -> None:
        try:
            self.settle()
            for stream in (self._down, self._out, self._in):
                stream.record_event().synchronize()
        finally:  # A device that has failed raises its error at every call; the host's part is closed all the same.
            self._held.clear()
            super().close()

    def _let_go(self, most: float = float("inf")) -> None:
        """Holds no source whose copy has ended, and no more than `most` bytes of the others."""
        while self._held and (sum(held.nbytes for _, held in self._held) > most or self._held[0][0].query()):
            self.compute_stream().wait_event(self._held[0][0])
            self._held.popleft()

    def _swap(self, stream: Stream, source: Tensor, target: Tensor) -> Event:
        stream.wait_stream(self.compute_stream())
        self.copy(stream, source, target)
        return self.record(stream)


def _block(fence: Event | PendingUpload[Event] | None) -> None:
    if (event := event_of(fence)) is not None:
        event.synchronize()


class CUDADevice(StreamDevice):
    """A CUDA device.

    Args:
        torch_device: Which one.
        say: Called once with a sentence if host memory cannot be page-locked.
    """

    def __init__(self, torch_device: torch.device, say: Callable[[str], None]) -> None:
        memory = HostMemory(self._lock, self._unlock, self._touch)
        super().__init__(torch_device, memory, lambda name: torch.cuda.Stream(torch_device))
        cores = worker_cores(node=numa_node(torch_device))
        # A thread begins on GPU 0, where its first event or copy would take memory of every rank of the machine.
        self.worker = HostWorker(len(step_cores(cores)), cores, partial(torch.cuda.set_device, torch_device))
        self.aside = torch.cuda.stream(torch.cuda.Stream(torch_device))
        self._say = say
        self._pageable = False
        self._merge_free_memory()

    def _merge_free_memory(self) -> None:
        """Let the allocator join neighbouring free memory, unless the user has given it settings.

        Memory of chunks comes and goes between activations. By default a freed chunk that has been split for a smaller
        tensor is of no use for the next chunk, and what is reserved grows until `cudaFree` has to wait for the device.
        """
        settings = torch._C._accelerator_getAllocatorSettings()
        if not settings:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        elif "expandable_segments:true" not in settings.replace(" ", "").lower():
            self._say(
                f"The memory of the GPU may fragment: PYTORCH_ALLOC_CONF={settings!r} leaves expandable segments off. "
                "Add expandable_segments:True to it, or leave the variable out."
            )

    def compute_stream(self) -> Stream:
        return torch.cuda.current_stream(self.torch_device)

    def record(self, stream: torch.cuda.Stream) -> Event:
        # Whoever waits for it sleeps; by default the thread would spin and take a core from the optimizer's step.
        event: Event = stream.record_event(torch.cuda.Event(blocking=True))
        return event

    def copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def free_bytes(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return free + reserved

    def describe(self) -> dict[str, str]:
        return {"name": torch.cuda.get_device_name(self.torch_device), "address": str(pci_address(self.torch_device))}

    def new_host_memory(self) -> HostMemory:
        return HostMemory(lambda *block: self._register(*block) == 0, self._unlock)

    def peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def allocator_stats(self) -> dict[str, int]:
        retries = torch.cuda.memory_stats(self.torch_device).get("num_alloc_retries", 0)
        return {"reserved_peak_bytes": torch.cuda.max_memory_reserved(self.torch_device), "alloc_retries": retries}

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def trim(self) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()

    def _touch(self, block: Tensor) -> None:
        """Have the worker's threads write to a block first: its pages come to their NUMA node, on all cores at once."""
        self.worker.submit(block.zero_).result()

    def _lock(self, address: int, size: int) -> bool:
        if self._pageable:
            return False
        if (code := self._register(address, size)) != 0:
            self._pageable = True
            self._say(
                f"Host memory cannot be page-locked (cudaHostRegister returned {code} for {size} bytes): transfers run "
                "slower and do not overlap. Raise the limit on locked memory (`ulimit -l`)."
            )
        return code == 0

    def _register(self, address: int, size: int) -> int:
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if code != 0:
            # CUDA keeps the error for whoever asks next, which is PyTorch after the next kernel; it raises it once.
            with suppress(RuntimeError):
                torch.ones(1, device=self.torch_device)
        return code

    def _unlock(self, address: int) -> None:
        code = int(torch.cuda.cudart().cudaHostUnregister(address))
        if code != 0:
            raise RuntimeError(f"cudaHostUnregister returned {code} at {address:#x}: page-locked memory is still held.")


def open_device(torch_device: torch.device, say: Callable[[str], None]) -> Device:
    """The device behind `torch_device`.

    Args:
        torch_device: A CPU or CUDA device.
        say: Called with a sentence that the user should read once.

    Raises:
        ValueError: Any other type of device.
    """
    if torch_device.type == "cuda":
        return CUDADevice(torch_device, say)
    if torch_device.type == "cpu":
        return CPUDevice(torch_device)
    raise ValueError(f"No streaming on {torch_device.type!r}: train on a CUDA device or on the CPU.")
