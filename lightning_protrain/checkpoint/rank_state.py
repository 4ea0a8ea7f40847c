"""Collects what only one rank has, above all its random generators, and shares it out to more or fewer ranks.

[Note: Other ranks]
A checkpoint of any number of ranks is resumed by any other. Weights, moments and schedules are whole in the files that
all ranks share. Of what a rank has for itself, one that there was keeps its own; a new one, with the number r, begins
with random numbers that are derived from those of rank `r % saved` and r, so that no two ranks draw the same, and the
same run has the same ones every time. In the middle of an epoch as many samples are passed over as were trained.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_protrain.checkpoint.atomic import Files
from lightning_protrain.checkpoint.consolidation import load_folder
from lightning_protrain.checkpoint.manifest import Manifest
from lightning_protrain.checkpoint.save import save_folder
from lightning_protrain.checkpoint.serialize import RANK_STATES
from lightning_protrain.checkpoint.verification import read_manifest


def capture(device: torch.device) -> dict[str, Any]:
    """The states of Python, NumPy, torch on the host, and torch on this device.

    Generators that the program has made itself are its own affair.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002  (the one that others draw from)
    state: dict[str, Any] = {
        "python": random.getstate(),
        # weights_only takes no arrays.
        "numpy": (
            kind,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device) -> list[str]:
    """Puts back what `capture` took.

    Returns:
        Names of generators that the state says nothing of: it was taken on another kind of device.

    Raises:
        ValueError: It is no such state.
    """
    try:
        kind, keys, position, has_gauss, gauss = state["numpy"]
        version, words, gauss_next = state["python"]
        random.setstate((version, tuple(words), gauss_next))
        np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))  # noqa: NPY002
        torch.set_rng_state(state["torch"].cpu())
        if device.type == "cpu":
            return []
        if device.type not in state:
            return [device.type]
        torch.get_device_module(device).set_rng_state(state[device.type].cpu(), device)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"The checkpoint's states of random numbers cannot be restored: {error}") from error
    return []


def derive_state(state: dict[str, Any], number: int, device: torch.device) -> dict[str, Any]:
    """States for a rank that there was not when `state` was captured: others, but the same ones every time.

    Args:
        state: Of a rank that there was.
        number: Of the new rank.
        device: Of the new rank.
    """
    told = state["torch"].cpu().numpy().tobytes() + number.to_bytes(8, "little")
    seed = int.from_bytes(hashlib.sha256(told).digest()[:8], "little") >> 1
    kind, keys, position, has_gauss, gauss = np.random.RandomState(seed % (1 << 32)).get_state()
    new: dict[str, Any] = {
        "python": random.Random(seed).getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }
    if device.type != "cpu":
        new[device.type] = torch.Generator(device).manual_seed(seed).get_state()
    return new


# Of the states of one rank: random states, place in the data, and states of others under their keys.
RANDOM, DATA, OTHERS = "random", "data", "others"
_PROGRESS = "epoch_loop.batch_progress"


def state_of_rank(states: Sequence[Any], rank: int, world_size: int, device: torch.device) -> dict[str, Any] | None:
    """What a rank goes on with, by [Note: Other ranks].

    Args:
        states: By rank of those that saved; those of others than `rank % len(states)` may be None.
        rank: Of this rank.
        world_size: Number of ranks that there are.
        device: Of this rank.

    Returns:
        None: the checkpoint has nothing of the kind.
    """
    if not states or not isinstance(states[rank % len(states)], dict):
        return None
    own: dict[str, Any] = states[rank % len(states)]
    if len(states) == world_size:
        return own
    others = own.get(OTHERS, {}) if rank < len(states) else {}
    random = own[RANDOM] if rank < len(states) else derive_state(own[RANDOM], rank, device)
    data = own.get(DATA)
    return {RANDOM: random, DATA: None if data is None else {**data, "moved": True}, OTHERS: others}


def without_duplicates(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same states, of which those of others are kept only where they are not those of rank 0.

    Args:
        states: By rank; those of others as bytes, by key.
    """
    first = states[0].get(OTHERS, {})
    kept = []
    for rank, state in enumerate(states):
        others = state.get(OTHERS, {})
        different = {key: value for key, value in others.items() if rank and first.get(key) != value}
        kept.append({**state, OTHERS: different})
    return kept


def rescale(loops: Mapping[str, Any], before: int, now: int) -> tuple[dict[str, Any], bool]:
    """The progress of loops in a world of another size: as many samples of the epoch are trained as were.

    Args:
        loops: State of a fit loop.
        before: Number of ranks that saved.
        now: Number of ranks that there are.

    Returns:
        The state, and whether the place is exact; else it is the batch before.
    """
    moved: dict[str, Any] = copy.deepcopy(dict(loops))
    progress = moved[_PROGRESS]
    trained = progress["current"]["ready"]
    place, rest = divmod(trained * before, now)
    ends = progress["is_last_batch"]
    if ends and rest:
        place += 1  # Never fewer than an epoch has now.
    for counts in (progress["current"], progress["total"]):
        for name in counts:
            counts[name] += place - trained
    return moved, ends or not rest


def reshard(content: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """The content of a checkpoint as `world_size` ranks would have saved it.

    Raises:
        ValueError: It has no states of ranks.
    """
    states = content.get(RANK_STATES)
    if not isinstance(states, list) or not states:
        raise ValueError("The checkpoint has nothing that belongs to single ranks: any number of ranks resumes it.")
    cpu = torch.device("cpu")
    new = [state_of_rank(states, rank, world_size, cpu) for rank in range(world_size)]
    loops, _ = rescale(content["loops"]["fit_loop"], len(states), world_size)
    return {**content, RANK_STATES: new, "loops": {**content["loops"], "fit_loop": loops}}


def reshard_folder(folder: Path, target: Path, world_size: int, files: Files | None = None) -> Manifest:
    """Writes a checkpoint as `world_size` ranks would have saved it; resuming needs no such thing.

    Args:
        folder: The checkpoint; it is verified before anything is written.
        target: The new one, not in the folder of the run that it is of.
        world_size: Number of ranks.
        files: What writes.

    Raises:
        ValueError: It is not good, has no states of ranks, or the target is beside it.
        OSError: The disk.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: give at least 1 rank (`--ranks`).")
    if target.absolute().parent == folder.absolute().parent:
        raise ValueError(
            f"{target} is where its run saves. Write to another folder: it would be a checkpoint of the run."
        )
    manifest = read_manifest(folder)
    content = reshard(load_folder(folder), world_size)
    target.parent.mkdir(parents=True, exist_ok=True)
    return save_folder(content, target, manifest.run, manifest.step, files or Files(), record=dict(manifest.record))
