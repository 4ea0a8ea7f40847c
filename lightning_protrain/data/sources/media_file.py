"""Checks and error messages that reading images, audio and videos have in common."""

from __future__ import annotations

import os
from typing import Any

from lightning_protrain.config import format_bytes
from lightning_protrain.data.conversation import MalformedRow


def check_is_file(source: Any) -> None:
    """Raise OSError if `source` is the path of a folder, a device or a named pipe; opening a pipe could block."""
    if isinstance(source, str) and os.path.exists(source) and not os.path.isfile(source):
        raise OSError("It is a folder, a pipe or a device.")


def not_opened(source: Any, where: str, why: str | BaseException) -> MalformedRow:
    """Return the error for an image, audio or video that cannot be opened.

    Args:
        source: Path, contents of a file, or object with the data.
        where: Name of the medium, for the message.
        why: The reason.
    """
    kind = format_bytes(len(source)) if isinstance(source, bytes) else repr(source)
    return MalformedRow(f"{where} ({kind}) does not open: {str(why).rstrip('.')}. Correct the path or store it again.")
