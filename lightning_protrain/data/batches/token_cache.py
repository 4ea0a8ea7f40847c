"""Tokens of data sets on disk, so that a node makes them only once and later runs reuse them.

The name of an entry is a hash of everything that its tokens depend on: the rows, how they are read, masked and cut, the
files of the tokenizer, the code of this folder, and the libraries that render and tokenize. So an entry is never out of
date, and nothing has to be invalidated. An entry appears in one rename. Processes map its arrays, and so share the
memory of a node.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from lightning_protrain.data.batches.encode import EncodedRows
from lightning_protrain.data.sources.dataset import DatasetReport

CACHE_DIR = Path.home() / ".cache" / "lightning_protrain"
_REPORT = "report.json"


def token_folder(cache_dir: Path, **terms: object) -> Path:
    """Return the folder for the tokens of one split of a data set.

    Args:
        cache_dir: Folder of all caches of the package.
        terms: Everything that the tokens depend on beside the code, each with a complete `repr`.
    """
    key = hashlib.sha256(repr((sorted(terms.items()), _code_digest())).encode())
    return cache_dir / "tokens" / key.hexdigest()[:32]


def load_tokens(folder: Path) -> tuple[EncodedRows, DatasetReport] | None:
    """Return what `keep_tokens` wrote, or None if there is nothing readable."""
    if not folder.is_dir():
        return None
    try:
        report = json.loads((folder / _REPORT).read_text(encoding="utf-8"))
        return EncodedRows.load(folder), DatasetReport(**{key: _tuples(value) for key, value in report.items()})
    except (OSError, ValueError, TypeError) as error:
        rank_zero_warn(f"The cached tokens in {folder} are damaged ({error}) and are made again.")
        shutil.rmtree(folder, ignore_errors=True)
        return None


def keep_tokens(folder: Path, examples: EncodedRows, report: DatasetReport) -> EncodedRows:
    """Write tokens and their report to the cache.

    Returns:
        The tokens mapped from the cache, or the given ones if they could not be written.
    """

    def write(staging: Path) -> None:
        examples.save(staging)
        (staging / _REPORT).write_text(json.dumps(asdict(report)), encoding="utf-8")

    try:
        make_folder(folder, write)
        return EncodedRows.load(folder)
    except (OSError, ValueError) as error:
        rank_zero_warn(
            f"The tokens of {report.name} cannot be written to {folder.parent} ({error}): every process and every run "
            "makes them again. Free disk space, or set `cache_dir`."
        )
        return examples


def make_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Make a folder that appears in one rename with all its content; keep one that exists already.

    Args:
        folder: Its path.
        write: Fills the folder that it is given.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        write(staging)
        staging.chmod(0o755)  # mkdtemp denies other users access
        os.rename(staging, folder)
    except OSError:
        # Another process came first and put an equal folder there.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the files that the tokenizer is saved as: vocabulary, special tokens and chat template."""
    digest = hashlib.sha256(type(tokenizer).__name__.encode())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            digest.update(f"\n{path.relative_to(folder)}\n".encode())
            digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()


@functools.cache
def _code_digest() -> str:
    digest = hashlib.sha256(" ".join(map(version, ("transformers", "tokenizers", "jinja2"))).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
