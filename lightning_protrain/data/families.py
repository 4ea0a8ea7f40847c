"""All chat formats that are known by name."""

from __future__ import annotations

from lightning_protrain.data import families_eastern, families_western
from lightning_protrain.data.boundaries import Family

_BY_NAME = {family.name: family for family in (*families_eastern.FAMILIES, *families_western.FAMILIES)}

# Models whose chat format is another family's. Names are compared as `family_called` says.
ALIASES = {
    **dict.fromkeys(("qwen1.5", "qwen2", "qwen2.5", "qwen3", "qwen3.5", "qwen3.6", "qwq", "qvq"), "qwen"),
    **dict.fromkeys(("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen2-audio", "qwen2.5-omni", "qwen3-omni"), "qwen"),
    **dict.fromkeys(("qwen3-moe", "qwen3-vl-moe", "qwen3.5-moe"), "qwen"),
    **dict.fromkeys(("smollm2", "smollm3", "lfm2", "lfm2-vl", "lfm2vl", "hermes", "yi", "internlm2"), "chatml"),
    **dict.fromkeys(("internvl2", "internvl2.5", "internvl3", "internvl3.5"), "internvl"),
    **dict.fromkeys(
        ("gemma1", "gemma2", "gemma3", "gemma3n", "gemma-2", "gemma-3", "gemma-3n", "functiongemma"), "gemma"
    ),
    "gemma-4": "gemma4",
    **dict.fromkeys(("llama3.1", "llama3.2", "llama3.3", "llama-3", "llama-3.1", "llama-3.2", "llama-3.3"), "llama3"),
    **dict.fromkeys(("llama3.2-vision", "llama3-2-vision", "llama-3.2-vision", "mllama"), "llama3"),
    "llama-4": "llama4",
    **dict.fromkeys(("llama2", "llama-2", "llava-next", "llava-1.6", "mixtral-v1"), "mistral-v1"),
    **dict.fromkeys(("mistral-v2", "mistral-v3", "mistral-v3-tekken", "mistral-v7", "mistral-v7-tekken"), "mistral"),
    **dict.fromkeys(("mistral-v11", "mistral-v13", "mistral-nemo", "mistral-small", "mixtral"), "mistral"),
    **dict.fromkeys(
        ("tekken", "pixtral", "magistral", "ministral", "ministral-3", "mistral3", "ministral3", "devstral"), "mistral"
    ),
    **dict.fromkeys(("phi-3", "phi3.5", "phi-3.5", "phi-4-mini", "phi4-mini"), "phi3"),
    "phi-4": "phi4",
    **dict.fromkeys(("deepseek-v3", "deepseek-v3.1", "deepseek-v3.2", "deepseek-v4", "deepseek-r1"), "deepseek"),
    **dict.fromkeys(("gptoss", "harmony"), "gpt-oss"),
    **dict.fromkeys(
        ("glm-4", "glm4v", "glm-4v", "glm-4.5", "glm-4.5v", "glm-4.6", "glm4.5", "glm-4.7", "glm46v", "glm4-moe"),
        "glm4",
    ),
    **dict.fromkeys(("smolvlm", "smolvlm2", "idefics2"), "idefics3"),
    **dict.fromkeys(("vicuna", "llava-1.5", "llava1.5", "llava-next-vicuna"), "llava"),
    **dict.fromkeys(("kimi-k2", "kimi-vl", "kimi-k2-thinking", "moonlight"), "kimi"),
    **dict.fromkeys(("solar-open",), "solar"),
    **dict.fromkeys(("paddleocr", "ernie4.5", "ernie-4.5"), "paddleocr-vl"),
    **dict.fromkeys(("tulu", "olmo", "tinyllama"), "zephyr"),
}

FAMILIES: dict[str, Family] = _BY_NAME | {alias: _BY_NAME[name] for alias, name in ALIASES.items()}


def family_called(name: str) -> Family | None:
    """Return the family of a name, however it is written: case, `_`, `-` and `.` do not matter."""
    return _BY_KEY.get(_key(name))


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(".", "-")


_BY_KEY = {_key(name): family for name, family in FAMILIES.items()}
