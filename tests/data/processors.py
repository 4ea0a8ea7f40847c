"""Processors of their real classes, with a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers as hf

from tests.data import llava


def _tokenizer(**named: str) -> Any:
    """Bytes, and tokens that a processor asks for by name."""
    made = llava.processor().tokenizer
    made.add_tokens(list(named.values()), special_tokens=True)
    made._set_model_specific_special_tokens(special_tokens=named)
    return made


def _gemma3() -> Any:
    tokens = _tokenizer(image_token="<soft>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
    return hf.Gemma3Processor(hf.Gemma3ImageProcessor(), tokens, image_seq_length=4, chat_template=llava.TEMPLATE)


def _idefics3() -> Any:
    images = hf.Idefics3ImageProcessor()
    return hf.Idefics3Processor(images, _tokenizer(), image_seq_len=4, chat_template=llava.TEMPLATE)


def _internvl() -> Any:
    tokens = _tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<context>", video_token="<video>"
    )
    parts = (hf.GotOcr2ImageProcessor(), tokens, hf.InternVLVideoProcessor())
    return hf.InternVLProcessor(*parts, image_seq_length=4, chat_template=llava.TEMPLATE)


def _lfm2_vl() -> Any:
    names = ("image_token", "image_start_token", "image_end_token", "image_thumbnail")
    tokens = _tokenizer(**{name: f"<|{name}|>" for name in names})
    return hf.Lfm2VlProcessor(hf.Lfm2VlImageProcessor(), tokens, chat_template=llava.TEMPLATE)


def _llava_next() -> Any:
    images = hf.LlavaNextImageProcessor()
    return hf.LlavaNextProcessor(images, _tokenizer(), patch_size=8, chat_template=llava.TEMPLATE)


def _mllama() -> Any:
    tokens = _tokenizer(image_token="<|image|>")
    return hf.MllamaProcessor(hf.MllamaImageProcessor(), tokens, chat_template=llava.TEMPLATE)


def _pixtral() -> Any:
    tokens = _tokenizer(image="[IMG]", line="[IMG_BREAK]", end="[IMG_END]")
    return hf.PixtralProcessor(hf.PixtralImageProcessor(), tokens, patch_size=8, chat_template=llava.TEMPLATE)


def _qwen2_vl() -> Any:
    tokens = _tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>")
    images, videos = hf.Qwen2VLImageProcessor(), hf.Qwen2VLVideoProcessor()
    return hf.Qwen2VLProcessor(images, tokens, videos, chat_template=llava.TEMPLATE)


def _smolvlm() -> Any:
    videos = hf.SmolVLMVideoProcessor(size={"longest_edge": 64})
    return hf.SmolVLMProcessor(hf.SmolVLMImageProcessor(), _tokenizer(), videos, chat_template=llava.TEMPLATE)


def _qwen2_audio() -> Any:
    return hf.Qwen2AudioProcessor(hf.WhisperFeatureExtractor(), _tokenizer(), chat_template=llava.TEMPLATE)


MADE: dict[str, Callable[[], Any]] = {
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "lfm2_vl": _lfm2_vl,
    "llava": llava.processor,
    "llava_next": _llava_next,
    "mllama": _mllama,
    "pixtral": _pixtral,
    "qwen2_vl": _qwen2_vl,
    "smolvlm": _smolvlm,
    "qwen2_audio": _qwen2_audio,
}


def save(name: str, folder: Path) -> str:
    """Writes a processor where `AutoProcessor` and `AutoTokenizer` find it."""
    MADE[name]().save_pretrained(folder)
    return str(folder)
