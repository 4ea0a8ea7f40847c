"""Imports packages for reading media, names the extra that installs them, and hides bars of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from lightning_protrain.torchvision_build import FAULT

# Map from an extra of this package to packages that it installs for processors and for reading media.
EXTRAS = {"vision": ("torchvision", "num2words", "timm", "av"), "audio": ("soundfile", "soxr")}


def missing_package(error: Exception) -> str:
    """Return one line that names the missing package and the extra that installs it.

    Args:
        error: Error of transformers, whose text contains the name of the package.
    """
    text = " ".join(str(error).split())
    for extra, packages in EXTRAS.items():
        for package in packages:
            if package == "torchvision" and package in text.lower() and FAULT:
                return FAULT
            if package in text.lower() and find_spec(package) is None:
                return f'{package} is not installed. Run: pip install "lightning-protrain[{extra}]"'
    return text


def optional(package: str) -> Any:
    """Import a package that an extra installs; raise ValueError if it is missing."""
    try:
        return import_module(package)
    except ImportError as error:
        if FAULT and getattr(error, "name", "") == "torchvision":
            raise ValueError(FAULT) from error
        extra = next(name for name, packages in EXTRAS.items() if package in packages)
        raise ValueError(
            f'The data needs {package}, which is not installed. Run: pip install "lightning-protrain[{extra}]".'
        ) from error


@contextmanager
def hidden_bars() -> Iterator[None]:
    """Hide the progress bars of transformers in this context."""
    from transformers.utils import logging  # Importing it is slow.

    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows:
            logging.enable_progress_bar()
