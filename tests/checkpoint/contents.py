"""Checkpoint contents for tests, and a bitwise comparison of saved and loaded contents."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_protrain.checkpoint.atomic import Files
from lightning_protrain.checkpoint.consolidation import load_folder
from lightning_protrain.checkpoint.manifest import Manifest
from lightning_protrain.checkpoint.save import NewCheckpoint, save_payload
from lightning_protrain.checkpoint.serialize import split

RUN = "run"


def content(step: int) -> dict[str, Any]:
    """Return the checkpoint that Lightning would save after `step` steps of a tiny model with tied weights."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(3, 5, generator=generator)
    moments = {
        0: {"step": torch.tensor(float(step)), "exp_avg": torch.randn(3, 5, generator=generator)},
        1: {"step": torch.tensor(float(step)), "exp_avg": torch.randn(7, generator=generator).to(torch.bfloat16)},
    }
    return {
        "epoch": step // 10,
        "global_step": step,
        "state_dict": OrderedDict(
            {"embed.weight": weight, "head.weight": weight, "bias": torch.randn(7, generator=generator)}
        ),
        "optimizer_states": [{"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}]}],
        "lr_schedulers": [{"last_epoch": step, "_last_lr": [0.1]}],
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"current": {"ready": step}}}},
    }


def save(root: Path, step: int, files: Files | None = None, **options: Any) -> Manifest:
    """Saves `content(step)` as `step=STEP`, or under `name`."""
    name = options.pop("name", f"step={step}")
    return save_content(content(step), root / name, step, files, **options)


def save_content(
    what: dict[str, Any], target: Path, step: int, files: Files | None = None, run: str = RUN, **options: Any
) -> Manifest:
    """Saves a dict; options are fields of `NewCheckpoint`."""
    return save_payload(split(what), target, NewCheckpoint(run, step, **options), files or Files())


def load(path: Path) -> dict[str, Any]:
    """Verifies and loads."""
    return load_folder(path)


def same(one: Any, other: Any) -> bool:
    """Return whether both are equal in values, types and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(data)
