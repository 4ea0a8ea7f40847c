"""Processors of their real classes, with a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers as hf

from tests.data import llava

_MEDIA = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<fake_token_around_image>")


def _tokenizer() -> Any:
    made = llava.processor().tokenizer
    made.add_tokens(list(_MEDIA), special_tokens=True)
    return made


def _qwen2_vl() -> Any:
    images, videos = hf.Qwen2VLImageProcessor(), hf.Qwen2VLVideoProcessor()
    return hf.Qwen2VLProcessor(images, _tokenizer(), videos, chat_template=llava.TEMPLATE)


def _smolvlm() -> Any:
    videos = hf.SmolVLMVideoProcessor(size={"longest_edge": 64})
    return hf.SmolVLMProcessor(hf.SmolVLMImageProcessor(), _tokenizer(), videos, chat_template=llava.TEMPLATE)


MADE: dict[str, Callable[[], Any]] = {"llava": llava.processor, "qwen2_vl": _qwen2_vl, "smolvlm": _smolvlm}


def save(name: str, folder: Path) -> str:
    """Writes a processor where `AutoProcessor` and `AutoTokenizer` find it."""
    MADE[name]().save_pretrained(folder)
    return str(folder)
