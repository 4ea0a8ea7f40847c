"""Gives access to the text of a tokenizer's tokens, as bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lightning_protrain.config import plural

# Matches text that looks like a control token: <|a|>, <|a>, <a|>, <a_b>, [A], [/A], also with full-width bars.
_CONTROL = re.compile(
    r"<\|[^<>|\s]+\|?>|<[^<>|\s]+\|>|<\uff5c[^<>\s]+\uff5c>|</?[a-z]+(?:_[a-z]+)+>|\[/?[A-Z][A-Z_]+\]"
)
SPACE_MARK = "\u2581"  # stands for a space in tokens of SentencePiece
_SAMPLE = "The quick brown fox jumps over 13 lazy dogs, twice."
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")

# The alphabet of GPT-2, in which a printable byte is its own character.
_LETTER_OF_BYTE: dict[int, str] = bytes_to_unicode()
_BYTE_OF_LETTER = {letter: byte for byte, letter in _LETTER_OF_BYTE.items()}


class Vocabulary:
    """The tokens of a tokenizer and the bytes for which each stands.

    Args:
        tokenizer: A fast tokenizer, or one of mistral-common.

    Raises:
        ValueError: If the tokenizer is slow, or cannot encode a plain sentence because its vocabulary is missing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer: Any = tokenizer
        self.name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        # mistral-common never encodes text as control tokens, so `encode` looks them up.
        self.controls_apart = self._backend is None and hasattr(tokenizer, "mode")
        if self._backend is None and not self.controls_apart:
            raise ValueError(
                f"The tokenizer {self.name!r} is a slow one ({type(tokenizer).__name__}), which the loss mask cannot "
                "read. Use its fast version."
            )
        decoder = getattr(self._backend, "decoder", None)
        described = str(json.loads(decoder.__getstate__())) if decoder is not None else ""
        self._byte_level = "'ByteLevel'" in described
        self._space_mark = "'Metaspace'" in described or SPACE_MARK in described
        self._spelled: dict[int, bytes] = {}
        self._check()

    @cached_property
    def added(self) -> dict[str, int]:
        """Map from the text of each added token to its id."""
        if self.controls_apart:
            tokens = self.tokenizer.all_special_tokens
            return {token: int(self.tokenizer.convert_tokens_to_ids(token)) for token in tokens}
        return {token: int(index) for token, index in self.tokenizer.get_added_vocab().items()}

    @cached_property
    def _added_text(self) -> dict[int, bytes]:
        return {index: text.encode() for text, index in self.added.items()}

    @cached_property
    def _pieces(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        return re.compile("(" + "|".join(re.escape(text) for text in sorted(self.added, key=len, reverse=True)) + ")")

    def controls_in(self, text: str) -> bool:
        """Return True if a text contains added tokens, and nothing that only looks like a control token."""
        return bool(text) and any(token in text for token in self.added if not token.isspace()) and self.has(text)

    def has(self, text: str) -> bool:
        """Return True if all parts of a text that look like control tokens are added tokens of this tokenizer."""
        return all(token in self.added for token in _CONTROL.findall(text))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text; added tokens in the text are encoded as such, and none is inserted."""
        if self.controls_apart:
            return [self._encode_apart(text) for text in texts]
        return self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]

    def _encode_apart(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._added_pattern.split(text):
            if part in self.added:
                ids.append(self.added[part])
            elif part:
                ids.extend(self.tokenizer.encode(part, add_special_tokens=False))
        return ids

    def spell(self, ids: Sequence[int]) -> list[bytes]:
        """Return the UTF-8 bytes of each token, which may be a part of a character."""
        new = [index for index in dict.fromkeys(ids) if index not in self._spelled]
        for index, name in zip(new, self.tokenizer.convert_ids_to_tokens(new), strict=True):
            self._spelled[index] = self._added_text.get(index, b"") or self._spell_piece(name)
        return [self._spelled[index] for index in ids]

    def text(self, ids: Sequence[int]) -> str:
        """Decode token ids, including control tokens.

        Spaces that the tokenizer inserts at the beginning of a text, or after an added token, are left out.
        """
        spelled = self.spell(ids)
        if self._inserts_space:
            after_added = [True, *(index in self._added_text for index in ids[:-1])]
            spelled = [
                piece.removeprefix(b" ") if inserted and index not in self._added_text else piece
                for piece, index, inserted in zip(spelled, ids, after_added, strict=True)
            ]
        return b"".join(spelled).decode(errors="replace")

    @cached_property
    def _inserts_space(self) -> bool:
        token = self.eos or self.bos
        return token is not None and b"".join(self.spell(self.encode([f"{token}a"])[0])).endswith(b" a")

    def _spell_piece(self, piece: str | None) -> bytes:
        if piece is None:
            return b""
        if self._byte_level and all(letter in _BYTE_OF_LETTER for letter in piece):
            return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
        byte = _BYTE.fullmatch(piece)
        if byte:
            return bytes([int(byte[1], 16)])
        return (piece.replace(SPACE_MARK, " ") if self._space_mark else piece).encode()

    def beginning_with(self, text: bytes) -> frozenset[int]:
        """Return the ids of the tokens whose bytes begin with `text`."""
        if self._byte_level:
            piece = "".join(_LETTER_OF_BYTE[byte] for byte in text)
        else:
            piece = text.decode(errors="ignore").replace(" ", SPACE_MARK if self._space_mark else " ")
        ids = {index for name, index in self._pieces.items() if name.startswith(piece)}
        ids |= {index for index, spelled in self._added_text.items() if spelled.startswith(text)}
        if not self._byte_level and len(text) == 1 and f"<0x{text[0]:02X}>" in self._pieces:
            ids.add(self._pieces[f"<0x{text[0]:02X}>"])
        return frozenset(int(index) for index in ids)

    @property
    def bos(self) -> str | None:
        """Text of the begin-of-sequence token; None if there is none."""
        return getattr(self.tokenizer, "bos_token", None)

    @property
    def eos(self) -> str | None:
        """Text of the end-of-sequence token; None if there is none."""
        return getattr(self.tokenizer, "eos_token", None)

    @cached_property
    def unknown(self) -> int | None:
        """Id of the unknown token; None if there is none."""
        return getattr(self.tokenizer, "unk_token_id", None)

    def _check(self) -> None:
        ids = self.encode([_SAMPLE])[0]
        spelled = b"".join(self.spell(ids)).decode(errors="replace").strip()
        if spelled != _SAMPLE:
            raise ValueError(
                f"The tokenizer {self.name!r} cannot spell a plain sentence: {_SAMPLE!r} comes back as {spelled!r}. It "
                f"has {plural(len(self.tokenizer), 'token')}; its folder probably lacks "
                f"`tokenizer.json` or another file of the "
                "vocabulary. Get the whole folder."
            )
