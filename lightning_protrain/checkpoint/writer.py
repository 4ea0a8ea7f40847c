"""Does things in their order behind the program, on one thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

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
