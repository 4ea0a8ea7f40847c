"""A CUDA device in software: code for a GPU runs on a machine without one.

    python -m pytest -p tests.stand_in_cuda tests/cuda
    STAND_IN_CUDA=2 PYTHONPATH=tests/stand_in_cuda/every_process lightning-protrain fit --config configs/quickstart.yaml

The import compiles device.cpp (with g++, once for each version of PyTorch), and gives `torch.cuda` the functions that a
PyTorch without CUDA lacks. From then on `torch.cuda.is_available()` is true, `device="cuda"` holds tensors, and NCCL
connects ranks. It shows tensors on the wrong device, calls that only run on a GPU, bytes of the device, steps of
several ranks, accesses to memory that no fence orders, and where the host waits. Only a real GPU shows times, and
kernels that the CPU does not have.

STAND_IN_CUDA is the number of devices (2), STAND_IN_CUDA_BYTES the memory of each (24 GiB). STAND_IN_CUDA_ORDER=0
allows accesses to memory that no fence orders.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import runpy
import subprocess
import sys
import sysconfig
import tempfile
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

SOURCES = (Path(__file__).with_name("device.cpp"), Path(__file__).with_name("order.h"))


def _folder() -> Path:
    """Return the folder of PyTorch, which is not imported."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def _compiled() -> Path:
    """Compile device.cpp, unless that was done before with the same PyTorch; return the library."""
    torch = _folder()
    files = (*SOURCES, torch / "version.py")
    key = b"".join(file.read_bytes() for file in files) + sys.version.encode() + os.fsencode(torch)
    folder = Path(tempfile.gettempdir()) / f"stand-in-cuda-{os.getuid()}"
    library = folder / f"{hashlib.sha256(key).hexdigest()[:16]}.so"
    if library.is_file():
        return library
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:  # Other processes may compile it at the same time.
        include = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
        compiler = [
            "g++",
            "-O1",
            "-std=c++20",
            "-fPIC",
            "-shared",
            "-w",
            "-DNDEBUG",
            "-DTORCH_EXTENSION_NAME=stand_in_device",
        ]
        libraries = [f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"]
        libraries += ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
        output = Path(made) / "device.so"
        command = [*compiler, *(f"-I{each}" for each in include), str(SOURCES[0]), "-o", str(output), *libraries]
        subprocess.run(command, check=True)
        output.replace(library)
    return library


def _loaded() -> ModuleType:
    """Load the device before PyTorch asks for the hooks of CUDA, which it does once."""
    if "torch" in sys.modules:
        raise ImportError("tests.stand_in_cuda must be imported before torch.")
    if (built := runpy.run_path(str(_folder() / "version.py"))["cuda"]) is not None:
        raise ImportError(f"This PyTorch is built for CUDA {built}, and the stand-in needs one for CPUs only.")
    library = str(_compiled())
    ctypes.CDLL(library)
    import torch  # noqa: F401

    spec = importlib.util.spec_from_file_location(
        "stand_in_device", loader=ExtensionFileLoader("stand_in_device", library)
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Nothing can be compiled for the device.
device = _loaded()
from tests.stand_in_cuda import patches  # noqa: E402

# Processes that tests start have the stand-in, too, with STAND_IN_PATH in their PYTHONPATH.
device.check_order(os.environ.get("STAND_IN_CUDA_ORDER") != "0")
patches.install(
    device, int(os.environ.setdefault("STAND_IN_CUDA", "2")), int(os.environ.get("STAND_IN_CUDA_BYTES", 24 * 2**30))
)
