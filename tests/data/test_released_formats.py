"""Peculiarities of released chat templates, each in the smallest template that has it."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from lightning_protrain.data.batches.encode import ChatEncoder, Encoded, encode_rows
from lightning_protrain.data.chat.check_turns import LEAKED, LEAKING, NO_END, SEVERAL, UntrainableError
from lightning_protrain.data.chat.pipeline import ChatEncoders
from lightning_protrain.data.conversation import Conversation
from tests.data.conftest import conversation
from tests.data.encoded import kept, one, settings_of
from tests.data.templates import FORMATS
from tests.data.tokenizers import byte_level, qwen


def _template(user: str, answer: str, end: str, prompt: str | None = None) -> str:
    """User and assistant in turn; `answer` and `end` stand around what the assistant says, as Jinja."""
    return (
        f"{{%- for m in messages %}}{{%- if m.role == 'user' %}}{user}{{%- elif m.role == 'assistant' %}}"
        f"{answer}{{{{ m.content }}}}{end}{{%- else %}}{{{{ raise_exception('no such role') }}}}{{%- endif %}}"
        f"{{%- endfor %}}{{%- if add_generation_prompt %}}{answer if prompt is None else prompt}{{%- endif %}}"
    )


def _tokenizer(template: str, *controls: str) -> PreTrainedTokenizerBase:
    return byte_level(template, controls, controls[-1])


def _encoder(tokenizer: PreTrainedTokenizerBase, **knobs: Any) -> ChatEncoder:
    return ChatEncoders(tokenizer, None).encoder(settings_of(**knobs))


@cache
def _formed(template: str, name: str) -> ChatEncoder:
    """An encoder with the control tokens of a format, which tests share."""
    return _encoder(byte_level(template, FORMATS[name].controls, FORMATS[name].eos))


@cache
def _on_qwen(template: str, is_bounded: bool = False) -> ChatEncoder:
    boundaries = [{"role": "assistant", "start": "Assistant:", "end": "</s>"}, {"role": "user", "start": "User:"}]
    return _encoder(qwen(), chat_template=template, role_boundaries=boundaries if is_bounded else None)


def _kept(encoder: ChatEncoder, row: Conversation) -> str:
    return kept(encoder, one(encoder, row))


CHAT = conversation("Why is that so?", "12 men.", "Then no.")
FORMS = {
    "a prompt with another header": (
        _template(
            "{{ '<S>\n<U>\n' + m.content + '\n<E>' }}", "{{ '<S>\n<A>\n' }}", "{{ '\n<E>' }}", "{{ '<A><think>\n' }}"
        ),
        "12 men.\n<E>Then no.\n<E>",
    ),
    "a token of the answer that is not in the prompt": (
        _template("<S><U><T>{{ m.content }}<E>", "<S><A><T>", "</T><E>", "<S><A><|THINKING|>"),
        "<T>12 men.</T><E><T>Then no.</T><E>",
    ),
    "a header in letters that are not Latin": (
        _template("{{ '\n\n### \u6307\u793a:\n' + m.content }}", "{{ '\n\n### \u5fdc\u7b54:\n' }}", "{{ '<E>' }}"),
        "12 men.<E>Then no.<E>",
    ),
    "an end with words between its tokens": (
        _template(
            "<S>user<T>{{ m.content }}</T>user<T><E>",
            "<S>assistant<T><S>answer<T>",
            "</T>answer<T></T>assistant<T><E>",
            "<S>assistant<T><S>think<T>",
        ),
        "12 men.</T>answer<T></T>assistant<T><E>Then no.</T>answer<T></T>assistant<T><E>",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_released_format_is_recognised(name: str) -> None:
    template, expected = FORMS[name]
    encoder = _encoder(_tokenizer(template, "<S>", "<U>", "<A>", "<T>", "</T>", "<think>", "<|THINKING|>", "<E>"))
    assert not encoder.unproven
    assert _kept(encoder, CHAT) == expected


OPEN = _template(
    "<U>{{ m.content }}<E>", "<A>", "{%- if not loop.last or (is_training is defined and is_training) %}<E>{%- endif %}"
)


def test_a_last_turn_that_the_template_leaves_open_is_trained() -> None:
    tokenizer = _tokenizer(OPEN, "<U>", "<A>", "<E>")
    with pytest.warns(
        UserWarning, match=r"writes no end token after the last turn .* Set `chat_template_kwargs` to {is_training: tr"
    ):
        encoder = _encoder(tokenizer)
    encoded = one(encoder, CHAT)
    assert kept(encoder, encoded) == "12 men.<E>Then no."
    assert encoded.num_unended == 1
    assert _kept(encoder, conversation("Why?", "12 men.")) == "12 men."
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        closed = _encoder(tokenizer, template_kwargs={"is_training": True})
    assert _kept(closed, CHAT) == "12 men.<E>Then no.<E>"


def test_a_prompt_that_is_always_written_is_no_turn() -> None:
    template = OPEN.replace("{%- if add_generation_prompt %}<A>", "{%- if messages[-1].role == 'user' %}<A>I think:")
    encoder = _encoder(_tokenizer(template.replace("not loop.last or (is", "true or (is"), "<U>", "<A>", "<E>"))
    assert (
        _kept(encoder, {"messages": [*CHAT["messages"], {"role": "user", "content": "So?"}]}) == "12 men.<E>Then no.<E>"
    )


def test_no_variable_is_named_where_none_closes_the_last_turn() -> None:
    tokenizer = _tokenizer(OPEN.replace(" or (is_training is defined and is_training)", ""), "<U>", "<A>", "<E>")
    with pytest.warns(UserWarning, match="Give a `chat_template` that writes one"):
        _encoder(tokenizer)


def _call(arguments: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "lookup", "arguments": arguments}, **fields}


def _asks(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def _result(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **fields}


_IDS_AS_NAMES = (
    FORMATS["kimi"]
    .template.replace("call.function.name", "call.id")
    .replace(
        "{{ m.content or '' }}", "{{ 'Return of ' + m.tool_call_id + ': ' if m.role == 'tool' }}{{ m.content or '' }}"
    )
)


@pytest.mark.parametrize(
    ("ids", "results"),
    [
        (("call_1", "call_2"), ({"tool_call_id": "call_2"}, {"tool_call_id": "call_1"})),
        ((None, None), ({}, {})),
        (("functions.lookup:7", "call_2"), ({"tool_call_id": "functions.lookup:7"}, {})),
    ],
)
def test_a_template_that_writes_ids_of_calls_gets_ids_with_their_names(ids: Any, results: Any) -> None:
    encoder = _formed(_IDS_AS_NAMES, "kimi")
    places = ("Rome", "Bonn")
    calls = [_call({"place": place}, **({"id": one} if one else {})) for place, one in zip(places, ids, strict=True)]
    messages = [
        {"role": "user", "content": "Where?"},
        _asks(*calls),
        *(_result(f"answer {number}", **fields) for number, fields in enumerate(results)),
        _asks(_call({"place": "Oslo"})),
        _result("answer 2"),
        {"role": "assistant", "content": "There."},
    ]
    encoded = one(encoder, {"messages": messages})  # type: ignore[typeddict-item]
    first = "functions.lookup:7" if "functions.lookup:7" in ids else "functions.lookup:0"
    assert kept(encoder, encoded) == (
        f"<|tool_call_begin|>{first} {{'place': 'Rome'}}<|tool_call_end|>"
        "<|tool_call_begin|>functions.lookup:1 {'place': 'Bonn'}<|tool_call_end|><|im_end|>"
        "<|tool_call_begin|>functions.lookup:2 {'place': 'Oslo'}<|tool_call_end|><|im_end|>There.<|im_end|>"
    )
    order = (1, 0) if results[0].get("tool_call_id") == "call_2" else (0, 1)
    answered = [first, "functions.lookup:1"]
    text = encoder.renderer.tokenizer.decode(encoded.input_ids.tolist())
    for number, call in enumerate(order):
        assert f"Return of {answered[call]}: answer {number}" in text
    assert "Return of functions.lookup:2: answer 2" in text


def test_ids_of_calls_stay_as_they_are_where_the_template_writes_names() -> None:
    template = FORMATS["kimi"].template.replace("call.function.name", "call.id + call.function.name")
    encoder = _formed(template, "kimi")
    row: Any = {"messages": [{"role": "user", "content": "Where?"}, _asks(_call({"place": "Rome"}, id="call_1"))]}
    assert "call_1lookup" in _kept(encoder, row)


# --- turns that the template does not end -----------------------------------------------------------------------------

QUESTION = {"role": "user", "content": "Where?"}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([QUESTION, _asks(_call({"place": "Rome"}))], "<|tool_call>lookup {'place': 'Rome'}<tool_call|>"),
        (
            [QUESTION, _asks(_call({"place": "Rome"}), _call({"place": "Rome"}))],
            "<|tool_call>lookup {'place': 'Rome'}<tool_call|>" * 2,
        ),
        (
            [QUESTION, _asks(_call({"place": "Rome"})), _result("9")],
            "<|tool_call>lookup {'place': 'Rome'}<tool_call|>",
        ),
        (
            [QUESTION, _asks(_call({"place": "Rome"})), QUESTION, {"role": "assistant", "content": "There."}],
            "<|tool_call>lookup {'place': 'Rome'}<tool_call|>There.<turn|>",
        ),
    ],
)
def test_a_row_of_gemma4_that_ends_with_a_call_or_a_result_is_trained(messages: Any, expected: str) -> None:
    opens = "{%- if messages[-1].tool_calls and not add_generation_prompt %}<|tool_response>{%- endif %}"
    encoder = _formed(FORMATS["gemma4"].template + opens, "gemma4")
    encoded = one(encoder, {"messages": messages})
    assert kept(encoder, encoded) == expected
    assert encoded.num_unended == 1


@pytest.mark.parametrize("result", ["[42]", "9"])
@pytest.mark.parametrize("behind", ["[42]", "Wait 9 minutes."])
def test_a_call_without_an_end_is_not_trained_where_more_follows_it(behind: str, result: str) -> None:
    form = FORMATS["gemma4"]
    template = form.template.replace("{%- set ns.open = true %}", f"{behind}{{%- set ns.open = true %}}")
    assert template != form.template
    encoder = _formed(template, "gemma4")
    (encoded,) = encoder.encode([{"messages": [QUESTION, _asks(_call({"place": "Rome"})), _result(result)]}])  # type: ignore[list-item]
    if behind == "[42]" and result == "9":
        assert isinstance(encoded, Encoded)  # a tag of the template, as "<tool_call|>" is
    else:
        assert isinstance(encoded, UntrainableError)
        assert encoded.reason == NO_END


# --- markers that share a token with some answers ---------------------------------------------------------------------

TAGS = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{{ '<assistant>\n' + m.content + '</assistant>\n' }}"
    "{%- elif m.role == 'tool' %}{{ '<tool_response>' + m.content + '</tool_response>\n' }}"
    "{%- else %}{{ '<' + m.role + '>\n' + m.content + '</' + m.role + '>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<assistant>\n' }}{%- endif %}"
)
HEADERS = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{{ 'USER: ' + m.content + '\n ASSISTANT:' }}"
    "{%- elif m.role == 'assistant' %}{{ m.content }}{%- endif %}{%- endfor %}"
)
PLAIN_ENDS = (
    "{%- for m in messages %}{%- if m.role == 'user' %}{{ 'User: ' + m.content + '\n\n' }}"
    "{%- elif m.role == 'assistant' %}{{ 'Assistant: ' + m.content + '</s>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}Assistant:{%- endif %}"
)


@pytest.mark.parametrize(
    ("answer", "result", "reason"),
    [
        ("I look", "9", None),
        ("I look", "It is sunny.", None),
        ("I look", "", LEAKING),
        ("I look.", "9", NO_END),
        ("I look.", "It is sunny.", LEAKED),
    ],
)
def test_a_tool_is_told_apart_where_the_answer_before_it_has_its_end(
    answer: str, result: str, reason: str | None
) -> None:
    encoder = _on_qwen(TAGS)
    assert "tool" in encoder.leaking  # its probe has an answer with a period, which shares a token with the end
    row = [QUESTION, {"role": "assistant", "content": answer}, _result(result), {"role": "assistant", "content": "So"}]
    (encoded,) = encoder.encode([{"messages": row}])  # type: ignore[list-item]
    if reason is None:
        assert isinstance(encoded, Encoded)
        assert kept(encoder, encoded).replace("\n", "") == f"{answer}</assistant>So</assistant>"
    else:
        assert isinstance(encoded, UntrainableError)
        assert encoded.reason == reason


@pytest.mark.parametrize(
    ("template", "answers", "expected"),
    [
        (HEADERS, ("It is 9", "It is 8."), "It is 9It is 8."),
        (HEADERS, ("It is 9.", "It is 8."), None),  # ".USER" has a token of both
        (PLAIN_ENDS, ("It is 9", "It is 8"), None),  # and ">User" one of an end and a header
    ],
)
def test_rows_of_several_turns_are_trained_if_their_turns_are_the_messages(
    template: str, answers: tuple[str, str], expected: str | None
) -> None:
    encoder = _on_qwen(template, is_bounded=template == PLAIN_ENDS)
    assert SEVERAL in encoder.unproven
    (encoded,) = encoder.encode([conversation("Why?", *answers)])
    if expected is None:
        assert isinstance(encoded, UntrainableError)
        assert encoded.reason == f"the chat format failed its check for {SEVERAL}"
    else:
        assert isinstance(encoded, Encoded)
        assert kept(encoder, encoded).strip() == expected


# --- knobs ------------------------------------------------------------------------------------------------------------

DERIVED = _template("<S><U>{{ m.content }}{{ '<E>\n' }}", "<S><A>", "{{ '<E>\n' }}")


@pytest.mark.parametrize(
    ("name", "users", "everybody"),
    [
        ("kimi", "Why is that so?<|im_end|>" * 2, None),
        ("glm4.5", "Why is that so?" * 2, None),
        ("solar", "Why is that so?<|end|>" * 2, None),
        ("derived", "Why is that so?<E>" * 2, "<E>12 men.<E><E>Then no.<E>"),
    ],
)
def test_of_users_their_words_and_ends_are_trained(name: str, users: str, everybody: str | None) -> None:
    if name == "derived":
        tokenizer = _tokenizer(DERIVED, "<S>", "<U>", "<A>", "<E>")
    else:
        tokenizer = byte_level(FORMATS[name].template, FORMATS[name].controls, FORMATS[name].eos)
    assert _kept(_encoder(tokenizer, roles_to_train=["user"]), CHAT) == users
    if everybody is not None:
        assert _kept(_encoder(tokenizer, train_on_eos="all"), CHAT) == everybody


def test_a_header_that_would_be_trained_with_users_is_refused() -> None:
    tokenizer = _tokenizer(DERIVED, "<S>", "<U>", "<A>", "<E>")
    boundaries: list[dict[str, Any]] = [
        {"role": "assistant", "start": "<S><A>", "end": "<E>"},
        {"role": "user", "start": "<S>", "end": "<E>"},
    ]
    with pytest.raises(ValueError, match="roles_to_train names 'user', but then '<U>', which the chat template writes"):
        _encoder(tokenizer, role_boundaries=boundaries, roles_to_train=["user"])
    assert _kept(_encoder(tokenizer, role_boundaries=boundaries), CHAT) == "12 men.<E>Then no.<E>"
    boundaries[0]["include_start"] = True
    assert _kept(_encoder(tokenizer, role_boundaries=boundaries), CHAT) == "<S><A>12 men.<E><S><A>Then no.<E>"


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "knobs", [{}, {"family": "chatml"}, {"role_boundaries": [{"role": "assistant", "start": "A"}]}]
)
def test_no_chat_template_is_said_in_a_sentence_of_its_own(knobs: dict[str, Any]) -> None:
    tokenizer = byte_level(None, ("<E>",), "<E>")
    with pytest.raises(ValueError, match=r"has no chat template, so nothing says how a chat is written. Give `chat_t"):
        _encoder(tokenizer, **knobs)


CALL = {"type": "function", "function": {"name": "lookup", "arguments": {"place": "x"}}}


@pytest.mark.parametrize(
    ("knobs", "said", "help_"),
    [
        ({"roles_to_train": ["tool"]}, {"content": "Yes."}, '"warn" to go on without a loss'),
        ({}, {"content": "", "tool_calls": [CALL]}, '"warn" to train on them, with a mask that may be wrong'),
        ({}, {"role": "critic", "content": "Yes."}, None),
    ],
)
def test_what_keeps_dropped_rows_is_said_as_it_is(
    knobs: dict[str, Any], said: dict[str, Any], help_: str | None
) -> None:
    form = FORMATS["chatml"]
    refusing = (
        "{%- for m in messages %}{%- if m.role == 'critic' %}{{ raise_exception('who?') }}{%- endif %}{%- endfor %}"
    )
    template = refusing + form.template.replace("m.tool_calls or []", "[]")
    encoder = _encoder(byte_level(template, form.controls, form.eos), **knobs)
    row: Any = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", **said}]}
    with pytest.raises(ValueError, match="chats: nothing is left to train on") as refusal:
        encode_rows([row], encoder, "chats")
    assert "The first one: chats, row 0: " in str(refusal.value)
    assert ('"warn"' not in str(refusal.value)) if help_ is None else (help_ in str(refusal.value))
