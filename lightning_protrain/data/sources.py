"""Where conversations come from: the name of a data set becomes rows."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datasets import Dataset, load_from_disk

from lightning_protrain.data.conversations import Conversation, check_conversation, read_jsonl
from lightning_protrain.data.stdlib import stdlib_conversations

SPLITS = ("train", "validation", "test")
Rows = list[Conversation]


def load_splits(dataset: str) -> dict[str, Rows]:
    """Reads a data set: its rows under "train", and under "validation" and "test" if it brings such splits.

    Args:
        dataset: "stdlib", the path of a .jsonl file, or a folder written by `save_to_disk` of Hugging Face `datasets`.

    Raises:
        ValueError: Nothing of that name, or a row that is no conversation.
    """
    if dataset == "stdlib":
        return {"train": stdlib_conversations()}
    path = Path(dataset).expanduser()
    if path.is_dir():
        return _read_folder(path)
    if path.is_file() and path.suffix == ".jsonl":
        return {"train": read_jsonl(path)}
    raise ValueError(
        f'No data set {dataset!r}. Give "stdlib", the path of a .jsonl file with one `messages` list a line, or a '
        "folder written by `datasets.Dataset.save_to_disk`."
    )


def _read_folder(path: Path) -> dict[str, Rows]:
    """The splits of a saved data set that this module knows; a data set without splits counts as "train"."""
    try:
        loaded = load_from_disk(str(path))
    except FileNotFoundError as error:
        raise ValueError(f"{path} was not written by `datasets.Dataset.save_to_disk`: {error}") from error
    splits = {"train": loaded} if isinstance(loaded, Dataset) else dict(loaded)
    if "train" not in splits:
        raise ValueError(f'{path} has the splits {sorted(splits)}, none of them is called "train". Rename one.')
    return {name: _check_rows(splits[name], f"{path}, split {name}") for name in SPLITS if name in splits}


def _check_rows(rows: Iterable[Any], where: str) -> Rows:
    return [check_conversation(row, f"{where}, row {number}") for number, row in enumerate(rows)]
