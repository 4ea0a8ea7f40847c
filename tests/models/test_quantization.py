"""Weights are quantised like bitsandbytes does while they are read; a plan counts their bytes without weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision, Precision
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from lightning_protrain.models import bnb, lora
from lightning_protrain.models.bnb import quantize_without_memory, quantizer
from lightning_protrain.models.loading import StoredModel, build_model
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.planner.replay import Footprint, footprint
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.records import ModelProfile
from lightning_protrain.quant_state import packed_nbytes, prepare_weights
from tests.support.tiny_networks import tiny_config

SETTINGS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**tiny_config("qwen2", hidden_size=64, intermediate_size=96))  # it has biases
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("precision", [Precision(), HalfPrecision("bf16-true")], ids=lambda each: each.precision)
@pytest.mark.parametrize("name", SETTINGS)
def test_weights_are_those_that_transformers_quantises(name: str, precision: Precision, folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    with precision.module_init_context():
        found = StoredModel(str(folder), config, "bfloat16", quantization=SETTINGS[name]).load()
    wanted = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": "cpu"}, quantization_config=BitsAndBytesConfig(**SETTINGS[name])
    )
    theirs = wanted.state_dict()
    assert found.state_dict().keys() == theirs.keys()
    for key, value in found.state_dict().items():
        assert value.dtype == theirs[key].dtype
        assert torch.equal(value, theirs[key])
    assert {p.dtype for p in found.parameters()} > {torch.bfloat16}


@pytest.mark.parametrize("precision", [Precision(), HalfPrecision("bf16-true")], ids=lambda each: each.precision)
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "int8"])
def test_a_model_without_memory_counts_the_bytes_of_a_real_one(name: str, precision: Precision, folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    with precision.module_init_context():
        real = StoredModel(str(folder), config, "bfloat16", quantization=SETTINGS[name]).load()
    with torch.device("meta"), precision.module_init_context():
        empty = build_model(config, "bfloat16")
        quantize_without_memory(empty, SETTINGS[name])
    sizes = {key: packed_nbytes(parameter) for key, parameter in real.named_parameters()}
    assert sizes == {key: packed_nbytes(parameter) for key, parameter in empty.named_parameters()}
    assert [type(module) for module in real.modules()] == [type(module) for module in empty.modules()]
    dtypes = [(key, parameter.dtype, tuple(parameter.shape)) for key, parameter in real.named_parameters()]
    assert dtypes == [(key, parameter.dtype, tuple(parameter.shape)) for key, parameter in empty.named_parameters()]
    assert all(parameter.is_meta for parameter in empty.parameters())
    before = [
        {name: weight.quant_state.dtype for name, weight in model.named_parameters() if hasattr(weight, "quant_state")}
        for model in (real, empty)
    ]
    assert before[0] == before[1], "dtypes of the weights before they were quantised"


@pytest.mark.parametrize("width", [24, 64])
@pytest.mark.parametrize("name", ["nf4", "nf4 nested"])
def test_evaluation_on_a_cpu_leaves_weights_of_any_width_as_they_are(
    name: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    config = AutoConfig.for_model(**tiny_config("llama", hidden_size=width, intermediate_size=width + 16))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = StoredModel(str(tmp_path), config, "float32", quantization=SETTINGS[name]).load().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        first, second = (model(torch.arange(6)[None]).logits for _ in range(2))
    assert torch.equal(first, second)
    assert first.isfinite().all()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with torch.enable_grad():  # the kernel of training
        assert torch.equal(model(torch.arange(6)[None]).logits, first)
    with torch.device("meta"):
        empty = build_model(config, "float32")
        quantize_without_memory(empty, SETTINGS[name])
    assert not any(getattr(module, "support_avx512bf16_for_cpu", False) for module in empty.modules())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load_in_4bits": True}, "key 'load_in_4bits'.*load_in_4bit"),
        ({}, "one of load_in_4bit"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "one of load_in_4bit"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": 4}, "refused by BitsAndBytesConfig"),
    ],
)
def test_wrong_settings_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantizer(settings)
    with pytest.raises(ValueError, match=message):
        CausalLMModule(model="anything", lora={"r": 4}, quantization=settings)


@pytest.fixture
def without_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bnb, lora):
        monkeypatch.setattr(module, "find_spec", lambda _: None)


def outlined(kind: str, settings: dict[str, Any], lora: dict[str, Any] | None = None) -> CausalLMModule:
    """A module as a plan builds it: quantised, without values."""
    module = CausalLMModule(config=tiny_config(kind), dtype="bfloat16", lora=lora or {"r": 4}, quantization=settings)
    with torch.device("meta"):
        module.configure_model()
    return module


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])  # with biases, and with transposed weights
@pytest.mark.parametrize("name", SETTINGS)
def test_without_bitsandbytes_weights_have_the_sizes_of_its_weights(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")

    def sizes() -> list[tuple[str, str, int]]:
        parameters = outlined(kind, SETTINGS[name]).named_parameters()
        return [(key, f"{each.dtype} {tuple(each.shape)}", packed_nbytes(each)) for key, each in parameters]

    wanted = sizes()
    for module in (bnb, lora):
        monkeypatch.setattr(module, "find_spec", lambda _: None)
    assert sizes() == wanted


@pytest.mark.parametrize("name", ["nf4", "nf4 nested", "int8"])
def test_without_bitsandbytes_a_step_runs_the_same_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    tokens = {"input_ids": torch.ones(2, 16, dtype=torch.int64), "labels": torch.ones(2, 16, dtype=torch.int64)}

    def profiled() -> ModelProfile:
        module = outlined("qwen2", {**SETTINGS[name], "bnb_4bit_compute_dtype": "bfloat16"})
        prepare_weights(module)

        def step() -> torch.Tensor:
            with torch.autocast("cpu"):
                return module.training_step(tokens)

        return profile_model(module, describe_model(module), step)

    wanted = profiled()
    for module in (bnb, lora):
        monkeypatch.setattr(module, "find_spec", lambda _: None)
    assert comparable(profiled()) == comparable(wanted)


def comparable(profile: ModelProfile) -> tuple[ModelProfile, list[Footprint]]:
    """The profile, with memory under each policy in place of times: operations that make nothing take time, too."""
    lost = [segment.lost_inputs for segment in profile.segments]
    kinds = product(zip(profile.segments, lost, strict=True), BlockPolicy, (False, True))
    memory = [footprint(segment, policy, nbytes, casts) for (segment, nbytes), policy, casts in kinds]
    untimed = (replace(each, forward=replace(each.forward, storages=(), last_saved=0)) for each in profile.segments)
    return replace(profile, segments=tuple(untimed)), memory


@pytest.mark.usefixtures("without_bitsandbytes")
def test_training_names_a_missing_bitsandbytes_before_it_reads_weights(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**tiny_config("llama"))
    config.save_pretrained(tmp_path)
    module = CausalLMModule(model=str(tmp_path), lora={"r": 4}, quantization=SETTINGS["nf4"])
    message = r"bitsandbytes, which is not installed.*\[bnb\]"
    with pytest.raises(ValueError, match=message):
        module.check_model()
    with pytest.raises(ValueError, match=message):
        StoredModel(str(tmp_path), config, "float32", quantization=SETTINGS["nf4"]).load()


@pytest.mark.usefixtures("without_bitsandbytes")
def test_variants_of_lora_that_read_quantised_weights_name_a_missing_bitsandbytes() -> None:
    with pytest.raises(ValueError, match=r"DoRA read the weights.*\[bnb\]"):
        outlined("llama", SETTINGS["nf4"], {"r": 4, "use_dora": True})


def test_quantised_weights_need_adapters_and_a_pretrained_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give `lora` too"):
        CausalLMModule(model="anything", quantization=SETTINGS["nf4"])
    module = CausalLMModule(config=tiny_config("llama"), lora={"r": 4}, quantization=SETTINGS["nf4"])
    with pytest.raises(ValueError, match="Random weights cannot be quantised"):
        module.configure_model()
