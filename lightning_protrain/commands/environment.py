"""The report of `lightning-protrain env` for bug reports: versions, machine, limits and settings."""

from __future__ import annotations

import os
import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from textwrap import fill

import psutil
import torch
from packaging.requirements import Requirement

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

from lightning_protrain.cgroup_limits import cpu_quota, group_free_bytes
from lightning_protrain.config import __version__, hide_noise, version_of
from lightning_protrain.device.host import allowed_cores
from lightning_protrain.device.topology import describe_gpus
from lightning_protrain.planner.explain import WIDTH, short_bytes
from lightning_protrain.profiler.hardware import cpu_name
from lightning_protrain.torchvision_build import FAULT, LOADING_ERRORS

_PACKAGE = "lightning-protrain"
# Extras that training uses; the other extras are for tests and docs.
_EXTRAS = ("", "bnb", "tensorboard", "vision", "audio", "demo")
# Packages to report if requirements cannot be read.
_WITHOUT_METADATA = ("torch", "lightning", "transformers", "peft", "datasets", "bitsandbytes")
# Environment variables that influence a run, by name or prefix. They contain no secrets.
_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM", "LD_PRELOAD"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME", "WANDB_MODE"),
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK"),
    *("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES"),
)
# Names of packages to import, where they are not those to install.
_MODULES = {"pyyaml": "yaml", "pillow": "PIL"}
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCHINDUCTOR_")


def describe() -> str:
    """Return the report: one fact per line, with continued lines indented."""
    hide_noise()
    quota = cpu_quota()
    time = "" if quota is None else f", with the processor time of {quota:g}"
    gpus = {f"GPU {index}": gpu for index, gpu in enumerate(describe_gpus())}
    set_here = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name in _VARIABLES or name.startswith(_PREFIXES)
    ]
    facts = {
        _PACKAGE: f"{__version__}, Python {platform.python_version()}, {platform.platform()}",
        "packages": ", ".join(map(_with_version, _packages())),
        "packages that do not load": "; ".join(_failures()) or "none",
        "torch is built for": f"CUDA {torch.version.cuda}" if torch.version.cuda else torch.version.hip or "CPUs only",
        **(gpus or {"GPU": "none is visible"}),
        "CPU": f"{cpu_name()}, {len(allowed_cores())} of {os.cpu_count()} cores may be used{time}",
        "host memory": _memory(),
        "page-locked memory": _lockable(),
        "variables": ", ".join(set_here) or "none that influences a run",
    }
    lines = (f"{name}: {text}" for name, text in facts.items())
    return "\n".join(fill(line, WIDTH, subsequent_indent="  ", break_long_words=False) for line in lines)


def _with_version(name: str) -> str:
    return f"{name} {'(does not load)' if FAULT and name == 'torchvision' else version_of(name)}"


def _packages() -> list[str]:
    names: dict[str, None] = {}
    try:
        required = requires(_PACKAGE) or []
    except PackageNotFoundError:  # It is run from a folder, and not installed.
        return list(_WITHOUT_METADATA)
    for requirement in map(Requirement, required):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in _EXTRAS):
            names[requirement.name] = None
    return list(names)


def _failures() -> list[str]:
    """Return the packages that are installed and do not load, each with the reason."""
    failures = [FAULT] if FAULT else []
    for name in _packages():
        try:
            if version_of(name) != "(not installed)":
                import_module(_MODULES.get(name.lower(), name.replace("-", "_")))
        except LOADING_ERRORS as error:
            failures.append(f"{name} ({type(error).__name__}: {' '.join(str(error).split())})")
    return failures


def _memory() -> str:
    memory, left = psutil.virtual_memory(), group_free_bytes()
    parts = [f"{short_bytes(memory.total)}, of which {short_bytes(memory.available)} are free"]
    parts.append("no limit of a control group" if left is None else f"control groups allow {short_bytes(left)}")
    if os.path.isdir("/dev/shm"):
        parts.append(f"/dev/shm has {short_bytes(psutil.disk_usage('/dev/shm').free)} free")
    return "; ".join(parts)


def _lockable() -> str:
    if resource is None:
        return "the limit is not known on this system"
    bound, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "no limit" if bound == resource.RLIM_INFINITY else f"limit of {short_bytes(bound)}"
