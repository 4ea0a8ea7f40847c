"""The Hugging Face Hub: which names are looked up there, and how long a run waits where it does not answer.

[Note: Hub]
A misspelt path is no name on the Hub, and asking there takes half a minute of retries where there is no network. What
looks like a path is never sent, and before the first name is, the Hub gets SECONDS to answer. If it does not, its
library works from its cache alone for the rest of the process, as with HF_HUB_OFFLINE.
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

# How long the Hub may take to answer.
SECONDS = 5.0
# Suffixes that names on the Hub do not have: "Llama-3.1" ends in a version.
_SUFFIXES = {
    *(".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".zip", ".gz", ".zst", ".xz", ".yaml", ".yml"),
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".jinja", ".model"),
}


def is_path(name: str) -> bool:
    """Whether a name is one of a file or folder, be it there or not, and none on the Hub.

    It is, if it is there, begins with a dot, a slash or a tilde, has several slashes, a backslash or the suffix of a
    file, or if the folder that it is in exists.
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
    """Prepare to load what is in a folder or has a name on the Hub; return after at most SECONDS.

    Raises:
        ValueError: There is no such folder, and it is no name on the Hub.
    """
    if not is_path(name):
        wait_for_hub()
    elif not Path(name).exists():
        raise ValueError(f"There is no folder {name!r}. Correct the path, or give a name on the Hugging Face Hub.")


@cache
def wait_for_hub() -> None:
    """Give the Hub SECONDS to answer, once in a process; go on without it if it does not."""
    if is_offline_mode():
        return
    answers: list[bool] = []
    # In a thread: nothing bounds the time that looking up the address takes.
    asking = Thread(target=lambda: answers.append(_answers()), daemon=True)
    asking.start()
    asking.join(SECONDS)
    if answers != [True]:
        constants.HF_HUB_OFFLINE = True
        rank_zero_warn(
            f"{constants.ENDPOINT} does not answer: what is loaded by its name on the Hugging Face Hub is taken from "
            "the cache."
        )


def _answers() -> bool:
    try:
        with urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=SECONDS):
            return True
    except HTTPError:
        return True  # an answer, of whatever kind
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the library has certificates of its own
    except (OSError, ValueError, HTTPException):
        return False
