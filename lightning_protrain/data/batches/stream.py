"""Makes training batches of rows that are read, encoded and packed while training, and never stored.

[Note: Streams]
A rank reads its own part of the shards, in a random order of the shards for each epoch. Rows come in *windows* of up to
WINDOW_ROWS rows or WINDOW_TOKENS tokens: the rows of a window are encoded, shuffled (or packed) together, and divided
into batches. So the position of a rank is a few integers: the epoch, shard and row at which the window begins, and the
number of its batches that have been trained. A resumed run opens the shard at this row and makes the window again, bit
for bit. A shuffle buffer of `datasets` could not be restored: its state has no rows. A window ends with the epoch of
the stream, so every row is trained once per epoch. A rank that has read its part begins its next epoch, whatever other
ranks do: `max_steps` ends the training of all ranks at once.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset

from lightning_protrain.config import plural
from lightning_protrain.data.batches.encode import Encoded, RowEncoder, UntrainableError, encode_part
from lightning_protrain.data.batches.loader import (
    Batch,
    BatchRow,
    BatchRows,
    Collator,
    EpochRemainder,
    accumulation_windows,
    count_trained,
    remainder_of_fit,
)
from lightning_protrain.data.batches.pack import WINDOW, pack, single_blocks
from lightning_protrain.data.batches.sampler import EpochSampler
from lightning_protrain.data.conversation import MalformedRow, Row, unit_of
from lightning_protrain.data.sources.row_kinds import RowFormat
from lightning_protrain.data.sources.spec import DatasetSpec
from lightning_protrain.data.sources.tables import Shard

# A window ends after this number of rows, or of tokens if rows are long.
WINDOW_ROWS = WINDOW
WINDOW_TOKENS = 2**22
# Greatest batch size that `batch_size: auto` tries, rows.
MOST_ROWS = 4096
# Rows are encoded together up to this number, or up to this number of characters if they are long.
_ENCODE_AT_ONCE = 512
_CHARACTERS_AT_ONCE = 2**20
# Number of draws from data sets with weights that one random generator makes.
_DRAWS = 4096
# Number of batches that a worker process makes ahead.
_AHEAD = 16
_MALFORMED = "malformed"
_KEPT = "kept"
# Position of a rank, see `BatchStream`: a dict of integers, texts and lists.
_State = dict[str, Any]


@dataclass(frozen=True)
class StreamedData:
    """A data set that is streamed.

    Attributes:
        spec: The user's description of the data set.
        shards: The training rows of all ranks.
        row_format: Converts rows into the common form.
        encoder: Encodes rows.
        first: First row; all rows are of its kind.
    """

    spec: DatasetSpec
    shards: Sequence[Shard]
    row_format: RowFormat
    encoder: RowEncoder
    first: Row

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.spec.label}, train"


@dataclass(frozen=True)
class StreamOrder:
    """The settings that determine the batches of a stream, beside its data.

    Attributes:
        batch_size: Number of rows in a batch.
        max_length: Maximum number of tokens in a row.
        packing: True packs several examples into a row.
        seed: Seed of the order.
        rank: Number of this rank.
        num_ranks: Number of ranks.
    """

    batch_size: int
    max_length: int
    packing: bool = False
    seed: int = 0
    rank: int = 0
    num_ranks: int = 1


def check_streams(
    specs: Sequence[DatasetSpec], tokenizer: str | None, max_length: int | str, group_by_length: bool, num_workers: int
) -> bool:
    """Return True if the data sets are streamed; the arguments are those of `ChatDataModule`.

    Raises:
        ValueError: If only some data sets are streamed, several are streamed without weights, or an option needs all
            rows before training.
    """
    streamed = [spec for spec in specs if spec.streaming]
    if not streamed:
        return False
    name = f"{streamed[0].label!r} is streamed"
    if len(streamed) < len(specs):
        other = next(spec for spec in specs if not spec.streaming)
        raise ValueError(f"{name}, but {other.label!r} is not. Set `streaming: true` for all data sets, or for none.")
    if len(specs) > 1 and any(spec.weight is None for spec in specs):
        raise ValueError(
            f"{name} with {plural(len(specs) - 1, 'other data set')}: give each a `weight`, such as 0.5, because the "
            "numbers of their rows are unknown."
        )
    if tokenizer is None:
        raise ValueError(f"{name}, so no tokenizer can be trained on its rows. Give `tokenizer`.")
    if max_length == "auto":
        raise ValueError(f'{name}, so its longest row is unknown. Give a number in place of max_length="auto".')
    if group_by_length:
        raise ValueError(f"{name}, so its rows cannot be sorted by length. Remove group_by_length, or set packing.")
    if num_workers > 1:
        raise ValueError(
            f"{name}: one process of each rank reads it, and num_workers is {num_workers}. Give num_workers: 1 to read "
            "ahead of training, or 0."
        )
    return True


def check_position(state: Mapping[str, Any], streams: bool) -> None:
    """Raise ValueError if a saved position is one in a stream, and the data is not streamed, or the other way round."""
    was = "states" in state
    if state.get("position") and was != streams:
        now, saved = (str(it).lower() for it in (streams, was))
        raise ValueError(
            f"The checkpoint has a position in data with `streaming: {saved}`, and this run has `streaming: {now}`. "
            "Resume with the former."
        )


def stream_length(trainer: Trainer) -> int:
    """Return the number of batches of a stream that the Trainer counts as an epoch.

    It is that of the whole training, or `limit_train_batches` if the Trainer counts epochs.

    Raises:
        ValueError: If the Trainer has no `max_steps`, or repeats batches.
    """
    limit = trainer.limit_train_batches
    repeated = trainer.overfit_batches  # type: ignore[attr-defined]
    if repeated:
        raise ValueError(
            f"overfit_batches={repeated} repeats batches, but a stream goes on. Set `streaming: false` with `max_rows`."
        )
    if trainer.max_steps >= 0:
        return trainer.max_steps * trainer.accumulate_grad_batches
    if type(limit) is int:
        return limit
    raise ValueError(
        f"A stream has no length, and the Trainer has max_epochs={trainer.max_epochs} and no max_steps. Give "
        "max_steps, the number of optimizer steps, or limit_train_batches, the number of batches of an epoch."
    )


class BatchStream(IterableDataset[tuple[Batch, _State]]):
    """Yields batches without end, each with the position of the rank after it. See [Note: Streams].

    A position is a dict: `places` has epoch, shard (number in the order of the epoch) and row for each data set, at
    which the window begins; `drawn` the number of rows, `window` the number of windows, and `counts` the counts of
    kept, malformed and untrainable rows before it; `batches` the number of batches after its beginning. `seen` has the
    present counts.

    Args:
        data: The data sets.
        order: Settings of the batches.
        collate: Makes a batch of rows.
    """

    def __init__(self, data: Sequence[StreamedData], order: StreamOrder, collate: Collator) -> None:
        self.data = data
        self.order = order
        self.batch_size = order.batch_size
        self.start: _State = {
            "places": [[0, 0, 0] for _ in data],
            "drawn": 0,
            "window": 0,
            "counts": [{} for _ in data],
            "batches": 0,
        }
        self._collate = collate

    def identity(self) -> dict[str, Any]:
        """Return the settings for which a saved position is valid."""
        order = self.order
        return {
            "seed": order.seed,
            "batch_size": order.batch_size,
            "world_size": order.num_ranks,
            "max_length": order.max_length,
            "packing": order.packing,
            "num_shards": [len(data.shards) for data in self.data],
            "weights": [data.spec.weight for data in self.data],
            "window": [WINDOW_ROWS, WINDOW_TOKENS, _CHARACTERS_AT_ONCE],
        }

    def __iter__(self) -> Iterator[tuple[Batch, _State]]:
        """Yield the batches from the position `start` on."""
        reader = _WindowReader(self.data, self.order, self.start)
        trained = self.start["batches"]
        while True:
            begin = reader.state()
            rows, batches = self._batches(reader.window(), begin["window"])
            seen = reader.counts()
            for number in range(trained, len(batches)):
                # After its last batch, the position is the beginning of the next window.
                after = {**begin, "batches": number + 1} if number + 1 < len(batches) else reader.state()
                yield self._collate([rows[row] for row in batches[number]]), {**after, "seen": seen}
            trained = 0

    def _batches(self, examples: list[Encoded], window: int) -> tuple[BatchRows, list[list[int]]]:
        """Return the rows of a window, and the numbers of the rows in each batch."""
        for example in examples:
            if example.weights is not None and not self._collate.weighted:
                raise ValueError(
                    f"{self.data[0].name}: a message has a weight other than 0 and 1, and the first rows of the stream "
                    "have none. Move a row with a weight to the beginning, or remove the weights."
                )
        lengths = np.array([len(example) for example in examples], dtype=np.int64)
        order = self.order
        blocks = pack(lengths, order.max_length, seed=order.seed) if order.packing else single_blocks(lengths)
        rows = BatchRows(examples, blocks)
        return rows, EpochSampler(blocks, order.batch_size, seed=order.seed).batches(window) if examples else []


class _RankRows:
    """The rows of a data set for one rank, again and again; None marks the end of each epoch.

    Args:
        place: Epoch, shard in the order of the epoch, and row, at which to begin; it is kept up to date.
    """

    def __init__(self, data: StreamedData, number: int, order: StreamOrder, place: list[int]) -> None:
        self.place = place
        self._data = data
        self._order = order
        self._seed = [order.seed, number]
        # As in `datasets.distributed.split_dataset_by_node`: divide shards if all ranks get equally many, else rows.
        divides = len(data.shards) % order.num_ranks == 0
        self._numbers = range(len(data.shards))[order.rank :: order.num_ranks] if divides else range(len(data.shards))
        self._every = 1 if divides else order.num_ranks

    def __iter__(self) -> Iterator[tuple[str, Shard, Any] | None]:
        """Yield name, shard and undecoded form of each row."""
        while True:
            epoch, first, start = self.place
            order = np.random.default_rng([*self._seed, epoch]).permutation(len(self._numbers)).tolist()
            any_rows = bool(first or start)
            for position in range(first, len(order)):
                number = self._numbers[order[position]]
                shard = self._data.shards[number]
                for row, raw in enumerate(shard.raws(start), start):
                    self.place[:] = epoch, position, row + 1
                    if (row + number - self._order.rank) % self._every == 0:
                        any_rows = True
                        yield shard.where(row), shard, raw
                self.place[:] = epoch, position + 1, 0
                start = 0
            if not any_rows:
                raise ValueError(
                    f"{self._data.name} has no rows for rank {self._order.rank} of {self._order.num_ranks}. Give more "
                    "data, or train on fewer devices."
                )
            self.place[:] = epoch + 1, 0, 0
            if epoch == 0:
                rank_zero_info(f"{self._data.name} has ended and begins again, in another order.")
            yield None


class _WindowReader:
    """Reads and encodes the rows of windows, from the position `state` on, see `BatchStream`."""

    def __init__(self, data: Sequence[StreamedData], order: StreamOrder, state: _State) -> None:
        self._data = data
        self._drawn: int = state["drawn"]
        self._window: int = state["window"]
        self._counts = [Counter(counts) for counts in state["counts"]]
        self._ranks = [
            _RankRows(part, number, order, list(place))
            for number, (part, place) in enumerate(zip(data, state["places"], strict=True))
        ]
        self._rows = [iter(rows) for rows in self._ranks]
        self._order = order
        weights = np.array([part.spec.weight for part in data]) if len(data) > 1 else np.ones(1)
        self._shares = weights / weights.sum()
        self._choices: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, dtype=np.int64))
        self._warned: set[str] = set()
        self._in_vain = 0  # Number of windows without an example, one after the other.

    def state(self) -> _State:
        """Return the present position, which is the beginning of a window."""
        return {
            "places": [list(rows.place) for rows in self._ranks],
            "drawn": self._drawn,
            "window": self._window,
            "counts": self.counts(),
            "batches": 0,
        }

    def counts(self) -> list[dict[str, int]]:
        """Return the numbers of kept, malformed and untrainable rows of each data set."""
        return [dict(counts) for counts in self._counts]

    def window(self) -> list[Encoded]:
        """Read and encode the rows of the next window; a single data set ends it at the end of its epoch.

        Raises:
            ValueError: If a row is malformed or untrainable and must not be left out, or rows are read in vain.
        """
        examples: list[Encoded] = []
        left, ends = WINDOW_ROWS, False
        while left and not ends and sum(map(len, examples)) < WINDOW_TOKENS:
            drawn, ends = self._draw(min(left, _ENCODE_AT_ONCE))
            left -= len(drawn)
            for number in range(len(self._data)):
                rows = [(where, row) for source, where, row in drawn if source == number and row is not None]
                examples += self._encode(number, rows) if rows else []
        self._window += 1
        self._in_vain = 0 if examples else self._in_vain + (ends or len(self._data) > 1)
        if self._in_vain > 1:
            told = (f"{part.name}: {describe_counts(of)}" for part, of in zip(self._data, self._counts, strict=True))
            raise ValueError(f"{WINDOW_ROWS} rows or a whole epoch had nothing to train on. {', '.join(told)}.")
        return examples

    def _draw(self, count: int) -> tuple[list[tuple[int, str, Row | None]], bool]:
        """Read at most `count` rows; return data set, name and form of each, None if malformed; True at the end."""
        drawn: list[tuple[int, str, Row | None]] = []
        size = 0
        while len(drawn) < count and size < _CHARACTERS_AT_ONCE:
            number = self._choose()
            row = next(self._rows[number])
            if row is None:
                if len(self._data) == 1:
                    return drawn, True
                continue
            self._drawn += 1
            where, shard, raw = row
            drawn.append((number, where, self._parse(number, where, shard, raw)))
            size += len(str(drawn[-1]))
        return drawn, False

    def _choose(self) -> int:
        """Choose the data set of the next row; the choice depends only on seed and number of drawn rows."""
        if len(self._data) == 1:
            return 0
        block, at = divmod(self._drawn, _DRAWS)
        if self._choices[0] != block:
            rng = np.random.default_rng([self._order.seed, block])
            self._choices = block, rng.choice(len(self._data), _DRAWS, p=self._shares)
        return int(self._choices[1][at])

    def _parse(self, number: int, where: str, shard: Shard, raw: Any) -> Row | None:
        data = self._data[number]
        try:
            row = data.row_format.parse(shard.decode(raw, where), where, shard.folder)
            unit, first = unit_of(row), unit_of(data.first)
            if unit != first:
                raise MalformedRow(f"{where}: a {unit}, and the first row of the stream is a {first}. Divide the data.")
        except MalformedRow as error:
            if data.spec.on_malformed == "error":
                raise MalformedRow(f"{error} (`on_malformed: skip` leaves such rows out.)") from error
            self._leave_out(number, _MALFORMED, str(error))
            return None
        if "media" in row:
            raise ValueError(f"{where} has images, audio or video, and only text is streamed. Set `streaming: false`.")
        return row

    def _encode(self, number: int, rows: Sequence[tuple[str, Row]]) -> list[Encoded]:
        data = self._data[number]
        examples: list[Encoded] = []
        for (where, _), result in zip(rows, encode_part([row for _, row in rows], data.encoder), strict=True):
            if isinstance(result, UntrainableError):
                if data.encoder.on_untrainable == "error":
                    raise ValueError(
                        f'{where}: {result}. Correct the row, raise `max_length`, or let `on_untrainable` be "drop".'
                    ) from result
                self._leave_out(number, result.reason, f"{where}: {result}")
                continue
            self._counts[number][_KEPT] += 1
            examples += result if isinstance(result, tuple) else [result]
        return examples

    def _leave_out(self, number: int, reason: str, message: str) -> None:
        self._counts[number][reason] += 1
        if reason not in self._warned:
            self._warned.add(reason)
            name = f"{self._data[number].name}{_on_rank(self._order)}"
            # Other ranks read other rows, so each of them warns.
            warnings.warn(f"Left out a row of {name}, and all further rows that are so: {message}", stacklevel=2)


def _on_rank(order: StreamOrder) -> str:
    return "" if order.num_ranks == 1 else f" on rank {order.rank}"


def describe_counts(counts: Mapping[str, int]) -> str:
    """Return the numbers of kept and left out rows as text."""
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if reason != _KEPT)
    return f"{plural(counts.get(_KEPT, 0), 'row')} read" + (f"; left out: {dropped}" if dropped else "")


def full_batch(tokens: NDArray[np.int32], order: StreamOrder, collate: Collator) -> Batch:
    """Return a batch as large as a stream can have: `batch_size` rows of `max_length` trained tokens.

    A packed row has two segments. An unpacked batch of several rows has a shorter last row: its padding makes models
    save masks.

    Args:
        tokens: Any tokens of the data, which are repeated, int32 of shape [tokens].
        order: Settings of the batches.
        collate: Makes a batch of rows.
    """

    def row(*lengths: int) -> BatchRow:
        sizes = [length for length in lengths if length]
        segments = (Encoded(np.resize(tokens, size), np.ones(size, dtype=np.bool_)) for size in sizes)
        return BatchRow(tuple(segments), order.packing)

    half = order.max_length // 2
    rows = [row(order.max_length - half, half) if order.packing else row(order.max_length)] * order.batch_size
    if order.batch_size > 1 and not order.packing:
        rows[-1] = row(max(half, 1))
    return collate(rows)


class StreamLoader:
    """Yields this rank's batches of a stream, each with `trained_tokens` as in `TrainLoader`.

    The position belongs to the number of batches that the Trainer has completed, so that a batch that failed is made
    again. The positions after the latest two batches are kept.

    Args:
        stream: The stream; the attribute `sampler`, which other loaders have, too.
        trainer: Trainer that determines position, length and accumulation window; None means no end.
        num_workers: 1 makes batches in a process ahead of training; 0 makes them in this process.
        pin_memory: True puts batches into page-locked memory.
    """

    # A resumed run may have another `max_steps`, see `ResumableLoader`.
    is_stream = True

    def __init__(
        self, stream: BatchStream, trainer: Trainer | None = None, num_workers: int = 0, pin_memory: bool = False
    ) -> None:
        self.sampler = stream
        self.trainer = trainer
        self._options: dict[str, Any] = {"num_workers": num_workers, "pin_memory": pin_memory}
        self._options |= {"prefetch_factor": _AHEAD} if num_workers else {}
        self._states: dict[int, _State] = {}
        self._position = 0
        self._batches: Iterator[tuple[Batch, _State]] | None = None
        self._drawn = 0  # Number of batches that `_batches` has yielded, counted from the beginning of the run.

    def __len__(self) -> int:
        """Return the number of batches of the Trainer's epoch."""
        if self.trainer is None:
            raise TypeError("A stream has no length without a Trainer.")
        return stream_length(self.trainer)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches; the position is read when the first one is drawn."""
        rest = EpochRemainder(0, 0, sys.maxsize, accumulate=1)
        trained = self._position
        if self.trainer is not None and self.trainer.training:
            rest = remainder_of_fit(self.trainer, len(self))
            trained = self.trainer.fit_loop.epoch_loop.batch_progress.total.completed
        self._go_to(trained)
        assert self._batches is not None
        for window in accumulation_windows(self._batches, rest):
            self._drawn += len(window)
            count = count_trained([batch for batch, _ in window])
            while window:
                batch, state = window.popleft()
                self._states = {self._position: self._states[self._position], self._position + 1: state}
                self._position += 1
                yield {**batch, "trained_tokens": torch.tensor(count)}

    def _go_to(self, trained: int) -> None:
        """Let the next batch be the one after `trained` batches."""
        if self._batches is not None and self._drawn == trained:
            return
        if self._states and trained not in self._states:
            raise ValueError(
                f"The position in the stream is saved after {max(self._states)} batches, but the Trainer has completed "
                f"{trained}. Resume with the checkpoint that the run saved."
            )
        stream = copy.copy(self.sampler)
        stream.start = self._states.setdefault(trained, self.sampler.start)
        self._position = self._drawn = trained
        # An iterator draws a seed from this generator; drawing from the global generator would change dropout.
        generator = torch.Generator().manual_seed(stream.order.seed)
        self._batches = iter(DataLoader(stream, batch_size=None, generator=generator, **self._options))

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of this rank after the latest two batches, and the settings for which they are valid."""
        order = self.sampler.order
        return {
            "position": self._position,
            "num_batches": sys.maxsize,
            "rank": order.rank,
            "num_ranks": order.num_ranks,
            "settings": self.sampler.identity(),
            "states": dict(self._states),
        }

    def state_of_ranks(self) -> dict[str, Any]:
        """Return the states of all ranks, equal on all ranks; every rank calls it."""
        state = self.state_dict()
        if self.trainer is None:
            return {**state, "ranks": [state]}
        ranks = range(state["num_ranks"])
        return {**state, "ranks": [self.trainer.strategy.broadcast(state, src=rank) for rank in ranks]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore this rank's position from `state_of_ranks`, or from its own `state_dict`.

        Lightning's loops keep the state of rank 0 only; other ranks ignore it.

        Raises:
            ValueError: If the number of ranks, or a setting, has changed.
        """
        order = self.sampler.order
        if state["num_ranks"] != order.num_ranks:
            raise ValueError(
                f"The checkpoint has the positions of {plural(state['num_ranks'], 'rank')} in the stream, and this run "
                f"has {order.num_ranks}. Resume with the same number of devices."
            )
        if "ranks" in state:
            state = state["ranks"][order.rank]
        if state["rank"] != order.rank:
            return
        was, now = state["settings"], self.sampler.identity()
        changed = [
            f"{key} was {was.get(key)!r} and is {value!r}" for key, value in now.items() if was.get(key) != value
        ]
        if changed and state["position"]:
            raise ValueError(
                f"The checkpoint was written after batch {state['position']} of a stream, and the stream has changed "
                f"since: {', '.join(changed)}. Resume with the same data and settings."
            )
        self._position, self._states, self._batches = state["position"], dict(state["states"]), None

    def close(self) -> list[str]:
        """Stop the worker process; return the counts of each data set as text."""
        self._batches = None
        counts = self._states.get(self._position, {}).get("seen", [])
        where = _on_rank(self.sampler.order)
        return [
            f"{data.name}{where}: {describe_counts(of)}." for data, of in zip(self.sampler.data, counts, strict=False)
        ]
