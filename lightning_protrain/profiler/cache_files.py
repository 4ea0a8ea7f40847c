"""Files that cache measurements for later runs; each file is complete and belongs to its key.

A file is named after a digest of its *key*: everything that the content depends on. It contains the key, the content,
and a digest of both, and is used only if all three agree. A file is replaced as a whole, so that concurrent readers see
either the old file or the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def file_of(folder: Path, kind: str, key: dict[str, Any]) -> Path:
    """Return the path in `folder` of the file for a key; its name begins with `kind`."""
    return folder / f"{kind}-{digest(key)[:24]}.json"


def read_content(path: Path, key: dict[str, Any], name: str, most_characters: int) -> Any:
    """Return the content of a file that belongs to `key`.

    Args:
        path: The file.
        key: Everything that the content depends on.
        name: Name of the content in the file.
        most_characters: Maximum size of the file, characters.

    Raises:
        OSError: The file cannot be read; FileNotFoundError if it does not exist.
        ValueError: The file has another format, is damaged, or belongs to another key.
        RecursionError: The JSON is nested too deeply.
    """
    with path.open(encoding="utf-8") as file:
        entry = json.loads(file.read(most_characters))
    if not isinstance(entry, dict) or entry.keys() != {"key", name, "digest"}:
        raise ValueError("The file has other fields.")
    if entry["key"] != key or entry["digest"] != digest([key, entry[name]]):
        raise ValueError("The file belongs to another key, or was changed.")
    return entry[name]


def write_content(path: Path, key: dict[str, Any], name: str, content: Any) -> None:
    """Replace a file as a whole; the arguments are those of `read_content`.

    Raises:
        OSError: The file cannot be written; then it is unchanged.
    """
    entry = {"key": key, name: content, "digest": digest([key, content])}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, new = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(entry, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def digest(content: Any) -> str:
    """Return a digest of JSON values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
