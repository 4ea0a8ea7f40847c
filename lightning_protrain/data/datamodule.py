"""`ChatDataModule`: conversations in, padded batches with labels on the assistant's tokens out."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, DistributedSampler
from transformers import PreTrainedTokenizerBase

from lightning_protrain.data.conversations import split_rows
from lightning_protrain.data.encoding import EncodedConversations, Example, PadCollator, encode_conversations
from lightning_protrain.data.sources import Rows, load_splits
from lightning_protrain.data.tokenizer import cached_tokenizer_folder, load_tokenizer

DEFAULT_CACHE_DIR = Path.home() / ".cache" / "lightning_protrain"


# Which rows a stage of the Trainer reads.
_STAGE_SPLITS = {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",), "predict": ("test",)}


class ChatDataModule(LightningDataModule):
    """Conversations for supervised fine-tuning, with the loss on what the assistant says.

    Batches are dicts of int64 tensors of shape [batch, length]: `input_ids`, `attention_mask` and `labels`, which are
    -100 outside the assistant's turns and not shifted. Equal arguments give bitwise equal batches in every epoch.

    Args:
        dataset: "stdlib" for the docstrings of Python's standard library, the path of a .jsonl file with one `messages`
            list a line, or a folder written by `save_to_disk` of Hugging Face `datasets`.
        tokenizer: A folder or a name on the Hugging Face Hub, with `{% generation %}` blocks in its chat template. None
            trains a byte-level BPE on the data, once, and keeps it in `cache_dir`.
        vocab_size: Size of the tokenizer trained on the data.
        max_length: Longer conversations are cut at this number of tokens.
        batch_size: Conversations in a batch, on each device.
        val_fraction: Share of the conversations kept for validation, at least one, where the data set has no split
            "validation". Without a split "test", testing and prediction read the validation rows.
        seed: Seed of the split and of the order of every epoch.
        num_workers: Processes that make batches; 0 makes them in the main process.
        cache_dir: Where trained tokenizers are kept; None takes `~/.cache/lightning_protrain`.

    Raises:
        ValueError: A number out of range, here; wrong data or a wrong tokenizer, in `prepare_data` and `setup`.
    """

    def __init__(
        self,
        dataset: str = "stdlib",
        tokenizer: str | None = None,
        vocab_size: int = 4096,
        max_length: int = 512,
        batch_size: int = 8,
        val_fraction: float = 0.05,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("max_length", max_length), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name}={value}: give at least 1.")
        if not 0 < val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction}: give a share between 0 and 1, both excluded.")
        self.dataset = dataset
        self.tokenizer_name = tokenizer
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.seed = seed
        self.num_workers = num_workers
        self.cache_dir = DEFAULT_CACHE_DIR if cache_dir is None else Path(cache_dir).expanduser()
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.encoded: dict[str, EncodedConversations] = {}
        self._splits: dict[str, Rows] | None = None

    def prepare_data(self) -> None:
        """Trains the tokenizer into the cache if none was given: once per node."""
        if self.tokenizer_name is None:
            self._trained_tokenizer_folder()

    def setup(self, stage: str) -> None:
        """Loads the tokenizer and tokenizes what the stage reads, in every process."""
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.tokenizer_name or self._trained_tokenizer_folder())
        splits = dict(self._read_splits())
        if "validation" not in splits:
            splits["train"], splits["validation"] = split_rows(splits["train"], self.val_fraction, self.seed)
        splits.setdefault("test", splits["validation"])
        for name in _STAGE_SPLITS[stage]:
            if name not in self.encoded:
                self.encoded[name] = self._encode(splits[name], name)

    def train_dataloader(self) -> DataLoader[Example]:
        """Batches in an order that depends on seed and epoch alone."""
        world_size, rank = (1, 0) if self.trainer is None else (self.trainer.world_size, self.trainer.global_rank)
        # Lightning leaves a DistributedSampler alone and tells it the epoch; with one process it is a seeded shuffle.
        sampler: DistributedSampler[Example] = DistributedSampler(
            self.encoded["train"], num_replicas=world_size, rank=rank, seed=self.seed
        )
        return self._loader("train", sampler)

    def val_dataloader(self) -> DataLoader[Example]:
        """Batches in the order of the data."""
        return self._loader("validation", None)

    def test_dataloader(self) -> DataLoader[Example]:
        """Batches in the order of the data."""
        return self._loader("test", None)

    def predict_dataloader(self) -> DataLoader[Example]:
        """The batches of `test_dataloader`."""
        return self._loader("test", None)

    def _loader(self, split: str, sampler: DistributedSampler[Example] | None) -> DataLoader[Example]:
        assert self.tokenizer is not None, "setup comes first"
        pad = self.tokenizer.pad_token_id
        return DataLoader(
            self.encoded[split],
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=PadCollator(pad_token_id=0 if pad is None else pad, max_length=self.max_length),
            # Without its own generator each iterator draws from the global one, and dropout changes with it.
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _read_splits(self) -> dict[str, Rows]:
        if self._splits is None:
            self._splits = load_splits(self.dataset)
        return self._splits

    def _trained_tokenizer_folder(self) -> Path:
        rows = list(chain.from_iterable(self._read_splits().values()))
        return cached_tokenizer_folder(rows, self.vocab_size, self.cache_dir)

    def _encode(self, rows: Rows, split: str) -> EncodedConversations:
        assert self.tokenizer is not None
        data = encode_conversations(rows, self.tokenizer, self.max_length)
        if data.num_dropped:
            rank_zero_info(
                f"Dropped {data.num_dropped} of {len(rows)} conversations of {split!r}: no token of the assistant lies "
                f"within the first {self.max_length} tokens."
            )
        return data
