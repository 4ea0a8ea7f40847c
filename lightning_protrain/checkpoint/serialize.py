"""Conversion of a dict of weights and states into the files of a checkpoint, and back.

| file | content |
|---|---|
| `weights.safetensors` | tensors of the dict's `state_dict`, by their keys |
| `tensors.safetensors` | all other tensors, by their path in the dict: `optimizer_states.0.state.3.exp_avg` |
| `state.pt` | the dict with a mark in place of each tensor, and tensors that safetensors cannot store |
| `rank00000.pt`, ... | items of the dict's list `rank_states`, one for each rank |

The `.pt` files load with `torch.load(weights_only=True)`, which is checked before a save. This module writes the
safetensors format itself (https://github.com/huggingface/safetensors#format): the library would copy all tensors to
host memory at once, while this code copies, digests and writes one tensor at a time.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_protrain.checkpoint.atomic import Draft, DraftFile
from lightning_protrain.checkpoint.manifest import RANK_STATES, STATE
from lightning_protrain.checkpoint.verification import open_regular

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# Metadata key: map from further names of tied tensors to the name that is written.
SHARED = "shared"
_METADATA = "__metadata__"


def can_hold(tensor: Tensor) -> bool:
    """Return True if safetensors can store a tensor: not a subclass, dense, not meta, of a known dtype."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.dtype in DTYPES
        and not tensor.requires_grad
        and not tensor.is_quantized
        and tensor.device.type != "meta"
    )


def write_tensors(file: DraftFile, tensors: Mapping[str, Tensor]) -> None:
    """Write a file in the safetensors format; a tensor with several names is written once.

    Args:
        file: Empty file.
        tensors: Tensors for which `can_hold` is True, on any device; they are copied to the host one at a time.
    """
    assert sys.byteorder == "little"
    shared = shared_names(tensors)
    # Widest dtypes first, so that every tensor is aligned.
    names = sorted((name for name in tensors if name not in shared), key=lambda name: -tensors[name].element_size())
    header: dict[str, object] = {_METADATA: {"format": "pt", **({SHARED: json.dumps(shared)} if shared else {})}}
    end = 0
    for name in names:
        assert name != _METADATA
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for name in names:
        file.write(flat_bytes(tensors[name]).numpy())


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the elements in row-major order as bytes in host memory, shape (nbytes,); a view if possible."""
    plain = tensor.detach().as_subclass(Tensor).to("cpu").resolve_conj().resolve_neg().contiguous()
    # A tensor of one element is contiguous with any stride, but viewing it as bytes requires a stride of 1.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, memory-mapped; changes are not written back.

    Raises:
        ValueError: If the file is not in the safetensors format.
    """
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            shared = json.loads((file.metadata() or {}).get(SHARED, "{}"))
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                tensors[name] = file.get_tensor(name)
        for name, holder in shared.items():
            tensors[name] = tensors[holder]
    except (SafetensorError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a valid safetensors file: {error}") from error
    return tensors


def shared_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of tensors that share their memory with an earlier tensor, mapped to the earlier name."""
    first: dict[object, str] = {}
    shared = {}
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_neg())
        holder = first.setdefault(place, name)
        if holder != name:
            shared[name] = holder
    return shared


def stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the approximate size of a safetensors file with these tensors, bytes."""
    shared = shared_names(tensors)
    return sum(tensor.nbytes + len(name) + 128 for name, tensor in tensors.items() if name not in shared)


Item = TypeVar("Item")
Result = TypeVar("Result")
# Bytes of a tensor that are copied to the host at a time.
PIECE = 64 << 20
# Memory bandwidth limits more threads.
MOST_THREADS = 8
_WORD = 8


def digest_of(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's elements in row-major order, in hexadecimal digits."""
    digest = hashlib.sha256()
    for piece in _pieces(tensor):
        digest.update(flat_bytes(piece).numpy().data)
    return digest.hexdigest()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors, on any devices, have the same shape, dtype and bits."""
    if (one.shape, one.dtype) != (other.shape, other.dtype) or one.is_meta or other.is_meta:
        return False
    pairs = zip(_pieces(one), _pieces(other), strict=True)
    return all(_equal(flat_bytes(piece), flat_bytes(its_peer)) for piece, its_peer in pairs)


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Apply a function to all items on several threads, and return the results in order.

    Hashing and PyTorch's kernels release the GIL, so these run in parallel.
    """
    items = list(items)
    threads = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, len(items))
    if threads < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(threads, MOST_THREADS), thread_name_prefix="fingerprints") as pool:
        return list(pool.map(function, items))


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.detach().as_subclass(Tensor).reshape(-1).split(max(PIECE // tensor.element_size(), 1))


def _equal(one: Tensor, other: Tensor) -> bool:
    words = one.numel() // _WORD * _WORD
    if words and not one.storage_offset() % _WORD and not other.storage_offset() % _WORD:
        if not torch.equal(one[:words].view(torch.int64), other[:words].view(torch.int64)):
            return False
        one, other = one[words:], other[words:]
    return torch.equal(one, other)


WEIGHTS = "weights.safetensors"
TENSORS = "tensors.safetensors"
_WEIGHTS_KEY = "state_dict"
_MARK = "lightning_protrain.tensor"
_RANK_FILE = re.compile(r"rank\d{5}\.pt")
_RANKS_MARK = "lightning_protrain.ranks"


@dataclass(frozen=True)
class Payload:
    """The content of a checkpoint's files, see the module's docstring.

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
        """Approximate size of the files, bytes."""
        return stored_bytes(self.weights) + stored_bytes(self.tensors) + sum(map(len, (self.state, *self.ranks)))

    def write(self, draft: Draft) -> None:
        """Add the files to a draft.

        Raises:
            OSError: If the disk fails.
        """
        for name, tensors in ((WEIGHTS, self.weights), (TENSORS, self.tensors)):
            with draft.create(name) as file:
                write_tensors(file, tensors)
        for name, content in (
            (STATE, self.state),
            *((rank_file(rank), state) for rank, state in enumerate(self.ranks)),
        ):
            with draft.create(name) as file:
                file.write(content)


def split(content: Mapping[str, Any]) -> Payload:
    """Split a dict into the content of files, without copying tensors.

    Raises:
        ValueError: If a value cannot be loaded with `weights_only=True`; the message names it.
    """
    weights: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}

    def take(path: tuple[Any, ...], value: Any) -> Any:
        if isinstance(value, dict) and _MARK in value:
            raise ValueError(f"{_dotted(path)} has the key {_MARK!r}, which is reserved for checkpoints.")
        if not isinstance(value, Tensor):
            return value
        if value.device.type == "meta":
            raise ValueError(f"{_dotted(path)} has no values: it is on the meta device.")
        if not can_hold(value):
            return value
        of_model = len(path) == 2 and path[0] == _WEIGHTS_KEY
        home, name = (weights, str(path[1])) if of_model else (tensors, _dotted(path))
        while name in home or name == "__metadata__":  # {"a.b": x} and {"a": {"b": y}} have the same path.
            name += "_"
        home[name] = value
        mark = {_MARK: name, "file": WEIGHTS if of_model else TENSORS}
        # A layout with the same order of dimensions in memory, without gaps or repeated elements.
        dense = torch.empty_like(value, device="meta")
        return mark if dense.is_contiguous() else {**mark, "stride": list(dense.stride())}

    shared = dict(content)
    ranks: tuple[bytes, ...] = ()
    if isinstance(content.get(RANK_STATES), list):
        ranks = tuple(_clean(state, (RANK_STATES, rank)) for rank, state in enumerate(content[RANK_STATES]))
        shared[RANK_STATES] = {_RANKS_MARK: len(ranks)}
    return Payload(weights, tensors, _clean(_rebuild(shared, take)), ranks)


def join(folder: Path, map_location: Any = None, keep: bool = False, rank: int | None = None) -> dict[str, Any]:
    """Return the dict that `split` was given, with tensors that are memory-mapped from the files.

    Args:
        folder: The checkpoint, which has been verified.
        map_location: As in `torch.load`.
        keep: True copies tensors other than weights, because optimizers keep them.
        rank: Rank whose states are loaded, with None in the place of other ranks; None loads the states of all ranks.

    Raises:
        ValueError: If a file is missing or cannot be loaded with `weights_only=True`.
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
            raise ValueError(f"{folder}: the tensor {_dotted(path)} is missing from the tensor files.") from error

    content: dict[str, Any] = _rebuild(state, give)
    if isinstance(content.get(RANK_STATES), dict):
        count = content[RANK_STATES].get(_RANKS_MARK, 0)
        wanted = range(count) if rank is None or not count else [rank % count]
        content[RANK_STATES] = [
            _load(folder / rank_file(other), "cpu") if other in wanted else None for other in range(count)
        ]
    return content


def rank_file(rank: int) -> str:
    """Return the name of the file with the states of this rank."""
    return f"rank{rank:05d}.pt"


def files_for(names: Collection[str], rank: int | None) -> set[str]:
    """Return the files of a checkpoint that a rank reads: shared files, and those with the states of one rank.

    Args:
        names: Names of all files.
        rank: The rank, which may not have existed at the save; None means all files.
    """
    files_of_ranks = sorted(name for name in names if _RANK_FILE.fullmatch(name))
    if rank is None or not files_of_ranks:
        return set(names)
    return set(names) - set(files_of_ranks) | {rank_file(rank % len(files_of_ranks))}


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
    # Subclasses of containers are kept whole, because they may treat their items differently.
    new = replace(path, value)
    if new is not value:
        return new
    if type(value) in (dict, OrderedDict):
        items = type(value)((key, _rebuild(item, replace, (*path, key))) for key, item in value.items())
        if type(value) is OrderedDict:
            vars(items).update(vars(value))  # `_metadata` of a state dict: versions of the modules.
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
            f"The checkpoint's {place} has the type {reason[0]}, which torch.load(weights_only=True) cannot load: save "
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
