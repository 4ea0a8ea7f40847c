import re

import pytest

from lightning_protrain.data.chat.chat_format import Family
from lightning_protrain.data.chat.known_formats import _WESTERN as FAMILIES
from lightning_protrain.data.chat.known_formats import GEMMA4, GPT_OSS, LLAMA3, MISTRAL, VOXTRAL
from lightning_protrain.data.chat.markers import resolve
from lightning_protrain.data.chat.mask import MaskOptions, trained_tokens
from lightning_protrain.data.chat.turns import scan
from tests.data import tokenizers


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_has_both_sides_and_a_name_of_its_own(family: Family) -> None:
    assert {"assistant", "user"} <= set(family.roles)
    assert [one.name for one in FAMILIES].count(family.name) == 1


def test_a_call_of_a_tool_ends_a_turn_too() -> None:
    assert LLAMA3.boundaries[0].end == ("<|eot_id|>", "<|eom_id|>")
    assert set(GPT_OSS.boundaries[0].end) == {"<|end|>", "<|return|>", "<|call|>"}


def test_results_of_tools_are_no_answer() -> None:
    assert ("tool_output", "<|tool_response>") in {(part.kind, part.start) for part in GEMMA4.exclusions}
    assert "[/TOOL_RESULTS]" in MISTRAL.boundaries[0].start


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<s>[INST][BEGIN_AUDIO][AUDIO][AUDIO][/INST]lang:en[TRANSCRIBE]Hello</s>", "Hello</s>"),
        ("<s>[INST][BEGIN_AUDIO][AUDIO]What?[/INST]Hello</s>", "Hello</s>"),
        (
            "<s>[INST]a[/INST][TOOL_CALLS]f</s>[TOOL_RESULTS]b[/TOOL_RESULTS][TOOL_RESULTS]c[/TOOL_RESULTS]d</s>",
            "[TOOL_CALLS]f</s>d</s>",
        ),
    ],
)
def test_languages_and_results_of_tools_are_not_trained(text: str, expected: str) -> None:
    controls = re.findall(r"\[[A-Z_/]+\]|</?s>", text)
    tokenizer = tokenizers.byte_level(None, (*dict.fromkeys(controls), "[TRANSCRIBE]", "[/TOOL_RESULTS]"), "</s>")
    markers = resolve(VOXTRAL, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    spans = scan(ids, markers)
    trained = trained_tokens(ids, spans, markers, MaskOptions())
    assert tokenizer.decode([index for index, keep in zip(ids, trained.tolist(), strict=True) if keep]) == expected
