"""Replays of a segment under each activation policy, from the events of a step in which autograd keeps what it saves.

A policy has a rule for how long each activation of a forward exists, from which the peak of the forward follows. A new
policy needs such a rule and a case of `footprint`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from sys import maxsize
from typing import NamedTuple

from lightning_protrain.planner.plan import BlockPolicy
from lightning_protrain.profiler.records import Forward, OperationCost, Segment, Storage, least_swapped

# Returns the operation of the forward from which on an activation exists, and the first one at which it does not.
Rule = Callable[[Storage], tuple[int, int]]


def kept(storage: Storage) -> tuple[int, int]:
    """Autograd keeps what it saves."""
    return storage.made, storage.gone


def unsaved(storage: Storage) -> tuple[int, int]:
    """Autograd keeps nothing but the inputs."""
    return storage.made, storage.freed if storage.is_saved and not storage.is_input else storage.gone


def products_kept(storage: Storage) -> tuple[int, int]:
    """Autograd keeps the inputs, and selective checkpointing the products."""
    return (storage.made, maxsize) if storage.is_product else unsaved(storage)


def from_products(storage: Storage) -> tuple[int, int]:
    """Autograd keeps what it saves, and the products exist before the forward."""
    return (0, storage.gone) if storage.is_product else kept(storage)


@lru_cache(maxsize=4096)
def rise(storages: tuple[Storage, ...], rule: Rule = kept, casts: bool = True) -> int:
    """Return the peak of a forward, in bytes above the live activations at its begin.

    Args:
        storages: Activations of the forward.
        rule: Rule of the activation policy.
        casts: False if the weights are streamed in the dtype of autocast, so that no casts of them are made.
    """
    changes = Counter({0: -sum(it.nbytes for it in storages if not it.made)})
    for it in storages:
        if casts or not it.is_cast:
            begin, end = rule(it)
            changes[begin] += it.nbytes
            changes[end] -= it.nbytes
    return max(accumulate(changes[at] for at in sorted(changes)))


def peak(forward: Forward, rule: Rule = kept, casts: bool = True) -> int:
    """Return the peak of a forward, bytes; the arguments are those of `rise`."""
    return forward.live_bytes + rise(forward.storages, rule, casts)


def checkpoint_saving(segment: Segment) -> int:
    """Return the bytes that checkpointing frees: saved tensors except inputs, minus inputs that only it keeps alive."""
    freed = sum(it.nbytes for it in _alone(segment) if not it.is_input and not it.uses)
    return freed - segment.first_lost_inputs


def swap_saving(segment: Segment, swap_bytes: int = 0) -> int:
    """Return the bytes that swapping frees: saved tensors, including inputs, that are not too small.

    Args:
        segment: The segment.
        swap_bytes: As in `footprint`.
    """
    least = least_swapped(swap_bytes)
    return sum(it.nbytes for it in _alone(segment) if it.uses < 2 and it.nbytes >= least)


def _alone(segment: Segment) -> list[Storage]:
    return [] if segment.between else [it for it in segment.forward.storages if it.is_alone]


def product_bytes(segment: Segment) -> int | None:
    """Return the bytes of products; None if selective checkpointing is impossible.

    Without saved tensors, there is no backward that would use products.
    """
    if segment.between or not segment.keeps_products:
        return None
    storages = segment.forward.storages
    return any(it.is_saved for it in storages) * sum(it.nbytes for it in storages if it.is_product)


def idle_product_bytes(forward: Forward) -> int:
    """Return the bytes of products after the last saved tensor, which recomputation does not reach."""
    return sum(it.nbytes for it in forward.storages if it.is_product and it.made > forward.last_saved)


def recomputed(forward: Forward) -> tuple[OperationCost, ...]:
    """Return the operations that checkpointing runs again: PyTorch stops after the last saved tensor."""
    return tuple(cost for cost in forward.operations if not cost.is_idle)


def recomputed_beside_products(forward: Forward) -> tuple[OperationCost, ...]:
    """Return the operations that selective checkpointing runs again."""
    return tuple(cost for cost in recomputed(forward) if not cost.is_product)


class Footprint(NamedTuple):
    """The device memory of a segment under an activation policy, bytes.

    Attributes:
        forward: Peak of its forward.
        backward: Peak of its backward, including recomputation.
        freed: Activations that the policy frees between forward and backward.
    """

    forward: int
    backward: int
    freed: int


def footprint(segment: Segment, policy: BlockPolicy, lost: int, casts: bool, swap_bytes: int = 0) -> Footprint:
    """Return the device memory of a segment under a policy.

    Args:
        segment: The segment.
        policy: The policy.
        lost: Bytes of inputs that only recomputation keeps alive.
        casts: As in `rise`.
        swap_bytes: Host memory of the block if it swaps, bytes: the more, the larger is what it leaves on the device.
    """
    ahead, back, saving = segment.forward, segment.backward, checkpoint_saving(segment)
    backward = back.peak_bytes - (0 if casts else back.cast_bytes)
    if policy is BlockPolicy.CHECKPOINT:
        again = back.live_bytes - saving + rise(ahead.storages, kept, casts)
        return Footprint(peak(ahead, unsaved, casts), max(backward + lost, again), saving)
    if policy is BlockPolicy.SELECTIVE:
        again = max(back.asked_live, back.live_bytes) - saving + rise(ahead.storages, from_products, casts)
        backward = max(backward + lost + idle_product_bytes(ahead), again)
        return Footprint(peak(ahead, products_kept, casts), backward, saving - (product_bytes(segment) or 0))
    freed = swap_saving(segment, swap_bytes) if policy is BlockPolicy.SWAP else 0
    return Footprint(peak(ahead, kept, casts), backward, freed)
