"""Tiny models of real architectures, with their inputs and their expected blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.support.models import skip_without_bf16_lstm

VOCABULARY = 64
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


@dataclass(frozen=True)
class Case:
    """A model with its inputs, and the blocks and other units that must be found in it."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    blocks: Sequence[str]
    others: Sequence[str]
    tied: int = 0


def numbered(name: str, count: int) -> list[str]:
    return [f"{name}.{index}" for index in range(count)]


def tokens(length: int = 6) -> torch.Tensor:
    return torch.arange(3, 3 + length).reshape(1, length)


def images() -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8)


def _text() -> dict[str, torch.Tensor]:
    return {"input_ids": tokens()}


def _llava() -> nn.Module:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION).to_dict(),
        text_config=hf.LlamaConfig(**TEXT).to_dict(),
        image_token_index=5,
    )
    return hf.LlavaForConditionalGeneration(config)


def _llava_inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([[1, 5, 5, 5, 5, 9]]), "pixel_values": images()}


def _siglip() -> nn.Module:
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {key: TEXT[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    return hf.SiglipModel(hf.SiglipConfig(text_config=text | special, vision_config=VISION))


def _t5() -> nn.Module:
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, vocab_size=VOCABULARY))


def _wav2vec2() -> nn.Module:
    convolutions = {"conv_dim": (8, 8, 8), "conv_kernel": (3, 3, 3), "conv_stride": (2, 2, 2)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return hf.Wav2Vec2Model(hf.Wav2Vec2Config(**sizes, **convolutions, **positions))


def _zamba2() -> nn.Module:
    mamba = {"mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_expand": 2, "mamba_d_state": 4, "mamba_headdim": 8}
    layers = ["mamba", "hybrid", "mamba", "hybrid"]
    sizes = TEXT | {"num_hidden_layers": 4, "attention_hidden_size": 32, "num_mem_blocks": 1}
    return hf.Zamba2ForCausalLM(hf.Zamba2Config(**sizes, **mamba, layers_block_type=layers, use_mamba_kernels=False))


def _lora(**choices: Any) -> nn.Module:
    return get_peft_model(hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)), LoraConfig(r=2, **choices))


class Captioner(nn.Module):
    """A recurrent model: an LSTM keeps references to its parameters and has children nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        skip_without_bf16_lstm(hidden)
        return self.head(self.lstm(hidden)[0])


LANGUAGE = ["model.embed_tokens", "model.norm", "lm_head"]
MOE = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
CASES: dict[str, Case] = {
    "llama": Case(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)), _text, numbered("model.layers", 3), LANGUAGE),
    "llama-tied": Case(
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, tie_word_embeddings=True)),
        _text,
        numbered("model.layers", 3),
        LANGUAGE,
        tied=1,
    ),
    "mixtral": Case(
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**TEXT, num_local_experts=2)),
        _text,
        numbered("model.layers", 3),
        LANGUAGE,
    ),
    "qwen2-moe": Case(
        lambda: hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**TEXT, **MOE)), _text, numbered("model.layers", 3), LANGUAGE
    ),
    "gpt2": Case(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2)
        ),
        _text,
        numbered("transformer.h", 3),
        ["transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"],
        tied=1,
    ),
    "t5": Case(
        _t5,
        lambda: {"input_ids": tokens(), "decoder_input_ids": tokens(4)},
        numbered("encoder.block", 2) + numbered("decoder.block", 3),
        [
            "shared",
            *(f"{side}.{name}" for side in ("encoder", "decoder") for name in ("embed_tokens", "final_layer_norm")),
            "lm_head",
        ],
        tied=1,
    ),
    "bert": Case(
        lambda: hf.BertForMaskedLM(hf.BertConfig(**{k: v for k, v in TEXT.items() if k != "num_key_value_heads"})),
        _text,
        numbered("bert.encoder.layer", 3),
        [f"bert.embeddings.{name}_embeddings" for name in ("word", "position", "token_type")]
        + ["bert.embeddings.LayerNorm", "cls.predictions", "cls.predictions.transform.dense"]
        + ["cls.predictions.transform.LayerNorm", "cls.predictions.decoder"],
        tied=2,
    ),
    "mamba": Case(
        lambda: hf.MambaForCausalLM(
            hf.MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=3, **{k: TEXT[k] for k in list(TEXT)[5:]})
        ),
        _text,
        numbered("backbone.layers", 3),
        ["backbone.embeddings", "backbone.norm_f", "lm_head"],
        tied=1,
    ),
    "llava": Case(
        _llava,
        _llava_inputs,
        numbered("model.vision_tower.encoder.layers", 2) + numbered("model.language_model.layers", 3),
        ["model.vision_tower.embeddings"]
        + [f"model.vision_tower.embeddings.{name}_embedding" for name in ("patch", "position")]
        + [f"model.vision_tower.{name}" for name in ("pre_layrnorm", "post_layernorm")]
        + [f"model.multi_modal_projector.linear_{index}" for index in (1, 2)]
        + ["model.language_model.embed_tokens", "model.language_model.norm", "lm_head"],
    ),
    "siglip": Case(
        _siglip,
        lambda: {"input_ids": tokens(), "pixel_values": images()},
        numbered("text_model.encoder.layers", 2) + numbered("vision_model.encoder.layers", 2),
        ["", *(f"text_model.embeddings.{name}_embedding" for name in ("token", "position"))]
        + ["text_model.final_layer_norm", "text_model.head"]
        + [f"vision_model.embeddings.{name}_embedding" for name in ("patch", "position")]
        + ["vision_model.post_layernorm", "vision_model.head", "vision_model.head.attention"]
        + [f"vision_model.head.{name}" for name in ("layernorm", "mlp.fc1", "mlp.fc2")],
    ),
    "wav2vec2": Case(
        _wav2vec2,
        lambda: {"input_values": torch.linspace(-1, 1, 100).reshape(1, 100)},
        numbered("feature_extractor.conv_layers", 3) + numbered("encoder.layers", 2),
        ["", *(f"feature_projection.{name}" for name in ("layer_norm", "projection"))]
        + [f"encoder.{name}" for name in ("pos_conv_embed.conv", "layer_norm")],
    ),
    "zamba2": Case(
        _zamba2,
        _text,
        numbered("model.layers", 4),
        ["model.embed_tokens", "model.final_layernorm", "lm_head"],
        tied=13,
    ),
    "lora": Case(
        lambda: _lora(target_modules=["q_proj", "embed_tokens", "lm_head"]),
        _text,
        numbered("base_model.model.model.layers", 3),
        [f"base_model.model.{name}" for name in LANGUAGE],
    ),
    "dora": Case(
        lambda: _lora(target_modules=["q_proj", "lm_head"], use_dora=True),
        _text,
        numbered("base_model.model.model.layers", 3),
        [f"base_model.model.{name}" for name in LANGUAGE],
    ),
    "modules-to-save": Case(
        lambda: _lora(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        _text,
        numbered("base_model.model.model.layers", 3),
        [f"base_model.model.{name}" for name in LANGUAGE[:2]]
        + [f"base_model.model.lm_head.{name}" for name in ("original_module", "modules_to_save.default")],
    ),
    "transformer": Case(
        lambda: nn.Transformer(16, 2, 2, 3, 32, batch_first=True),
        lambda: {"src": torch.ones(1, 5, 16), "tgt": torch.ones(1, 4, 16)},
        numbered("encoder.layers", 2) + numbered("decoder.layers", 3),
        ["encoder.norm", "decoder.norm"],
    ),
    "mlp": Case(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)),
        lambda: {"input": torch.ones(1, 4)},
        [""],
        [],
    ),
    "lstm": Case(Captioner, _text, [""], []),
}
