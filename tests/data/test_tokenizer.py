"""Training, caching and refusing tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_protrain.data.batches import tokenizer as module
from lightning_protrain.data.batches.tokenizer import (
    MIN_VOCAB_SIZE,
    SPECIAL_TOKENS,
    cached_tokenizer_folder,
    load_tokenizer,
    train_tokenizer,
)
from lightning_protrain.data.conversation import Conversation

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "\n Hello "},
]


def test_the_template_renders_chatml_and_the_start_of_an_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == (
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
        "<|im_start|>assistant<|im_sep|>\n Hello <|im_end|>"
    )
    prompt = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False).startswith(prompt)
    assert prompt.endswith("<|im_end|><|im_start|>assistant<|im_sep|>")


def test_special_tokens_come_first_and_are_single(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.eos_token) == (0, "<|im_end|>")
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]
    assert len(tokenizer.encode("assistant")) == 1


@given(text=st.text())
def test_any_text_survives(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("size", [MIN_VOCAB_SIZE, 300])
def test_the_size_is_the_one_asked_for(rows: list[Conversation], size: int) -> None:
    assert len(train_tokenizer(rows, size)) == size


def test_equal_rows_give_an_equal_tokenizer(rows: list[Conversation], tokenizer: PreTrainedTokenizerFast) -> None:
    again = train_tokenizer(rows, 300)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_the_cache_is_read_again_and_keyed_by_rows_and_size(
    rows: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cached_tokenizer_folder(rows, 300, tmp_path)
    others = {cached_tokenizer_folder(rows[1:], 300, tmp_path), cached_tokenizer_folder(rows, 301, tmp_path)}
    assert folder not in others
    assert len(others) == 2
    monkeypatch.setattr(module, "train_tokenizer", None)
    assert cached_tokenizer_folder(rows, 300, tmp_path) == folder
    assert sorted(folder.parent.iterdir()) == sorted({folder, *others})


def test_a_loaded_tokenizer_equals_the_trained_one(
    rows: list[Conversation], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    loaded = load_tokenizer(cached_tokenizer_folder(rows, 300, tmp_path))
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.apply_chat_template(CHAT) == tokenizer.apply_chat_template(CHAT)
    assert (loaded.pad_token, loaded.eos_token) == (tokenizer.pad_token, tokenizer.eos_token)


def test_an_interrupted_save_leaves_no_folder(
    rows: list[Conversation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: PreTrainedTokenizerBase, folder: Path, **_: object) -> None:
        (folder / "tokenizer.json").write_text("{")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "save_pretrained", interrupted)
        with pytest.raises(OSError, match="disk full"):
            cached_tokenizer_folder(rows, 300, tmp_path)
    assert list((tmp_path / "tokenizers").iterdir()) == []
    assert load_tokenizer(cached_tokenizer_folder(rows, 300, tmp_path)).pad_token_id == 0


def test_a_process_that_comes_second_takes_what_is_there(
    rows: list[Conversation], tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = cached_tokenizer_folder(rows, 300, tmp_path / "other")

    def overtaken(rows: list[Conversation], vocab_size: int) -> PreTrainedTokenizerFast:
        folder = tmp_path / "tokenizers" / elsewhere.name
        tokenizer.save_pretrained(folder)
        (folder / "first").touch()
        return tokenizer

    monkeypatch.setattr(module, "train_tokenizer", overtaken)
    folder = cached_tokenizer_folder(rows, 300, tmp_path)
    assert (folder / "first").exists()
    assert list(folder.parent.iterdir()) == [folder]


def test_too_small_a_vocabulary_is_refused(rows: list[Conversation], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"vocab_size=259 leaves no room .* at least {MIN_VOCAB_SIZE}"):
        cached_tokenizer_folder(rows, 259, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^The model 'no-such-folder' is not in the cache"):
        load_tokenizer("no-such-folder")


class MistralCommonBackend:
    """A stand-in for transformers' class, which takes a second to read its vocabulary."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    @classmethod
    def from_pretrained(cls, name: str, mode: str = "test") -> MistralCommonBackend:
        assert name == "folder"
        return cls(mode)


def test_a_tokenizer_of_mistral_common_is_loaded_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AutoTokenizer", MistralCommonBackend)
    loaded: Any = load_tokenizer("folder")
    assert loaded.mode == "finetuning"


def test_tekken_without_a_config_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has a tekken\.json but no config\.json"):
        load_tokenizer(tmp_path)
