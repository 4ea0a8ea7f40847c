"""Uploads whose bytes are yet to be made by the host's worker.

[Note: In order]
Uploads are asked for in the order in which they are needed, but steps behind backward end in the opposite one. A link
carries one copy after the other: if each were issued as soon as its own bytes are there, what is needed first would
come last. So each is issued when its bytes are there and those that were asked for before it have been issued.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from lightning_protrain.host import Job

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
