"""Services of one part of the package for another that does not import it; `registration.py` connects them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

# Each returns a plugin that reads a checkpoint in place of the strategy's plugin, or None: added by `checkpoint`, asked
# by the strategies.
READERS: list[Callable[[Path, Any], Any | None]] = []
# Each converts a checkpoint dict for a module and its optimizers: added by `runtime`, called where a run resumes.
CONVERTERS: list[Callable[[Any, Any, Any], None]] = []


def reader_of(path: str | Path, own: Any) -> Any:
    """Return the checkpoint plugin that reads a path: that of the first of READERS which takes it, else `own`."""
    readers = (reader for find in READERS if (reader := find(Path(path), own)) is not None)
    return next(readers, own)
