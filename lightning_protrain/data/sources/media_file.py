"""Refuses what is no file, and names a medium that does not open: for all kinds of media."""

from __future__ import annotations

import os
from typing import Any

from lightning_protrain.config import format_bytes
from lightning_protrain.data.conversation import MalformedRow


def check_is_file(source: Any) -> None:
    """Refuse folders, named pipes, which would be waited for, and devices.

    Raises:
        OSError: If a path is one of these.
    """
    if isinstance(source, str) and os.path.exists(source) and not os.path.isfile(source):
        raise OSError("It is a folder, a pipe or a device.")


def not_opened(source: Any, where: str, why: str | BaseException) -> MalformedRow:
    """Return the error for a medium that does not open.

    Args:
        source: Its path, or what was stored.
        where: Its name.
        why: The reason.
    """
    kind = format_bytes(len(source)) if isinstance(source, bytes) else repr(source)
    return MalformedRow(f"{where} ({kind}) does not open: {str(why).rstrip('.')}. Correct the path or store it again.")
