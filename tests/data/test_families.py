import pytest

from lightning_protrain.data.chat.detect_format import family_named
from lightning_protrain.data.chat.known_formats import ALIASES, FAMILIES

NAMES = [
    "chatml",
    "qwen2",
    "qwen2.5",
    "qwen3",
    "qwen3.5",
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "gemma1",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "llama3",
    "llama3.1",
    "llama3.2-vision",
    "llama4",
    "mistral-v1",
    "mistral-v2",
    "mistral-v3",
    "mistral-v7",
    "tekken",
    "pixtral",
    "voxtral",
    "phi3",
    "phi4",
    "phi-4-mini",
    "deepseek-v2",
    "deepseek-v3",
    "deepseek-v4",
    "deepseek-r1",
    "gpt-oss",
    "harmony",
    "glm4",
    "glm-4.5",
    "glm-4.5v",
    "smolvlm2",
    "idefics3",
    "internvl",
    "llava",
    "llava-next",
    "kimi",
    "paddleocr-vl",
    "mistral3",
    "qwen2_5_vl",
    "qwen3_5",
    "lfm2vl",
    "glm46v",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_its_family(name: str) -> None:
    assert {"assistant", "user"} <= set(family_named(name).roles)


def test_an_alias_is_the_same_family() -> None:
    assert FAMILIES["qwen2.5"] is FAMILIES["qwen"]
    assert not set(ALIASES) & {family.name for family in FAMILIES.values()}
    assert all(name == name.lower() and "_" not in name for name in FAMILIES)


def test_a_turn_of_the_assistant_can_end() -> None:
    ends = {f.name: [b.end for b in f.boundaries if b.role == "assistant"] for f in FAMILIES.values()}
    assert all(end != (None,) for variants in ends.values() for end in variants)
