"""Files that cache measurements for later runs.

The *key* of a file is a dict of everything that its content depends on. The file is named after a digest of the key,
and contains the key, the content and a digest of both, which are checked on reading. Files are replaced atomically.
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
    """Return the path of the file for a key in `folder`; the file name starts with `kind`."""
    return folder / f"{kind}-{digest(key)[:24]}.json"


def read_content(path: Path, key: dict[str, Any], name: str, most_characters: int) -> Any:
    """Return the content of a file for `key`.

    Args:
        path: The file.
        key: Everything that the content depends on.
        name: Name of the field with the content.
        most_characters: Maximum size of the file, characters.

    Raises:
        OSError: If the file cannot be read; FileNotFoundError if it does not exist.
        ValueError: If the file has another format, is damaged, or has another key.
        RecursionError: If the JSON is nested too deeply.
    """
    with path.open(encoding="utf-8") as file:
        entry = json.loads(file.read(most_characters))
    if not isinstance(entry, dict) or entry.keys() != {"key", name, "digest"}:
        raise ValueError("The file has unknown fields.")
    if entry["key"] != key or entry["digest"] != digest([key, entry[name]]):
        raise ValueError("The file has another key, or was changed.")
    return entry[name]


def write_content(path: Path, key: dict[str, Any], name: str, content: Any) -> None:
    """Replace a file atomically; the arguments are those of `read_content`.

    Raises:
        OSError: If the file cannot be written; it is unchanged.
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
    """Return the SHA-256 of JSON values, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
