"""One copy of the host's weights for the ranks of a node, and which rank steps which weight.

[Note: Node memory]
The memory is a file in a file system that lives in memory. The first rank of the node makes it, if there is room for
its full size, and removes its name when all have opened it: whatever becomes of the ranks, nothing is left behind. All
ranks take blocks of it in the same order, so that the same weight lies at the same place. The rank that fills a block
allocates it just before, in exchange for memory of its own, so a machine never holds all weights twice. Blocks are
page-locked when all are filled: locking allocates, too.

[Note: Record locks]
Two uses of the kernel's record locks on that file, which belong to a process, are not inherited by its children and
are taken back when it ends, however it ends. Each rank holds one byte as long as it takes part: who gets the byte of
another rank knows that it is gone, even if its parent has not noticed. One more byte is held for a moment by whoever
writes or has read a counter, see `NodeMemory.alone`.

[Note: Owners]
Under `shard` every offloaded parameter is owned by one rank of each node: only this rank gets its gradient, keeps its
optimizer state, and writes to the copy of it that all ranks of the node read. Parameters are owned whole, as in
ZeroRedundancyOptimizer of PyTorch: an optimizer that needs a whole matrix (Adafactor, Muon, LAMB) is exact, and none
needs to know. What is lost is little: a node's ranks have as many bytes to step as the largest parameter allows.
"""

from __future__ import annotations

import ctypes
import fcntl
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

from lightning_protrain.device.host import PAGE, HostMemory
from lightning_protrain.planner.plan import ChunkPlan
from lightning_protrain.runtime.comm.collectives import RankMesh
from lightning_protrain.runtime.param import dense_like, in_block

FOLDER = Path("/dev/shm")
# Of Linux; Python does not name it.
_MAP_FIXED = 0x10
# Bytes that are locked lie behind any file: that of one rank after the other, before them the one of `alone`.
_LOCKS = 1 << 62
_COUNTER_BYTES = 8


class NodeMemory:
    """Blocks of one shared mapping, see [Note: Node memory].

    Args:
        descriptor: Of the open file; closed by `part`.
        nbytes: Its size.
        host: Page-locks it, where it does so with its own blocks.
        fills: Whether this rank writes what the memory holds first.
        num_counters: How many 64-bit numbers its end holds; zero at first.

    Attributes:
        counters: They.
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
        """Return the next `nbytes` bytes, which begin a page.

        Raises:
            ValueError: If something else has taken the room since the memory was opened.
        """
        begin, self._end = self._end, self._end + pages(nbytes)
        assert self._end <= self._room, f"{self._end} bytes of node memory are wanted, {self._room} are there"
        try:
            if self.fills:
                os.posix_fallocate(self._descriptor, begin, self._end - begin)
        except OSError as failure:
            raise ValueError(
                f"The memory that the ranks of a node share ends at {begin:,} of {self.nbytes:,} bytes: {failure}. "
                'Something else has taken it since it was opened: free that, or set sharding="replicate".'
            ) from failure
        return memoryview(self._block)[begin : begin + nbytes]

    def lock(self) -> None:
        """Page-locks all of it, where the device does so with its own blocks; when every block is filled."""
        self._host.lock_block(self._block)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it no thread of any rank of the node is in here: what orders counters and what they stand for.

        Who has written something and then, in here, a counter, and who has seen the counter and then been in here,
        agree on the order: the second was here later than the first, so it sees what the first wrote before.
        """
        with self._mutex:  # Record locks are of the process, not of the thread.
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, _LOCKS)
            try:
                yield
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _LOCKS)

    def is_held(self, place: int) -> bool:
        """Return True if another rank of the node still takes part, see [Note: Record locks].

        Args:
            place: Number of that rank on the node.
        """
        with self._mutex:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOCKS + 1 + place)
            except BlockingIOError:
                return True
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _LOCKS + 1 + place)
            return False

    def part(self) -> None:
        """After a run: what this rank writes from now on is its own; tensors stay where they are.

        The pages stay shared until they are written to, so nothing is copied.
        """
        if self._descriptor < 0:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        address = torch.frombuffer(self._block, dtype=torch.uint8).data_ptr()
        kind, access = mmap.MAP_PRIVATE | _MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
        found = libc.mmap(address, self.nbytes, access, kind, self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = -1
        if found != address:
            raise OSError(ctypes.get_errno(), "The memory that ranks have shared cannot be made private")

    def adopt(self, parameter: nn.Parameter) -> None:
        """Move the data of a parameter into a block of this memory."""
        if parameter.numel():
            data = in_block(self.empty(parameter.nbytes), 0, dense_like(parameter), parameter.dtype)
            if self.fills:
                data.copy_(parameter.detach())
            parameter.data = data


def open_node_memory(
    ranks: RankMesh, nbytes: int, host: HostMemory, folder: Path = FOLDER, num_counters: int = 0
) -> NodeMemory:
    """Memory for the ranks of this node; all ranks of all nodes call it.

    Args:
        ranks: Who they are.
        nbytes: The sum of all blocks that are taken of it, each in whole pages.
        host: Memory of the device.
        folder: Of a file system in memory.
        num_counters: How many numbers the ranks share beside the blocks.

    Raises:
        ValueError: There is too little room on some node, or a rank does not see what another one of its node sees.
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
        os.unlink(path)  # Everybody has opened it.
    if (refused := next((text for _, text in told if text), None)) is not None:
        if descriptor >= 0:
            os.close(descriptor)
        raise ValueError(refused)
    return NodeMemory(descriptor, nbytes, host, fills, num_counters)


def pages(nbytes: int) -> int:
    """`nbytes` in whole pages, at least one."""
    return max(-(-nbytes // PAGE), 1) * PAGE


def with_counters(nbytes: int, num_counters: int) -> int:
    """Return the bytes of blocks of `nbytes` bytes with so many counters behind them."""
    return nbytes + (pages(num_counters * _COUNTER_BYTES) if num_counters else 0)


def free_shared_bytes(folder: Path = FOLDER) -> int:
    """Bytes of memory that ranks of this machine could share now; 0 where there is no such file system.

    Args:
        folder: As in `open_node_memory`.
    """
    if not folder.is_dir():
        return 0
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _create(nbytes: int, folder: Path) -> tuple[str, str]:
    """Return the name of a new file of that size, and the reason if there is none."""
    free = free_shared_bytes(folder)
    if free < nbytes:
        return "", (
            f'sharding="shard" keeps {nbytes:,} bytes of weights in memory that the ranks of a node share, and '
            f"{folder} has {free:,} bytes free. Give it more (`mount -o remount,size=...`, `docker run --shm-size`), "
            'or set sharding="replicate".'
        )
    try:
        descriptor, path = tempfile.mkstemp(prefix="protrain-", dir=folder)
    except OSError as failure:
        return "", f"{folder} does not take files, and the ranks of a node share weights there: {failure}."
    try:
        os.truncate(descriptor, nbytes)
    except OSError as failure:
        os.unlink(path)
        return "", f"{folder} does not give the {nbytes:,} bytes that the weights of a node need: {failure}."
    finally:
        os.close(descriptor)
    return path, ""


def _open(path: str) -> tuple[int, str]:
    """Its descriptor, and why there is none."""
    try:
        return os.open(path, os.O_RDWR), ""
    except OSError as failure:
        return -1, (
            f'sharding="shard" needs memory that the ranks of a node share, and this one does not see {path}, which '
            f'the first one has made: {failure}. Run them in one container, or set sharding="replicate".'
        )


@dataclass(frozen=True)
class Share:
    """One rank's share of a chunk, see [Note: Owners].

    Attributes:
        memory: Memory in which the ranks of the node have the weights.
        owners: The owner of each parameter, as `local_rank`.
        local_rank: Number of this rank on its node.
    """

    memory: NodeMemory
    owners: tuple[int, ...]
    local_rank: int

    def owns(self, at: int) -> bool:
        """Return True if this rank steps a parameter.

        Args:
            at: Index of the parameter in the chunk.
        """
        return self.owners[at] == self.local_rank


def assign_owners(chunks: Sequence[Sequence[int]], num_ranks: int) -> list[list[int]]:
    """Deals parameters out so that ranks have about the same to step, in each chunk and in all.

    Args:
        chunks: Bytes of the parameters of each chunk, in execution order.
        num_ranks: Ranks of a node.

    Returns:
        The owner of each parameter, as `local_rank`.
    """
    loads = [0] * num_ranks
    owners = []
    for sizes in chunks:
        mine = [0] * len(sizes)
        # The largest first, each to the rank that has least: no rank has more than the mean and one parameter.
        for at in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
            mine[at] = min(range(num_ranks), key=loads.__getitem__)
            loads[mine[at]] += sizes[at]
        owners.append(mine)
    return owners


def owners_in_chunks(
    chunks: Sequence[ChunkPlan], parameters: Mapping[str, nn.Parameter], num_ranks: int
) -> list[list[int]]:
    """Return the owner of each parameter of offloaded chunks, as `local_rank`.

    Args:
        chunks: All offloaded chunks, in execution order.
        parameters: The model's parameters, by first name.
        num_ranks: Number of ranks of a node.
    """
    return assign_owners([[parameters[fqn].nbytes for fqn in chunk.parameters] for chunk in chunks], num_ranks)


def num_counters(num_chunks: int, num_ranks: int) -> int:
    """Return how many counters the ranks of a node share, see [Note: Step sync].

    Args:
        num_chunks: Number of chunks that they share.
        num_ranks: Number of ranks of the node.
    """
    return (2 + num_chunks) * num_ranks


def shared_bytes(chunks: Sequence[ChunkPlan], nbytes: Mapping[str, int], num_ranks: int) -> int:
    """Return the bytes that `share_chunks` takes of the memory that ranks of a node can share.

    Args:
        chunks: All offloaded chunks.
        nbytes: Bytes of the model's parameters, by first name.
        num_ranks: Number of ranks of the node.
    """
    return with_counters(_block_bytes(chunks, nbytes), num_counters(len(chunks), num_ranks)) if chunks else 0


def share_chunks(
    chunks: Sequence[ChunkPlan], parameters: Mapping[str, nn.Parameter], ranks: RankMesh, host: HostMemory
) -> list[Share]:
    """Return this rank's shares of offloaded chunks; every rank calls it.

    Args:
        chunks: All offloaded chunks, in execution order.
        parameters: The model's parameters, by first name.
        ranks: The ranks that share them.
        host: Host memory of the device.

    Raises:
        ValueError: If there is too little memory that ranks can share.
    """
    nbytes = _block_bytes(chunks, {fqn: parameter.nbytes for fqn, parameter in parameters.items()})
    memory = open_node_memory(ranks, nbytes, host, num_counters=num_counters(len(chunks), ranks.local_size))
    owners = owners_in_chunks(chunks, parameters, ranks.local_size)
    return [Share(memory, tuple(mine), ranks.local_rank) for mine in owners]


def _block_bytes(chunks: Sequence[ChunkPlan], nbytes: Mapping[str, int]) -> int:
    masters = [nbytes[fqn] for chunk in chunks if chunk.streamed_dtype for fqn in chunk.parameters]
    return sum(pages(chunk.nbytes) for chunk in chunks) + sum(map(pages, masters))
