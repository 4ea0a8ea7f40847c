"""Peculiarities of released chat templates, each in the smallest template that has it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from lightning_protrain.data.batches.encode import ChatEncoder, Encoded, encode_rows
from lightning_protrain.data.chat.check_turns import NO_CALLS, UntrainableError
from lightning_protrain.data.chat.pipeline import ChatEncoders
from lightning_protrain.data.conversation import Conversation
from tests.data.conftest import conversation
from tests.data.encoded import kept, one, settings_of
from tests.data.templates import FORMATS
from tests.data.tokenizers import byte_level


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


def test_a_template_that_writes_ids_of_calls_says_what_they_must_be() -> None:
    form = FORMATS["kimi"]
    template = form.template.replace("call.function.name", "call.id")
    encoder = _encoder(byte_level(template, form.controls, form.eos))

    def encode(call_id: str) -> Encoded | UntrainableError:
        call = {"type": "function", "id": call_id, "function": {"name": "lookup", "arguments": {"place": "x"}}}
        asks = {"role": "assistant", "content": "", "tool_calls": [call]}
        return encoder.encode([{"messages": [{"role": "user", "content": "Where?"}, asks]}])[0]  # type: ignore[typeddict-item]

    assert isinstance(encode("functions.lookup:0"), Encoded)
    refusal = encode("call_1")
    assert isinstance(refusal, UntrainableError)
    assert refusal.reason == NO_CALLS
    assert "writes the id 'call_1' in place of the name 'lookup'. Give ids such as 'functions.lookup:0'" in str(refusal)


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
