"""`ChatDataModule`: conversations in, batches with labels on the assistant's tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import ConcatDataset, DataLoader
from transformers import PreTrainedTokenizerBase

from lightning_protrain.data.collating import Batch, Collator, Row, Rows
from lightning_protrain.data.conversations import split_indices
from lightning_protrain.data.encoding import HasImages, OnUntrainable, encode_rows
from lightning_protrain.data.examples import Encoded
from lightning_protrain.data.loader import TrainLoader, count_trained
from lightning_protrain.data.masking import TrainOn, TrainOnEos
from lightning_protrain.data.packing import Blocks, pack, single_blocks
from lightning_protrain.data.preview import Shown, show
from lightning_protrain.data.report import DatasetReport
from lightning_protrain.data.sampling import EpochSampler
from lightning_protrain.data.settings import Chats, ChatSettings
from lightning_protrain.data.sources import load_splits
from lightning_protrain.data.specs import DatasetSpec
from lightning_protrain.data.tokenizer import cached_tokenizer_folder, load_tokenizer
from lightning_protrain.data.vision import ImageRows

DEFAULT_CACHE_DIR = Path.home() / ".cache" / "lightning_protrain"
# Rows with images of which the number of images is looked up.
_LOOK_AT = 256
# Which rows a stage of the Trainer reads.
_STAGE_SPLITS = {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",), "predict": ("test",)}


class ChatDataModule(LightningDataModule):
    """Conversations for supervised fine-tuning, with the loss on what the assistant says.

    Batches are dicts of int64 tensors of shape [batch, length]: `input_ids`, `labels`, which are -100 where nothing is
    trained and not shifted, and `attention_mask`, or `position_ids` where several conversations share a row. Equal
    arguments give bitwise equal batches in every epoch, whatever the number of workers.

    Args:
        dataset: What `DatasetSpec.path` may be, a `DatasetSpec`, or a list of these; "stdlib" for the docstrings of
            Python's standard library.
        tokenizer: A folder or a name on the Hugging Face Hub; the processor too, where the data has images. None trains
            a byte-level BPE on the data, once, and keeps it in `cache_dir`.
        vocab_size: Size of the tokenizer trained on the data.
        max_length: Longer conversations are cut at this number of tokens.
        batch_size: Rows of a batch, on each device.
        family: Chat format whose markers say where turns begin and end. None recognises it by what the chat template
            does with conversations that are known.
        chat_template: A Jinja template, or the path of one, in place of the tokenizer's.
        chat_template_kwargs: Further variables of the template, `enable_thinking` for example.
        processor_kwargs: Passed to the processor of images.
        train_on_inputs: Whether everything is trained, what users say too.
        roles_to_train: Roles whose turns are trained; None: the assistant. An empty list trains nothing.
        train_on_eos: Which terminators are trained: those of the trained `turn`s, of `all` turns, the `last` one, or
            `none`.
        train_on: `all` turns of these roles, or the `last_turn` of each conversation only.
        train_thinking: Whether reasoning is trained.
        role_boundaries: Markers in place of those of the family: a list of mappings with `role`, `start`, and maybe
            `end`, `include_start` and `include_end`.
        on_untrainable: What happens with a conversation of which nothing is trained, or whose turns cannot be told
            apart: `error`, `drop` counts it and leaves it out, `warn` keeps it.
        packing: Whether several conversations share a row; not those with images.
        group_by_length: Whether batches hold conversations of like lengths.
        val_fraction: Share of the conversations kept for validation, at least one, where a data set has no split
            "validation". Without a split "test", testing and prediction read the validation rows.
        seed: Seed of the split and of the order of every epoch.
        num_workers: Processes that make batches; 0 makes them in the main process.
        cache_dir: Where trained tokenizers are kept; None takes `~/.cache/lightning_protrain`.

    Attributes:
        tokenizer: After `setup`.
        examples: By split, those of each data set, after `setup`.
        reports: What became of each data set, after `setup`.

    Raises:
        ValueError: A number out of range or an unknown choice, here; wrong data or a wrong tokenizer, in `prepare_data`
            and `setup`.
    """

    def __init__(
        self,
        dataset: str | DatasetSpec | list[str] | list[DatasetSpec] = "stdlib",
        tokenizer: str | None = None,
        vocab_size: int = 4096,
        max_length: int = 512,
        batch_size: int = 8,
        family: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        processor_kwargs: dict[str, Any] | None = None,
        train_on_inputs: bool = False,
        roles_to_train: list[str] | None = None,
        train_on_eos: TrainOnEos = "turn",
        train_on: TrainOn = "all",
        train_thinking: bool = True,
        role_boundaries: list[dict[str, Any]] | None = None,
        on_untrainable: OnUntrainable = "drop",
        packing: bool = False,
        group_by_length: bool = False,
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
        self.specs = _specs(dataset)
        shared: dict[str, Any] = {
            "family": family,
            "chat_template": chat_template,
            "template_kwargs": chat_template_kwargs or {},
            "processor_kwargs": processor_kwargs or {},
            "train_on_inputs": train_on_inputs,
            "roles_to_train": roles_to_train,
            "train_on_eos": train_on_eos,
            "train_on": train_on,
            "train_thinking": train_thinking,
            "role_boundaries": role_boundaries,
            "on_untrainable": on_untrainable,
            "max_length": max_length,
        }
        self.settings = [ChatSettings(**shared | spec.masking) for spec in self.specs]
        self.tokenizer_name = tokenizer
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.batch_size = batch_size
        self.packing = packing
        self.group_by_length = group_by_length
        self.val_fraction = val_fraction
        self.seed = seed
        self.num_workers = num_workers
        self.cache_dir = DEFAULT_CACHE_DIR if cache_dir is None else Path(cache_dir).expanduser()
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.reports: list[DatasetReport] = []
        self.examples: dict[str, list[Sequence[Encoded]]] = {}
        self._splits: list[dict[str, Any]] | None = None
        self._chats: Chats | None = None
        self._loader: TrainLoader | None = None
        self._state: dict[str, Any] = {}

    def prepare_data(self) -> None:
        """Trains the tokenizer into the cache if none was given: once per node."""
        if self.tokenizer_name is None:
            self._trained_tokenizer_folder()

    def setup(self, stage: str) -> None:
        """Loads the tokenizer, proves the mask on it, and encodes what the stage reads, in every process."""
        splits = self._read_splits()
        if self._chats is None:
            self.tokenizer = load_tokenizer(self.tokenizer_name or self._trained_tokenizer_folder())
            self._chats = Chats(self.tokenizer, self.tokenizer_name)
        for name in _STAGE_SPLITS[stage]:
            if name not in self.examples:
                self.examples[name] = [
                    self._encode(index, _with_all_splits(parts, self.val_fraction, self.seed)[name], name)
                    for index, parts in enumerate(splits)
                ]

    def train_dataloader(self) -> TrainLoader:
        """Batches in an order that depends on seed and epoch alone, from where training stands."""
        world_size, rank = (1, 0) if self.trainer is None else (self.trainer.world_size, self.trainer.global_rank)
        sampler = EpochSampler(
            self._blocks("train"),
            self.batch_size,
            seed=self.seed,
            group_by_length=self.group_by_length,
            rank=rank,
            world_size=world_size,
        )
        self._loader = TrainLoader(
            self._joined("train"),
            sampler,
            self._collator("train"),
            num_workers=self.num_workers,
            pin_memory=self._pins,
            trainer=self.trainer,
        )
        if self._state:
            self._loader.load_state_dict(self._state)
            self._state = {}
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        """Where training stands in the data, and what that depends on."""
        return self._state if self._loader is None else self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there.

        Raises:
            ValueError: In the middle of an epoch, where the batches are no longer those of the checkpoint.
        """
        self._state = dict(state_dict)
        if self._loader is not None and self._state:
            self._loader.load_state_dict(self._state)

    def largest_batch(self) -> Batch:
        """The longest training rows, as many as a batch holds, but for the last one, which is the shortest.

        No batch of any epoch has more tokens, with padding; and as there is padding, models keep what it takes to mask
        it. Of rows with images, the size of which is not known before, those with the most images among the first ones
        stand for the longest. The strategy "protrain" makes its plan with it.
        """
        blocks = self._blocks("train")
        world_size = 1 if self.trainer is None else self.trainer.world_size
        count = min(self.batch_size, -(-len(blocks) // world_size))
        sizes = [_sizes(part, self.max_length) for part in self.examples["train"]]
        weights = np.add.reduceat(np.concatenate(sizes)[blocks.examples], blocks.offsets[:-1])
        # Packed rows share no batch with others.
        order = np.argsort(-weights, kind="stable")
        order = order[blocks.packed[order] == blocks.packed[order[0]]]
        rows = Rows(self._joined("train"), blocks)
        batch = self._collator("train")([rows[int(row)] for row in (*order[: count - 1], order[-1])])
        return {**batch, "trained_tokens": torch.tensor(count_trained([batch]))}

    def val_dataloader(self) -> DataLoader[Row]:
        """Batches in the order of the data."""
        return self._in_order("validation")

    def test_dataloader(self) -> DataLoader[Row]:
        """Batches in the order of the data."""
        return self._in_order("test")

    def predict_dataloader(self) -> DataLoader[Row]:
        """The batches of `test_dataloader`."""
        return self._in_order("test")

    def show(self, num: int) -> list[Shown]:
        """The first training conversations of each data set, for people to look at.

        Args:
            num: How many of each.
        """
        assert self._chats is not None, "setup comes first"
        assert self.tokenizer is not None
        shown = []
        for spec, settings, examples in zip(self.specs, self.settings, self.examples["train"], strict=True):
            kind = self._chats.kinds(settings, isinstance(examples, ImageRows))
            for index in range(min(num, len(examples))):
                encoded: Encoded = examples[index]
                title = f"{spec.label}, conversation {index + 1}"
                shown.append(show(title, self.tokenizer, encoded.input_ids, encoded.trained, kind(encoded.input_ids)))
        return shown

    def _encode(self, index: int, rows: Any, split: str) -> Sequence[Encoded]:
        assert self._chats is not None
        spec, settings = self.specs[index], self.settings[index]
        name = f"{spec.label}, {split}"
        examples: Sequence[Encoded]
        try:
            examples, report = encode_rows(rows, self._chats.encoder(settings), name)
        except HasImages:
            images = self._chats.image_encoder(settings)
            examples = ImageRows(rows, images, name)
            report = DatasetReport(name, images.chat.markers.family, len(rows))
        if split == "train" and rows.malformed.count:
            report = replace(report, dropped=(*report.dropped, ("malformed", rows.malformed.count)))
        rank_zero_info(report.describe())
        self.reports.append(report)
        return examples

    @property
    def _pins(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    def _joined(self, split: str) -> Any:
        parts = self.examples[split]
        return parts[0] if len(parts) == 1 else ConcatDataset(parts)  # type: ignore[arg-type]

    def _blocks(self, split: str) -> Blocks:
        lengths = np.concatenate([_lengths(part, self.max_length) for part in self.examples[split]])
        if split == "train":
            repeats = [
                np.tile(np.arange(len(part)), spec.repeat) + begin
                for part, spec, begin in zip(self.examples[split], self.specs, self._begins(split), strict=True)
            ]
            order = np.concatenate(repeats)
        else:
            order = np.arange(len(lengths))
        if not (self.packing and split == "train"):
            return _of(single_blocks(lengths[order]), order)
        alone = np.concatenate([np.full(len(part), not _are_texts(part)) for part in self.examples[split]])
        return _of(pack(lengths[order], self.max_length, alone=alone[order], seed=self.seed), order)

    def _begins(self, split: str) -> list[int]:
        sizes = [len(part) for part in self.examples[split]]
        return [sum(sizes[:index]) for index in range(len(sizes))]

    def _collator(self, split: str) -> Collator:
        assert self.tokenizer is not None, "setup comes first"
        pad = self.tokenizer.pad_token_id
        weighted = any(getattr(part, "is_weighted", False) for part in self.examples[split])
        return Collator(0 if pad is None else int(pad), self.max_length, weighted=weighted)

    def _in_order(self, split: str) -> DataLoader[Row]:
        return DataLoader(
            Rows(self._joined(split), self._blocks(split)),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=self._collator(split),
            pin_memory=self._pins,
            # Without its own generator each iterator draws from the global one, and dropout changes with it.
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _read_splits(self) -> list[dict[str, Any]]:
        if self._splits is None:
            self._splits = [
                load_splits(spec, None if settings.options.train_on_inputs else settings.options.roles)
                for spec, settings in zip(self.specs, self.settings, strict=True)
            ]
        return self._splits

    def _trained_tokenizer_folder(self) -> Path:
        rows = list(chain.from_iterable(part for parts in self._read_splits() for part in parts.values()))
        return cached_tokenizer_folder(rows, self.vocab_size, self.cache_dir)


def _specs(dataset: Any) -> list[DatasetSpec]:
    given = dataset if isinstance(dataset, list) else [dataset]
    if not given:
        raise ValueError("dataset is empty: name at least one data set.")
    return [one if isinstance(one, DatasetSpec) else DatasetSpec(path=one) for one in given]


def _with_all_splits(splits: Mapping[str, Any], val_fraction: float, seed: int) -> dict[str, Any]:
    found = dict(splits)
    if "validation" not in found:
        train, validation = split_indices(len(found["train"]), val_fraction, seed)
        found["train"], found["validation"] = found["train"].select(train), found["train"].select(validation)
    found.setdefault("test", found["validation"])
    return found


def _are_texts(part: Sequence[Encoded]) -> bool:
    return not isinstance(part, ImageRows)


def _sizes(part: Any, unknown: int) -> Any:
    """Of texts their lengths; of rows with images, those with the most images first."""
    if _are_texts(part):
        return part.lengths
    images = [len(part.rows[index].get("images", ())) for index in range(min(len(part), _LOOK_AT))]
    return np.concatenate((unknown + np.array(images, dtype=np.int64), np.zeros(len(part) - len(images), np.int64)))


def _lengths(part: Any, unknown: int) -> Any:
    return part.lengths if _are_texts(part) else np.full(len(part), unknown, dtype=np.int64)


def _of(blocks: Blocks, order: Any) -> Blocks:
    """The same blocks, of the examples at these places."""
    return Blocks(order[blocks.examples], blocks.offsets, blocks.lengths, blocks.packed)
