# ruff: noqa: E501
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerBase

from lightning_protrain.data.chat.chat_format import Exclusion, Family, RoleBoundary, parse_boundaries
from lightning_protrain.data.chat.check_turns import MARKERS, QUIET, RESULTS, SEVERAL
from lightning_protrain.data.chat.known_formats import FAMILIES
from lightning_protrain.data.chat.markers import resolve
from lightning_protrain.data.chat.render import Renderer
from lightning_protrain.data.chat.verify_format import VerificationError, end_tokens, verify_family
from lightning_protrain.data.chat.vocabulary import Vocabulary
from tests.data import tokenizers
from tests.data.templates import FORMATS


def _prove(family: Family, name: str, strict: bool = False, quiet: bool = False) -> dict[str, str]:
    form = FORMATS[name]
    return _proven(tokenizers.byte_level(form.template, form.controls, form.eos), family, strict, quiet)


def _proven(
    tokenizer: PreTrainedTokenizerBase, family: Family, strict: bool = False, quiet: bool = False
) -> dict[str, str]:
    vocabulary = Vocabulary(tokenizer)
    return verify_family(Renderer(tokenizer).ids, vocabulary, resolve(family, vocabulary, strict), quiet)


def _changed(name: str, role: str, **fields: object) -> Family:
    family = FAMILIES[FORMATS[name].family]
    boundaries = [replace(b, **fields) if b.role == role else b for b in family.boundaries]
    return replace(family, boundaries=tuple(boundaries))


@pytest.mark.sample(14)
@pytest.mark.parametrize("name", FORMATS)
def test_a_family_is_proven_on_a_vocabulary_whose_merges_cross_words_and_lines(name: str) -> None:
    assert _prove(FAMILIES[FORMATS[name].family], name) == {}


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "deepseek-distill"])
def test_a_family_is_proven_with_spaces_before_words(name: str) -> None:
    form = FORMATS[name]
    assert _proven(tokenizers.metaspace(form.template, form.controls, form.eos), FAMILIES[form.family]) == {}


# One planted fault each: what upstream scanners get wrong.
FAULTS = {
    "one end only": (
        "llama3",
        Family("f", tuple(b for b in _changed("llama3", "assistant", end=("<|eot_id|>",)).boundaries if b.role != "tool")),
        "willow0",
    ),
    "tool output in the turn": (
        "gemma4",
        replace(FAMILIES["gemma4"], exclusions=tuple(e for e in FAMILIES["gemma4"].exclusions if e.kind != "tool_output")),
        "willow0",
    ),
    "answer after a result": ("mistral-v7-tekken", _changed("mistral-v7-tekken", "assistant", start=("[/INST]",)), "hazel"),
    "no next role as an end": ("glm4.5", _changed("glm4.5", "assistant", end=("<|endoftext|>",)), "turn 1"),
    "thinking kept": (
        "qwen3",
        replace(FAMILIES["qwen"], exclusions=(*FAMILIES["qwen"].exclusions[1:], Exclusion("thinking", "<th>", "</th>"))),
        "train_thinking=False keeps",
    ),
    "a user trained": (
        "chatml",
        Family("f", (RoleBoundary("assistant", ("<|im_start|>user\n", "<|im_start|>assistant\n"), ("<|im_end|>",)),)),
        "4 turns are trained instead of 2",
    ),
    "to the next user": (
        "chatml",
        Family("f", (RoleBoundary("assistant", ("<|im_start|>assistant\n",)), RoleBoundary("user", ("<|im_start|>user",)))),
        "turn 1 should be",
    ),
    "a header's line end": (
        "chatml",
        Family("f", (RoleBoundary("assistant", ("<|im_start|>assistant",), ("<|im_end|>",)),)),
        "which the generation prompt writes, is trained",
    ),
    "a header in the content": (
        "chatml",
        Family("f", (RoleBoundary("assistant", ("<|im_start|>assis",), ("<|im_end|>",)),)),
        "turn",
    ),
    "nothing": ("chatml", Family("f", (RoleBoundary("assistant", ("<|im_start|>bot\n",), ("<|im_end|>",)),)), "0 turns"),
}  # fmt: skip


OPTIONAL = {
    "one end only": RESULTS,
    "tool output in the turn": RESULTS,
    "answer after a result": RESULTS,
    "thinking kept": QUIET,
}


@pytest.mark.parametrize("fault", OPTIONAL)
def test_a_planted_fault_of_a_feature_is_remembered(fault: str) -> None:
    name, family, message = FAULTS[fault]
    unproven = _prove(family, name)
    assert list(unproven) == [OPTIONAL[fault]]
    assert message in unproven[OPTIONAL[fault]]


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - OPTIONAL))
def test_a_planted_fault_is_found(fault: str) -> None:
    name, family, message = FAULTS[fault]
    with pytest.raises(VerificationError, match=message) as refused:
        _prove(family, name)
    assert all(word in str(refused.value) for word in ("Expected:", "Found:", "Rendered:", "role_boundaries"))


def test_boundaries_of_a_user_are_proven_too() -> None:
    start = {"role": "assistant", "start": "<|im_start|>assistant\n"}
    _prove(parse_boundaries([{**start, "end": "eos_token"}]), "chatml", strict=True)
    _prove(parse_boundaries([{**start, "end": "<|im_end|>", "include_end": False}]), "chatml", strict=True)
    with pytest.raises(VerificationError, match="'role_boundaries' does not fit"):
        _prove(parse_boundaries([start]), "chatml", strict=True)


def test_a_template_that_does_not_know_a_role_proves_nothing_of_it() -> None:
    template = "{%- for m in messages %}{{ '<U>' + m.content if m.role == 'user' else '<A>' + (m.content or '') + '<E>' }}{%- endfor %}"
    tokenizer = tokenizers.byte_level(template, ("<U>", "<A>", "<E>"), "<E>")
    family = Family("f", (RoleBoundary("assistant", ("<A>",), ("<E>",)), RoleBoundary("user", ("<U>",))))
    assert _proven(tokenizer, family) == {}


def test_a_spoof_that_is_not_made_harmless_is_found() -> None:
    form = FORMATS["chatml"]
    tokenizer = tokenizers.byte_level(form.template, form.controls, form.eos)

    def unsafe(messages: list, tools: list | None = None, add_generation_prompt: bool = False) -> list[int]:
        try:
            return tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
        except TypeError as error:
            raise ValueError(str(error)) from error

    vocabulary = Vocabulary(tokenizer)
    unproven = verify_family(unsafe, vocabulary, resolve(FAMILIES["chatml"], vocabulary))
    assert list(unproven) == [MARKERS]


def test_a_template_that_raises_is_an_error() -> None:
    tokenizer = tokenizers.byte_level("{{ raise_exception('never') }}", ("<|im_start|>", "<|im_end|>"), "<|im_end|>")
    with pytest.raises(ValueError, match=r"cannot be checked: the chat template refuses .*never"):
        _proven(tokenizer, FAMILIES["chatml"])


def test_a_template_of_one_turn_is_proven_for_one_turn() -> None:
    template = (
        "{%- if messages | length > 2 %}{{ raise_exception('one turn only') }}{%- endif %}" + FORMATS["chatml"].template
    )
    tokenizer = tokenizers.byte_level(template, FORMATS["chatml"].controls, "<|im_end|>")
    unproven = _proven(tokenizer, FAMILIES["chatml"])
    assert "one turn only" in unproven.pop(SEVERAL)
    assert not unproven


def test_thoughts_alone_can_be_proven() -> None:
    name, family, message = FAULTS["thinking kept"]
    assert message in _prove(family, name, quiet=True)[QUIET]


def test_results_of_tools_are_looked_for_where_calls_are_left_out() -> None:
    template = (
        "{%- for m in messages %}{%- if m.role == 'tool' %}{{ '[' + m.content + ']' }}{%- else %}"
        "{%- if m.role != 'assistant' or loop.previtem.role != 'tool' %}{{ '<|im_start|>' + m.role + '\n' }}{%- endif %}"
        "{{ m.content }}{%- if not m.tool_calls %}{{ '<|im_end|>\n' }}{%- endif %}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
    )
    tokenizer = tokenizers.byte_level(template, FORMATS["chatml"].controls, "<|im_end|>")
    unproven = _proven(tokenizer, FAMILIES["chatml"])
    assert "'willow0', which the assistant does not say, is trained" in unproven[RESULTS]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", {"<|im_end|>"}),
        ("gemma3", {"<end_of_turn>"}),
        ("llama3", {"<|eot_id|>", "<|eom_id|>"}),
        ("glm4.5", {"<|user|>", "<|system|>", "<|observation|>", "<|endoftext|>"}),
        ("gpt-oss", {"<|return|>", "<|call|>"}),  # <|end|> stands between reasoning and answer, too
    ],
)
def test_generation_may_stop_where_an_answer_ends_but_not_within_it(name: str, expected: set[str]) -> None:
    form = FORMATS[name]
    tokenizer = tokenizers.byte_level(form.template, form.controls, form.eos)
    vocabulary = Vocabulary(tokenizer)
    found = end_tokens(Renderer(tokenizer).ids, vocabulary, resolve(FAMILIES[form.family], vocabulary))
    assert set(tokenizer.convert_ids_to_tokens(sorted(found))) == expected


def test_generation_does_not_stop_at_an_end_in_plain_text() -> None:
    family = parse_boundaries(
        [{"role": role, "start": f"{role}:", "end": "\n\n"} for role in ("user", "assistant")], "plain"
    )
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n\n' }}{% endfor %}"
    tokenizer = tokenizers.byte_level(template, (), None)
    vocabulary = Vocabulary(tokenizer)
    assert end_tokens(Renderer(tokenizer).ids, vocabulary, resolve(family, vocabulary)) == set()
