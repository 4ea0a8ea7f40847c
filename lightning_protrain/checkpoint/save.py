"""Saves a dict as the next checkpoint of a run, directly or in the background from a copy in host memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_protrain.checkpoint.atomic import Files, check_space, open_draft
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.checkpoint.manifest import DEFAULT, Manifest
from lightning_protrain.checkpoint.serialize import Payload, shared_names
from lightning_protrain.progress import waiting

_ALIGNMENT = 64


class Snapshot:
    """Memory for one copy of a checkpoint's content; `take` overwrites the previous copy.

    The memory is a shared mapping: DataLoader workers that are forked during the save do not duplicate its pages.

    Args:
        free_bytes: Returns the free memory of the host, bytes.
    """

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self.free_bytes = free_bytes
        self._memory: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_memory": None}

    @property
    def nbytes(self) -> int:
        """Size of the allocated host memory, bytes."""
        return 0 if self._memory is None else self._memory.nbytes

    def needed(self, payload: Payload) -> int:
        """Return the bytes of host memory that `take` would allocate."""
        size = _size(payload)
        return size if size > self.nbytes else 0

    def take(self, payload: Payload) -> Payload:
        """Return a copy of the payload; tensors that share memory also share it in the copy.

        Raises:
            OSError: If the system cannot provide the memory.
        """
        size = _size(payload)
        if size > self.nbytes:
            self._memory = None
            self._memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        place = 0

        def copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            nonlocal place
            shared = shared_names(tensors)
            copies: dict[str, Tensor] = {}
            for name, tensor in tensors.items():
                if name in shared:
                    copies[name] = copies[shared[name]]
                elif not tensor.numel():
                    copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
                else:
                    assert self._memory is not None
                    part = self._memory[place : place + tensor.nbytes]
                    copies[name] = part.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
                    place += aligned(tensor.nbytes)
            return copies

        return Payload(copy(payload.weights), copy(payload.tensors), payload.state, payload.ranks)

    def release(self) -> None:
        """Free the memory. The copy must not be used afterwards."""
        self._memory = None


def _size(payload: Payload) -> int:
    size = 0
    for tensors in (payload.weights, payload.tensors):
        shared = shared_names(tensors)
        size += sum(aligned(tensor.nbytes) for name, tensor in tensors.items() if name not in shared)
    return size


def aligned(size: int) -> int:
    """Return the bytes that a tensor of `size` bytes takes in a snapshot."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


Result = TypeVar("Result")


class Writer:
    """A queue of jobs on one thread; after a failed job, all later ones fail without running.

    The interpreter waits for all jobs before it exits.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[object] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Writer, ()  # A copy has no jobs.

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Run `job` after all jobs submitted before."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        before = self._last

        def do() -> Result:
            if before is not None:
                before.result()
            return job()

        future = self._pool.submit(do)
        self._last = future  # type: ignore[assignment]
        return future

    def join(self) -> None:
        """Wait for all jobs; do not raise their errors."""
        if self._last is not None:
            wait([self._last])

    def settle(self, job: Future[Result]) -> Result:
        """Wait for a submitted job and return its result.

        Raises:
            BaseException: The error of this job or an earlier one; `close` does not return it again.
        """
        try:
            return job.result()
        except BaseException:
            if job.done():
                self._last = None
            raise

    def close(self) -> BaseException | None:
        """Wait for all jobs and end the thread; return the error of a job, unless `settle` has raised it."""
        self.join()
        last, self._last = self._last, None
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        return None if last is None else last.exception()


@dataclass(frozen=True)
class NewCheckpoint:
    """The entries of the manifest of a checkpoint to save.

    Attributes:
        run: Name of the run; the caller holds its lock.
        step: Number of optimizer steps before the save.
        record: Further JSON values.
        digest: Digest algorithm, see `Digest`.
    """

    run: str
    step: int
    record: Mapping[str, Any] = field(default_factory=dict)
    digest: str = DEFAULT


def save_payload(payload: Payload, target: Path, new: NewCheckpoint, files: Files) -> Manifest:
    """Save a payload of `split` as a durable checkpoint; an error leaves existing checkpoints unchanged.

    Args:
        payload: Content of the checkpoint.
        target: Path of the checkpoint in an existing folder; a checkpoint at this path is replaced.
        new: Entries of the manifest.
        files: File system to write with.

    Raises:
        ValueError: If a name is not allowed.
        OSError: If the disk is full or fails.
    """
    check_space(target.parent, payload.nbytes)
    earlier = find_checkpoints(target.parent, new.run).found
    with waiting("Saving a checkpoint"), open_draft(target, new.run, files, new.digest) as draft:
        payload.write(draft)
        manifest = Manifest(
            run=new.run,
            step=new.step,
            sequence=earlier[0].manifest.sequence + 1 if earlier else 0,
            identity=draft.identity,
            files=dict(draft.entries),
            world_size=max(len(payload.ranks), 1),
            record=dict(new.record),
        )
        draft.publish(manifest)
    return manifest
