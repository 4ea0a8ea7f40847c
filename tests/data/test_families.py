"""Families of models have both sides and their own names, and are recognised from templates and vocabularies."""

from __future__ import annotations

import re
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from lightning_protrain.data.chat.chat_format import Family
from lightning_protrain.data.chat.detect_format import family_named, find_family
from lightning_protrain.data.chat.known_formats import (
    _FAMILIES,
    ALIASES,
    FAMILIES,
    KIMI,
    VOXTRAL,
)
from lightning_protrain.data.chat.marker_search import lay_out
from lightning_protrain.data.chat.markers import Markers, resolve
from lightning_protrain.data.chat.mask import MaskOptions, trained_tokens
from lightning_protrain.data.chat.pipeline import ChatEncoders, ChatSettings
from lightning_protrain.data.chat.render import Renderer
from lightning_protrain.data.chat.turns import scan
from lightning_protrain.data.chat.vocabulary import Vocabulary
from tests.data import tokenizers
from tests.data.templates import CHATML, FORMATS

NAMES = [
    "chatml", "qwen2", "qwen2.5", "qwen3", "qwen3.5", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "gemma1", "gemma2",
    "gemma3", "gemma3n", "gemma4", "llama3", "llama3.1", "llama3.2-vision", "llama4", "mistral-v1", "mistral-v2",
    "mistral-v3", "mistral-v7", "tekken", "pixtral", "voxtral", "phi3", "phi4", "phi-4-mini", "deepseek-v2",
    "deepseek-v3", "deepseek-v4", "deepseek-r1", "gpt-oss", "harmony", "glm4", "glm-4.5", "glm-4.5v", "smolvlm2",
    "idefics3", "internvl", "llava", "llava-next", "kimi", "paddleocr-vl", "mistral3", "qwen2_5_vl", "qwen3_5",
    "lfm2vl", "glm46v",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_its_family(name: str) -> None:
    assert {"assistant", "user"} <= set(family_named(name).roles)


def test_an_alias_is_the_same_family() -> None:
    assert FAMILIES["qwen2.5"] is FAMILIES["qwen"]
    assert not set(ALIASES) & {family.name for family in FAMILIES.values()}
    assert all(name == name.lower() and "_" not in name for name in FAMILIES)


@pytest.mark.parametrize("family", _FAMILIES, ids=lambda family: family.name)
def test_a_family_has_both_sides_and_a_name_of_its_own(family: Family) -> None:
    assert {"assistant", "user"} <= set(family.roles)
    assert [one.name for one in _FAMILIES].count(family.name) == 1


def _kept(tokenizer: Any, ids: list[int], markers: Markers) -> str:
    rows = lay_out([ids])
    return str(tokenizer.decode(rows.ids[trained_tokens(rows, scan(rows, markers), markers, MaskOptions())].tolist()))


def _found(tokenizer: PreTrainedTokenizerBase) -> tuple[Family, Markers]:
    return find_family(Vocabulary(tokenizer), Renderer(tokenizer).ids)


def test_the_name_of_a_speaker_is_not_trained() -> None:
    form = FORMATS["kimi"]
    tokenizer = tokenizers.byte_level(form.template, form.controls, form.eos)
    markers = resolve(KIMI, Vocabulary(tokenizer))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "name": "Robin", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert _kept(tokenizer, ids, markers) == "Hello<|im_end|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<s>[INST][BEGIN_AUDIO][AUDIO][AUDIO][/INST]lang:en[TRANSCRIBE]Hello</s>", "Hello</s>"),
        ("<s>[INST][BEGIN_AUDIO][AUDIO]What?[/INST]Hello</s>", "Hello</s>"),
        (
            "<s>[INST]a[/INST][TOOL_CALLS]f</s>[TOOL_RESULTS]b[/TOOL_RESULTS][TOOL_RESULTS]c[/TOOL_RESULTS]d</s>",
            "[TOOL_CALLS]f</s>d</s>",
        ),
    ],
)
def test_languages_and_results_of_tools_are_not_trained(text: str, expected: str) -> None:
    controls = re.findall(r"\[[A-Z_/]+\]|</?s>", text)
    tokenizer = tokenizers.byte_level(None, (*dict.fromkeys(controls), "[TRANSCRIBE]", "[/TOOL_RESULTS]"), "</s>")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert _kept(tokenizer, ids, resolve(VOXTRAL, Vocabulary(tokenizer))) == expected


REAL = {
    "qwen3": tokenizers.qwen,
    "llama3": tokenizers.llama3,
    "mistral-v7-tekken": tokenizers.tekken,
    "mistral-v3": lambda template: tokenizers.sentencepiece(template, "v3"),
    "mistral-v1": tokenizers.sentencepiece,
    "llava": tokenizers.sentencepiece,
    "zephyr": tokenizers.sentencepiece,
    "paddleocr": tokenizers.sentencepiece,
}


@pytest.mark.sample(15)
@pytest.mark.parametrize("name", FORMATS)
def test_a_family_is_recognised_from_the_template(name: str) -> None:
    form = FORMATS[name]
    family, markers = _found(tokenizers.byte_level(form.template, form.controls, form.eos))
    assert (family.name, markers.family) == (form.family, form.family)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", REAL)
def test_a_family_is_recognised_on_its_real_vocabulary(name: str) -> None:
    form = FORMATS[name]
    assert _found(REAL[name](form.template))[0].name == form.family


def test_mistral_common_is_recognised() -> None:
    assert _found(tokenizers.mistral_common())[0].name == "mistral"


def test_a_name_is_found_however_it_is_written() -> None:
    assert family_named("Qwen2.5").name == "qwen"
    assert family_named(" gpt_oss").name == "gpt-oss"
    with pytest.raises(ValueError, match=r"no chat family 'qwem3'. Did you mean 'qwen3'.* There are chatml, deepseek"):
        family_named("qwem3")


def test_a_named_family_that_does_not_fit_is_refused_with_both_texts() -> None:
    chats = ChatEncoders(tokenizers.byte_level(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"), None)
    with pytest.raises(ValueError, match=r"'gemma' does not fit[\s\S]*Expected: \['It is maple[\s\S]*Found: \[\]"):
        chats.encoder(ChatSettings(family="gemma"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('never') }}", "renders no chat of user and assistant: .*never"),
        ("{{ messages[0].content }}", "renders no chat of user and assistant: it leaves out"),
        (
            "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}",
            r"not recognised, and it is not guessed[\s\S]*maple",
        ),
        ("{% for m in messages %}{{ '<U>' + m.content + '<E>' }}{% endfor %}", r"4 turns are trained instead of 2"),
        (
            "{% for m in messages %}{{ ('Q: ' if m.role == 'user' else 'A: ') + m.content + '\n' }}{% endfor %}",
            "the template writes only 'A: ' before an answer, which other text may contain",
        ),
    ],
)
def test_what_tells_nothing_is_refused(template: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatEncoders(tokenizers.byte_level(template, ("<U>", "<E>"), "<E>"), None).encoder(ChatSettings())
