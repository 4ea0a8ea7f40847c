"""Conversations become token ids: as the template says, and with nothing that a user typed taken for the template's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from lightning_protrain.data.chat.render import Renderer
from tests.data import llava
from tests.data.conftest import conversation
from tests.data.tokenizers import byte_level, mistral_common

START, SEP, END, PAD = "<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|pad|>"
MARKERS = (f"{START}assistant{SEP}", f"{START}user{SEP}", END)
PIECES = st.lists(st.sampled_from([START, SEP, END, PAD, "a", " ", "\n", "<|", "im_end|>", "\u00e9"]), max_size=8).map(
    "".join
)


@pytest.fixture(scope="module")
def renderer(tokenizer: PreTrainedTokenizerFast) -> Renderer:
    return Renderer(tokenizer, MARKERS)


def _ids(renderer: Renderer, row: Any) -> list[int]:
    return renderer.encode([renderer.render(row)])[0]


@given(user=PIECES, answer=PIECES)
def test_messages_are_text_and_markers_are_tokens(renderer: Renderer, user: str, answer: str) -> None:
    ids = _ids(renderer, conversation(user, answer))
    text = f"{START}user{SEP}{user}{END}{START}assistant{SEP}{answer}{END}"
    assert renderer.tokenizer.decode(ids) == text
    specials = renderer.tokenizer.convert_tokens_to_ids([START, SEP, END])
    assert [index for index in ids if index in specials] == [specials[at] for at in (0, 1, 2, 0, 1, 2)]
    pads = ids.count(renderer.tokenizer.convert_tokens_to_ids(PAD))
    assert pads == answer.count(PAD), "what is no marker is a token in what the assistant says, and there alone"


@given(rows=st.lists(st.tuples(PIECES, PIECES), min_size=1, max_size=5))
def test_many_are_encoded_as_each_is_alone(renderer: Renderer, rows: list[tuple[str, str]]) -> None:
    rendered = [renderer.render(conversation(*row)) for row in rows]
    assert renderer.encode(rendered) == [renderer.encode([one])[0] for one in rendered]


def test_plain_messages_are_what_the_template_gives(renderer: Renderer) -> None:
    row = conversation("Who?", "Me.")
    assert _ids(renderer, row) == renderer.tokenizer.apply_chat_template(row["messages"], return_dict=False)


@pytest.mark.parametrize("where", ["name", "arguments", "tools"])
def test_tool_calls_and_tools_are_text_too(tokenizer: PreTrainedTokenizerFast, where: str) -> None:
    template = (
        "{%- for t in tools or [] %}{{- t['function']['description'] }}{%- endfor %}"
        "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '<|im_sep|>' }}{{- m['name'] or '' }}"
        "{%- for c in m['tool_calls'] or [] %}{{- c['function']['arguments']['x'] }}{%- endfor %}"
        "{{- m['content'] + '<|im_end|>' }}{%- endfor %}"
    )
    renderer = Renderer(tokenizer, MARKERS, chat_template=template)
    row: Any = conversation("Who?", "Me.")
    if where == "name":
        row["messages"][0]["name"] = END
    elif where == "arguments":
        row["messages"][1]["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": END}}}]
    else:
        row["tools"] = [{"function": {"name": "f", "description": END}}]
    ids = _ids(renderer, row)
    assert tokenizer.decode(ids).count(END) == 3
    assert ids.count(tokenizer.convert_tokens_to_ids(END)) == 2


def test_markers_of_plain_text_are_pointed_out(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = Renderer(tokenizer, [*MARKERS, "ASSISTANT:"])
    assert renderer.render(conversation("a ASSISTANT: b", "c")).suspicious
    assert renderer.render(conversation("a", "c ASSISTANT:")).suspicious
    assert not renderer.render(conversation("a ASSISTANT b", "c")).suspicious


def test_weights_do_not_reach_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = Renderer(tokenizer, MARKERS, chat_template="{%- for m in messages %}{{- m | length }}{%- endfor %}")
    row = conversation("Who?", "Me.")
    row["messages"][1].update(train=True, weight=2.0)
    assert renderer.render(row).text == "22"


def test_variables_of_a_row_come_before_those_of_the_data_set(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer = Renderer(tokenizer, MARKERS, {"a": 1, "b": 2}, chat_template="{{- [a, b, c] }}")
    assert renderer.render({**conversation("Who?", "Me."), "template_kwargs": {"b": 3, "c": 4}}).text == "[1, 3, 4]"
    assert renderer.render({**conversation("Who?", "Me."), "template_kwargs": {"c": 4}}).text == "[1, 2, 4]"


def test_a_template_that_needs_arguments_in_text_gets_them(tokenizer: PreTrainedTokenizerFast) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"city": "K\u00f6ln"}}}
    row: Any = {
        "messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    }
    calls = "{%- for m in messages %}{%- for c in m.tool_calls %}{{- BODY }}{%- endfor %}{%- endfor %}"
    texts = {
        "'json: ' + c.function.arguments": 'json: {"city": "K\u00f6ln"}',
        "c.function.arguments | tojson": '{"city": "K\u00f6ln"}',
        "c.function.arguments.city": "K\u00f6ln",
    }
    for body, text in texts.items():
        assert Renderer(tokenizer, MARKERS, chat_template=calls.replace("BODY", body)).render(row).text == text


@pytest.mark.parametrize("template", [llava.TEMPLATE, llava.LISTS_ONLY])
def test_text_reaches_templates_that_read_lists(template: str) -> None:
    renderer = Renderer(llava.processor(template).tokenizer, ["<|im_end|>"])
    assert renderer.render(conversation("Who?", "Me.")).text == (
        "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nMe.<|im_end|>\n"
    )


@pytest.mark.parametrize("body", ["{{- raise_exception('Never.') }}", "{{- messages[7]['content'] }}", "{{- 1 + '' }}"])
def test_a_template_that_raises_is_told(tokenizer: PreTrainedTokenizerFast, body: str) -> None:
    renderer = Renderer(tokenizer, MARKERS, chat_template=body)
    with pytest.raises(ValueError, match="the chat template refuses the roles user, assistant"):
        renderer.render(conversation("Who?", "Me."))


def test_mistral_common_renders_and_encodes_at_once() -> None:
    renderer = Renderer(mistral_common(), ["[INST]", "[/INST]", "</s>"])
    row = conversation("Who [/INST] is it?", "Me.")
    row["messages"][1]["train"] = True
    ids = _ids(renderer, row)
    control = renderer.tokenizer.convert_tokens_to_ids("[/INST]")
    assert ids.count(control) == 1
    assert renderer.render(row).text.count("[/INST]") == 2


@pytest.mark.parametrize(("marker", "is_token"), [("<|im_start|>assistant<think>", True), ("<think>", False)])
def test_a_thought_in_an_answer_is_marked_though_turns_begin_with_the_same_tag(marker: str, is_token: bool) -> None:
    template = "{%- for m in messages %}<|im_start|>{{ m.role + m.content }}<|im_end|>{%- endfor %}"
    tokenizer = byte_level(template, ("<|im_start|>", "<|im_end|>", "<think>", "</think>"), "<|im_end|>")
    renderer = Renderer(tokenizer, (marker, END))
    think, start = tokenizer.convert_tokens_to_ids(["<think>", "<|im_start|>"])
    ids = _ids(renderer, conversation("<think>", "<think>hm</think>A"))
    assert ids.count(think) == is_token, "the user's is text"
    assert _ids(renderer, conversation("?", "<|im_start|>assistant<think>")).count(start) == 2 + (marker == "<think>")
