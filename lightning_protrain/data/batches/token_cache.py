"""Caches the tokens of data sets on disk, for all processes of a node and for later runs.

The name of an entry is a hash of everything that its tokens depend on: rows, settings, tokenizer, code of the package
`data`, and versions of libraries. So an entry is never out of date. An entry is written to a temporary folder and
renamed, so it is always complete. Processes memory-map its arrays, and so share the memory.
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
    """Return the folder of the cache entry for one split of a data set, which may not exist yet.

    Args:
        cache_dir: Folder of all caches of this package.
        terms: Everything besides the code that the tokens depend on; the `repr` of each value must be complete.
    """
    key = hashlib.sha256(repr((sorted(terms.items()), _code_digest())).encode())
    return cache_dir / "tokens" / key.hexdigest()[:32]


def load_tokens(folder: Path) -> tuple[EncodedRows, DatasetReport] | None:
    """Load the tokens and the report that `keep_tokens` wrote; return None if they are missing or damaged."""
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
        The tokens, memory-mapped from the cache; `examples` if they could not be written.
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
    """Create a folder with all its files atomically, by a rename; keep the folder if it exists already.

    The argument of `write` is the folder into which it writes the files.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        write(staging)
        staging.chmod(0o755)  # mkdtemp denies other users access
        os.rename(staging, folder)
    except OSError:
        # Another process may have created an equal folder in the meantime.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of the files that `save_pretrained` writes for a tokenizer."""
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
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
