"""LoRA adapters on a model of transformers, by PEFT: what a user says of them, and the model with them.

PEFT is imported where adapters are made: it takes bitsandbytes along, which takes seconds and prints.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

# Of the layers that PEFT knows, all linear ones but the head: what most people fine-tune.
DEFAULTS: Mapping[str, Any] = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}

USUAL = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save")


def lora_config(settings: Mapping[str, Any]) -> LoraConfig:
    """The configuration of PEFT that the settings stand for.

    Args:
        settings: Arguments of `peft.LoraConfig`, e.g. `{"r": 16, "lora_alpha": 32}`. Without `target_modules`, all
            linear layers but the head are adapted.

    Raises:
        ValueError: An unknown key; near ones are named. What PEFT itself refuses.
    """
    from peft import LoraConfig

    known = inspect.signature(LoraConfig).parameters
    for key in settings:
        if key not in known:
            near = ", ".join(get_close_matches(key, known, n=3)) or ", ".join(USUAL)
            raise ValueError(f"lora has the key {key!r}, which peft.LoraConfig does not know. Try: {near}.")
    rank = settings.get("r", 8)
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"lora.r is {rank!r}; the rank must be a positive number.")
    try:
        return LoraConfig(**{**DEFAULTS, **settings})
    except TypeError as error:
        raise ValueError(f"lora is refused by peft.LoraConfig: {error}") from error


def with_lora(model: PreTrainedModel, settings: Mapping[str, Any]) -> PeftModel:
    """The model with adapters in it; only they are trained, and what `modules_to_save` names.

    Raises:
        ValueError: As `lora_config`; no layer of the model is one of `target_modules`.
    """
    from peft import get_peft_model

    config = lora_config(settings)
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        linear = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)}
        names = ", ".join(sorted(linear))
        raise ValueError(f"lora does not fit the model: {error} Its linear layers are: {names}.") from error
    return adapted


def base_of(model: PreTrainedModel | PeftModel) -> Any:
    """The model of transformers without the container of PEFT; adapters in its layers stay where they are."""
    if isinstance(model, PreTrainedModel) or model.active_peft_config.is_prompt_learning:
        return model
    return model.get_base_model()
