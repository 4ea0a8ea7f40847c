"""Published sizes of families of language models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """One published size.

    Attributes:
        name: Published name.
        billions: Approximate number of parameters, 1e9.
        hidden: Hidden size.
        intermediate: Width of the feed-forward layers.
        layers: Number of blocks.
        heads: Number of attention heads.
        kv_heads: Number of heads of keys and values.
        vocabulary: Number of rows of the embedding.
        head_dim: Width of a head; 0 means hidden / heads.
        tied: True if the language model head is tied to the embedding.
    """

    name: str
    billions: float
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 0
    tied: bool = False


@dataclass(frozen=True)
class Family:
    """Sizes of one architecture, from small to large.

    Attributes:
        model_type: Model type of transformers.
        sizes: Sizes, from small to large.
        keys: Takes a size and the length of sequences; returns further keys of the config.
    """

    model_type: str
    sizes: tuple[Size, ...]
    keys: Callable[[Size, int], dict[str, Any]]

    def config(self, size: Size, sequence: int) -> dict[str, Any]:
        """Return the `config` of a `CausalLMModule` for this family."""
        tokens = {"bos_token_id": 1, "eos_token_id": 2}
        return {"model_type": self.model_type, "vocab_size": size.vocabulary, **tokens, **self.keys(size, sequence)}


def _modern(size: Size, sequence: int) -> dict[str, Any]:
    keys = {
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": sequence,
        "tie_word_embeddings": size.tied,
        "pad_token_id": 0,
    }
    return keys | ({"head_dim": size.head_dim} if size.head_dim else {})


def _gpt2(size: Size, sequence: int) -> dict[str, Any]:
    return {"n_embd": size.hidden, "n_layer": size.layers, "n_head": size.heads, "n_positions": sequence}


def _gpt(name: str, billions: float, hidden: int, layers: int, heads: int) -> Size:
    return Size(name, billions, hidden, 4 * hidden, layers, heads, heads, 50257, tied=True)


LLAMA = (
    Size("Llama 3.2 1B", 1.2, 2048, 8192, 16, 32, 8, 128256, tied=True),
    Size("Llama 3.2 3B", 3.2, 3072, 8192, 28, 24, 8, 128256, tied=True),
    Size("Llama 2 7B", 6.7, 4096, 11008, 32, 32, 32, 32000),
    Size("Llama 3.1 8B", 8.0, 4096, 14336, 32, 32, 8, 128256),
    Size("Llama 2 13B", 13.0, 5120, 13824, 40, 40, 40, 32000),
    Size("LLaMA 33B", 32.5, 6656, 17920, 60, 52, 52, 32000),
    Size("Code Llama 34B", 33.7, 8192, 22016, 48, 64, 8, 32000),
    Size("LLaMA 65B", 65.3, 8192, 22016, 80, 64, 64, 32000),
    Size("Llama 3.1 70B", 70.6, 8192, 28672, 80, 64, 8, 128256),
    Size("Llama 3.1 405B", 405.9, 16384, 53248, 126, 128, 8, 128256),
)
# The last two sizes are from earlier generations, built with the classes of this one.
QWEN3 = (
    Size("Qwen3 0.6B", 0.6, 1024, 3072, 28, 16, 8, 151936, 128, tied=True),
    Size("Qwen3 1.7B", 1.7, 2048, 6144, 28, 16, 8, 151936, 128, tied=True),
    Size("Qwen3 4B", 4.0, 2560, 9728, 36, 32, 8, 151936, 128, tied=True),
    Size("Qwen3 8B", 8.2, 4096, 12288, 36, 32, 8, 151936, 128),
    Size("Qwen3 14B", 14.8, 5120, 17408, 40, 40, 8, 151936, 128),
    Size("Qwen3 32B", 32.8, 5120, 25600, 64, 64, 8, 151936, 128),
    Size("Qwen2.5 72B", 72.7, 8192, 29568, 80, 64, 8, 152064, 128),
    Size("Qwen1.5 110B", 111.2, 8192, 49152, 80, 64, 8, 152064, 128),
)
# Language models without the vision tower.
GEMMA3 = (
    Size("Gemma 3 270M", 0.3, 640, 2048, 18, 4, 1, 262144, 256, tied=True),
    Size("Gemma 3 1B", 1.0, 1152, 6912, 26, 4, 1, 262144, 256, tied=True),
    Size("Gemma 3 4B", 3.9, 2560, 10240, 34, 8, 4, 262208, 256, tied=True),
    Size("Gemma 3 12B", 11.8, 3840, 15360, 48, 16, 8, 262208, 256, tied=True),
    Size("Gemma 3 27B", 27.0, 5376, 21504, 62, 32, 16, 262208, 128, tied=True),
)
# Sizes above 1.5 billion are those of GPT-3, GPT-NeoX and OPT, built as GPT-2.
GPT2 = (
    _gpt("GPT-2 0.8B", 0.8, 1280, 36, 20),
    _gpt("GPT-2 1.5B", 1.6, 1600, 48, 25),
    _gpt("GPT-3 2.7B", 2.7, 2560, 32, 32),
    _gpt("GPT-3 6.7B", 6.7, 4096, 32, 32),
    _gpt("GPT-3 13B", 12.9, 5120, 40, 40),
    _gpt("GPT-NeoX 20B", 20.2, 6144, 44, 64),
    _gpt("OPT 30B", 30.0, 7168, 48, 56),
    _gpt("OPT 66B", 65.7, 9216, 64, 72),
    _gpt("GPT-3 175B", 174.6, 12288, 96, 96),
)
FAMILIES = {
    "Llama": Family("llama", LLAMA, _modern),
    "Qwen3": Family("qwen3", QWEN3, _modern),
    "Gemma 3": Family("gemma3_text", GEMMA3, _modern),
    "GPT-2": Family("gpt2", GPT2, _gpt2),
}
