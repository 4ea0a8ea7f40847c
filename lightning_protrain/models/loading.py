"""Construction of models of transformers, and loading of their weights into host memory, one tensor at a time.

transformers renames, splits and stacks the tensors of a checkpoint to make the weights of its model. `StoredModel`
first passes it meta tensors with the names and shapes in the files, so that wrong files are refused before memory is
allocated. Then it passes tensors that are read from their file when transformers uses them. They are read, not
memory-mapped: mapped pages would count as memory of the process, and mapped weights would change with their file.

The model on the meta device also serves ranks that do not load weights, see [Note: Meta init] in
distributed/meta_init.py.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
from transformers.modeling_utils import local_torch_dtype
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
)
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import get_checkpoint_shard_files

from lightning_protrain.config import format_bytes, plural
from lightning_protrain.data.batches.encode import Encoded
from lightning_protrain.data.extras import hidden_bars, missing_package
from lightning_protrain.data.gguf import local_name
from lightning_protrain.data.hub import file_names, hub_file, hub_refusals, look_up
from lightning_protrain.models.bnb import (
    keep_layout,
    quantize_without_memory,
    quantizer,
    require_installed,
)
from lightning_protrain.models.maskless import NAME
from lightning_protrain.models.shipped import published
from lightning_protrain.profiler.synthetic import num_positions as num_positions  # checked by CausalLMModule, too
from lightning_protrain.progress import waiting

_NOUNS = {"image": "images", "audio": "audio", "video": "videos"}
# Model types with audio input but without images. Types that generate speech are excluded: they have no loss.
_LISTENING = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES.keys()
_KNOWN = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *_LISTENING}
# These architectures mix segments and are not listed: those with recurrent or convolutional layers (mamba, qwen3_next,
# lfm2), those that compute ALiBi or learned positions from the attention mask (bloom, falcon, mpt, opt), and gpt_oss.
PACKING_MODEL_TYPES = frozenset({
    "arcee", "codegen", "cohere", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text",
    "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "granite", "granitemoe", "helium",
    "llama", "ministral", "ministral3", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi",
    "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
})  # fmt: skip


def auto_class(config: PretrainedConfig) -> Any:
    """Return the auto class of transformers for a config, with image or audio input if the model has it."""
    if config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForImageTextToText
    is_listening = config.model_type in _LISTENING - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    return AutoModelForMultimodalLM if is_listening else AutoModelForCausalLM


def read_config(model: str) -> PretrainedConfig:
    """Return the config of a model in a folder, in a GGUF file, or on the Hugging Face Hub.

    If the Hub is not reachable, use the config that this package ships for a published model. It is enough for a plan.

    Raises:
        ValueError: If no config is found, or the model is not a causal language model.
    """
    model = local_name(model)
    look_up(model)
    if not Path(model).is_file():
        try:
            with hub_refusals(model, known=published()):
                there = hub_file(model, CONFIG_NAME, required=True)
        except ValueError:
            if model in published():
                return AutoConfig.for_model(**published()[model].config)
            raise
        if there is None:
            raise ValueError(f"There is no {CONFIG_NAME} in {model!r}. {_instead(model)}")
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except ImportError as error:
        raise ValueError(f"The config of {model!r} cannot be read: {missing_package(error)}") from error
    except StrictDataclassError as error:
        reason = str(error).strip().rpartition("\n")[2].strip()
        raise ValueError(f"The config of {model!r} contradicts itself or its model: {reason} Correct it.") from error
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"No model could be loaded from {model!r}: {reason}. Give a folder with a {CONFIG_NAME}, or a name on the "
            "Hugging Face Hub."
        ) from error
    _check_kind(config)
    return config


def _instead(model: str) -> str:
    """Return advice for a folder or repository that lacks a config or weights, from the names of its files."""
    names = file_names(model)
    files = [name for name in names if name.lower().endswith(".gguf")]
    if files and Path(model).is_dir():
        return f"Give the path of its GGUF file {files[0]!r}."
    if files:
        return f"Download a GGUF file of it, as in `hf download {model} {files[0]} --local-dir .`, and give its path."
    if "adapter_config.json" in names:
        return (
            "It has adapters without their base model: give FOLDER as written by `lightning-protrain merge CHECKPOINT "
            "FOLDER` of their training."
        )
    return "Give a model or a folder written by `save_pretrained`."


def _check_kind(config: PretrainedConfig) -> None:
    """Raise ValueError if the model is not a causal language model."""
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name!r} is an encoder-decoder, but CausalLMModule trains decoder-only models, such as llama or "
            "qwen3. Train it with your own LightningModule: the strategies accept any module."
        )
    if type(config) not in auto_class(config)._model_mapping:
        near = get_close_matches(name, _KNOWN, n=5, cutoff=0.6)
        raise ValueError(
            f"model_type {name!r} is not a causal model of transformers. Similar: {', '.join(near) or 'none'}."
        )
    if name in MODEL_FOR_MASKED_LM_MAPPING_NAMES and getattr(config, "is_decoder", True) is False:
        raise ValueError(
            f"{name!r} reads text in both directions. Set is_decoder: true in its config, or use a decoder."
        )


def dtype_called(name: str) -> torch.dtype:
    """Return the torch dtype called `name`; raise ValueError if it does not exist."""
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype={name!r} is not a dtype of torch. Give one of float32, bfloat16, float16, auto.")
    return dtype


def build_model(config: PretrainedConfig, dtype: str, attn_implementation: str | None = None) -> PreTrainedModel:
    """Build the model of a config with random weights, or with meta tensors if the default device is meta.

    Args:
        config: Config of the model.
        dtype: Name of a torch dtype, or `auto` for the dtype of the config.
        attn_implementation: Attention implementation, such as `sdpa`; None lets transformers choose.

    Raises:
        ValueError: If a package that the model needs is not installed, or the attention implementation is unknown.
    """
    known = config.dtype if dtype == "auto" else dtype_called(dtype)
    with _refusals_of_classes(config):
        model: PreTrainedModel = auto_class(config).from_config(
            config, dtype=known, attn_implementation=attn_implementation
        )
    return model


def without_masks(model: PreTrainedModel) -> PreTrainedModel:
    """Let a text decoder with `sdpa` attention do without masks of tokens x tokens, see [Note: Spans]; return it."""
    config = model.config
    known = config.model_type in PACKING_MODEL_TYPES and model._can_set_attn_implementation()
    if known and config._attn_implementation == "sdpa":
        config._attn_implementation_internal = NAME
    return model


@contextmanager
def _refusals_of_classes(config: PretrainedConfig) -> Iterator[None]:
    """Raise ValueError for a missing package, and for an attention implementation that the model does not have."""
    try:
        yield
    except (ImportError, ValueError) as error:
        if isinstance(error, ValueError) and "attn_implementation" not in str(error):
            raise
        raise ValueError(f"The model {config.model_type!r} cannot be built: {missing_package(error)}") from error


def check_media(config: PretrainedConfig, row: Encoded) -> None:
    """Raise ValueError if the model does not accept the media inputs of a row.

    Args:
        config: Config of the model.
        row: An encoded row of the data with images, audio or video.

    Raises:
        ValueError: If the model's forward has no argument for an output of the processor, or the row lacks the model's
            placeholder token for media.
    """
    kind = auto_class(config)._model_mapping[type(config)]
    media = " and ".join(dict.fromkeys(_NOUNS[medium] for medium in row.media))
    ignored = [name for name in row.extras if name not in inspect.signature(kind.forward).parameters]
    if ignored:
        raise ValueError(
            f"The data has {media}, but {kind.__name__} does not accept {', '.join(ignored)}, which the processor "
            f"returns. Give the model that the processor belongs to, or data without {media}."
        )
    tokens = [getattr(config, f"{medium}_token_id", None) for medium in dict.fromkeys(row.media)]
    for token in tokens:
        if token is not None and token not in row.input_ids:
            raise ValueError(
                f"The data has {media}, but the processor does not write token {token}, which {kind.__name__} replaces "
                "by them. Give the model that the processor belongs to."
            )


def check_packing(config: PretrainedConfig) -> None:
    """Raise ValueError if a model is not in PACKING_MODEL_TYPES and might attend across segments."""
    if config.model_type not in PACKING_MODEL_TYPES:
        reads_media = set(getattr(config, "sub_configs", ())) - {"text_config"}
        why = "it makes positions of media from the whole row" if reads_media else ""
        raise ValueError(
            f"Packed rows need a model that keeps their segments apart, and {config.model_type!r} is not known to: "
            f"{why or 'its tokens would see those of other conversations'}. Set packing to false; length grouping "
            "saves most of the padding too."
        )


def check_positions(config: PretrainedConfig, longest: int, builds: bool, has_media: bool = False) -> None:
    """Raise ValueError if the rows of the data are longer than the sequences that the model is made for.

    Args:
        config: Config of the model.
        longest: Tokens of the longest row.
        builds: True if the user has given the config, so that its number of positions can be raised.
        has_media: True if rows have media. Positions in several dimensions (`mrope_section`) grow with the sides of an
            image, not with its tokens, so the number of tokens says nothing about them.
    """
    most, text = num_positions(config), config.get_text_config()
    by_side = has_media and "mrope_section" in (getattr(text, "rope_parameters", None) or {})
    if most is None or longest <= most or by_side:
        return
    name = text.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    other = f"raise {name} in `config`" if builds else "give a model with more"
    if not builds and getattr(text, "rope_parameters", None):
        other += ", or one whose config.json extends them with rope_scaling"
    raise ValueError(
        f"The longest row of the data has {plural(longest, 'token')}, but {config.model_type!r} has "
        f"{plural(most, 'position')}. Set max_length of the data to at most {most}, or {other}."
    )


def vocab_size_of(config: PretrainedConfig) -> int:
    """Return the number of embedding rows of the language model."""
    return int(config.get_text_config().vocab_size)


def names_vocab_size(config: dict[str, Any]) -> bool:
    """Return True if a config or its `text_config` has the key `vocab_size`."""
    return "vocab_size" in config or "vocab_size" in config.get("text_config", {})


def is_key(key: str, defaults: PretrainedConfig) -> bool:
    """Return True if a config has the key: its class declares it, or the model reads it if it is there.

    Some models read the size of a head that their config does not declare: Qwen3 MoE, OLMo 3, GLM 4.5.
    """
    if hasattr(defaults, key):
        return True
    kind = auto_class(defaults)._model_mapping.get(type(defaults), None)
    module = None if kind is None else inspect.getmodule(kind)
    return module is not None and f'getattr(config, "{key}"' in inspect.getsource(module)


def check_config(config: dict[str, Any]) -> None:
    """Raise ValueError if type, a key or a value of a config is wrong; transformers accepts unknown keys silently."""
    model_type = config.get("model_type")
    if model_type is None:
        raise ValueError("`config` has no `model_type`. Give one, such as llama.")
    if model_type not in _KNOWN:
        near = ", ".join(get_close_matches(str(model_type), _KNOWN, n=5, cutoff=0.4))
        raise ValueError(f"model_type {model_type!r} is not a causal model of transformers. Similar: {near or 'none'}.")
    defaults = AutoConfig.for_model(model_type)
    for key in config:
        if not is_key(key, defaults):
            near = ", ".join(get_close_matches(key, vars(defaults), n=5))
            raise ValueError(f"{key!r} is not a key of the config of {model_type!r}. Similar: {near or 'none'}.")
    try:
        made = AutoConfig.for_model(**config)
    except (ValueError, TypeError, StrictDataclassError) as error:
        reason = str(error).strip().rpartition("\n")[2].strip()
        raise ValueError(f"The config of the {model_type!r} model is invalid: {reason}") from error
    _check_kind(made)


# Dtypes by their names in the safetensors format.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
# Maximum number of names in an error message.
_SHOWN = 8
# Rows of two weights that are read at a time, to compare them.
_ROWS = 4096
T = TypeVar("T")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open safetensors file, which is read when it is indexed."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self.file.get_tensor(self.name)[index]


def load_once(trainer: Any, load: Callable[[], T], outline: Callable[[], T]) -> T:
    """Return `load()`, or `outline()` on ranks that will share the weights of another rank.

    Call it on every rank in `configure_model` of any module, with any strategy.

    Args:
        trainer: Trainer of the module, or None.
        load: Makes a model with values.
        outline: Makes the same model on the default device, which is meta during the call.

    Raises:
        RuntimeError: If loading failed on another rank.
    """
    shares = getattr(getattr(trainer, "strategy", None), "load_once", None)
    return load() if shares is None else shares(load, outline)


@dataclass(frozen=True)
class StoredModel:
    """A pretrained model to load.

    Attributes:
        folder: Folder, GGUF file or Hugging Face id.
        config: Config of the model.
        dtype: Name of a torch dtype; `auto` takes the dtype of the config, or else that of the weight files.
        attn_implementation: Attention implementation, such as `sdpa`; None lets transformers choose.
        vocab_size: New number of embedding rows; None leaves it unchanged.
        allow_pickle: True allows unpickling `.bin` files if there are no safetensors files.
        quantization: Arguments of `BitsAndBytesConfig`, to quantise weights while reading; None does not quantise.
    """

    folder: str
    config: PretrainedConfig
    dtype: str
    attn_implementation: str | None = None
    vocab_size: int | None = None
    allow_pickle: bool = False
    quantization: Mapping[str, Any] | None = None

    def load(self) -> PreTrainedModel:
        """Load the model into host memory, as the module's docstring explains.

        Raises:
            ValueError: If `quantization` is given without bitsandbytes; if there are no weights, or only pickled or
                already quantised ones; or if names or shapes of weights do not match the model.
        """
        if self.quantization is not None:
            require_installed()
        folder = local_name(self.folder)
        refuse_quantised(self.config, folder)
        files = weight_files(folder)
        model: PreTrainedModel
        stored = stored_tensors(files)
        if files:
            kind, options = _kind_of(self.config), self._options(stored)
            _check(folder, kind, stored, options)
            if self.quantization is not None:
                options |= {"quantization_config": quantizer(self.quantization), "device_map": {"": "cpu"}}
            # The kernels of bitsandbytes expect its code tables in float32.
            quantises = local_torch_dtype(torch.float32) if self.quantization is not None else nullcontext()
            with quantises, hidden_bars(), waiting("Loading weights"):
                model, _ = kind.from_pretrained(None, state_dict=stored, **options)
            keep_layout(model)
            _remember(model, folder)
        else:
            _refuse_pickle(folder, self.allow_pickle)
            if self.quantization is not None:
                raise ValueError(f"Pickled weights cannot be quantised: convert those in {folder!r} to safetensors.")
            kind, options = _kind_of(self.config), self._options()
            with hub_refusals(folder):
                model, loaded = kind.from_pretrained(folder, use_safetensors=False, **options)
            _refuse_keys(folder, kind.__name__, loaded)
        _settle_ties(model, stored)
        if self.vocab_size not in (None, vocab_size_of(model.config)):
            resize_rows(model, self.vocab_size)
        return model

    def outline(self) -> PreTrainedModel:
        """Return the model on the meta device; pickled weights are loaded nevertheless.

        Raises:
            ValueError: As in `load`.
        """
        folder = local_name(self.folder)
        refuse_quantised(self.config, folder)
        files = weight_files(folder)
        if not files:
            with torch.device("cpu"):
                return self.load()
        stored = stored_tensors(files)
        with torch.device("cpu"):  # from_pretrained fails if the default device is meta.
            model = _check(folder, _kind_of(self.config), stored, self._options(stored))
        _remember(model, folder)
        _settle_ties(model, stored)
        if self.quantization is not None:
            quantize_without_memory(model, self.quantization)
        if self.vocab_size not in (None, vocab_size_of(model.config)):
            model.resize_token_embeddings(self.vocab_size, mean_resizing=False)
        return model

    def _options(self, stored: Mapping[str, StoredTensor] | None = None) -> dict[str, Any]:
        """Return arguments for `from_pretrained`; mismatched shapes are returned instead of raised."""
        return {
            "config": self.config,
            "dtype": self.dtype if stored is None else dtype_of(self.dtype, self.config, stored),
            "attn_implementation": self.attn_implementation,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,
        }


def resize_rows(model: PreTrainedModel, num_rows: int) -> None:
    """Resize embedding and head; new rows are the mean of the old ones, so they depend on no random state."""
    old = vocab_size_of(model.config)
    model.resize_token_embeddings(num_rows, mean_resizing=False)
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    for parameter in {weight for layer in layers if layer is not None for weight in layer.parameters()}:
        parameter.data[old:] = parameter.data[:old].mean(0, dtype=torch.float32)


def untie(config: PretrainedConfig) -> None:
    """Let a config say that embedding and head are two weights; some models read it in the config of their text."""
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False


def _settle_ties(model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> None:
    """Untie embedding and head in the config if the files have two that differ; else a resize would tie them.

    Meta tensors are tied here if they are equal in the files, as from_pretrained ties tensors with values.
    """
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = {getattr(layer, "weight", None) for layer in layers} - {None}
    if len(weights) < 2 or not getattr(model.config, "tie_word_embeddings", False):
        return
    ends = [name.split(".")[-2:] for name, weight in model.named_parameters() if weight in weights]
    there = [tensor for name, tensor in stored.items() if name.split(".")[-2:] in ends]
    if len(there) == 2 and _are_equal(there[0], there[1], model.dtype):
        model.tie_weights()
    else:
        untie(model.config)


def _are_equal(one: StoredTensor, other: StoredTensor, dtype: torch.dtype) -> bool:
    """Return True if two stored tensors are equal after a cast to `dtype`; read some rows at a time."""
    num_rows = one.shape[0]
    rows = [slice(begin, min(begin + _ROWS, num_rows)) for begin in range(0, num_rows, _ROWS)]
    first, second = (tensor.file.get_slice(tensor.name) for tensor in (one, other))
    return one.shape == other.shape and all(torch.equal(first[some].to(dtype), second[some].to(dtype)) for some in rows)


def check_source(model: str, allow_pickle: bool) -> None:
    """Raise ValueError if a model has no config, or a folder has no weights that can be trained; download no weights.

    Args:
        model: Folder, GGUF file or Hugging Face id.
        allow_pickle: As in `StoredModel`.
    """
    config, folder = read_config(model), local_name(model)
    refuse_quantised(config, folder)
    if Path(folder).is_dir():
        files = weight_files(folder)
        stored_tensors(files)
        if not files:
            _refuse_pickle(folder, allow_pickle)
        return
    hub_file(folder, CONFIG_NAME, required=True)  # `read_config` needs no access to a model whose config is shipped.
    if not {SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME} & {*file_names(folder)}:
        _refuse_pickle(folder, allow_pickle)


def weight_files(folder: str) -> list[Path]:
    """Return the safetensors files of a model, downloaded if needed; empty if the model has none."""
    index, single = hub_file(folder, SAFE_WEIGHTS_INDEX_NAME), hub_file(folder, SAFE_WEIGHTS_NAME)
    if single is not None:
        return [Path(single)]
    if index is None:
        return []
    if Path(folder).is_dir():
        try:
            named = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is damaged: it has no valid `weight_map`. Copy or download it again.") from error
        files = [Path(folder) / name for name in sorted(set(named.values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ValueError(f"{folder!r} lacks {_some(absent)}, which {SAFE_WEIGHTS_INDEX_NAME} lists.")
        return files
    with hub_refusals(folder):
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
                f"{path} ({format_bytes(path.stat().st_size)}) is damaged, or not a safetensors file: {error}. Copy or "
                "download it again."
            ) from error
        for name in file.keys():  # noqa: SIM118 (not a dict)
            view = file.get_slice(name)
            if view.get_dtype() not in _DTYPES:
                raise ValueError(f"{name!r} in {path} has the dtype {view.get_dtype()}, which cannot be trained.")
            stored[name] = StoredTensor(file, name, tuple(view.get_shape()), _DTYPES[view.get_dtype()])
    return stored


def dtype_of(dtype: str, config: PretrainedConfig, stored: Mapping[str, StoredTensor]) -> torch.dtype:
    """Return the torch dtype called `dtype`; `auto` means the config's dtype, else that of the first float weight."""
    if dtype != "auto":
        return dtype_called(dtype)
    known = config.dtype or config.get_text_config().dtype
    if known is not None:
        return known
    return next((tensor.dtype for tensor in stored.values() if tensor.dtype.is_floating_point), torch.float32)


def refuse_quantised(config: PretrainedConfig, folder: str) -> None:
    """Raise ValueError if the weights are stored in a quantised format."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return
    given = settings if isinstance(settings, Mapping) else settings.to_dict()
    method = str(given.get("quant_method", "unknown")).rpartition(".")[2].lower()
    raise ValueError(
        f"The weights in {folder!r} are quantised ({method}) and cannot be trained: supported are float32, bfloat16 "
        "and float16. Give the original model, with `quantization` if it is too large."
    )


def _kind_of(config: PretrainedConfig) -> Any:
    with torch.device("meta"):  # Auto classes cannot load from a state dict, but the model's own class can.
        return type(auto_class(config).from_config(config))


def _remember(model: PreTrainedModel, folder: str) -> None:
    """Record the source of a model, and load its generation config."""
    model.name_or_path = model.config.name_or_path = folder  # PEFT saves the first, transformers the second.
    if hub_file(folder, "generation_config.json"):
        model.generation_config = GenerationConfig.from_pretrained(folder)


def _check(folder: str, kind: Any, stored: Mapping[str, StoredTensor], options: dict[str, Any]) -> PreTrainedModel:
    """Return the model on the meta device; raise ValueError if names or shapes of stored weights do not match it."""
    empty = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in stored.items()}
    model: PreTrainedModel
    try:
        with hidden_bars(), _refusals_of_classes(options["config"]):  # A bar would suggest that weights are loaded.
            model, loaded = kind.from_pretrained(None, state_dict=empty, **{**options, "device_map": {"": "meta"}})
    except RuntimeError as error:
        raise ValueError(
            f"The shapes of tensors in {folder!r} do not match a {options['config'].model_type!r} model; the report "
            "above names them. Check that config.json belongs to the weights."
        ) from error
    _refuse_keys(folder, options["config"].model_type, loaded)
    return model


def _refuse_keys(folder: str, name: str, loaded: Mapping[str, Any]) -> None:
    shapes = [f"{key} {tuple(there)}, not {tuple(here)}" for key, there, here in sorted(loaded["mismatched_keys"])]
    differences = [
        f"{what}: {_some(sorted(keys))}"
        for what, keys in (
            ("missing", loaded["missing_keys"]),
            ("not in the model", loaded["unexpected_keys"]),
            ("of another shape", shapes),
        )
        if keys
    ]
    if differences:
        raise ValueError(
            f"The weights in {folder!r} do not match the {name!r} model of its config. {'; '.join(differences)}. Check "
            "that config.json belongs to the weights, and that no file is missing."
        )


def _refuse_pickle(folder: str, allow_pickle: bool) -> None:
    """Raise ValueError if a model without safetensors files has no pickled weights either, or they are not allowed."""
    there = file_names(folder)
    pickled = next((name for name in (WEIGHTS_NAME, WEIGHTS_INDEX_NAME) if name in there), None)
    if pickled is None:
        hub_file(folder, SAFE_WEIGHTS_NAME, required=True)  # Offline, the weights may exist outside of the cache.
        raise ValueError(
            f"There are no weights in {folder!r}: no {SAFE_WEIGHTS_NAME} and no {SAFE_WEIGHTS_INDEX_NAME}. "
            f"{_instead(folder)}"
        )
    if not allow_pickle:
        raise ValueError(
            f"The weights in {folder!r} are pickled ({pickled}), and a pickle can execute any code. Convert them to "
            "safetensors, or, to train them, set allow_pickle: true if you trust their author."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
