"""What cannot be trained: weights that cannot be streamed or that somebody else moves, and those that come too late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# What transformers calls the quantisation that can be streamed.
_STREAMED = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit", "none")
_FP8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)


def refuse_unsupported(model: nn.Module) -> None:
    """Refuses what could only go wrong later; reads descriptions alone, so weights may be anywhere.

    Raises:
        ValueError: Weights in a format that cannot be trained from (GPTQ, AWQ, FP8 and others), or a model that was
            loaded with a `device_map` over several places.
    """
    for name, module in model.named_modules():
        _refuse_placed(name, module)
        found = _method_of(module) or next(_formats_of(module), None)
        if found is not None:
            raise ValueError(
                f'{name or type(module).__name__!r} holds {found} weights, which strategy="protrain" does not '
                "support: nothing of ours knows how to stream them. Load the weights that they were made of, or "
                "quantise these with bitsandbytes (4 or 8 bits)."
            )


def _method_of(module: nn.Module) -> str | None:
    """The quantisation that a model of transformers says it has, if it cannot be streamed."""
    said: Any = getattr(getattr(module, "config", None), "quantization_config", None)
    if said is None:
        return None
    settings = said if isinstance(said, dict) else vars(said)
    method = settings.get("quant_method")
    method = str(getattr(method, "value", method)).lower()
    # Some are loaded as plain weights on request.
    return None if method in _STREAMED or settings.get("dequantize") else method.upper()


def _formats_of(module: nn.Module) -> Iterator[str]:
    """The same by the tensors that a layer has itself."""
    own: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    for value in own.values():
        if value is not None and value.dtype in _FP8:
            yield f"FP8 ({str(value.dtype).removeprefix('torch.')})"
    codes = own.get("qweight")
    if codes is not None and not codes.is_floating_point() and "qzeros" in own:
        yield "AWQ" if "WQLinear" in type(module).__name__ or "Awq" in type(module).__name__ else "GPTQ"


def _refuse_placed(name: str, module: nn.Module) -> None:
    """`{"": device}` is no placement of parts: it is what loading quantised weights sets by itself."""
    places = getattr(module, "hf_device_map", None)
    hooked = getattr(module, "_hf_hook", None)
    if (isinstance(places, dict) and len(set(map(str, places.values()))) > 1) or hooked is not None:
        where = f" over {', '.join(sorted(set(map(str, places.values()))))}" if isinstance(places, dict) else ""
        raise ValueError(
            f"{name or type(module).__name__!r} was loaded with a device_map{where}: accelerate moves its weights by "
            'hooks of its own, and strategy="protrain" decides itself where they are. Load it without `device_map`.'
        )


def explain_missing_weight(error: RuntimeError) -> RuntimeError:
    """What to do, if `error` is PyTorch's where backward reads a weight that is not on the device; else `error`."""
    if not any(sign in str(error) for sign in ("data is not allocated yet", "storage of size 0")):
        return error
    return RuntimeError(
        "Backward needed a weight that is not on the device: it belongs to a block none of whose outputs take part in "
        "the loss (values handed out some other way), or backward runs through a backward. Return the values from the "
        "block, or make it resident (`num_persistent_chunks`)."
    )
