"""Models that are found by name: sizes that come with the package, folders, files, the cache, and no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_protrain.models import published as module
from lightning_protrain.models.published import Published, find_config, published

MODELS = {each.name: each for each in published().values()}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def parameters_of(config: dict[str, Any]) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).num_parameters()


def test_there_are_enough_models_each_with_a_source() -> None:
    assert len({json.dumps(each.config) for each in MODELS.values()}) >= 60
    assert all(each.source.startswith("https://github.com/") for each in MODELS.values())


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda each: each.name)
def test_a_model_has_the_number_of_parameters_that_it_is_listed_with(model: Published) -> None:
    """Counted on one block and two, as blocks are alike in all of them."""
    config = dict(model.config)
    depth = "n_layer" if "n_layer" in config else "num_hidden_layers"
    one, two = (parameters_of({**config, depth: number}) for number in (1, 2))
    assert one + (two - one) * (config[depth] - 1) == model.parameters


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
        ("Qwen/Qwen3-9B", r"The model 'Qwen/Qwen3-9B' is not in the cache .*; did you mean Qwen/Qwen3-8B or "),
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


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("llama", quantization_config={"quant_method": "gptq"}).save_pretrained(tmp_path / "gptq")
    with pytest.raises(ValueError, match="quantised"):
        find_config(str(tmp_path / "gptq"))
