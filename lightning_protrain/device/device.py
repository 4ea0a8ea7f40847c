"""A device to train on: its streams, copies, fences and counters.

Only this file and `device/topology.py` use `torch.cuda`.

The *compute stream* runs all kernels of the model. Memory for chunks is allocated and freed on this stream too, so that
chunks and activations share one memory pool of the caching allocator. Four more streams copy: one uploads chunks to the
device, one downloads gradients, one swaps activations out and one swaps them in. These fences order the streams:

1. An upload waits for all work queued on the compute stream, because an earlier kernel may still read the memory that
   the upload fills.
2. The compute stream waits for an upload before its bytes are first used, or before its memory is freed unused.
3. A download waits for all work queued on the compute stream. A reference to its source is held until the download has
   ended, instead of `record_stream`. If held sources exceed `hold_bytes` in total, the compute stream waits for the
   oldest download; the host does not wait. A single source may exceed the limit.
4. The host waits for a download before it reads the target.
5. The host waits for all uploads before it writes to weights: at the end of every backward and evaluation step.
6. If a job of the host's worker steps weights (see [Note: Jobs] in host.py), the upload of these weights is issued
   after the job and after all earlier uploads. Before fence 2, the host waits until the upload has been issued.
7. A swap-out waits for all work queued on the compute stream.
8. The compute stream waits for a swap-out before its source is freed or its host memory is read.
9. A swap-in waits for all work queued on the compute stream. This orders it after earlier uses of its device memory
   (fence 1) and after the swap-out that wrote its host memory (fence 8).
10. The compute stream waits for a swap-in before its bytes are first used, or before its memory is freed unused.
11. The host waits for a swap-out and its swap-in before it reuses their host memory.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

try:
    import resource
except ImportError:  # Windows has no limits of this kind.
    resource = None  # type: ignore[assignment]

from lightning_protrain.device.host import Event, HostMemory, HostWorker, Job, KeptFromForks, step_threads, worker_cores
from lightning_protrain.device.recording import Lane, Recording
from lightning_protrain.device.topology import allocator_settings, numa_node, pci_address


@dataclass
class TransferCounters:
    """Counters of all transfers since the run began, in bytes unless said otherwise.

    Attributes:
        uploaded_bytes: Parameters copied from host to device.
        downloaded_bytes: Gradients, and weights changed in a forward, copied from device to host.
        uploads: Number of chunk uploads.
        prefetch_hits: Number of uploads issued before a block requested the chunk.
        prefetch_misses: Number of uploads issued when a block requested the chunk.
        live_bytes: Offloaded chunks that are on the device now.
        peak_live_bytes: Maximum of `live_bytes`.
        swapped_out_bytes: Activations copied from device to host.
        swapped_in_bytes: Activations copied from host to device.
        waited_seconds: Time that the host has waited for downloads and swaps, seconds.
        collectives: Number of collectives among ranks, not counting DDP's.
        communicated_bytes: Input bytes of these collectives on this rank.
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
        """Add `nbytes`, which may be negative, to `live_bytes`."""
        self.live_bytes += nbytes
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)


T = TypeVar("T")


class PendingUpload(Generic[T]):
    """An upload that waits for a job of the host's worker to write its source.

    Uploads are requested in the order of the next forward, but optimizer steps during backward end in the opposite
    order. If each upload were issued as soon as its job ends, the chunk that is needed first would arrive last. So an
    upload is issued after its job and after all uploads requested before it.

    Args:
        job: Job that writes the source.
        issue: Issues the upload and returns its event. Called on the worker thread, unless the job raised.
        before: Previous pending upload; None if there is none.
    """

    def __init__(self, job: Job, issue: Callable[[], T], before: PendingUpload[Any] | None = None) -> None:
        self._job: Job | None = job
        self._issue: Callable[[], T] | None = issue
        self._before = before
        self._event: Future[T | None] = Future()
        job.add_done_callback(self._job_ended)

    @property
    def is_issued(self) -> bool:
        """True if the upload has been issued, or if its job raised, so that no upload will follow."""
        return self._event.done()

    def event(self) -> T | None:
        """Wait until the upload is issued and return its event, or None if its job raised.

        The job's own exception is raised where the job is waited for, not here.

        Raises:
            RuntimeError: If issuing the upload raised.
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
        # Free what belongs to the job, because callers may keep this object for its event.
        self._before = self._job = self._issue = None
        try:
            event = issue()
        except RuntimeError as error:
            self._event.set_exception(error)  # Raised by `event`, on the thread that calls it.
        else:
            self._event.set_result(event)


def event_of(fence: T | PendingUpload[T] | None) -> T | None:
    """Return the event of a copy, after waiting until the copy is issued; None if there is nothing to wait for.

    Raises:
        RuntimeError: If issuing a pending upload raised.
    """
    return fence.event() if isinstance(fence, PendingUpload) else fence


@dataclass
class Device(ABC):
    """A device to train on: copies tensors between itself and the host, and counts the bytes.

    Attributes:
        torch_device: The PyTorch device.
        counters: Counters of all transfers.
        host: Allocator of host memory, page-locked if the device is a GPU.
        worker: Worker thread of the host.
        hold_bytes: Limit on the total size of the sources of running downloads, bytes.
        aside: Context in which a second stream is current, for work that does not delay the compute stream.
        recording: Recording of the streams' work; None if nothing is recorded.
        kept: Host memory that forked processes do not inherit; None if there is none.
        others_bytes: Bytes on the device that belong to no run, such as another model of a notebook; in no peak.
    """

    torch_device: torch.device
    counters: TransferCounters = field(default_factory=TransferCounters)
    host: HostMemory = field(default_factory=HostMemory)
    worker: HostWorker = field(default_factory=HostWorker)
    hold_bytes: int = 0
    aside: AbstractContextManager[object] = field(default_factory=nullcontext)
    recording: Recording | None = None
    kept: KeptFromForks | None = None
    others_bytes: int = 0

    @property
    def numa_node(self) -> int | None:
        """NUMA node that the device is next to; None: unknown, or the CPU."""
        return None

    @abstractmethod
    def upload(self, source: Tensor, target: Tensor, after: Job | None = None) -> Any:
        """Copy `source` (host) to `target` (device) once job `after` has ended; return a fence for `wait`."""

    @abstractmethod
    def wait(self, fence: Any) -> None:
        """Make the compute stream wait until the upload behind `fence` has ended."""

    @abstractmethod
    def download(self, source: Tensor, target: Tensor) -> Any:
        """Copy `source` (device) to `target` (host), holding `source` meanwhile; return a fence for `wait_host`."""

    @abstractmethod
    def wait_host(self, fence: Any) -> None:
        """Block the host until the copy behind `fence` has ended; return at once if `fence` is None."""

    @contextmanager
    def recorded(self) -> Iterator[Recording]:
        """Record the work of the streams within this context."""
        self.synchronize()
        self.recording = Recording(self)
        try:
            yield self.recording
        finally:
            self.recording = None

    def span(self, lane: Lane, what: str = "") -> AbstractContextManager[None]:
        """Return a context that records the work queued on the stream of a lane, if a recording is active."""
        return nullcontext() if self.recording is None else self.recording.span(lane, what)

    def mark(self, lane: Lane) -> Any:
        """Return a timing mark after the work queued on the stream of a lane, for `seconds_between`."""
        return time.perf_counter()

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks that the device has reached."""
        return float(end - begin)

    def host_clock(self) -> float:
        """Return the host's clock, seconds."""
        return time.perf_counter()

    def note_host(self, tensor: Tensor) -> None:
        """Register a host weight, for simulated devices that assign operations to threads."""
        return

    def has_ended(self, fence: Any) -> bool:
        """Return True if the download or swap behind `fence` has ended, so that `wait_host` would not block."""
        return True

    def after_downloads(self) -> Any:
        """Return an event after all downloads issued so far; None: they have ended."""
        return None

    @abstractmethod
    def settle(self) -> None:
        """Block the host until all uploads have ended, so that host weights may be written to."""

    @abstractmethod
    def swap_out(self, source: Tensor, target: Tensor) -> None:
        """Copy `source` (device) to `target` (host).

        The caller keeps both tensors until it has waited for a later `after_swaps`. There may be any number of swaps.
        """

    def after_swaps(self) -> Any:
        """Return a fence for `wait` and `wait_host`, after all swaps to the host issued so far."""
        return None

    @abstractmethod
    def swap_in(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Sequence[Any]:
        """Copy each source (host) to its target (device), in order; return a fence for `wait` and `wait_host` for each.

        The caller keeps the tensors until it has waited for the fence.
        """

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Resize `storage` to `nbytes` on the compute stream; 0 frees its memory."""
        storage.resize_(nbytes)

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Return the free device memory in bytes, or None on the CPU."""

    def exclude_others(self, own_bytes: int) -> None:
        """Set `others_bytes` to what is on the device now, except `own_bytes`."""
        return

    def peak_bytes(self) -> int | None:
        """Return the run's peak of allocated bytes since `forget_peak`, or None on the CPU."""
        return None

    def allocator_stats(self) -> dict[str, int]:
        """Return the run's peak of reserved bytes since `forget_peak` and the number of retries; empty on the CPU.

        In a retry, the caching allocator waits for the device and returns cached memory to the driver.
        """
        return {}

    def forget_peak(self) -> None:
        """Reset the peaks of allocated and reserved bytes."""
        return

    def forget_counters(self) -> None:
        """Reset the counters of transfers, and the peaks."""
        vars(self.counters).update(vars(TransferCounters(live_bytes=self.counters.live_bytes)))
        self.forget_peak()

    def synchronize(self) -> None:
        """Block the host until all queued work of the device has ended."""
        return

    def describe(self) -> dict[str, str]:
        """Return the device's `name` and, on a GPU, its PCI `address`."""
        return {"name": self.torch_device.type}

    def new_host_memory(self) -> HostMemory:
        """Return a second, temporary allocator like `host`; the caller closes it."""
        return HostMemory()

    def keep_from_forks(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Keep host tensors from forked processes until `close`, see [Note: Forks] in host.py.

        Args:
            tensors: Returns the tensors; called before each fork.
        """
        self.kept = KeptFromForks(tensors)

    def trim(self) -> None:
        """Return cached device memory to the driver."""
        return

    def close(self) -> None:
        """End the worker thread and unlock host memory; the device cannot be used afterwards."""
        self.kept = None
        try:
            self.worker.close()
        finally:
            self.host.close()


class CPUDevice(Device):
    """The CPU as a device, with synchronous copies."""

    def upload(self, source: Tensor, target: Tensor, after: Job | None = None) -> PendingUpload[Tensor] | None:
        self.counters.uploaded_bytes += source.nbytes
        if after is not None:
            return PendingUpload(after, lambda: target.copy_(source))
        with self.span("upload"):
            target.copy_(source)
        return None

    def wait(self, fence: PendingUpload[Tensor] | None) -> None:
        if fence is not None:
            fence.event()

    def download(self, source: Tensor, target: Tensor) -> None:
        with self.span("download"):
            target.copy_(source)
        self.counters.downloaded_bytes += source.nbytes

    def wait_host(self, fence: object) -> None:
        return

    def settle(self) -> None:
        return

    def swap_out(self, source: Tensor, target: Tensor) -> None:
        with self.span("swap_out"):
            target.copy_(source)
        self.counters.swapped_out_bytes += source.nbytes

    def swap_in(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Sequence[None]:
        for source, target in copies:
            with self.span("swap_in"):
                target.copy_(source)
            self.counters.swapped_in_bytes += source.nbytes
        return [None] * len(copies)

    def free_bytes(self) -> int | None:
        return None


class Stream(Protocol):
    """The common interface of `torch.cuda.Stream` and its simulation in tests."""

    def wait_event(self, event: Any) -> None:
        """Make later work of this stream wait for `event`."""

    def wait_stream(self, stream: Any) -> None:
        """Make later work of this stream wait for all work queued on `stream`."""

    def record_event(self) -> Any:
        """Return an event after the work queued so far."""


class StreamDevice(Device):
    """A device with a compute stream and four copying streams.

    Args:
        torch_device: The PyTorch device.
        host: Host memory that the device copies to and from without blocking.
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
        """Return the stream that runs the model."""

    @abstractmethod
    def copy(self, stream: Any, source: Tensor, target: Tensor) -> None:
        """Queue a copy on `stream` without blocking the host."""

    def record(self, stream: Any) -> Event:
        """Return an event after the work queued on a copying stream."""
        event: Event = stream.record_event()
        return event

    def upload(self, source: Tensor, target: Tensor, after: Job | None = None) -> Event | PendingUpload[Event]:
        self.counters.uploaded_bytes += source.nbytes
        computed = self.compute_stream().record_event()

        def issue() -> Event:
            self._up.wait_event(computed)
            with self.span("upload"):
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
        with self.span("stall"):
            if (event := event_of(fence)) is not None:
                self.compute_stream().wait_event(event)

    def download(self, source: Tensor, target: Tensor) -> Event:
        # The host runs ahead of the device: without a limit, all gradients would accumulate on the device. A source may
        # be freed after the compute stream has waited for its download, because only that stream reuses its memory.
        self._let_go(max(self.hold_bytes - source.nbytes, 0))
        self._down.wait_stream(self.compute_stream())
        with self.span("download"):
            self.copy(self._down, source, target)
        self.counters.downloaded_bytes += source.nbytes
        fence = self.record(self._down)
        self._held.append((fence, source))
        return fence

    def wait_host(self, fence: Event | PendingUpload[Event] | None) -> None:
        began = time.perf_counter()
        _block(fence)
        self.counters.waited_seconds += time.perf_counter() - began

    def has_ended(self, fence: Event | None) -> bool:
        return fence is None or fence.query()

    def after_downloads(self) -> Event:
        return self.record(self._down)

    def settle(self) -> None:
        while self._uploads:
            _block(self._uploads[0])
            self._uploads.popleft()
        self._let_go()

    def swap_out(self, source: Tensor, target: Tensor) -> None:
        self.counters.swapped_out_bytes += source.nbytes
        self._out.wait_stream(self.compute_stream())
        with self.span("swap_out"):
            self.copy(self._out, source, target)

    def after_swaps(self) -> Event:
        return self.record(self._out)

    def swap_in(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Sequence[Event]:
        fences = []
        if copies:
            self._in.wait_stream(self.compute_stream())
        for source, target in copies:
            with self.span("swap_in"):
                self.copy(self._in, source, target)
            self.counters.swapped_in_bytes += source.nbytes
            fences.append(self.record(self._in))
        return fences

    def mark(self, lane: Lane) -> Any:
        copies = {"upload": self._up, "download": self._down, "swap_out": self._out, "swap_in": self._in}
        return self.mark_stream(copies.get(lane) or self.compute_stream())

    def mark_stream(self, stream: Any) -> Any:
        """Return a timing mark after the work queued on a stream, for `seconds_between`."""
        return stream.record_event()

    def synchronize(self) -> None:
        for stream in (self._up, self._down, self._out, self._in, self.compute_stream()):
            stream.record_event().synchronize()

    def close(self) -> None:
        try:
            self.settle()
            for stream in (self._down, self._out, self._in):
                stream.record_event().synchronize()
        finally:  # A failed device raises at every call; the worker and host memory are closed nevertheless.
            self._held.clear()
            super().close()

    def _let_go(self, most: float = float("inf")) -> None:
        """Release sources of finished downloads, then the oldest ones until at most `most` bytes are held."""
        while self._held and (sum(held.nbytes for _, held in self._held) > most or self._held[0][0].query()):
            with self.span("stall"):
                self.compute_stream().wait_event(self._held[0][0])
            self._held.popleft()


def _block(fence: Event | PendingUpload[Event] | None) -> None:
    if (event := event_of(fence)) is not None:
        event.synchronize()


class CUDADevice(StreamDevice):
    """A CUDA device.

    Args:
        torch_device: The CUDA device.
        log_once: Called with a warning for the user.
    """

    def __init__(self, torch_device: torch.device, log_once: Callable[[str], None]) -> None:
        memory = HostMemory(self._lock, self._unlock, self._touch)
        super().__init__(torch_device, memory, lambda name: torch.cuda.Stream(torch_device))
        cores = worker_cores(node=numa_node(torch_device))
        # Select this GPU on the worker thread. The default is GPU 0, on which the thread of every rank would otherwise
        # allocate a CUDA context.
        self.worker = HostWorker(step_threads(cores), cores, partial(torch.cuda.set_device, torch_device))
        self.aside = torch.cuda.stream(torch.cuda.Stream(torch_device))
        self._log_once = log_once
        self._pageable = False
        self._merge_free_memory()

    @property
    def numa_node(self) -> int | None:
        return numa_node(self.torch_device)

    def _merge_free_memory(self) -> None:
        """Enable expandable segments of the caching allocator, unless the user has configured the allocator.

        Without them, the memory of a freed chunk that was split for a smaller tensor cannot hold the next chunk.
        Reserved memory grows until the allocator calls `cudaFree`, which waits for the device.
        """
        settings = allocator_settings()
        if not settings:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        elif "expandable_segments:true" not in settings.replace(" ", "").lower():
            self._log_once(
                f"The memory of the GPU may fragment: PYTORCH_ALLOC_CONF={settings!r} leaves expandable segments off. "
                "Add expandable_segments:True to it, or leave the variable out."
            )

    def compute_stream(self) -> Stream:
        return torch.cuda.current_stream(self.torch_device)

    def record(self, stream: torch.cuda.Stream) -> Event:
        # With a blocking event the waiting thread sleeps. By default it would spin on a core that steps the optimizer.
        event: Event = stream.record_event(torch.cuda.Event(blocking=True))
        return event

    def mark_stream(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        return stream.record_event(torch.cuda.Event(enable_timing=True))

    def seconds_between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1000

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

    def exclude_others(self, own_bytes: int) -> None:
        gc.collect()  # What an earlier run has left in a cycle would be freed in this one.
        # The first products of a process allocate the workspaces of cuBLAS, up to 33 MiB, for good.
        small = torch.zeros(16, 16, device=self.torch_device)
        torch.addmm(small[0], small, small @ small)
        del small
        self.others_bytes = max(torch.cuda.memory_allocated(self.torch_device) - own_bytes, 0)

    def peak_bytes(self) -> int | None:
        return max(torch.cuda.max_memory_allocated(self.torch_device) - self.others_bytes, 0)

    def allocator_stats(self) -> dict[str, int]:
        retries = torch.cuda.memory_stats(self.torch_device).get("num_alloc_retries", 0)
        reserved = max(torch.cuda.max_memory_reserved(self.torch_device) - self.others_bytes, 0)
        return {"reserved_peak_bytes": reserved, "alloc_retries": retries}

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self.others_bytes = min(self.others_bytes, torch.cuda.memory_allocated(self.torch_device))

    def trim(self) -> None:
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()

    def _touch(self, block: Tensor) -> None:
        """Write to a new block on the worker's threads, so that Linux places its pages on their NUMA node."""
        self.worker.submit(block.zero_).result()

    def _lock(self, address: int, size: int) -> bool:
        if self._pageable:
            return False
        if (code := self._register(address, size)) != 0:
            self._pageable = True
            self._log_once(
                f"Host memory cannot be page-locked (cudaHostRegister returned {code} for {size} bytes): transfers run "
                f"slower and do not overlap. {_why_not_locked()}"
            )
        return code == 0

    def _register(self, address: int, size: int) -> int:
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if code != 0:
            # CUDA keeps the error, and PyTorch would raise it after its next kernel. Running a kernel here clears it.
            with suppress(RuntimeError):
                torch.ones(1, device=self.torch_device)
        return code

    def _unlock(self, address: int) -> None:
        code = int(torch.cuda.cudart().cudaHostUnregister(address))
        if code != 0:
            raise RuntimeError(f"Host memory stays page-locked: cudaHostUnregister returned {code} at {address:#x}.")


def _why_not_locked() -> str:
    """Return what to change so that host memory can be page-locked."""
    if resource is not None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if limit != resource.RLIM_INFINITY:
            return f"Raise the limit on locked memory (`ulimit -l`), which is {limit // 1024} KiB."
    return "The limit on locked memory (`ulimit -l`) is not the reason: the driver refuses, or host memory is short."


def open_device(torch_device: torch.device, log_once: Callable[[str], None]) -> Device:
    """Return the `Device` of a PyTorch device.

    Args:
        torch_device: A CPU or CUDA device.
        log_once: Called with a warning for the user.

    Raises:
        ValueError: If the device is neither a CPU nor a CUDA device.
    """
    if torch_device.type == "cuda":
        return CUDADevice(torch_device, log_once)
    if torch_device.type == "cpu":
        return CPUDevice(torch_device)
    raise ValueError(
        f"Weights cannot be streamed to a device of type {torch_device.type!r}. Train on CUDA or on the CPU."
    )


def why_no_gpu() -> str:
    """Return why this process can use no GPU, and a remedy, as the end of a sentence; empty if it can use one."""
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for CPUs only. Install a build of torch for the GPU."
    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    try:
        torch.cuda.init()
        reason = "No GPU is available"
    except RuntimeError as error:  # There is no driver, the driver is too old, or no device is visible.
        reason = str(error).partition("\n")[0].strip().rstrip(".")
    return f"torch, built for {kind}, finds none: {reason}. Check with `nvidia-smi` and CUDA_VISIBLE_DEVICES."
