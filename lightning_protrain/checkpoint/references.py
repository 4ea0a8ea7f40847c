"""Frozen weights that a checkpoint names instead of holding them: what they are, and where they are found again.

[Note: References]
What is not trained is the same in every checkpoint of a run, and in the model that it began with. So a checkpoint may
have a *reference* in its place: shape, dtype, and a SHA-256 of the bytes. It is a digest that nothing else has by
accident: in contrast to the digest of a file, it is all that is left of the weight. A reference is resolved from memory
(the model that resumes has the same weight, or is refused), or from the source: the folder the model was loaded from.
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

# Key of a checkpoint.
FROZEN = "frozen_weights"
# What adapters put between the parts of a name.
_ADAPTED = frozenset(("base_layer", "original_module"))
_MOST_NAMED = 4
_BY_NAME = {str(dtype): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class Reference:
    """One tensor that a checkpoint does not hold, see [Note: References].

    Attributes:
        dtype: As `str` of a `torch.dtype`.
        shape: Of the tensor.
        digest: SHA-256 of its elements in row-major order, in hexadecimal digits.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        """What it would take in the checkpoint."""
        return math.prod(self.shape) * _BY_NAME[self.dtype].itemsize

    def hollow(self) -> Tensor:
        """A tensor of its shape and dtype, without values."""
        return torch.empty(self.shape, dtype=_BY_NAME[self.dtype], device="meta")

    def is_of(self, tensor: Tensor, digest: Callable[[Tensor], str]) -> bool:
        """Whether this tensor, cast to its dtype if it has to be, is the one that was saved."""
        if tuple(tensor.shape) != self.shape or tensor.device.type == "meta":
            return False
        if str(tensor.dtype) == self.dtype:
            return digest(tensor) == self.digest
        wanted = _BY_NAME[self.dtype]
        castable = tensor.is_floating_point() and wanted.is_floating_point
        return castable and digest_of(tensor.detach().to(wanted)) == self.digest


@dataclass(frozen=True)
class References:
    """All of a checkpoint.

    Attributes:
        source: Folder or name that the model was loaded from, if it is known.
        weights: By key of the state dict.
        trainable: Names of the parameters that were trained.
    """

    source: str | None
    weights: Mapping[str, Reference]
    trainable: tuple[str, ...]

    @property
    def origin(self) -> str:
        """The source, for messages."""
        return "a model whose source is not known" if self.source is None else f"the model in {self.source!r}"

    def to_content(self) -> dict[str, Any]:
        """Plain values, for the checkpoint."""
        weights = {name: [each.dtype, list(each.shape), each.digest] for name, each in self.weights.items()}
        return {"source": self.source, "weights": weights, "trainable": list(self.trainable)}

    @staticmethod
    def from_content(content: Mapping[str, Any], name: str) -> References | None:
        """Those of a checkpoint, if it has any.

        Args:
            content: Of the checkpoint.
            name: The checkpoint, for messages.

        Raises:
            ValueError: They are not what `to_content` made.
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
                raise ValueError(f"no such dtype: {', '.join(sorted(unknown))}")
            return References(plain["source"], weights, tuple(plain["trainable"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: its references to frozen weights are none: {error}") from error

    def view(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state dict with tensors without values in the place of what it does not hold."""
        return {**state_dict, **{key: each.hollow() for key, each in self.weights.items()}}

    def refuse_others(self, tensors: Mapping[str, Any], digest: Callable[[Tensor], str], name: str) -> None:
        """Compares all of them with a state dict in memory.

        Args:
            tensors: The state dict.
            digest: Of a tensor.
            name: The checkpoint, for messages.

        Raises:
            ValueError: Some differ, or are missing; the message has the first ones.
        """
        there = {key: tensors[key] for key in self.weights if isinstance(tensors.get(key), Tensor)}
        twice = shared_names({key: each for key, each in there.items() if can_hold(each)})

        def differs(key: str) -> bool:
            each = self.weights[key]
            if key in twice and each == self.weights[twice[key]]:
                return False  # Said of its other name.
            return key not in there or not each.is_of(there[key], digest)

        unlike = side_by_side(differs, self.weights)
        wrong = [key for key, is_unlike in zip(self.weights, unlike, strict=True) if is_unlike]
        if wrong:
            raise ValueError(
                f"{name} does not hold frozen weights, but was saved with those of {self.origin}, and those of this "
                f"model are other ones: {_named(wrong)} (of {len(self.weights)}). Load the model that the run began "
                "with; what is trained is right above no other."
            )


def take_out(state_dict: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """A state dict of the same kind without some of its keys."""
    rest: dict[str, Any] = (OrderedDict if type(state_dict) is OrderedDict else dict)(
        (key, value) for key, value in state_dict.items() if key not in keys
    )
    if type(state_dict) is OrderedDict:
        vars(rest).update(vars(state_dict))  # `_metadata`: versions of its modules.
    return rest


def fill(content: dict[str, Any], name: str, source: str | Path | None = None) -> None:
    """Puts what a checkpoint refers to in its place, read from the source, every byte of it compared.

    Args:
        content: Of a checkpoint; changed in place. One without references stays as it is.
        name: The checkpoint, for messages.
        source: Where the model is now; None: where it was.

    Raises:
        ValueError: The source is gone, or has other weights; nothing is changed.
    """
    references = References.from_content(content, name)
    if references is None:
        return
    where = references.source if source is None else str(source)
    if where is None:
        raise ValueError(
            f"{name} does not hold its {len(references.weights)} frozen weights, nor where they came from: resume from "
            'it, or use `lightning-protrain consolidate --source FOLDER`. ProTrainCheckpoint(frozen="store") holds all.'
        )
    try:
        found = resolve(references.weights, where)
    except FileNotFoundError as error:
        raise ValueError(
            f"{name} does not hold its frozen weights, which came from {where!r}, and they are not there any more: "
            f"{error}. Put the model back, or use `lightning-protrain consolidate --source FOLDER` with the folder "
            "that has it now."
        ) from error
    lost = [key for key in references.weights if key not in found]
    if lost:
        raise ValueError(
            f"{name} does not hold its frozen weights, and {where!r} has not those that it was saved with: "
            f"{_named(lost)} (of {len(references.weights)}) differ, or are missing."
        )
    state_dict = take_out(content["state_dict"], ())
    state_dict.update(found)
    content["state_dict"] = state_dict
    del content[FROZEN]


def resolve(weights: Mapping[str, Reference], source: str) -> dict[str, Tensor]:
    """Those of the referenced weights that a source has to the last bit, cast as they were, by key; mapped.

    Args:
        weights: By key of the state dict.
        source: A folder of safetensors, or the name of a repository that is in the cache of Hugging Face's hub.

    Raises:
        FileNotFoundError: There is no such source.
        ValueError: It has a file that is none of safetensors.
    """
    digests = _search(weights, source, lambda key, tensor: weights[key].is_of(tensor, digest_of))
    found: dict[str, Tensor] = {}
    for key, each in weights.items():  # One with several names has one of them in the source.
        tensor = digests.get(each.digest)
        if tensor is not None and str(tensor.dtype) == each.dtype and tuple(tensor.shape) == each.shape:
            found[key] = tensor
    return found


def held(weights: Mapping[str, Reference], tensors: Mapping[str, Tensor], source: str) -> set[str]:
    """Digests of those that the source has; nothing is hashed.

    Args:
        weights: By key of the state dict.
        tensors: What they refer to, by key.
        source: As of `resolve`, with its errors.
    """
    return set(_search(weights, source, lambda key, tensor: same_bits(tensor, tensors[key])))


def listed(weights: Mapping[str, Tensor], source: str) -> set[str]:
    """Keys of those of which the source has one of their name and shape, of a dtype that can be cast to theirs.

    Args:
        weights: By key of the state dict; values may be missing.
        source: As of `resolve`, with its errors.
    """
    with ExitStack() as stack:
        places = _places(_folder(source), stack)
        found = set()
        for key, tensor in weights.items():
            for name in _candidates(key):
                if name in places and list(tensor.shape) == places[name].get_slice(name).get_shape():
                    found.add(key)
        return found


def _search(weights: Mapping[str, Reference], source: str, is_it: Callable[[str, Tensor], bool]) -> dict[str, Tensor]:
    """What the source has of them, by digest.

    Args:
        weights: By key of the state dict.
        source: As of `resolve`.
        is_it: Whether a tensor of the source is the weight of a key.
    """
    keys: dict[str, list[str]] = {}
    for key, each in weights.items():
        keys.setdefault(each.digest, []).append(key)
    with ExitStack() as stack:
        places = _places(_folder(source), stack)

        def look(digest: str) -> Tensor | None:
            for key in keys[digest]:
                for name in _candidates(key):
                    if name in places and is_it(key, tensor := _like(places[name].get_tensor(name), weights[key])):
                        return tensor
            return None

        found = zip(keys, side_by_side(look, keys), strict=True)
        return {digest: tensor for digest, tensor in found if tensor is not None}


def _places(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each name."""
    places: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is no file of tensors: {error}") from error
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
    """What a weight may be called in the source: without what adapters add, and without the names of its holders."""
    parts = [part for part in key.split(".") if part not in _ADAPTED]
    for first in range(len(parts)):
        yield ".".join(parts[first:])


def _like(tensor: Tensor, reference: Reference) -> Tensor:
    wanted = _BY_NAME[reference.dtype]
    return tensor.to(wanted) if tensor.is_floating_point() and wanted.is_floating_point else tensor


def _named(keys: Collection[str]) -> str:
    first = ", ".join(list(keys)[:_MOST_NAMED])
    return first if len(keys) <= _MOST_NAMED else f"{first}, and {len(keys) - _MOST_NAMED} more"
