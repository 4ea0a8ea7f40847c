"""Writes what was trained as a folder that transformers or PEFT read, from a checkpoint, without training anything."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoProcessor, GenerationConfig, PretrainedConfig
from transformers.utils import cached_file

from lightning_protrain.checkpoint.atomic import free_bytes, in_gib
from lightning_protrain.checkpoint.consolidation import load_folder, load_stock
from lightning_protrain.checkpoint.references import fill
from lightning_protrain.data.batches.tokenizer import load_tokenizer
from lightning_protrain.data.hub import look_up
from lightning_protrain.models.loading import build_model, load_model
from lightning_protrain.models.lora import save_model, with_lora

DTYPES = ("float32", "bfloat16", "float16")
_PREFIX = "model."
_SHOWN = 8
_TOKENIZER_BYTES = 64 << 20  # of files beside the weights, at most


def export(checkpoint: Path, target: Path, tokenizer: str | None = None, dtype: str | None = None) -> None:
    """Writes what was trained: a whole model as transformers reads it, or the adapters alone as PEFT reads them.

    Args:
        checkpoint: A folder of ProTrainCheckpoint, or a `.ckpt` file.
        target: The folder; it must not exist, and appears when it is whole.
        tokenizer: Folder or name of the tokenizer to put beside it; None: that of the pretrained model, if it is one.
        dtype: To cast weights to; None: as they were trained, bit for bit.

    Raises:
        ValueError: The target exists; the checkpoint is not good, or none of CausalLMModule; no such tokenizer.
    """
    settings, model = _restored(checkpoint, target, dtype)
    _write(model, target, settings, tokenizer)


def merge(
    checkpoint: Path,
    target: Path,
    tokenizer: str | None = None,
    dtype: str | None = None,
    adapter: Path | None = None,
) -> None:
    """Adds trained adapters to the weights that they adapt, and writes the whole model.

    Adapters of quantised weights are added to those that these were made from.

    Args:
        checkpoint: As in `export`.
        target: As in `export`.
        tokenizer: As in `export`.
        dtype: As in `export`; the sum is made before it is cast.
        adapter: A second folder, for the adapters alone as PEFT reads them.

    Raises:
        ValueError: As in `export`; or the checkpoint has no adapters.
    """
    if adapter is not None:
        _refuse_existing(adapter)
    settings, model = _restored(checkpoint, target, None)
    if settings.get("lora") is None:
        raise ValueError(f"{checkpoint} has no adapters to merge: it was trained whole. Use `export`.")
    if adapter is not None:
        _write(model, adapter, settings, tokenizer)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" not in name:  # What is mapped from the checkpoint must not be written to.
                parameter.data = parameter.data.clone()
    merged = model.merge_and_unload()
    _write(merged if dtype is None else merged.to(_dtype(dtype)), target, settings, tokenizer)


def _restored(checkpoint: Path, target: Path, dtype: str | None) -> tuple[Mapping[str, Any], Any]:
    """The arguments of the module in a checkpoint, and its model with the weights in the checkpoint.

    Raises:
        ValueError: As in `export`.
    """
    _refuse_existing(target)
    wanted = None if dtype is None else _dtype(dtype)
    content = load_folder(checkpoint) if checkpoint.is_dir() else load_stock(checkpoint)
    settings = content.get("hyper_parameters")
    if not isinstance(settings, Mapping) or not (settings.get("model") or settings.get("config")):
        raise ValueError(
            f"{checkpoint} does not say which model is in it: it was not trained with CausalLMModule. Load it into the "
            "module that it was trained with, and call `save_pretrained`."
        )
    if settings.get("quantization") is None:  # Quantised ones are replaced by what they were made from.
        fill(content, str(checkpoint))
    weights = {
        name.removeprefix(_PREFIX): tensor if wanted is None or not tensor.is_floating_point() else tensor.to(wanted)
        for name, tensor in content.get("state_dict", {}).items()
        if name.startswith(_PREFIX)
    }
    if settings.get("quantization") is not None:
        return settings, _above_whole_weights(checkpoint, settings, weights)
    return settings, _filled(checkpoint, settings, weights)


def _above_whole_weights(checkpoint: Path, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
    """The adapters of quantised weights, on the weights that those were made from."""
    base = load_model(
        settings["model"],
        _config(settings),
        settings["dtype"],
        vocab_size=settings.get("vocab_size"),
        allow_pickle=bool(settings.get("allow_pickle")),
    )
    model = with_lora(base, settings["lora"])
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    lost = [name for name in trained if name not in weights]
    if lost:
        raise ValueError(f"{checkpoint} lacks {', '.join(lost[:_SHOWN])}, which its adapters have.")
    model.load_state_dict({name: weights[name] for name in trained}, strict=False)
    return model.eval()


def _filled(checkpoint: Path, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
    folder = settings.get("model")
    with torch.device("meta"):
        model: Any = build_model(_config(settings), "float32")
        if folder and _has(folder, "generation_config.json"):
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
            f"The weights in {checkpoint} are not those of the model that it names: {', '.join(wrong[:_SHOWN])}{more}."
        )
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model.eval()


def _config(settings: Mapping[str, Any]) -> PretrainedConfig:
    """The config of the model that was trained: its vocabulary may be larger than that of where it came from."""
    folder, vocab_size = settings.get("model"), settings.get("vocab_size")
    if folder:
        try:
            look_up(folder)
            config = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ValueError(f"The model that was trained is not in {folder!r} any more: {error}") from error
        config.name_or_path = folder
    else:
        config = AutoConfig.for_model(**settings["config"])
    if vocab_size is not None:
        config.get_text_config().vocab_size = vocab_size
    return config


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is none of {', '.join(DTYPES)}.")
    return getattr(torch, name)


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise ValueError(f"{target} is there already. Move it away, or give another name.")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"{target} cannot be made: its folder does not exist.")


def _write(model: Any, target: Path, settings: Mapping[str, Any], tokenizer: str | None) -> None:
    _refuse_full_disk(model, target)
    folder = settings.get("model")
    partial = Path(f"{target}.partial")
    if partial.exists():  # of a command that was killed while it wrote
        shutil.rmtree(partial)
    try:
        if tokenizer is not None:
            load_tokenizer(tokenizer).save_pretrained(partial)
        elif folder and _has(folder, "tokenizer_config.json"):
            load_tokenizer(folder).save_pretrained(partial)
        if folder and (_has(folder, "processor_config.json") or _has(folder, "preprocessor_config.json")):
            AutoProcessor.from_pretrained(folder).save_pretrained(partial)
        save_model(model, partial)
        os.rename(partial, target)
    finally:
        if partial.exists():
            shutil.rmtree(partial)


def _refuse_full_disk(model: Any, target: Path) -> None:
    """Raise ValueError if the weights do not fit the disk, before anything is written."""
    # Of a model with adapters these alone are written.
    written = (weight for weight in model.parameters() if weight.requires_grad or not hasattr(model, "peft_config"))
    storages = {weight.untyped_storage().data_ptr(): weight.nbytes for weight in written}
    needed, free = sum(storages.values()) + _TOKENIZER_BYTES, free_bytes(target.absolute().parent)
    if free < needed:
        raise ValueError(
            f"{target} needs {in_gib(needed)}, and its disk has {in_gib(free)} free. Nothing was written. Make room, "
            "or give a folder on another disk."
        )


def _has(folder: str, name: str) -> bool:
    return cached_file(folder, name, _raise_exceptions_for_missing_entries=False) is not None
