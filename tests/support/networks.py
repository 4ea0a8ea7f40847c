"""Small networks of transformers, each from its own config class, with batches that they take and score.

`networks()` holds a factory for each architecture, by name. Every factory seeds before it builds; the batches of a
network are the same at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support import network_batches as feed
from tests.support.network_batches import IMAGE, IMAGE_TOKEN, VIDEO_TOKEN, VISION_END, VISION_START, VOCABULARY, Batch

WIDTH, STEPS, LAYERS = 16, 3, 4

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 1, "head_dim": 8}
EXPERTS = {"moe_intermediate_size": WIDTH, "num_experts_per_tok": 2}
VISION = {**{key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads")}}
VISION |= {"num_hidden_layers": 3, "image_size": IMAGE, "patch_size": 4}

Draw = Callable[[torch.Generator], Batch]


@dataclass(frozen=True)
class Network:
    """A test network: how it is made, and its batches.

    Attributes:
        kind: Its class in transformers.
        config: Makes its configuration.
        draw: Makes a batch.
        change: Is applied to the network once it is built.
    """

    kind: type[hf.PreTrainedModel]
    config: Callable[[], hf.PretrainedConfig]
    draw: Draw
    change: Callable[[Any], None] | None = None

    def build(self, attention: str | None = None, seed: int = 0) -> hf.PreTrainedModel:
        """The network with random weights, in train mode."""
        torch.manual_seed(seed)
        network = self.kind._from_config(self.config(), attn_implementation=attention)
        if self.change is not None:
            self.change(network)
        set_caches(network, on=False)
        return network.train()

    def batches(self) -> list[Batch]:
        """The batches of a run, always the same."""
        generator = torch.Generator().manual_seed(7)
        return [self.draw(generator) for _ in range(STEPS)]


class NetworkModule(L.LightningModule):
    """Trains a network with the loss that it computes itself, and records every loss.

    Args:
        network: Any model of transformers.
        batches: Makes its batches.
    """

    def __init__(self, network: nn.Module, batches: list[Batch]) -> None:
        super().__init__()
        self.network = network
        self.batches = batches
        self.losses: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.network(**batch).loss
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None)


def set_caches(network: nn.Module, on: bool) -> None:
    """Switches key-value caches, which training has no use for and most configurations ask for.

    With them some networks sum gradients in another order, and checkpointed blocks cannot fill them.
    """
    for part in network.modules():
        config = getattr(part, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = on


def module(name: str, attention: str | None = None) -> NetworkModule:
    """The module of a network, by its name."""
    network = networks()[name]
    return NetworkModule(network.build(attention), network.batches())


# --- architectures ----------------------------------------------------------------------------------------------------


def _of(kind: str, draw: Draw, sizes: Mapping[str, Any], change: Any = None, /, **more: Any) -> Network:
    model = getattr(hf, kind)
    return Network(model, lambda: model.config_class(**{**sizes, **more}), draw, change)


def _vision_tower(config: type[hf.PretrainedConfig], **more: Any) -> hf.PretrainedConfig:
    return config(**{**VISION, **more})


def _llava() -> hf.PretrainedConfig:
    return hf.LlavaConfig(
        vision_config=_vision_tower(hf.CLIPVisionConfig),
        text_config=hf.LlamaConfig(**GROUPED),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
    )


def _gemma3() -> hf.PretrainedConfig:
    return hf.Gemma3Config(
        text_config={**GROUPED, "sliding_window": 4},
        vision_config=_vision_tower(hf.SiglipVisionConfig, vision_use_head=False).to_dict(),
        mm_tokens_per_image=4,
        image_token_id=IMAGE_TOKEN,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
    )


def _qwen_vl(kind: type[hf.PretrainedConfig], vision: Mapping[str, Any]) -> hf.PretrainedConfig:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    sides = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2, "depth": 3}
    return kind(
        text_config={**GROUPED, "rope_parameters": rope},
        vision_config={**sides, **vision},
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )


def _qwen2_5_vl() -> hf.PretrainedConfig:
    sizes = {"hidden_size": WIDTH, "out_hidden_size": WIDTH, "intermediate_size": 32}
    return _qwen_vl(hf.Qwen2_5_VLConfig, {**sizes, "window_size": 8, "fullatt_block_indexes": [1]})


def _qwen2_vl() -> hf.PretrainedConfig:
    return _qwen_vl(hf.Qwen2VLConfig, {"embed_dim": WIDTH, "hidden_size": WIDTH, "mlp_ratio": 2})


def _qwen3_vl() -> hf.PretrainedConfig:
    sizes = {"hidden_size": WIDTH, "out_hidden_size": WIDTH, "intermediate_size": 32}
    return _qwen_vl(hf.Qwen3VLConfig, {**sizes, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]})


def _clip() -> hf.PretrainedConfig:
    return hf.CLIPConfig(
        text_config=hf.CLIPTextConfig(**SIZES), vision_config=_vision_tower(hf.CLIPVisionConfig), projection_dim=8
    )


def _bert_to_bert() -> hf.PretrainedConfig:
    encoder, decoder = hf.BertConfig(**SIZES), hf.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    config = hf.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 0, 2
    return config


def _share_first_layer(network: Any) -> None:
    """The last layer is the first one: one module at two places."""
    network.model.layers[-1] = network.model.layers[0]


def _share_projections(network: Any) -> None:
    """Layers of their own have a projection in common: one parameter in several modules."""
    for layer in network.model.layers[1:]:
        layer.mlp.down_proj.weight = network.model.layers[0].mlp.down_proj.weight


def _freeze_tower(network: Any) -> None:
    network.model.vision_tower.requires_grad_(False)


def _freeze_text(network: Any) -> None:
    network.model.language_model.requires_grad_(False)


T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 3}
T5 |= {"decoder_start_token_id": 2, "pad_token_id": 2, "eos_token_id": 1}
BART = {"vocab_size": VOCABULARY, "d_model": WIDTH, "max_position_embeddings": 32, "decoder_start_token_id": 2}
BART |= {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in
         (("layers", 3), ("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4, **MAMBA}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MIXED = ["linear_attention", "full_attention"] * 2
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "llama-tied": ("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "gemma3-text": ("Gemma3ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}),
    "phi3": ("Phi3ForCausalLM", {**GROUPED, "resid_pdrop": 0.1}),
    "olmo2": ("Olmo2ForCausalLM", GROUPED),
    "falcon": ("FalconForCausalLM", {**SIZES, "ffn_hidden_size": 32}),
    "opt": ("OPTForCausalLM", {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": WIDTH}),
    "neox": ("GPTNeoXForCausalLM", SIZES),
    "bloom": ("BloomForCausalLM", {**SIZES, "n_layer": 3, "n_head": 2}),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4, "output_router_logits": True}),
    "mixtral-idle": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 64, "num_experts_per_tok": 1}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**GROUPED, **EXPERTS, "num_experts": 4}),
    "qwen3-moe-idle": ("Qwen3MoeForCausalLM", {**GROUPED, **EXPERTS, "num_experts": 64, "num_experts_per_tok": 1}),
    "qwen3-moe-mixed": ("Qwen3MoeForCausalLM", {**GROUPED, **EXPERTS, "num_experts": 4, "mlp_only_layers": [0, 2]}),
    "gpt-oss": ("GptOssForCausalLM", {**GROUPED, **EXPERTS, "num_local_experts": 4, "sliding_window": 4}),
    "deepseek": (
        "DeepseekV3ForCausalLM",
        {**SIZES, **EXPERTS, **LATENT, "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
         "first_k_dense_replace": 1, "head_dim": 4},
    ),
    "mamba": ("MambaForCausalLM", {**SIZES, "state_size": 8}),
    "mamba2": ("Mamba2ForCausalLM", {**SIZES, "state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 1,
                                     "chunk_size": 4}),
    "jamba": ("JambaForCausalLM", {**GROUPED, **MAMBA, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
                                   "expert_layer_period": 2, "expert_layer_offset": 0, "use_mamba_kernels": False,
                                   "mamba_dt_rank": 4}),
    "bamba": ("BambaForCausalLM", {**GROUPED, **MAMBA2, "attn_layer_indices": [1, 3]}),
    "zamba2": ("Zamba2ForCausalLM", {**SIZES, **MAMBA, "mamba_ngroups": 1, "n_mamba_heads": 2, "chunk_size": 4,
                                     "num_hidden_layers": 5, "hybrid_layer_ids": [1, 3], "num_mem_blocks": 1,
                                     "adapter_rank": 4, "use_mem_rope": True,
                                     "layer_types": ["mamba", "hybrid", "mamba", "hybrid", "mamba"]}),
    "granite-hybrid": ("GraniteMoeHybridForCausalLM", {**GROUPED, **MAMBA2, "num_local_experts": 4,
                                                       "num_experts_per_tok": 2, "shared_intermediate_size": 16,
                                                       "layer_types": ["mamba", "attention"] * 2}),
    "qwen3-next": ("Qwen3NextForCausalLM", {**GROUPED, **EXPERTS, **LINEAR, "num_experts": 4,
                                            "shared_expert_intermediate_size": 16, "layer_types": MIXED}),
    "lfm2": ("Lfm2ForCausalLM", {**GROUPED, "block_multiple_of": 8, "layer_types": ["conv", "full_attention"] * 2}),
}  # fmt: skip


def networks() -> dict[str, Network]:
    """All architectures, by name."""
    gpt2 = {**SIZES, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2, "n_positions": 32}
    labelled = {**SIZES, "num_labels": 3}
    whisper = {**BART, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32}
    whisper |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    albert = {**labelled, "embedding_size": 8, "num_hidden_groups": 2, "inner_group_num": 1}
    return {
        **{name: _of(kind, feed.text, sizes) for name, (kind, sizes) in DECODERS.items()},
        "gpt2": _of("GPT2LMHeadModel", feed.text, gpt2),
        "shared-module": _of("LlamaForCausalLM", feed.text, GROUPED, _share_first_layer),
        "shared-weights": _of("LlamaForCausalLM", feed.text, GROUPED, _share_projections),
        "t5": _of("T5ForConditionalGeneration", feed.pairs, T5),
        "t5-untied": _of(
            "T5ForConditionalGeneration", feed.pairs, {**T5, "tie_word_embeddings": False}, feed_forward_proj="gelu"
        ),
        "bart": _of("BartForConditionalGeneration", feed.pairs, BART),
        "bert-to-bert": Network(hf.EncoderDecoderModel, _bert_to_bert, feed.pairs),
        "bert": _of("BertForSequenceClassification", feed.classes, labelled),
        "bert-masked": _of("BertForMaskedLM", feed.text, SIZES),
        "bert-tokens": _of("BertForTokenClassification", feed.token_classes, labelled),
        "roberta": _of("RobertaForSequenceClassification", feed.classes, labelled),
        "modernbert": _of(
            "ModernBertForTokenClassification", feed.token_classes, labelled, cls_token_id=0, sep_token_id=1
        ),
        "deberta": _of(
            "DebertaV2ForSequenceClassification", feed.classes, labelled, relative_attention=True, pos_att_type=["p2c"]
        ),
        "albert": _of("AlbertForSequenceClassification", feed.classes, albert),
        "llama-classes": _of("LlamaForSequenceClassification", feed.classes, GROUPED, num_labels=3),
        "llama-tokens": _of("LlamaForTokenClassification", feed.token_classes, GROUPED, num_labels=3),
        "vit": _of("ViTForImageClassification", feed.pictures, VISION, num_labels=3),
        "dino": _of("Dinov2ForImageClassification", feed.pictures, VISION, num_labels=3),
        "swin": _of(
            "SwinForImageClassification",
            feed.large_pictures,
            {"num_labels": 3, "image_size": 32, "embed_dim": 8},
            patch_size=2,
            depths=[2, 2],
            num_heads=[2, 2],
            window_size=4,
        ),
        "convnext": _of(
            "ConvNextForImageClassification",
            feed.large_pictures,
            {"num_labels": 3},
            depths=[2, 2],
            hidden_sizes=[8, 16],
            num_stages=2,
        ),
        "resnet": _of(
            "ResNetForImageClassification",
            feed.large_pictures,
            {"num_labels": 3},
            depths=[2, 2],
            hidden_sizes=[8, 16],
            embedding_size=8,
            layer_type="basic",
        ),
        "whisper": _of("WhisperForConditionalGeneration", feed.speech, whisper),
        "clip": Network(hf.CLIPModel, _clip, feed.captions),
        "llava": Network(hf.LlavaForConditionalGeneration, _llava, feed.illustrated),
        "llava-frozen-tower": Network(hf.LlavaForConditionalGeneration, _llava, feed.illustrated, _freeze_tower),
        "llava-frozen-text": Network(hf.LlavaForConditionalGeneration, _llava, feed.illustrated, _freeze_text),
        "gemma3": Network(hf.Gemma3ForConditionalGeneration, _gemma3, feed.marked),
        "qwen2-vl": Network(hf.Qwen2VLForConditionalGeneration, _qwen2_vl, feed.tiled),
        "qwen2.5-vl": Network(hf.Qwen2_5_VLForConditionalGeneration, _qwen2_5_vl, feed.tiled),
        "qwen3-vl": Network(hf.Qwen3VLForConditionalGeneration, _qwen3_vl, feed.tiled),
    }
