"""Quantised layers without values, for plans where bitsandbytes is not installed.

[Note: Planned layers]
A plan needs the sizes and the operations of quantised layers, but not their values. Layers of this file have the
weights of bitsandbytes' layers on the meta device, with companions of the same sizes. In a trace they run the
operations that bitsandbytes' layers run on a CPU. Nothing else can be done with them: they cannot compute values.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

_LIBRARY = torch.library.Library("lightning_protrain", "DEF")
_LIBRARY.define("gemm_4bit(Tensor hidden, Tensor codes, int[] shape, Tensor[] scales, Tensor? bias) -> Tensor")
_LIBRARY.define("dequantize_4bit(Tensor codes, Tensor scales, int[] shape, ScalarType dtype) -> Tensor")
_LIBRARY.define("dequantize_scales(Tensor codes, Tensor scales, Tensor table) -> Tensor")
_LIBRARY.impl("gemm_4bit", lambda hidden, codes, shape, *_: hidden.new_empty((*hidden.shape[:-1], shape[0])), "Meta")
_LIBRARY.impl("dequantize_4bit", lambda codes, _, shape, dtype: codes.new_empty(shape, dtype=dtype), "Meta")
_LIBRARY.impl("dequantize_scales", lambda codes, *_: torch.empty_like(codes, dtype=torch.float32), "Meta")
_OPS = torch.ops.lightning_protrain


def _gemm_4bit(hidden: Tensor, codes: Tensor, bias: Tensor | None, state: Any) -> Tensor:
    scales = [state.absmax]
    if state.state2 is not None:
        scales += [state.state2.absmax, state.state2.code, state.offset]
    return _OPS.gemm_4bit(hidden, codes, state.shape, scales, bias)


def _unpacked(codes: Tensor, state: Any) -> Tensor:
    scales = state.absmax
    if state.state2 is not None:
        scales = _OPS.dequantize_scales(scales, state.state2.absmax, state.state2.code)
        scales += state.offset
    return _OPS.dequantize_4bit(codes, scales, state.shape, state.dtype)


class _Product4bit(torch.autograd.Function):
    """A product with a 4-bit weight; backward unpacks the weight."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, codes: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        ctx.codes, ctx.state = codes, state
        ctx.dtypes = codes.dtype, None if bias is None else bias.dtype  # The profile counts reads of dtypes.
        return _gemm_4bit(hidden, codes, bias, state)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return torch.matmul(gradient, _unpacked(ctx.codes, ctx.state).to(gradient.dtype)), None, None, None


class Linear4bit(nn.Linear):
    """A linear layer with a 4-bit weight without values."""

    compute_dtype: torch.dtype
    weight: Any
    bias: Any

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(self.compute_dtype)
        product: Any = _Product4bit.apply if hidden.requires_grad and torch.is_grad_enabled() else _gemm_4bit
        bias = self.bias
        if bias is not None:
            if bias.dtype != hidden.dtype:
                bias.data = bias.data.to(hidden.dtype)
            bias = bias.to(self.compute_dtype)
        output: Tensor = product(hidden, self.weight.view(-1, 1), bias, self.weight.quant_state)
        return output.to(dtype)


class _Product8bit(torch.autograd.Function):
    """A product with an 8-bit weight, which forward and backward unpack."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.hidden, ctx.codes, ctx.scales = hidden, codes, scales
        ctx.dtype = None if bias is None else bias.dtype
        weight = codes.to(hidden.dtype).mul_(scales.unsqueeze(1).mul(1 / 127))
        return nn.functional.linear(hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if gradient.dim() == 3:
            gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        dtype = ctx.hidden.dtype
        weight = ctx.codes.to(dtype, copy=True).mul_(ctx.scales.unsqueeze(1).mul(1 / 127))
        return torch.matmul(gradient.to(dtype), weight).view(ctx.hidden.shape), None, None, None


class Linear8bitLt(nn.Linear):
    """A linear layer with an 8-bit weight without values."""

    weight: Any
    bias: Any

    def forward(self, hidden: Tensor) -> Tensor:
        if self.bias is not None and self.bias.dtype != hidden.dtype:
            self.bias.data = self.bias.data.to(hidden.dtype)
        codes, scales = self.weight.CB, self.weight.SCB
        return _Product8bit.apply(hidden, codes, scales, self.bias)


def state(**attributes: Any) -> SimpleNamespace:
    """Return the attributes of a `QuantState` of bitsandbytes."""
    return SimpleNamespace(**{"offset": None, "state2": None, **attributes})


def weight(data: Tensor, **attributes: Any) -> nn.Parameter:
    """Return a frozen parameter with the attributes of a quantised weight of bitsandbytes."""
    made = nn.Parameter(data, requires_grad=False)
    vars(made).update(attributes)
    return made


@cache
def adapted_layers() -> dict[type[nn.Module], type[nn.Module]]:
    """Return the class of PEFT's adapted layer for each planned layer."""
    from peft.tuners.lora import Linear

    class Adapted(Linear):
        """A planned layer with adapters, which casts and copies like PEFT's layers for bitsandbytes."""

        def resolve_lora_variant(self, **given: Any) -> None:
            if super().resolve_lora_variant(**given) is not None:
                raise ValueError(
                    "Variants of LoRA such as DoRA read the weights, which need bitsandbytes if they are quantised. "
                    'Run: pip install "lightning-protrain[bnb]".'
                )

        def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = self.base_layer(hidden, *args, **kwargs)
            if isinstance(self.base_layer, Linear4bit):
                result = result.clone()
            for name in self.active_adapters:
                if name in self.lora_A:
                    first, second = self.lora_A[name], self.lora_B[name]
                    casts = not torch.is_autocast_enabled()
                    if casts:
                        hidden = self._cast_input_dtype(hidden, first.weight.dtype)
                    change = second(first(self.lora_dropout[name](hidden))) * self.scaling[name]
                    if casts:
                        change = change.to(result.dtype)  # The uncast one is freed before the sum.
                    result = result + change
            return result

    return {Linear4bit: Adapted, Linear8bitLt: Adapted}
