"""Saves a dict as the next checkpoint of a run, at once or in the background from copies in host memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_protrain.checkpoint.atomic import Files, check_space, open_draft
from lightning_protrain.checkpoint.discover import Listing, find_checkpoints
from lightning_protrain.checkpoint.manifest import DEFAULT, Manifest
from lightning_protrain.checkpoint.serialize import Payload, shared_names, split

_ALIGNMENT = 64


class Snapshot:
    """One copy of what a checkpoint is made of; `take` overwrites the former one.

    The memory is shared with processes that are forked meanwhile and is none of theirs: what is copied anew while
    workers of a DataLoader live is there once, and not once more for them.

    Args:
        free_bytes: What the host has left.
    """

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self.free_bytes = free_bytes
        self._memory: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Of host memory that it holds."""
        return 0 if self._memory is None else self._memory.nbytes

    def needed(self, payload: Payload) -> int:
        """Bytes of host memory that `take` would claim besides those that it holds."""
        size = _size(payload)
        return size if size > self.nbytes else 0

    def take(self, payload: Payload) -> Payload:
        """The same payload, of copies; what shares memory in it shares memory in them.

        Raises:
            OSError: The system has no such memory.
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
        """Gives the memory back, once nobody uses the copies."""
        self._memory = None


def _size(payload: Payload) -> int:
    size = 0
    for tensors in (payload.weights, payload.tensors):
        shared = shared_names(tensors)
        size += sum(aligned(tensor.nbytes) for name, tensor in tensors.items() if name not in shared)
    return size


def aligned(size: int) -> int:
    """Bytes that a tensor of this size takes of it."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


Result = TypeVar("Result")


class Writer:
    """A queue of jobs; what comes after one that failed fails as well, and nothing of it is done.

    The interpreter ends after the last job. A process that is killed leaves what a crash leaves.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[object] | None = None

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Has it done after all that were given before."""
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
        """Waits until nothing is left to be done, failed or not."""
        if self._last is not None:
            wait([self._last])

    def settle(self, job: Future[Result]) -> Result:
        """Waits for a job of `submit`, and says how it went.

        Raises:
            BaseException: What it, or one before it, has raised; it is told with this.
        """
        try:
            return job.result()
        except BaseException:
            if job.done():
                self._last = None
            raise

    def close(self) -> BaseException | None:
        """Waits, and ends the thread; what has failed and was not told is returned."""
        self.join()
        last, self._last = self._last, None
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        return None if last is None else last.exception()


class SavePlace(NamedTuple):
    """Of a save in its run, see [Note: Lines]."""

    sequence: int
    branch: int
    lineage: tuple[tuple[int, int], ...]


def next_place(listing: Listing, parent: Manifest | None) -> SavePlace:
    """Where the next save belongs.

    Args:
        listing: All checkpoints of the run.
        parent: The one that the run has saved or resumed from last; None: it has begun anew.
    """
    manifests = [each.manifest for each in listing.found]
    if parent is not None:
        manifests.append(parent)
    sequence = 1 + max((each.sequence for each in manifests), default=-1)
    newest = listing.found[0].manifest if listing.found else parent
    if parent is not None and newest is not None and parent.identity == newest.identity:
        return SavePlace(sequence, parent.branch, parent.lineage)
    branch = 1 + max((each.branch for each in manifests), default=-1)
    return SavePlace(sequence, branch, () if parent is None else (*parent.lineage, (parent.branch, parent.step)))


def save_folder(
    content: Mapping[str, Any],
    target: Path,
    run: str,
    step: int,
    files: Files,
    parent: Manifest | None = None,
    digest: str = DEFAULT,
    record: Mapping[str, Any] | None = None,
) -> Manifest:
    """Saves `content` as a checkpoint; it is durable when this returns, and nothing has changed if it raises.

    Args:
        content: As `split` takes it.
        target: What the checkpoint will be called; its folder is there. What has that name is replaced.
        run: Name of the run; the caller has its lock.
        step: Optimizer steps made.
        files: What writes.
        parent: As in `next_place`.
        digest: Algorithm, see `Digest`.
        record: Anything else that JSON can hold.

    Raises:
        ValueError: What cannot be saved, or a name that cannot be one.
        OSError: The disk is full (found before anything is written, if it can be), or fails.
    """
    return save_payload(split(content), target, run, step, files, parent, digest, record)


def save_payload(
    payload: Payload,
    target: Path,
    run: str,
    step: int,
    files: Files,
    parent: Manifest | None = None,
    digest: str = DEFAULT,
    record: Mapping[str, Any] | None = None,
) -> Manifest:
    """The second half of `save_folder`, for what is split already.

    Raises:
        ValueError: A name that cannot be one.
        OSError: As there.
    """
    parent = parent if parent is not None and parent.run == run else None
    check_space(target.parent, payload.nbytes)
    place = next_place(find_checkpoints(target.parent, run), parent)
    with open_draft(target, run, files, digest) as draft:
        payload.write(draft)
        manifest = Manifest(
            run=run,
            step=step,
            sequence=place.sequence,
            identity=draft.identity,
            files=dict(draft.entries),
            branch=place.branch,
            lineage=place.lineage,
            world_size=max(len(payload.ranks), 1),
            record=dict(record or {}),
        )
        draft.publish(manifest)
    return manifest
