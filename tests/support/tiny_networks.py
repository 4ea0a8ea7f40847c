"""Tiny networks of transformers by their architecture."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 53


# Sizes of a tiny model, under every name that an architecture gives them.
TINY = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "word_embed_proj_dim"], 32),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"], 48),
    **dict.fromkeys(["num_hidden_layers", "num_layers", "n_layer", "n_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"], 2),
    **dict.fromkeys(["num_local_experts", "num_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 16),
    **dict.fromkeys(["head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "state_size"], 8),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 8),
    **dict.fromkeys(["qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"], 4),
    **dict.fromkeys(["num_experts_per_tok", "first_k_dense_replace"], 2),
    **dict.fromkeys(["n_group", "topk_group", "pad_token_id", "bos_token_id", "eos_token_id"], 1),
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
}


OWN = {
    "deepseek_v2": {"head_dim": 4},
    "deepseek_v3": {"head_dim": 4, "num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
}


def tiny_config(model_type: str, **overrides: object) -> dict[str, object]:
    """Keys of the config of a tiny model, its type included."""
    base = AutoConfig.for_model(model_type)
    fixed = {key for key in vars(type(base)) if isinstance(getattr(type(base), key), property)}
    sizes = {key: value for key, value in TINY.items() if hasattr(base, key) and key not in fixed}
    layer_types = getattr(base, "layer_types", None)
    if layer_types and "layer_types" not in fixed:
        sizes["layer_types"] = [layer_types[0], layer_types[-1]]
    return {"model_type": model_type, **sizes, **OWN.get(model_type, {}), **overrides}


def tiny_model(model_type: str, **overrides: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_config(model_type, **overrides))).eval()


# Wide enough for the smallest blocks of four-bit weights, and for the kernels of the CPU.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
