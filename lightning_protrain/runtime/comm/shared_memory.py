"""Host memory that the ranks of a node share, and the owner of each weight in it.

[Note: Owners]
Under `shard` every offloaded parameter is owned by one rank of each node. Only this rank gets its gradient, keeps its
optimizer state, and writes the host weight that all ranks of the node read. Parameters are owned whole, as in PyTorch's
ZeroRedundancyOptimizer. So an optimizer that needs a whole matrix (Adafactor, Muon, LAMB) is exact, and no optimizer
needs to know of owners. The cost is small: what two ranks of a node step differs by at most the largest parameter.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

try:
    import fcntl
except ImportError:  # Windows, where ranks share no memory
    fcntl = None  # type: ignore[assignment]

from lightning_protrain.config import format_bytes
from lightning_protrain.device.device import Device
from lightning_protrain.device.host import PAGE, HostMemory, in_block
from lightning_protrain.device.topology import interleave, nodes_to_fill
from lightning_protrain.planner.plan import ChunkPlan
from lightning_protrain.runtime.comm.collectives import RankMesh
from lightning_protrain.runtime.param import dense_like

FOLDER = Path("/dev/shm")
# Linux flag that Python does not name.
_MAP_FIXED = 0x10
# Offset of the bytes that record locks hold, beyond the end of any file: the byte of `alone`, then one for each rank.
_LOCKS = 1 << 62
_COUNTER_BYTES = 8


class NodeMemory:
    """Shared memory of a node, handed out in blocks.

    The memory is a file in an in-memory file system. The first rank of the node creates it, if there is room for its
    full size, and unlinks it when all ranks have opened it: nothing is left behind, however the ranks end. All ranks
    take blocks in the same order, so the same weight lies at the same offset. The rank that fills a block allocates it
    just before, and then frees its own memory of the weight, so a node never holds all weights twice. Blocks are
    page-locked after all are filled, because page-locking allocates, too.

    The kernel's record locks on the file belong to a process, are not inherited by its children, and are released when
    it ends, however it ends. Each rank holds one byte as long as it takes part. So a rank that can lock the byte of
    another rank knows that the other rank is gone, even if the parent process has not noticed. `alone` holds one more
    byte.

    Args:
        descriptor: Descriptor of the open file; `part` closes it.
        nbytes: Size of the file, bytes.
        host: Host memory of the device, which page-locks the file if it page-locks its own blocks.
        fills: Whether this rank writes the initial values.
        num_counters: Number of 64-bit counters at the end of the memory, initially zero.

    Attributes:
        counters: Shared 64-bit counters, as a memoryview.
    """

    def __init__(self, descriptor: int, nbytes: int, host: HostMemory, fills: bool, num_counters: int = 0) -> None:
        self.fills = fills
        self.nbytes = nbytes
        self._descriptor = descriptor
        self._block = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
        self._end = 0
        self._room = nbytes - num_counters * _COUNTER_BYTES
        self.counters = memoryview(self._block)[self._room : nbytes].cast("q")
        self._mutex = threading.Lock()
        self._host = host
        if fills and num_counters:
            os.posix_fallocate(descriptor, self._room, nbytes - self._room)

    def empty(self, nbytes: int) -> memoryview:
        """Return the next `nbytes` bytes, from the start of a page.

        Raises:
            ValueError: Another process has taken the memory since the file was opened.
        """
        begin, self._end = self._end, self._end + pages(nbytes)
        assert self._end <= self._room, f"{self._end} bytes of node memory are wanted, {self._room} are there"
        try:
            if self.fills:
                os.posix_fallocate(self._descriptor, begin, self._end - begin)
        except OSError as failure:
            raise ValueError(
                f"The memory that the ranks of a node share ends at {format_bytes(begin)} of "
                f"{format_bytes(self.nbytes)}: {failure}. "
                'Something else has taken it since it was opened: free that, or set sharding="replicate".'
            ) from failure
        return memoryview(self._block)[begin : begin + nbytes]

    def interleave(self, nodes: Sequence[int]) -> None:
        """Spread the blocks over NUMA nodes, if the system permits it; call it before the first block is taken.

        All GPUs of a node read all weights. Without it, all pages would lie on the NUMA node of the rank that fills
        them, and the GPUs would share its memory channels and the link between the sockets.

        Args:
            nodes: Numbers of the NUMA nodes.
        """
        if self.fills:
            interleave(self._block, nodes)

    def lock(self) -> None:
        """Page-lock the memory if the device page-locks its own blocks; call it after every block is filled."""
        self._host.lock_block(self._block)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude all other threads of all ranks of the node, so that counters and data are written in order.

        The writer writes data, and then a counter within `alone`. A reader that has seen the new counter enters `alone`
        before it reads the data. It does so after the writer has left `alone`, so it sees the data.
        """
        with self._mutex:  # Record locks belong to the process, not to the thread.
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, _LOCKS)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _LOCKS)

    def is_held(self, place: int) -> bool:
        """Return whether another rank of the node still takes part.

        Args:
            place: Index of that rank on the node.
        """
        with self._mutex:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOCKS + 1 + place)
            except BlockingIOError:
                return True
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _LOCKS + 1 + place)
            return False

    def make_private(self) -> None:
        """Make this rank's view of the memory private after a run; tensors stay where they are.

        Pages stay shared until they are written to, so nothing is copied now.
        """
        if self._descriptor < 0:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        address = torch.frombuffer(self._block, dtype=torch.uint8).data_ptr()
        kind, access = mmap.MAP_PRIVATE | _MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
        mapped = libc.mmap(address, self.nbytes, access, kind, self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = -1
        if mapped != address:
            raise OSError(ctypes.get_errno(), "The memory that ranks have shared cannot be made private")

    def adopt(self, parameter: nn.Parameter) -> None:
        """Move the data of a parameter to a block of its own."""
        if parameter.numel():
            data = in_block(self.empty(parameter.nbytes), 0, dense_like(parameter), parameter.dtype)
            if self.fills:
                data.copy_(parameter.detach())
            parameter.data = data


def open_node_memory(
    ranks: RankMesh, nbytes: int, host: HostMemory, folder: Path = FOLDER, num_counters: int = 0
) -> NodeMemory:
    """Open shared memory for the ranks of this node; all ranks of all nodes call it.

    Args:
        ranks: Ranks of the run.
        nbytes: Size of all blocks that will be taken, each in whole pages, bytes.
        host: Host memory of the device.
        folder: Folder of an in-memory file system.
        num_counters: Number of counters that the ranks share beside the blocks.

    Raises:
        ValueError: Some node has too little room, or a rank does not see the file of its node.
    """
    nbytes = with_counters(nbytes, num_counters)
    fills = ranks.local_rank == 0
    path, error = _create(nbytes, folder) if fills else ("", "")
    told: list[tuple[str, str]] = [("", "")] * ranks.world_size
    dist.all_gather_object(told, (path, error))
    if (refused := next((text for _, text in told if text), None)) is not None:
        if path:
            os.unlink(path)
        raise ValueError(refused)
    descriptor, error = _open(told[ranks.first_of_node][0])
    if not error:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOCKS + 1 + ranks.local_rank)
    dist.all_gather_object(told, ("", f"Rank {ranks.rank}: {error}" if error else ""))
    if fills:
        os.unlink(path)  # All ranks have opened it.
    if (refused := next((text for _, text in told if text), None)) is not None:
        if descriptor >= 0:
            os.close(descriptor)
        raise ValueError(refused)
    return NodeMemory(descriptor, nbytes, host, fills, num_counters)


def pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole pages, at least one."""
    return max(-(-nbytes // PAGE), 1) * PAGE


def with_counters(nbytes: int, num_counters: int) -> int:
    """Return the size of `nbytes` of blocks with `num_counters` counters behind them, bytes."""
    return nbytes + (pages(num_counters * _COUNTER_BYTES) if num_counters else 0)


def free_shared_bytes(folder: Path = FOLDER) -> int:
    """Return the bytes of memory that ranks of this node could share now, 0 without an in-memory file system.

    Args:
        folder: See `open_node_memory`.
    """
    if not folder.is_dir():
        return 0
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def _create(nbytes: int, folder: Path) -> tuple[str, str]:
    """Create a file of `nbytes`; return its path and "", or "" and the reason for the failure."""
    free = free_shared_bytes(folder)
    if free < nbytes:
        return "", (
            f'sharding="shard" keeps {format_bytes(nbytes)} of weights in memory that the ranks of a node share, and '
            f"{folder} has {format_bytes(free)} free. Give it more (`mount -o remount,size=...`, `docker run "
            '--shm-size`), or set sharding="replicate".'
        )
    try:
        descriptor, path = tempfile.mkstemp(prefix="protrain-", dir=folder)
    except OSError as failure:
        return "", f"{folder} does not take files, and the ranks of a node share weights there: {failure}."
    try:
        os.truncate(descriptor, nbytes)
    except OSError as failure:
        os.unlink(path)
        return "", f"{folder} does not give the {format_bytes(nbytes)} that the weights of a node need: {failure}."
    finally:
        os.close(descriptor)
    return path, ""


def _open(path: str) -> tuple[int, str]:
    """Open the file `path`; return its descriptor and "", or -1 and the reason for the failure."""
    try:
        return os.open(path, os.O_RDWR), ""
    except OSError as failure:
        return -1, (
            f'sharding="shard" needs memory that the ranks of a node share, and this one does not see {path}, which '
            f'the first one has made: {failure}. Run them in one container, or set sharding="replicate".'
        )


@dataclass(frozen=True)
class Share:
    """A chunk that the ranks of a node share, seen from one rank, see [Note: Owners].

    Attributes:
        memory: Shared memory of the node.
        owners: Local rank of the owner of each parameter.
        local_rank: Index of this rank on its node.
    """

    memory: NodeMemory
    owners: tuple[int, ...]
    local_rank: int

    def owns(self, at: int) -> bool:
        """Return whether this rank steps a parameter.

        Args:
            at: Index of the parameter in the chunk.
        """
        return self.owners[at] == self.local_rank


def assign_owners(chunks: Sequence[Sequence[int]], num_ranks: int) -> list[list[int]]:
    """Assign owners to parameters, so that ranks have about equal bytes to step in each chunk and in total.

    Args:
        chunks: Size of each parameter of each chunk, in execution order, bytes.
        num_ranks: Number of ranks of a node.

    Returns:
        Local rank of the owner of each parameter, by chunk.
    """
    loads = [0] * num_ranks
    owners = []
    for sizes in chunks:
        mine = [0] * len(sizes)
        # Largest parameter first, each to the rank with the least: no rank exceeds the mean by more than one parameter.
        for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
            mine[at] = min(range(num_ranks), key=loads.__getitem__)
            loads[mine[at]] += sizes[at]
        owners.append(mine)
    return owners


def num_counters(num_chunks: int, num_ranks: int) -> int:
    """Return the number of counters that the ranks of a node share, see [Note: Step sync].

    Args:
        num_chunks: Number of shared chunks.
        num_ranks: Number of ranks of the node.
    """
    return (2 + num_chunks) * num_ranks


def shared_bytes(chunks: Sequence[ChunkPlan], nbytes: Mapping[str, int], num_ranks: int) -> int:
    """Return the size of the shared memory that `share_chunks` takes on a node, bytes.

    Args:
        chunks: All offloaded chunks.
        nbytes: Size of each parameter of the model, by first name, bytes.
        num_ranks: Number of ranks of the node.
    """
    return with_counters(_block_bytes(chunks, nbytes), num_counters(len(chunks), num_ranks)) if chunks else 0


def share_chunks(
    chunks: Sequence[ChunkPlan], parameters: Mapping[str, nn.Parameter], ranks: RankMesh, device: Device
) -> list[Share]:
    """Open shared memory for offloaded chunks, and return this rank's view of each chunk; every rank calls it.

    Args:
        chunks: All offloaded chunks, in execution order.
        parameters: Parameters of the model, by first name.
        ranks: Ranks that share the chunks.
        device: Device of this rank.

    Raises:
        ValueError: There is too little memory that the ranks can share.
    """
    nbytes = _block_bytes(chunks, {fqn: parameter.nbytes for fqn, parameter in parameters.items()})
    memory = open_node_memory(ranks, nbytes, device.host, num_counters=num_counters(len(chunks), ranks.local_size))
    near: list[int | None] = [None] * ranks.world_size
    dist.all_gather_object(near, device.numa_node)
    memory.interleave(nodes_to_fill(near[ranks.first_of_node :][: ranks.local_size]))
    sizes = [[parameters[fqn].nbytes for fqn in chunk.parameters] for chunk in chunks]
    owners = assign_owners(sizes, ranks.local_size)
    return [Share(memory, tuple(mine), ranks.local_rank) for mine in owners]


def _block_bytes(chunks: Sequence[ChunkPlan], nbytes: Mapping[str, int]) -> int:
    masters = [nbytes[fqn] for chunk in chunks if chunk.streamed_dtype for fqn in chunk.parameters]
    return sum(pages(chunk.nbytes) for chunk in chunks) + sum(map(pages, masters))
