"""Where bytes live and how they move: the only file that names `torch.cuda`.

[Note: Streams]
All kernels of the model run on the *compute stream*, and all storages of chunks are allocated and freed on it, so that
they share one heap with the activations and freed memory is reused without fragmentation. Two more streams copy: one
up (host to device), one down. Five fences order them, and no other is needed:

1. An upload waits for everything the compute stream has been given so far, because the memory it fills may still be
   read by an earlier kernel under another name.
2. The compute stream waits for an upload where its bytes are first used, or where its memory is freed unused.
3. A download waits for everything the compute stream has been given so far; its source is held until it has ended,
   which replaces `record_stream`; no more than two are held.
4. The host waits for a download before it reads what has landed.
5. The host waits for the uploads before anybody may write to the weights they read: at the end of every backward and
   of every evaluation step.
"""

from __future__ import annotations

import mmap
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

PAGE = mmap.PAGESIZE


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
    """

    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    uploads: int = 0
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    live_bytes: int = 0
    peak_live_bytes: int = 0

    def add_live(self, nbytes: int) -> None:
        """Counts `nbytes` more (or fewer, if negative) on the device."""
        self.live_bytes += nbytes
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)


class HostMemory:
    """Exact-size, page-aligned host memory whose blocks return by themselves.

    PyTorch's pinned allocator rounds up to powers of two, which can double what is locked; these blocks are anonymous
    maps of whole pages. A block goes back to the free list when the last tensor over it dies, so a gradient that
    somebody still holds is never overwritten.

    Args:
        lock: Called with (address, bytes) of a new block; returns whether it is page-locked now.
        unlock: Called with the address of a locked block when the memory is closed.
    """

    def __init__(
        self, lock: Callable[[int, int], bool] | None = None, unlock: Callable[[int], None] | None = None
    ) -> None:
        self._lock = lock
        self._unlock = unlock
        self._free: dict[int, deque[mmap.mmap]] = {}
        self._locked: dict[int, mmap.mmap] = {}
        self._open = True
        self.allocated_bytes = 0

    @property
    def locked_bytes(self) -> int:
        """Bytes that are page-locked now."""
        return sum(len(block) for block in self._locked.values())

    def empty(self, nbytes: int) -> memoryview:
        """A block of at least `nbytes` uninitialised bytes; returned to the free list when no tensor uses it."""
        assert self._open, "host memory asked for after it was closed"
        size = max(-(-nbytes // PAGE) * PAGE, PAGE)
        free = self._free.get(size)
        block = free.popleft() if free else self._new_block(size)
        view = memoryview(block)
        weakref.finalize(view, self._give_back, block).atexit = False
        return view

    def empty_like(self, tensor: Tensor) -> Tensor:
        """An uninitialised host tensor of the shape, strides and dtype of `tensor`, which must be dense."""
        empty = torch.empty(0, dtype=tensor.dtype)
        if tensor.numel() == 0:
            return empty.new_empty(tensor.shape)
        flat = torch.frombuffer(self.empty(tensor.nbytes), dtype=tensor.dtype, count=tensor.numel())
        return empty.set_(flat.untyped_storage(), 0, tensor.shape, tensor.stride())

    def close(self) -> None:
        """Unlocks every block and forgets the free ones. Tensors over blocks stay valid."""
        while self._locked:
            address, _ = next(iter(self._locked.items()))
            assert self._unlock is not None
            self._unlock(address)
            del self._locked[address]
        self._free.clear()
        self._open = False

    def _new_block(self, size: int) -> mmap.mmap:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.allocated_bytes += size
        if self._lock is not None:
            address = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
            if self._lock(address, size):
                self._locked[address] = block
        return block

    def _give_back(self, block: mmap.mmap) -> None:
        if self._open:
            self._free.setdefault(len(block), deque()).append(block)


@dataclass
class Device(ABC):
    """A place to train on: moves bytes between it and the host, and counts them.

    Attributes:
        torch_device: What PyTorch calls it.
        counters: What has been moved.
        host: Host memory that this device can copy to and from at full speed.
    """

    torch_device: torch.device
    counters: TransferCounters = field(default_factory=TransferCounters)
    host: HostMemory = field(default_factory=HostMemory)

    @abstractmethod
    def upload(self, source: Tensor, target: Tensor) -> Any:
        """Copies `source` (host) to `target` (device); returns a fence that `wait` takes."""

    @abstractmethod
    def wait(self, fence: Any) -> None:
        """Makes the compute stream wait until the upload behind `fence` has ended."""

    @abstractmethod
    def download(self, source: Tensor, target: Tensor) -> Any:
        """Copies `source` (device) to `target` (host) and holds `source` meanwhile; returns a fence for `land`."""

    @abstractmethod
    def land(self, fence: Any) -> None:
        """Blocks the host until the download behind `fence` has ended."""

    @abstractmethod
    def settle(self) -> None:
        """Blocks the host until every upload has ended, so that host weights may be written to."""

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Gives `storage` `nbytes` of device memory (0: frees it), in the order of the compute stream."""
        storage.resize_(nbytes)

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Bytes a plan may use, or None where no budget is known (the CPU has only the one it is given)."""

    def close(self) -> None:
        """Releases page-locked memory; the device is of no use afterwards."""
        self.host.close()


class CPUDevice(Device):
    """The CPU as a device: copies are synchronous, the budget is the one the user names."""

    def upload(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)
        self.counters.uploaded_bytes += source.nbytes

    def wait(self, fence: None) -> None:
        return

    def download(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)
        self.counters.downloaded_bytes += source.nbytes

    def land(self, fence: None) -> None:
        return

    def settle(self) -> None:
        return

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
    """A device with a compute stream and two copying streams, see [Note: Streams].

    Args:
        torch_device: What PyTorch calls it.
        host: Host memory that it copies to and from without blocking.
        up: The stream of uploads.
        down: The stream of downloads.
    """

    def __init__(self, torch_device: torch.device, host: HostMemory, up: Stream, down: Stream) -> None:
        super().__init__(torch_device, host=host)
        self._up = up
        self._down = down
        self._uploaded: Event | None = None
        self._held: deque[tuple[Event, Tensor]] = deque()

    @abstractmethod
    def compute_stream(self) -> Stream:
        """The stream that runs the model."""

    @abstractmethod
    def copy(self, stream: Any, source: Tensor, target: Tensor) -> None:
        """Gives `stream` a copy that does not block the host."""

    def upload(self, source: Tensor, target: Tensor) -> Event:
        self._up.wait_stream(self.compute_stream())
        self.copy(self._up, source, target)
        self.counters.uploaded_bytes += source.nbytes
        self._uploaded = self._up.record_event()
        return self._uploaded

    def wait(self, fence: Event) -> None:
        self.compute_stream().wait_event(fence)

    def download(self, source: Tensor, target: Tensor) -> Event:
        while len(self._held) > 1 or (self._held and self._held[0][0].query()):
            # The host runs ahead: without a bound all gradients would pile up on the device.
            self._drop_held()
        self._down.wait_stream(self.compute_stream())
        self.copy(self._down, source, target)
        self.counters.downloaded_bytes += source.nbytes
        fence: Event = self._down.record_event()
        self._held.append((fence, source))
        return fence

    def land(self, fence: Event) -> None:
        fence.synchronize()

    def settle(self) -> None:
        if self._uploaded is not None:
            self._uploaded.synchronize()
            self._uploaded = None

    def close(self) -> None:
        self.settle()
        while self._held:
            self._drop_held()
        super().close()

    def _drop_held(self) -> None:
        self._held[0][0].synchronize()  # Before it is let go, not after.
        self._held.popleft()


class CUDADevice(StreamDevice):
    """A CUDA device.

    Args:
        torch_device: Which one.
        say: Called once with a sentence if host memory cannot be page-locked.
    """

    def __init__(self, torch_device: torch.device, say: Callable[[str], None]) -> None:
        up, down = torch.cuda.Stream(torch_device), torch.cuda.Stream(torch_device)
        super().__init__(torch_device, HostMemory(self._lock, self._unlock), up, down)
        self._say = say
        self._pageable = False

    def compute_stream(self) -> Stream:
        return torch.cuda.current_stream(self.torch_device)

    def copy(self, stream: torch.cuda.Stream, source: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def free_bytes(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return free + reserved

    def _lock(self, address: int, size: int) -> bool:
        if self._pageable:
            return False
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if code != 0:
            self._pageable = True
            self._say(
                f"Host memory cannot be page-locked (cudaHostRegister returned {code} for {size} bytes): transfers run "
                "slower and do not overlap. Raise the limit on locked memory (`ulimit -l`)."
            )
        return code == 0

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
