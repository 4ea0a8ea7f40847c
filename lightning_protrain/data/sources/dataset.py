"""Reads the rows of one split on access, and counts how many were kept, dropped and trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from lightning_protrain.config import plural
from lightning_protrain.data.conversation import MalformedRow, Unit, unit_of
from lightning_protrain.data.sources.media import MEDIA_KINDS, check_media, count_media
from lightning_protrain.data.sources.row_kinds import RowFormat
from lightning_protrain.data.sources.tables import Table
from lightning_protrain.progress import bar

# Family of rows that are written without a chat template.
PLAIN_TEXT = "plain text"


@dataclass(frozen=True)
class DatasetReport:
    """Counts of one split of a data set.

    Attributes:
        name: Name of the data set and of the split.
        family: Chat format whose markers delimit the turns, or "plain text".
        num_kept: Number of rows that are used.
        dropped: Pairs of a reason and the number of rows dropped for it.
        num_tokens: Number of tokens in the kept rows.
        num_trained: Number of tokens in the loss.
        num_unended: Number of trained turns without an end token.
        num_doubtful: Number of kept conversations whose loss mask may be wrong.
        lengths: Minimum, median, 95th percentile and maximum number of tokens in a conversation, a side of a pair, or a
            piece of text.
        num_unwritten: Number of conversations whose reasoning the chat template leaves out.
        num_cut: Number of the turns in `num_unended` that were cut at `max_length`.
        knobs: Settings of the loss mask, as text.
        dropped_rows: Names of the first dropped rows, each with the reason.
        num_images: Number of images in the kept conversations.
        num_audio: Number of audio files in the kept conversations.
        num_videos: Number of videos in the kept conversations.
        end_ids: Ids of the trained tokens that end what the assistant says.
        unit: What a row is.
    """

    name: str
    family: str
    num_kept: int
    dropped: tuple[tuple[str, int], ...] = ()
    num_tokens: int = 0
    num_trained: int = 0
    num_unended: int = 0
    num_doubtful: int = 0
    lengths: tuple[int, int, int, int] = field(default=(0, 0, 0, 0))
    num_unwritten: int = 0
    num_cut: int = 0
    knobs: str = ""
    dropped_rows: tuple[str, ...] = ()
    num_images: int = 0
    num_audio: int = 0
    num_videos: int = 0
    end_ids: tuple[int, ...] = ()
    unit: Unit = "conversation"

    @property
    def media(self) -> tuple[str, ...]:
        """Counts of images, audio files and videos as text, such as "2 images"; zero counts are left out."""
        numbers = zip((self.num_images, self.num_audio, self.num_videos), MEDIA_KINDS, strict=True)
        return tuple(count_media(number, kind) for number, kind in numbers if number)

    @property
    def num_dropped(self) -> int:
        """Number of rows dropped for any reason."""
        return sum(count for _, count in self.dropped)

    def describe(self) -> str:
        """Return the counts as text for the log."""
        share = self.num_trained / max(self.num_tokens, 1)
        why = ", ".join(f"{count} {reason}" for reason, count in self.dropped)
        return (
            f"{self.name}: {plural(self.num_kept, self.unit)}, "
            f"{''.join(f'{counted}, ' for counted in self.media)}"
            f"{plural(self.num_tokens, 'token')}, {share:.1%} of them trained"
            f"{f'; {self.num_dropped} dropped ({why})' if why else ''}.{self.remarks()}"
        )

    def remarks(self) -> str:
        """Return warnings about doubtful masks, missing end tokens and missing reasoning, each after a space."""
        doubtful = f" {self.num_doubtful} are kept although their mask is in doubt." if self.num_doubtful else ""
        unended = ""
        if self.num_cut:
            turns, whose = ("turn was", "its") if self.num_cut == 1 else ("turns were", "their")
            unended += f" {self.num_cut:,} assistant {turns} cut at max_length, so {whose} end token is not trained."
        if self.num_unended > self.num_cut:
            num = self.num_unended - self.num_cut
            turns = "turn has" if num == 1 else "turns have"
            unended += f" {num:,} trained {turns} no end token, because the chat template writes none there."
        unwritten = ""
        if self.num_unwritten:
            unwritten = f" The chat template leaves out reasoning of {self.num_unwritten} conversations."
        return f"{unended}{doubtful}{unwritten}"


def quartet(lengths: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the minimum, median, 95th percentile and maximum of lengths; zeros if there are none."""
    low, middle, high, most = np.percentile(lengths or [0], (0, 50, 95, 100), method="nearest").tolist()
    return low, middle, high, most


MAX_EXAMPLES = 5


@dataclass(frozen=True)
class MalformedRows:
    """Malformed rows of a split, which `on_malformed="skip"` leaves out.

    Attributes:
        count: Number of malformed rows.
        examples: Error messages of the first malformed rows, at most `MAX_EXAMPLES`.
    """

    count: int = 0
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class ConversationRows(Sequence[Any]):
    """Rows of one split, parsed on every access into a `Row`; only row numbers are in memory. Can be pickled.

    Attributes:
        tables: Tables that hold the rows.
        row_format: Converts rows into the common form.
        places: Row numbers in the concatenation of the tables, int64 of shape [rows].
        malformed: Malformed rows that were left out.
    """

    tables: tuple[Table, ...]
    row_format: RowFormat
    places: NDArray[np.int64]
    malformed: MalformedRows = MalformedRows()

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        table, place = self._locate(index)
        where = table.where(place)
        return self.row_format.parse(table.decode(table.raw(place), where), where, table.folder)

    def where(self, index: int) -> str:
        """Return the name of a row for messages: file and line, or data set, split and row number."""
        table, place = self._locate(index)
        return table.where(place)

    def select(self, indices: Sequence[int] | NDArray[np.int64]) -> ConversationRows:
        """Return the rows at `indices`, in the order of `indices`; an index may occur several times."""
        return replace(self, places=self.places[np.asarray(indices, dtype=np.int64)])

    def _locate(self, index: int) -> tuple[Table, int]:
        place = int(self.places[index])
        number = int(np.searchsorted(self._stops, place, side="right"))
        table = self.tables[number]
        return table, place - int(self._stops[number]) + len(table)

    @cached_property
    def _stops(self) -> NDArray[np.int64]:
        """Row number at which each table ends in the concatenation, int64 of shape [tables]."""
        return np.cumsum([len(table) for table in self.tables], dtype=np.int64)


def read_rows(
    tables: Iterable[Table],
    row_format: RowFormat,
    name: str,
    *,
    on_malformed: Literal["error", "skip"] = "error",
    max_rows: int | None = None,
) -> ConversationRows:
    """Check every row, including the headers of its media, and return the valid rows.

    Args:
        tables: Tables that hold the rows.
        row_format: Converts rows into the common form.
        name: Name of the data set, for messages.
        on_malformed: "error" raises for the first malformed row; "skip" leaves malformed rows out with one warning.
        max_rows: Number of valid rows after which reading stops; None reads all.

    Raises:
        ValueError: If no row is valid, or a row is malformed and `on_malformed` is "error".
    """
    tables = tuple(tables)
    total = sum(map(len, tables))
    if total == 0:
        raise ValueError(f"{name} has no rows. Give data, or leave it out.")
    places: list[int] = []
    examples: list[str] = []
    num_malformed = 0
    unit: Unit | None = None  # That of the first good row.
    for place, (table, index, raw) in enumerate(bar(_raws(tables), "Reading", total, "row")):
        where = table.where(index)
        try:
            row = table.decode(raw, where)
            parsed = row_format.parse(row, where, table.folder)
            unit = unit or unit_of(parsed)
            if unit_of(parsed) != unit:
                raise MalformedRow(
                    f"{where}: the columns {', '.join(map(str, row))} make a {unit_of(parsed)}, and the rows before "
                    f"are {unit}s. Correct the row, make it a data set of its own, or choose one `format` for all."
                )
            check_media(parsed, where)
        except MalformedRow as error:
            if on_malformed == "error":
                raise MalformedRow(f"{error} (`on_malformed: skip` leaves such rows out.)") from error
            num_malformed += 1
            examples += [str(error)] * (len(examples) < MAX_EXAMPLES)
            continue
        places.append(place)
        if len(places) == max_rows:
            break
    malformed = MalformedRows(num_malformed, tuple(examples))
    _report(malformed, len(places), name)
    return ConversationRows(tables, row_format, np.asarray(places, dtype=np.int64), malformed)


def check_fields(fields: Mapping[str, str], tables: Sequence[Table], name: str) -> None:
    """Raise ValueError if `fields` names a column or a key of messages that no row of the tables has.

    Args:
        fields: Map from standard names to those in the data.
        tables: Tables of all splits: a validation split that is small may lack what training rows have.
        name: Name of the data set, for messages.
    """
    if not fields:
        return
    wanted, seen = set(fields.values()), set[str]()
    for table, index, raw in _raws(tables):
        with suppress(MalformedRow):  # `read_rows` reports the row.
            row = table.decode(raw, table.where(index))
            values = [row, *(row.values() if isinstance(row, Mapping) else ())]
            entries = chain.from_iterable(value if isinstance(value, list) else [value] for value in values)
            seen.update(*(entry.keys() for entry in entries if isinstance(entry, Mapping)))
        if wanted <= seen:
            return
    near = {match for field in wanted - seen for match in get_close_matches(field, seen, n=1)}
    raise ValueError(
        f"`fields` names {', '.join(map(repr, sorted(wanted - seen)))}, which no row of {name} has. Correct the name"
        f"{f' (the nearest is {min(near)!r})' if near else ''}, or remove it."
    )


def _raws(tables: Sequence[Table]) -> Iterator[tuple[Table, int, Any]]:
    for table in tables:
        for index, raw in enumerate(table.raws()):
            yield table, index, raw


def _report(malformed: MalformedRows, num_kept: int, name: str) -> None:
    if not malformed.count:
        return
    examples = "".join(f"\n  {example}" for example in malformed.examples)
    if not num_kept:
        raise ValueError(
            f"No row of {name} can be read: {plural(malformed.count, 'row is', 'rows are')} "
            f"malformed. The first:{examples}"
        )
    rank_zero_warn(
        f"Left out {malformed.count} of {malformed.count + num_kept} rows of {name}, which are "
        f"malformed. The first:{examples}"
    )
