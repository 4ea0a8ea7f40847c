"""Decides which names are looked up on the Hugging Face Hub, limits the wait for it, and explains its errors.

It also pushes folders to the Hub.

A name that looks like a path is never looked up on the Hub: without a network, the retries take half a minute. The
process first checks whether the Hub answers within SECONDS. If the Hub does not answer, the process works offline from
then on, as with HF_HUB_OFFLINE.
"""

from __future__ import annotations

import errno
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from huggingface_hub import (
    CommitOperationAdd,
    HfApi,
    constants,
    get_token,
    hf_hub_download,
    is_offline_mode,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from lightning.pytorch.utilities import rank_zero_warn

from lightning_protrain.models.shipped import published

# Time limit for an answer of the Hub, seconds.
SECONDS = 5.0
# Suffixes of files. Names on the Hub may contain a dot, too, as in "Llama-3.1".
_SUFFIXES = {
    *(".json", ".jsonl", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".zip", ".gz", ".zst", ".xz", ".yaml", ".yml"),
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".jinja", ".model"),
}


def is_path(name: str) -> bool:
    """Return True if a name is the path of a file or folder, which need not exist, rather than a name on the Hub.

    A folder "Qwen" makes "Qwen/mine" a path, but not the name of a published model.
    """
    path = Path(name)
    return (
        name.startswith((".", "/", "~"))
        or name.endswith("/")
        or name.count("/") > 1
        or "\\" in name
        or path.suffix.lower() in _SUFFIXES
        or ("/" in name and path.parent.is_dir() and name not in published())
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
        raise ValueError(
            f"There is no folder {name!r}{nearest_path(name)}. Correct the path, or give a name on the Hugging Face "
            "Hub."
        )


def nearest_path(name: str) -> str:
    """Return the existing file or folder with the most similar path, as in "; the nearest is 'x'", or no text."""
    path = Path(name).expanduser()
    folder = path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    near = get_close_matches(path.name, (entry.name for entry in folder.iterdir()), n=1)
    return f"; the nearest is {str(folder / near[0])!r}" if near else ""


@cache
def wait_for_hub() -> bool:
    """Check once per process whether the Hub answers within SECONDS; switch to offline mode if it does not.

    Returns:
        False if the Hub was asked and does not answer.
    """
    if is_offline_mode():
        return True
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
    return answers == [True]


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


def hub_file(name: str, file: str, required: bool = False, kind: str = "model") -> str | None:
    """Return the path of a file of a model or data set, downloaded if needed; None if it does not have the file.

    Args:
        name: Folder, or name on the Hub.
        file: Name of the file.
        required: True raises if the process is offline and the file is not in the cache, rather than returning None.
        kind: "model" or "dataset".

    Raises:
        ValueError: If the Hub does not give the file although it may exist.
    """
    if Path(name).is_dir():
        return str(Path(name, file)) if Path(name, file).is_file() else None
    with hub_refusals(name, kind):
        try:
            return hf_hub_download(name, file, repo_type=kind)
        except LocalEntryNotFoundError:
            if required or not is_offline_mode():
                raise
            return None
        except EntryNotFoundError:
            return None


def file_names(name: str) -> list[str]:
    """Return the names of the files of a folder, or of a model on the Hub; offline, only those in the cache.

    Raises:
        ValueError: If the Hub does not list the files.
    """
    if Path(name).is_dir():
        return sorted(path.name for path in Path(name).iterdir())
    if is_offline_mode():
        config = try_to_load_from_cache(name, constants.CONFIG_NAME)
        return file_names(str(Path(config).parent)) if isinstance(config, str) else []
    with hub_refusals(name):
        return HfApi().list_repo_files(name)


# Errors of the Hub, of the network and of the disk. The base class is that of all errors of the HTTP library.
HUB_ERRORS: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, HfHubHTTPError.__bases__[0])
# Errors of a push. A lookup fails in an answer of a server that is not the Hub.
PUSH_ERRORS: tuple[type[Exception], ...] = (*HUB_ERRORS, LookupError)
_NOUNS = {"model": "model", "dataset": "data set"}
_WRITING = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def hub_refusals(name: str, kind: str = "model", known: Iterable[str] = ()) -> Iterator[None]:
    """Raise ValueError with one sentence if the Hub, the network or the disk of the cache prevents loading.

    Args:
        name: Name on the Hub. Errors about folders are raised as they are.
        kind: "model" or "dataset".
        known: Names to suggest if there is no such name.
    """
    try:
        yield
    except HUB_ERRORS as error:
        reason = None if is_path(name) else _reason(name, error, kind, known)
        if reason is None:
            raise
        raise ValueError(reason) from error


def _reason(name: str, error: BaseException, kind: str, known: Iterable[str]) -> str | None:
    """Return one sentence on the error of the Hub, the network or the disk among the causes of an error, or None."""
    chain = _causes(error)
    for link in chain:
        if isinstance(link, HfHubHTTPError) and not isinstance(link, EntryNotFoundError):
            return _answer(name, link, kind, known)
        if isinstance(link, HFValidationError):
            return f"{name!r} is neither a folder nor a name on the Hugging Face Hub, such as owner/name."
    for link in chain:
        code = link.errno if isinstance(link, OSError) else None
        if code in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(link):
            return (
                f"{name!r} cannot be downloaded, because the disk of {_place(link)} is full: free some space, or set "
                "HF_HOME to a folder on another disk."
            )
        if code in _WRITING:
            return (
                f"{name!r} cannot be downloaded, because this process may not write to {_place(link)}: set HF_HOME to "
                "another folder."
            )
    transport = (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError, TimeoutError)
    if not any(isinstance(link, transport) or _is_of_http(link) for link in chain):
        return None
    why, then = f"{constants.ENDPOINT} does not answer", "check the network"
    if is_offline_mode() and wait_for_hub():
        why, then = "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"
    return (
        f"The {_NOUNS[kind]} {name!r} is not in the cache {constants.HF_HUB_CACHE}, or not all of it, and {why}: "
        f"{then}, or give a path{_nearest(name, (*known, *cached_names(kind)))}"
    )


def _causes(error: BaseException) -> list[BaseException]:
    """Return an error and its causes."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain


def _is_of_http(error: BaseException) -> bool:
    return isinstance(error, HUB_ERRORS[-1]) and not isinstance(error, HfHubHTTPError)


def _answer(name: str, error: HfHubHTTPError, kind: str, known: Iterable[str]) -> str:
    """Return one sentence on an error that the Hub has answered with."""
    status, text, answer = _status(error)
    page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
    if isinstance(error, GatedRepoError):
        return f"{name!r} is gated: ask for access on {page}, and log in with `hf auth login` (the Hub says: {answer})."
    if isinstance(error, DisabledRepoError):
        return f"{name!r} is disabled on the Hugging Face Hub: see {page}."
    if isinstance(error, RevisionNotFoundError):
        return f"The {_NOUNS[kind]} {name!r} has no such `revision`: see its branches and tags on {page}/tree/main."
    if status == 401 and (get_token() or "credentials" in text or "expired" in text):
        return (
            f"The Hugging Face Hub refuses your token ({answer}), so {name!r} cannot be loaded: log in again with `hf "
            "auth login`, or replace HF_TOKEN."
        )
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        return (
            f"There is no {_NOUNS[kind]} {name!r} on the Hugging Face Hub, and no folder of this name: correct the "
            f"name, or, if it is private, log in with `hf auth login`{_nearest(name, (*known, *cached_names(kind)))}"
        )
    if status == 429:
        wait = error.response.headers.get("Retry-After")
        later = f"in {wait} s" if wait else "later"
        return (
            f"The Hugging Face Hub takes no more requests for now ({answer}), so {name!r} cannot be loaded: try again "
            f"{later}, or log in with `hf auth login`, which raises the limit."
        )
    if status == 403:
        return f"Your token may not read {name!r} ({answer}): give it access to {page} in its settings."
    return f"The Hugging Face Hub fails with status {answer}, so {name!r} cannot be loaded: try again later."


def _status(error: HfHubHTTPError) -> tuple[int, str, str]:
    """Return the status of an answer, its text, and both together."""
    status = error.response.status_code
    text = " ".join((error.server_message or "").split()).rstrip(".")
    return status, text, f"{status}, {text}" if text else str(status)


def prepare_push(repository: str, private: bool | None = None) -> str:
    """Create the repository of a model unless it exists, and check that this process may write to it.

    Args:
        repository: Name on the Hub; without an owner, it is the user's.
        private: True makes a new repository private, and refuses a public one; None leaves that to the owner's
            settings.

    Returns:
        The name with its owner.

    Raises:
        ValueError: If the Hub cannot be reached, or refuses the token or the name, or the repository is public.
    """
    name = repository
    try:
        _refuse_offline()
        api = HfApi()
        user = api.whoami()["name"]
        name = repository if "/" in repository else f"{user}/{repository}"
        api.create_repo(name, private=private, exist_ok=True)
        if private and not api.model_info(name).private:
            raise ValueError("it is public, but hub_private_repo is true; make it private, or set another hub_model_id")
        # A token that may only read passes until here if the repository exists. Nothing is uploaded: the file is small.
        api.preupload_lfs_files(name, [CommitOperationAdd("README.md", b"# Model")])
    except PUSH_ERRORS as error:
        raise ValueError(f"push_to_hub cannot write to {name!r}: {why_not_pushed(error)}.") from error
    return name


def push(folder: str, name: str) -> None:
    """Upload the files of a folder in one commit to a model's repository, see `prepare_push`.

    Raises:
        Exception: One of PUSH_ERRORS, which `why_not_pushed` explains.
    """
    _refuse_offline()
    HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message="Upload the trained model")


def _refuse_offline() -> None:
    if not wait_for_hub() or is_offline_mode():
        raise OfflineModeIsEnabled


def why_not_pushed(error: BaseException) -> str:
    """Return why a push failed, and what to do, without a full stop."""
    for link in _causes(error):
        if isinstance(link, LocalTokenNotFoundError):
            return "there is no token; log in with `hf auth login`, or set HF_TOKEN"
        if isinstance(link, HFValidationError):
            return "this is no name on the Hugging Face Hub; give hub_model_id, such as owner/name"
        if isinstance(link, OfflineModeIsEnabled):
            answers = wait_for_hub()
            return "HF_HUB_OFFLINE is set; unset it" if answers else f"{constants.ENDPOINT} does not answer"
        if isinstance(link, HfHubHTTPError):
            status, _, answer = _status(link)
            if status == 401:
                return f"the Hub refuses your token ({answer}); log in with `hf auth login`, or replace HF_TOKEN"
            if status in (403, 404):
                return (
                    f"your token may not write there ({answer}); give it write access in its settings, or set "
                    "hub_model_id to a repository of yours"
                )
            return f"the Hub fails with status {answer}"
    if any(isinstance(link, ConnectionError | TimeoutError) or _is_of_http(link) for link in _causes(error)):
        return f"{constants.ENDPOINT} does not answer; check the network"
    return " ".join(str(error).split())[:200].rstrip(".:; ") or type(error).__name__


def _place(error: BaseException) -> str:
    """Return the path that an error of the operating system is about, or the cache of the Hub."""
    return str(getattr(error, "filename", None) or constants.HF_HUB_CACHE)


def cached_names(kind: str) -> list[str]:
    """Return the names of models or data sets in the cache of the Hub."""
    folders = Path(constants.HF_HUB_CACHE).glob(f"{kind}s--*")
    return ["/".join(folder.name.split("--")[1:]) for folder in folders]


def _nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence: similar names, of any owner, a similar path, or a full stop."""
    tails = {known.rpartition("/")[2].lower(): known for known in names if known != name}
    near = [tails[known] for known in get_close_matches(name.rpartition("/")[2].lower(), tails, n=3)]
    return f"; did you mean {' or '.join(near)}?" if near else f"{nearest_path(name)}."
