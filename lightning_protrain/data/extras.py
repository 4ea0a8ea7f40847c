"""Names the extra of this package that installs what reading media needs."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

# Packages that processors of transformers import, and that read media, by the extra of this package with them.
EXTRAS = {"vision": ("torchvision", "num2words", "timm", "av"), "audio": ("soundfile", "soxr")}


def missing_package(error: ImportError) -> str:
    """Return one line that names the missing package and the extra that installs it.

    Args:
        error: What transformers raised; its text names the package.
    """
    said = " ".join(str(error).split())
    for extra, packages in EXTRAS.items():
        for package in packages:
            if package in said.lower() and find_spec(package) is None:
                return f'{package} is not installed. Run: pip install "lightning-protrain[{extra}]"'
    return said


def optional(package: str) -> Any:
    """Import a package of an extra.

    Raises:
        ValueError: If it is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        extra = next(name for name, packages in EXTRAS.items() if package in packages)
        raise ValueError(
            f'The data needs {package}, which is not installed. Run: pip install "lightning-protrain[{extra}]".'
        ) from error
