"""Encodes plain text: documents that are trained as a whole, and completions of a prompt.

A document that is longer than `max_length` is divided into pieces. Each piece begins with the last token of the piece
before it, which is not trained there a second time. So every token of a document but its first is trained exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from lightning_protrain.data.batches.encode import UNCUT, UNTRAINED, Dropped, Encoded, OnUntrainable, truncate
from lightning_protrain.data.chat.check_turns import UntrainableError
from lightning_protrain.data.conversation import Document
from lightning_protrain.data.sources.dataset import PLAIN_TEXT

_Ids = NDArray[np.int32]


@dataclass(frozen=True)
class TextEncoder:
    """Encodes rows of plain text, with the interface of `ChatEncoder`.

    The tokenizer adds its begin token where it usually does, unless the text has it. A prompt has the tokens that it
    has alone, as when the trained model continues it.

    Attributes:
        tokenizer: The tokenizer.
        max_length: Maximum number of tokens of an example.
        on_untrainable: Treatment of a row without a trained token.
        train_on_inputs: True trains prompts, too.
        add_eos: True ends every document and completion with the tokenizer's end token.

    Raises:
        ValueError: If `add_eos` is True and the tokenizer has no end token.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int = UNCUT
    on_untrainable: OnUntrainable = "drop"
    train_on_inputs: bool = False
    add_eos: bool = True
    family = PLAIN_TEXT

    def __post_init__(self) -> None:
        if self.add_eos and self.tokenizer.eos_token_id is None:
            raise ValueError("The tokenizer has no end token to put after plain text. Set `add_eos` to false.")

    @property
    def knobs(self) -> str:
        """Settings, as one line of text."""
        length = "none" if self.max_length == UNCUT else self.max_length
        trained = "everything" if self.train_on_inputs else "the completion, or the whole document"
        return f"trained: {trained}, add_eos={self.add_eos}, max_length={length}"

    @property
    def limits(self) -> str:
        """Settings that may leave nothing to train, as text for an error."""
        return f"max_length is {self.max_length}"

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids of the tokens that end a text."""
        return frozenset({int(self.tokenizer.eos_token_id)} if self.add_eos else ())

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[Encoded, ...] | Encoded | UntrainableError]:
        """Encode plain text; return the pieces of a document, an example for a completion, or an error, for each row.

        Args:
            rows: Rows of type `Document`, or conversations with a `plain` form.

        Raises:
            ValueError: If a row is a conversation that cannot be written as plain text.
        """
        documents = [self._document(row) for row in rows]
        prompts = [document.get("prompt", "") for document in documents]
        whole = self._tokenize([prompt + document["text"] for prompt, document in zip(prompts, documents, strict=True)])
        begins = self._tokenize(prompts)
        return [
            self._example(document, begin if document.get("prompt") else [], ids)
            for document, begin, ids in zip(documents, begins, whole, strict=True)
        ]

    def prompt_ids(self, text: str) -> list[int]:
        """Return the tokens of a text that the model is to continue."""
        return self._tokenize([text])[0]

    def _document(self, row: Mapping[str, Any]) -> Document:
        document: Any = row.get("plain", row)
        if "text" not in document:
            raise ValueError(
                "a row of messages needs a chat template, and the tokenizer has none. Give `chat_template`, or use the "
                "tokenizer of a model that was trained on chats"
            )
        return document

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts, after the tokenizer's begin token but without the end token that some append."""
        bos, end = self.tokenizer.bos_token, self.tokenizer.eos_token_id
        alone, special = (
            self.tokenizer("a", add_special_tokens=adds, verbose=False)["input_ids"] for adds in (False, True)
        )
        appends = special[-1:] == [end] != alone[-1:]
        begin = special[: len(special) - len(alone) - appends]
        rows = self.tokenizer([*texts], add_special_tokens=False, verbose=False)["input_ids"]
        has_begin = (bos is not None and text.startswith(str(bos)) for text in texts)  # A second one would be wrong.
        return [list(row) if has else [*begin, *row] for row, has in zip(rows, has_begin, strict=True)]

    def _example(
        self, document: Document, begin: list[int], whole: list[int]
    ) -> tuple[Encoded, ...] | Encoded | UntrainableError:
        if not document["text"]:
            return UntrainableError(UNTRAINED, "the text is empty")
        if whole[: len(begin)] != begin:  # A token spans the end of the prompt.
            # After a line end, SentencePiece puts no space before the text.
            texts = [document["text"], "\n", f"\n{document['text']}"]
            alone, line, rest = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            whole = [*begin, *(rest[len(line) :] if rest[: len(line)] == line else alone)]
        ids = np.array([*whole, *(self.end_ids - {*whole[-1:]})], dtype=np.int32)
        trained = np.arange(len(ids)) >= (0 if self.train_on_inputs else len(begin))
        if "prompt" not in document:
            return self._pieces(ids, trained)
        example = truncate(Encoded(ids, trained), self.max_length)
        return UntrainableError(example.value) if isinstance(example, Dropped) else example

    def _pieces(self, ids: _Ids, trained: NDArray[np.bool_]) -> tuple[Encoded, ...] | UntrainableError:
        stride = min(self.max_length, len(ids)) - 1
        if stride < 1:
            return UntrainableError(UNTRAINED, "no token follows another one")
        starts = range(0, len(ids) - 1, stride)
        return tuple(Encoded(ids[at : at + stride + 1], trained[at : at + stride + 1]) for at in starts)
