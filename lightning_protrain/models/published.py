"""Search for the config of a model by its name: a folder, a file, the Hub's cache, shipped configs, or the Hub.

Shipped configs come before the Hub, because they are equal to the published ones and need no network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import CONFIG_NAME

from lightning_protrain.data.hub import is_path
from lightning_protrain.models.loading import is_key, read_config, refuse_quantised
from lightning_protrain.models.shipped import Published as Published
from lightning_protrain.models.shipped import published as published


@dataclass(frozen=True)
class NamedConfig:
    """The config of a model that a user has named.

    Attributes:
        name: Name of the model.
        config: Keys of a config of transformers.
        source: Source of the config, for messages, such as "the Hugging Face Hub".
    """

    name: str
    config: Mapping[str, Any]
    source: str


def find_config(name: str) -> NamedConfig:
    """Return the config of the model called `name`.

    Args:
        name: Name on the Hub, with or without its owner, or path of a config.json or its folder.

    Raises:
        ValueError: If no config is found; the message says why, and suggests similar names.
    """
    shipped = _shipped(name)
    if is_path(name) and (shipped is None or Path(name).exists()):  # qwen/qwen3-8b beside a folder "qwen" is a name.
        kind = "file" if Path(name).is_file() else "folder"
        return NamedConfig(Path(name).name, _keys(read_config(name), name), f"the {kind} {name}")
    full = name if shipped is None else shipped.name
    cached = try_to_load_from_cache(full, CONFIG_NAME) if "/" in full else None
    if isinstance(cached, str):
        return NamedConfig(full, _keys(read_config(str(Path(cached).parent)), full), "the local cache of the Hub")
    if shipped is not None:
        return NamedConfig(full, shipped.config, "the sizes of published models that come with this package")
    return NamedConfig(name, _keys(read_config(name), name), "the Hugging Face Hub")


def _shipped(name: str) -> Published | None:
    """Return the shipped model called `name` (in any case, with or without its owner), or None."""
    wanted = name.lower()
    for model in published().values():
        if wanted in (model.name.lower(), model.name.lower().rpartition("/")[2]):
            return model
    return None


def _keys(config: PretrainedConfig, name: str) -> dict[str, Any]:
    """Return the keys of a config that differ from the defaults of its model type, and `model_type`."""
    refuse_quantised(config, name)
    text = config.get_text_config()
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        value = getattr(text, key, 1)
        if type(value) is int and value < 1:
            raise ValueError(f"The config of {name!r} has {key}={value}: correct it to a number above zero.")
    defaults = AutoConfig.for_model(config.model_type)
    keys = {key: value for key, value in config.to_diff_dict().items() if is_key(key, defaults)}
    return {**keys, "model_type": config.model_type}
