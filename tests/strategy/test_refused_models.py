"""A module that cannot be streamed is refused by name at set-up, before anything is placed."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, FineGrainedFP8Config, GPTQConfig

from lightning_protrain.strategy.describe import refuse_unsupported
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.models import HuggingFaceModule, Mlp, _llama, fit, zoo


class Packed(nn.Module):
    """A layer as GPTQ and AWQ keep it: packed integers in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))
        self.register_buffer("qzeros", torch.zeros(4, 1, dtype=torch.int32))
        self.register_buffer("scales", torch.ones(4))


class WQLinearGEMM(Packed):
    """Named as AWQ's."""


class Fp8(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4).to(dtype), requires_grad=False)


def configured(settings: Any) -> nn.Module:
    model = Mlp()
    model.config = SimpleNamespace(quantization_config=settings)  # type: ignore[assignment]
    return model


class Method(Enum):
    HQQ = "hqq"


UNSUPPORTED: dict[str, tuple[nn.Module, str]] = {
    "gptq layers": (nn.Sequential(nn.Linear(2, 2), Packed()), "'1' holds GPTQ weights"),
    "awq layers": (nn.Sequential(WQLinearGEMM()), "'0' holds AWQ weights"),
    "fp8 weights": (nn.Sequential(Fp8(torch.float8_e4m3fn)), r"'0' holds FP8 \(float8_e4m3fn\) weights"),
    "other fp8 weights": (Fp8(torch.float8_e5m2), r"'Fp8' holds FP8 \(float8_e5m2\) weights"),
    "gptq config": (configured(GPTQConfig(bits=4)), "'Mlp' holds GPTQ weights"),
    "fp8 config": (configured(FineGrainedFP8Config()), "holds FP8 weights"),
    "awq in a dict": (configured({"quant_method": "awq", "bits": 4}), "holds AWQ weights"),
    "an enumeration": (configured(SimpleNamespace(quant_method=Method.HQQ)), "holds HQQ weights"),
}
SUPPORTED: dict[str, nn.Module] = {
    "plain": Mlp(),
    "4 bits": configured(BitsAndBytesConfig(load_in_4bit=True)),
    "8 bits": configured(BitsAndBytesConfig(load_in_8bit=True)),
    "4 bits in a dict": configured({"quant_method": "bitsandbytes"}),
    "layers of bitsandbytes": nn.Sequential(bnb.nn.Linear4bit(64, 64), bnb.nn.Linear8bitLt(8, 8)),
    "made plain": configured({"quant_method": "mxfp4", "dequantize": True}),
    "no config": configured(None),
    "on meta": nn.Linear(2, 2, device="meta"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_weights_that_cannot_be_streamed(name: str) -> None:
    model, message = UNSUPPORTED[name]
    with pytest.raises(ValueError, match=message):
        refuse_unsupported(model)


@pytest.mark.parametrize("name", SUPPORTED)
def test_weights_that_can(name: str) -> None:
    refuse_unsupported(SUPPORTED[name])
    assert list(SUPPORTED[name].modules())


@pytest.mark.parametrize("places", [{"a": 0, "b": "cpu"}, {"a": "disk", "b": 0, "c": "cpu"}])
def test_a_device_map(places: dict[str, Any]) -> None:
    model = Mlp()
    model.hf_device_map = places  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"was loaded with a device_map over 0, cpu"):
        refuse_unsupported(nn.Sequential(model))


def test_hooks_of_accelerate() -> None:
    model = Mlp()
    model.up._hf_hook = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="'up' was loaded with a device_map: accelerate moves"):
        refuse_unsupported(model)


def test_a_model_on_one_device_was_not_divided() -> None:
    model = Mlp()
    model.hf_device_map = {"": 0}  # type: ignore[assignment]
    refuse_unsupported(model)
    assert model.hf_device_map == {"": 0}


def test_a_model_that_accelerate_has_dispatched() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(_llama(2, tied=False), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="device_map"):
        fit(HuggingFaceModule(model), strategy=ProTrainStrategy(plan="offload"))


@pytest.mark.parametrize("plan", ["auto", "resident", "offload"])
def test_it_is_refused_before_anything_is_placed(plan: str) -> None:
    module = zoo()["reused"]()
    module.network.packed = Packed()
    before = {name: value.data_ptr() for name, value in module.named_parameters()}
    strategy = ProTrainStrategy(plan=plan)
    with pytest.raises(ValueError, match=r"'network\.packed' holds GPTQ weights.*quantise these with bitsandbytes"):
        fit(module, strategy=strategy)
    assert strategy.plan is None
    assert {name: value.data_ptr() for name, value in module.named_parameters()} == before
