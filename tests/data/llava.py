"""A processor and a config of LLaVA, small enough to be made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CLIPImageProcessorPil, LlavaProcessor, PreTrainedTokenizerFast

PATCHES = 4  # tokens of an image: 2 by 2 patches of 8 pixels
TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' }}"
    "{%- if m['content'] is string %}{{- m['content'] }}{%- else %}"
    "{%- for part in m['content'] %}{%- if part['type'] == 'image' %}{{- '<image>' }}"
    "{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LISTS_ONLY = TEMPLATE.replace("{%- if m['content'] is string %}{{- m['content'] }}{%- else %}", "").replace(
    "{%- endfor %}{%- endif %}{{- '<|im_end|>", "{%- endfor %}{{- '<|im_end|>"
)


def processor(template: str = TEMPLATE) -> LlavaProcessor:
    """Bytes as tokens, images of 16 by 16 pixels."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", "<image>"],
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        chat_template=template,
    )


def save(folder: Path, template: str = TEMPLATE) -> str:
    """Writes the processor where `AutoProcessor` and `AutoTokenizer` find it."""
    processor(template).save_pretrained(folder)
    return str(folder)


def config(made: Any) -> dict[str, Any]:
    """Keys of a config of a small LLaVA for this processor."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "model_type": "llava",
        "text_config": {
            "model_type": "llama",
            "vocab_size": len(made.tokenizer),
            "max_position_embeddings": 256,
            **sizes,
        },
        "vision_config": {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, **sizes},
        "image_token_index": made.tokenizer.convert_tokens_to_ids("<image>"),
        "vision_feature_select_strategy": "default",
        "vision_feature_layer": -1,
    }
