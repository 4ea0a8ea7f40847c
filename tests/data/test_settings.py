"""Settings of a chat format, and the messages if they do not work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from lightning_protrain.data.chat import pipeline as module
from lightning_protrain.data.chat.check_turns import THINKS, UntrainableError
from lightning_protrain.data.chat.pipeline import ChatEncoders, ChatSettings

OWN = [
    {"role": "user", "start": "<|im_start|>user<|im_sep|>", "end": "<|im_end|>"},
    {"role": "assistant", "start": "<|im_start|>assistant<|im_sep|>", "end": "<|im_end|>", "include_end": False},
]
ROW: Any = {"messages": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(module, "rank_zero_info", lines.append)
    return lines


def _kept(chats: ChatEncoders, settings: ChatSettings) -> str:
    encoder = chats.encoder(settings)
    (encoded,) = encoder.encode([ROW])
    return str(encoder.renderer.tokenizer.decode(encoded.input_ids[encoded.trained].tolist()))  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "kept", "source"),
    [
        ({}, "B.<|im_end|>", "'phi4' (recognised)"),
        ({"family": "phi-4"}, "B.<|im_end|>", "'phi4' (given by name)"),
        ({"role_boundaries": [OWN[0], OWN[1] | {"include_end": True}]}, "B.<|im_end|>", "(role_boundaries)"),
        ({"role_boundaries": OWN}, "B.", "(role_boundaries)"),
    ],
)
def test_one_line_says_what_was_chosen(
    tokenizer: PreTrainedTokenizerFast, told: list[str], settings: dict[str, Any], kept: str, source: str
) -> None:
    chats = ChatEncoders(tokenizer, None)
    assert _kept(chats, ChatSettings(**settings)) == kept
    assert _kept(chats, ChatSettings(**settings, max_length=100)) == kept
    assert len(told) == 1, "equal formats are proven once"
    for part in (source, "trained: assistant from '<|im_start|>assistant<|im_sep|>' to '<|im_end|>'."):
        assert part in told[0]


def test_an_explicit_empty_list_trains_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    chats = ChatEncoders(tokenizer, None)
    assert _kept(chats, ChatSettings(role_boundaries=[], on_untrainable="warn")) == ""
    assert _kept(chats, ChatSettings(roles_to_train=[], on_untrainable="warn")) == ""


@pytest.mark.parametrize("boundaries", [None, OWN])
def test_thoughts_in_tags_are_left_out_of_any_format(tokenizer: PreTrainedTokenizerFast, boundaries: Any) -> None:
    encoder = ChatEncoders(tokenizer, None).encoder(ChatSettings(role_boundaries=boundaries, train_thinking=False))
    user = {"role": "user", "content": "A?"}
    for before in ("", "\n", "Well. ", "(", "So:"):
        content = f"{before}<think>hm, why not seven?</think>B."
        (encoded,) = encoder.encode([{"messages": [user, {"role": "assistant", "content": content}]}])
        if isinstance(encoded, UntrainableError):
            assert encoded.reason == THINKS
            continue
        kept = tokenizer.decode(encoded.input_ids[encoded.trained].tolist())
        assert kept.removesuffix("<|im_end|>") == f"{before}B."
    for content in ("why not seven?</think>B.", "<think>why not seven? B."):
        (encoded,) = encoder.encode([{"messages": [user, {"role": "assistant", "content": content}]}])
        assert isinstance(encoded, UntrainableError)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("add_generation_prompt", "set for training"),
        ("tokenize", "set for training"),
        ("tools", "comes from the rows"),
        ("chat_template", "Use the option `chat_template`"),
    ],
)
def test_what_is_no_variable_of_a_template_is_refused(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"chat_template_kwargs names '{name}'.*{hint}"):
        ChatSettings(template_kwargs={"enable_thinking": False, name: True})


def test_an_empty_thought_of_the_template_is_not_trained_with_boundaries(tokenizer: PreTrainedTokenizerFast) -> None:
    for thought in ("<think>\\n\\n</think>\\n\\n", "<seed:think></seed:think>"):
        template = tokenizer.chat_template.replace(
            "message['content']",
            f"('{thought}' if message['role'] == 'assistant' and loop.last else '') + message['content']",
        )
        assert template != tokenizer.chat_template
        own = [OWN[0], OWN[1] | {"include_end": True}]
        assert (
            _kept(ChatEncoders(tokenizer, None), ChatSettings(chat_template=template, role_boundaries=own))
            == "B.<|im_end|>"
        )


def test_what_a_format_is_not_proven_for_is_told_and_refused(
    tokenizer: PreTrainedTokenizerFast, told: list[str]
) -> None:
    template = (
        "{%- for m in messages %}{%- if m['role'] == 'tool' %}{{- '[' + m['content'] + ']' }}{%- else %}"
        "{%- if m['role'] != 'assistant' or loop.first or loop.previtem['role'] != 'tool' %}"
        "{{- '<|im_start|>' + m['role'] + '<|im_sep|>' }}{%- endif %}{{- m['content'] }}"
        "{%- for c in m['tool_calls'] or [] %}{{- c['function'] | string }}{%- endfor %}"
        "{%- if not m['tool_calls'] %}{{- '<|im_end|>' }}{%- endif %}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{%- endif %}"
    )
    call = {"type": "function", "function": {"name": "lookup", "arguments": {}}}
    rows: Any = [
        ROW,
        {
            "messages": [
                ROW["messages"][0],
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "nothing was found"},
                ROW["messages"][1],
            ]
        },
    ]
    for boundaries in (None, [OWN[0], OWN[1] | {"include_end": True}]):
        settings = ChatSettings(chat_template=template, role_boundaries=boundaries)
        plain, calls = ChatEncoders(tokenizer, None).encoder(settings).encode(rows)
        assert tokenizer.decode(plain.input_ids[plain.trained].tolist()) == "B.<|im_end|>"  # type: ignore[union-attr]
        assert isinstance(calls, UntrainableError)
        assert "the chat format failed its check for tool results: " in str(calls)
        assert "Features whose check failed, so that each turn must be exactly its message: tool results (" in told[-1]
        assert "'willow0', which the assistant does not say, is trained" in told[-1]


def test_a_template_of_a_file_is_read(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    template = tokenizer.chat_template.replace("message['content']", "'>' + message['content']")
    (tmp_path / "mine.jinja").write_text(template)
    boundaries = [one | {"start": one["start"] + ">"} for one in OWN]
    for given in (template, str(tmp_path / "mine.jinja")):
        settings = ChatSettings(chat_template=given, role_boundaries=boundaries)
        assert _kept(ChatEncoders(tokenizer, None), settings) == "B."
    with pytest.raises(ValueError, match=r"missing\.jinja.*is not a file"):
        ChatSettings(chat_template="missing.jinja")


def test_variables_reach_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    template = tokenizer.chat_template + "{{- suffix }}"
    settings = ChatSettings(chat_template=template, template_kwargs={"suffix": "<|pad|>"})
    encoder = ChatEncoders(tokenizer, None).encoder(settings)
    (encoded,) = encoder.encode([ROW])
    assert encoded.input_ids[-1] == tokenizer.convert_tokens_to_ids("<|pad|>")  # type: ignore[union-attr]
