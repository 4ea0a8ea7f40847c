"""Loads a model on one rank of a node; the other ranks hold only names and shapes until weights are placed.

[Note: Meta init]
If ranks share their offloaded weights, only one of them has to load the model. The others make an *outline*: the same
modules and names, with tensors on the meta device. Names and shapes are enough for adapters, optimizers and plans.
Reading a tensor without values raises an error, so it cannot go unnoticed. When all ranks have the plan, an outline
gets memory. Parameters stay the objects that optimizers and hooks know. Unwritten pages take no memory, so shared
weights cost nothing before they point to the shared copy. Rank 0 sends only the other weights.

Two other designs were no better. If each rank reads its own part, some tensors of the checkpoint are read several times
(experts of a layer, tied weights, new rows of an embedding), and ranks draw different random numbers. If all ranks map
the files, pages are shared only if no weight is cast, and these pages are in addition to the weights.

While weights are loaded, glibc is told to map every larger tensor separately, so that its memory returns to the system
when it is freed. Otherwise glibc keeps freed memory below a threshold, which grows up to 32 MiB.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from lightning_protrain.device.quant_state import attach_companions, has_companions, place_companions
from lightning_protrain.distributed.ddp import broadcast_weights
from lightning_protrain.distributed.failures import failing_together
from lightning_protrain.distributed.ranks import gather
from lightning_protrain.runtime.comm.collectives import RankMesh
from lightning_protrain.runtime.param import dense_like

T = TypeVar("T")
# Parameters of glibc's `mallopt`, and the threshold that a process reaches after it has freed large blocks.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_THRESHOLD = 32 << 20
# While weights are loaded, tensors from this size on are mapped separately.
_OWN_MAP_BYTES = 256 << 10


class _TensorPlace(NamedTuple):
    """A tensor of a model, and its place there.

    Attributes:
        name: Fully qualified name.
        tensor: A parameter, a buffer, or a tensor in a module's attribute.
        put: Replaces the tensor at this place; None: it is a parameter, which stays.
    """

    name: str
    tensor: Tensor
    put: Callable[[Tensor], None] | None = None


class _Form(NamedTuple):
    """The metadata of a tensor: all except its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """Return a host tensor with this metadata."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")


@contextmanager
def returning_memory() -> Iterator[None]:
    """Let tensors made within this context return their memory to the system when they are freed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _OWN_MAP_BYTES)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)


def load_on_first(ranks: RankMesh, load: Callable[[], T], outline: Callable[[], T]) -> T:
    """Load on the first rank of a node, and make outlines on its other ranks, see [Note: Meta init].

    Every rank calls it. Ranks that begin with the same random state end with the same one, as if all had loaded.

    Args:
        ranks: The ranks.
        load: Makes the object with values.
        outline: Makes the object without values; the default device is meta while it runs.

    Raises:
        RuntimeError: Loading failed on another rank.
    """
    first, before = ranks.local_rank == 0, torch.get_rng_state()
    with failing_together("Looking at the weights"):
        if not first:
            with torch.device("meta"):
                made = outline()
    with failing_together("Loading the weights"):
        if first:
            made = load()
    states = gather((before, torch.get_rng_state()), "the random states of the other ranks")
    began, ended = states[ranks.first_of_node]
    torch.set_rng_state(ended if torch.equal(began, before) else states[ranks.rank][1])
    return made


def find_waiting(model: nn.Module, ranks: RankMesh) -> frozenset[str]:
    """Return the names of tensors without values on any rank; every rank calls it.

    Raises:
        ValueError: The first rank of a node has no values of a parameter; raised on all ranks.
    """
    everywhere = gather(
        [(place.name, place.put is None) for place in _places(model) if place.tensor.is_meta],
        "the names of weights that the other ranks lack",
    )
    firsts = range(0, ranks.world_size, ranks.local_size)
    for rank in firsts:
        lacks = next((name for name, is_parameter in everywhere[rank] if is_parameter), None)
        if lacks is not None:
            raise ValueError(
                f"{lacks!r} is on the meta device on rank {rank}, the first of its node: it has no values to train. "
                "Load or initialise the weights in `configure_model` before fit, at least on that rank."
            )
    nowhere = {name for rank in firsts for name, _ in everywhere[rank]}
    return frozenset(name for names in everywhere for name, _ in names if name not in nowhere)


def make_room(model: nn.Module, waiting: Collection[str]) -> set[str]:
    """Give host memory to tensors without values; every rank calls it.

    Args:
        model: The model, equal on all ranks.
        waiting: Result of `find_waiting`.

    Returns:
        Names of the tensors that got memory on this rank.

    Raises:
        ValueError: A tensor is a view of a parameter that has no memory yet.
    """
    places = [place for place in _places(model) if place.name in waiting]
    forms: dict[str, _Form] = gather({place.name: _form_of(place.tensor) for place in places})[0]
    with failing_together("Making room for weights"):
        given: dict[int, Tensor] = {}
        for place in places:
            form = forms[place.name]
            if place.put is not None and place.tensor.is_meta:
                place.put(given.setdefault(id(place.tensor), form.empty()))
        made = {place.name for place in places if place.put is None and place.tensor.is_meta}
        for place in places:
            if place.name in made:
                _give_memory(place.name, place.tensor, forms[place.name])
        _follow_weights(model)
    return made


@dataclass(frozen=True)
class NamesByUse:
    """Names of parameters and buffers that not every rank needs in its host memory.

    Attributes:
        shared: Parameters that only the first rank of a node needs, because the others use its copy.
        resident: Parameters that are needed only on the device.
        own: Parameters and buffers whose values may differ between ranks; they are not sent.
    """

    shared: Collection[str] = ()
    resident: Collection[str] = ()
    own: Collection[str] = ()


NEEDED_EVERYWHERE = NamesByUse()


def send_values(
    model: nn.Module,
    ranks: RankMesh,
    waiting: Collection[str],
    device: torch.device,
    names: NamesByUse = NEEDED_EVERYWHERE,
) -> None:
    """Give all ranks the weights and buffers of rank 0; every rank calls it.

    Args:
        model: Model, with the same structure on all ranks.
        ranks: Ranks that receive the values.
        waiting: Names from `find_waiting`.
        device: Device of this rank.
        names: Names of parameters and buffers that not every rank needs.
    """
    made = make_room(model, waiting) if waiting else set()
    for fqn, parameter in model.named_parameters():
        if fqn not in names.own and (fqn in waiting or not has_companions(parameter)):
            if fqn not in names.shared:
                broadcast_weights([parameter])
            elif ranks.peers is not None and ranks.local_rank == 0:
                broadcast_weights([parameter], ranks.peers)
        if fqn in waiting:
            broadcast_weights(_companions_of(parameter))
        if fqn in made and fqn in names.resident and not has_companions(parameter) and device.type != "cpu":
            parameter.data = parameter.detach().to(device)
    broadcast_weights([buffer for name, buffer in model.named_buffers() if name not in names.own])
    others = [place for place in _places(model) if place.name in waiting and place.put is not None]
    broadcast_weights([place.tensor for place in others])


def send_attributes(model: nn.Module, waiting: Collection[str]) -> None:
    """Send rank 0's buffers, and tensors in module attributes, to all ranks; every rank calls it after `make_room`.

    Args:
        model: The model, equal on all ranks.
        waiting: Result of `find_waiting`.
    """
    others = [place for place in _places(model) if place.name in waiting and place.put is not None]
    broadcast_weights([place.tensor for place in others])


def _places(model: nn.Module) -> Iterator[_TensorPlace]:
    """Yield every parameter, then every buffer, then tensors in attributes of modules."""
    for fqn, parameter in model.named_parameters():
        yield _TensorPlace(fqn, parameter)
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield _TensorPlace(f"{path}.{name}", buffer, partial(module._buffers.__setitem__, name))
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                yield _TensorPlace(f"{path}.{name}", value, partial(vars(module).__setitem__, name))


def _form_of(tensor: Tensor) -> _Form:
    dense = dense_like(tensor)
    return _Form(tuple(dense.shape), dense.stride(), dense.dtype)


def _give_memory(fqn: str, parameter: Any, form: _Form) -> None:
    """Move a parameter into host memory; it stays the same object, with its hooks."""
    own = _form_of(parameter)
    if (own.shape, own.dtype) != (form.shape, form.dtype):
        raise ValueError(
            f"{fqn!r} is {own.dtype}{list(own.shape)} on this rank and {form.dtype}{list(form.shape)} on rank 0. All "
            "ranks must build the same model."
        )
    new: Any = torch.Tensor._make_subclass(type(parameter), form.empty(), parameter.requires_grad)
    vars(new).update(vars(parameter))
    attach_companions(parameter, new, lambda _, like: _form_of(like).empty())
    hooks, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    try:
        swap_tensors(parameter, new)
    except RuntimeError as error:
        raise ValueError(
            f"{fqn!r} is on the meta device, and something else looks at its memory or refers to it weakly: it cannot "
            "be given any. Keep no views of weights before fit, or load them on this rank."
        ) from error
    # Autograd finds hooks by the tensor that has been exchanged, so attach them again.
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks, after


def _follow_weights(model: nn.Module) -> None:
    """Point 4-bit layers, which also hold their weights' scales, to the new weights."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and "quant_state" in vars(module) and "quant_state" in vars(weight):
            vars(module)["quant_state"] = vars(weight)["quant_state"]


def _companions_of(parameter: Tensor) -> list[Tensor]:
    found: list[Tensor] = []

    def look(_: int, tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    place_companions(parameter, look)
    return found
