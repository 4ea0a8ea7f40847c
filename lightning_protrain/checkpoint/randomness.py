"""The state of every generator of random numbers that a training step may draw from, as plain values and tensors."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


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


def derive(state: dict[str, Any], number: int, device: torch.device) -> dict[str, Any]:
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
