"""`ChatDataModule`: makes batches of conversations, plain text or preferences, with labels on what is trained."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, DataLoader
from transformers import PreTrainedTokenizerBase

from lightning_protrain.data.batches.encode import UNCUT, Encoded, EncodedRows, HasMedia, OnUntrainable, encode_rows
from lightning_protrain.data.batches.loader import Batch, BatchRow, BatchRows, Collator, TrainLoader, count_trained
from lightning_protrain.data.batches.media_rows import MediaRows, media_rows
from lightning_protrain.data.batches.pack import Blocks, pack, pair_blocks, single_blocks
from lightning_protrain.data.batches.preview import PreviewedConversation, show
from lightning_protrain.data.batches.sampler import EpochSampler, ShareSampler
from lightning_protrain.data.batches.stream import (
    MOST_ROWS,
    BatchStream,
    StreamedData,
    StreamLoader,
    StreamOrder,
    check_position,
    check_streams,
    full_batch,
    stream_length,
)
from lightning_protrain.data.batches.token_cache import (
    CACHE_DIR,
    keep_tokens,
    load_tokens,
    token_folder,
    tokenizer_digest,
)
from lightning_protrain.data.batches.tokenizer import (
    cached_tokenizer_folder,
    day_of_checkpoint,
    load_tokenizer,
    pack_files,
)
from lightning_protrain.data.chat.pipeline import ChatEncoders, ChatSettings
from lightning_protrain.data.sources.dataset import PLAIN_TEXT, DatasetReport
from lightning_protrain.data.sources.load import Source, missing_files
from lightning_protrain.data.sources.spec import DatasetSpec, check_roles, check_weights, dataset_spec

# Sizes that ProTrainStrategy can choose.
_SIZES = ("max_length", "batch_size")
# What follows the name of each of the two sides of a row in the preview.
_SIDES: Mapping[str, tuple[str, ...]] = {
    "pair": (", chosen", ", rejected"),
    "labelled completion": ("", ", with another answer"),
}
# Map from a stage of the Trainer to the splits that it reads.
_STAGE_SPLITS = {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",), "predict": ("test",)}


class ChatDataModule(LightningDataModule):
    """Conversations with the loss on the assistant's turns; plain text; or judged answers for PreferenceModule.

    A batch is a dict of int64 tensors of shape [batch, length]: `input_ids`, `labels`, and `attention_mask`, or
    `position_ids` if conversations share a row. Labels are not shifted; untrained tokens have the label -100. The two
    sides of a pair are two rows, see `Collator`. Equal arguments give bitwise equal batches, for any number of workers.

    Args:
        dataset: A `DatasetSpec`, a mapping of its attributes, its `path`, or a list of these; "stdlib" means the
            docstrings of Python's standard library.
        tokenizer: Folder, GGUF file, `package://NAME/FILE` for a file of an installed package, or name on the Hugging
            Face Hub. If the data has media, the model's processor is loaded from there. None trains a byte-level BPE
            on the data.
        vocab_size: Number of tokens of the trained tokenizer, if `tokenizer` is None.
        max_length: Maximum number of tokens; longer conversations are cut. `"auto"` cuts none, or at the longest length
            that ProTrainStrategy can train.
        batch_size: Number of rows in a batch on each device; `"auto"` is the number with which ProTrainStrategy expects
            to train most tokens per second, or 1 without training. A resumed run keeps the numbers it was saved with.
        family: Chat format whose markers delimit turns, such as "chatml". None detects it from the chat template.
        chat_template: Jinja template, or path of a template, that replaces the tokenizer's; or the name of one of the
            tokenizer's templates. The trained model is saved with it.
        chat_template_kwargs: Further variables of the template, for example `enable_thinking`.
        processor_kwargs: Settings that replace settings of the model's processor, for example `max_pixels`.
        train_on_inputs: True trains everything, including the turns of users.
        roles_to_train: Roles whose turns are trained; None means the assistant. An empty list trains nothing.
        train_on_eos: Turns whose end token is trained: every trained turn (`turn`), `all` turns, the `last` turn, or
            `none`.
        train_on: `all` turns of the trained roles, or only the `last_turn` of each conversation.
        train_thinking: True trains reasoning.
        role_boundaries: Markers that delimit turns, which replace the markers of `family`: a list of mappings with
            `role` and `start`, and optionally `end`, `include_start` and `include_end`.
        on_untrainable: Treatment of a conversation without a trained token, or whose turns cannot be assigned to
            messages: `error` raises, `drop` leaves it out, `warn` keeps it.
        packing: True packs several rows of the data into a row of a batch, except conversations with media. None packs
            if all training rows are documents of plain text.
        group_by_length: True makes batches of conversations with similar lengths.
        val_fraction: Fraction of the conversations for validation, if a data set has no split "validation"; 0 trains on
            all, and nothing is validated. Without a split "test", testing and prediction read the validation split.
        seed: Seed of the validation split and of the order of every epoch.
        num_workers: Number of processes that make batches; 0 makes them in the main process.
        cache_dir: Folder for tokens and trained tokenizers; None means `~/.cache/lightning_protrain`.
        new_tokens: Special tokens of the chat template to add to the tokenizer. CausalLMModule adds rows for them to
            embedding and head, and trains these rows, also with `lora`. None adds no tokens.
        add_eos: True ends each document and completion of plain text with the tokenizer's end token.

    Attributes:
        tokenizer: The tokenizer, after `setup`; its chat template is the one that is trained.
        examples: Tokenized rows by split, one sequence for each data set, after `setup`.

    Raises:
        ValueError: If a number is out of range or a choice is unknown. `prepare_data` and `setup` raise it if data or
            tokenizer cannot be used.
    """

    # Date that templates write, in ISO format; None before the run has one.
    _day: str | None = None
    # Files of tokenizer and processor, see `pack_files`; None before the first checkpoint.
    _files: torch.Tensor | None = None
    # Folder of the tokenizer that is trained on the data; None before it is needed.
    _trained_folder: Path | None = None
    # Loader of the training rows; None before it is needed.
    _loader: TrainLoader | StreamLoader | None = None

    def __init__(
        self,
        # Without `Path` in the annotation, the command line would parse the data file as a config file.
        dataset: str | Path | DatasetSpec | list[str | Path | DatasetSpec] = "stdlib",
        tokenizer: str | None = None,
        vocab_size: int = 4096,
        max_length: int | Literal["auto"] = 512,
        batch_size: int | Literal["auto"] = 8,
        family: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        processor_kwargs: dict[str, Any] | None = None,
        train_on_inputs: bool = False,
        roles_to_train: list[str] | None = None,
        train_on_eos: Literal["turn", "all", "last", "none"] = "turn",
        train_on: Literal["all", "last_turn"] = "all",
        train_thinking: bool = True,
        role_boundaries: list[dict[str, Any]] | None = None,
        on_untrainable: OnUntrainable = "drop",
        packing: bool | None = None,
        group_by_length: bool = False,
        val_fraction: float = 0.05,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
        new_tokens: list[str] | None = None,
        add_eos: bool = True,
    ) -> None:
        super().__init__()
        sizes = {"max_length": max_length, "batch_size": batch_size}
        self._auto = [name for name, size in sizes.items() if size == "auto"]
        self._open = list(self._auto)  # Those that the strategy has not chosen yet.
        _check_counts(1, **{name: sizes[name] for name in sizes if name not in self._auto})
        self.max_length: int = UNCUT if max_length == "auto" else max_length
        self.batch_size: int = 1 if batch_size == "auto" else batch_size
        _check_counts(0, num_workers=num_workers, seed=seed)
        if not 0 <= val_fraction < 1:
            raise ValueError(f"val_fraction={val_fraction}: give a share from 0 to below 1; 0 trains on all rows.")
        self.new_tokens = _checked_tokens(new_tokens)
        self.specs = _specs(dataset)
        self.streams = check_streams(self.specs, tokenizer, max_length, group_by_length, num_workers)
        shared: dict[str, Any] = {
            "family": family,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "processor_kwargs": processor_kwargs,
            "train_on_inputs": train_on_inputs,
            "roles_to_train": roles_to_train,
            "train_on_eos": train_on_eos,
            "train_on": train_on,
            "train_thinking": train_thinking,
            "role_boundaries": role_boundaries,
            "on_untrainable": on_untrainable,
            "max_length": self.max_length,
            "add_eos": add_eos,
        }
        self.settings = [_settings(shared | spec.masking) for spec in self.specs]
        for spec, settings in zip(self.specs, self.settings, strict=True):
            check_roles(spec, settings.options.roles, settings.roles)
        self.processor_kwargs = dict(processor_kwargs or {})
        if tokenizer is None and any(chat.processor_kwargs for chat in self.settings):
            raise ValueError("processor_kwargs needs a processor: give the `tokenizer` of a model for images and text.")
        self.tokenizer_name = None if tokenizer is None else str(tokenizer)
        self.vocab_size = vocab_size
        self.packing = packing
        self.group_by_length = group_by_length
        self.val_fraction = val_fraction
        self.seed = seed
        self.num_workers = num_workers
        self.cache_dir = CACHE_DIR if cache_dir is None else Path(cache_dir).expanduser()
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.examples: dict[str, list[Sequence[Encoded]]] = {}
        # Template that replaces the tokenizer's in the saved model; None if the tokenizer's is trained.
        self._template = _settings(shared).template
        self._reports: dict[str, list[DatasetReport]] = {}
        self._dated: set[str] = set()  # Splits with tokens that depend on the date.
        self._tokenizer_digest = ""
        self._chats: ChatEncoders | None = None
        self._state: dict[str, Any] = {}

    def prepare_data(self) -> None:
        """Train a tokenizer if none was given, and cache the tokens of the stage's splits, once per node.

        Conversations with media are not cached; `setup` tokenizes them.
        """
        self._tokenizer_folder()
        if self.trainer is not None and self.trainer.state.fn is not None:
            # The data module of an `Evaluator` is not the Trainer's; it is used for validation only.
            stage = self.trainer.state.fn.value if getattr(self.trainer, "datamodule", None) is self else "validate"
            self._reopen(stage)
            self._encode_stage(stage, texts_only=True)

    def setup(self, stage: str) -> None:
        """Load the tokenizer, and load or make the tokens of the stage's splits.

        Raises:
            ValueError: If data or tokenizer cannot be used, or the strategy does not choose the sizes that are "auto".
        """
        self._reopen(stage)
        if stage == "fit" and self.trainer is not None:
            self._refuse_open()
            if self.streams:
                stream_length(self.trainer)
        day = self._load_chats().date.day
        if getattr(self.trainer, "datamodule", None) is self:  # At midnight, ranks may have different dates.
            assert self.trainer is not None
            day = self.trainer.strategy.broadcast(day)
        self._set_day(day)
        self._encode_stage(stage)

    def train_dataloader(self) -> TrainLoader | StreamLoader:
        """Return a loader that resumes at the present batch; its order depends only on seed and epoch.

        Raises:
            ValueError: If a size is "auto", and no strategy chooses it.
        """
        self._refuse_open()
        rank, world_size = self._place
        if self.streams:
            former, trainer = self._loader, self.trainer
            self._loader = StreamLoader(self._stream(), trainer, self.num_workers, self._pins)
            # A Trainer goes on in the stream when it reloads loaders between epochs, and in a further fit.
            if isinstance(former, StreamLoader) and trainer and trainer.training and former.trainer is trainer:
                self._state = former.state_dict()
        else:
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

    def teardown(self, stage: str) -> None:
        """Tell how many rows of a stream this rank has read and left out; other ranks have read other rows."""
        if stage == "fit" and isinstance(self._loader, StreamLoader):
            for counts in self._loader.close():
                logging.getLogger("lightning.pytorch").info(counts)

    def _stream(self) -> BatchStream:
        assert self._chats is not None, "setup comes first"
        data = [
            StreamedData(source.spec, source.shards, source.row_format, self._chats.row_encoder(settings, row), row)
            for source, settings in zip(self._sources, self.settings, strict=True)
            for row in source.first_rows[:1]
        ]
        return BatchStream(data, self._stream_order, self._collator("train"))

    @property
    def _stream_order(self) -> StreamOrder:
        return StreamOrder(self.batch_size, self.max_length, self.packs, self.seed, *self._place)

    @property
    def reports(self) -> list[DatasetReport]:
        """Counts of kept and dropped conversations, for each data set and split, after `setup`."""
        return list(chain.from_iterable(self._reports.values()))

    @property
    def objective(self) -> Literal["tokens", "pairs", "unpaired"]:
        """Objective, after `setup`: tokens, pairs of a chosen and a rejected answer, or labelled answers."""
        units = {report.unit for report in self._reports.get("train", self.reports)}
        return "pairs" if "pair" in units else "unpaired" if "labelled completion" in units else "tokens"

    @property
    def packs(self) -> bool:
        """True if rows of batches are packed, after `setup`; the option `packing` decides, or the kind of data."""
        if self.packing is not None:
            return self.packing
        return all(report.unit == "document" for report in self._reports.get("train", self.reports))

    def pair_count(self, split: str) -> int:
        """Return the number of pairs, or of labelled answers, of a split, after `setup`."""
        return sum(len(part) for part in self.examples.get(split, ())) // 2

    def pair_batches(self, split: str) -> DataLoader[BatchRow]:
        """Return this rank's share of the pairs of a split, each pair once, in the order of the data."""
        return self._in_order(split)

    @property
    def end_ids(self) -> list[int]:
        """Ids of the trained tokens that end what the assistant says, after `setup` for a fit."""
        return sorted({index for report in self._reports.get("train", []) for index in report.end_ids})

    def prompt_ids(self, text: str) -> list[int]:
        """Return the tokens of a user message with the generation prompt, as in training, after `setup`.

        If the data is plain text, the message is a text to continue.

        Raises:
            ValueError: If there is no chat template, or it refuses the message.
        """
        settings, chats = self.settings[0], self._load_chats()
        if self.reports and all(report.family == PLAIN_TEXT for report in self.reports):
            return chats.text_encoder(settings).prompt_ids(text)
        template = settings.template or getattr(self.processor, "chat_template", None)
        renderer = chats.renderer(settings.template_kwargs, template)
        return renderer.ids([{"role": "user", "content": text}], add_generation_prompt=True)

    @property
    def processor(self) -> Any:
        """The model's processor with `processor_kwargs`, after `setup`; None if the data has no media."""
        has_media = any(isinstance(part, MediaRows) for parts in self.examples.values() for part in parts)
        if self._chats is None or not (has_media or self.processor_kwargs):
            return None
        processor = self._chats.processor(self.processor_kwargs)
        if self._template is not None:
            processor.chat_template = processor.tokenizer.chat_template = self._template
        return processor

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, the settings for which it is valid, and the format that is trained.

        The format is complete, because the tokenizer's folder may change or be removed: the files of tokenizer and
        processor, the tokens that end what the assistant says, and the date that templates write.
        """
        loader = self._loader
        state = self._state if loader is None else loader.state_dict()
        state = loader.state_of_ranks() if isinstance(loader, StreamLoader) else state
        if self.processor_kwargs:
            state = {**state, "processor_kwargs": self.processor_kwargs}
        state = {**state, "sizes": {name: getattr(self, name) for name in _SIZES if name not in self._open}}
        if self._chats is None:
            return state
        if self._files is None:
            self._files = pack_files(*(part for part in (self.tokenizer, self.processor) if part is not None))
        chat_format = {"files": self._files, "end_ids": self.end_ids, "day": self._day, "templates": self._templates()}
        return {**state, "chat_format": chat_format}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the date and the position in the epoch that `state_dict` saved; encode again with that date.

        Raises:
            ValueError: If the position is within an epoch, and data or settings have changed since it was saved.
        """
        saved = state_dict.get("chat_format", {})
        self._state = {key: state_dict[key] for key in state_dict.keys() - {"processor_kwargs", "chat_format", "sizes"}}
        check_position(self._state, self.streams)
        if "day" in saved:
            for split in self._set_day(saved["day"]):
                rank_zero_info(f"The chat template writes the date of the run's first start, {self._day}.")
                self._encode_split(split)
        for name, size in state_dict.get("sizes", {}).items():
            if name in self._open:
                rank_zero_info(f'{name}="auto" is {size:,}, as in the checkpoint.')
                self.take_size(name, size)
        fits = self.trainer is None or self.trainer.state.fn == "fit"
        if self._chats is not None and fits and saved.get("templates", self._templates()) != self._templates():
            within = 0 < self._state.get("position", 0) < self._state.get("num_batches", 0)
            changed = "The chat template of this run is not the one that the checkpoint was trained with."
            if within:
                raise ValueError(f"{changed} Give that one as `chat_template`, or resume from the end of an epoch.")
            rank_zero_warn(f"{changed} The saved model will have the template of this run.")
        if self._loader is not None and self._state:
            self._loader.load_state_dict(self._state)

    def largest_batch(self) -> Batch:
        """Return a batch at least as large, in padded tokens, as any training batch; ProTrain plans memory with it.

        The batch has the longest training row, and the rows with the most image, audio and video tokens. Without such
        tokens, it has the longest rows and the shortest row: the padding of the shortest row makes models save masks.
        For a stream, it has `batch_size` rows of `max_length` tokens.
        """
        if self.streams:
            batch = full_batch(self.examples["train"][0][0].input_ids, self._stream_order, self._collator("train"))
            return {**batch, "trained_tokens": torch.tensor(count_trained([batch]))}
        blocks = self._blocks("train")
        count = min(self.batch_size, -(-len(blocks) // self._place[1]))
        media = np.concatenate([_num_media(part) for part in self.examples["train"]])[blocks.examples]
        media = np.add.reduceat(media, blocks.offsets[:-1])
        longest = int(np.lexsort((-media, -blocks.lengths))[0])
        order = np.lexsort((-blocks.lengths, -media))
        # A batch has either packed rows or unpacked rows.
        order = order[(blocks.packed[order] == blocks.packed[longest]) & (order != longest)]
        others = order if len(order) < count or media.any() else [*order[: count - 2], order[-1]]
        rows = BatchRows(self._joined("train"), blocks)
        batch = self._collator("train")([rows[int(row)] for row in (longest, *others)][:count])
        if batch["input_ids"].shape[1] > self.max_length:  # `try_size` has reduced it; then all tensors have one shape.
            batch = {name: tensor[:, : self.max_length].contiguous() for name, tensor in batch.items()}
        return {**batch, "trained_tokens": torch.tensor(count_trained([batch]))}

    def open_sizes(self) -> Mapping[str, tuple[int, int]]:
        """Return the least and the greatest size to choose, by name, of those that are "auto" and not chosen yet.

        The length is at most that of the longest training row. A row with media cannot be cut anywhere, so then it is
        the only length.
        """
        longest = self._longest("train")
        most = MOST_ROWS if self.streams else -(-len(self._blocks("train")) // self._place[1])
        sizes = {"max_length": (longest if self.rows_with_media() else 1, longest), "batch_size": (1, most)}
        return {name: sizes[name] for name in self._open}

    def try_size(self, name: str, size: int) -> None:
        """Make `largest_batch` return a batch of this size.

        Args:
            name: `"max_length"` or `"batch_size"`.
            size: Number of tokens, or of rows.
        """
        setattr(self, name, size)

    def take_size(self, name: str, size: int) -> None:
        """Train with this size from now on; conversations that are longer are encoded again.

        Args:
            name: `"max_length"` or `"batch_size"`.
            size: Number of tokens, or of rows.
        """
        self._open.remove(name)
        self._loader = None
        self.batch_size = size if name == "batch_size" else self.batch_size
        if name == "max_length":
            self._cut(size)

    def limit_length(self, most: int | None) -> None:
        """Cut conversations at `most` tokens, the positions of the model, if `max_length` is "auto"; None: no limit."""
        if most is not None and "max_length" in self._open and not self.rows_with_media():
            self._cut(most)

    def _reopen(self, stage: str) -> None:
        """Leave the sizes to the fit that begins, which may have another budget than the former."""
        if stage == "fit" and self._auto != self._open:
            self._open = list(self._auto)
            self._loader = None
            self.batch_size = 1 if "batch_size" in self._open else self.batch_size
            if "max_length" in self._open:
                self.examples.clear()
                self._reports.clear()
                self._cut(UNCUT)

    def _cut(self, length: int) -> None:
        longest = self.longest_row()
        self.max_length = length
        self.settings = [replace(settings, max_length=length) for settings in self.settings]
        for split in list(self.examples) if longest > length else ():
            self._encode_split(split)

    def _refuse_open(self) -> None:
        """Refuse to train with sizes that nobody chooses."""
        strategy = None if self.trainer is None else self.trainer.strategy
        if self._open and not getattr(strategy, "chooses_sizes", False):
            name = "there is no Trainer" if strategy is None else f"the Trainer has {type(strategy).__name__}"
            raise ValueError(
                f'{self._open[0]}="auto" is chosen by ProTrainStrategy during `fit`, and {name}. Give a number, or set '
                'strategy="protrain".'
            )

    def known_size(self, name: str) -> int | None:
        """Return `"max_length"` or `"batch_size"`; None if it is "auto" and not chosen yet."""
        return None if name in self._open else getattr(self, name)

    def longest_row(self) -> int:
        """Return the number of tokens of the longest conversation in `examples`, with its padding in a batch."""
        return self._longest(*self.examples)

    def _longest(self, *splits: str) -> int:
        if self.streams and "train" in splits:
            return self.max_length
        parts: Any = chain.from_iterable(self.examples[split] for split in splits)
        return Collator(0, self.max_length).padded(max((int(part.lengths.max(initial=0)) for part in parts), default=0))

    def rows_with_media(self) -> list[Encoded]:
        """Return examples with media, at least one for each kind of media in `examples`."""
        rows: dict[str, Encoded] = {}
        for part in chain.from_iterable(self.examples.values()):
            if isinstance(part, MediaRows):
                for kind in sorted(part.kinds.keys() - rows.keys()):
                    rows[kind] = part[part.kinds[kind]]
        return list(rows.values())

    def missing_files(self) -> list[str]:
        """Return the local paths in `dataset` that do not exist."""
        return list(chain.from_iterable(map(missing_files, self.specs)))

    @property
    def validates(self) -> bool:
        """True if there are validation rows, after `setup`."""
        return bool(self.examples.get("validation"))

    def val_dataloader(self) -> DataLoader[BatchRow] | list[Any]:
        """Return this rank's validation batches, in the order of the data; no row is repeated among ranks.

        Without validation rows, return an empty list, for which the Trainer runs no validation.
        """
        return self._in_order("validation") if self.validates else []

    def test_dataloader(self) -> DataLoader[BatchRow]:
        """Return this rank's test batches, in the order of the data; no row is repeated among ranks."""
        return self._in_order("test")

    def predict_dataloader(self) -> DataLoader[BatchRow]:
        """Return the batches of `test_dataloader`."""
        return self._in_order("test")

    def show(self, num: int) -> list[PreviewedConversation]:
        """Return the first `num` training conversations of each data set for a preview; fills `reports`."""
        self._encode_stage("fit", announces=False)
        assert self._chats is not None
        assert self.tokenizer is not None
        shown = []
        for report, settings, examples in zip(
            self._reports["train"], self.settings, self.examples["train"], strict=True
        ):
            names = _SIDES.get(report.unit, ("",))
            unit = "piece" if report.unit == "document" else report.unit
            kind = self._chats.kinds(settings, isinstance(examples, MediaRows), report.family == PLAIN_TEXT)
            for index in range(min(num * len(names), len(examples))):
                encoded: Encoded = examples[index]
                number, side = divmod(index, len(names))
                title = f"{report.name.rpartition(', ')[0]}, {unit} {number + 1}{names[side]}"
                preview = show(title, self.tokenizer, encoded.input_ids, encoded.trained, kind(encoded.input_ids))
                if isinstance(examples, MediaRows):
                    preview = replace(preview, thumbnails=examples.thumbnails(index))
                shown.append(preview)
        return shown

    def _load_chats(self) -> ChatEncoders:
        """Load the tokenizer, and give it the chat template that is trained."""
        if self._chats is None:
            self.tokenizer = load_tokenizer(self._tokenizer_folder(), self.new_tokens)
            loaded = getattr(self.tokenizer, "chat_template", None)
            if isinstance(loaded, dict):  # `chat_template` may be the name of one of them.
                self.settings = [
                    replace(chat, chat_template=loaded.get(chat.template, chat.chat_template)) for chat in self.settings
                ]
                self._template = loaded.get(self._template, self._template)
            self._template = self._choose_template()
            if self._template is not None:
                self.tokenizer.chat_template = self._template
            self._tokenizer_digest = tokenizer_digest(self.tokenizer)
            # The data module of an `Evaluator` has the date of the run.
            main = getattr(self.trainer, "datamodule", None)
            self._day = main._day if isinstance(main, ChatDataModule) else self._day
            if self._day is None and "strftime_now" in str([loaded, *(chat.template for chat in self.settings)]):
                self._day = day_of_checkpoint()
            self._chats = ChatEncoders(self.tokenizer, self.tokenizer_name, self._day, self.new_tokens)
            self._day = self._chats.date.day
            for settings in self.settings:
                if settings.processor_kwargs:  # Report wrong settings before data is read.
                    self._chats.processor(settings.processor_kwargs)
        return self._chats

    def _choose_template(self) -> str | None:
        """Return the template for the saved model; None keeps the tokenizer's.

        It is that of all data sets. If they differ, it is the option `chat_template`, or the tokenizer's if a data set
        is trained with it, or that of the first data set.
        """
        templates = list(dict.fromkeys(settings.template for settings in self.settings))
        if len(templates) == 1:
            return templates[0]
        is_kept = self._template is not None or None in templates
        which = "that of `chat_template`" if self._template else "the tokenizer's" if is_kept else "the first"
        rank_zero_info(f"The data sets have different chat templates. The saved model has {which}.")
        return self._template if is_kept else templates[0]

    def _templates(self) -> list[str]:
        """Return the templates that are trained, as hashes."""
        default = getattr(self.processor or self.tokenizer, "chat_template", None)  # A text, or a mapping of names.
        texts = {str(default if settings.template is None else settings.template) for settings in self.settings}
        return sorted(hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)

    def _set_day(self, day: str) -> list[str]:
        """Set the date that templates write; return the splits whose tokens had another date, and drop the tokens."""
        self._day, dropped = day, list[str]()
        if self._chats is not None and self._chats.date.day != day:
            self._chats.date.day = day
            dropped = [split for split in self.examples if split in self._dated]
            self._dated.clear()
            for split in dropped:
                del self.examples[split], self._reports[split]
                self._loader = None
        return dropped

    def _encode_stage(self, stage: str, texts_only: bool = False, announces: bool = True) -> None:
        self._load_chats()
        for name in _STAGE_SPLITS[stage]:
            if name in self.examples:
                continue
            if stage != "fit" and not any(self._has(source, name) for source in self._sources):
                raise ValueError(
                    f"There are no rows to {stage}: val_fraction={self.val_fraction}, and no data set has a split "
                    f'"{name}". Set val_fraction above 0, or give such a split.'
                )
            try:
                self._encode_split(name, texts_only, announces)
            except HasMedia:
                return

    def _encode_split(self, name: str, texts_only: bool = False, announces: bool = True) -> None:
        having = [index for index, source in enumerate(self._sources) if self._has(source, name)]
        parts = [self._encode(index, name, texts_only) for index in having]
        self.examples[name] = [examples for examples, _ in parts]
        self._reports[name] = [report for _, report in parts]
        _check_objective(self._reports[name], self.packing)
        if name == "train" and self.objective == "unpaired":
            _check_labels(self._reports[name][0].name, self.examples[name])
        for report in self._reports[name] if announces else ():
            rank_zero_info(report.describe())

    def _has(self, source: Source, split: str) -> bool:
        """Return True if a data set has a split, or the split is made of its other rows."""
        if self.streams and split == "train":
            return True
        return split in source.tables or "validation" in source.tables or (self.val_fraction > 0 and not self.streams)

    def _encode(self, index: int, split: str, texts_only: bool) -> tuple[Sequence[Encoded], DatasetReport]:
        """Load a split of a data set from the cache, or tokenize and cache it.

        Raises:
            HasMedia: If the split has media and `texts_only` is True.
        """
        assert self._chats is not None
        source, settings = self._sources[index], self.settings[index]
        streamed = self.streams and split == "train"  # Then only the first rows are read, to check them.
        name = f"{source.spec.label}, {'first rows of ' if streamed else ''}{split}"
        # Most templates write no date; their tokens are valid on every day.
        for is_dated in () if streamed else (False, True):
            cached = load_tokens(self._token_folder(source, settings, split, is_dated))
            if cached is not None:
                self._dated |= {split} if is_dated else set()
                return cached[0], replace(cached[1], name=name)
        rows = source.first_rows if streamed else source.with_all_splits(self.val_fraction, self.seed)[split]
        examples: Sequence[Encoded]
        encoder = self._chats.row_encoder(settings, rows[0])
        self._chats.date.was_read = False
        try:
            examples, report = encode_rows(rows, encoder, name)
        except HasMedia:
            if streamed:
                raise ValueError(f"{name}: images, audio and video are not streamed. Set `streaming: false`.") from None
            if texts_only:
                raise
            examples, report = media_rows(rows, self._chats.media_encoder(settings), name)
        if streamed and report.unit in _SIDES:
            raise ValueError(
                f"{source.spec.label!r} has {report.unit}s, which are not streamed. Set `streaming: false`."
            )
        if split == "train" and rows.malformed.count:
            report = replace(
                report,
                dropped=(*report.dropped, ("malformed", rows.malformed.count)),
                dropped_rows=(*report.dropped_rows, *rows.malformed.examples),
            )
        is_dated = self._chats.date.was_read
        self._dated |= {split} if is_dated else set()
        if isinstance(examples, EncodedRows) and not streamed:
            examples = keep_tokens(self._token_folder(source, settings, split, is_dated), examples, report)
        return examples, report

    def _token_folder(self, source: Source, settings: ChatSettings, split: str, is_dated: bool) -> Path:
        """Return the folder for the tokens of a split; `is_dated` is True if they contain the date of the run."""
        return token_folder(
            self.cache_dir,
            tokenizer=self._tokenizer_digest,
            rows=source.fingerprint,
            split=split,
            divided=None if "validation" in source.tables else (self.val_fraction, self.seed),
            settings=(settings, settings.template),
            day=self._day if is_dated else None,
        )

    @property
    def _place(self) -> tuple[int, int]:
        """Rank and number of ranks."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    @property
    def _pins(self) -> bool:
        return self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"

    def _joined(self, split: str) -> Any:
        parts = self.examples[split]
        return parts[0] if len(parts) == 1 else ConcatDataset(parts)  # type: ignore[arg-type]

    def _blocks(self, split: str, in_order: bool = False) -> Blocks:
        """Return the rows of batches of a split; `in_order`: unpacked, and without repeating or weighing data sets."""
        lengths = np.concatenate([part.lengths for part in self.examples[split]])  # type: ignore[attr-defined]
        lengths = np.minimum(lengths, self.max_length)  # After `try_size` they may be longer.
        size = 1 if self.objective == "tokens" else 2
        order = np.arange(len(lengths) // size)
        if split == "train" and not in_order:
            units = [len(part) // size for part in self.examples[split]]
            begins = np.cumsum([0, *units[:-1]])
            order = np.concatenate([rows + begin for rows, begin in zip(self._epoch_rows(units), begins, strict=True)])
        order = (order[:, None] * size + np.arange(size)).ravel()
        if size == 2:
            blocks = pair_blocks(lengths[order])
        elif in_order or split != "train" or not self.packs:
            blocks = single_blocks(lengths[order])
        else:
            alone = np.concatenate([np.full(len(part), isinstance(part, MediaRows)) for part in self.examples[split]])
            blocks = pack(lengths[order], self.max_length, alone=alone[order], seed=self.seed)
        return replace(blocks, examples=order[blocks.examples])

    def _epoch_rows(self, counts: Sequence[int]) -> list[NDArray[np.int64]]:
        """Return the row numbers of each training data set in an epoch, given the number of its rows."""
        if any(spec.weight is None for spec in self.specs):
            return [np.tile(np.arange(count), spec.repeat) for count, spec in zip(counts, self.specs, strict=True)]
        weights = [spec.weight or 0.0 for spec in self.specs]
        # Rows for each unit of weight: as many as the data set needs that has most rows for its weight.
        rate = max(count / weight for count, weight in zip(counts, weights, strict=True))
        rng = np.random.default_rng([self.seed, 1])
        # `resize` repeats what there is.
        return [
            np.resize(rng.permutation(count), round(weight * rate))
            for count, weight in zip(counts, weights, strict=True)
        ]

    def _collator(self, split: str) -> Collator:
        assert self.tokenizer is not None, "setup comes first"
        pad = self.tokenizer.pad_token_id
        weighted = any(getattr(part, "is_weighted", False) for part in self.examples[split])
        return Collator(0 if pad is None else int(pad), self.max_length, weighted=weighted)

    def _in_order(self, split: str) -> DataLoader[BatchRow]:
        rank, world_size = self._place
        rows = BatchRows(self._joined(split), self._blocks(split, in_order=True))
        return DataLoader(
            rows,
            batch_size=self.batch_size,
            sampler=ShareSampler(rows, self.batch_size, rank=rank, world_size=world_size),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=self._collator(split),
            pin_memory=self._pins,
            # An iterator draws a seed from this generator; drawing from the global generator would change dropout.
            generator=torch.Generator().manual_seed(self.seed),
        )

    @cached_property
    def _sources(self) -> list[Source]:
        return [
            Source(spec, None if settings.options.train_on_inputs else settings.options.roles)
            for spec, settings in zip(self.specs, self.settings, strict=True)
        ]

    def _tokenizer_folder(self) -> str | Path:
        """Return `tokenizer_name`, or the folder of a tokenizer that is trained on the data and cached."""
        if self.tokenizer_name is not None:
            return self.tokenizer_name
        if self._trained_folder is None:
            rows = list(chain.from_iterable(part for source in self._sources for part in source.splits.values()))
            self._trained_folder = cached_tokenizer_folder(rows, self.vocab_size, self.cache_dir)
        return self._trained_folder


def _checked_tokens(tokens: Any) -> list[str]:
    texts: Any = () if tokens is None else tokens
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"new_tokens={tokens!r}: give a list of texts, such as ['<|im_start|>'].")
    return list(texts)


def _check_counts(least: int, **counts: Any) -> None:
    for name, value in counts.items():
        if type(value) is bool or not isinstance(value, Integral) or value < least:
            other = ', or "auto"' if name in _SIZES else ""
            raise ValueError(f"{name}={value!r}: give at least {least}{other}.")


def _specs(dataset: Any) -> list[DatasetSpec]:
    datasets = dataset if isinstance(dataset, list) else [dataset]
    if not datasets:
        raise ValueError("`dataset` is empty: name at least one data set.")
    specs = [dataset_spec(entry) for entry in datasets]
    check_weights(specs)
    return [spec for spec in specs if spec.weight != 0]


def _settings(knobs: dict[str, Any]) -> ChatSettings:
    rest = dict(knobs)
    template, processor = rest.pop("chat_template_kwargs"), rest.pop("processor_kwargs")
    return ChatSettings(template_kwargs=template or {}, processor_kwargs=processor or {}, **rest)


def _num_media(part: Sequence[Encoded]) -> NDArray[np.int64]:
    return part.num_media if isinstance(part, MediaRows) else np.zeros(len(part), dtype=np.int64)


def _check_objective(reports: Sequence[DatasetReport], packing: bool | None) -> None:
    """Raise ValueError if data sets cannot be trained together."""
    judged = [report for report in reports if report.unit in ("pair", "labelled completion")]
    if not judged:
        return
    other = next((report for report in reports if report.unit != judged[0].unit), None)
    if other is not None:
        raise ValueError(
            f"{judged[0].name} has {judged[0].unit}s and {other.name} {other.unit}s, which have different losses. "
            "Train one after the other."
        )
    if packing:
        raise ValueError(f"packing: true, but the {judged[0].unit}s of {judged[0].name} are not packed. Remove it.")


def _check_labels(name: str, parts: Sequence[Any]) -> None:
    """Raise ValueError if the labels of training rows are all equal."""
    labels = np.concatenate([part.labels for part in parts])
    if labels.all() or not labels.any():
        raise ValueError(
            f"All {len(labels):,} labels of {name} are {str(bool(labels[0])).lower()}, so nothing tells "
            "desirable from undesirable answers. Add rows with the other label, or train on desirable answers as "
            "conversations with `format`."
        )
