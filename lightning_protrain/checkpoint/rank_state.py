"""States that each rank has on its own, above all random states, and their use with more or fewer ranks.

A checkpoint can be resumed with any number of ranks. A rank that existed at the save gets its own states back. A new
rank r derives its random states from r and the states of rank `r % saved`, where `saved` is the number of ranks at the
save. So no two ranks draw the same numbers, and resuming twice draws the same numbers. A run that resumes within an
epoch skips as many samples as were trained.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def capture(device: torch.device) -> dict[str, Any]:
    """Return the states of the global random generators of Python, NumPy, and torch on the host and on this device."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": _without_arrays(np.random.get_state()),  # noqa: NPY002  (the global generator)
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def _without_arrays(state: Any) -> tuple[Any, ...]:
    """Return a state of NumPy as weights_only=True loads it."""
    kind, keys, position, has_gauss, gauss = state
    return kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)


def restore(state: dict[str, Any], device: torch.device) -> list[str]:
    """Restore random states from `capture`.

    Returns:
        Types of device whose random state is not restored: this device's type if the state has another one, else empty.

    Raises:
        ValueError: If the state does not have the form of `capture`.
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
        raise ValueError(f"The random states of the checkpoint cannot be restored: {error}") from error
    return []


def derive_state(state: dict[str, Any], number: int, device: torch.device) -> dict[str, Any]:
    """Derive deterministic random states for a rank that did not exist when `state` was captured.

    Args:
        state: Random states of a rank that existed.
        number: Number of the new rank.
        device: Device of the new rank.
    """
    source = state["torch"].cpu().numpy().tobytes() + number.to_bytes(8, "little")
    seed = int.from_bytes(hashlib.sha256(source).digest()[:8], "little") >> 1
    new: dict[str, Any] = {
        "python": random.Random(seed).getstate(),
        "numpy": _without_arrays(np.random.RandomState(seed % (1 << 32)).get_state()),
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }
    if device.type != "cpu":
        new[device.type] = torch.Generator(device).manual_seed(seed).get_state()
    return new


# Keys in the states of one rank: random states, position in the data, and states of other objects (by key).
RANDOM, DATA, OTHERS = "random", "data", "others"
_PROGRESS = "epoch_loop.batch_progress"


def state_of_rank(states: Sequence[Any], rank: int, world_size: int, device: torch.device) -> dict[str, Any] | None:
    """Return the states with which a rank resumes; None if the checkpoint has no states of ranks.

    Args:
        states: Saved states by rank; only the entry `rank % len(states)` is read.
        rank: Number of this rank.
        world_size: Number of ranks now.
        device: Device of this rank.
    """
    if not states or not isinstance(states[rank % len(states)], dict):
        return None
    state: dict[str, Any] = states[rank % len(states)]
    if len(states) == world_size:
        return state
    others = state.get(OTHERS, {}) if rank < len(states) else {}
    random = state[RANDOM] if rank < len(states) else derive_state(state[RANDOM], rank, device)
    data = state.get(DATA)
    return {RANDOM: random, DATA: None if data is None else {**data, "moved": True}, OTHERS: others}


def without_duplicates(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Remove the states of other objects (key `OTHERS`) that are equal to those of rank 0.

    Args:
        states: States by rank; the entry `OTHERS` maps keys to bytes.
    """
    first = states[0].get(OTHERS, {})
    states_kept = []
    for rank, state in enumerate(states):
        others = state.get(OTHERS, {})
        different = {key: value for key, value in others.items() if rank and first.get(key) != value}
        states_kept.append({**state, OTHERS: different})
    return states_kept


def rescale(loops: Mapping[str, Any], before: int, now: int) -> tuple[dict[str, Any], bool]:
    """Convert the progress of a fit loop to another number of ranks, so that the same number of samples is done.

    Args:
        loops: State of Lightning's fit loop.
        before: Number of ranks at the save.
        now: Number of ranks now.

    Returns:
        The state, and True if its batch index is exact; False if the index was rounded down.
    """
    moved: dict[str, Any] = copy.deepcopy(dict(loops))
    progress = moved[_PROGRESS]
    trained = progress["current"]["ready"]
    place, rest = divmod(trained * before, now)
    ends = progress["is_last_batch"]
    if ends and rest:
        place += 1  # Round up at the end of an epoch, so that it counts as finished.
    for counts in (progress["current"], progress["total"]):
        for name in counts:
            counts[name] += place - trained
    return moved, ends or not rest
