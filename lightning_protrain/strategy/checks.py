"""Checks what cannot be trained: unsupported weights, and weights that a run left partially stepped.

A run ends with its strategy taken off, and the weights stay: another fit, or a `save_checkpoint` of the same Trainer,
would take them for those of a step. So the reason stays with the module until trained weights are loaded into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_protrain.runtime.recompute import refuse_own_checkpointing

_REASON = "_protrain_torn"
_WATCHED = "_protrain_torn_watched"


def mark_partially_stepped(module: nn.Module | None, reason: str | None) -> None:
    """Mark a module as partially stepped until `load_state_dict` replaces all trained weights.

    Args:
        module: The module; None: there is none.
        reason: Why; None: they do belong to one.
    """
    if module is None or reason is None:
        return
    setattr(module, _REASON, why_partially_stepped(module) or reason)
    if _WATCHED not in vars(module):
        setattr(module, _WATCHED, True)
        module.register_load_state_dict_post_hook(_loaded)


def why_partially_stepped(module: nn.Module) -> str | None:
    """Return why the module is partially stepped; None if it is not."""
    reason: str | None = vars(module).get(_REASON)
    return reason


def refuse_untrainable(module: nn.Module) -> None:
    """Refuse a module before a fit.

    Raises:
        RuntimeError: Its weights belong to no step.
        ValueError: It checkpoints activations itself.
    """
    refuse_partially_stepped(module)
    refuse_own_checkpointing(module)


def refuse_partially_stepped(module: nn.Module | None) -> None:
    """Refuse to save or train a partially stepped module.

    Raises:
        RuntimeError: Its weights belong to no step.
    """
    reason = why_partially_stepped(module) if module is not None else None
    if reason is not None:
        raise RuntimeError(
            f"The weights of this {type(module).__name__} are partially stepped by an earlier run: {reason}, so some "
            "are from before that step and some from after it. They can be neither saved nor trained on: resume from a "
            "checkpoint (`fit(..., ckpt_path=...)`), call `load_state_dict` of this module, or make it anew."
        )


def _loaded(module: nn.Module, incompatible: Any) -> None:
    """Forget that weights are partially stepped once all trained ones are loaded: frozen ones are never stepped."""
    missing = set(incompatible.missing_keys)
    if all(name not in missing for name, weight in module.named_parameters() if weight.requires_grad):
        vars(module).pop(_REASON, None)


# What transformers calls the quantisation that can be streamed.
_STREAMED = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit", "none")
_FP8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse what would fail later; reads metadata only, so weights may be anywhere.

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
    """Return the quantisation in the config of a transformers model, if the strategy cannot stream it."""
    said: Any = getattr(getattr(module, "config", None), "quantization_config", None)
    if said is None:
        return None
    settings = said if isinstance(said, dict) else vars(said)
    method = settings.get("quant_method")
    method = str(getattr(method, "value", method)).lower()
    # Some are loaded as plain weights on request.
    return None if method in _STREAMED or settings.get("dequantize") else method.upper()


def _formats_of(module: nn.Module) -> Iterator[str]:
    """Yield the quantised formats of the tensors that a layer holds itself, if the strategy cannot stream them."""
    own: dict[str, Tensor | None] = {**module._parameters, **module._buffers}
    for value in own.values():
        if value is not None and value.dtype in _FP8:
            yield f"FP8 ({str(value.dtype).removeprefix('torch.')})"
    codes = own.get("qweight")
    if codes is not None and not codes.is_floating_point() and "qzeros" in own:
        yield "AWQ" if "WQLinear" in type(module).__name__ or "Awq" in type(module).__name__ else "GPTQ"


def _refuse_placed(name: str, module: nn.Module) -> None:
    """Refuse a model that accelerate has placed in parts; `{"": device}`, set for quantised weights, is no such map."""
    places = getattr(module, "hf_device_map", None)
    hooked = getattr(module, "_hf_hook", None)
    if (isinstance(places, dict) and len(set(map(str, places.values()))) > 1) or hooked is not None:
        where = f" over {', '.join(sorted(set(map(str, places.values()))))}" if isinstance(places, dict) else ""
        raise ValueError(
            f"{name or type(module).__name__!r} was loaded with a device_map{where}: accelerate moves its weights by "
            'hooks of its own, and strategy="protrain" decides itself where they are. Load it without `device_map`.'
        )


def explain_missing_weight(error: RuntimeError) -> RuntimeError:
    """Return an error that says what to do, if backward read a weight that is not on the device; else `error`."""
    if not any(sign in str(error) for sign in ("data is not allocated yet", "storage of size 0")):
        return error
    return RuntimeError(
        "Backward needed a weight that is not on the device: it belongs to a block none of whose outputs take part in "
        "the loss (values handed out some other way), or backward runs through a backward. Return the values from the "
        "block, or make it resident (`num_persistent_chunks`)."
    )
