"""Quantisation of frozen weights with bitsandbytes: checks of the settings, and quantised models on the meta device.

Importing bitsandbytes takes seconds, so only functions that use it import it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers import AutoHfQuantizer


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


def float32_by_default() -> AbstractContextManager[None]:
    """Return a context in which bitsandbytes makes its code tables in float32, as its kernels expect."""
    return _default_dtype(torch.float32)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


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

    Args:
        model: Model on the meta device.
        settings: As in `quantizer`.

    Raises:
        ValueError: If the model is not on the meta device, or bitsandbytes is not installed.
    """
    if model.device.type != "meta":
        raise ValueError("Random weights cannot be quantised: give `model`, the folder of a pretrained model.")
    if find_spec("bitsandbytes") is None:
        raise ValueError(
            'Quantised weights need bitsandbytes, which is not installed. Run: pip install "lightning-protrain[bnb]".'
        )
    made = AutoHfQuantizer.from_config(quantizer(settings), pre_quantized=False)
    options = {"device_map": {"": "cpu"}, "checkpoint_files": None, "use_kernels": False}
    with _default_dtype(model.dtype):  # dtype of biases and of the original weights
        made.preprocess_model(model=model, dtype=model.dtype, **options)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(weight).__name__ == "Params4bit":
            _pack(module, weight)
        elif type(weight).__name__ == "Int8Params":
            _round(module, weight)
    keep_layout(model)
    made.postprocess_model(model)  # Sets attributes from which PEFT chooses its layers.
    model.hf_quantizer = made


def _pack(module: nn.Module, weight: Any) -> None:
    """Give a layer a 4-bit weight on the meta device: two elements a byte, and a scale for each block."""
    from bitsandbytes.functional import QuantState
    from bitsandbytes.nn import Params4bit

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
    kept = {name: getattr(weight, name) for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage")}
    module.weight = Params4bit(data, requires_grad=False, quant_state=outer, bnb_quantized=True, **kept)
    module.quant_state = outer


def _round(module: nn.Module, weight: Any) -> None:
    """Give a layer an 8-bit weight on the meta device: one byte for each element, and one scale for each row."""
    from bitsandbytes.nn import Int8Params

    codes = torch.empty(weight.shape, dtype=torch.int8, device="meta")
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device="meta")
    module.weight = Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
