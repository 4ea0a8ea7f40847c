"""Loading of a model on one rank of each node; the other ranks have meta tensors until weights are placed.

[Note: Meta init]
If ranks share their offloaded weights, only the first rank of a node loads the model. The others make an *outline*: the
same modules, with tensors on the meta device. Names and shapes are enough for adapters, optimizers and plans. After
planning, an outline gets host memory, without replacing parameter objects. Memory that is not written takes no pages,
so weights that are shared later cost nothing. Rank 0 sends only the values of the other weights.

While weights are loaded, glibc allocates larger tensors with `mmap`, so that their memory returns to the system when
they are freed. By default, glibc keeps freed memory below a threshold that grows up to 32 MiB.
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

from lightning_protrain.distributed.ddp import broadcast_weights
from lightning_protrain.distributed.failures import failing_together
from lightning_protrain.quant_state import attach_companions, has_companions, place_companions
from lightning_protrain.rank_store import RankStore
from lightning_protrain.runtime.comm.collectives import RankMesh
from lightning_protrain.runtime.param import dense_like

T = TypeVar("T")
# Parameters of glibc's `mallopt`, and the maximum that its dynamic threshold reaches, bytes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_THRESHOLD = 32 << 20
# Minimum size of tensors that are allocated with `mmap` while weights are loaded, bytes.
_OWN_MAP_BYTES = 256 << 10


class _TensorPlace(NamedTuple):
    """A tensor of a model.

    Attributes:
        tensor: A parameter, a buffer, or a tensor in a module's attribute.
        put: Function that replaces the tensor in its module; None for a parameter, which is not replaced.
    """

    name: str
    tensor: Tensor
    put: Callable[[Tensor], None] | None = None


class _Form(NamedTuple):
    """The metadata of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """Return a host tensor with this metadata."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu")


@contextmanager
def returning_memory() -> Iterator[None]:
    """Let tensors made within this context return their memory to the system when they are freed, if possible."""
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
    """Load on the first rank of each node, and make outlines on the other ranks, see [Note: Meta init].

    Every rank calls it. Ranks with equal random states before have equal random states after.

    Args:
        ranks: The ranks.
        load: Makes the model with values.
        outline: Makes the model without values; the default device is meta during the call.

    Raises:
        RuntimeError: If loading failed on another rank.
    """
    first, before = ranks.local_rank == 0, torch.get_rng_state()
    with failing_together("Looking at the weights"):
        if not first:
            with torch.device("meta"):
                made = outline()
    with failing_together("Loading the weights"):
        if first:
            made = load()
    states = RankStore.current().gather((before, torch.get_rng_state()), "Comparing random states")
    began, ended = states[ranks.first_of_node]
    torch.set_rng_state(ended if torch.equal(began, before) else states[ranks.rank][1])
    return made


def find_waiting(model: nn.Module, ranks: RankMesh) -> frozenset[str]:
    """Return the names of tensors that are on the meta device on some rank; every rank calls it.

    Tensors that are on the meta device on the first rank of a node are not included.

    Raises:
        ValueError: If such a tensor is a parameter; raised on all ranks.
    """
    everywhere = RankStore.current().gather(
        [(place.name, place.put is None) for place in _places(model) if place.tensor.is_meta],
        "Comparing meta tensors",
    )
    firsts = range(0, ranks.world_size, ranks.local_size)
    for rank in firsts:
        lacks = next((name for name, is_parameter in everywhere[rank] if is_parameter), None)
        if lacks is not None:
            raise ValueError(
                f"{lacks!r} is on the meta device on rank {rank}, the first of its node, so it has no values. Load or "
                "initialise the weights in `configure_model` before fit, at least on that rank."
            )
    nowhere = {name for rank in firsts for name, _ in everywhere[rank]}
    return frozenset(name for names in everywhere for name, _ in names if name not in nowhere)


def make_room(model: nn.Module, waiting: Collection[str]) -> set[str]:
    """Allocate host memory for meta tensors; every rank calls it.

    Args:
        model: The model, equal on all ranks.
        waiting: Result of `find_waiting`.

    Returns:
        Names of the parameters that were allocated on this rank.

    Raises:
        ValueError: If a view of a meta parameter exists, so that it cannot be allocated.
    """
    places = [place for place in _places(model) if place.name in waiting]
    forms = RankStore.current().broadcast({place.name: _form_of(place.tensor) for place in places}, "Comparing tensors")
    with failing_together("Allocating memory for weights"):
        memory: dict[int, Tensor] = {}
        for place in places:
            form = forms[place.name]
            if place.put is not None and place.tensor.is_meta:
                place.put(memory.setdefault(id(place.tensor), form.empty()))
        made = {place.name for place in places if place.put is None and place.tensor.is_meta}
        for place in places:
            if place.name in made:
                _give_memory(place.name, place.tensor, forms[place.name])
        _follow_weights(model)
    return made


@dataclass(frozen=True)
class NamesByUse:
    """Names of parameters and buffers that are not sent to every rank, or not kept in host memory.

    Attributes:
        shared: Parameters that are only sent to the first rank of each node, because its other ranks use its copy.
        resident: Parameters that are moved to the device.
        own: Parameters and buffers that are not sent, because their values may differ between ranks.
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
    """Broadcast the weights and buffers of rank 0; every rank calls it.

    Args:
        model: The model, with the same structure on all ranks.
        ranks: The ranks.
        waiting: Result of `find_waiting`.
        device: Device of this rank.
        names: Exceptions, by name.
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
    send_attributes(model, waiting)


def send_attributes(model: nn.Module, waiting: Collection[str]) -> None:
    """Broadcast rank 0's values of buffers and tensors in module attributes; every rank calls it after `make_room`.

    Args:
        model: The model, equal on all ranks.
        waiting: Result of `find_waiting`.
    """
    others = [place for place in _places(model) if place.name in waiting and place.put is not None]
    broadcast_weights([place.tensor for place in others])


def _places(model: nn.Module) -> Iterator[_TensorPlace]:
    """Yield all parameters, then buffers and tensors in attributes of each module."""
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
    """Allocate host memory for a meta parameter, which stays the same object with the same hooks."""
    here = _form_of(parameter)
    if (here.shape, here.dtype) != (form.shape, form.dtype):
        raise ValueError(
            f"{fqn!r} is {here.dtype}{list(here.shape)} on this rank and {form.dtype}{list(form.shape)} on rank 0. All "
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
            f"{fqn!r} is on the meta device and cannot be allocated, because a view of it or a weak reference to it "
            "exists. Do not keep views of weights before fit, or load the weights on this rank."
        ) from error
    # Attach the hooks again, because `swap_tensors` has moved them to the other tensor.
    parameter._backward_hooks, parameter._post_accumulate_grad_hooks = hooks, after


def _follow_weights(model: nn.Module) -> None:
    """Update the reference of 4-bit layers to the companions of their weight."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and "quant_state" in vars(module) and "quant_state" in vars(weight):
            vars(module)["quant_state"] = vars(weight)["quant_state"]


def _companions_of(parameter: Tensor) -> list[Tensor]:
    companions: list[Tensor] = []

    def look(_: int, tensor: Tensor) -> Tensor:
        companions.append(tensor)
        return tensor

    place_companions(parameter, look)
    return companions
