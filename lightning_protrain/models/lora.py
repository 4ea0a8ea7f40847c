"""LoRA adapters with PEFT: checks of the settings, and adding, loading and saving of adapters.

PEFT imports bitsandbytes, which takes seconds and prints, so only functions that make adapters import PEFT. The same
holds for transformers, because callbacks of modules without transformers import this file.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from torch import nn

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
    # Routers are subclasses of nn.Linear that return several tensors, which PEFT cannot adapt.
    routers = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and _is_router(each)]
    if config.target_modules == "all-linear" and config.exclude_modules is None and routers:
        config.exclude_modules = {name.rpartition(".")[2] for name in routers}
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        linear = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)}
        names = ", ".join(sorted(linear))
        raise ValueError(f"`lora` does not fit the model: {error} Its linear layers are: {names}.") from error
    for name, each in adapted.get_base_model().named_modules():
        if name in routers and hasattr(each, "base_layer"):
            raise ValueError(
                f"`lora` targets {name!r}, a router ({type(each.base_layer).__name__}), which PEFT cannot adapt. "
                f"Remove {name.rpartition('.')[2]!r} from `target_modules`, or add it to `exclude_modules`."
            )
    return adapted


def _is_router(layer: nn.Linear) -> bool:
    return type(layer).__module__.startswith("transformers.models.")


def load_adapter(model: PreTrainedModel, folder: str | Path, trainable: bool = True) -> PeftModel:
    """Return the model with the adapter that PEFT has saved in `folder`.

    Raises:
        ValueError: If the folder has no adapter, or the adapter belongs to another base model.
    """
    from peft import PeftModel

    refuse_other_base(model, folder)
    return PeftModel.from_pretrained(model, str(folder), is_trainable=trainable)


def refuse_other_base(model: nn.Module, folder: str | Path) -> None:
    """Raise ValueError if a saved adapter does not fit the model; only names and shapes of its weights are read.

    Raises:
        ValueError: If the folder has no adapter, or a layer of the adapter is missing in `model` or has another size.
    """
    folder = Path(folder)
    weights = folder / "adapter_model.safetensors"
    if not (folder / "adapter_config.json").is_file() or not weights.is_file():
        raise ValueError(f"{str(folder)!r} has no PEFT adapter: adapter_config.json or {weights.name} is missing.")
    base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    with safe_open(weights, framework="pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (no mapping)
    for path, what, size, own in _sizes_of(shapes, model):
        if size != own:
            found = "the model has no such layer" if own is None else f"the model's has {what.format(own)}"
            raise ValueError(
                f"The adapter in {str(folder)!r} was trained on another base model ({base}): its {path!r} has "
                f"{what.format(size)}, but {found}. Load the model that it was trained on."
            )


# For each kind of LoRA tensor: text for a size, its dimension in the tensor, and its attribute in the adapted layer.
_SIDES = {
    "A.weight": ("{} inputs", 1, "in_features"),
    "B.weight": ("{} outputs", 0, "out_features"),
    "embedding_A": ("{} tokens", 1, "num_embeddings"),
    "embedding_B": ("{} features", 0, "embedding_dim"),
}


def _sizes_of(shapes: Mapping[str, tuple[int, ...]], model: nn.Module) -> Iterator[tuple[str, str, object, object]]:
    """Yield each adapted layer and fully trained weight: path, text for a size, size in the adapter, in the model."""
    layers, weights = dict(model.named_modules()), dict(model.named_parameters())
    for key, shape in shapes.items():
        name = key.removeprefix("base_model.model.")
        path, _, kind = name.replace(".base_layer.", ".").rpartition(".lora_")
        if kind in _SIDES and len(shape) == 2:
            what, dimension, attribute = _SIDES[kind]
            own = getattr(layers.get(path), attribute, None)
            if own is not None or path not in layers:
                yield path, what, shape[dimension], own
        elif not path:
            weight = weights.get(name.replace(".base_layer.", "."))
            yield name, "the shape {}", list(shape), None if weight is None else list(weight.shape)


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
