import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_protrain.data.chat.vocabulary import Vocabulary
from tests.data import tokenizers

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
    with pytest.raises(ValueError, match=r"comes back as ''\. It has 1 tokens"):
        Vocabulary(tokenizer)


class _Slow:
    name_or_path = "somewhere/slow"


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'somewhere/slow' is a slow one \(_Slow\)"):
        Vocabulary(_Slow())  # type: ignore[arg-type]
