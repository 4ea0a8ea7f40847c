"""The norm of all gradients together, wherever they are.

[Note: Norms of owners]
Under `shard` a gradient is on the rank that owns its parameter. So ranks tell each other the norm of every parameter
they own, and each of them takes the norm of all norms, in the order of the parameters: the same number on every rank,
to the bit what one rank with all gradients would have got.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from lightning_protrain.runtime.comm import Communicator
from lightning_protrain.runtime.guard import below_guard
from lightning_protrain.runtime.low_gradients import LowGradient, cast


def total_norm(parameters: Sequence[Tensor], norms: Mapping[int, Tensor]) -> Tensor:
    """Norm of the norms, in the order in which `torch.nn.utils.get_total_norm` stacks them.

    Args:
        parameters: With gradients, or with a norm in `norms`.
        norms: Those that are known, by the identity of the parameter.
    """
    # With several dtypes its order is that of a hash table.
    groups = _group_tensors_by_device_and_dtype([list(parameters)], with_indices=True)
    ordered = []
    for parameter in (parameters[at] for _, indices in groups.values() for at in indices):
        norm = norms.get(id(parameter))
        if norm is None:
            assert parameter.grad is not None
            norm = torch.linalg.vector_norm(cast(parameter.grad))
        ordered.append(norm)
    first = parameters[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in ordered]))


class NormScratch:
    """Host memory in which low-precision gradients are cast for their norms.

    It is kept from gradient to gradient: the first touch of fresh memory takes several times as long as the norm. The
    whole gradient is cast at once, and not in tiles, so that the norm has the bits of one that PyTorch takes.
    """

    def __init__(self) -> None:
        self._values = torch.empty(0)

    def norm(self, gradient: Tensor) -> Tensor:
        """Return the norm of a gradient in the dtype of its weight, a scalar."""
        low = gradient.landed() if isinstance(gradient, LowGradient) else gradient
        if low.dtype == gradient.dtype:
            return torch.linalg.vector_norm(low)
        if self._values.numel() < low.numel() or self._values.dtype != gradient.dtype:
            self._values = torch.empty(low.numel(), dtype=gradient.dtype)
        values = self._values.as_strided(low.shape, low.stride())
        return torch.linalg.vector_norm(values.copy_(low))


def take_norms(
    parameters: Sequence[Tensor], norms: dict[int, Tensor], land: Callable[[], None], scratch: NormScratch
) -> None:
    """Put the norms of gradients that are landing into `norms`, on the host's worker.

    Args:
        parameters: Whose gradients.
        norms: Takes them, by the identity of the parameter.
        land: Waits for the gradients and adds them up.
        scratch: Memory for casts, used by one thread at a time.
    """
    with below_guard(), torch.no_grad():
        land()
        for parameter in parameters:
            if parameter.grad is not None:
                norms[id(parameter)] = scratch.norm(parameter.grad)


def clip_values(parameters: Sequence[Tensor], clip_value: float) -> None:
    """As `torch.nn.utils.clip_grad_value_`, which raises where no parameter has a gradient.

    Those in the memory of copies are left to their steps, see [Note: Low gradients].
    """
    present = [p for p in parameters if p.grad is not None and not isinstance(p.grad, LowGradient)]
    if present:
        torch.nn.utils.clip_grad_value_(present, clip_value)


def norms_of_owners(
    parameters: Sequence[Tensor],
    shared: Collection[int],
    communicator: Communicator,
    known: Mapping[int, Tensor] = MappingProxyType({}),
) -> dict[int, Tensor]:
    """The norms of all gradients that ranks of a node own, by the identity of the parameter; every rank calls it.

    Args:
        parameters: The same on every rank, in the same order.
        shared: Identities of those whose gradients are on the ranks that own them.
        communicator: Reaches the others.
        known: Norms that this rank has taken already.
    """
    exchanged = [parameter for parameter in parameters if id(parameter) in shared]
    # In double precision a norm of any dtype is kept as it is; to add zeros changes nothing.
    told = torch.zeros(2, len(exchanged), dtype=torch.float64)
    for at, parameter in enumerate(exchanged):
        if parameter.grad is not None:
            norm = known.get(id(parameter))
            told[0, at] = torch.linalg.vector_norm(parameter.grad) if norm is None else norm
            told[1, at] = 1
    communicator.sum_of_node(told)
    return {id(p): told[0, at].to(p.dtype) for at, p in enumerate(exchanged) if told[1, at]}


def tell_overflow(found: dict[torch.device, Tensor], communicator: Communicator) -> None:
    """A gradient that is not finite on the rank that owns it is one on every rank, each of which calls it.

    Args:
        found: Of this rank, by device: more than 0 if there is one; changed in place.
        communicator: Reaches the ranks that own gradients.
    """
    here = sum((each.cpu() for each in found.values()), torch.zeros(1))
    anywhere = communicator.sum_of_node(here)
    found.setdefault(torch.device("cpu"), torch.zeros(1))
    for each in found.values():
        each.copy_(anywhere[0])


def bound_norm(
    parameters: Sequence[Tensor],
    max_norm: float,
    known: Mapping[int, Tensor] | None = None,
    later: Collection[int] = (),
    shared: Collection[int] = (),
    communicator: Communicator | None = None,
) -> Tensor | None:
    """Bounds the norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` does, bit for bit.

    Args:
        parameters: The same on every rank, in the same order.
        max_norm: The bound.
        known: Norms of this rank's gradients that have been taken, by the identity of the parameter; None: nobody
            scales gradients later.
        later: Identities of those that are scaled later, where all gradients have one dtype.
        shared: Identities of those whose gradients are on the ranks of a node that own them, see [Note: Norms of
            owners]; others are whole on every rank.
        communicator: Reaches these ranks, each of which calls it; None: nothing is shared.

    Returns:
        The factor of those that are scaled later; None: all have been.
    """
    norms = known or {}
    if communicator is not None:
        norms = norms_of_owners(parameters, shared, communicator, norms)
    present = [p for p in parameters if (id(p) in norms if id(p) in shared else p.grad is not None)]
    if known is None or len({parameter.dtype for parameter in present}) != 1:
        if communicator is None:
            torch.nn.utils.clip_grad_norm_(present, max_norm)
        elif present:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm(present, norms))
        return None
    coefficient = torch.clamp(max_norm / (total_norm(present, norms) + 1e-6), max=1.0)
    for parameter in present:
        if id(parameter) not in later and parameter.grad is not None:
            parameter.grad.mul_(coefficient.to(parameter.grad.device))
    return coefficient.cpu()
