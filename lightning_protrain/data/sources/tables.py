"""Reads rows of files and of Hugging Face data sets one at a time, by row number or in order."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from glob import escape
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_protrain.data.conversation import MalformedRow, fingerprint

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
_BOM = b"\xef\xbb\xbf"
_READ_AT_ONCE = 1000
# Decodes a value of an Arrow table; the arguments are the value and the name of its row. Closures would not pickle.
_Decoder = Callable[[Any, str], Any]


class Shard(ABC):
    """Rows of a file or of a part of a data set, which can be read in order.

    Attributes:
        name: Name of the source, for messages.
        folder: Folder to which relative paths in the rows refer.
    """

    name: str
    folder: Path

    def where(self, index: int) -> str:
        """Return the name of row `index` for messages, such as its file and line."""
        return f"{self.name}, row {index}"

    @abstractmethod
    def raws(self, start: int = 0) -> Iterator[Any]:
        """Yield the rows from number `start` on, in order, before decoding."""

    @abstractmethod
    def decode(self, raw: Any, where: str) -> Any:
        """Decode a row that `raws` yielded; raise MalformedRow if that fails. `where` is the name of the row."""


class Table(Shard):
    """Rows that can also be read by number."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def raw(self, index: int) -> Any:
        """Return row `index` before decoding."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hash of all rows."""


class JsonLines(Table):
    """A file with one JSON object per line; only the offsets of the lines are in memory. Empty lines are skipped.

    Args:
        path: The file, in UTF-8, with or without a byte order mark.
        indexed: False does not look for the lines, so that the rows can only be read in order.

    Raises:
        ValueError: If the file is empty, is not in UTF-8, or holds a JSON array.
    """

    def __init__(self, path: Path, indexed: bool = True) -> None:
        self.path = path
        self.name = str(path)
        self.folder = path.parent
        self._indexed = indexed
        starts: list[int] = []
        numbers: list[int] = []
        position = 0
        _refuse_empty(path)
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.removeprefix(_BOM).strip():
                    if not starts:
                        _check_first_line(line, path)
                    if not indexed:
                        break
                    starts.append(position)
                    numbers.append(number)
                position += len(line)
            lines.seek(-1, os.SEEK_END)
            # A last line without a line break may be truncated: the program that wrote it may have been interrupted.
            self._open_end = lines.read() != b"\n"
        self._starts = np.asarray([*starts, position], dtype=np.int64)
        self._numbers = np.asarray(numbers, dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_mapped"}

    def __len__(self) -> int:
        return len(self._numbers)

    def where(self, index: int) -> str:
        return f"{self.name}, line {self._numbers[index]}" if self._indexed else super().where(index)

    def raw(self, index: int) -> bytes:
        # Empty lines before the next row are included: JSON ignores them as whitespace.
        return bytes(self._mapped[self._starts[index] : self._starts[index + 1]])

    @cached_property
    def _mapped(self) -> NDArray[np.uint8]:
        return np.memmap(self.path, np.uint8, mode="r")

    def raws(self, start: int = 0) -> Iterator[bytes]:
        with self.path.open("rb") as lines:
            yield from islice((line for line in lines if line.removeprefix(_BOM).strip()), start, None)

    def fingerprint(self) -> str:
        return _digest(self.path)

    def decode(self, raw: bytes, where: str) -> Any:
        try:
            row = json.loads(raw.removeprefix(_BOM).decode("utf-8"), object_pairs_hook=_object)
        except UnicodeDecodeError as error:
            raise MalformedRow(
                f"{where}: not UTF-8 (byte 0x{raw.removeprefix(_BOM)[error.start]:02x} at {error.start}). Save the "
                "file as UTF-8."
            ) from error
        except (ValueError, RecursionError) as error:
            advice = "Write one JSON object per line."
            if b"\r" in raw.rstrip():
                advice = "Lines end in a carriage return alone: save the file with line feeds."
            elif self._open_end and not raw.endswith(b"\n"):
                advice = "The last line is truncated: write the file again."
            raise MalformedRow(f"{where}: not valid JSON ({error}). {advice}") from error
        return _checked_text(row, raw, where)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; raise ValueError if a key is repeated, because a value would be lost."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in made if names.count(key) > 1)
        raise ValueError(f"an object has the key {twice!r} {names.count(twice)} times, keep one")
    return made


def _refuse_empty(path: Path) -> None:
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty (0 bytes). Write it again, or leave it out.")


def _check_first_line(line: bytes, path: Path) -> None:
    if line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\x00" in line[:4]:
        raise ValueError(f"{path} is not UTF-8 but UTF-16 or binary. Save it as UTF-8.")
    if line.removeprefix(_BOM).lstrip().startswith(b"["):
        raise ValueError(
            f"{path} holds a JSON array, not one JSON object per line. Rename it to .json if the whole file is one "
            'array of rows; write {"messages": [...]} in each line otherwise.'
        )


def _checked_text(row: Any, raw: bytes | None, where: str) -> Any:
    """Raise MalformedRow if a row has a lone surrogate, which JSON can escape but no tokenizer can encode."""
    if raw is None or b"\\ud" in raw or b"\\uD" in raw:
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            code = ord(error.object[error.start])
            raise MalformedRow(f"{where}: the text has the lone surrogate \\u{code:04x}. Correct the text.") from error
    return row


class RowList(Table):
    """Rows in memory.

    Args:
        rows: The rows.
        name: Name of the source, for messages.
        folder: Folder to which relative paths in the rows refer.
        escapes: True if the text of the rows may contain lone surrogates.
    """

    def __init__(self, rows: list[Any], name: str, folder: Path, escapes: bool = False) -> None:
        self.rows = rows
        self.name = name
        self.folder = folder
        self._escapes = escapes

    def __len__(self) -> int:
        return len(self.rows)

    def raw(self, index: int) -> Any:
        return self.rows[index]

    def raws(self, start: int = 0) -> Iterator[Any]:
        return islice(self.rows, start, None)

    def decode(self, raw: Any, where: str) -> Any:
        return _checked_text(raw, None, where) if self._escapes else raw

    def fingerprint(self) -> str:
        return fingerprint(self.rows)


class ArrowTable(Table):
    """Rows of a memory-mapped `datasets.Dataset`, or of an `IterableDataset`; images are not decoded.

    Keys with null values are removed: Arrow gives each struct the keys of all rows.

    Args:
        dataset: The rows.
        name: Name of the source, for messages.
        folder: Folder to which relative paths in the rows refer.
        digest: Hash of all rows; None takes the one that `datasets` keeps.
    """

    def __init__(self, dataset: Dataset | IterableDataset, name: str, folder: Path, digest: str | None = None) -> None:
        self._digest = digest
        self.dataset: Any = dataset.with_format("arrow")
        self.name = name
        self.folder = folder
        features = dataset.features or {}  # Those of a stream may be unknown.
        self._json = {key: decoder for key, feature in features.items() if (decoder := _json_decoder(feature))}

    def __len__(self) -> int:
        return len(self.dataset)

    def raw(self, index: int) -> dict[str, Any]:
        return self.dataset[int(index)].to_pylist()[0]

    def raws(self, start: int = 0) -> Iterator[dict[str, Any]]:
        dataset = self.dataset.skip(start) if start else self.dataset
        for batch in dataset.iter(_READ_AT_ONCE):
            yield from batch.to_pylist()

    def fingerprint(self) -> str:
        return self._digest or str(self.dataset._fingerprint)

    def decode(self, raw: dict[str, Any], where: str) -> dict[str, Any]:
        return {
            key: self._json[key](value, where) if key in self._json else _without_nulls(value)
            for key, value in raw.items()
        }


class ArrowShard(Shard):
    """A shard of a data set that is read when it is needed, and never stored.

    Args:
        load: Returns the `datasets.IterableDataset` of the shard.
        name: Name of the shard, for messages.
        folder: Folder to which relative paths in the rows refer.
    """

    def __init__(self, load: Callable[[], IterableDataset], name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self._load = load

    @cached_property
    def _table(self) -> ArrowTable:
        return ArrowTable(self._load(), self.name, self.folder)

    def raws(self, start: int = 0) -> Iterator[dict[str, Any]]:
        from datasets.exceptions import DatasetsError

        try:
            yield from self._table.raws(start)
        except (DatasetsError, OSError, ValueError) as error:
            why = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
            raise ValueError(
                f"{self.name} cannot be read: {why}. Correct the file, or resume from the last checkpoint if the "
                "network has failed."
            ) from error

    def decode(self, raw: dict[str, Any], where: str) -> dict[str, Any]:
        return self._table.decode(raw, where)


class TableHead(RowList):
    """The first rows of a shard, in memory.

    Args:
        shard: The shard.
        count: Maximum number of rows; None takes all.
    """

    def __init__(self, shard: Shard, count: int | None) -> None:
        super().__init__(list(islice(shard.raws(), count)), shard.name, shard.folder)
        self._shard = shard

    def where(self, index: int) -> str:
        return self._shard.where(index)

    def decode(self, raw: Any, where: str) -> Any:
        return self._shard.decode(raw, where)

    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self.rows).encode("utf-8", "surrogatepass")).hexdigest()


def first_rows(shards: Iterable[Shard], count: int | None) -> list[Table]:
    """Read the first rows of shards into memory, at most `count` in total; None reads all."""
    heads: list[Table] = []
    for shard in shards:
        heads.append(TableHead(shard, count))
        if count is not None:
            count -= len(heads[-1])
            if count == 0:
                break
    return heads


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _json_decoder(feature: Any) -> _Decoder | None:
    """Return the decoder of a column that contains JSON text; None if the column contains none."""
    # Compare the name: the oldest supported version of `datasets` has no class `Json`.
    if type(feature).__name__ == "Json":
        return _decode_json
    if isinstance(feature, dict):
        inner = {key: decoder for key, item in feature.items() if (decoder := _json_decoder(item))}
        return partial(_decode_struct, inner) if inner else None
    item = _json_decoder(feature.feature) if hasattr(feature, "feature") else None
    return partial(_decode_list, item) if item else None


def _decode_json(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise MalformedRow(f"{where}: not valid JSON in a JSON column ({error}). Correct it.") from error


def _decode_list(item: _Decoder, value: Any, where: str) -> Any:
    return value and [item(entry, where) for entry in value]


def _decode_struct(inner: dict[str, _Decoder], value: Any, where: str) -> Any:
    if value is None:
        return None
    return {
        key: inner[key](item, where) if key in inner else _without_nulls(item)
        for key, item in value.items()
        if item is not None
    }


def open_shard(path: Path) -> Shard:
    """Open a file to read its rows in order, without reading or storing them first.

    Raises:
        ValueError: As in `open_table`.
    """
    if path.suffix == ".jsonl":
        return JsonLines(path, indexed=False)
    if path.suffix != ".parquet":
        return open_table(path)
    _refuse_empty(path)
    from datasets import Dataset

    return ArrowShard(partial(Dataset.from_parquet, escape(str(path)), streaming=True), str(path), path.parent)


def open_table(path: Path) -> Table:
    """Open a .jsonl, .json or .parquet file, or a .txt file, which is one document.

    Raises:
        ValueError: If the file is empty, or its content does not match its suffix.
    """
    if path.suffix == ".jsonl":
        return JsonLines(path)
    _refuse_empty(path)
    if path.suffix == ".txt":
        try:
            return RowList([{"text": path.read_text(encoding="utf-8-sig")}], str(path), path.parent)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 (byte {error.start}). Save it as UTF-8.") from error
    return _open_parquet(path) if path.suffix == ".parquet" else _open_json(path)


def _open_parquet(path: Path) -> Table:
    from datasets import Dataset, config
    from datasets.exceptions import DatasetsError

    digest = _digest(path)
    # Else `datasets` would return the rows of a file before it was replaced by one with the same date.
    cache = Path(config.HF_DATASETS_CACHE, digest)
    try:
        return ArrowTable(Dataset.from_parquet(escape(str(path)), cache_dir=str(cache)), str(path), path.parent, digest)
    except (DatasetsError, OSError, ValueError) as error:
        why = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"The Parquet file {path} cannot be read: {why}. Write it again, with rows, and with distinct column names."
        ) from error


def _open_json(path: Path) -> Table:
    """Open a .json file, which may hold a JSON array of rows or one JSON object per line."""
    with path.open("rb") as lines:
        first = next((line for line in lines if line.removeprefix(_BOM).strip()), b"")
    try:
        if first.removeprefix(_BOM).lstrip().startswith(b"["):
            text = path.read_bytes().decode("utf-8-sig")
            return RowList(
                json.loads(text, object_pairs_hook=_object), str(path), path.parent, escapes="\\ud" in text.lower()
            )
        json.loads(first.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}). Save it as UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is neither a JSON array of rows nor one JSON object per line ({error}). Write one of the two."
        ) from error
    return JsonLines(path)
