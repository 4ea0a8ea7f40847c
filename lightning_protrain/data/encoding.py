"""From conversations to tensors: token ids, labels on the assistant's tokens only, padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from lightning_protrain.data.conversations import Conversation

IGNORE_INDEX = -100
# Token ids and labels of one sequence, both int64 of shape [length].
Example = tuple[Tensor, Tensor]
_ENCODE_AT_ONCE = 512
# Fewer rows than this take less time than a progress bar takes to be read.
_SHOW_PROGRESS_FROM = 20_000


class EncodedConversations(Dataset[Example]):
    """Sequences of different lengths, stored end to end.

    Args:
        input_ids: All token ids, int32 of shape [tokens].
        trained: Whether the token is one to learn, bool of shape [tokens].
        offsets: Where the sequences begin, and the end: int64 of shape [sequences + 1].
        num_dropped: How many conversations had nothing left to learn.
    """

    def __init__(self, input_ids: Tensor, trained: Tensor, offsets: Tensor, num_dropped: int = 0) -> None:
        self.input_ids = input_ids
        self.trained = trained
        self.offsets = offsets
        self.num_dropped = num_dropped

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Example:
        span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        input_ids = self.input_ids[span].long()
        return input_ids, input_ids.masked_fill(~self.trained[span], IGNORE_INDEX)


def encode_conversations(
    rows: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> EncodedConversations:
    """Renders and tokenizes the conversations and marks the assistant's tokens, as the chat template says.

    A longer conversation is cut at `max_length`; one that loses all the assistant's tokens by that is dropped.

    Args:
        rows: Conversations.
        tokenizer: With a chat template that has `{% generation %}` blocks.
        max_length: Tokens per sequence at most.

    Raises:
        ValueError: Nothing is left to learn in any conversation.
    """
    ids: list[list[int]] = []
    masks: list[list[int]] = []
    with Progress(transient=True, disable=len(rows) < _SHOW_PROGRESS_FROM) as progress:
        task = progress.add_task("Tokenizing", total=len(rows))
        for start in range(0, len(rows), _ENCODE_AT_ONCE):
            messages = [row["messages"] for row in rows[start : start + _ENCODE_AT_ONCE]]
            encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            for row_ids, row_mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
                if any(row_mask[:max_length]):
                    ids.append(row_ids[:max_length])
                    masks.append(row_mask[:max_length])
            progress.advance(task, len(messages))
    if not ids:
        raise ValueError(
            f"None of the {len(rows)} conversations has a token of the assistant within max_length={max_length}. Raise "
            f"`max_length`, or check the {{% generation %}} block in the chat template of {tokenizer.name_or_path!r}."
        )
    lengths = torch.tensor([0, *map(len, ids)])
    return EncodedConversations(
        input_ids=torch.tensor(list(chain.from_iterable(ids)), dtype=torch.int32),
        trained=torch.tensor(list(chain.from_iterable(masks)), dtype=torch.bool),
        offsets=lengths.cumsum(0),
        num_dropped=len(rows) - len(ids),
    )


@dataclass(frozen=True)
class PadCollator:
    """Makes a batch: pads on the right to the longest sequence, rounded up.

    Attributes:
        pad_token_id: What stands at padded places; attention mask and labels exclude them.
        max_length: The rounding stops here.
        multiple: Lengths are rounded up to a multiple of it.
    """

    pad_token_id: int
    max_length: int
    multiple: int = 8

    def __call__(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """The batch `input_ids`, `attention_mask`, `labels`, all int64 of shape [batch, length]."""
        longest = max(len(input_ids) for input_ids, _ in examples)
        rounded = -(-longest // self.multiple) * self.multiple
        shape = (len(examples), max(longest, min(rounded, self.max_length)))
        input_ids = torch.full(shape, self.pad_token_id)
        attention_mask = torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, IGNORE_INDEX)
        for row, (ids, targets) in enumerate(examples):
            input_ids[row, : len(ids)] = ids
            attention_mask[row, : len(ids)] = 1
            labels[row, : len(ids)] = targets
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
