"""Plans from a few blocks of a model, or a few samples of a batch, against the profile of all of it."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from typing import Any

import pytest

from lightning_protrain.models.published import published
from lightning_protrain.planner.problem import Workload
from lightning_protrain.profiler.records import ModelProfile
from lightning_protrain.strategy import profile_step, repeated_blocks
from lightning_protrain.strategy.dry_run_hardware import DryRunHardware
from lightning_protrain.strategy.repeated_blocks import METHODS, UNIFORM, Method, ModelTraining, planner_for

GPUS = ("RTX 4090",)
KINDS = {str(each.config["model_type"]): each for each in reversed(published().values())}
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "n_embd": 128,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 64,
}


def small(kind: str, depth: int) -> dict[str, Any]:
    """Return the config of a published model in a small size, with another number of blocks."""
    given = KINDS[kind].config.items()
    config = {key: value if value is None else SMALL.get(key, value) for key, value in given}
    return {**config, ("n_layer" if kind == "gpt2" else "num_hidden_layers"): depth}


def known(training: ModelTraining, monkeypatch: pytest.MonkeyPatch, whole: bool) -> tuple[dict[str, Workload], int]:
    """Return what is known of a training, and the number of models that were profiled."""
    profiled: list[ModelTraining] = []
    described = repeated_blocks._described
    with monkeypatch.context() as patch:
        patch.setattr(repeated_blocks, "_described", lambda one, run: profiled.append(one) or described(one, run))
        if whole:
            patch.setattr(repeated_blocks, "UNIFORM", ())
        hardware = DryRunHardware(GPUS, host_memory="64GiB", host_cores=16)
        return dict(planner_for(training, hardware).known), len(profiled)


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
    assert set(KINDS) == set(UNIFORM)


QUICK = [*((kind, "full") for kind in UNIFORM[::2] if kind != "gemma3_text"), ("qwen3", "lora"), ("gemma2", "qlora")]
SLOW = [each for each in product(UNIFORM, METHODS) if each not in QUICK]


@pytest.mark.parametrize(("kind", "method"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
def test_figures_of_a_model_follow_from_a_few_of_its_blocks(
    kind: str, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method == "qlora":
        pytest.importorskip("bitsandbytes")
    depth = {"gemma2": 13, "gemma3_text": 37}.get(kind, 9)
    training = ModelTraining(small(kind, depth), method, "bf16-mixed", 2, 96)
    made, profiled = known(training, monkeypatch, whole=False)
    real, at_once = known(training, monkeypatch, whole=True)
    assert (profiled, at_once) == (2, 1)
    assert [found for gpu in made for found in differences(made[gpu], real[gpu])] == []


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
