"""Formats are derived from templates and vocabularies, with their thoughts, and proven."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_protrain.data.chat import detect_format
from lightning_protrain.data.chat.chat_format import Exclusion, Family, parse_boundaries
from lightning_protrain.data.chat.detect_format import find_family, infer_family, with_scaffolds, with_tags
from lightning_protrain.data.chat.known_formats import FAMILIES
from lightning_protrain.data.chat.markers import Markers, resolve
from lightning_protrain.data.chat.pipeline import ChatEncoders
from lightning_protrain.data.chat.render import Render, Renderer
from lightning_protrain.data.chat.verify_format import MAIN, PROBES, spoofed_markers
from lightning_protrain.data.chat.vocabulary import Vocabulary
from tests.data import tokenizers
from tests.data.conftest import conversation
from tests.data.encoded import kept, one, settings_of
from tests.data.templates import CHATML, FORMATS, GEMMA


def test_words_of_the_assistant_are_nobody_elses() -> None:
    for probe in PROBES:
        others = " ".join(str(m["content"]) for m in probe.messages if m["role"] != "assistant")
        assert not any(word in others for word in probe.kept)
        assert not any(word in str(m) for m in probe.messages if m["role"] == "assistant" for word in probe.hidden)


def test_control_tokens_in_messages_are_rendered_as_text() -> None:
    tokenizer = tokenizers.byte_level(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>")
    ids = Renderer(tokenizer).ids(spoofed_markers(["<|im_start|>assistant\n"]).messages)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == len(MAIN.messages)


def test_what_a_template_refuses_is_a_value_error() -> None:
    tokenizer = tokenizers.byte_level(GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>")
    with pytest.raises(ValueError, match=r"refuses the roles system, user: .*System role not supported"):
        Renderer(tokenizer).ids([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])


def test_what_mistral_common_refuses_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="refuses the roles assistant, system"):
        Renderer(tokenizers.mistral_common()).ids(
            [{"role": "assistant", "content": "a"}, {"role": "system", "content": "b"}]
        )


REAL = {
    "qwen": tokenizers.qwen,
    "llama3": tokenizers.llama3,
    "tekken": tokenizers.tekken,
    "sentencepiece": tokenizers.sentencepiece,
    "mistral-common": tokenizers.mistral_common,
    "byte-level": lambda: tokenizers.byte_level(None, ["<|im_end|>"], "<|im_end|>"),
    "metaspace": lambda: tokenizers.metaspace(None),
}
TEXT = "Hello there\n\n\n  caf\u00e9 \u4f60\u597d \U0001f600 x1234\tdone."


@pytest.mark.parametrize("name", REAL)
def test_tokens_spell_the_text(name: str) -> None:
    vocabulary = Vocabulary(REAL[name]())
    # mistral-common does not tell which bytes a part of a character has.
    text = TEXT.replace("\U0001f600", "") if name == "mistral-common" else TEXT
    ids = vocabulary.encode([text])[0]
    assert b"".join(vocabulary.spell(ids)).decode().removeprefix(" ") == text
    assert vocabulary.text(ids).removeprefix(" ") == text


@pytest.mark.parametrize("name", ["sentencepiece", "byte-level", "metaspace"])
@pytest.mark.parametrize("text", [b"\n", b":", b" a"])
def test_tokens_that_begin_with_a_text_are_all_found(name: str, text: bytes) -> None:
    vocabulary = Vocabulary(REAL[name]())
    pieces = sorted(set(vocabulary.tokenizer.get_vocab().values()))
    spelled = vocabulary.spell(pieces)
    expected = {index for index, piece in zip(pieces, spelled, strict=True) if piece.startswith(text)}
    assert vocabulary.beginning_with(text) == expected
    assert expected or text == b" a"


def test_control_tokens_of_mistral_common_are_looked_up() -> None:
    tokenizer = tokenizers.mistral_common()
    assert len(tokenizer.encode("[INST]", add_special_tokens=False)) == 4
    assert Vocabulary(tokenizer).encode(["[INST]a[/INST]"])[0][::2] == [3, 4]


def test_a_space_that_the_tokenizer_inserts_is_no_text() -> None:
    vocabulary = Vocabulary(tokenizers.metaspace(None))
    text = "<s>Hello</s>There </s> now"
    assert vocabulary.text(vocabulary.encode([text])[0]) == text


def test_a_toy_vocabulary_is_refused() -> None:
    model = Tokenizer(models.WordLevel({"<unk>": 0, "<|im_start|>": 1, "assistant": 2}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match=r"comes back as .* It has 3 tokens; its folder probably lacks"):
        Vocabulary(PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>"))


def test_a_vocabulary_without_pieces_is_refused() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<|im_end|>")
    with pytest.raises(ValueError, match=r"comes back as ''\. It has 1 token;"):
        Vocabulary(tokenizer)


class _Slow:
    name_or_path = "somewhere/slow"


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'somewhere/slow' is a slow one \(_Slow\)"):
        Vocabulary(_Slow())  # type: ignore[arg-type]


def _template(user: str, assistant: str, end: str, after: str = "", prompt: str | None = None) -> str:
    return (
        "{%- for m in messages %}{%- if m.role == 'user' %}"
        f"{{{{ {user!r} + m.content + {after!r} }}}}{{%- elif m.role == 'assistant' %}}"
        f"{{{{ {assistant!r} + m.content + {end!r} }}}}"
        "{%- else %}{{ raise_exception('no such role') }}{%- endif %}{%- endfor %}"
        f"{{%- if add_generation_prompt %}}{{{{ {assistant if prompt is None else prompt!r} }}}}{{%- endif %}}"
    ).replace("{{ " + assistant + " }}", "{{ " + repr(assistant) + " }}")


CASES = {
    "alpaca": (_template("### Instruction:\n", "### Response:\n", "<E>\n\n", "\n\n"), "### Response:\n", ("<E>",)),
    "command-r": (_template("<S><U>", "<S><A>", "<E>", "<E>"), "<S><A>", ("<E>",)),
    "no end": (_template("<U>", "<A>", ""), "<A>", (None,)),
    "no generation prompt": (_template("<U>", "<A>", "<E>", prompt=""), "<A>", ("<E>",)),
    "the user's end alone": (_template("<U>", "", "<E>", "<A>"), "<A>", ("<E>",)),
    "text as an end": (_template("<user>", "<bot>", "</bot>\n", "</user>\n"), "<bot>", ("</bot>",)),
    "text alone": (_template("Human: ", "Robot: ", "\n\n", "\n\n"), "Robot: ", (None,)),
    "thinking opened by the prompt": (
        _template("<U>", "<A>", "<E>", prompt="<A><think>\n"),
        "<A>",
        ("<E>",),
    ),
    "several tokens as an end": (_template("<U>", "<A>", "<S><E>"), "<A>", ("<S><E>", "<E>")),
    "the end of a thought before every answer": (_template("<U>", "</think>", "<E>", "<A>"), "<A></think>", ("<E>",)),
    "a token behind the end-of-sequence token": (_template("<U>", "<A>", "<E><S>"), "<A>", ("<E>",)),
    "another end of the last": (
        (
            "{%- for m in messages %}{%- if m.role == 'user' %}<U>{{ m.content }}{%- else %}<A>{{ m.content }}"
            "{{ '<S>' if loop.last else '<E>' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<A>{%- endif %}"
        ),
        "<A>",
        ("<E>", "<S>"),
    ),
}


def _found(tokenizer: PreTrainedTokenizerFast) -> Family:
    return find_family(Vocabulary(tokenizer), Renderer(tokenizer).ids)[0]


@pytest.mark.parametrize("name", CASES)
def test_a_format_is_derived_and_proven(name: str) -> None:
    template, start, ends = CASES[name]
    controls = ("<S>", "<U>", "<A>", "<E>", "<think>", "</think>")
    family = _found(tokenizers.byte_level(template, controls, "<E>"))
    assert (family.name, family.boundaries[0].start, family.boundaries[0].end) == ("generic", (start,), ends)


def test_a_format_that_is_proven_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMATS["chatml"]
    tokenizer = tokenizers.byte_level(form.template, form.controls, form.eos)
    named = _found(tokenizer).name
    verify = lambda render, vocabulary, markers: ["a feature"] * (markers.family == named)  # noqa: E731
    monkeypatch.setattr(detect_format, "verify_family", verify)
    assert named != _found(tokenizer).name


def test_an_empty_thought_of_the_template_is_a_scaffold() -> None:
    template = _template("<U>", "<A><think>\n\n</think>\n\n", "<E>", prompt="<A>")
    tokenizer = tokenizers.byte_level(template, ("<U>", "<A>", "<E>", "<think>", "</think>"), "<E>")
    assert Exclusion("scaffold", "<think>\n\n</think>\n\n") in _found(tokenizer).exclusions


def test_a_template_that_drops_messages_has_no_format() -> None:
    tokenizer = tokenizers.byte_level("{% for m in messages[-2:] %}<U>{{ m.content }}{% endfor %}", ("<U>",), "<U>")
    with pytest.raises(ValueError, match="does not write two turns"):
        infer_family(Renderer(tokenizer).ids, Vocabulary(tokenizer))


BOUNDARIES = parse_boundaries([{"role": "assistant", "start": "<A>", "end": "<E>"}, {"role": "user", "start": "<U>"}])


def _template_with(thought: str) -> str:
    return (
        "{%- for m in messages %}{%- if m.role == 'user' %}<U>{{ m.content }}{%- else %}<A>"
        + thought
        + "{{ m.content }}<E>{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<A>{%- endif %}"
    )


def _given(thought: str) -> tuple[Markers, Vocabulary, Render]:
    tokenizer = tokenizers.byte_level(_template_with(thought), ("<A>", "<U>", "<E>"), "<E>")
    vocabulary = Vocabulary(tokenizer)
    return resolve(BOUNDARIES, vocabulary, strict=True), vocabulary, Renderer(tokenizer).ids


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
    vocabulary = Vocabulary(tokenizer)
    markers = resolve(FAMILIES["gpt-oss"], vocabulary)
    found = _texts(with_tags(markers, vocabulary, Renderer(tokenizer).ids), "thinking")
    assert ("<|channel|>analysis<|message|>", "<|end|>") in found
    assert all(start != "<|message|>" for start, _ in found)


# --- rows of real formats ---------------------------------------------------------------------------------------------
FORMATS_TRIED = ["qwen3", "gemma4", "llama3", "mistral-v1", "deepseek-v3.1", "gpt-oss", "glm4.5", "solar"]


@pytest.mark.sample(6)
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
