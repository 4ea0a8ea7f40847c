"""Treats a torchvision that does not load as absent.

Beside a torch of another build, such as torch for CPUs and torchvision for CUDA, importing torchvision fails, and with
it every library that only looks whether torchvision is installed, such as Lightning's metrics. Text needs none of it.
So `lightning_protrain` imports this file first: if torchvision fails, no library finds it in this process.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import torch

# Errors of a package that was built for other versions, or whose files are damaged.
LOADING_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, LookupError, SyntaxError, TypeError, ValueError)


def _load() -> str:
    """Import torchvision, or hide it if it fails; return why it failed and what to do, or an empty string."""
    try:
        import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name == "torchvision":
            return ""
        failure: Exception = error
    except LOADING_ERRORS as error:
        failure = error
    else:
        return ""
    version = _version()
    _hide()
    release, _, build = torch.__version__.partition("+")
    # Since torch 2.0, torchvision 0.15, their minor versions grow together.
    minor = int(release.split(".")[1]) + 15
    index = f" with the --index-url for {build} from https://pytorch.org/get-started/locally" if build else ""
    return (
        f"torchvision {version} does not load beside torch {torch.__version__} ({' '.join(str(failure).split())}). "
        f'Run: pip install --force-reinstall --no-deps "torchvision==0.{minor}.*"{index}'
    )


def _version() -> str:
    """Return the version of torchvision with its build, such as "0.28.0+cu130", which its metadata may lack."""
    spec = find_spec("torchvision")
    with suppress(AttributeError, OSError, TypeError, UnicodeDecodeError):  # The file is not there, or damaged.
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")  # type: ignore[union-attr, arg-type]
        if match := re.search(r"^__version__ = ['\"](.+)['\"]$", text, re.MULTILINE):
            return match[1]
    try:
        return metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def _hide() -> None:
    """Let imports and queries of the installed version find no torchvision."""
    for name in [module for module in sys.modules if module.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    find = metadata.Distribution.from_name

    def from_name(name: str) -> metadata.Distribution:
        if name.lower() == "torchvision":
            raise metadata.PackageNotFoundError(name)
        return find(name)

    metadata.Distribution.from_name = from_name  # type: ignore[method-assign]


# Why torchvision does not load, and the remedy; empty if it loads or is not installed.
FAULT = _load()
