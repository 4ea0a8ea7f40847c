"""Progress bars and elapsed times, on rank 0, for work that takes longer than two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

# Seconds until progress is shown, and between updates of the elapsed time.
DELAY, TICK = 2.0, 0.5


def is_shown() -> bool:
    """Return True on the main thread of rank 0 if the output is a terminal or a notebook."""
    # Read the rank from Lightning if it is imported, without importing it.
    known = getattr(sys.modules.get("lightning_utilities.core.rank_zero"), "rank_zero_only", None)
    rank = getattr(known, "rank", 0) or 0
    looks = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    return rank == 0 and looks and threading.current_thread() is threading.main_thread()


def bar(items: Iterable[Any] | None, what: str, total: int | None = None, unit: str = "it") -> Any:
    """Return a tqdm bar, which appears after DELAY seconds and is removed at the end.

    Args:
        items: Items to iterate over; None if the caller calls `update`.
        what: Name of the work, such as "Tokenizing".
        total: Total count; None means the length of `items`.
        unit: Unit of the count; "B" (bytes) is shown with prefixes.
    """
    return tqdm(items, what, total, unit=unit, unit_scale=unit == "B", delay=DELAY, leave=False, disable=not is_shown())


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show `what` and the elapsed time within this context, after DELAY seconds.

    Args:
        what: Name of the work, such as "Profiling a training step".
    """
    if not is_shown():
        yield
        return
    begun, done = time.time(), threading.Event()

    def show() -> None:
        if done.wait(DELAY):
            return
        with tqdm(desc=what, bar_format="{desc}: {elapsed}", leave=False) as line:
            line.start_t = begun
            while not done.wait(TICK):
                line.refresh()

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
