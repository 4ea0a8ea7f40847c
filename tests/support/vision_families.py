"""Families of vision-language models: a processor from its own class, a chat template, and a tiny model of its config.

A template writes what the released one of its family writes of messages with images. Vocabularies are real where a
package has them, else small ones with the special tokens of the family.
"""
# ruff: noqa: E501

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers as hf
from transformers import PreTrainedTokenizerFast

from lightning_protrain.data.conversation import MediaKind
from tests.data import templates
from tests.data.tokenizers import (
    LLAMA3_CONTROLS,
    QWEN_CONTROLS,
    byte_level,
    llama3,
    metaspace,
    package_folder,
    qwen,
    tekken,
)

PATCH = 4  # pixels of one side
TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 2048,
}
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER |= {"image_size": 16, "patch_size": PATCH}


def _content(image: str, text: str = "{{ part.text }}", **others: str) -> str:
    """Content of `m`: a string, or parts in their order."""
    media = "".join(
        f"{{%- elif part.type == '{kind}' %}}{{{{ '{written}' }}}}"
        for kind, written in {"image": image, **others}.items()
    )
    return (
        "{%- if m.content is string %}{{ m.content }}{%- else %}{%- for part in m.content %}"
        f"{{%- if part.type == 'text' %}}{text}{media}{{%- endif %}}{{%- endfor %}}{{%- endif %}}"
    )


def _chatml(image: str, begin: str = "", **others: str) -> str:
    content = _content(image, **others)
    return (
        f"{begin}{{%- for m in messages %}}{{{{ '<|im_start|>' + m.role + '\n' }}}}{content}{{{{ '<|im_end|>\n' }}}}"
        "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
    )


def _gemma(left: str, right: str, image: str, **others: str) -> str:
    return (
        "{{ '<bos>' }}{%- for m in messages %}"
        "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{%- endif %}"
        f"{{{{ '{left}' + ('model' if m.role == 'assistant' else m.role) + '\n' }}}}"
        + _content(image, "{{ part.text | trim }}", **others)
        + f"{{{{ '{right}\n' }}}}{{%- endfor %}}{{%- if add_generation_prompt %}}{{{{ '{left}model\n' }}}}{{%- endif %}}"
    )


MLLAMA = (
    "{{ '<|begin_of_text|>' }}{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    + _content("<|image|>")
    + "{{ '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
MISTRAL = (
    "{{ '<s>' }}{%- for m in messages %}{%- if m.role == 'system' %}[SYSTEM_PROMPT]"
    + _content("")
    + "[/SYSTEM_PROMPT]{%- elif m.role == 'user' %}[INST]"
    + _content("[IMG]")
    + "[/INST]{%- else %}"
    + _content("")
    + "{{ '</s>' }}{%- endif %}{%- endfor %}"
)
# Images come before the text of their turn.
_IMAGES_FIRST = (
    "{%- for part in m.content if part.type == 'image' %}{{ '<image>\n' }}{%- endfor %}"
    "{%- for part in m.content if part.type == 'text' %}{{ part.text }}{%- endfor %}"
)
LLAVA = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{{ 'USER: ' }}"
    + _IMAGES_FIRST
    + "{{ ' ' }}{%- else %}{{ 'ASSISTANT: ' }}"
    + _IMAGES_FIRST
    + "{{ '</s>' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{%- endif %}"
)
LLAVA_NEXT = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{{ '[INST] ' }}"
    + _IMAGES_FIRST
    + "{{ ' [/INST]' }}{%- else %}{{ ' ' }}"
    + _IMAGES_FIRST
    + "{{ '</s> ' }}{%- endif %}{%- endfor %}"
)
GLM = (
    "[gMASK]<sop>{%- for m in messages %}{{ '<|' + m.role + '|>\n' }}"
    + _content("<|begin_of_image|><|image|><|end_of_image|>", video="<|begin_of_video|><|video|><|end_of_video|>")
    + "{%- endfor %}{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{%- endif %}"
)


def _named(tokenizer: Any, eos: str, pad: str | None = None, bos: str | None = None, **named: str) -> Any:
    """The tokenizer with names for some of its special tokens, as `tokenizer.image_token`."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad or eos,
        extra_special_tokens=named,
    )


def _small(controls: tuple[str, ...], eos: str, bos: str | None = None, pad: str | None = None, **named: str) -> Any:
    every = (*dict.fromkeys((*controls, eos, *named.values())),)
    return _named(byte_level(None, every, eos), eos, pad, bos, **named)


# --- tokenizers -------------------------------------------------------------------------------------------------------

_GEMMA = {
    "boi_token": "<start_of_image>",
    "image_token": "<image_soft_token>",
    "eoi_token": "<end_of_image>",
    "boa_token": "<start_of_audio>",
    "audio_token": "<audio_soft_token>",
    "eoa_token": "<end_of_audio>",
}
_GEMMA4 = {
    "boi_token": "<|image>",
    "image_token": "<|image|>",
    "eoi_token": "<image|>",
    "boa_token": "<|audio>",
    "audio_token": "<|audio|>",
    "eoa_token": "<audio|>",
}


def _gemma_tokenizer() -> Any:
    return _small(("<bos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<bos>", **_GEMMA)


def _gemma4_tokenizer() -> Any:
    controls = ("<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|video|>")
    return _small(controls, "<eos>", "<bos>", **_GEMMA4)


def _llama4_tokenizer() -> Any:
    media = ("image_start", "image_end", "image", "patch", "tile_x_separator", "tile_y_separator")
    names = ("begin_of_text", "header_start", "header_end", "eot", "eom", "python_start", "python_end", *media)
    return _small(tuple(f"<|{name}|>" for name in names), "<|eot|>", "<|begin_of_text|>")


def _qwen_tokenizer() -> Any:
    return _small(tuple(QWEN_CONTROLS), "<|im_end|>", pad="<|endoftext|>")


def _llama3_tokenizer() -> Any:
    return _small(tuple(LLAMA3_CONTROLS), "<|eot_id|>", "<|begin_of_text|>")


def _mistral_tokenizer() -> Any:
    return _small(("<s>", "<pad>", *templates.FORMATS["mistral-v7-tekken"].controls), "</s>", "<s>", "<pad>")


def _llava_tokenizer() -> Any:
    return _named(metaspace(None, ("<image>", "<pad>")), "</s>", "<pad>", "<s>")


def _lfm2_tokenizer() -> Any:
    cells = tuple(f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3) for column in (1, 2, 3))
    controls = ("<|startoftext|>", "<|im_start|>", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
    return _small((*controls, *cells), "<|im_end|>", "<|startoftext|>")


def _idefics_tokenizer() -> Any:
    cells = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
    controls = ("<|im_start|>", "<image>", "<fake_token_around_image>", "<global-img>", "<video>", *cells)
    return _small(controls, "<end_of_utterance>", "<|im_start|>")


_INTERNVL = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
_INTERNVL |= {"video_token": "<video>"}


def _internvl_tokenizer() -> Any:
    return _small(("<|im_start|>", "<|endoftext|>"), "<|im_end|>", pad="<|endoftext|>", **_INTERNVL)


def _real_internvl() -> Any:
    made = qwen()
    made.backend_tokenizer.add_special_tokens(list(_INTERNVL.values()))
    return _named(made, "<|im_end|>", "<|endoftext|>", **_INTERNVL)


def _glm_tokenizer() -> Any:
    media = tuple(f"<|{side}_of_{kind}|>" for kind in ("image", "video") for side in ("begin", "end"))
    controls = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<think>", "</think>")
    return _small((*controls, *media, "<|image|>", "<|video|>"), "<|endoftext|>")


# --- processors and configs -------------------------------------------------------------------------------------------


def _ids(tokenizer: Any, **tokens: str) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}


def _text(tokenizer: Any, **more: Any) -> dict[str, Any]:
    """Sizes of a language model for a tokenizer."""
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return {**TEXT, "vocab_size": len(tokenizer), **special, **more}


_PIXELS = {"size": {"shortest_edge": 64, "longest_edge": 1024}, "patch_size": PATCH}
_SQUARE = {"height": 16, "width": 16}
_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_QWEN_TOWER = {"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2, "depth": 2}


def _qwen_vl(kind: str, videos: str, vision: Mapping[str, Any]) -> tuple[Any, Any]:
    def processor(tokenizer: Any, template: str) -> Any:
        video = getattr(hf, videos)(**_PIXELS)
        return getattr(hf, f"{kind}Processor")(hf.Qwen2VLImageProcessor(**_PIXELS), tokenizer, video, template)

    def config(tokenizer: Any) -> dict[str, Any]:
        return {
            "text_config": _text(tokenizer, **_ROPE),
            "vision_config": {**_QWEN_TOWER, **vision},
            **_ids(tokenizer, **_QWEN_IDS),
        }

    return processor, config


_OUT = {"hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 32}


def _gemma3_processor(tokenizer: Any, template: str) -> Any:
    images = hf.Gemma3ImageProcessor(size=_SQUARE)
    return hf.Gemma3Processor(images, tokenizer, template, image_seq_length=4)


def _gemma3_config(tokenizer: Any) -> dict[str, Any]:
    ids = {"image_token_id": "<image_soft_token>", "boi_token_index": "<start_of_image>"}
    return {
        "text_config": _text(tokenizer, sliding_window=8),
        "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER},
        "mm_tokens_per_image": 4,
        **_ids(tokenizer, **ids, eoi_token_index="<end_of_image>"),
    }


def _gemma3n_processor(tokenizer: Any, template: str) -> Any:
    sound = hf.Gemma3nAudioFeatureExtractor(feature_size=32)
    images = hf.SiglipImageProcessor(size={"height": 64, "width": 64})
    return hf.Gemma3nProcessor(sound, images, tokenizer, template, image_seq_length=256)


def _gemma3n_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "text_config": {
            **_text(tokenizer, num_hidden_layers=4),
            "vocab_size": len(tokenizer) + 16,
            "vocab_size_per_layer_input": len(tokenizer),
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "num_kv_shared_layers": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        "vision_config": {"vocab_offset": len(tokenizer), "vocab_size": 8, "model_args": {"channel_multiplier": 0.1}},
        "audio_config": {
            "hidden_size": 16,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "input_feat_size": 32,
            "sscp_conv_channel_size": [4, 4],
            "vocab_offset": len(tokenizer) + 8,
            "vocab_size": 8,
        },
        **_ids(tokenizer, **{f"{name}_id": token for name, token in _GEMMA.items()}),
    }


def _gemma4_processor(tokenizer: Any, template: str) -> Any:
    sound, videos = hf.Gemma4AudioFeatureExtractor(), hf.Gemma4VideoProcessor(patch_size=PATCH, num_frames=4)
    images = hf.Gemma4ImageProcessor(patch_size=PATCH, max_soft_tokens=70)
    return hf.Gemma4Processor(sound, images, tokenizer, videos, template, image_seq_length=70)


def _gemma4_config(tokenizer: Any) -> dict[str, Any]:
    ids = {f"{name}_id": token for name, token in _GEMMA4.items()}
    ids["eoa_token_index"] = ids.pop("eoa_token_id")
    return {
        "text_config": {
            **_text(tokenizer, vocab_size_per_layer_input=len(tokenizer), hidden_size_per_layer_input=8),
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 8,
        },
        "vision_config": {
            **{
                key: TOWER[key]
                for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
            },
            "patch_size": PATCH,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "position_embedding_size": 256,
        },
        "audio_config": None,
        **_ids(tokenizer, **ids, video_token_id="<|video|>"),
    }


def _mllama_processor(tokenizer: Any, template: str) -> Any:
    return hf.MllamaProcessor(hf.MllamaImageProcessor(size=_SQUARE, max_image_tiles=4), tokenizer, template)


def _mllama_config(tokenizer: Any) -> dict[str, Any]:
    text = _text(tokenizer, num_hidden_layers=3, cross_attention_layers=[1])
    del text["head_dim"]
    return {
        "text_config": {**text, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "attention_heads": 2,
            "image_size": 16,
            "patch_size": PATCH,
            "num_global_layers": 1,
            "vision_output_dim": 32,
            "intermediate_layers_indices": [0],
        },
        **_ids(tokenizer, image_token_index="<|image|>"),
    }


def _llama4_processor(tokenizer: Any, template: str) -> Any:
    return hf.Llama4Processor(hf.Llama4ImageProcessor(size=_SQUARE, max_patches=4), tokenizer, patch_size=PATCH)


def _llama4_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "text_config": _text(tokenizer, intermediate_size_mlp=32, num_local_experts=2),
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": PATCH,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        **_ids(
            tokenizer, image_token_index="<|patch|>", boi_token_index="<|image_start|>", eoi_token_index="<|image_end|>"
        ),
    }


def _pixtral_processor(tokenizer: Any, template: str, merge: int = 1) -> Any:
    images = hf.PixtralImageProcessor(size={"longest_edge": 24}, patch_size=PATCH)
    options = {"patch_size": PATCH, "spatial_merge_size": merge, "chat_template": template}
    return hf.PixtralProcessor(images, tokenizer, **options)


_PIXTRAL_TOWER = {**TOWER, "model_type": "pixtral", "image_size": 24, "head_dim": 8}


def _pixtral_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "text_config": _text(tokenizer, model_type="mistral"),
        "vision_config": _PIXTRAL_TOWER,
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
        **_ids(tokenizer, image_token_index="[IMG]"),
    }


def _mistral3_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "text_config": _text(tokenizer, model_type="mistral"),
        "vision_config": _PIXTRAL_TOWER,
        "spatial_merge_size": 2,
        **_ids(tokenizer, image_token_index="[IMG]"),
    }


_LLAVA_OPTIONS = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_CLIP = {"size": {"shortest_edge": 16}, "crop_size": _SQUARE}


def _llava_processor(tokenizer: Any, template: str) -> Any:
    return hf.LlavaProcessor(hf.CLIPImageProcessor(**_CLIP), tokenizer, chat_template=template, **_LLAVA_OPTIONS)


_PINPOINTS = [[16, 32], [32, 16], [32, 32]]


def _llava_next_processor(tokenizer: Any, template: str) -> Any:
    images = hf.LlavaNextImageProcessor(**_CLIP, image_grid_pinpoints=_PINPOINTS)
    return hf.LlavaNextProcessor(images, tokenizer, chat_template=template, **_LLAVA_OPTIONS)


def _llava_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "text_config": _text(tokenizer, model_type="llama"),
        "vision_config": {"model_type": "clip_vision_model", **TOWER},
        **_ids(tokenizer, image_token_index="<image>"),
    }


def _llava_next_config(tokenizer: Any) -> dict[str, Any]:
    made = _llava_config(tokenizer)
    return {**made, "text_config": {**made["text_config"], "model_type": "mistral"}, "image_grid_pinpoints": _PINPOINTS}


def _lfm2_processor(tokenizer: Any, template: str) -> Any:
    images = hf.Lfm2VlImageProcessor(
        encoder_patch_size=PATCH, tile_size=16, min_image_tokens=1, max_image_tokens=4, max_tiles=4
    )
    return hf.Lfm2VlProcessor(images, tokenizer, template)


def _lfm2_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "text_config": {
            **_text(tokenizer, model_type="lfm2", block_multiple_of=8),
            "layer_types": ["conv", "full_attention"],
        },
        "vision_config": {
            **{
                key: TOWER[key]
                for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
            },
            "model_type": "siglip2_vision_model",
            "patch_size": PATCH,
            "num_patches": 16,
            "vision_use_head": False,
        },
        "projector_hidden_size": 16,
        **_ids(tokenizer, image_token_id="<image>"),
    }


_IDEFICS_IMAGES = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}


def _smolvlm_processor(tokenizer: Any, template: str) -> Any:
    sampling = {"fps": 2, "num_frames": 5}
    videos = hf.SmolVLMVideoProcessor(size={"longest_edge": 16}, max_image_size={"longest_edge": 16}, **sampling)
    images = hf.SmolVLMImageProcessor(**_IDEFICS_IMAGES)
    return hf.SmolVLMProcessor(images, tokenizer, videos, image_seq_len=4, chat_template=template)


def _idefics3_processor(tokenizer: Any, template: str) -> Any:
    images = hf.Idefics3ImageProcessor(**_IDEFICS_IMAGES)
    return hf.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)


def _idefics_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "text_config": _text(tokenizer, model_type="llama"),
        "vision_config": TOWER,
        "scale_factor": 2,
        **_ids(tokenizer, image_token_id="<image>"),
    }


def _internvl_processor(tokenizer: Any, template: str) -> Any:
    images = hf.GotOcr2ImageProcessor(size=_SQUARE, crop_to_patches=True, max_patches=2)
    videos = hf.InternVLVideoProcessor(size=_SQUARE)
    return hf.InternVLProcessor(images, tokenizer, videos, image_seq_length=4, chat_template=template)


def _internvl_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "text_config": _text(tokenizer, model_type="qwen2"),
        "vision_config": {**TOWER, "image_size": [16, 16], "patch_size": [PATCH, PATCH]},
        "image_seq_length": 4,
        **_ids(tokenizer, image_token_id="<IMG_CONTEXT>"),
    }


def _glm4v_processor(tokenizer: Any, template: str) -> Any:
    images, videos = hf.Glm4vImageProcessor(**_PIXELS), hf.Glm4vVideoProcessor(**_PIXELS)
    return hf.Glm4vProcessor(images, tokenizer, videos, template)


def _glm4v_config(tokenizer: Any) -> dict[str, Any]:
    ids = {"image_token_id": "<|image|>", "video_token_id": "<|video|>"}
    ids |= {f"{kind}_{side}_token_id": f"<|{word}_of_{kind}|>" for kind in ("image", "video")
            for side, word in (("start", "begin"), ("end", "end"))}  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "mrope_section": [1, 1, 2]}
    return {
        "text_config": _text(tokenizer, rope_parameters=rope),
        "vision_config": {
            "depth": 2,
            "hidden_size": 16,
            "num_heads": 2,
            "patch_size": PATCH,
            "image_size": 16,
            "out_hidden_size": 16,
            "intermediate_size": 32,
        },
        **_ids(tokenizer, **ids),
    }


# Two seconds of sound at most.
_SOUND = {"feature_size": 16, "chunk_length": 2}
_EARS = {"num_mel_bins": 16, "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}


def _qwen2_audio_tokenizer() -> Any:
    controls = ("<|im_start|>", "<|endoftext|>", "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
    return _small(controls, "<|im_end|>", pad="<|endoftext|>")


def _qwen2_audio_processor(tokenizer: Any, template: str) -> Any:
    return hf.Qwen2AudioProcessor(hf.WhisperFeatureExtractor(**_SOUND), tokenizer, template)


def _qwen2_audio_config(tokenizer: Any) -> dict[str, Any]:
    text = _text(tokenizer, model_type="qwen2")
    del text["head_dim"]
    return {
        "text_config": text,
        "audio_config": {"model_type": "qwen2_audio_encoder", **_EARS, "max_source_positions": 100},
        **_ids(tokenizer, audio_token_index="<|AUDIO|>"),
    }


_OMNI = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}


def _omni_tokenizer() -> Any:
    return _small(("<|im_start|>", "<|endoftext|>"), "<|im_end|>", pad="<|endoftext|>", **_OMNI)


def _omni_processor(tokenizer: Any, template: str) -> Any:
    # Its class sets the least size of a video, 128 * 28 * 28 pixels.
    pixels = {**_PIXELS, "patch_size": 14}
    images, videos = hf.Qwen2VLImageProcessor(**pixels), hf.Qwen2VLVideoProcessor(**pixels)
    return hf.Qwen2_5OmniProcessor(images, videos, hf.WhisperFeatureExtractor(**_SOUND), tokenizer, template)


def _omni_config(tokenizer: Any) -> dict[str, Any]:
    text = _text(tokenizer, **_ROPE)
    del text["head_dim"]
    tokens = {name: _OMNI[f"{name.removesuffix('_token_index')}_token"] for name in
              ("image_token_index", "video_token_index", "audio_token_index")}  # fmt: skip
    return {
        "text_config": text,
        "vision_config": {**_QWEN_TOWER, **_OUT, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        "audio_config": {**_EARS, "max_source_positions": 100, "n_window": 100, "output_dim": 16},
        # Released ones have keys that the class of transformers reads and does not declare.
        **_ids(tokenizer, **tokens, vision_start_token_id="<|vision_bos|>", vision_end_token_id="<|vision_eos|>"),
        **_ids(tokenizer, audio_start_token_id="<|audio_bos|>", audio_end_token_id="<|audio_eos|>"),
    }


def _voxtral_tokenizer(num_tokens: int = 8_192) -> Any:
    """The first tokens of the real vocabulary, with the control tokens and the settings of audio that Voxtral's has."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    from transformers.tokenization_mistral_common import MistralCommonBackend

    tekken_file = package_folder("mistral_common") / "data" / "tekken_240911.json"
    made = json.loads(tekken_file.read_text(encoding="utf-8"))
    del made["image"]
    own = {24: "[AUDIO]", 25: "[BEGIN_AUDIO]", 34: "[TRANSCRIBE]"}
    known = {each["rank"]: str(each["token_str"]) for each in Tekkenizer.DEPRECATED_SPECIAL_TOKENS} | own
    made["special_tokens"] = [{"rank": n, "token_str": name, "is_control": True} for n, name in sorted(known.items())]
    made["config"] |= {"version": "v7", "default_vocab_size": num_tokens}
    encoding = {"num_mel_bins": 128, "hop_length": 160, "window_size": 400}
    made["audio"] = {
        "sampling_rate": 16_000,
        "frame_rate": 12.5,
        "audio_encoding_config": encoding,
        "chunk_length_s": 30.0,
    }
    folder = Path(tempfile.mkdtemp())
    (folder / "tekken.json").write_text(json.dumps(made), encoding="utf-8")
    return MistralCommonBackend(tokenizer_path=str(folder / "tekken.json"), mode="finetuning")


def _voxtral_processor(tokenizer: Any, template: str) -> Any:
    return hf.VoxtralProcessor(hf.WhisperFeatureExtractor(feature_size=128), tokenizer)


def _voxtral_config(tokenizer: Any) -> dict[str, Any]:
    return {
        "text_config": {**TEXT, "model_type": "llama", "vocab_size": len(tokenizer)},
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_mel_bins": 128,
        },
        "audio_token_id": 24,
    }


# --- the table --------------------------------------------------------------------------------------------------------


_IMAGES: tuple[tuple[MediaKind, ...], ...] = ((), ("image",), ("image", "image"))
_VIDEOS: tuple[tuple[MediaKind, ...], ...] = (*_IMAGES, ("video", "image"))


@dataclass(frozen=True)
class VisionFamily:
    """A family of vision-language models.

    Attributes:
        model_type: `model_type` of its config.
        template: Chat template.
        tokenizer: Makes a small tokenizer with its special tokens.
        processor: Makes its processor of the tokenizer and the template.
        config: Makes the keys of a tiny model's config for the tokenizer.
        end: End marker of an answer, trained with it.
        last_end: End marker of the last answer of a conversation; None means `end`.
        rows: Media of rows that it is tried with.
    """

    model_type: str
    template: str
    tokenizer: Callable[[], Any]
    processor: Callable[[Any, str], Any]
    config: Callable[[Any], dict[str, Any]]
    end: str
    last_end: str | None = None
    rows: tuple[tuple[MediaKind, ...], ...] = _IMAGES

    @property
    def media(self) -> str:
        """Kinds of the rows, for people."""
        names = {"image": "images", "audio": "audio", "video": "video"}
        return ", ".join(name for kind, name in names.items() if any(kind in row for row in self.rows))

    def make(self, tokenizer: Any = None) -> tuple[Any, dict[str, Any]]:
        """Its processor, and the keys of the config of a tiny model, for its small tokenizer or the given one."""
        tokenizer = self.tokenizer() if tokenizer is None else tokenizer
        config = {"model_type": self.model_type, **self.config(tokenizer)}
        return self.processor(tokenizer, self.template), config


_QWEN = _chatml("<|vision_start|><|image_pad|><|vision_end|>", video="<|vision_start|><|video_pad|><|vision_end|>")
_QWEN2 = ("Qwen2VLVideoProcessor", {"embed_dim": 16, "hidden_size": 16, "mlp_ratio": 2})
_QWEN25 = ("Qwen2VLVideoProcessor", {**_OUT, "window_size": 16, "fullatt_block_indexes": [1]})
_QWEN3 = ("Qwen3VLVideoProcessor", {**_OUT, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]})

VISION_FAMILIES: dict[str, VisionFamily] = {
    "Qwen2-VL": VisionFamily("qwen2_vl", _QWEN, _qwen_tokenizer, *_qwen_vl("Qwen2VL", *_QWEN2), "<|im_end|>", None, _VIDEOS),
    "Qwen2.5-VL": VisionFamily("qwen2_5_vl", _QWEN, _qwen_tokenizer, *_qwen_vl("Qwen2_5_VL", *_QWEN25), "<|im_end|>", None, _VIDEOS),
    "Qwen3-VL": VisionFamily("qwen3_vl", _QWEN, _qwen_tokenizer, *_qwen_vl("Qwen3VL", *_QWEN3), "<|im_end|>", None, _VIDEOS),
    "Gemma 3": VisionFamily(
        "gemma3", _gemma("<start_of_turn>", "<end_of_turn>", "<start_of_image>"), _gemma_tokenizer, _gemma3_processor,
        _gemma3_config, "<end_of_turn>",
    ),
    "Gemma 3n": VisionFamily(
        "gemma3n",
        _gemma("<start_of_turn>", "<end_of_turn>", "<image_soft_token>", audio="<audio_soft_token>"),
        _gemma_tokenizer, _gemma3n_processor, _gemma3n_config, "<end_of_turn>", None,
        ((), ("image",), ("audio",), ("audio", "image", "audio")),
    ),
    "Gemma 4": VisionFamily(
        "gemma4", _gemma("<|turn>", "<turn|>", "\n\n<|image|>\n\n", video="\n\n<|video|>\n\n"), _gemma4_tokenizer,
        _gemma4_processor, _gemma4_config, "<turn|>", None, _VIDEOS,
    ),
    "Llama 3.2 Vision": VisionFamily("mllama", MLLAMA, _llama3_tokenizer, _mllama_processor, _mllama_config, "<|eot_id|>"),
    "Llama 4": VisionFamily("llama4", "", _llama4_tokenizer, _llama4_processor, _llama4_config, "<|eot|>"),
    "Pixtral": VisionFamily("llava", MISTRAL, _mistral_tokenizer, _pixtral_processor, _pixtral_config, "</s>"),
    "Mistral Small 3": VisionFamily(
        "mistral3", MISTRAL, _mistral_tokenizer, lambda *given: _pixtral_processor(*given, merge=2), _mistral3_config,
        "</s>",
    ),
    "LLaVA": VisionFamily("llava", LLAVA, _llava_tokenizer, _llava_processor, _llava_config, "</s>"),
    "LLaVA-NeXT": VisionFamily(
        "llava_next", LLAVA_NEXT, _llava_tokenizer, _llava_next_processor, _llava_next_config, "</s>"
    ),
    "LFM2-VL": VisionFamily(
        "lfm2_vl", _chatml("<image>", "{{ '<|startoftext|>' }}"), _lfm2_tokenizer, _lfm2_processor, _lfm2_config,
        "<|im_end|>",
    ),
    "SmolVLM2": VisionFamily(
        "smolvlm", templates.IDEFICS3, _idefics_tokenizer, _smolvlm_processor, _idefics_config, "<end_of_utterance>",
        None, (*_IMAGES, ("video",)),
    ),
    "Idefics3": VisionFamily(
        "idefics3", templates.IDEFICS3, _idefics_tokenizer, _idefics3_processor, _idefics_config, "<end_of_utterance>"
    ),
    "InternVL": VisionFamily(
        "internvl", _chatml("<IMG_CONTEXT>\n", video="<video>\n"), _internvl_tokenizer, _internvl_processor,
        _internvl_config, "<|im_end|>", None, _VIDEOS,
    ),
    "GLM-4V": VisionFamily("glm4v", GLM, _glm_tokenizer, _glm4v_processor, _glm4v_config, "<|user|>", ""),
    "Qwen2-Audio": VisionFamily(
        "qwen2_audio", _chatml("", audio="<|audio_bos|><|AUDIO|><|audio_eos|>\n"), _qwen2_audio_tokenizer,
        _qwen2_audio_processor, _qwen2_audio_config, "<|im_end|>", None, ((), ("audio",), ("audio", "audio")),
    ),
    "Voxtral": VisionFamily(
        "voxtral", "", _voxtral_tokenizer, _voxtral_processor, _voxtral_config, "</s>", None,
        ((), ("audio",), ("audio", "audio")),
    ),
    "Qwen2.5-Omni": VisionFamily(
        "qwen2_5_omni_thinker",
        _chatml(
            "<|vision_bos|><|IMAGE|><|vision_eos|>",
            audio="<|audio_bos|><|AUDIO|><|audio_eos|>", video="<|vision_bos|><|VIDEO|><|vision_eos|>",
        ),
        _omni_tokenizer, _omni_processor, _omni_config, "<|im_end|>", None,
        ((), ("audio",), ("video", "image"), ("audio", "video", "audio")),
    ),
}  # fmt: skip
# Makers of real vocabularies.
REAL_TOKENIZERS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL"), qwen),
    "InternVL": _real_internvl,
    "Llama 3.2 Vision": llama3,
    **dict.fromkeys(("Pixtral", "Mistral Small 3"), lambda: _named(tekken(), "</s>", "<pad>", "<s>")),
    "Voxtral": lambda: _voxtral_tokenizer(131_072),
}
