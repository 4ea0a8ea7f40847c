"""LoRA adapters on a model of transformers, by PEFT: what a user says of them, and the model with them.

PEFT is imported where adapters are made: it takes bitsandbytes along, which takes seconds and prints. Transformers is
imported where its models are, as callbacks of any model come here.
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

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel


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


def load_adapter(model: PreTrainedModel, folder: str | Path, trainable: bool = True) -> PeftModel:
    """The model with the adapter that PEFT has saved in `folder`.

    Raises:
        ValueError: There is none, or it is of another base.
    """
    from peft import PeftModel

    refuse_other_base(model, folder)
    return PeftModel.from_pretrained(model, str(folder), is_trainable=trainable)


def refuse_other_base(model: nn.Module, folder: str | Path) -> None:
    """Reads of a saved adapter what it is for, and nothing of its weights.

    Raises:
        ValueError: The folder holds no adapter; or the adapter is of a model with other layers, or layers of other
            sizes, than `model` has. The first is named, with the sizes.
    """
    folder = Path(folder)
    weights = folder / "adapter_model.safetensors"
    if not (folder / "adapter_config.json").is_file() or not weights.is_file():
        raise ValueError(f"{str(folder)!r} holds no adapter of PEFT: adapter_config.json or {weights.name} is missing.")
    base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    with safe_open(weights, framework="pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 (no mapping)
    for path, what, size, own in _sizes_of(shapes, model):
        if size != own:
            found = "the model has no such layer" if own is None else f"that of the model has {what.format(own)}"
            raise ValueError(
                f"The adapter in {str(folder)!r} was trained on another base ({base}): its {path!r} has "
                f"{what.format(size)}, and {found}. Load the base that it was trained on."
            )


# Of the tensors of LoRA: what their dimension tells of the layer, which one that is, and what the layer calls it.
_SIDES = {
    "A.weight": ("{} inputs", 1, "in_features"),
    "B.weight": ("{} outputs", 0, "out_features"),
    "embedding_A": ("{} tokens", 1, "num_embeddings"),
    "embedding_B": ("{} features", 0, "embedding_dim"),
}


def _sizes_of(shapes: Mapping[str, tuple[int, ...]], model: nn.Module) -> Iterator[tuple[str, str, object, object]]:
    """Path of every adapted layer and weight that is saved whole, what is compared, in the adapter and in the model."""
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


def save_model(model: Any, folder: Path) -> None:
    """Write a model of transformers or the adapters of one of PEFT with `save_pretrained`; no network is asked.

    PEFT would ask the Hub whether the vocabulary is still that of the base, to know whether the embedding is wanted.
    """
    if not hasattr(model, "peft_config"):
        model.save_pretrained(folder)
        return
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    adapted = any(hasattr(layer, "base_layer") for layer in layers)
    model.save_pretrained(folder, save_embedding_layers=adapted or _has_other_vocabulary(model))


def _has_other_vocabulary(model: Any) -> bool:
    """Return whether the embedding has other rows than the base has, as far as this machine knows the base."""
    from transformers import AutoConfig

    name = model.active_peft_config.base_model_name_or_path
    try:
        base = AutoConfig.from_pretrained(name, local_files_only=True) if name else model.config
    except (OSError, ValueError):
        return False
    sizes = [getattr(each.get_text_config(), "vocab_size", None) for each in (base, model.config)]
    return sizes[0] != sizes[1]


def base_of(model: PreTrainedModel | PeftModel) -> Any:
    """The model of transformers without the container of PEFT; adapters in its layers stay where they are."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel) or model.active_peft_config.is_prompt_learning:
        return model
    return model.get_base_model()
