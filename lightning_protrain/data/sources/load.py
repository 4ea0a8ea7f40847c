"""Loads the rows of a data set's splits from the Hub, files, folders, or the standard library.

Functions import `datasets` when they need it, because importing it takes half a second and 80 MiB.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import re
import sysconfig
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from glob import glob
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from huggingface_hub import is_offline_mode
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from lightning_protrain.config import plural
from lightning_protrain.data.conversation import Conversation
from lightning_protrain.data.hub import hub_file, hub_refusals, is_path, nearest_path, wait_for_hub
from lightning_protrain.data.sources.dataset import ConversationRows, check_fields, read_rows
from lightning_protrain.data.sources.row_kinds import RowFormat
from lightning_protrain.data.sources.spec import DatasetSpec, dataset_spec
from lightning_protrain.data.sources.tables import (
    SUFFIXES,
    ArrowShard,
    ArrowTable,
    RowList,
    Shard,
    Table,
    first_rows,
    open_shard,
    open_table,
)

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict


MIN_DOCSTRINGS = 100
# Folders without documentation of the library: tests, vendored packages, generated files.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idlelib", "idle_test", "lib2to3", "site-packages", "dist-packages", "lib-dynload", "_bundled"}
)

_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def stdlib_conversations(
    folder: str | Path | None = None, max_characters: int = 600, max_rows: int | None = None
) -> list[Conversation]:
    """Return a conversation for each docstring: "What does `json.dumps` do?" and its first paragraphs as the answer.

    The modules are parsed, not imported. Equal folders give equal lists. Duplicate answers are dropped.

    Args:
        folder: Folder of the modules; None means the running interpreter's standard library.
        max_characters: Maximum length of an answer, which ends at a paragraph; a longer first paragraph ends at a
            word.
        max_rows: Number of conversations after which no further file is read, at least 100; None reads all files.

    Raises:
        ValueError: If the folder has fewer than 100 docstrings, for example because Python was installed without the
            sources of its library.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if folder is None else folder)
    answers: dict[str, str] = {}
    enough = math.inf if max_rows is None else max(max_rows, MIN_DOCSTRINGS)
    for path in sorted(_sources(root), key=lambda path: path.parts):
        for name, docstring in _docstrings(path, root):
            answer = _shorten(docstring, max_characters)
            if answer:
                answers.setdefault(answer, name)
        if len(answers) >= enough:
            break
    if len(answers) < MIN_DOCSTRINGS:
        raise ValueError(
            f"Only {len(answers)} docstrings under {root}, at least {MIN_DOCSTRINGS} are needed. Install Python with "
            "the sources of its standard library, or give `dataset` the path of a .jsonl file."
        )
    return [
        {
            "messages": [
                {"role": "user", "content": f"What does `{name}` do?"},
                {"role": "assistant", "content": answer},
            ]
        }
        for answer, name in answers.items()
    ]


def _sources(root: Path) -> Iterator[Path]:
    """Yield the paths of the modules below `root`; skipped folders, which are large, are not listed."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("config-")]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _docstrings(path: Path, root: Path) -> Iterator[tuple[str, str]]:
    """Yield the qualified names and docstrings of a module and of its functions, classes and methods."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    parts = path.relative_to(root).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
    yield from _walk(tree, module)


def _walk(node: _Documented, name: str) -> Iterator[tuple[str, str]]:
    docstring = ast.get_docstring(node, clean=False)
    if docstring:
        yield name, docstring
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _walk(child, f"{name}.{child.name}")


def _shorten(docstring: str, max_characters: int) -> str:
    """Return the first paragraphs of a docstring that fit `max_characters`, or the first words if none fits."""
    text = inspect.cleandoc(docstring).strip()
    if len(text) <= max_characters:
        return text
    head = text[: max_characters + 1]
    end = head.rfind("\n\n")
    if end <= 0:
        end = max(head.rfind(" "), head.rfind("\n"))
    return text[:end].rstrip() if end > 0 else text[:max_characters]


SPLITS = ("train", "validation", "test")
_SPLIT_NAMES = {**{name: name for name in SPLITS}, **dict.fromkeys(("valid", "val", "dev"), "validation")}
_GLOB = re.compile(r"[*?\[]")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# A file that is not open yet, or a part of a data set that `datasets` has opened.
_Part = Path | Shard
_Parts = Mapping[str, Sequence[_Part]]
# Number of rows at the beginning of a stream that are checked before training.
FIRST_ROWS = 64
# Maximum number of files named in a warning.
_MOST_NAMES = 5


class Source:
    """A data set whose files are opened and checked on first use, and whose rows are read on access.

    Args:
        dataset: A `DatasetSpec`, a mapping of its attributes, or its path.
        trained_roles: Roles that are trained: a row without a turn of these roles is malformed. None accepts every
            row. `train_on_inputs` and `roles_to_train` of the data set take precedence.

    Raises:
        ValueError: If the data set does not exist, a file cannot be read, or rows are malformed. The properties raise
            it, not the constructor.
    """

    def __init__(
        self, dataset: str | Path | Mapping[str, Any] | DatasetSpec, trained_roles: Sequence[str] | None
    ) -> None:
        self.spec = dataset_spec(dataset)
        roles = trained_roles if self.spec.roles_to_train is None else self.spec.roles_to_train
        # An empty list trains no role: then every row is accepted.
        self._trained_roles = tuple(roles) if roles and not self.spec.train_on_inputs else None

    @cached_property
    def _parts(self) -> dict[str, Sequence[_Part]]:
        """Files or opened parts of each split: "train", and "validation" and "test" if the data set has them."""
        return dict(_find_parts(self.spec))

    @cached_property
    def tables(self) -> dict[str, list[Table]]:
        """Unchecked rows of each split in `_parts`, but not "train" if it is streamed."""
        splits = self._parts.keys() - ({"train"} if self.spec.streaming else set())
        tables = {split: _open(self._parts[split], self.spec.max_rows) for split in SPLITS if split in splits}
        if self.spec.images_dir is None:
            return tables
        folder = Path(self.spec.images_dir).expanduser()
        return {split: _below(parts, folder) for split, parts in tables.items()}

    @cached_property
    def shards(self) -> list[Shard]:
        """Unchecked rows of "train" to be read in order."""
        return [open_shard(part) if isinstance(part, Path) else part for part in self._parts["train"]]

    @cached_property
    def row_format(self) -> RowFormat:
        """Converter of rows into the common form."""
        return RowFormat(self.spec.format, self.spec.fields, self.spec.roles, self._trained_roles)

    @cached_property
    def splits(self) -> dict[str, ConversationRows]:
        """Checked rows of each split in `tables`."""
        if not self.spec.streaming:
            check_fields(self.spec.fields, [*chain.from_iterable(self.tables.values())], repr(self.spec.label))
        return {
            split: self._read(self.tables[split], split, self.spec.max_rows) for split in SPLITS if split in self.tables
        }

    @cached_property
    def first_rows(self) -> ConversationRows:
        """Checked first rows of a stream."""
        return self._read(first_rows(self.shards, FIRST_ROWS), "train", FIRST_ROWS)

    def _read(self, tables: Sequence[Table], split: str, max_rows: int | None) -> ConversationRows:
        name = f"{self.spec.label!r}, split {split}"
        return read_rows(tables, self.row_format, name, on_malformed=self.spec.on_malformed, max_rows=max_rows)

    @cached_property
    def fingerprint(self) -> str:
        """Text that changes whenever the rows in `splits` change."""
        spec = self.spec
        tables = [(split, *(table.fingerprint() for table in parts)) for split, parts in self.tables.items()]
        options = spec.format, spec.fields, spec.roles, spec.on_malformed, spec.max_rows, self._trained_roles
        return repr((tables, options))

    def with_all_splits(self, val_fraction: float, seed: int) -> dict[str, ConversationRows]:
        """Return the rows of "train", and of "validation" and "test" unless there are none.

        A missing "validation" is taken out of "train", unless that is streamed. A missing "test" equals "validation".

        Args:
            val_fraction: Fraction of "train" that becomes "validation"; 0 takes none.
            seed: Seed of that choice.

        Raises:
            ValueError: If "train" has fewer than two rows and must be divided.
        """
        splits = dict(self.splits)
        if "validation" not in splits and val_fraction > 0 and not self.spec.streaming:
            try:
                train, validation = split_indices(len(splits["train"]), val_fraction, seed)
            except ValueError as error:
                raise ValueError(f"{self.spec.label!r}: {error}") from error
            splits["train"], splits["validation"] = splits["train"].select(train), splits["train"].select(validation)
        if "validation" in splits:
            splits.setdefault("test", splits["validation"])
        return splits


def split_indices(count: int, val_fraction: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide `count` rows at random; return the sorted indices of training and of validation rows.

    Args:
        count: Number of rows, at least two.
        val_fraction: Fraction of validation rows; both splits have at least one row.
        seed: Seed of the random division.

    Raises:
        ValueError: If `count` is below two.
    """
    if count < 2:
        raise ValueError(
            f"{plural(count, 'row')} cannot be divided into training and validation. Give at "
            'least 2, or a split "validation", or set val_fraction: 0 to train on all.'
        )
    size = min(max(round(count * val_fraction), 1), count - 1)
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[size:]), np.sort(order[:size])


def _below(tables: Iterable[Table], folder: Path) -> list[Table]:
    if not folder.is_dir():
        raise ValueError(f"images_dir={str(folder)!r} is no folder. Correct the path.")
    changed = list(tables)
    for table in changed:
        table.folder = folder
    return changed


def _open(parts: Iterable[_Part], max_rows: int | None) -> list[Table]:
    """Open files; read streamed parts into memory."""
    opened = [open_table(part) if isinstance(part, Path) else part for part in parts]
    tables = [part for part in opened if isinstance(part, Table)]
    return tables if len(tables) == len(opened) else first_rows(opened, max_rows)


def _find_parts(spec: DatasetSpec) -> _Parts:
    """Return the files, or the opened parts, of all splits of a data set."""
    if isinstance(spec.path, str) and _is_on_hub(spec.path):
        return _hub_splits(spec)
    for key in ("name", "revision"):
        value = getattr(spec, key)
        if value is not None:
            raise ValueError(f"{key}={value!r} is for data sets of the Hub, not {spec.paths[0]!r}. Remove it.")
    if not isinstance(spec.path, str):
        return _only_train(spec, [file for path in spec.paths for file in _named_files(path)])
    if spec.path == "stdlib":
        return _only_train(spec, [RowList(list(stdlib_conversations(max_rows=spec.max_rows)), "stdlib", Path())])
    path = Path(spec.path).expanduser()
    if path.is_dir():
        return _choose(_folder_splits(path), spec.split, spec.path)
    if path.is_file() and path.suffix in SUFFIXES:
        return _only_train(spec, [path])
    if _GLOB.search(spec.path):
        return _choose(_file_splits(_named_files(spec.path), _root(path), spec.path), spec.split, spec.path)
    raise _nothing_there(spec.path)


def _is_on_hub(path: str) -> bool:
    return path != "stdlib" and not is_path(path) and _HUB_NAME.fullmatch(path) is not None


# How to make a file that is read of one with another suffix; the placeholder is its path.
_CONVERSIONS = {
    ".gz": "Unpack it: gunzip -k '{}'",
    ".zst": "Unpack it: zstd -d '{}'",
    ".xz": "Unpack it: xz -dk '{}'",
    ".csv": """Convert it in Python: datasets.Dataset.from_csv("{0}").to_json("{0}.jsonl")""",
    ".tsv": """Convert it in Python: datasets.Dataset.from_csv("{0}", sep="\\t").to_json("{0}.jsonl")""",
    ".xlsx": """Convert it in Python: pandas.read_excel("{0}").to_json("{0}.jsonl", orient="records", lines=True)""",
}


def _nothing_there(name: str) -> ValueError:
    file = Path(name).expanduser()
    if file.is_file():
        kind = f"a {''.join(file.suffixes)} file" if file.suffix else "a file without a suffix"
        advice = _CONVERSIONS.get(file.suffix, "Convert it, or rename it if it is one.")
        return ValueError(f"{name!r} is {kind}: {', '.join(SUFFIXES)} files are read. {advice.format(file)}")
    near = nearest_path(name) if is_path(name) else ""
    return ValueError(
        f'No data set {name!r}{near}. Give "stdlib", the path of a .jsonl, .json or .parquet file, a glob or a list of '
        "such files, a folder of them or one written by `datasets.Dataset.save_to_disk`, or a name on the Hugging Face "
        "Hub."
    )


def _only_train(spec: DatasetSpec, parts: Sequence[_Part]) -> _Parts:
    if spec.split is not None:
        raise ValueError(f"split={spec.split!r}, but {spec.label!r} has no splits: all of it is trained on. Remove it.")
    return {"train": parts}


def _named_files(path: str) -> list[Path]:
    """Return the file at `path`, or the sorted files that match it as a glob."""
    plain = Path(path).expanduser()
    if plain.is_file() and plain.suffix in SUFFIXES:
        return [plain]
    found = [file for name in sorted(glob(str(plain), recursive=True)) if (file := Path(name)).is_file()]
    files = [file for file in found if file.suffix in SUFFIXES]
    if not files:
        raise _nothing_there(path)
    _name_unread(found, files, path)
    return files


def _name_unread(found: Iterable[Path], read: Collection[Path], name: str) -> None:
    """Warn of files that may hold rows and are not read."""
    data = {".jsonl", ".json", ".parquet", *_CONVERSIONS}
    unread = [
        file
        for file in found
        if file not in read and file.suffix.lower() in data and not file.stem.startswith("dataset_info")
    ]
    if unread:
        named = ", ".join(map(str, unread[:_MOST_NAMES])) + (", ..." if len(unread) > _MOST_NAMES else "")
        rank_zero_warn(
            f"Left out of {name!r}: {named}. {', '.join(SUFFIXES)} files are read, and of a folder those of one kind."
        )


def missing_files(spec: DatasetSpec) -> list[str]:
    """Return the local paths of a data set that do not exist; names on the Hub are not looked up."""
    files = {path: Path(path).expanduser() for path in spec.paths if is_path(path)}
    return [path for path, file in files.items() if not (file.exists() or glob(str(file), recursive=True))]


def _folder_splits(folder: Path) -> _Parts:
    """Return the parts of a folder: one written by `save_to_disk`, or one with data files of one suffix."""
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return _saved_splits(folder)
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    found = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    files = [path for path in found if path.suffix in SUFFIXES]
    # Beside data files of another suffix, .json and .txt files are metadata.
    every = {path.suffix for path in files}
    kinds = every - {".json", ".txt"} or every - {".txt"} or every
    if len(kinds) > 1:
        raise ValueError(f"{folder} has both {' and '.join(sorted(kinds))} files. Give a glob of those to read.")
    if not kinds:
        raise ValueError(
            f"{folder} was not written by `datasets.Dataset.save_to_disk` and has no {', '.join(SUFFIXES)} file. "
            "Give another folder."
        )
    read = [path for path in files if path.suffix in kinds]
    _name_unread(found, read, str(folder))
    return _file_splits(read, folder, str(folder))


def _saved_splits(folder: Path) -> _Parts:
    from datasets import load_from_disk
    from datasets.exceptions import DatasetsError

    try:
        loaded = load_from_disk(str(folder))
    except (DatasetsError, OSError, ValueError) as error:
        raise ValueError(f"{folder} was written by `datasets.Dataset.save_to_disk` but is broken: {error}") from error
    return _loaded_splits(loaded, str(folder), folder)


def _loaded_splits(loaded: Dataset | DatasetDict, name: str, folder: Path) -> _Parts:
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    return {split: [ArrowTable(rows, f"{name}, split {split}", folder)] for split, rows in splits.items()}


def _streamed_splits(loaded: IterableDataset | IterableDatasetDict, name: str, split: str) -> _Parts:
    """Return the shards of each split; `split` is the name of the only one."""
    splits = loaded if isinstance(loaded, dict) else {split: loaded}
    return {
        split: [
            ArrowShard(
                partial(rows.shard, num_shards=rows.num_shards, index=index),
                f"{name}, split {split}, shard {index}",
                Path(),
            )
            for index in range(rows.num_shards)
        ]
        for split, rows in splits.items()
    }


def _root(path: Path) -> Path:
    """Return the deepest folder of a glob without a wildcard."""
    return next(parent for parent in path.parents if not _GLOB.search(str(parent)))


def _file_splits(files: Sequence[Path], root: Path, name: str) -> _Parts:
    """Assign files to splits by the names of files and folders below `root`.

    All files belong to "train" if no name contains the name of a split.
    """
    splits: dict[str | None, list[Path]] = {}
    for file in files:
        splits.setdefault(_split_of(file.relative_to(root)), []).append(file)
    if "train" in splits and None in splits:
        raise ValueError(
            f"{name}: {splits[None][0]} names no split, but others do. Rename it, or give a list of files."
        )
    return {split or "train": paths for split, paths in splits.items()}


def _split_of(path: Path) -> str | None:
    for name in (path.stem, *reversed(path.parts[:-1])):
        for word in re.split(r"[^a-z]+", name.lower()):
            if word in _SPLIT_NAMES:
                return _SPLIT_NAMES[word]
    return None


def _hub_splits(spec: DatasetSpec) -> _Parts:
    from datasets import config, load_dataset
    from datasets.exceptions import DatasetsError

    assert isinstance(spec.path, str)
    wait_for_hub()
    config.HF_HUB_OFFLINE = is_offline_mode()  # `datasets` copies the flag when it is imported
    options: dict[str, Any] = {"name": spec.name, "revision": spec.revision}
    options |= {"streaming": True} if spec.streaming else {}
    # `datasets` itself parses a string, because it may name a part of a split, such as "train[:1%]".
    split = spec.split if isinstance(spec.split, str) else None
    with hub_refusals(spec.path, "dataset"):
        try:
            loaded = load_dataset(spec.path, split=split, **options)
        except (DatasetsError, OSError, ValueError) as error:
            hub_file(spec.path, "README.md", kind="dataset")  # Errors of `datasets` have lost their cause.
            reason = " ".join(str(error).split()).rstrip(".")
            raise ValueError(
                f"The data set {spec.label!r} of the Hugging Face Hub cannot be read: {reason}."
            ) from error
    if spec.streaming:
        streamed = _streamed_splits(loaded, spec.label, str(split))
        return _choose(streamed, spec.split, spec.path)
    if split is not None:
        return {"train": [ArrowTable(loaded, f"{spec.label}, split {split}", Path())]}
    return _choose(_loaded_splits(loaded, spec.label, Path()), spec.split, spec.path)


def _choose(splits: _Parts, wanted: str | dict[str, str] | None, name: str) -> _Parts:
    """Choose splits as `DatasetSpec.split` says, and rename them to "train", "validation" and "test"."""
    if wanted is None:
        chosen = {_SPLIT_NAMES[split]: split for split in sorted(splits) if split in _SPLIT_NAMES}
        chosen |= {split: split for split in SPLITS if split in splits}
        if "train" not in chosen:
            raise ValueError(
                f'{name} has the splits {sorted(splits)}, none of them is called "train". Rename one, or name the '
                "training split with `split`."
            )
    else:
        chosen = {"train": wanted} if isinstance(wanted, str) else wanted
    for split in chosen.values():
        if split not in splits:
            raise ValueError(f"{name} has no split {split!r}, but {sorted(splits)}. Correct `split`.")
    return {ours: splits[theirs] for ours, theirs in chosen.items()}
