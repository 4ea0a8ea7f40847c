"""Names of runs, checkpoints and files in them: which are allowed, and which ones the commit protocol keeps for itself.

[Note: States]
A published checkpoint has a plain name. Beside it, in the same folder and so on the same disk, there may be
`.NAME~TOKEN.staged` (being written), `.NAME~TOKEN.old` (whole, its successor of the same name is about to be or has
been published) and `.NAME~TOKEN.removed` (being removed). The first half of TOKEN says of which run it is, so that
nobody clears away what another run is writing.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Literal, NamedTuple

State = Literal["staged", "old", "removed"]

# Bytes of a name that file systems take, less what a state adds to it.
MOST_NAME_BYTES = 255 - len(".~.removed") - 16

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED = re.compile(r"\.(?P<name>.+)~(?P<run>[0-9a-f]{8})[0-9a-f]{8}\.(?P<state>staged|old|removed)", re.DOTALL)
_KEPT = re.compile(r"\..*(\.lock|~[0-9a-f]{16}\.\w+)")


class Reserved(NamedTuple):
    """What a name of [Note: States] says."""

    name: str
    run_mark: str
    state: State


def check_run(run: object) -> str:
    """The run's name, if it may be one.

    Raises:
        ValueError: It may not.
    """
    if not isinstance(run, str) or not _RUN.fullmatch(run):
        raise ValueError(
            f"run={run!r}: a run is named with letters, digits, '.', '_' and '-', the first a letter or a digit, at "
            "most 64 of them; no separators, no '..'."
        )
    return run


def check_name(name: str) -> str:
    """The name of a checkpoint, if it may be one: whatever a file may be called, without surprises.

    Raises:
        ValueError: It may not.
    """
    size = len(name.encode(errors="surrogateescape"))
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable() or _KEPT.fullmatch(name):
        raise ValueError(
            f"The checkpoint cannot be called {name!r}: a name is not empty, no '..', none that the commit protocol "
            "uses, and has no separators and no control characters."
        )
    if size > MOST_NAME_BYTES:
        raise ValueError(f"The checkpoint's name {name!r} has {size} bytes; at most {MOST_NAME_BYTES} are possible.")
    return name


def check_file(name: object) -> str:
    """The name of a file in a checkpoint, if it may be one.

    Raises:
        ValueError: It may not.
    """
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise ValueError(f"{name!r} cannot be the name of a file of a checkpoint.")
    return name


def run_mark(run: str) -> str:
    """Stands for the run in reserved names, 8 characters."""
    return hashlib.sha256(run.encode()).hexdigest()[:8]


def reserved_name(name: str, run: str, state: State) -> str:
    """A fresh name of [Note: States]."""
    return f".{name}~{run_mark(run)}{secrets.token_hex(4)}.{state}"


def parse_reserved(entry: str) -> Reserved | None:
    """What `reserved_name` made; None for any other name."""
    match = _RESERVED.fullmatch(entry)
    return Reserved(match["name"], match["run"], match["state"]) if match else None  # type: ignore[arg-type]
