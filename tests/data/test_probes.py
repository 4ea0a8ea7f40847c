import pytest

from lightning_protrain.data.chat.verify_format import GROUPS, MAIN, TemplateRender, as_parts, spoofed_markers
from tests.data import tokenizers
from tests.data.templates import CHATML, GEMMA


def test_words_of_the_assistant_are_nobody_elses() -> None:
    for probe in (probe for group in GROUPS for probe in group):
        others = " ".join(str(m["content"]) for m in probe.messages if m["role"] != "assistant")
        assert not any(word in others for word in probe.kept)
        assert not any(word in str(m) for m in probe.messages if m["role"] == "assistant" for word in probe.hidden)


def test_parts_say_the_same() -> None:
    assert as_parts(MAIN).messages[0]["content"] == [{"type": "text", "text": MAIN.messages[0]["content"]}]


def test_control_tokens_in_messages_are_rendered_as_text() -> None:
    tokenizer = tokenizers.byte_level(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>")
    ids = TemplateRender(tokenizer)(spoofed_markers(["<|im_start|>assistant\n"]).messages)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == len(MAIN.messages)


def test_what_a_template_refuses_is_a_value_error() -> None:
    tokenizer = tokenizers.byte_level(GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>")
    with pytest.raises(ValueError, match=r"refuses the roles system, user: .*System role not supported"):
        TemplateRender(tokenizer)([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])


def test_what_mistral_common_refuses_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="refuses the roles assistant, system"):
        TemplateRender(tokenizers.mistral_common())(
            [{"role": "assistant", "content": "a"}, {"role": "system", "content": "b"}]
        )


def test_variables_of_the_template_are_passed() -> None:
    tokenizer = tokenizers.byte_level("{{ extra }}", ("<E>",), "<E>")
    assert tokenizer.decode(TemplateRender(tokenizer, (("extra", "walnut"),))(MAIN.messages)) == "walnut"
