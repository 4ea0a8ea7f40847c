"""Export of a trained model from a checkpoint to a folder that transformers or PEFT can load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.utils import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_FILE

from lightning_protrain.checkpoint.consolidation import load_folder, load_stock
from lightning_protrain.checkpoint.references import fill, source_names
from lightning_protrain.config import DTYPES, format_bytes
from lightning_protrain.data.batches.processor import load_processor
from lightning_protrain.data.batches.tokenizer import load_tokenizer, unpack_files
from lightning_protrain.data.gguf import local_name
from lightning_protrain.data.hub import hub_file, hub_refusals, look_up
from lightning_protrain.models.float32_masters import float32_weights
from lightning_protrain.models.loading import StoredModel, build_model, untie, vocab_size_of
from lightning_protrain.models.lora import castable_weights, save_model, with_lora
from lightning_protrain.models.model_card import TrainingFacts, facts_of_checkpoint, warning_of_cards, write_card
from lightning_protrain.progress import waiting

_PREFIX = "model."
_SHOWN = 8
_TOKENIZER_BYTES = 64 << 20  # Reserved disk space for all files but the weights.


def export(checkpoint: Path, target: Path, tokenizer: str | None = None, dtype: str | None = None) -> None:
    """Write a trained model in the format of transformers, or trained adapters in the format of PEFT.

    Args:
        checkpoint: A folder of ProTrainCheckpoint, or a `.ckpt` file.
        target: New folder; it is renamed to this path when it is complete.
        tokenizer: Folder or name of a tokenizer to add; None adds the tokenizer of the training with its chat template
            or, if the checkpoint has none, that of the pretrained model, if any.
        dtype: Dtype to cast weights to; None keeps them bit for bit. `"float32"` writes the masters of SplitAdamW, if
            the checkpoint has its states, and warns if trained bfloat16 weights have no masters.

    Raises:
        ValueError: If the target exists, the checkpoint is damaged or not of CausalLMModule, or the tokenizer does not
            exist.
    """
    settings, model = _restored(checkpoint, target, dtype)
    _write(_cast(model, dtype), target, settings, tokenizer)


def merge(
    checkpoint: Path,
    target: Path,
    tokenizer: str | None = None,
    dtype: str | None = None,
    adapter: Path | None = None,
) -> None:
    """Merge trained adapters into the weights of the base model, and write the whole model.

    If the base model was quantised for training, its original weights are used.

    Args:
        checkpoint: As in `export`.
        target: As in `export`.
        tokenizer: As in `export`.
        dtype: Dtype to cast the merged weights to; None keeps them. `"float32"` merges in float32, as in `export`.
        adapter: New folder for the adapters alone, in the format of PEFT; None does not write it.

    Raises:
        ValueError: As in `export`, or if the checkpoint has no adapters.
    """
    if adapter is not None:
        _refuse_existing(adapter)
        if adapter.absolute() == target.absolute():
            raise ValueError(f"{target} is given for the merged model and for the adapters. Give two folders.")
        adapter.absolute().parent.mkdir(parents=True, exist_ok=True)
    settings, model = _restored(checkpoint, target, dtype)
    if settings.get("lora") is None:
        raise ValueError(f"{checkpoint} has no adapters to merge: it was trained whole. Use `export`.")
    if adapter is not None:
        _write(model, adapter, settings, tokenizer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" not in name:  # These may be memory-mapped from the checkpoint, and are changed below.
                parameter.data = parameter.data.to(torch.float32 if dtype == "float32" else parameter.dtype, copy=True)
    with waiting("Merging adapters"):
        merged = model.merge_and_unload()
    if not getattr(merged.config, "tie_word_embeddings", False):  # PEFT sets it if merging has untied weights.
        for _, *others in _sharing_names(merged):
            for name in others:
                _set_parameter(merged, name, nn.Parameter(merged.get_parameter(name).detach().clone()))
    _write(_cast(merged, dtype), target, settings, tokenizer)


def _restored(checkpoint: Path, target: Path, dtype: str | None) -> tuple[Mapping[str, Any], Any]:
    """Return the hyperparameters in a checkpoint, with facts on data and training, and the model.

    The facts are `processor_kwargs` and `chat_format` of the data, and `card`, a `TrainingFacts`.

    Raises:
        ValueError: As in `export`.
    """
    _refuse_existing(target)
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    if dtype not in (None, *DTYPES):
        raise ValueError(f"dtype={dtype!r}: give one of {', '.join(DTYPES)}.")
    content = load_folder(checkpoint) if checkpoint.is_dir() else load_stock(checkpoint)
    settings = content.get("hyper_parameters")
    if not isinstance(settings, Mapping) or not (settings.get("model") or settings.get("config")):
        raise ValueError(
            f"{checkpoint} does not name its model: it was not trained with CausalLMModule. Load it into the module "
            "that it was trained with, and call `save_pretrained`."
        )
    states = [state for state in content.values() if isinstance(state, Mapping)]
    chosen: dict[str, Any] = {
        key: next((state[key] for state in states if key in state), {}) for key in ("processor_kwargs", "chat_format")
    }
    place = settings.get("model")
    settings = {**settings, "model": place and local_name(place), **chosen, "card": TrainingFacts()}
    config = _config(settings)
    if settings.get("quantization") is None:  # Quantised weights are replaced by the original ones.
        fill(content, str(checkpoint))
    trained = content.get("state_dict", {})
    trained = float32_weights(content, str(checkpoint)) if trained and dtype == "float32" else trained
    weights = {name.removeprefix(_PREFIX): tensor for name, tensor in trained.items() if name.startswith(_PREFIX)}
    if settings.get("quantization") is not None:
        model = _on_original_weights(checkpoint, settings, config, weights)
    else:
        model = _filled(checkpoint, settings, config, weights)
    with warning_of_cards():
        settings["card"] = facts_of_checkpoint(content, model)
    return settings, model


def _on_original_weights(
    checkpoint: Path, settings: Mapping[str, Any], config: PretrainedConfig, weights: Mapping[str, Tensor]
) -> Any:
    """Return the model with trained adapters on its original weights, before quantisation."""
    base = StoredModel(
        settings["model"],
        config,
        settings["dtype"],
        vocab_size=settings.get("vocab_size"),
        allow_pickle=bool(settings.get("allow_pickle")),
    )
    model = with_lora(base.load(), settings["lora"])
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    lost = [name for name in trained if name not in weights]
    if lost:
        raise ValueError(f"Weights of adapters are missing in {checkpoint}: {', '.join(lost[:_SHOWN])}.")
    for name, parameter in trained.items():  # Masters keep their bits, and adapters are float32, as PEFT makes them.
        parameter.data = weights[name].to(torch.promote_types(weights[name].dtype, parameter.dtype))
    return model.eval()


def _filled(checkpoint: Path, settings: Mapping[str, Any], config: PretrainedConfig, weights: dict[str, Tensor]) -> Any:
    folder, vocab_size = settings.get("model"), settings.get("vocab_size")
    with torch.device("meta"):
        model: Any = build_model(config, "float32")
        if any(_have_split(weights, names) for names in _sharing_names(model)):
            untie(config)
            model = build_model(config, "float32")
        if vocab_size not in (None, vocab_size_of(config)):
            model.resize_token_embeddings(vocab_size, mean_resizing=False)
        if folder and hub_file(folder, "generation_config.json"):
            model.generation_config = GenerationConfig.from_pretrained(folder)
        if settings.get("lora") is not None:
            model = with_lora(model, settings["lora"])
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wrong = [f"{name} is missing" for name in shapes if name not in weights]
    wrong += [f"{name} is not in the model" for name in weights if name not in shapes]
    wrong += [
        f"{name} is {tuple(tensor.shape)}, not {shapes[name]}"
        for name, tensor in weights.items()
        if name in shapes and tuple(tensor.shape) != shapes[name]
    ]
    if wrong:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(
            f"The weights in {checkpoint} do not match the model that it names: {', '.join(wrong[:_SHOWN])}{more}."
        )
    ties = {name: first for first, *others in _sharing_names(model) for name in others}
    places: set[int] = set()
    for name, tensor in weights.items():  # Frozen weights with equal bytes are one tensor.
        weights[name] = tensor.clone() if tensor.data_ptr() in places and name not in ties else tensor
        places.add(tensor.data_ptr())
    model.load_state_dict(weights, assign=True)
    # `tie_weights` would also tie layers to which PEFT has given weights of their own.
    for name, first in ties.items():
        _set_parameter(model, name, model.get_parameter(first))
    return model.eval()


def _have_split(weights: Mapping[str, Tensor], names: list[str]) -> bool:
    """Return True if a checkpoint has different weights for layers that are tied in the model it began with."""
    values = [value for key, value in weights.items() if any(name in names for name in source_names(key))]
    return not all(value.dtype == values[0].dtype and torch.equal(value, values[0]) for value in values)


def _sharing_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several, such as the weight of tied layers."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [same for same in names.values() if len(same) > 1]


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    layer, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(layer), attribute, parameter)


def _config(settings: Mapping[str, Any]) -> PretrainedConfig:
    """Return the config that the model was built from; the vocabulary of a pretrained model is resized afterwards."""
    folder, vocab_size = settings.get("model"), settings.get("vocab_size")
    if folder:
        with hub_refusals(folder):
            try:
                look_up(folder)
                config = AutoConfig.from_pretrained(folder)
            except (OSError, ValueError) as error:
                reason = str(error).partition("\n")[0]
                raise ValueError(
                    f"The model that was trained is no longer in {folder!r}. Put it back, or a link to it. ({reason})"
                ) from error
        config.name_or_path = folder
    else:
        config = AutoConfig.for_model(**settings["config"])
        if vocab_size is not None:
            config.get_text_config().vocab_size = vocab_size
    return config


def _cast(model: Any, dtype: str | None) -> Any:
    """Return the model with its weights in a 16-bit dtype; do nothing for float32 weights, which are restored so."""
    if dtype not in (None, "float32"):
        for _, _, parameter in castable_weights(model, dtype):
            parameter.data = parameter.data.to(getattr(torch, dtype))
    return model


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise ValueError(f"{target} already exists. Move it away, or give another name.")


def _write(model: Any, target: Path, settings: Mapping[str, Any], tokenizer: str | None) -> None:
    _refuse_full_disk(model, target)
    partial = Path(f"{target}.partial")
    if partial.exists():  # Left by a killed command.
        shutil.rmtree(partial)
    try:
        _write_tokenizer(partial, settings, tokenizer)
        save_model(model, partial, settings["chat_format"].get("end_ids", ()))
        with warning_of_cards():
            write_card(partial, target.absolute().name, model, settings["card"])
        os.rename(partial, target)
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def _write_tokenizer(partial: Path, settings: Mapping[str, Any], name: str | None) -> None:
    """Write the tokenizer `name` or the trained one, and the processor of the pretrained model, if any."""
    folder, trained = settings.get("model"), settings["chat_format"].get("files")
    if name is None and trained is None and folder and hub_file(folder, "tokenizer_config.json"):
        load_tokenizer(folder).save_pretrained(partial)
    if folder and (hub_file(folder, "processor_config.json") or hub_file(folder, "preprocessor_config.json")):
        load_processor(folder, settings["processor_kwargs"]).save_pretrained(partial)
    if name is None and trained is None:
        return
    # The processor has written the tokenizer of the pretrained model, too.
    with TemporaryDirectory() as files:
        if name is None:
            unpack_files(trained, Path(files))
        else:
            load_tokenizer(name).save_pretrained(files)
        if Path(files, CHAT_TEMPLATE_FILE).exists():
            shutil.rmtree(partial / CHAT_TEMPLATE_DIR, ignore_errors=True)
        shutil.copytree(files, partial, dirs_exist_ok=True)


def _refuse_full_disk(model: Any, target: Path) -> None:
    """Raise ValueError if the disk has too little free space."""
    # Only the adapters of a PEFT model are written.
    written = (weight for weight in model.parameters() if weight.requires_grad or not hasattr(model, "peft_config"))
    storages = {weight.untyped_storage().data_ptr(): weight.nbytes for weight in written}
    needed, free = sum(storages.values()) + _TOKENIZER_BYTES, shutil.disk_usage(target.absolute().parent).free
    if free < needed:
        raise ValueError(
            f"{target} needs {format_bytes(needed)}, but its disk has {format_bytes(free)} free. Nothing was written. "
            "Free disk space, or give a folder on another disk."
        )
