"""LoRA adapters with PEFT: checks of the settings, and adding and saving of adapters.

PEFT imports bitsandbytes, which takes seconds and prints, so only functions that make adapters import PEFT. Only
functions that use transformers import it, because callbacks of modules without transformers import this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_protrain.models.planned_layers import adapted_layers
from lightning_protrain.progress import waiting

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel


# Adapt all linear layers except the head.
DEFAULTS: Mapping[str, Any] = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}

USUAL = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save")


def lora_config(settings: Mapping[str, Any]) -> LoraConfig:
    """Return the PEFT config for the settings.

    Args:
        settings: Arguments of `peft.LoraConfig`, e.g. `{"r": 16, "lora_alpha": 32}`. `target_modules` defaults to all
            linear layers but the head.

    Raises:
        ValueError: If a key is unknown, or PEFT refuses the settings.
    """
    from peft import LoraConfig

    known = inspect.signature(LoraConfig).parameters
    for key in settings:
        if key not in known:
            near = ", ".join(get_close_matches(key, known, n=3)) or ", ".join(USUAL)
            raise ValueError(f"`lora` has the key {key!r}, which peft.LoraConfig does not know. Try: {near}.")
    rank = settings.get("r", 8)
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"lora.r is {rank!r}; the rank must be a positive number.")
    try:
        return LoraConfig(**{**DEFAULTS, **settings})
    except TypeError as error:
        raise ValueError(f"`lora` is refused by peft.LoraConfig: {error}") from error


def with_lora(model: PreTrainedModel, settings: Mapping[str, Any]) -> PeftModel:
    """Return the model with adapters; only the adapters and the modules in `modules_to_save` are trained.

    Raises:
        ValueError: As in `lora_config`, or if `target_modules` matches no layer or matches a router.
    """
    from peft import get_peft_model

    config = lora_config(settings)
    if getattr(model, "is_quantized", False) and find_spec("bitsandbytes") is None:
        config._register_custom_module(adapted_layers())
    # Routers are subclasses of nn.Linear that return several tensors, which PEFT cannot adapt.
    routers = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and _is_router(each)]
    if config.target_modules == "all-linear" and config.exclude_modules is None and routers:
        config.exclude_modules = {name.rpartition(".")[2] for name in routers}
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        linear = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)}
        names = ", ".join(sorted(linear))
        raise ValueError(
            f"`lora` does not fit the model: {str(error).rstrip('.')}. Its linear layers are: {names}."
        ) from error
    for name, each in adapted.get_base_model().named_modules():
        if name in routers and hasattr(each, "base_layer"):
            raise ValueError(
                f"`lora` targets {name!r}, a router ({type(each.base_layer).__name__}), which PEFT cannot adapt. "
                f"Remove {name.rpartition('.')[2]!r} from `target_modules`, or add it to `exclude_modules`."
            )
    return adapted


def _is_router(layer: nn.Linear) -> bool:
    return type(layer).__module__.startswith("transformers.models.")


@waiting("Writing the model")
def save_model(model: Any, folder: Path) -> None:
    """Write a model of transformers, or the adapters of a PEFT model, with `save_pretrained`.

    PEFT saves the embedding if the vocabulary was resized, which it looks up on the Hub. This function does not use the
    network.
    """
    if not hasattr(model, "peft_config"):
        model.save_pretrained(folder)
        return
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    adapted = any(hasattr(layer, "base_layer") for layer in layers)
    model.save_pretrained(folder, save_embedding_layers=adapted or _has_other_vocabulary(model))


def _has_other_vocabulary(model: Any) -> bool:
    """Return True if the vocabulary size differs from the base model's; False if the base is not in the local cache."""
    from transformers import AutoConfig

    name = model.active_peft_config.base_model_name_or_path
    try:
        base = AutoConfig.from_pretrained(name, local_files_only=True) if name else model.config
    except (OSError, ValueError):
        return False
    sizes = [getattr(each.get_text_config(), "vocab_size", None) for each in (base, model.config)]
    return sizes[0] != sizes[1]


def base_of(model: PreTrainedModel | PeftModel) -> Any:
    """Return the model of transformers inside a PEFT model; its layers keep their adapters."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel) or model.active_peft_config.is_prompt_learning:
        return model
    return model.get_base_model()
