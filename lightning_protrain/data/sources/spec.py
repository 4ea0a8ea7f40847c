"""The user's description of one data set: its location, its format, and which turns are trained."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_protrain.config import is_valid
from lightning_protrain.data.conversation import ROLES

# Columns of a row and keys of a message that `fields` may rename.
ROW_FIELDS = (
    *("messages", "conversations", "prompt", "response", "input", "system", "history", "tools"),
    *("images", "audios", "videos"),
    *("text", "chosen", "rejected", "label"),
)
MESSAGE_FIELDS = (
    *("role", "content", "from", "value", "reasoning_content", "tool_calls", "name", "tool_call_id"),
    *("train", "weight"),
)
Format = Literal[
    "auto", "messages", "sharegpt", "prompt_response", "text", "completion", "preference", "unpaired_preference"
]


@dataclass(frozen=True)
class DatasetSpec:
    """A data set: where it lies, how its rows are read, and what of them is trained.

    Attributes:
        path: Name of the data set on the Hugging Face Hub; a .jsonl, .json or .parquet file; a glob, list or folder of
            such files; a folder written by `datasets.Dataset.save_to_disk`; or "stdlib" for the docstrings of Python's
            standard library.
        name: Configuration of a data set on the Hub.
        split: Name of the training split, or a mapping from "train", "validation" and "test" to split names. None
            means the splits named "train", "validation" and "test".
        revision: Branch, tag or commit of a data set on the Hub.
        format: Format of the rows; "auto" detects it for each row from the columns, and refuses ambiguous rows.
        fields: Map from standard names (`ROW_FIELDS`, `MESSAGE_FIELDS`) to the names of columns and message keys in
            the data.
        roles: Map from role names in the data to standard roles; it extends `messages.ROLE_NAMES`.
        images_dir: Folder to which relative paths of images, audio and videos refer; None means the folder of the data
            file.
        on_malformed: "error" raises for a row that is not a valid conversation; "skip" leaves the row out.
        max_rows: Maximum number of rows of each split, taken from its beginning; None takes all.
        repeat: Number of times that each training row occurs in an epoch.
        weight: Share of this data set in the training rows of an epoch, relative to the other weights; 0 leaves it
            out. In an epoch, every row of the others occurs at least once, and rows of small data sets are repeated.
            None: no data set has a weight, and every row occurs `repeat` times.
        streaming: True reads, encodes and packs training rows while training, and never stores them. `max_rows` is
            then the maximum number of rows of "validation" and "test", which are read into memory.
        family: See `ChatDataModule` for this and all following attributes. None means the value of the data module.
        chat_template: Chat template of this data set; all data sets share one tokenizer.
        chat_template_kwargs: Further variables of the template.
        train_on_inputs: True trains everything.
        roles_to_train: Roles whose turns are trained.
        train_on_eos: Turns whose end token is trained.
        train_on: All turns, or only the last one.
        train_thinking: True trains reasoning.
        role_boundaries: Markers that delimit turns, which replace the markers of `family`.
        on_untrainable: Treatment of a row without a trained token.
        processor_kwargs: Settings of the model's processor.
        add_eos: True ends plain text with the tokenizer's end token.

    Raises:
        ValueError: If a value is out of range, or a choice or a name in `fields` is unknown. `ChatSettings` checks the
            attributes from `family` on.
    """

    path: str | Path | list[str] = "stdlib"
    name: str | None = None
    split: str | dict[str, str] | None = None
    revision: str | None = None
    format: Format = "auto"
    fields: dict[str, str] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    images_dir: str | None = None
    on_malformed: Literal["error", "skip"] = "error"
    max_rows: int | None = None
    repeat: int = 1
    weight: float | None = None
    streaming: bool = False
    family: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    train_on_inputs: bool | None = None
    roles_to_train: list[str] | None = None
    train_on_eos: Literal["turn", "all", "last", "none"] | None = None
    train_on: Literal["all", "last_turn"] | None = None
    train_thinking: bool | None = None
    role_boundaries: list[dict[str, Any]] | None = None
    on_untrainable: Literal["error", "drop", "warn"] | None = None
    processor_kwargs: dict[str, Any] | None = None
    add_eos: bool | None = None

    def __post_init__(self) -> None:
        paths = self.path if isinstance(self.path, list | tuple) else [self.path]
        if not all(isinstance(path, str | PathLike) for path in paths):
            raise ValueError(f"path={self.path!r}: give text or a list of texts.")
        names = [fspath(path) for path in paths]
        object.__setattr__(self, "path", names if isinstance(self.path, list | tuple) else names[0])
        if not self.path or not all(names):
            raise ValueError(f"path={self.path!r} names no data set. Give a file, a folder or a name on the Hub.")
        _check_choice("format", self.format, get_args(Format))
        _check_choice("on_malformed", self.on_malformed, ("error", "skip"))
        for key in ("max_rows", "repeat"):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{key}={value!r}: give a whole number, at least 1.")
        if self.weight is not None and not is_valid(lambda weight: 0 <= weight < math.inf, self.weight):
            raise ValueError(f"weight={self.weight!r}: give a number that is not negative, such as 0.3.")
        if self.weight is not None and self.repeat > 1:
            raise ValueError(f"weight={self.weight} and repeat={self.repeat} both say how often rows occur: give one.")
        if type(self.streaming) is not bool:
            raise ValueError(f"streaming={self.streaming!r}: give true or false.")
        if self.streaming and self.repeat > 1:
            raise ValueError(
                f"repeat={self.repeat}, but a stream begins again when it ends. Remove `repeat`, or give each data set "
                "a `weight`."
            )
        if self.streaming and self.images_dir is not None:
            raise ValueError(f"images_dir={self.images_dir!r}, but only text is streamed. Remove `streaming`.")
        for key in self.fields:
            _check_choice("fields", key, (*ROW_FIELDS, *MESSAGE_FIELDS))
        renamed: list[tuple[str, Any]] = [*self.fields.items(), *self.roles.items()]
        for key, value in renamed:
            if not isinstance(value, str) or not value:
                raise ValueError(f"{key!r} is mapped to {value!r}: give a name.")
        if isinstance(self.split, dict):
            for key in self.split:
                _check_choice("split", key, ("train", "validation", "test"))
            if "train" not in self.split:
                raise ValueError(f'split={self.split} does not say which split is trained on. Add "train".')
        elif self.split == "":
            raise ValueError("`split` is empty: give the name of a split, or leave it out.")

    @property
    def paths(self) -> tuple[str, ...]:
        """Value of `path` as a tuple."""
        return tuple(self.path) if isinstance(self.path, list) else (str(self.path),)

    @property
    def label(self) -> str:
        """Name of the data set in messages and tables."""
        shown = self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} and {len(self.paths) - 1} more"
        return shown if self.name is None else f"{shown}, {self.name}"

    @property
    def masking(self) -> dict[str, Any]:
        """Arguments of `ChatDataModule` that this data set overrides, by name."""
        names = [spec.name for spec in fields(self)]
        shared = names[names.index("family") :]
        return {name: getattr(self, name) for name in shared if getattr(self, name) is not None}


def check_weights(specs: Sequence[DatasetSpec]) -> None:
    """Raise ValueError if only some data sets have a weight, or no weight is above 0."""
    weights = [spec.weight for spec in specs]
    if None in weights and any(weight is not None for weight in weights):
        without = next(spec.label for spec in specs if spec.weight is None)
        raise ValueError(f"{without!r} has no `weight`, but other data sets have one. Give each a weight, or none.")
    if None not in weights and not any(weights):
        raise ValueError("All data sets have weight 0, so there would be nothing to train. Give one a weight above 0.")


def dataset_spec(dataset: Any) -> DatasetSpec:
    """Convert a data set into a `DatasetSpec`.

    Args:
        dataset: A `DatasetSpec`, a mapping of its attributes, or its `path`.

    Raises:
        ValueError: If the mapping has an unknown key, or `DatasetSpec` refuses a value.
    """
    if isinstance(dataset, DatasetSpec):
        return dataset
    if not isinstance(dataset, Mapping):
        return DatasetSpec(path=dataset)
    for key in dataset:
        _check_choice("dataset", key, [attribute.name for attribute in fields(DatasetSpec)])
    return DatasetSpec(**dataset)


def check_roles(spec: DatasetSpec, trained: Collection[str], further: Collection[str]) -> None:
    """Raise ValueError if `roles` or `roles_to_train` names a role that no message can have.

    Args:
        spec: The data set.
        trained: Trained roles.
        further: Roles of the chat format beside the standard roles.
    """
    known = tuple(dict.fromkeys((*ROLES, *further)))
    for name, roles in (("roles", spec.roles.values()), ("roles_to_train", trained)):
        for role in roles:
            _check_choice(name, role, known)


def _check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name}: {value!r} is unknown.{hint} There are {', '.join(choices)}.")
