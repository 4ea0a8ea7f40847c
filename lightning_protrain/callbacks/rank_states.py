"""What only this rank has of a Trainer, for its own file of a checkpoint; see [Note: Other ranks]."""

from __future__ import annotations

import io
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_protrain.checkpoint.rank_state import OTHERS, own_state, rescale
from lightning_protrain.checkpoint.serialize import RANK_STATES

_CALLBACKS = "callbacks"
# Bytes of a state from which on all ranks are taken to have the same: it is not compared.
MOST_COMPARED = 1 << 20


def small_states(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, bytes]:
    """States of callbacks and of the data module, as bytes, by key: ranks may have different ones.

    Args:
        trainer: On several ranks, else nothing is only one's own.
        checkpoint: What Lightning has made on this rank.
    """
    if trainer.world_size == 1:
        return {}
    states = {f"{_CALLBACKS}/{key}": state for key, state in checkpoint.get(_CALLBACKS, {}).items()}
    data = _data_key(trainer)
    if data in checkpoint:
        states[data] = checkpoint[data]
    found = {}
    for key, state in states.items():
        if _tensor_bytes(state) <= MOST_COMPARED:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            found[key] = buffer.getvalue()
    return found


def take_own(trainer: Trainer, content: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The states of this rank; puts those of callbacks and of the data module where Lightning looks for them.

    Args:
        trainer: That resumes.
        content: Of the checkpoint; its progress becomes that of as many ranks as there are.
        name: The checkpoint, for messages.
    """
    states, now = content.get(RANK_STATES) or [], trainer.world_size
    own = own_state(states, trainer.global_rank, now, trainer.strategy.root_device)
    if own is None:
        return None
    for key, state in own.get(OTHERS, {}).items():
        loaded = torch.load(io.BytesIO(state), weights_only=True)
        if key.startswith(f"{_CALLBACKS}/"):
            content[_CALLBACKS] = {**content[_CALLBACKS], key.removeprefix(f"{_CALLBACKS}/"): loaded}
        else:
            content[key] = loaded
    if len(states) != now:
        loops, exact = rescale(content["loops"]["fit_loop"], len(states), now)
        content["loops"] = {**content["loops"], "fit_loop": loops}
        rank_zero_warn(
            f"{name} was saved by {len(states)} ranks, and there are {now}. Weights and optimizers are the same. The "
            f"samples of an optimizer step are {now}/{len(states)} of what they were. New ranks draw random numbers "
            "of their own."
            + ("" if exact else " The place in the epoch falls between two batches: some samples are trained twice.")
        )
    return own


def _data_key(trainer: Trainer) -> str | None:
    data = getattr(trainer, "datamodule", None)
    return None if data is None else type(data).__qualname__


def _tensor_bytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    if isinstance(state, dict):
        return sum(_tensor_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(_tensor_bytes(value) for value in state)
    return 0
