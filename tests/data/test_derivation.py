# ruff: noqa: E501
import pytest

from lightning_protrain.data.chat.chat_format import Exclusion
from lightning_protrain.data.chat.detect_format import find_family, infer_family
from lightning_protrain.data.chat.verify_format import TemplateRender
from lightning_protrain.data.chat.vocabulary import Vocabulary
from tests.data import tokenizers


def _template(user: str, assistant: str, end: str, after: str = "", prompt: str | None = None) -> str:
    return (
        "{%- for m in messages %}{%- if m.role == 'user' %}"
        f"{{{{ {user!r} + m.content + {after!r} }}}}{{%- elif m.role == 'assistant' %}}"
        f"{{{{ {assistant!r} + m.content + {end!r} }}}}{{%- else %}}{{{{ raise_exception('no such role') }}}}{{%- endif %}}"
        f"{{%- endfor %}}{{%- if add_generation_prompt %}}{{{{ {assistant if prompt is None else prompt!r} }}}}{{%- endif %}}"
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
    "another end of the last": (
        (
            "{%- for m in messages %}{%- if m.role == 'user' %}<U>{{ m.content }}{%- else %}<A>{{ m.content }}"
            "{{ '<S>' if loop.last else '<E>' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}<A>{%- endif %}"
        ),
        "<A>",
        ("<E>", "<S>"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_format_is_derived_and_proven(name: str) -> None:
    template, start, ends = CASES[name]
    controls = ("<S>", "<U>", "<A>", "<E>", "<think>", "</think>")
    family, _ = find_family(tokenizers.byte_level(template, controls, "<E>"))
    assert (family.name, family.boundaries[0].start, family.boundaries[0].end) == ("generic", (start,), ends)


def test_an_empty_thought_of_the_template_is_a_scaffold() -> None:
    template = _template("<U>", "<A><think>\n\n</think>\n\n", "<E>", prompt="<A>")
    tokenizer = tokenizers.byte_level(template, ("<U>", "<A>", "<E>", "<think>", "</think>"), "<E>")
    family, _ = find_family(tokenizer)
    assert Exclusion("scaffold", "<think>\n\n</think>\n\n") in family.exclusions


def test_a_template_that_drops_messages_has_no_format() -> None:
    tokenizer = tokenizers.byte_level("{% for m in messages[-2:] %}<U>{{ m.content }}{% endfor %}", ("<U>",), "<U>")
    with pytest.raises(ValueError, match="does not write two turns"):
        infer_family(TemplateRender(tokenizer), Vocabulary(tokenizer))
