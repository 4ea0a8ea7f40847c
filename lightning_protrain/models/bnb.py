"""Quantisation of frozen weights with bitsandbytes: checks of the settings, and quantised models on the meta device.

Importing bitsandbytes takes seconds, so only functions that use it import it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.modeling_utils import local_torch_dtype
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer, HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from lightning_protrain.models import planned_layers

BLOCKSIZE = 64  # elements of a 4-bit weight that share a scale, in bitsandbytes

_KEPT = ("blocksize", "compress_statistics", "quant_type", "quant_storage")


def is_installed() -> bool:
    """Return True if bitsandbytes is installed."""
    return find_spec("bitsandbytes") is not None


def require_installed() -> None:
    """Raise ValueError if bitsandbytes is not installed."""
    if not is_installed():
        raise ValueError(
            "Quantised weights need bitsandbytes, which is not installed; a plan does without. Run: pip install "
            '"lightning-protrain[bnb]".'
        )


def quantizer(settings: Mapping[str, Any]) -> BitsAndBytesConfig:
    """Return the quantisation config of transformers for the settings.

    Args:
        settings: Arguments of `BitsAndBytesConfig`, e.g. `{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}`.

    Raises:
        ValueError: If a key is unknown, not exactly one of 4 bits and 8 bits is chosen, or transformers refuses the
            settings.
    """
    known = [name for name in inspect.signature(BitsAndBytesConfig).parameters if name != "kwargs"]
    for key in settings:
        if key not in known:
            near = ", ".join(get_close_matches(key, known, n=3)) or ", ".join(known)
            raise ValueError(
                f"`quantization` has the key {key!r}, which BitsAndBytesConfig does not know. Try: {near}."
            )
    if bool(settings.get("load_in_4bit")) == bool(settings.get("load_in_8bit")):
        raise ValueError("`quantization` must set exactly one of load_in_4bit and load_in_8bit to true.")
    try:
        return BitsAndBytesConfig(**settings)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"`quantization` is refused by BitsAndBytesConfig: {error}") from error


def keep_layout(model: PreTrainedModel) -> None:
    """Let evaluation on a CPU leave quantised weights as they are.

    Where a processor has AVX512 for bfloat16, bitsandbytes would repack them and round their scales to bfloat16.
    Training would depend on the number of validations, and widths that are no multiple of 64 would fail.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def check_quantization(settings: Mapping[str, Any], lora: Mapping[str, Any] | None) -> None:
    """Raise ValueError if `quantizer` refuses the settings, or if `lora` is None: only adapters can be trained."""
    quantizer(settings)
    if lora is None:
        raise ValueError("Quantised weights cannot be trained: give `lora` too, to train adapters.")


def quantize_without_memory(model: PreTrainedModel, settings: Mapping[str, Any]) -> None:
    """Replace the linear layers of a model on the meta device by quantised layers without values.

    Without bitsandbytes these are layers of planned_layers.py, which serve for a plan.

    Raises:
        ValueError: If the model is not on the meta device.
    """
    if model.device.type != "meta":
        raise ValueError("Random weights cannot be quantised: give `model`, the folder of a pretrained model.")
    made = AutoHfQuantizer.from_config(quantizer(settings), pre_quantized=False)
    if is_installed():
        options = {"device_map": {"": "cpu"}, "checkpoint_files": None, "use_kernels": False}
        with local_torch_dtype(model.dtype):  # dtype of biases and of the original weights
            made.preprocess_model(model=model, dtype=model.dtype, **options)
    else:
        model.is_quantized, model.quantization_method = True, made.quantization_config.quant_method
        _replace_linear(model, made)
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            _pack(module, module.weight)
        elif type(module).__name__ == "Linear8bitLt":
            _round(module, module.weight)
    keep_layout(model)
    made.postprocess_model(model)  # Sets attributes from which PEFT chooses its layers.
    model.hf_quantizer = made


def _replace_linear(model: PreTrainedModel, made: HfQuantizer) -> None:
    """Replace the linear layers that bitsandbytes would quantise; see [Note: Planned layers]."""
    settings: Any = made.quantization_config
    unconverted = made.get_modules_to_not_convert(model, settings.llm_int8_skip_modules, model._keep_in_fp32_modules)
    for name, module in list(model.named_modules()):
        if should_convert_module(name, unconverted) and (isinstance(module, Conv1D) or type(module) is nn.Linear):
            shape = module.weight.T.shape if isinstance(module, Conv1D) else module.weight.shape
            kind = planned_layers.Linear4bit if settings.load_in_4bit else planned_layers.Linear8bitLt
            layer: Any = kind(shape[1], shape[0], module.bias is not None, "meta", model.dtype).requires_grad_(False)
            if settings.load_in_4bit:
                layer.compute_dtype = settings.bnb_4bit_compute_dtype
                layer.weight.blocksize, layer.weight.quant_type = BLOCKSIZE, settings.bnb_4bit_quant_type
                layer.weight.compress_statistics = settings.bnb_4bit_use_double_quant
            model.set_submodule(name, layer)


def _pack(module: Any, weight: Any) -> None:
    """Give a layer a 4-bit weight on the meta device: two elements a byte, and a scale for each block."""
    if is_installed():
        from bitsandbytes.functional import QuantState
        from bitsandbytes.nn import Params4bit
    else:
        QuantState, Params4bit = planned_layers.state, planned_layers.weight

    numel, blocksize = weight.numel(), weight.blocksize
    num_blocks = -(-numel // blocksize)

    def state(count: int, kind: torch.dtype, size: int, codes: int, **more: Any) -> Any:
        absmax = torch.empty(count, dtype=kind, device="meta")
        return QuantState(
            absmax=absmax, blocksize=size, code=torch.empty(codes, dtype=torch.float32, device="meta"), **more
        )

    scales = {"shape": weight.shape, "dtype": weight.dtype, "quant_type": weight.quant_type}
    if weight.compress_statistics:
        inner = state(-(-num_blocks // 256), torch.float32, 256, 256, dtype=torch.float32)
        offset = torch.empty((), dtype=torch.float32, device="meta")
        outer = state(num_blocks, torch.uint8, blocksize, 16, **scales, offset=offset, state2=inner)
    else:
        outer = state(num_blocks, torch.float32, blocksize, 16, **scales)
    data = torch.empty(((numel + 1) // 2, 1), dtype=torch.uint8, device="meta")
    attributes = {name: getattr(weight, name) for name in _KEPT if hasattr(weight, name)}
    module.weight = Params4bit(data, requires_grad=False, quant_state=outer, bnb_quantized=True, **attributes)
    module.quant_state = outer


def _round(module: Any, weight: Any) -> None:
    """Give a layer an 8-bit weight on the meta device: one byte for each element, and one scale for each row."""
    if is_installed():
        from bitsandbytes.nn import Int8Params
    else:
        Int8Params = planned_layers.weight

    codes = torch.empty(weight.shape, dtype=torch.int8, device="meta")
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device="meta")
    module.weight = Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
