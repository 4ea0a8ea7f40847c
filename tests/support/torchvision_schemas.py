"""Lets a torchvision that was built for CUDA be imported beside a torch that was built for CPUs.

An index may offer a build of torch for CPUs, and of torchvision the build for CUDA alone. Its compiled operators do not
load there, and `import torchvision` fails as two of their schemas are missing; with it fail Lightning and transformers.
The Python part, which is all that processors of images and video call, works once the schemas are declared.
"""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

_DECLARATION = """

# Written by the tests of lightning-protrain: the compiled operators were built for another torch. They stay out;
# without the schemas of these two, `import torchvision` would fail.
if not _has_ops():
    _schemas = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _schemas.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def declare_missing(folder: Path | None = None) -> bool:
    """Declares the schemas in an installed torchvision whose operators do not load; True if they were not there.

    Args:
        folder: Folder of the package; None means the one that `import torchvision` finds.
    """
    if folder is None:
        spec = find_spec("torchvision")
        if spec is None or spec.origin is None:
            return False
        folder = Path(spec.origin).parent
    file = folder / "extension.py"
    text = file.read_text(encoding="utf-8")
    if "_schemas.define" in text or _loads(folder / "_C.so"):
        return False
    # In one step: several processes may do so at once.
    staged = file.with_name(f"extension.{os.getpid()}.tmp")
    staged.write_text(text + _DECLARATION, encoding="utf-8")
    staged.replace(file)
    return True


def _loads(library: Path) -> bool:
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True
