"""Which models of transformers can be trained, and by which class they are built."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
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
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import CONFIG_NAME

from lightning_protrain.hub import look_up

_KNOWN = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}


def auto_class(config: PretrainedConfig) -> Any:
    """The class of transformers that builds the model of a config: one that reads images, where there is one."""
    reads_images = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if reads_images else AutoModelForCausalLM


def read_config(model: str) -> PretrainedConfig:
    """Return the config of a model in a folder, or on the Hugging Face Hub.

    Raises:
        ValueError: There is none, or its model is no causal language model.
    """
    look_up(model)
    if Path(model).is_dir() and not (Path(model) / CONFIG_NAME).is_file():
        raise ValueError(f"There is no {CONFIG_NAME} in {model!r}. Give a folder that `save_pretrained` has written.")
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"No model could be loaded from {model!r}: {reason}. Give a folder with a {CONFIG_NAME}, or a name on the "
            "Hugging Face Hub."
        ) from error
    _check_kind(config)
    return config


def _check_kind(config: PretrainedConfig) -> None:
    """Refuse what does not predict each token from those before it.

    Raises:
        ValueError: With the type of the model.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name!r} is an encoder-decoder, and CausalLMModule trains models of a decoder alone, such as llama or "
            "qwen3. Train it with a LightningModule of your own; the strategies take any."
        )
    if type(config) not in auto_class(config)._model_mapping:
        near = get_close_matches(name, _KNOWN, n=5, cutoff=0.4)
        raise ValueError(f"model_type {name!r} is no causal model of transformers. Near: {', '.join(near) or 'none'}.")
    if name in MODEL_FOR_MASKED_LM_MAPPING_NAMES and getattr(config, "is_decoder", True) is False:
        raise ValueError(
            f"{name!r} reads text in both directions. Set is_decoder: true in its config, or take a decoder."
        )


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
    try:
        made = AutoConfig.for_model(**config)
    except (ValueError, TypeError, StrictDataclassError) as error:
        reason = str(error).strip().rpartition("\n")[2].strip()
        raise ValueError(f"This is no config of a {model_type!r} model: {reason}") from error
    _check_kind(made)
