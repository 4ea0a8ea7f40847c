"""References to frozen weights that a checkpoint does not store, and the search for these weights.

[Note: References]
A frozen weight has the same value in every checkpoint of a run as in the model that was loaded. So a checkpoint may
store a *reference* in its place: shape, dtype, and the SHA-256 of its bytes. On resume, the weight in memory must have
that digest. Without a model, the weight is read from the *source*: the folder that the model was loaded from.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_protrain.checkpoint.serialize import DTYPES, can_hold, digest_of, same_bits, shared_names, side_by_side
from lightning_protrain.config import plural

# Key of the references in a checkpoint's content.
FROZEN = "frozen_weights"
# Parts that PEFT adapters insert into a weight's name.
_ADAPTED = frozenset(("base_layer", "original_module", "token_adapter"))
_MOST_NAMED = 4
_BY_NAME = {str(dtype): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class Reference:
    """A tensor that a checkpoint does not store, see [Note: References].

    Attributes:
        dtype: Name of a dtype, such as `torch.bfloat16`.
        shape: Shape of the tensor.
        digest: SHA-256 of its elements in row-major order, in hexadecimal digits.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        """Size of the tensor, bytes."""
        return math.prod(self.shape) * _BY_NAME[self.dtype].itemsize

    def is_of(self, tensor: Tensor, digest: Callable[[Tensor], str]) -> bool:
        """Return True if `tensor`, cast to the saved dtype, is the referenced tensor.

        Args:
            tensor: Candidate.
            digest: Returns the SHA-256 of a tensor, which may be cached.
        """
        if tuple(tensor.shape) != self.shape or tensor.device.type == "meta":
            return False
        if str(tensor.dtype) == self.dtype:
            return digest(tensor) == self.digest
        wanted = _BY_NAME[self.dtype]
        castable = tensor.is_floating_point() and wanted.is_floating_point
        return castable and digest_of(tensor.detach().to(wanted)) == self.digest


@dataclass(frozen=True)
class References:
    """All references of a checkpoint.

    Attributes:
        source: Folder or name that the model was loaded from; None if unknown.
        weights: Map from key in the state dict to reference.
        trainable: Names of the parameters that were trained.
    """

    source: str | None
    weights: Mapping[str, Reference]
    trainable: tuple[str, ...]

    @property
    def origin(self) -> str:
        """Description of the source, for messages."""
        return "a model of unknown source" if self.source is None else f"the model in {self.source!r}"

    def to_content(self) -> dict[str, Any]:
        """Return the references as plain values that a checkpoint can store."""
        weights = {name: [weight.dtype, list(weight.shape), weight.digest] for name, weight in self.weights.items()}
        return {"source": self.source, "weights": weights, "trainable": list(self.trainable)}

    @staticmethod
    def from_content(content: Mapping[str, Any], name: str) -> References | None:
        """Return the references of a checkpoint, or None if it has none.

        Args:
            content: Content of the checkpoint.
            name: Name of the checkpoint, for messages.

        Raises:
            ValueError: If the references do not have the form of `to_content`.
        """
        if content.get(FROZEN) is None:
            return None
        try:
            plain = content[FROZEN]
            weights = {
                key: Reference(str(dtype), tuple(map(int, shape)), str(digest))
                for key, (dtype, shape, digest) in plain["weights"].items()
            }
            unknown = {weight.dtype for weight in weights.values()} - _BY_NAME.keys()
            if unknown:
                raise ValueError(f"unknown dtype {', '.join(sorted(unknown))}")
            return References(plain["source"], weights, tuple(plain["trainable"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: the references to frozen weights are invalid: {error}") from error

    def view(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state dict, with a meta tensor for each frozen weight that the checkpoint does not store."""
        return {**state_dict} | {
            key: torch.empty(weight.shape, dtype=_BY_NAME[weight.dtype], device="meta")
            for key, weight in self.weights.items()
        }

    def refuse_others(self, tensors: Mapping[str, Any], digest: Callable[[Tensor], str], name: str) -> None:
        """Raise ValueError if weights in memory differ from the referenced ones or are missing.

        Args:
            tensors: State dict in memory.
            digest: Returns the SHA-256 of a tensor.
            name: Name of the checkpoint, for messages.
        """
        there = {key: tensors[key] for key in self.weights if isinstance(tensors.get(key), Tensor)}
        twice = shared_names({key: weight for key, weight in there.items() if can_hold(weight)})

        def differs(key: str) -> bool:
            weight = self.weights[key]
            if key in twice and weight == self.weights[twice[key]]:
                return False  # Reported under its other name.
            return key not in there or not weight.is_of(there[key], digest)

        unlike = side_by_side(differs, self.weights)
        wrong = [key for key, is_unlike in zip(self.weights, unlike, strict=True) if is_unlike]
        if wrong:
            raise ValueError(
                f"{name} refers to the frozen weights of {self.origin}, but this model has other weights: "
                f"{_named(wrong)} (of {len(self.weights)}). Load the model that the run began with."
            )


def take_out(state_dict: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return a state dict of the same type without `keys`."""
    rest: dict[str, Any] = (OrderedDict if type(state_dict) is OrderedDict else dict)(
        (key, value) for key, value in state_dict.items() if key not in keys
    )
    if type(state_dict) is OrderedDict:
        vars(rest).update(vars(state_dict))  # `_metadata`: versions of the modules.
    return rest


def fill(content: dict[str, Any], name: str, source: str | Path | None = None) -> None:
    """Read the weights that a checkpoint refers to from their source, verify them, and add them to its state dict.

    Args:
        content: Content of a checkpoint, changed in place; unchanged if it has no references.
        name: Name of the checkpoint, for messages.
        source: Folder of the model; None means the folder that the checkpoint records.

    Raises:
        ValueError: If the source is missing or has other weights; `content` is unchanged.
    """
    references = References.from_content(content, name)
    if references is None:
        return
    where = references.source if source is None else str(source)
    if where is None:
        raise ValueError(
            f"{name} refers to {plural(len(references.weights), 'frozen weight')} of an unknown source. Resume from it "
            "with that model, or use `lightning-protrain consolidate --source FOLDER`. "
            'ProTrainCheckpoint(frozen="store") saves all weights.'
        )
    try:
        tensors = resolve(references.weights, where)
    except FileNotFoundError as error:
        raise ValueError(
            f"{name} refers to frozen weights of {where!r}, which cannot be found: {error}. Restore it, or use "
            "`lightning-protrain consolidate --source FOLDER` with the model's present folder."
        ) from error
    lost = [key for key in references.weights if key not in tensors]
    if lost:
        raise ValueError(
            f"{name} refers to frozen weights of {where!r}, but {_named(lost)} (of {len(references.weights)}) "
            "differ there or are missing. Use `lightning-protrain consolidate --source FOLDER` with the original model."
        )
    state_dict = take_out(content["state_dict"], ())
    state_dict.update(tensors)
    content["state_dict"] = state_dict
    del content[FROZEN]


def resolve(weights: Mapping[str, Reference], source: str) -> dict[str, Tensor]:
    """Return the weights that were found in the source, bit for bit, by key; memory-mapped, cast to the saved dtype.

    Args:
        weights: Map from key in the state dict to reference.
        source: Folder of safetensors files, or name of a repository in the cache of the Hugging Face hub.

    Raises:
        FileNotFoundError: If the source does not exist.
        ValueError: If a file of the source is not in the safetensors format.
    """
    there = _search(weights, source, lambda key, tensor: weights[key].is_of(tensor, digest_of))
    # Tied weights have only one name in the source. Weights of different shapes may have equal bytes.
    tensors = {key: there.get((weight.digest, weight.dtype)) for key, weight in weights.items()}
    return {key: tensor.reshape(weights[key].shape) for key, tensor in tensors.items() if tensor is not None}


def held(weights: Mapping[str, Reference], tensors: Mapping[str, Tensor], source: str) -> set[str]:
    """Return the digests of the referenced weights that the source has; compare bits instead of hashing.

    Args:
        weights: Map from key in the state dict to reference.
        tensors: The weights in memory, by key.
        source: As in `resolve`, with its errors.
    """
    there = _search(weights, source, lambda key, tensor: same_bits(tensor, tensors[key]))
    lacking = {weight.digest for weight in weights.values() if (weight.digest, weight.dtype) not in there}
    return {weight.digest for weight in weights.values()} - lacking


def listed(weights: Mapping[str, Tensor], source: str) -> set[str]:
    """Return the keys for which the source has a tensor of the same name and shape.

    Args:
        weights: Map from key in the state dict to tensor, which may be a meta tensor.
        source: As in `resolve`, with its errors.
    """
    with ExitStack() as stack:
        places = _places(_folder(source), stack)
        keys = set()
        for key, tensor in weights.items():
            for name in source_names(key):
                if name in places and list(tensor.shape) == places[name].get_slice(name).get_shape():
                    keys.add(key)
        return keys


def _search(
    weights: Mapping[str, Reference], source: str, is_it: Callable[[str, Tensor], bool]
) -> dict[tuple[str, str], Tensor]:
    """Return the referenced weights that the source has, by digest and dtype.

    `is_it` takes a key and a tensor of the source; it returns True if the tensor is the weight of that key.
    """
    keys: dict[tuple[str, str], list[str]] = {}
    for key, weight in weights.items():
        keys.setdefault((weight.digest, weight.dtype), []).append(key)
    with ExitStack() as stack:
        places = _places(_folder(source), stack)

        def look(kind: tuple[str, str]) -> Tensor | None:
            for key in keys[kind]:
                for name in source_names(key):
                    if name in places and is_it(key, tensor := _like(places[name].get_tensor(name), weights[key])):
                        return tensor
            return None

        tensors_of = zip(keys, side_by_side(look, keys), strict=True)
        return {kind: tensor for kind, tensor in tensors_of if tensor is not None}


def _places(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Open all safetensors files of a folder, and return the file of each tensor by the tensor's name."""
    places: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a valid safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118  (it is no mapping)
            places.setdefault(name, file)
    return places


def _folder(source: str) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from transformers.utils import cached_file

    try:
        config = cached_file(source, "config.json", local_files_only=True)
    except OSError as error:
        raise FileNotFoundError(f"{source!r} is neither a folder nor in the cache of the Hugging Face hub") from error
    assert config is not None
    return Path(config).parent


def source_names(key: str) -> Iterator[str]:
    """Yield the names that a weight may have in the source: its key without adapters' parts and outer modules."""
    parts = [part for part in key.split(".") if part not in _ADAPTED]
    for first in range(len(parts)):
        yield ".".join(parts[first:])


def _like(tensor: Tensor, reference: Reference) -> Tensor:
    wanted = _BY_NAME[reference.dtype]
    return tensor.to(wanted) if tensor.is_floating_point() and wanted.is_floating_point else tensor


def _named(keys: Collection[str]) -> str:
    first = ", ".join(list(keys)[:_MOST_NAMED])
    return first if len(keys) <= _MOST_NAMED else f"{first}, and {len(keys) - _MOST_NAMED} more"
