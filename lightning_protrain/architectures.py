"""Which models of transformers can be trained, and by which class they are built."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

_KNOWN = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}


def auto_class(config: PretrainedConfig) -> Any:
    """The class of transformers that builds the model of a config: one that reads images, where there is one."""
    reads_images = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def read_config(model: str) -> PretrainedConfig:
    """The config of a model in a folder, or on the Hugging Face Hub.

    Raises:
        ValueError: There is none.
    """
    try:
        return AutoConfig.from_pretrained(model)
    except OSError as error:
        reason = str(error).rstrip(".\n")
        raise ValueError(
            f"No model could be loaded from {model!r}: {reason}. Give a folder with a config.json, or a name on the "
            "Hugging Face Hub."
        ) from error


def dtype_called(name: str) -> torch.dtype:
    """The dtype of torch of that name.

    Raises:
        ValueError: There is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={name!r} is no dtype of torch. Give one of float32, bfloat16, float16, auto.")
    return dtype


def build_model(config: PretrainedConfig, dtype: str, attn_implementation: str | None = None) -> PreTrainedModel:
    """The model of a config with random weights, or without memory where the default device is meta.

    Args:
        config: Of the model.
        dtype: Name of a dtype of torch, or `auto`: that of the config.
        attn_implementation: Attention of transformers; None lets it choose.
    """
    known = config.dtype if dtype == "auto" else dtype_called(dtype)
    model: PreTrainedModel = auto_class(config).from_config(
        config, dtype=known, attn_implementation=attn_implementation
    )
    return model


def vocab_size_of(config: PretrainedConfig) -> int:
    """Rows of the embedding of the language model."""
    return int(config.get_text_config().vocab_size)


def names_vocab_size(config: dict[str, Any]) -> bool:
    """Whether the keys of a config, or of the config of its language model, say how large the vocabulary is."""
    return "vocab_size" in config or "vocab_size" in config.get("text_config", {})


def check_config(config: dict[str, Any]) -> None:
    """Refuses a config that transformers would not know, or whose misspelt keys it would silently keep.

    Args:
        config: Keys of a config, `model_type` among them.

    Raises:
        ValueError: An unknown `model_type` or key; near ones are named.
    """
    model_type = config.get("model_type")
    if model_type not in _KNOWN:
        near = ", ".join(get_close_matches(str(model_type), _KNOWN, n=5, cutoff=0.4))
        raise ValueError(f"model_type {model_type!r} is no causal model of transformers. Near: {near or 'none'}.")
    defaults = AutoConfig.for_model(model_type)
    for key in config:
        if not hasattr(defaults, key):
            near = ", ".join(get_close_matches(key, vars(defaults), n=5))
            raise ValueError(f"{key!r} is no key of the config of {model_type!r}. Near: {near or 'none'}.")
