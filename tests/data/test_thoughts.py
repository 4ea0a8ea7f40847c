"""Thoughts in any chat format."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_protrain.data.chat.chat_format import parse_boundaries
from lightning_protrain.data.chat.detect_format import with_scaffolds, with_tags
from lightning_protrain.data.chat.known_formats import FAMILIES
from lightning_protrain.data.chat.markers import Markers, resolve
from lightning_protrain.data.chat.pipeline import ChatEncoders
from lightning_protrain.data.chat.verify_format import TemplateRender
from lightning_protrain.data.chat.vocabulary import Vocabulary
from tests.data import tokenizers
from tests.data.conftest import conversation
from tests.data.encoded import kept, one, settings_of
from tests.data.templates import FORMATS

BOUNDARIES = parse_boundaries([{"role": "assistant", "start": "<A>", "end": "<E>"}, {"role": "user", "start": "<U>"}])


def _template(thought: str) -> str:
    return (
        "{%- for m in messages %}{%- if m.role == 'user' %}<U>{{ m.content }}{%- else %}<A>"
        + thought
        + "{{ m.content }}<E>{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<A>{%- endif %}"
    )


def _given(thought: str) -> tuple[Markers, Vocabulary, TemplateRender]:
    tokenizer = tokenizers.byte_level(_template(thought), ("<A>", "<U>", "<E>"), "<E>")
    vocabulary = Vocabulary(tokenizer)
    return resolve(BOUNDARIES, vocabulary, strict=True), vocabulary, TemplateRender(tokenizer)


def _texts(markers: Markers, kind: str) -> list[tuple[str, str]]:
    parts = [part for part in markers.exclusions if part.kind == kind]
    return [(part.start[0].text, part.end[0].text if part.end else "") for part in parts]


@pytest.mark.parametrize("thought", ["<think></think>", "<my:think>\n</my:think>\n", "[THOUGHT]none[/THOUGHT]"])
def test_what_the_template_puts_before_an_answer_is_a_scaffold(thought: str) -> None:
    found = _texts(with_scaffolds(*_given(f"{{{{ {thought!r} }}}}")), "scaffold")
    assert (thought, "") in found
    assert ("<think>\n\n</think>\n\n", "") in found


@pytest.mark.parametrize(
    ("written", "tags"),
    [
        ("<my:think>\n{{ m.reasoning_content }}\n</my:think>", ("<my:think>", "</my:think>")),
        ("[THINK]{{ m.reasoning_content }}[/THINK]", ("[THINK]", "[/THINK]")),
        ("I thought: {{ m.reasoning_content }} so: ", None),
    ],
)
def test_tags_that_the_template_writes_around_thoughts_are_found(written: str, tags: tuple[str, str] | None) -> None:
    found = _texts(with_tags(*_given(written)), "thinking")
    assert ("<think>", "</think>") in found
    assert [one for one in found if one[0] in ("<my:think>", "[THINK]")] == ([tags] if tags else [])


def test_a_tag_that_answers_have_too_is_none_of_thoughts() -> None:
    """The markers around a thought of a harmony message stand around every message."""
    form = FORMATS["gpt-oss"]
    tokenizer = tokenizers.byte_level(form.template, form.controls, form.eos)
    markers = resolve(FAMILIES["gpt-oss"], tokenizer)
    found = _texts(with_tags(markers, Vocabulary(tokenizer), TemplateRender(tokenizer)), "thinking")
    assert ("<|channel|>analysis<|message|>", "<|end|>") in found
    assert all(start != "<|message|>" for start, _ in found)


# --- rows of real formats ---------------------------------------------------------------------------------------------

FORMATS_TRIED = ["qwen3", "gemma4", "llama3", "mistral-v1", "deepseek-v3.1", "gpt-oss", "glm4.5", "solar"]


def test_a_thought_that_is_a_turn_of_its_own_is_left_out_with_its_end() -> None:
    form = FORMATS["gpt-oss"]
    encoder = ChatEncoders(tokenizers.byte_level(form.template, form.controls, form.eos), None).encoder(
        settings_of(train_thinking=False)
    )
    row: Any = conversation("Why?", "Because.")
    row["messages"][1]["reasoning_content"] = "Consider all of it."
    assert kept(encoder, one(encoder, row)) == "<|channel|>final<|message|>Because.<|return|>"


@pytest.mark.parametrize("name", FORMATS_TRIED)
def test_thoughts_are_left_out_of_every_format_and_nothing_else(name: str) -> None:
    form = FORMATS[name]
    chats = ChatEncoders(tokenizers.byte_level(form.template, form.controls, form.eos), None)
    loud, quiet = (chats.encoder(settings_of(train_thinking=thinking)) for thinking in (True, False))
    plain, thinks, tagged = (conversation("Who?", "It is maple.") for _ in range(3))
    thinks["messages"][1]["reasoning_content"] = "Consider sorrel."
    tagged["messages"][1]["content"] = "<think>Consider sorrel.</think>It is maple."
    for row in (plain, thinks, tagged):
        text = kept(quiet, one(quiet, row))
        assert "sorrel" not in text
        assert "is maple." in text
    assert kept(quiet, one(quiet, plain)) == kept(loud, one(loud, plain))
