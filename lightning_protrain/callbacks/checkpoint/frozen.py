"""Replaces frozen weights in checkpoints by references, see [Note: References] in checkpoint/references.py."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_protrain.callbacks.checkpoint.setup import stored
from lightning_protrain.checkpoint.references import FROZEN, Reference, References, held, listed, take_out
from lightning_protrain.checkpoint.serialize import can_hold, digest_of, shared_names, side_by_side
from lightning_protrain.quant_state import accept_companions

Frozen = Literal["reference", "store", "auto"]
# Key of the summary of references in the record of a manifest.
RECORD = "frozen"
# Entries of the state dict that an 8-bit layer of bitsandbytes saves beside `weight`. The names of a 4-bit layer's
# entries begin with the name of the weight.
_OF_8BIT = ("SCB", "weight_format")


class _KnownWeights(NamedTuple):
    """A cached digest of a weight; it is valid until the parameter, address, version or dtype changes."""

    owner: weakref.ref[Tensor]
    place: int
    version: int
    dtype: str
    digest: str


class FrozenWeights:
    """Replaces frozen weights in checkpoints by references, and checks references when a run resumes.

    Args:
        mode: Argument `frozen` of `ProTrainCheckpoint`.

    Raises:
        ValueError: If the mode is unknown.
    """

    def __init__(self, mode: Frozen) -> None:
        if mode not in get_args(Frozen):
            raise ValueError(f"frozen={mode!r}: give one of {', '.join(map(repr, get_args(Frozen)))}.")
        self.mode = mode
        self._known: dict[str, _KnownWeights] = {}
        # For "auto": all digests that were looked up in the source, and those that the source has.
        self._looked_up: set[str] = set()
        self._in_source_now: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": {}}  # Cached addresses are valid only in this process.

    def stored_bytes(self, module: nn.Module) -> int:
        """Return the minimum size of a checkpoint's weights, bytes."""
        refers = self._refers(module)
        return sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad or not refers)

    def expected(self, module: nn.Module) -> set[str]:
        """Return the keys that will probably be references; weights are not compared and need not be loaded."""
        if not self._refers(module):
            return set()
        weights = stored(module)
        frozen = {key: weights[key] for key in frozen_keys(module, weights) if key in weights}
        if self.mode != "auto":
            return set(frozen)
        source = source_of(module)
        assert source is not None
        try:
            keys = listed(frozen, source)
        except (FileNotFoundError, ValueError):
            return set()
        same = {id(frozen[key]) for key in keys}  # The source may have tied weights under only one name.
        return {key for key, value in frozen.items() if id(value) in same}

    def prepare(self, trainer: Trainer) -> None:
        """Compute the digests before training, so that a save on preemption is fast.

        Raises:
            ValueError: As in `take_out`.
        """
        if self._refers(trainer.lightning_module) and trainer.is_global_zero:
            self._references(trainer.lightning_module, trainer.strategy.lightning_module_state_dict())

    def take_out(self, trainer: Trainer, checkpoint: dict[str, Any], record: dict[str, Any]) -> None:
        """Replace frozen weights by references, on the rank that writes.

        Args:
            trainer: Trainer that saves.
            checkpoint: Lightning's checkpoint dict, changed in place.
            record: Record of the manifest, to which a summary of the references is added.

        Raises:
            ValueError: If the mode is "reference" and frozen weights are sharded among ranks.
        """
        module = trainer.lightning_module
        if not self._refers(module) or not trainer.is_global_zero:
            return
        state_dict = checkpoint["state_dict"]
        weights = self._references(module, state_dict)
        if not weights:
            return
        references = References(source_of(module), weights, _trainable(module))
        checkpoint["state_dict"] = take_out(state_dict, weights.keys())
        checkpoint[FROZEN] = references.to_content()
        twice = shared_names({key: state_dict[key] for key in weights})
        nbytes = sum(weight.nbytes for key, weight in weights.items() if key not in twice)
        record[RECORD] = {"source": references.source, "weights": len(weights), "nbytes": nbytes}

    def accept(self, module: LightningModule, references: References, name: str, same_roles: bool) -> None:
        """Compare the references of a checkpoint with the frozen weights in memory.

        Args:
            module: Module of the resumed run.
            references: References of the checkpoint.
            name: Name of the checkpoint, for messages.
            same_roles: True requires that this run trains exactly the weights that the saved run trained.

        Raises:
            ValueError: If weights differ.
        """
        _refuse_split(module, name)
        if same_roles:
            _refuse_other_roles(module, references, name)
        state_dict = module.state_dict()
        owners = frozen_keys(module, state_dict)
        of = {id(value): key for key, value in state_dict.items()}

        def digest(tensor: Tensor) -> str:
            key = of[id(tensor)]
            return self._digest(key, tensor, owners[key]) if key in owners else digest_of(tensor)

        references.refuse_others(state_dict, digest, name)

    def _references(self, module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Reference]:
        owners = frozen_keys(module, state_dict)
        tensors = {key: state_dict[key] for key in owners if can_hold(state_dict[key])}
        twice = shared_names(tensors)
        once = [key for key in tensors if key not in twice]
        made = side_by_side(lambda key: self._digest(key, tensors[key], owners[key]), once)
        digests = dict(zip(once, made, strict=True))
        weights = {
            key: Reference(str(tensor.dtype), tuple(tensor.shape), digests[twice.get(key, key)])
            for key, tensor in tensors.items()
        }
        return self._in_source(weights, tensors, source_of(module)) if self.mode == "auto" else weights

    def _refers(self, module: nn.Module) -> bool:
        if self.mode != "auto":
            if self.mode == "reference":
                _refuse_split(module, 'ProTrainCheckpoint(frozen="reference")')
            return self.mode == "reference"
        sizes = {flag: sum(p.nbytes for p in module.parameters() if p.requires_grad is flag) for flag in (True, False)}
        return sizes[False] > sizes[True] > 0 and source_of(module) is not None and not _is_split(module)

    def _digest(self, key: str, tensor: Tensor, owner: Tensor) -> str:
        """Return the digest of a weight; it is cached until the parameter's address, version or dtype changes."""
        if owner.is_inference() or tensor.data_ptr() != owner.data_ptr():  # No version, a copy, or a companion.
            return digest_of(tensor)
        known = self._known.get(key)
        place, version, dtype = owner.data_ptr(), owner._version, str(tensor.dtype)
        if known is None or known.owner() is not owner or known[1:4] != (place, version, dtype):
            known = self._known[key] = _KnownWeights(weakref.ref(owner), place, version, dtype, digest_of(tensor))
        return known.digest

    def _in_source(
        self, weights: Mapping[str, Reference], tensors: Mapping[str, Tensor], source: str | None
    ) -> dict[str, Reference]:
        """Return the references whose weights are bitwise in the source."""
        assert source is not None
        digests = {weight.digest for weight in weights.values()}
        if digests != self._looked_up:
            try:
                self._in_source_now = held(weights, tensors, source)
            except (FileNotFoundError, ValueError):  # The source may be a name that only its loader understands.
                self._in_source_now = set()
            self._looked_up = digests
        return {key: weight for key, weight in weights.items() if weight.digest in self._in_source_now}


def frozen_keys(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
    """Map each state dict key of a frozen parameter, or of a quantised one's companion, to the parameter.

    Args:
        module: Module of the state dict.
        state_dict: State dict; it may have companions, see [Note: Companions] in quant_state.py.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    frozen = {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
    others = parameters.keys() - frozen.keys()
    others.update(name for name, _ in module.named_buffers(remove_duplicate=False))
    weights: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        if not isinstance(value, Tensor) or key in others:
            continue
        owner = next((frozen[name] for name in _owners(key) if name in frozen), None)
        if owner is not None:
            weights[key] = owner
    return weights


def source_of(module: nn.Module) -> str | None:
    """Return the folder or name of the pretrained model, from the hyperparameter `model`; None if unknown."""
    hparams = getattr(module, "hparams", None)
    source = hparams.get("model") if isinstance(hparams, Mapping) else None
    return source if isinstance(source, str) and source else None


def drop_missing(keys: Collection[str]) -> Any:
    """Return a hook that removes `keys` from the missing keys of the next `load_state_dict`."""
    left = set(keys)

    def hook(module: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in left]
        left.clear()

    return hook


def accept_quantised(module: nn.Module) -> list[RemovableHandle]:
    """Let `load_state_dict` accept the additional entries of quantised layers until the handles are removed."""
    weights = ((layer, vars(layer)["_parameters"].get("weight")) for layer in module.modules())
    return [
        accept_companions(layer) for layer, weight in weights if weight is not None and "quant_state" in vars(weight)
    ]


def _owners(key: str) -> Iterator[str]:
    yield key
    parts = key.split(".")
    if parts[-1] in _OF_8BIT:
        yield ".".join([*parts[:-1], "weight"])
    for last in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:last])


def _trainable(module: nn.Module) -> tuple[str, ...]:
    return tuple(name for name, parameter in module.named_parameters(remove_duplicate=False) if parameter.requires_grad)


def _refuse_other_roles(module: nn.Module, references: References, name: str) -> None:
    saved, now = set(references.trainable), set(_trainable(module))
    thawed = [key for key in _trainable(module) if key not in saved and key in references.weights]
    names = {key for key, _ in module.named_parameters(remove_duplicate=False)}
    frozen = [key for key in references.trainable if key not in now and key in names]
    changes = [f"{key} was frozen, and is trained now" for key in thawed]
    changes += [f"{key} was trained, and is frozen now" for key in frozen]
    if changes:
        more = f", and {len(changes) - 4} more" if len(changes) > 4 else ""
        raise ValueError(
            f"{name} was saved by a run that trained other weights: {'; '.join(changes[:4])}{more}. Freeze the "
            'same weights, or allow the change with ProTrainCheckpoint(allow_drift=["optimizer"]).'
        )


def _is_split(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _refuse_split(module: nn.Module, what: str) -> None:
    if _is_split(module):
        raise ValueError(
            f"{what}: frozen weights that are sharded among ranks cannot be compared. Save with "
            'ProTrainCheckpoint(frozen="store"); `lightning-protrain consolidate` fills a checkpoint without them.'
        )
