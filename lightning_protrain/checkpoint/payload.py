"""A dict of weights and states as the files of a checkpoint, and back.

[Note: Split]
`weights.safetensors` has the tensors of `state_dict` under their own names, `tensors.safetensors` all others under the
path of their place in the dict (`optimizer_states.0.state.3.exp_avg`), `state.pt` the dict itself with a mark at each
of these places: small, and of nothing but what `torch.load(weights_only=True)` takes. That is tried before anything is
written. Tensors that safetensors does not know (sparse, quantized, subclasses) stay in `state.pt`. What only one rank
has, an item of the list `rank_states`, is as small, and has a file of its own: `rank00000.pt` and so on.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_protrain.checkpoint.draft import Draft
from lightning_protrain.checkpoint.manifest import STATE
from lightning_protrain.checkpoint.tensors import can_hold, read_tensors, stored_bytes, write_tensors
from lightning_protrain.checkpoint.verifying import open_regular

WEIGHTS = "weights.safetensors"
TENSORS = "tensors.safetensors"
# Key of what only each rank has: a list, by rank.
RANK_STATES = "rank_states"
_WEIGHTS_KEY = "state_dict"
_MARK = "lightning_protrain.tensor"
_RANK_FILE = re.compile(r"rank\d{5}\.pt")
_RANKS_MARK = "lightning_protrain.ranks"


@dataclass(frozen=True)
class Payload:
    """A dict, split as in [Note: Split].

    Attributes:
        weights: Tensors of `weights.safetensors`.
        tensors: Tensors of `tensors.safetensors`.
        state: Content of `state.pt`.
        ranks: Content of the file of each rank.
    """

    weights: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    state: bytes
    ranks: tuple[bytes, ...] = ()

    @property
    def nbytes(self) -> int:
        """What its files take."""
        return stored_bytes(self.weights) + stored_bytes(self.tensors) + sum(map(len, (self.state, *self.ranks)))

    def write(self, draft: Draft) -> None:
        """Adds its files to a draft.

        Raises:
            OSError: The disk.
        """
        for name, tensors in ((WEIGHTS, self.weights), (TENSORS, self.tensors)):
            with draft.create(name) as file:
                write_tensors(file, tensors)
        for name, content in ((STATE, self.state), *((rank_file(rank), own) for rank, own in enumerate(self.ranks))):
            with draft.create(name) as file:
                file.write(content)


def split(content: Mapping[str, Any]) -> Payload:
    """Splits a dict; copies no tensor.

    Raises:
        ValueError: Something in it could not be loaded again with `weights_only=True`; the message says what.
    """
    weights: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}

    def take(path: tuple[Any, ...], value: Any) -> Any:
        if isinstance(value, dict) and _MARK in value:
            raise ValueError(f"{_dotted(path)} has the key {_MARK!r}, which checkpoints keep for themselves.")
        if not isinstance(value, Tensor):
            return value
        if value.device.type == "meta":
            raise ValueError(f"{_dotted(path)} has no values: it is on the meta device.")
        if not can_hold(value):
            return value
        of_model = len(path) == 2 and path[0] == _WEIGHTS_KEY
        home, name = (weights, str(path[1])) if of_model else (tensors, _dotted(path))
        while name in home or name == "__metadata__":  # {"a.b": ...} beside {"a": {"b": ...}}
            name += "_"
        home[name] = value
        mark = {_MARK: name, "file": WEIGHTS if of_model else TENSORS}
        # Of the same order in memory, but without gaps, and with no element twice: what can be filled again.
        dense = torch.empty_like(value, device="meta")
        return mark if dense.is_contiguous() else {**mark, "stride": list(dense.stride())}

    shared = dict(content)
    ranks: tuple[bytes, ...] = ()
    if isinstance(content.get(RANK_STATES), list):
        ranks = tuple(_clean(own, (RANK_STATES, rank)) for rank, own in enumerate(content[RANK_STATES]))
        shared[RANK_STATES] = {_RANKS_MARK: len(ranks)}
    return Payload(weights, tensors, _clean(_rebuild(shared, take)), ranks)


def join(folder: Path, map_location: Any = None, keep: bool = False, rank: int | None = None) -> dict[str, Any]:
    """The dict again; its tensors are mapped from the files. Verify the folder before.

    Args:
        folder: The checkpoint.
        map_location: As in `torch.load`.
        keep: Whether tensors other than weights are copies that need no file: optimizers make them their own.
        rank: Of whose own states the list has nothing but None for other ranks; None: it has all.

    Raises:
        ValueError: The files are none that `split` made, or hold code.
    """
    files = {name: read_tensors(folder / name) for name in (WEIGHTS, TENSORS)}
    state = _load(folder / STATE, map_location)
    placed: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def give(path: tuple[Any, ...], value: Any) -> Any:
        if not isinstance(value, dict) or _MARK not in value:
            return value
        try:
            source, stride = files[value["file"]][value[_MARK]], tuple(value.get("stride", ()))
            key = (id(source), stride)
            if key not in placed:
                placed[key] = _place(source, stride, map_location, keep and value["file"] == TENSORS)
            return placed[key]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{folder}: {_dotted(path)} is in no file of tensors.") from error

    content: dict[str, Any] = _rebuild(state, give)
    if isinstance(content.get(RANK_STATES), dict):
        count = content[RANK_STATES].get(_RANKS_MARK, 0)
        wanted = range(count) if rank is None or not count else [rank % count]
        content[RANK_STATES] = [
            _load(folder / rank_file(each), "cpu") if each in wanted else None for each in range(count)
        ]
    return content


def rank_file(rank: int) -> str:
    """Name of the file of what only this rank has."""
    return f"rank{rank:05d}.pt"


def files_for(names: Collection[str], rank: int | None) -> set[str]:
    """Those of the files of a checkpoint that a rank reads; a rank that was none of the savers has that of another.

    Args:
        names: Of all files.
        rank: The rank; None: all are read.
    """
    own = sorted(name for name in names if _RANK_FILE.fullmatch(name))
    if rank is None or not own:
        return set(names)
    return set(names) - set(own) | {rank_file(rank % len(own))}


def _load(path: Path, map_location: Any) -> Any:
    try:
        with open_regular(path) as file:
            return torch.load(io.BytesIO(file.read()), map_location=map_location, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} cannot be loaded with weights_only=True: {error}") from error


def _place(tensor: Tensor, stride: tuple[int, ...], map_location: Any, copy: bool) -> Tensor:
    if stride:
        tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
    elif copy:
        tensor = tensor.clone()
    if map_location is None:
        return tensor
    if isinstance(map_location, Mapping):
        return tensor.to(map_location.get("cpu", "cpu"))
    if callable(map_location):
        moved = map_location(tensor.untyped_storage(), "cpu")
        return tensor if moved is None else tensor.to(moved.device)
    return tensor.to(map_location)


def _rebuild(value: Any, replace: Callable[[tuple[Any, ...], Any], Any], path: tuple[Any, ...] = ()) -> Any:
    # Only containers of these very types: what a subclass does with its items is its own affair.
    new = replace(path, value)
    if new is not value:
        return new
    if type(value) in (dict, OrderedDict):
        items = type(value)((key, _rebuild(item, replace, (*path, key))) for key, item in value.items())
        if type(value) is OrderedDict:
            vars(items).update(vars(value))  # `_metadata` of a state dict: versions of its modules.
        return items
    if type(value) in (list, tuple):
        return type(value)(_rebuild(item, replace, (*path, index)) for index, item in enumerate(value))
    return value


def _clean(state: Any, path: tuple[Any, ...] = ()) -> bytes:
    try:
        return _checked(state)
    except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError) as error:
        place, reason = _blame(state, path, error)
        raise ValueError(
            f"The checkpoint's {place} is of {reason[0]}, which torch.load(weights_only=True) does not take: save "
            "numbers, texts, tensors, lists and dicts of them, or register the type with "
            f"torch.serialization.add_safe_globals. ({reason[1]})"
        ) from error


def _checked(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
    return buffer.getvalue()


def _blame(value: Any, path: tuple[Any, ...], error: Exception) -> tuple[str, tuple[str, str]]:
    items: list[tuple[Any, Any]] = []
    if type(value) in (dict, OrderedDict):
        items = list(value.items())
    elif type(value) in (list, tuple):
        items = list(enumerate(value))
    for key, item in items:
        try:
            _checked(item)
        except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError) as inner:
            return _blame(item, (*path, key), inner)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return _dotted(path) or "content", (kind, str(error).partition("\n")[0][:200])


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(key) for key in path)
