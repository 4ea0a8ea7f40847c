"""The Hugging Face Hub: which names are looked up there, and how long a run waits for it.

A misspelt path is no name on the Hub, and without a network asking the Hub takes half a minute of retries. So a name
that looks like a path is never sent. Before the first name is sent, the Hub gets SECONDS to answer. If the Hub does not
answer, its library uses only the cache for the rest of the process, as with HF_HUB_OFFLINE.
"""

from __future__ import annotations

import ssl
from functools import cache
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from huggingface_hub import constants, is_offline_mode
from lightning.pytorch.utilities import rank_zero_warn

# Seconds that the Hub may take to answer.
SECONDS = 5.0
# Suffixes that names on the Hub do not have: "Llama-3.1" ends in a version.
_SUFFIXES = {
    *(".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".zip", ".gz", ".zst", ".xz", ".yaml", ".yml"),
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".jinja", ".model"),
}


def is_path(name: str) -> bool:
    """Return True if a name is a file or folder, existing or not, and no name on the Hub.

    A name is a path if it exists, begins with a dot, a slash or a tilde, has several slashes, a backslash or a file
    suffix, or if its parent folder exists.
    """
    path = Path(name)
    return (
        name.startswith((".", "/", "~"))
        or name.endswith("/")
        or name.count("/") > 1
        or "\\" in name
        or path.suffix.lower() in _SUFFIXES
        or ("/" in name and path.parent.is_dir())
        or path.exists()
    )


def look_up(name: str) -> None:
    """Prepare to load from a folder or the Hub; return after at most SECONDS.

    Raises:
        ValueError: If there is no such folder, and the name cannot be one on the Hub.
    """
    if not is_path(name):
        wait_for_hub()
    elif not Path(name).exists():
        raise ValueError(f"There is no folder {name!r}. Correct the path, or give a name on the Hugging Face Hub.")


@cache
def wait_for_hub() -> None:
    """Give the Hub SECONDS to answer, once per process; continue offline if it does not."""
    if is_offline_mode():
        return
    answers: list[bool] = []
    # In a thread: resolving the address has no time limit.
    asking = Thread(target=lambda: answers.append(_answers()), daemon=True)
    asking.start()
    asking.join(SECONDS)
    if answers != [True]:
        constants.HF_HUB_OFFLINE = True
        rank_zero_warn(
            f"{constants.ENDPOINT} does not answer: models and data named on the Hugging Face Hub are loaded from "
            "the cache."
        )


def _answers() -> bool:
    try:
        with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=SECONDS):
            return True
    except HTTPError:
        return True  # any answer counts
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the library brings its own certificates
    except (OSError, ValueError, HTTPException):
        return False
