"""Frozen weights that a checkpoint refers to instead of storing them, and how they are found again.

[Note: References]
A frozen weight is the same in every checkpoint of a run, and in the model that the run began with. So a checkpoint may
store a *reference* in its place: shape, dtype, and a SHA-256 of its bytes. The digest is cryptographic, because only it
can tell that a weight is the right one. A reference is resolved from memory (the resuming model has the same weight, or
is refused), or from the source: the folder that the model was loaded from.
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

# Key in a checkpoint.
FROZEN = "frozen_weights"
# Parts that adapters insert into a name.
_ADAPTED = frozenset(("base_layer", "original_module"))
_MOST_NAMED = 4
_BY_NAME = {str(dtype): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class Reference:
    """One tensor that a checkpoint does not store, see [Note: References].

    Attributes:
        dtype: Text of a `torch.dtype`.
        shape: Shape of the tensor.
        digest: SHA-256 of its elements in row-major order, in hexadecimal digits.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor would take in the checkpoint."""
        return math.prod(self.shape) * _BY_NAME[self.dtype].itemsize

    def hollow(self) -> Tensor:
        """Return a tensor of its shape and dtype, without values."""
        return torch.empty(self.shape, dtype=_BY_NAME[self.dtype], device="meta")

    def is_of(self, tensor: Tensor, digest: Callable[[Tensor], str]) -> bool:
        """Return True if this tensor, cast to the saved dtype if needed, is the one that was saved."""
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
        weights: References by key of the state dict.
        trainable: Names of the parameters that were trained.
    """

    source: str | None
    weights: Mapping[str, Reference]
    trainable: tuple[str, ...]

    @property
    def origin(self) -> str:
        """Name of the source, for messages."""
        return "a model whose source is not known" if self.source is None else f"the model in {self.source!r}"

    def to_content(self) -> dict[str, Any]:
        """Return plain values for the checkpoint."""
        weights = {name: [each.dtype, list(each.shape), each.digest] for name, each in self.weights.items()}
        return {"source": self.source, "weights": weights, "trainable": list(self.trainable)}

    @staticmethod
    def from_content(content: Mapping[str, Any], name: str) -> References | None:
        """Return the references of a checkpoint, or None if it has none.

        Args:
            content: Content of the checkpoint.
            name: Name of the checkpoint, for messages.

        Raises:
            ValueError: If they are not in the form of `to_content`.
        """
        if content.get(FROZEN) is None:
            return None
        try:
            plain = content[FROZEN]
            weights = {
                key: Reference(str(dtype), tuple(map(int, shape)), str(digest))
                for key, (dtype, shape, digest) in plain["weights"].items()
            }
            unknown = {each.dtype for each in weights.values()} - _BY_NAME.keys()
            if unknown:
                raise ValueError(f"there is no dtype {', '.join(sorted(unknown))}")
            return References(plain["source"], weights, tuple(plain["trainable"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: the references to frozen weights are invalid: {error}") from error

    def view(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state dict, with a meta tensor for each frozen weight that is stored as a reference only."""
        return {**state_dict, **{key: each.hollow() for key, each in self.weights.items()}}

    def refuse_others(self, tensors: Mapping[str, Any], digest: Callable[[Tensor], str], name: str) -> None:
        """Raise ValueError if weights in memory differ from the referenced ones.

        Args:
            tensors: State dict in memory.
            digest: Returns the digest of a tensor.
            name: Name of the checkpoint, for messages.

        Raises:
            ValueError: If some weights differ or are missing; the message names the first ones.
        """
        there = {key: tensors[key] for key in self.weights if isinstance(tensors.get(key), Tensor)}
        twice = shared_names({key: each for key, each in there.items() if can_hold(each)})

        def differs(key: str) -> bool:
            each = self.weights[key]
            if key in twice and each == self.weights[twice[key]]:
                return False  # Reported under its other name.
            return key not in there or not each.is_of(there[key], digest)

        unlike = side_by_side(differs, self.weights)
        wrong = [key for key, is_unlike in zip(self.weights, unlike, strict=True) if is_unlike]
        if wrong:
            raise ValueError(
                f"{name} refers to the frozen weights of {self.origin}, but those of this model differ: "
                f"{_named(wrong)} (of {len(self.weights)}). Load the model that the run began with: the trained "
                "weights fit no other."
            )


def take_out(state_dict: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return a state dict of the same type without some of its keys."""
    rest: dict[str, Any] = (OrderedDict if type(state_dict) is OrderedDict else dict)(
        (key, value) for key, value in state_dict.items() if key not in keys
    )
    if type(state_dict) is OrderedDict:
        vars(rest).update(vars(state_dict))  # `_metadata`: versions of its modules.
    return rest


def fill(content: dict[str, Any], name: str, source: str | Path | None = None) -> None:
    """Read the weights that a checkpoint refers to from their source, compare every byte, and put them in place.

    Args:
        content: Content of a checkpoint, changed in place. Content without references is returned as it is.
        name: Name of the checkpoint, for messages.
        source: Present folder of the model; None means the recorded one.

    Raises:
        ValueError: If the source is gone or has other weights; nothing is changed.
    """
    references = References.from_content(content, name)
    if references is None:
        return
    where = references.source if source is None else str(source)
    if where is None:
        raise ValueError(
            f"{name} refers to {plural(len(references.weights), 'frozen weight')} of an unknown "
            f"source: resume from it, or use "
            '`lightning-protrain consolidate --source FOLDER`. ProTrainCheckpoint(frozen="store") saves all weights.'
        )
    try:
        found = resolve(references.weights, where)
    except FileNotFoundError as error:
        raise ValueError(
            f"{name} refers to frozen weights of {where!r}, which cannot be found any more: {error}. Put the model "
            "back, or use `lightning-protrain consolidate --source FOLDER` with its present folder."
        ) from error
    lost = [key for key in references.weights if key not in found]
    if lost:
        raise ValueError(
            f"{name} refers to frozen weights of {where!r}, but {_named(lost)} (of {len(references.weights)}) "
            "differ there or are missing. Use `lightning-protrain consolidate --source FOLDER` with the original model."
        )
    state_dict = take_out(content["state_dict"], ())
    state_dict.update(found)
    content["state_dict"] = state_dict
    del content[FROZEN]


def resolve(weights: Mapping[str, Reference], source: str) -> dict[str, Tensor]:
    """Return the referenced weights that a source has bit for bit, cast to their saved dtype, by key; mapped.

    Args:
        weights: References by key of the state dict.
        source: Folder of safetensors, or name of a repository in the cache of the Hugging Face hub.

    Raises:
        FileNotFoundError: If there is no such source.
        ValueError: If a file of the source is not in the safetensors format.
    """
    there = _search(weights, source, lambda key, tensor: weights[key].is_of(tensor, digest_of))
    # Tied weights have only one name in the source, and weights of other shapes may have the same bytes.
    tensors = {key: there.get((each.digest, each.dtype)) for key, each in weights.items()}
    return {key: tensor.reshape(weights[key].shape) for key, tensor in tensors.items() if tensor is not None}


def held(weights: Mapping[str, Reference], tensors: Mapping[str, Tensor], source: str) -> set[str]:
    """Return the digests of the referenced weights that the source has; nothing is hashed.

    Args:
        weights: References by key of the state dict.
        tensors: The weights themselves, by key.
        source: As in `resolve`; raises the errors of `resolve`, too.
    """
    there = _search(weights, source, lambda key, tensor: same_bits(tensor, tensors[key]))
    lacking = {each.digest for each in weights.values() if (each.digest, each.dtype) not in there}
    return {each.digest for each in weights.values()} - lacking


def listed(weights: Mapping[str, Tensor], source: str) -> set[str]:
    """Return the keys for which the source has a tensor of that name, shape and a castable dtype.

    Args:
        weights: Weights by key of the state dict; values may be missing.
        source: As in `resolve`, with its errors.
    """
    with ExitStack() as stack:
        places = _places(_folder(source), stack)
        found = set()
        for key, tensor in weights.items():
            for name in _candidates(key):
                if name in places and list(tensor.shape) == places[name].get_slice(name).get_shape():
                    found.add(key)
        return found


def _search(
    weights: Mapping[str, Reference], source: str, is_it: Callable[[str, Tensor], bool]
) -> dict[tuple[str, str], Tensor]:
    """Return the referenced weights that the source has, by digest and dtype.

    Args:
        weights: References by key of the state dict.
        source: As in `resolve`.
        is_it: Returns True if a tensor of the source is the weight of a key.
    """
    keys: dict[tuple[str, str], list[str]] = {}
    for key, each in weights.items():
        keys.setdefault((each.digest, each.dtype), []).append(key)
    with ExitStack() as stack:
        places = _places(_folder(source), stack)

        def look(kind: tuple[str, str]) -> Tensor | None:
            for key in keys[kind]:
                for name in _candidates(key):
                    if name in places and is_it(key, tensor := _like(places[name].get_tensor(name), weights[key])):
                        return tensor
            return None

        found = zip(keys, side_by_side(look, keys), strict=True)
        return {kind: tensor for kind, tensor in found if tensor is not None}


def _places(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return the open file of each tensor name."""
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
        raise FileNotFoundError(f"{source!r} is no folder, and not in the cache of the hub") from error
    assert config is not None
    return Path(config).parent


def _candidates(key: str) -> Iterator[str]:
    """Yield the names that a weight may have in the source: without parts of adapters, and without parent modules."""
    parts = [part for part in key.split(".") if part not in _ADAPTED]
    for first in range(len(parts)):
        yield ".".join(parts[first:])


def _like(tensor: Tensor, reference: Reference) -> Tensor:
    wanted = _BY_NAME[reference.dtype]
    return tensor.to(wanted) if tensor.is_floating_point() and wanted.is_floating_point else tensor


def _named(keys: Collection[str]) -> str:
    first = ", ".join(list(keys)[:_MOST_NAMED])
    return first if len(keys) <= _MOST_NAMED else f"{first}, and {len(keys) - _MOST_NAMED} more"
