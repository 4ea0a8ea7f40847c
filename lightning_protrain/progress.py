"""Shows the progress of work that takes longer than two seconds: on rank 0, in a terminal or a notebook.

The display is removed when the work ends.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

# Seconds before something is shown, and between two displays of the elapsed time.
DELAY, TICK = 2.0, 0.5


def is_shown() -> bool:
    """Return True if this thread shows progress: the main thread of rank 0, with a terminal or a notebook."""
    # Lightning knows the rank if this process has imported it.
    known = getattr(sys.modules.get("lightning_utilities.core.rank_zero"), "rank_zero_only", None)
    rank = getattr(known, "rank", 0) or 0
    looks = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    return rank == 0 and looks and threading.current_thread() is threading.main_thread()


def bar(items: Iterable[Any] | None, what: str, total: int | None = None, unit: str = "it") -> Any:
    """Return a tqdm bar over items, or one for `update`; it appears after DELAY seconds.

    Args:
        items: Items to iterate over; None: the caller calls `update`.
        what: Name of the work, such as "Tokenizing".
        total: Number of items, or bytes; None: the length of `items`.
        unit: Unit of the count; "B" is shown with prefixes.
    """
    return tqdm(items, what, total, unit=unit, unit_scale=unit == "B", delay=DELAY, leave=False, disable=not is_shown())


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show the elapsed time of the work within this context, from DELAY seconds on.

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
