"""Checkpoints of SplitAdamW with float32 weights, see [Note: Two forms of masters] in runtime/optim/split_states.py."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_protrain.checkpoint.contract import CONTRACT
from lightning_protrain.runtime.optim.split_adamw import master_of
from lightning_protrain.runtime.optim.split_numbers import sums_of
from lightning_protrain.runtime.optim.split_states import float32_state


def to_float32(content: dict[str, Any], name: str) -> None:
    """Convert a checkpoint into one of AdamW with float32 weights; warn if trained bfloat16 weights have no masters.

    Args:
        content: Content of a checkpoint, changed in place.
        name: Name of the checkpoint, for messages.
    """
    weights = content["state_dict"]
    weights.update(float32_weights(content, name))
    if CONTRACT in content:  # A resumed run does not compare a missing term.
        content[CONTRACT] = {term: value for term, value in content[CONTRACT].items() if term != "precision"}
    for saved in content.get("optimizer_states") or ():
        states = saved["state"]
        for index, state in states.items():
            if isinstance(state, Mapping) and state.keys() >= {"exp_avg", "exp_avg_sq"}:
                states[index] = float32_state(state)


def float32_weights(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the state dict of a checkpoint with masters in place of bfloat16 weights, and other weights as float32.

    Warn if bfloat16 weights have no masters.
    """
    masters, weights = masters_in(content), content["state_dict"]
    adapted = any(".lora_" in key for key in weights)  # Then the other weights are frozen, as a rule.
    low = [key for key, value in weights.items() if getattr(value, "dtype", None) is torch.bfloat16]
    lost = [key for key in low if key not in masters and (not adapted or ".lora_" in key)]
    if lost:
        warnings.warn(
            f"{name} has no float32 masters of {len(lost)} bfloat16 weights ({lost[0]}, ...), which are therefore cast "
            "to float32. Masters are in the optimizer states of SplitAdamW.",
            stacklevel=2,
        )
    return {
        key: masters.get(key, value).float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in weights.items()
    }


@torch.no_grad()
def masters_in(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the float32 masters of the weights in a checkpoint that SplitAdamW has trained, by name.

    The names of the optimizer's parameters are in the contract of ProTrainCheckpoint, and in the state of an optimizer
    that was made with names, such as CausalLMModule's. Without names, a state belongs to the weight with its shape and
    sums. Equal weights are taken in the order of the state dict.
    """
    weights = {key: value for key, value in content.get("state_dict", {}).items() if isinstance(value, Tensor)}
    aliases: dict[tuple[Any, ...], list[str]] = {}
    for key, value in weights.items():
        aliases.setdefault((value.untyped_storage().data_ptr(), value.storage_offset(), value.shape), []).append(key)
    same = {key: keys for keys in aliases.values() for key in keys}
    masters: dict[str, Tensor] = {}
    unnamed = []
    for names, state in _split_states(content):
        key = next((name for name in names if _is_of(state, weights.get(name))), None)
        if key is None:
            unnamed.append(state)
        else:
            masters |= dict.fromkeys(same[key], master_of(weights[key], state))
    if unnamed:
        left = {keys[0]: weights[keys[0]] for keys in aliases.values() if keys[0] not in masters}
        for key, state in _matched(unnamed, left):
            masters |= dict.fromkeys(same[key], master_of(weights[key], state))
    return masters


def _split_states(content: Mapping[str, Any]) -> Iterator[tuple[list[Any], Mapping[str, Any]]]:
    """Yield the states with remainders, and the names that their weights may have."""
    terms = (content.get(CONTRACT) or {}).get("optimizer") or []
    for number, saved in enumerate(content.get("optimizer_states") or ()):
        known = terms[number]["groups"] if number < len(terms) else []
        for at, group in enumerate(saved["param_groups"]):
            lists = [*known[at : at + 1], group.get("param_names") or []]
            for place, index in enumerate(group["params"]):
                state = saved["state"].get(index) or {}
                if "remainder" in state:
                    yield [names[place] for names in lists if place < len(names)], state


def _is_of(state: Mapping[str, Any], weight: Tensor | None) -> bool:
    return weight is not None and (weight.dtype, weight.shape) == (torch.bfloat16, state["remainder"].shape)


def _matched(
    states: Iterable[Mapping[str, Any]], weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each state with the name of its weight, by shapes and sums."""
    keys_by_sums: dict[Any, list[str]] = {}
    for key, weight in weights.items():
        if weight.dtype == torch.bfloat16:
            keys_by_sums.setdefault((weight.shape, *sums_of(weight.contiguous()).tolist()), []).append(key)
    for state in states:
        if keys := keys_by_sums.get((state["remainder"].shape, *state["sums"].tolist())):
            yield keys.pop(0), state
