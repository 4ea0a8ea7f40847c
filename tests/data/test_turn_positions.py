"""The turns of a batch of rows, end to end."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from lightning_protrain.data.batches.encode import encode_rows
from lightning_protrain.data.chat import pipeline as settings_module
from lightning_protrain.data.chat.check_turns import NO_END
from lightning_protrain.data.chat.markers import ExclusionMarkers, Marker, Markers, RoleMarkers
from lightning_protrain.data.chat.mask import MaskOptions, TokenTurns, find_turns, mask_turns, unsplittable_ranges
from lightning_protrain.data.chat.pipeline import ChatEncoders
from tests.data.conftest import conversation
from tests.data.encoded import kept, one, settings_of
from tests.data.templates import FORMATS
from tests.data.tokenizers import byte_level, qwen

START, USER, ASSISTANT, END, OPEN, CLOSE, IMAGE = range(1, 8)


def _markers(open_ended: bool = False, include_end: bool = True) -> Markers:
    end = (Marker("end", (END,)),)
    roles = [
        RoleMarkers(name, (Marker(name, (START, token)),), end, open_ended, False, include_end)
        for name, token in (("user", USER), ("assistant", ASSISTANT))
    ]
    part = ExclusionMarkers("tool_output", (Marker("open", (OPEN, OPEN)),), (Marker("close", (CLOSE,)),))
    return Markers("any", tuple(roles), (part,), frozenset({IMAGE}))


ROWS = [
    [START, USER, 50, END, START, ASSISTANT, 60, 61, END],
    [START, ASSISTANT, 62],
    [],
    [START, USER, IMAGE, IMAGE, END, START, ASSISTANT, OPEN, OPEN, 70, CLOSE, 63, END, START, ASSISTANT],
]


def _found(markers: Markers, options: MaskOptions) -> TokenTurns:
    return find_turns([np.array(row, dtype=np.int32) for row in ROWS], markers, options)


def test_turns_belong_to_their_rows() -> None:
    found = _found(_markers(), MaskOptions())
    assert found.rows.borders.tolist() == [0, 9, 12, 12, 27]
    assert [found.of_row(row) for row in range(4)] == [slice(0, 2), slice(2, 3), slice(3, 3), slice(3, 6)]
    assert found.per_row(found.begun).tolist() == [1, 1, 0, 1]
    assert found.per_row(found.trainable).tolist() == [1, 1, 0, 2]


@pytest.mark.parametrize(
    ("open_ended", "include_end", "knobs", "unended", "stopless"),
    [
        (False, True, {}, [2], [2]),
        (False, True, {"train_on_eos": "none"}, [2], []),
        (False, True, {"train_on_eos": "last"}, [2], [2]),
        (False, True, {"train_on_inputs": True}, [2], []),
        (False, False, {}, [2], []),
        (True, True, {}, [2], []),
        (False, True, {"roles_to_train": ("user",)}, [], []),
    ],
)
def test_turns_without_an_end_are_told(
    open_ended: bool, include_end: bool, knobs: dict, unended: list[int], stopless: list[int]
) -> None:
    markers, options = _markers(open_ended, include_end), MaskOptions(**knobs)
    masked = mask_turns(_found(markers, options), markers, options, None)
    assert np.flatnonzero(masked.unended).tolist() == unended
    assert np.flatnonzero(masked.stopless).tolist() == stopless


def test_weights_are_of_the_begun_turns_of_a_row() -> None:
    markers, options = _markers(), MaskOptions()
    found = _found(markers, options)
    masked = mask_turns(found, markers, options, [[0.5], None, None, [0.0]])
    assert masked.weights is not None
    assert masked.weights[masked.trained].tolist() == [0.5, 0.5, 0.5, 1.0]
    assert found.ids[masked.trained].tolist() == [60, 61, END, 62]
    assert mask_turns(found, markers, options, [[0.0], None, None, [1.0]]).weights is None


def test_markers_and_media_are_not_cut_in_two() -> None:
    markers = _markers()
    ranges = unsplittable_ranges(_found(markers, MaskOptions()), markers, MaskOptions()).tolist()
    assert ranges == sorted(ranges, key=lambda entry: entry[0])
    for entry in ([0, 2], [3, 4], [14, 16], [19, 21], [22, 23]):
        assert entry in ranges, "a start, an end, images, and the begin and end of what a tool says"


# --- rows of real formats ---------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(settings_module, "rank_zero_info", lines.append)
    return lines


def _ended_between_turns(end: str = "<E>", ended: str = "not loop.last", otherwise: str = "") -> ChatEncoders:
    """A template that writes `otherwise` in place of the end of a conversation's last turn, or of others."""
    template = (
        "{%- for m in messages %}{{ '<U>' + m.content if m.role == 'user' else '<A>' + m.content }}"
        "{%- if m.role == 'assistant' and ENDED %}END{%- elif m.role == 'assistant' %}OTHERWISE{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}<A>{%- endif %}"
    )
    template = template.replace("ENDED", ended).replace("END", end).replace("OTHERWISE", otherwise)
    return ChatEncoders(byte_level(template, ("<U>", "<A>", "<E>"), "<E>"), None)


BOUNDARIES: list[dict[str, Any]] = [
    {"role": "assistant", "start": "<A>", "end": "<E>"},
    {"role": "user", "start": "<U>"},
]


@pytest.mark.parametrize("otherwise", ["", "</answer>"])
def test_a_turn_to_which_the_template_writes_no_end_is_trained_and_counted(otherwise: str) -> None:
    chats = _ended_between_turns(ended="m.content != 'One.'", otherwise=otherwise)
    encoder = chats.encoder(settings_of(role_boundaries=BOUNDARIES, on_untrainable="error"))
    rows = [conversation("?", "Two."), conversation("?", "One."), conversation("?", "One.", "Two.")]
    examples, report = encode_rows(rows, encoder, "chats")
    assert (len(examples), report.dropped, report.num_unended) == (3, (), 2)
    assert kept(encoder, one(encoder, rows[2])) == f"One.{otherwise}Two.<E>"


@pytest.mark.parametrize("policy", ["drop", "error", "warn"])
def test_a_turn_that_ends_with_words_of_the_template_is_handled_as_the_user_says(policy: Any) -> None:
    chats = _ended_between_turns(ended="m.content != 'One.'", otherwise=" Now wait.")
    encoder = chats.encoder(settings_of(on_untrainable=policy, role_boundaries=BOUNDARIES))
    ended, cut = conversation("?", "Two."), conversation("?", "One.")
    rows = [ended, cut, cut]
    if policy == "error":
        with pytest.raises(
            ValueError, match=r"chats, row 1: a trained turn has no end marker: it ends with 'One\. Now wait\.', which"
        ):
            encode_rows(rows, encoder, "chats")
        return
    if policy == "drop":
        examples, report = encode_rows(rows, encoder, "chats")
        assert (len(examples), dict(report.dropped), report.num_unended) == (1, {NO_END: 2}, 0)
        return
    with pytest.warns(
        UserWarning, match="2 conversations are kept with a doubtful mask. The first: a trained turn has no end marker"
    ):
        examples, report = encode_rows(rows, encoder, "chats")
    assert (len(examples), report.num_doubtful, report.num_unended) == (3, 2, 2)


def test_ends_that_nobody_asked_for_are_not_missed() -> None:
    for knobs in ({"train_on_eos": "none"}, {"train_on_inputs": True}):
        encoder = _ended_between_turns().encoder(settings_of(role_boundaries=BOUNDARIES, **knobs))
        assert one(encoder, conversation("?", "One.", "Two.")).num_unended == 1
    encoder = _ended_between_turns().encoder(settings_of(role_boundaries=[{**BOUNDARIES[0], "end": ["<E>", None]}]))
    assert one(encoder, conversation("?", "One.", "Two.")).num_unended == 1


def test_a_format_without_ends_says_so_and_counts_every_turn(told: list[str]) -> None:
    chats = _ended_between_turns(end="")
    boundaries = [{"role": "assistant", "start": "<A>"}, {"role": "user", "start": "<U>"}]
    encoder = chats.encoder(settings_of(role_boundaries=boundaries, on_untrainable="error"))
    assert "Its trained turns have no end marker, so the model does not learn where to stop." in told[0]
    assert one(encoder, conversation("?", "One.", "Two.")).num_unended == 2


def test_an_end_of_plain_text_may_share_a_token_with_the_answer() -> None:
    template = (
        "{%- for m in messages %}{{ '[' + m.role + ']' + m.content + '[end]' }}{%- endfor %}"
        "{%- if add_generation_prompt %}[assistant]{%- endif %}"
    )
    tokenizer = byte_level(template, ("<s>",), "<s>", corpus=["Well.[end]", "yes.[end]?[end]", "Hi.[user]"] * 20)
    encoder = ChatEncoders(tokenizer, None).encoder(settings_of())
    encoded = one(encoder, conversation("Who?", "Well.", "Me?"))
    assert kept(encoder, encoded) == "Well.[end]Me?[end]"
    assert encoded.num_unended == 0


@pytest.mark.parametrize("answer", ["I am your AI-Assistant", "\u6211\u662f\u4f60\u7684Assistant", "Log in as:\nUser"])
def test_an_answer_may_end_with_the_word_of_a_marker(answer: str) -> None:
    template = (
        "{%- for m in messages %}{{- m.role | capitalize + ':\n' + m.content }}{{- '' if loop.last else '\n\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- 'Assistant:\n' }}{%- endif %}"
    )
    encoder = ChatEncoders(qwen(template), None).encoder(settings_of())
    assert kept(encoder, one(encoder, conversation("Who?", answer))) == answer


@cache
def _gpt_oss() -> ChatEncoders:
    form = FORMATS["gpt-oss"]
    return ChatEncoders(byte_level(form.template, form.controls, form.eos), None)


@pytest.mark.parametrize("max_length", range(10, 28, 2))
def test_markers_of_excluded_parts_are_not_cut_in_two(max_length: int) -> None:
    settings = settings_of(train_thinking=False, max_length=max_length, on_untrainable="warn")
    encoder = _gpt_oss().encoder(settings)
    row: Any = conversation("?", "Yes.")
    row["messages"][1]["reasoning_content"] = "Hm."
    ids = encoder.renderer.encode([encoder.renderer.render(row)])[0]
    channel = encoder.renderer.tokenizer.convert_tokens_to_ids("<|channel|>")
    first = ids.index(channel)
    stop = ids.index(encoder.renderer.tokenizer.convert_tokens_to_ids("<|message|>"), first) + 1
    assert stop - first > 2
    assert not first < len(one(encoder, row)) < stop
