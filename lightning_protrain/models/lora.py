"""LoRA adapters with PEFT: checks of the settings, and adding and saving of adapters.

PEFT imports bitsandbytes, which takes seconds and prints, so only functions that make adapters import PEFT. Only
functions that use transformers import it, because callbacks of modules without transformers import this file.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_protrain.data.extras import hidden_bars
from lightning_protrain.models.planned_layers import adapted_layers
from lightning_protrain.progress import waiting

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel


# Adapt all linear layers except the head.
DEFAULTS: Mapping[str, Any] = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}

USUAL = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save")

_BY_PEFT = "It is written by PEFT; leave it out."
_NO_DATA = "It needs statistics that must be computed from data before training, which is not done here; leave it out."
_UNTESTED = "This variant of LoRA is not supported; leave it out."
# Keys of `peft.LoraConfig` that would be ignored, or whose adapters cannot be merged or loaded again.
_REFUSED = {
    "peft_type": "Only LoRA adapters are trained; leave it out.",
    "task_type": "Only causal language models are trained; leave it out.",
    "inference_mode": "It would freeze the adapters; leave it out.",
    **dict.fromkeys(("auto_mapping", "base_model_name_or_path", "revision", "peft_version"), _BY_PEFT),
    **dict.fromkeys(("megatron_config", "megatron_core"), "Layers of Megatron are not trained; leave it out."),
    **dict.fromkeys(("use_qalora", "qalora_group_size"), "GPTQ weights cannot be trained; leave it out."),
    **dict.fromkeys(("eva_config", "corda_config", "lora_ga_config"), _NO_DATA),
    **dict.fromkeys(("arrow_config", "kasa_config", "monteclora_config", "use_bdlora", "velora_config"), _UNTESTED),
    "alora_invocation_tokens": "Activated LoRA cannot be merged into the weights; leave it out.",
    "layer_replication": "Replicated layers share their weights, so their adapters cannot be merged; leave it out.",
    "loftq_config": "Use `quantization` to quantise the frozen weights.",
    "runtime_config": "It is no setting of a trained model; leave it out.",
}
_ACCEPTED = {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
# Initialisations that are computed from the weight of a linear layer.
_OF_LAYERS = ("pissa", "olora", "orthogonal")
_INITS = re.compile("gaussian|olora|orthogonal|mica|pissa(_niter_[0-9]+)?")


def lora_config(settings: Mapping[str, Any]) -> LoraConfig:
    """Return the PEFT config for the settings.

    Args:
        settings: Arguments of `peft.LoraConfig`, e.g. `{"r": 16, "lora_alpha": 32}`. `target_modules` defaults to all
            linear layers but the head.

    Raises:
        ValueError: If a key is unknown, or PEFT refuses the settings; or if a setting would be ignored, or its adapters
            could not be merged or loaded again.
    """
    from peft import LoraConfig

    known = inspect.signature(LoraConfig).parameters
    for key, value in settings.items():
        if key not in known:
            near = ", ".join(get_close_matches(key, known, n=3)) or ", ".join(USUAL)
            raise ValueError(f"`lora` has the key {key!r}, which peft.LoraConfig does not know. Try: {near}.")
        if key in _REFUSED and value not in (None, known[key].default, _ACCEPTED.get(key)):
            raise ValueError(f"lora.{key} is {value!r}. {_REFUSED[key]}")
    init = settings.get("init_lora_weights", True)
    if not isinstance(init, bool) and not (isinstance(init, str) and _INITS.fullmatch(init)):
        raise ValueError(
            f"lora.init_lora_weights is {init!r}. Supported are true, false, gaussian, olora, orthogonal, mica, pissa "
            "and pissa_niter_N."
        )
    if str(init).startswith(_OF_LAYERS) and settings.get("target_parameters"):
        raise ValueError(f"lora.init_lora_weights={init!r} cannot be combined with `target_parameters`. Leave it out.")
    rows = settings.get("trainable_token_indices")
    for ids in rows.values() if isinstance(rows, Mapping) else () if rows is None else (rows,):
        if not isinstance(ids, list | tuple) or not ids or not all(type(row) is int and row >= 0 for row in ids):
            raise ValueError(f"lora.trainable_token_indices is {rows!r}. Give the numbers of the rows to train.")
    rank = settings.get("r", 8)
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"lora.r is {rank!r}; the rank must be a positive number.")
    try:
        return LoraConfig(**{**DEFAULTS, **deepcopy(dict(settings))})  # PEFT changes lists of a config.
    except (TypeError, ValueError) as error:
        raise ValueError(f"`lora` is refused by peft.LoraConfig: {error}") from error


def with_lora(model: PreTrainedModel, settings: Mapping[str, Any]) -> PeftModel:
    """Return the model with adapters; only the adapters and the modules in `modules_to_save` are trained.

    Raises:
        ValueError: As in `lora_config`, or if `target_modules` matches no layer or matches a router, a name matches
            nothing, or the adapters could not be merged.
    """
    from peft import get_peft_model

    config = lora_config(settings)
    if getattr(model, "is_quantized", False) and find_spec("bitsandbytes") is None:
        config._register_custom_module(adapted_layers())
    # Routers are subclasses of nn.Linear that return several tensors, which PEFT cannot adapt.
    routers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and _is_router(module)]
    if config.target_modules == "all-linear" and config.exclude_modules is None and routers:
        config.exclude_modules = {name.rpartition(".")[2] for name in routers}
    _refuse_unmatched(model, settings)
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    try:
        adapted = get_peft_model(model, config)
    except (IndexError, NotImplementedError, TypeError, ValueError) as error:
        if "trainable_token_indices" in str(error):
            raise ValueError(
                "lora.target_modules names an embedding or a head whose rows are trained too: those of new tokens, or "
                "of `trainable_token_indices`. Leave the layer out, or name it in `modules_to_save` instead."
            ) from error
        names = ", ".join(sorted(linear))
        raise ValueError(
            f"`lora` does not fit the model: {str(error).rstrip('.')}. Its linear layers are: {names}."
        ) from error
    except (AttributeError, RuntimeError) as error:
        if not str(config.init_lora_weights).startswith(_OF_LAYERS):
            raise
        raise ValueError(
            f"lora.init_lora_weights={config.init_lora_weights!r} is not possible for quantised layers or experts in "
            f"one tensor: {error}. Leave it out, or choose other `target_modules`."
        ) from error
    for name, module in adapted.get_base_model().named_modules():
        if name in routers and hasattr(module, "base_layer"):
            raise ValueError(
                f"`lora` targets {name!r}, a router ({type(module.base_layer).__name__}), which PEFT cannot adapt. "
                f"Remove {name.rpartition('.')[2]!r} from `target_modules`, or add it to `exclude_modules`."
            )
    if str(config.init_lora_weights).startswith(_OF_LAYERS):
        _refuse_unfit(adapted, str(config.init_lora_weights))
    _refuse_unmergeable(adapted)
    if str(config.init_lora_weights).startswith("pissa_niter"):
        _keep_initial(adapted)
    return adapted


def with_rows(model: PreTrainedModel, settings: Mapping[str, Any], rows: Collection[int]) -> dict[str, Any]:
    """Return the settings such that these rows of the embedding and of the head are trained.

    Args:
        model: Model without adapters.
        settings: As in `lora_config`.
        rows: Numbers of the rows: ids of new tokens.

    Raises:
        ValueError: If the settings train one of two tied layers only.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = [name for name, layer in model.named_modules() if layer in (embedding, head)]
    saved = settings.get("modules_to_save") or ()
    frozen = [name for name in names if not any(name.endswith(other) for other in saved)]
    if not rows or not frozen:
        return dict(settings)
    if head is not None and head.weight is embedding.weight:
        if len(frozen) < len(names) and settings.get("ensure_weight_tying"):
            return dict(settings)
        if len(frozen) < len(names):
            raise ValueError(
                f"The rows of new tokens must be trained in {' and '.join(names)}, which are tied, but "
                "lora.modules_to_save names only one of them. Name both or none, or set lora.ensure_weight_tying."
            )
        frozen = [name for name in names if model.get_submodule(name) is embedding]
    chosen: Any = settings.get("trainable_token_indices") or {}
    if not isinstance(chosen, Mapping):
        chosen = {name: chosen for name in names if model.get_submodule(name) is embedding}
    indices = {key: list(those) for key, those in chosen.items()}
    for name in frozen:
        keys = [key for key in indices if name.endswith(key)]
        indices[name] = sorted({*rows, *(row for key in keys for row in indices.pop(key))})
    return {**settings, "trainable_token_indices": indices}


def _refuse_unmatched(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a name in the settings matches no module; PEFT would ignore it."""
    modules = [name for name, _ in model.named_modules()]
    for name in settings.get("modules_to_save") or ():
        if not any(module.endswith(name) for module in modules):
            raise ValueError(f"lora.modules_to_save names {name!r}, but no module of the model has this name.")
    excluded = settings.get("exclude_modules") or ()
    for name in () if isinstance(excluded, str) else excluded:
        if not any(f".{module}".endswith(f".{name}") for module in modules):
            raise ValueError(f"lora.exclude_modules names {name!r}, but no module of the model has this name.")
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in settings.get(key) or ():
            if not any(re.match(rf"(.*\.)?({pattern})$", module) for module in modules):
                raise ValueError(f"lora.{key} has {pattern!r}, which matches no module of the model.")


def _refuse_unfit(model: PeftModel, init: str) -> None:
    """Raise ValueError if PEFT does not apply the initialisation to a layer, or makes adapters of another shape."""
    for name, layer in model.get_base_model().named_modules():
        factors = getattr(layer, "lora_A", {})
        unfit = any(factors[key].weight.shape != (layer.r[key], layer.in_features) for key in factors)
        if unfit or getattr(layer, "lora_embedding_A", None):
            raise ValueError(
                f"lora.init_lora_weights={init!r} is not possible for {name!r} ({type(layer.base_layer).__name__}) "
                f"with r={layer.r['default']}. Leave it out, or lower `r`, or choose other `target_modules`."
            )


def _refuse_unmergeable(model: PeftModel) -> None:
    """Raise ValueError if adapters cannot be merged, or would change a layer without adapters when they are merged."""
    for name, layer in model.get_base_model().named_modules():
        if any(getattr(layer, "lora_bias", {}).values()) and layer.base_layer.bias is None:
            raise ValueError(
                f"lora.lora_bias cannot be merged into {name!r}, which has no bias. Leave it out, or let "
                "`target_modules` name layers with a bias only."
            )
        saved = getattr(layer, "modules_to_save", {})
        rows = layer if hasattr(layer, "trainable_tokens_delta") else None
        whole = rows.base_layer if rows is not None else layer.original_module if len(saved) else None
        lost = rows is not None or any(getattr(adapter, "bias", None) is None for adapter in saved.values())
        if lost and getattr(whole, "bias", None) is not None:
            setting = "ensure_weight_tying" if rows is None else "trainable_token_indices"
            raise ValueError(
                f"lora.{setting} would drop the bias of {_plain(name)!r}. Leave it out, and give the layer in "
                "`modules_to_save`."
            )
        if rows is not None and not (isinstance(whole, nn.Embedding | nn.Linear) and whole.weight.is_floating_point()):
            raise ValueError(
                f"lora.trainable_token_indices cannot train rows of {_plain(name)!r} ({type(whole).__name__}): the "
                "layer must not be quantised, nor named by another setting of `lora`."
            )
    sharers: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.get_base_model().named_parameters(remove_duplicate=False):
        if ".original_module." not in name:  # merging drops these
            sharers.setdefault(weight, []).append(name.rpartition(".")[0])
    for names in sharers.values():
        adapters = [model.get_base_model().get_submodule(name.removesuffix(".base_layer")) for name in names]
        if len({id(getattr(adapter, "tied_adapter", None) or adapter) for adapter in adapters}) > 1 and any(
            name.endswith(".base_layer") for name in names
        ):
            raise ValueError(
                f"`lora` adapts layers that share a tied weight ({', '.join(map(_plain, names))}): merged, the "
                "adapters of one layer would change the others. Name the layers in `modules_to_save`, or give a list "
                "of rows as `trainable_token_indices`."
            )


def _plain(name: str) -> str:
    """Return the name of a layer in the model without adapters."""
    return name.replace(".token_adapter", "").removesuffix(".base_layer")


def _keep_initial(model: PeftModel) -> None:
    """Store the random factors that PEFT has subtracted from the frozen weights; `save_model` adds them back.

    Without them, PEFT would subtract other random factors when it loads the adapters. The factors are stored in
    buffers, so they are in every checkpoint of the run.
    """
    for layer in model.modules():
        if getattr(layer, "lora_A", None):
            layer.register_buffer("initial_A", layer.lora_A["default"].weight.detach().clone())
            layer.register_buffer("initial_B", layer.lora_B["default"].weight.detach().clone())


def _is_router(layer: nn.Linear) -> bool:
    return type(layer).__module__.startswith("transformers.models.")


def castable_weights(model: nn.Module, dtype: str) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield module, attribute and value of the weights that are written in another dtype.

    Buffers are not, nor what transformers reads in float32 always: rounded, such a bias chooses other experts.
    """
    kept = () if dtype == "float32" else getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for path, layer in model.named_modules():
        for name, weight in list(layer._parameters.items()):
            if weight is not None and weight.is_floating_point() and not any(part in f"{path}.{name}" for part in kept):
                yield layer, name, weight


@waiting("Writing the model")
@hidden_bars()
def save_model(model: Any, folder: Path, end_ids: Sequence[int] = ()) -> None:
    """Write a model of transformers, or the adapters of a PEFT model, with `save_pretrained`.

    PEFT would ask the Hub whether the vocabulary was resized, to decide whether to save the embedding. This function
    uses only local files. It also writes the generation config beside adapters.

    Args:
        model: The model.
        folder: Folder to write to.
        end_ids: Ids of tokens at which `generate` stops, in addition to the end tokens of the model.
    """
    if not hasattr(model, "peft_config"):
        model.save_pretrained(folder)
    else:
        layers = (model.get_input_embeddings(), model.get_output_embeddings())
        adapted = any(hasattr(layer, "base_layer") for layer in layers)
        # Layers with `original_module` are saved with the adapters: whole, or the rows of new tokens.
        has_new_rows = not all(hasattr(layer, "original_module") for layer in layers) and _has_other_vocabulary(model)
        model.save_pretrained(folder, save_embedding_layers=adapted or has_new_rows)
        if any(hasattr(layer, "initial_A") for layer in model.modules()):
            _add_initial(model, folder)
    if getattr(model, "generation_config", None) is not None:
        _add_ends(model.generation_config, folder, end_ids)


def _add_ends(config: Any, folder: Path, end_ids: Sequence[int]) -> None:
    """Write the generation config, unless it is written, and add end tokens to the file.

    The object is not changed, because transformers refuses to save a changed config of many published models.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        config.to_json_file(path, keys_to_pop=["compile_config"])
    settings = json.loads(path.read_text(encoding="utf-8"))
    usual = settings.get("eos_token_id")
    known = [] if usual is None else usual if isinstance(usual, list) else [usual]
    if more := [index for index in end_ids if index not in known]:
        settings.pop("_from_model_config", None)
        settings["eos_token_id"] = [*known, *more]
        path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _add_initial(model: Any, folder: Path) -> None:
    """Rewrite saved adapters for the original weights: double their rank, and subtract the initial factors."""
    file, written = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    weights, config = load_file(file), json.loads(written.read_text(encoding="utf-8"))
    for name, layer in model.named_modules():
        if hasattr(layer, "initial_A"):
            a, b = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
            weights[a] = torch.cat([weights[a], layer.initial_A.to(weights[a])])
            weights[b] = torch.cat([weights[b], -layer.initial_B.to(weights[b])], dim=1)
    save_file(weights, file, metadata={"format": "pt"})
    # The scale is lora_alpha / r, or lora_alpha / sqrt(r) with rsLoRA, and must not change.
    factor = math.sqrt(2) if config["use_rslora"] else 2
    config |= {"init_lora_weights": True, "r": 2 * config["r"], "lora_alpha": factor * config["lora_alpha"]}
    config["rank_pattern"] = {name: 2 * rank for name, rank in (config["rank_pattern"] or {}).items()}
    config["alpha_pattern"] = {name: factor * alpha for name, alpha in (config["alpha_pattern"] or {}).items()}
    written.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def _has_other_vocabulary(model: Any) -> bool:
    """Return True if the vocabulary size differs from the base model's; False if the base is not in the local cache."""
    from transformers import AutoConfig

    name = model.active_peft_config.base_model_name_or_path
    try:
        base = AutoConfig.from_pretrained(name, local_files_only=True) if name else model.config
    except (OSError, ValueError):
        return False
    sizes = [getattr(config.get_text_config(), "vocab_size", None) for config in (base, model.config)]
    return sizes[0] != sizes[1]


def base_of(model: PreTrainedModel | PeftModel) -> Any:
    """Return the model of transformers inside a PEFT model; its layers keep their adapters."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel) or model.active_peft_config.is_prompt_learning:
        return model
    return model.get_base_model()
