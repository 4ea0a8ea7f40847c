"""Frozen weights in four or eight bits by bitsandbytes: checks the settings and builds a quantised model.

bitsandbytes takes seconds to import, so it is imported only where weights are quantised.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from difflib import get_close_matches
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
        ValueError: If a key is unknown (similar ones are named), the bits are neither four nor eight, or transformers
            refuses the settings.
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
    """Let bitsandbytes make its code tables in float32, which its kernels expect, even under `bf16-true`."""
    return _default_dtype(torch.float32)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check_quantization(settings: Mapping[str, Any], lora: Mapping[str, Any] | None) -> None:
    """Raise ValueError if the settings cannot be used for training.

    Raises:
        ValueError: As in `quantizer`, or if there are no adapters.
    """
    quantizer(settings)
    if lora is None:
        raise ValueError("Quantised weights cannot be trained: give `lora` too, to train adapters.")


def quantize_without_memory(model: PreTrainedModel, settings: Mapping[str, Any]) -> None:
    """Give a model on the meta device the layers and weights of a quantised one, by shape and size.

    Args:
        model: Model on the meta device; its linear layers are replaced.
        settings: As in `quantizer`.

    Raises:
        ValueError: If the model has values.
    """
    if model.device.type != "meta":
        raise ValueError("Random weights are not quantised: give `model`, the folder of a pretrained one.")
    made = AutoHfQuantizer.from_config(quantizer(settings), pre_quantized=False)
    options = {"device_map": {"": "cpu"}, "checkpoint_files": None, "use_kernels": False}
    with _default_dtype(model.dtype):  # of biases, and of weights before they were quantised
        made.preprocess_model(model=model, dtype=model.dtype, **options)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if type(weight).__name__ == "Params4bit":
            _pack(module, weight)
        elif type(weight).__name__ == "Int8Params":
            _round(module, weight)
    made.postprocess_model(model)  # PEFT reads the kind of layers from the model
    model.hf_quantizer = made


def _pack(module: nn.Module, weight: Any) -> None:
    """Make a 4-bit weight: two elements a byte, a scale for each block; nested scales are bytes, too."""
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
    """Make an 8-bit weight: a byte for each element, a scale for each row."""
    from bitsandbytes.nn import Int8Params

    codes = torch.empty(weight.shape, dtype=torch.int8, device="meta")
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device="meta")
    module.weight = Int8Params(codes, requires_grad=False, has_fp16_weights=False, CB=codes, SCB=scales)
