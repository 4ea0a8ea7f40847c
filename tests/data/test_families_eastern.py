import pytest

from lightning_protrain.data.chat.chat_format import Family
from lightning_protrain.data.chat.known_formats import _EASTERN as FAMILIES
from lightning_protrain.data.chat.known_formats import DEEPSEEK, GLM4, KIMI
from lightning_protrain.data.chat.markers import resolve
from lightning_protrain.data.chat.mask import MaskOptions, trained_tokens
from lightning_protrain.data.chat.turns import scan
from tests.data import tokenizers
from tests.data.templates import FORMATS


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_has_both_sides_and_a_name_of_its_own(family: Family) -> None:
    assert {"assistant", "user"} <= set(family.roles)
    assert [one.name for one in FAMILIES].count(family.name) == 1


def test_the_next_role_ends_a_turn() -> None:
    starts = {start for boundary in GLM4.boundaries for start in boundary.start}
    assert {"<|user|>", "<|observation|>", "<|system|>"} <= starts & set(GLM4.boundaries[0].end)


def test_answers_to_tools_have_no_header() -> None:
    assert DEEPSEEK.boundaries[0].start[1] == "<\uff5ctool\u2581output\u2581end\uff5c>"


def test_a_free_name_is_no_content() -> None:
    assert ("<|im_assistant|>", "<|im_middle|>") in {(part.start, part.end) for part in KIMI.exclusions}


def test_the_name_of_a_speaker_is_not_trained() -> None:
    form = FORMATS["kimi"]
    tokenizer = tokenizers.byte_level(form.template, form.controls, form.eos)
    markers = resolve(KIMI, tokenizer)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "name": "Robin", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    trained = trained_tokens(ids, scan(ids, markers), markers, MaskOptions())
    kept = [index for index, keep in zip(ids, trained.tolist(), strict=True) if keep]
    assert tokenizer.decode(kept) == "Hello<|im_end|>"
