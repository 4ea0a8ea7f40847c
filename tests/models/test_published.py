"""Models that are found by name: sizes that come with the package, folders, files, the cache, and no network."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from torch import nn
from transformers import AutoConfig

from lightning_protrain.models import published as module
from lightning_protrain.models.loading import auto_class, check_config
from lightning_protrain.models.published import Published, find_config, published

MODELS = {each.name: each for each in published().values()}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def built(config: Mapping[str, Any]) -> nn.Module:
    settings = AutoConfig.for_model(**config)
    with torch.device("meta"):
        return auto_class(settings).from_config(settings)


# Models with equal configs are built once.
UNIQUE = {json.dumps(model.config): model for model in reversed(MODELS.values())}.values()


def test_there_are_enough_models_of_all_kinds() -> None:
    kinds = {model.config["model_type"] for model in MODELS.values()}
    assert len(UNIQUE) >= 100
    assert {"qwen3_5", "qwen3_5_moe", "qwen3_moe", "gemma4", "gpt_oss", "llama4", "olmo3", "smollm3"} <= kinds


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda each: each.name)
def test_a_name_is_one_of_the_hub_with_the_page_of_its_sizes(model: Published) -> None:
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", model.name)
    kind = re.compile(r"(?i)instruct|chat|-it(?=-|$)|base|-pt$|thinking|-sft|-dpo")
    assert len(kind.findall(model.name.partition("/")[2])) <= 1, "No model is of two kinds."
    assert re.match(r"https://(github\.com|huggingface\.co)/[\w.-]+/[\w.-]+", model.source)
    assert model.source.startswith("https://github.com/") or model.name in model.source


def test_names_differ_in_more_than_case() -> None:
    short = [name.lower().partition("/")[2] for name in MODELS]
    assert len(set(short)) == len(short)


@pytest.mark.sample(40)
@pytest.mark.parametrize("model", UNIQUE, ids=lambda each: each.name)
def test_a_model_has_the_number_of_parameters_that_its_maker_states(model: Published) -> None:
    """Within a per cent, or as exactly as the maker writes it: "8B" is 7.5 to 8.5 billion."""
    network = built(model.config)
    counts = {name: parameter.numel() for name, parameter in network.named_parameters()}
    assert sum(counts.values()) == model.parameters
    towers = r"vision|visual|audio|projector"
    of_text = sum(count for name, count in counts.items() if not re.search(towers, name))
    digits, unit = model.stated[:-1], {"B": 1e9, "M": 1e6}[model.stated[-1]]
    rounding = 0.5 * 10.0 ** -len(digits.partition(".")[2]) * unit
    stated = float(digits) * unit
    assert abs((of_text if model.states_text else model.parameters) - stated) <= max(0.01 * stated, rounding)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "gemma4", "llama4", "qwen3_5_moe", "glm4_moe", "mixtral"])
def test_experts_are_most_of_a_mixture_of_experts(kind: str) -> None:
    model = next(each for each in UNIQUE if each.config["model_type"] == kind and _is_sparse(each))
    network = built(model.config)
    experts = sum(parameter.numel() for name, parameter in network.named_parameters() if ".experts." in name)
    assert experts > 0.8 * model.parameters
    taken = {int(value) for key, value in model.text.items() if key in ("num_experts_per_tok", "top_k_experts")}
    numbers = {value for key, value in model.text.items() if key in EXPERTS}
    assert not taken or max(taken) < max(numbers)


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _is_sparse(model: Published) -> bool:
    return any(key in model.text for key in EXPERTS)


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-8B", "qwen3-8b", "QWEN/qwen3-8b", "Qwen3-8B-Base"], ids=lambda name: f"named {name}"
)
def test_a_name_is_found_in_any_case_and_without_its_owner(name: str) -> None:
    found = find_config(name)
    assert found.name == ("Qwen/Qwen3-8B-Base" if name.endswith("Base") else "Qwen/Qwen3-8B")
    assert found.config["hidden_size"] == 4096
    assert "come with this package" in found.source


def test_a_folder_and_a_file_give_the_config_that_is_in_them(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    AutoConfig.for_model("llama", hidden_size=48, num_attention_heads=4).save_pretrained(folder)
    for path in (folder, folder / "config.json"):
        found = find_config(str(path))
        assert found.config["hidden_size"] == 48
        assert str(path) in found.source


def test_the_cache_of_the_hub_comes_before_the_sizes_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    AutoConfig.for_model("llama", hidden_size=48, num_attention_heads=4).save_pretrained(tmp_path / "cached")
    cached = str(tmp_path / "cached" / "config.json")
    monkeypatch.setattr(module, "try_to_load_from_cache", lambda name, file: cached)
    found = find_config("Qwen3-8B")
    assert (found.name, found.config["hidden_size"]) == ("Qwen/Qwen3-8B", 48)
    assert found.source == "the local cache of the Hub"


def test_a_folder_of_the_owner_hides_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Qwen").mkdir()
    assert find_config("Qwen/Qwen3-8B").config["num_hidden_layers"] == 36


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Qwen/Qwen3-9B", r"The model 'Qwen/Qwen3-9B' is not in the cache .*; did you mean .*Qwen/Qwen3-8B or "),
        ("zzzzzz", r"The model 'zzzzzz' is not in the cache .*, or give a path\.$"),
        ("./nowhere", r"There is no folder './nowhere'"),
    ],
)
def test_a_model_that_is_not_found_is_refused_with_the_nearest_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_config(name)


def test_a_model_of_another_kind_is_refused_as_such(tmp_path: Path) -> None:
    AutoConfig.for_model("t5").save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="encoder-decoder"):
        find_config(str(tmp_path / "t5"))


def test_the_size_of_a_head_is_kept_although_the_config_does_not_declare_it(tmp_path: Path) -> None:
    given = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 48}
    AutoConfig.for_model("qwen3_moe", **given).save_pretrained(tmp_path / "moe")
    assert find_config(str(tmp_path / "moe")).config["head_dim"] == 48
    check_config({"model_type": "qwen3_moe", **given})
    with pytest.raises(ValueError, match="'head_size' is not a key of the config of 'qwen3_moe'"):
        check_config({"model_type": "qwen3_moe", "head_size": 48})


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", quantization_config={"quant_method": "gptq"}).save_pretrained(tmp_path / "gptq")
    with pytest.raises(ValueError, match="quantised"):
        find_config(str(tmp_path / "gptq"))
