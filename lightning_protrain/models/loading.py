"""Builds models of transformers and reads their weights from a folder into host memory, one tensor at a time.

transformers renames, splits and stacks the tensors of a checkpoint until they are the weights of its model.
`load_model` gives it tensors that are read from their file on demand, with plain reads. Memory-mapped pages would count
as memory of the process in addition to the cast weights, and weights that stay mapped would change with their file.
Before that, transformers gets the same names and shapes without values, on the meta device: a checkpoint of another
model is refused before anything is allocated. The resulting model without values is also the outline for ranks that do
not load, see [Note: Meta init] in distributed/meta_init.py.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
)
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

from lightning_protrain.config import format_bytes
from lightning_protrain.data.batches.encode import Encoded
from lightning_protrain.data.extras import missing_package
from lightning_protrain.data.gguf import hidden_bars, local_name
from lightning_protrain.data.hub import look_up
from lightning_protrain.models.bnb import float32_by_default, quantize_without_memory, quantizer
from lightning_protrain.models.shipped import published
from lightning_protrain.progress import waiting

_NOUNS = {"image": "images", "audio": "audio", "video": "videos"}
# Models that read audio but no images; those that also speak have no loss.
_LISTENING = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES.keys()
_KNOWN = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *_LISTENING}


def auto_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that builds the model of a config, preferably one that reads images or audio."""
    if config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForImageTextToText
    is_listening = config.model_type in _LISTENING - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    return AutoModelForMultimodalLM if is_listening else AutoModelForCausalLM


def read_config(model: str) -> PretrainedConfig:
    """Return the config of a model in a folder, in a GGUF file, or on the Hugging Face Hub.

    If the Hub cannot be read, sizes that come with the package are enough for a plan; weights are refused later.

    Raises:
        ValueError: If there is none, or its model is no causal language model.
    """
    model = local_name(model)
    look_up(model)
    if Path(model).is_dir() and not (Path(model) / CONFIG_NAME).is_file():
        raise ValueError(f"There is no {CONFIG_NAME} in {model!r}. Give a folder that `save_pretrained` has written.")
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except ImportError as error:
        raise ValueError(f"The config of {model!r} cannot be read: {missing_package(error)}") from error
    except StrictDataclassError as error:
        reason = str(error).strip().rpartition("\n")[2].strip()
        raise ValueError(f"The config of {model!r} contradicts itself or its model: {reason} Correct it.") from error
    except (OSError, ValueError) as error:
        if model in published():
            return AutoConfig.for_model(**published()[model].config)
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"No model could be loaded from {model!r}: {reason}. Give a folder with a {CONFIG_NAME}, or a name on the "
            "Hugging Face Hub."
        ) from error
    _check_kind(config)
    return config


def _check_kind(config: PretrainedConfig) -> None:
    """Raise ValueError if the model does not predict each token from the tokens before it.

    Raises:
        ValueError: With the type of the model.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name!r} is an encoder-decoder, but CausalLMModule trains decoder-only models, such as llama or "
            "qwen3. Train it with your own LightningModule; the strategies accept any."
        )
    if type(config) not in auto_class(config)._model_mapping:
        near = get_close_matches(name, _KNOWN, n=5, cutoff=0.6)
        raise ValueError(f"model_type {name!r} is no causal model of transformers. Near: {', '.join(near) or 'none'}.")
    if name in MODEL_FOR_MASKED_LM_MAPPING_NAMES and getattr(config, "is_decoder", True) is False:
        raise ValueError(
            f"{name!r} reads text in both directions. Set is_decoder: true in its config, or take a decoder."
        )


def dtype_called(name: str) -> torch.dtype:
    """Return the torch dtype of that name.

    Raises:
        ValueError: If there is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={name!r} is no dtype of torch. Give one of float32, bfloat16, float16, auto.")
    return dtype


def build_model(config: PretrainedConfig, dtype: str, attn_implementation: str | None = None) -> PreTrainedModel:
    """Build the model of a config with random weights, or without memory if the default device is meta.

    Args:
        config: Config of the model.
        dtype: Name of a torch dtype, or `auto` for the dtype of the config.
        attn_implementation: Attention of transformers; None lets it choose.

    Raises:
        ValueError: If a package that the model needs is not installed.
    """
    known = config.dtype if dtype == "auto" else dtype_called(dtype)
    try:
        model: PreTrainedModel = auto_class(config).from_config(
            config, dtype=known, attn_implementation=attn_implementation
        )
    except ImportError as error:
        raise ValueError(f"The model {config.model_type!r} cannot be built: {missing_package(error)}") from error
    return model


def check_media(config: PretrainedConfig, row: Encoded) -> None:
    """Refuse data with media that the model would ignore, or that would stop it in the middle of an epoch.

    Args:
        config: Config of the model.
        row: A row of the data with media.

    Raises:
        ValueError: If the model does not read what the processor makes of media, or looks for another token of them.
    """
    kind = auto_class(config)._model_mapping[type(config)]
    said = " and ".join(dict.fromkeys(_NOUNS[each] for each in row.media))
    ignored = [name for name in row.extras if name not in inspect.signature(kind.forward).parameters]
    if ignored:
        raise ValueError(
            f"The data has {said}, and {kind.__name__} does not read {', '.join(ignored)}, which the processor makes "
            f"of them. Give the model that the processor belongs to, or data without {said}."
        )
    tokens = [getattr(config, f"{each}_token_id", None) for each in dict.fromkeys(row.media)]
    for token in tokens:
        if token is not None and token not in row.input_ids:
            raise ValueError(
                f"The data has {said}, and the processor does not write token {token}, where {kind.__name__} reads "
                "them. Give the model that the processor belongs to."
            )


def vocab_size_of(config: PretrainedConfig) -> int:
    """Return the number of embedding rows of the language model."""
    return int(config.get_text_config().vocab_size)


def names_vocab_size(config: dict[str, Any]) -> bool:
    """Return True if a config, or its config of the language model, gives the vocabulary size."""
    return "vocab_size" in config or "vocab_size" in config.get("text_config", {})


def check_config(config: dict[str, Any]) -> None:
    """Refuse a config that transformers does not know, or that has a misspelt key.

    transformers would silently keep an unknown key.

    Args:
        config: Keys of a config, including `model_type`.

    Raises:
        ValueError: If `model_type` or a key is unknown; the message names similar ones.
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


# Names of dtypes in the safetensors format.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
# Maximum number of names in an error message.
_SHOWN = 8
T = TypeVar("T")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file that is read when it is indexed.

    Attributes:
        file: The opened file.
        name: Name of the tensor in the file.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
    """

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self.file.get_tensor(self.name)[index]

    def without_values(self) -> Tensor:
        """Return a tensor of this shape and dtype on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def load_once(
    trainer: Any,
    load: Callable[[], T],
    outline: Callable[[], T],
) -> T:
    """Return `load()`, or `outline()` on ranks that will share the weights of another rank.

    Use it in `configure_model` of any module, under any strategy or without a trainer. Every rank calls it.

    Args:
        trainer: Trainer of the module; None if there is none.
        load: Makes a model with values.
        outline: Makes the same model on the default device, which is meta during the call.

    Raises:
        RuntimeError: If loading failed on another rank.
    """
    shares = getattr(getattr(trainer, "strategy", None), "load_once", None)
    return load() if shares is None else shares(load, outline)


def load_model(
    folder: str,
    config: PretrainedConfig,
    dtype: str,
    attn_implementation: str | None = None,
    vocab_size: int | None = None,
    allow_pickle: bool = False,
    quantization: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Load a pretrained model into memory of its own; the module docstring explains how.

    Args:
        folder: Folder, GGUF file or Hugging Face id.
        config: Config of the model.
        dtype: Name of a torch dtype, or `auto` for the dtype of the config, else of the checkpoint.
        attn_implementation: Attention of transformers; None lets it choose.
        vocab_size: Number of rows that the embedding is resized to; None leaves it unchanged.
        allow_pickle: True allows to unpickle `.bin` files if there are no safetensors.
        quantization: Arguments of `BitsAndBytesConfig`; weights are quantised while they are read.

    Raises:
        ValueError: If there are no weights, only pickled ones, or quantised ones that cannot be trained; or if weights
            are missing, have another shape, or are not in the model.
    """
    folder = local_name(folder)
    refuse_quantised(config, folder)
    files = weight_files(folder)
    model: PreTrainedModel
    if files:
        stored = stored_tensors(files)
        kind, options = _kind_of(config), _options(config, dtype, attn_implementation, stored)
        _check(folder, kind, stored, options)
        if quantization is not None:
            options |= {"quantization_config": quantizer(quantization), "device_map": {"": "cpu"}}
        quantises = float32_by_default() if quantization is not None else nullcontext()
        with quantises, hidden_bars(), waiting("Loading weights"):
            model, _ = kind.from_pretrained(None, state_dict=stored, **options)
        _remember(model, folder)
    else:
        _refuse_pickle(folder, allow_pickle)
        if quantization is not None:
            raise ValueError(f"Pickled weights are not quantised: convert those in {folder!r} to safetensors.")
        kind, options = _kind_of(config), _options(config, dtype, attn_implementation)
        model, found = kind.from_pretrained(folder, use_safetensors=False, **options)
        _refuse_keys(folder, kind.__name__, found)
    if vocab_size not in (None, vocab_size_of(model.config)):
        model.resize_token_embeddings(vocab_size)
    return model


def outline_model(
    folder: str,
    config: PretrainedConfig,
    dtype: str,
    attn_implementation: str | None = None,
    vocab_size: int | None = None,
    allow_pickle: bool = False,
    quantization: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Return the model of `load_model` on the meta device; pickled weights are loaded.

    Raises:
        ValueError: As in `load_model`, except for errors in the values.
    """
    folder = local_name(folder)
    refuse_quantised(config, folder)
    files = weight_files(folder)
    if not files:
        with torch.device("cpu"):
            return load_model(folder, config, dtype, attn_implementation, vocab_size, allow_pickle, quantization)
    stored = stored_tensors(files)
    with torch.device("cpu"):  # from_pretrained needs another default device than meta.
        model = _check(folder, _kind_of(config), stored, _options(config, dtype, attn_implementation, stored))
    _remember(model, folder)
    if quantization is not None:
        quantize_without_memory(model, quantization)
    if vocab_size not in (None, vocab_size_of(model.config)):
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    return model


def weight_files(folder: str) -> list[Path]:
    """Return the safetensors files of a model, downloading them if needed; empty if it has none."""
    index = cached_file(folder, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    single = cached_file(folder, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if single is not None:
        return [Path(single)]
    if index is None:
        return []
    if Path(folder).is_dir():
        try:
            named = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is damaged: it names no files of weights. Copy or download it again.") from error
        files = [Path(folder) / name for name in sorted(set(named.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ValueError(f"{folder!r} lacks {_some(absent)}, which {SAFE_WEIGHTS_INDEX_NAME} names.")
        return files
    return [Path(file) for file in get_checkpoint_shard_files(folder, index)[0]]


def stored_tensors(files: list[Path]) -> dict[str, StoredTensor]:
    """Return all tensors of the files, by name.

    Raises:
        ValueError: If a file is damaged or not in the safetensors format, or a dtype is unknown.
    """
    stored = {}
    for path in files:
        try:
            file = safe_open(str(path), framework="pt", backend="pread")
        except SafetensorError as error:
            raise ValueError(
                f"{path} ({format_bytes(path.stat().st_size)}) is damaged, or no safetensors file: "
                f"{error}. Copy or download "
                "it again."
            ) from error
        for name in file.keys():  # noqa: SIM118 (no dict)
            view = file.get_slice(name)
            if view.get_dtype() not in _DTYPES:
                raise ValueError(f"{name!r} in {path} has the dtype {view.get_dtype()}, which cannot be trained.")
            stored[name] = StoredTensor(file, name, tuple(view.get_shape()), _DTYPES[view.get_dtype()])
    return stored


def dtype_of(dtype: str, config: PretrainedConfig, stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """Return the dtype of a name; `auto` means the config's, else that of the first floating-point weight."""
    if dtype != "auto":
        return dtype_called(dtype)
    known = config.dtype or config.get_text_config().dtype
    if known is not None:
        return known
    return next((one.dtype for one in stored.values() if one.dtype.is_floating_point), torch.float32)


def refuse_quantised(config: PretrainedConfig, folder: str) -> None:
    """Raise ValueError if the weights are stored in a quantised format.

    Raises:
        ValueError: With the name of the format.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return
    given = settings if isinstance(settings, Mapping) else settings.to_dict()
    method = str(given.get("quant_method", "unknown")).rpartition(".")[2].lower()
    raise ValueError(
        f"The weights in {folder!r} are quantised ({method}), and cannot be trained: supported are float32, "
        "bfloat16 and float16. Give the original model, with `quantization` if it is too large."
    )


def _kind_of(config: PretrainedConfig) -> Any:
    with torch.device("meta"):  # an automatic class can only load from folders
        return type(auto_class(config).from_config(config))


def _options(
    config: PretrainedConfig,
    dtype: str,
    attn_implementation: str | None,
    stored: Mapping[str, StoredTensor] | None = None,
) -> dict[str, Any]:
    """Return arguments of `from_pretrained` that let this module report shapes that differ, by name."""
    return {
        "config": config,
        "dtype": dtype if stored is None else dtype_of(dtype, config, stored),
        "attn_implementation": attn_implementation,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }


def _remember(model: PreTrainedModel, folder: str) -> None:
    """Record the source of a model, and load its generation config."""
    model.name_or_path = model.config.name_or_path = folder  # PEFT writes the first, transformers the second
    if cached_file(folder, "generation_config.json", _raise_exceptions_for_missing_entries=False):
        model.generation_config = GenerationConfig.from_pretrained(folder)


def _check(folder: str, kind: Any, stored: Mapping[str, StoredTensor], options: dict[str, Any]) -> PreTrainedModel:
    """Load names and shapes only.

    Raises:
        ValueError: The names or shapes differ from those of the model.
    """
    empty = {name: tensor.without_values() for name, tensor in stored.items()}
    model: PreTrainedModel
    try:
        with hidden_bars():  # nothing is loaded yet
            model, found = kind.from_pretrained(None, state_dict=empty, **{**options, "device_map": {"": "meta"}})
    except RuntimeError as error:
        raise ValueError(
            f"The tensors in {folder!r} have shapes that cannot be put together into the weights of a "
            f"{options['config'].model_type!r} model; the report above names them. Check that config.json is theirs."
        ) from error
    _refuse_keys(folder, options["config"].model_type, found)
    return model


def _refuse_keys(folder: str, name: str, found: Mapping[str, Any]) -> None:
    shapes = [f"{key} {tuple(there)}, not {tuple(here)}" for key, there, here in sorted(found["mismatched_keys"])]
    said = [
        f"{what}: {_some(sorted(keys))}"
        for what, keys in (
            ("missing", found["missing_keys"]),
            ("not in the model", found["unexpected_keys"]),
            ("of another shape", shapes),
        )
        if keys
    ]
    if said:
        raise ValueError(
            f"The weights in {folder!r} are not those of the {name!r} model of its config. {'; '.join(said)}. Check "
            "that config.json is theirs, and that the checkpoint is whole."
        )


def _refuse_pickle(folder: str, allow_pickle: bool) -> None:
    found = [
        name
        for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
        if cached_file(folder, name, _raise_exceptions_for_missing_entries=False)
    ]
    if not found:
        raise ValueError(f"There are no weights in {folder!r}: neither {SAFE_WEIGHTS_NAME} nor files of an index.")
    if not allow_pickle:
        raise ValueError(
            f"The weights in {folder!r} are pickled ({found[0]}), and a pickle can run any program. Convert them to "
            "safetensors, or set allow_pickle: true if you trust who made them."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
