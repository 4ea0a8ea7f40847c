"""Builds the processor of a model, which makes tokens and pixels of a text and its images."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from transformers import AutoProcessor

# Packages that processors of transformers import, by the extra of this package that installs them.
EXTRAS = {"vision": ("torchvision", "num2words", "timm", "av"), "audio": ("soundfile", "soxr")}


def load_processor(name: str) -> Any:
    """Load a processor.

    Args:
        name: A local folder, or a name on the Hugging Face Hub.

    Raises:
        OSError: If there is none.
        ValueError: If a package that it needs is not installed, or its settings are refused.
    """
    try:
        return AutoProcessor.from_pretrained(name)
    except ImportError as error:
        raise ValueError(f"The processor of {name!r} cannot be built: {missing_package(error)}") from error


def load_image_processor(name: str) -> Any:
    """Load a processor for images and text; see `load_processor`.

    Raises:
        ValueError: If there is none, it reads text only, or a package that it needs is not installed.
    """
    try:
        processor = load_processor(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"The data has images, and {name!r} has no processor for them: {error}") from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(
            f"The data has images, and {name!r} reads text only. Give the `tokenizer` of a model for both."
        )
    return processor


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
