"""The norm of all gradients together, wherever they are.

[Note: Norms of owners]
Under `shard` a gradient is on the rank that owns its parameter. So ranks tell each other the norm of every parameter
they own, and each of them takes the norm of all norms, in the order of the parameters: the same number on every rank,
to the bit what one rank with all gradients would have got.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from lightning_protrain.runtime.comm import Communicator


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
            norm = torch.linalg.vector_norm(parameter.grad)
        ordered.append(norm)
    first = parameters[0].device
    return torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in ordered]))


def clip_over_owners(
    parameters: Sequence[Tensor], shared: Collection[int], max_norm: float, communicator: Communicator
) -> None:
    """Bounds the norm of all gradients of the ranks of a node, see [Note: Norms of owners]; every rank calls it.

    Args:
        parameters: The same on every rank, in the same order.
        shared: Identities of those whose gradients are on the ranks that own them; others are whole on every rank.
        max_norm: The bound.
        communicator: Reaches the others.
    """
    exchanged = [parameter for parameter in parameters if id(parameter) in shared]
    # In double precision a norm of any dtype is kept as it is; to add zeros changes nothing.
    told = torch.zeros(2, len(exchanged), dtype=torch.float64)
    for at, parameter in enumerate(exchanged):
        if parameter.grad is not None:
            told[0, at] = torch.linalg.vector_norm(parameter.grad)
            told[1, at] = 1
    communicator.sum_of_node(told)
    norms = {id(p): told[0, at].to(p.dtype) for at, p in enumerate(exchanged) if told[1, at]}
    present = [p for p in parameters if id(p) in norms or (id(p) not in shared and p.grad is not None)]
    if present:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm(present, norms))
