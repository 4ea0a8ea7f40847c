import pytest

from lightning_protrain.data.chat.detect_format import family_named, find_family
from tests.data import tokenizers
from tests.data.templates import CHATML, FORMATS

REAL = {
    "qwen3": tokenizers.qwen,
    "llama3": tokenizers.llama3,
    "mistral-v7-tekken": tokenizers.tekken,
    "mistral-v3": lambda template: tokenizers.sentencepiece(template, "v3"),
    "mistral-v1": tokenizers.sentencepiece,
    "llava": tokenizers.sentencepiece,
    "zephyr": tokenizers.sentencepiece,
    "paddleocr": tokenizers.sentencepiece,
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_family_is_recognised_from_the_template(name: str) -> None:
    form = FORMATS[name]
    family, markers = find_family(tokenizers.byte_level(form.template, form.controls, form.eos))
    assert (family.name, markers.family) == (form.family, form.family)


@pytest.mark.parametrize("name", REAL)
def test_a_family_is_recognised_on_its_real_vocabulary(name: str) -> None:
    form = FORMATS[name]
    assert find_family(REAL[name](form.template))[0].name == form.family


def test_mistral_common_is_recognised() -> None:
    assert find_family(tokenizers.mistral_common())[0].name == "mistral"


def test_a_name_is_found_however_it_is_written() -> None:
    assert family_named("Qwen2.5").name == "qwen"
    assert family_named(" gpt_oss").name == "gpt-oss"
    with pytest.raises(ValueError, match=r"no chat family 'qwem3'. Did you mean 'qwen3'.* There are chatml, deepseek"):
        family_named("qwem3")


def test_a_named_family_that_does_not_fit_is_refused_with_both_texts() -> None:
    with pytest.raises(ValueError, match=r"'gemma' does not fit[\s\S]*Expected: \['It is maple[\s\S]*Found: \[\]"):
        find_family(tokenizers.byte_level(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"), "gemma")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('never') }}", "renders no chat of user and assistant: .*never"),
        ("{{ messages[0].content }}", "renders no chat of user and assistant: it leaves out"),
        (
            "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}",
            r"not recognised, and it is not guessed[\s\S]*maple",
        ),
        ("{% for m in messages %}{{ '<U>' + m.content + '<E>' }}{% endfor %}", r"4 turns are trained instead of 2"),
        (
            "{% for m in messages %}{{ ('Q: ' if m.role == 'user' else 'A: ') + m.content + '\n' }}{% endfor %}",
            "writes no header that tells an answer from other text: .* after 'A: ', which any text may hold",
        ),
    ],
)
def test_what_tells_nothing_is_refused(template: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_family(tokenizers.byte_level(template, ("<U>", "<E>"), "<E>"))
