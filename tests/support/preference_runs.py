"""Preference pairs of random tokens, and runs of `PreferenceModule` on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_protrain import PreferenceModule
from lightning_protrain.data.batches.loader import IGNORE_INDEX, Batch, remainder_of_fit
from tests.support.module_runs import LLAMA, VOCAB

LORA = {"r": 2, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}
LENGTH = 16


def module(**options: Any) -> PreferenceModule:
    """A tiny Llama, with equal weights in every call."""
    torch.manual_seed(0)
    return PreferenceModule(**{"config": LLAMA, "learning_rate": 1e-2, "warmup_steps": 0, **options})


def built(**options: Any) -> PreferenceModule:
    """The module with its model, outside of a Trainer."""
    made = module(**options)
    made.configure_model()
    return made


def row(prompt: Tensor, completion: Tensor, length: int = LENGTH) -> dict[str, Tensor]:
    """A row of a batch, padded on the right."""
    ids, padding = torch.cat([prompt, completion]), length - len(prompt) - len(completion)
    labels = torch.cat([torch.full_like(prompt, IGNORE_INDEX), completion])
    values = ((ids, 0), (labels, IGNORE_INDEX), (torch.ones_like(ids), 0))
    padded = [torch.nn.functional.pad(value, (0, padding), value=filling) for value, filling in values]
    return dict(zip(("input_ids", "labels", "attention_mask"), padded, strict=True))


def pairs(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Pairs of rows, stacked: prompts and completions of different lengths, and a label for KTO."""
    random = torch.Generator().manual_seed(seed)

    def tokens(least: int, most: int) -> Tensor:
        size = int(torch.randint(least, most + 1, (), generator=random))
        return torch.randint(1, VOCAB, (size,), generator=random)

    made = []
    for index in range(count):
        prompt = tokens(2, 5)
        rows = [row(prompt, tokens(1, 9)) for _ in range(2)]
        made.append({name: torch.stack([each[name] for each in rows]) for name in rows[0]})
        made[-1] |= {"pair_ids": torch.tensor([index]), "desirable": torch.tensor([index % 2])}
    return made


def filler(like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The pair without labels, as on a rank without a row in the last step."""
    return {**like, "labels": torch.full_like(like["labels"], IGNORE_INDEX), "pair_ids": torch.tensor([-1])}


def collate(chosen: Sequence[dict[str, Tensor]], loss: str = "dpo") -> Batch:
    """A batch of pairs."""
    names = [name for name in chosen[0] if name != "desirable" or loss == "kto"]
    return {name: torch.cat([pair[name] for pair in chosen]) for name in names}


class _Remaining:
    """The rest of the epoch's batches with `trained_tokens`, as of a TrainLoader, so that a run resumes anywhere."""

    def __init__(self, data: Pairs) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data.splits["train"])

    def __iter__(self) -> Iterator[Batch]:
        batches, size = self.data.splits["train"], self.data.accumulate
        start = remainder_of_fit(self.data.trainer, len(batches)).start if self.data.trainer is not None else 0
        for index in range(start, len(batches)):
            window = batches[index - index % size :][:size]
            count = sum(int((batch["pair_ids"] >= 0).sum()) for batch in window)
            yield {**batches[index], "trained_tokens": torch.tensor(count)}


class Pairs(LightningDataModule):
    """Two pairs in a batch, six training batches and two of validation; windows of `accumulate` batches.

    Args:
        cache_dir: As in ChatDataModule.
        loss: Loss that reads the batches.
        seed: Seed of all tokens.
        accumulate: Number of batches in a window.
        place: Rank, and number of ranks; every rank has its own pairs of a batch.
    """

    def __init__(
        self,
        cache_dir: Path,
        loss: str = "dpo",
        seed: int = 0,
        accumulate: int = 1,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__()
        self.cache_dir, self.accumulate = cache_dir, accumulate
        rank, ranks = place
        self.splits: dict[str, list[Batch]] = {}
        for number, (split, count) in enumerate((("train", 12), ("validation", 4), ("test", 0))):
            mine = pairs(count, seed=10 * seed + number)[rank::ranks]
            size = max(2 // ranks, 1)
            self.splits[split] = [collate(mine[start : start + size], loss) for start in range(0, len(mine), size)]
        self.computed: list[str] = []  # Splits that were read by `pair_batches`.

    def pair_count(self, split: str) -> int:
        return sum(len(batch["pair_ids"]) for batch in self.splits[split])

    def pair_batches(self, split: str) -> list[Batch]:
        self.computed.append(split)
        return self.splits[split]

    def largest_batch(self) -> Batch:
        batch = self.splits["train"][0]
        return {**batch, "trained_tokens": torch.tensor(len(batch["pair_ids"]))}

    def train_dataloader(self) -> _Remaining:
        return _Remaining(self)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.splits["validation"], batch_size=None)  # type: ignore[arg-type]

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.splits["test"], batch_size=None)  # type: ignore[arg-type]

    predict_dataloader = test_dataloader
