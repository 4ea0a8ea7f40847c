"""Plans from a few blocks of a model, or a few samples of a batch, against the profile of all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from itertools import product
from typing import Any

import pytest
from transformers import AutoConfig

from lightning_protrain.models import repeated_blocks
from lightning_protrain.models.published import published
from lightning_protrain.models.repeated_blocks import METHODS, SLOW, UNIFORM, Method, ModelTraining, planner_for
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.problem import Workload
from lightning_protrain.profiler.records import ModelProfile
from lightning_protrain.strategy import profile_step
from lightning_protrain.strategy.dry_run_hardware import DryRunHardware

GPUS = ("RTX 4090",)
KINDS = {str(each.config["model_type"]): each for each in reversed(published().values())}
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_attention_heads": 4,
    "num_heads": 4,
    "vocab_size": 320,
    "n_embd": 128,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 64,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "out_hidden_size": 128,
    "intermediate_size_mlp": 192,
    "n_routed_experts": 8,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 320,
    "num_kv_shared_layers": 0,
    "image_size": 56,
}
PARTS = {"text_config": {}, "vision_config": {"num_hidden_layers": 2, "depth": 2}}
TOKENS = {"image_token_id": 300, "image_token_index": 300, "video_token_id": 301, "vision_start_token_id": 302} | {
    "mm_tokens_per_image": 4
}


def small(kind: str, depth: int) -> dict[str, Any]:
    """Return the config of a published model in a small size, with another number of blocks."""

    def shrunk(config: Mapping[str, Any], **sizes: Any) -> dict[str, Any]:
        own = {**SMALL, **sizes}
        return {key: value if value is None else own.get(key, value) for key, value in config.items()}

    config = shrunk(KINDS[kind].config)
    for part, sizes in PARTS.items():
        if part in config:
            config[part] = shrunk(config[part], **sizes)
    if "audio_config" in config:
        config["audio_config"] = None
    text = config.get("text_config", config)
    text |= {
        "n_layer" if kind == "gpt2" else "num_hidden_layers": depth,
        "pad_token_id": 0 if kind == "gemma4" else None,
    }
    if text is not config:
        defaults = AutoConfig.for_model(kind)
        config |= {key: value for key, value in TOKENS.items() if hasattr(defaults, key)}
    return config


def known(
    training: ModelTraining, monkeypatch: pytest.MonkeyPatch, whole: bool, sliced: bool = False
) -> tuple[dict[str, Workload | None], int]:
    """Return what is known of a training, with slices of the tokens or without, and how many models were profiled."""
    profiled: list[ModelTraining] = []
    described = repeated_blocks._described
    with monkeypatch.context() as patch:
        patch.setattr(repeated_blocks, "_described", lambda one, *rest: profiled.append(one) or described(one, *rest))
        if whole:
            patch.setattr(repeated_blocks, "UNIFORM", ())
        hardware = DryRunHardware(GPUS, host_memory="64GiB", host_cores=16)
        planner = planner_for(training, hardware)
        return dict(planner.sliced() if sliced else planner.known), len(profiled)


def differences(one: Any, two: Any, path: str = "") -> list[str]:
    if one == two:
        return []
    pairs: list[tuple[str, Any, Any]] = []
    if hasattr(one, "__dataclass_fields__"):
        pairs = [(f".{each.name}", getattr(one, each.name), getattr(two, each.name)) for each in fields(one)]
    elif isinstance(one, tuple) and len(one) == len(two):
        pairs = [(f"[{at}]", first, second) for at, (first, second) in enumerate(zip(one, two, strict=True))]
    if not pairs:
        return [f"{path}: {one!r:.80} instead of {two!r:.80}"]
    return [found for name, first, second in pairs for found in differences(first, second, path + name)]


def test_every_kind_of_model_whose_blocks_are_alike_is_published() -> None:
    assert set(SLOW) < set(UNIFORM) < set(KINDS)


QUICK = [*((kind, "full") for kind in UNIFORM[:12:2]), ("qwen3", "lora"), ("gemma2", "qlora"), ("mixtral", "full")]
LONG = [each for each in product(UNIFORM, METHODS) if each not in QUICK]
# Depths at which extrapolation needs fewer blocks than the model has, by model type with more than one kind of block.
DEPTHS = {"gemma2": 13, "gpt_oss": 13, "gemma3_text": 37, "gemma3": 37}
DEPTHS |= dict.fromkeys(("olmo3", "smollm3", "qwen3_next", "qwen3_5", "qwen3_5_moe"), 25)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "method"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in LONG)])
def test_figures_of_a_model_follow_from_a_few_of_its_blocks(
    kind: str, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "qlora":
        pytest.importorskip("bitsandbytes")
    training = ModelTraining(small(kind, DEPTHS.get(kind, 9)), method, "bf16-mixed", 2, 96)
    made, profiled = known(training, monkeypatch, whole=False)
    real, at_once = known(training, monkeypatch, whole=True)
    assert (profiled, at_once) == (2, 1)
    assert [found for gpu in made for found in differences(made[gpu], real[gpu])] == []


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method"), [("llama", "lora"), ("qwen3", "full"), ("gemma2", "lora"), ("mixtral", "full")]
)
def test_figures_with_slices_follow_from_a_few_blocks(
    kind: str, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_step, "LEAST_SLICE", 32)
    training = ModelTraining(small(kind, DEPTHS.get(kind, 9)), method, "bf16-mixed", 2, 96)
    (made, _), (real, _) = (known(training, monkeypatch, whole, sliced=True) for whole in (False, True))
    for gpu, workload in made.items():
        assert workload is not None
        assert workload.profile is not None
        assert workload.profile.slice_tokens == 32
        assert len({name.split(".layers.")[-1].split(".")[0] for name in workload.profile.sliced}) > DEPTHS.get(kind, 9)
        assert differences(workload, real[gpu]) == []


NEW = ("smollm3", "olmo3", "granite", "glm4", "seed_oss", "mixtral", "olmoe", "qwen3_moe", "qwen3_next", "gpt_oss")
WHOLE = ("glm4_moe", "gemma3", "gemma4", "mistral3", "llama4", "qwen3_5", "qwen3_5_moe")
ALWAYS = [*product(NEW[:6], ["full"]), *product(("qwen3_moe", "gpt_oss", "gemma4", "llama4"), ["lora"])]
OTHERS = [each for each in product((*NEW, *WHOLE), METHODS) if each not in ALWAYS]


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("kind", "method"), [*ALWAYS, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_every_kind_of_model_is_traced_and_planned(kind: str, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    if method == "qlora":
        pytest.importorskip("bitsandbytes")
    depth = {"gemma4": 6, "gemma3": 6, "qwen3_5": 4, "qwen3_5_moe": 4, "qwen3_next": 4}.get(kind, 2)
    hardware = DryRunHardware(GPUS, host_memory="64GiB", host_cores=16)
    planner = planner_for(ModelTraining(small(kind, depth), method, "bf16-mixed", 1, 64), hardware)
    (workload,) = planner.known.values()
    assert workload.profile is not None
    assert not workload.profile.measured
    blocks = [unit.name for unit in workload.layout.units if unit.is_block and ".layers." in unit.name]
    assert sum("vision" not in name for name in blocks) == depth
    assert isinstance(planner.answers()["RTX 4090"], Plan)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_step_computes_with_some_experts_and_moves_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the experts have twice the bytes, but each token takes as many: only the router computes more.

    Llama 4 is no such kind: transformers runs all of its experts on all tokens, so all of them count.
    """

    def step(experts: int) -> tuple[int, float]:
        config = small(kind, 2)
        text = config.get("text_config", config)
        text |= {key: experts for key in ("num_experts", "num_local_experts") if key in text}
        (workload,) = known(ModelTraining(config, "full", "bf16-mixed", 1, 64), monkeypatch, whole=True)[0].values()
        assert workload.profile is not None
        experts_of = (info.nbytes for info in workload.layout.parameters if ".experts." in info.fqn)
        return sum(experts_of), workload.profile.flops

    (few, computed), (many, again) = step(8), step(16)
    assert many == 2 * few > 0
    assert computed <= again < 1.05 * computed


def test_blocks_that_do_not_repeat_are_profiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**small("gemma3_text", 12), "layer_types": ["sliding_attention"] * 8 + ["full_attention"] * 4}
    training = ModelTraining(config, "full", "bf16-mixed", 1, 96)
    assert training.period() is None or training.period() >= 8
    made, profiled = known(training, monkeypatch, whole=False)
    assert profiled == 1
    assert sum(unit.is_block for unit in next(iter(made.values())).layout.units) == 12


def traffic(profile: ModelProfile) -> int:
    """Return the bytes that all operations of a step read and write."""
    passes = [each for segment in profile.segments for each in (segment.forward, segment.backward)]
    return sum(cost.count * cost.nbytes for each in passes for cost in each.operations)


@pytest.mark.parametrize(("kind", "method", "samples"), [("llama", "full", 400), ("qwen3", "lora", 290)])
def test_figures_of_a_large_batch_follow_from_a_few_of_its_samples(
    kind: str, method: Method, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = ModelTraining(small(kind, 3), method, "bf16-mixed", samples, 96)
    (real,) = known(training, monkeypatch, whole=True)[0].values()
    monkeypatch.setattr(profile_step, "FEW_TOKENS", 34 * 24)
    (made,) = known(training, monkeypatch, whole=True)[0].values()
    assert made.profile is not None
    assert real.profile is not None
    assert len(made.profile.segments) < len(real.profile.segments)  # fewer slices of the loss
    assert made.layout == real.layout
    for name in ("saved_bytes", "flops", "samples", "tokens"):
        assert getattr(made.profile, name) == getattr(real.profile, name)
    assert made.profile.swap_bytes() == pytest.approx(real.profile.swap_bytes(), rel=0.06)  # whole pages
    units = [{each.unit: each for each in profile.segments} for profile in (made.profile, real.profile)]
    blocks = [unit.name for unit in real.layout.units if unit.is_block]
    differing = [found for name in blocks for found in differences(units[0][name], units[1][name])]
    assert [found for found in differing if "operations" not in found] == []  # they are compared in sum below
    peaks = [max(each.backward.peak_bytes for each in profile.segments) for profile in (made.profile, real.profile)]
    assert peaks[0] == peaks[1]
    assert traffic(made.profile) == pytest.approx(traffic(real.profile), rel=0.02)


def test_a_batch_of_any_size_is_planned_without_its_memory() -> None:
    training = ModelTraining(small("gpt2", 3), "lora", "bf16-mixed", 10**9)  # 8 TB of token ids
    hardware = DryRunHardware(GPUS, host_memory="64GiB", host_cores=16)
    with pytest.raises(ValueError, match=r"No plan fits: .* of 1,024,000,000,000 tokens \("):
        raise planner_for(training, hardware).answers()["RTX 4090"]  # type: ignore[misc]
