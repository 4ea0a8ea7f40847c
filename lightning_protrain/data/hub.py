"""Decides which names are looked up on the Hugging Face Hub, and limits the wait for the Hub.

A name that looks like a path is never looked up on the Hub: without a network, the retries take half a minute. The
process first checks whether the Hub answers within SECONDS. If the Hub does not answer, the process works offline from
then on, as with HF_HUB_OFFLINE.
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

# Time limit for an answer of the Hub, seconds.
SECONDS = 5.0
# Suffixes of files. Names on the Hub may contain a dot, too, as in "Llama-3.1".
_SUFFIXES = {
    *(".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".zip", ".gz", ".zst", ".xz", ".yaml", ".yml"),
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".jinja", ".model"),
}


def is_path(name: str) -> bool:
    """Return True if a name is the path of a file or folder, which need not exist, rather than a name on the Hub."""
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
    """Check a name before loading from it: that its folder exists, or whether the Hub answers within SECONDS.

    Raises:
        ValueError: If the name is a path that does not exist.
    """
    if not is_path(name):
        wait_for_hub()
    elif not Path(name).exists():
        raise ValueError(f"There is no folder {name!r}. Correct the path, or give a name on the Hugging Face Hub.")


@cache
def wait_for_hub() -> None:
    """Check once per process whether the Hub answers within SECONDS; switch to offline mode if it does not."""
    if is_offline_mode():
        return
    answers: list[bool] = []
    # Use a thread, because resolving the host name has no time limit.
    probe = Thread(target=lambda: answers.append(_answers()), daemon=True)
    probe.start()
    probe.join(SECONDS)
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
        return True  # the server has answered, even if with an error
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # huggingface_hub may have certificates that urllib lacks
    except (OSError, ValueError, HTTPException):
        return False
