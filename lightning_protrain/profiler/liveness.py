"""Counts the bytes of activations that are alive.

[Note: Shadow]
What keeps an activation alive decides what a policy can free: autograd gives up what it has saved, a variable of the
program or an attribute of a module does not. So autograd never saves the traced tensors themselves. It gets a *shadow*,
a tensor of the same geometry with a storage of its own, which counts as one with its original. An activation whose
original is dead is held by autograd alone.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_protrain.profiler.tracing import ShapeTensor


class Activation:
    """One storage that operations made, and its shadow; it is alive as long as either is.

    Args:
        nbytes: Its size.

    Attributes:
        original_alive: Whether anybody but autograd holds it.
        is_gradient: Whether it has become the gradient of a parameter.
        is_cast: Whether it is a copy of a parameter that the present segment has made.
        is_own: Whether the present segment has saved it and was not given it.
        is_product: Whether it is a product of the present segment, see [Note: Products].
    """

    __slots__ = ("_holders", "_shadow", "is_cast", "is_gradient", "is_own", "is_product", "nbytes", "original_alive")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.original_alive = True
        self.is_gradient = self.is_cast = self.is_own = self.is_product = False
        self._holders = 0
        self._shadow: tuple[int, weakref.ref[torch.UntypedStorage]] | None = None

    @property
    def alive(self) -> bool:
        """Whether anybody does, autograd too."""
        return self._holders > 0


class LiveBytes:
    """Bytes of all activations that are alive.

    Attributes:
        now: How many there are.
        held_gradients: How many more there would be if gradients of parameters that have been accumulated since this
            was last set to 0 had stayed.
        casts: The part of `now` that `is_cast`.
        kept: The part of `now` that `is_own` and that autograd alone keeps.
        kept_casts: The part of both.
        dropped: Bytes that are or were `is_product` since this was last set to 0, and that nobody but autograd holds.
    """

    def __init__(self) -> None:
        self.now = 0
        self.held_gradients = 0
        self.casts = self.kept = self.kept_casts = self.dropped = 0
        # By address of a storage that is alive.
        self._found: dict[int, Activation] = {}

    def add(self, storage: torch.UntypedStorage) -> None:
        """An operation has made `storage`, or has made it once before."""
        if storage._cdata not in self._found:
            self._join(storage, Activation(storage.nbytes()), True)

    def find(self, storage: torch.UntypedStorage) -> Activation | None:
        """What was made with `storage`; None: it was not made by an operation."""
        return self._found.get(storage._cdata)

    def shadow(self, tensor: Tensor, activation: Activation) -> Tensor:
        """What autograd saves in place of `tensor`, see [Note: Shadow]."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
                return tensor
            elem = tensor.elem if isinstance(tensor, ShapeTensor) else tensor
            storage = self._shadow_storage(elem.untyped_storage(), tensor._version, activation)
            empty = torch.empty(0, dtype=elem.dtype, device=elem.device)
            shadow = empty.set_(storage, elem.storage_offset(), elem.shape, elem.stride())
            return ShapeTensor(shadow, tensor.device) if isinstance(tensor, ShapeTensor) else shadow

    def _shadow_storage(
        self, storage: torch.UntypedStorage, version: int, activation: Activation
    ) -> torch.UntypedStorage:
        """A storage with the values of `storage`, if it has any; the same one as long as it lives."""
        if activation._shadow is not None and activation._shadow[0] == version:
            found = activation._shadow[1]()
            if found is not None:
                return found
        fresh = torch.UntypedStorage(storage.nbytes(), device=storage.device)
        if storage.device.type != "meta":
            fresh.copy_(storage)
        activation._shadow = version, weakref.ref(fresh)
        self._join(fresh, activation, False)
        return fresh

    def _join(self, storage: torch.UntypedStorage, activation: Activation, is_original: bool) -> None:
        if not activation.alive:
            self.now += activation.nbytes
        activation._holders += 1
        self._found[storage._cdata] = activation
        weakref.finalize(storage, self._leave, storage._cdata, is_original).atexit = False

    def mark(self, activations: Iterable[Activation], cast: bool = False, own: bool = False) -> None:
        """Notes what the present segment has made, has saved, or has no longer to do with."""
        for activation in activations:
            self._count(activation, -1)
            activation.is_cast, activation.is_own = cast, own
            self._count(activation, 1)

    def _count(self, activation: Activation, sign: int) -> None:
        if not activation.alive:
            return
        kept = activation.is_own and not activation.original_alive
        self.casts += sign * activation.nbytes * activation.is_cast
        self.kept += sign * activation.nbytes * kept
        self.kept_casts += sign * activation.nbytes * (kept and activation.is_cast)

    def _leave(self, key: int, is_original: bool) -> None:
        activation = self._found.pop(key)
        self._count(activation, -1)
        activation._holders -= 1
        activation.original_alive &= not is_original
        self.dropped += activation.nbytes * (is_original and activation.is_product)
        self._count(activation, 1)
        if not activation.alive:
            self.now -= activation.nbytes
            self.held_gradients += activation.nbytes * activation.is_gradient

    def check_conserved(self) -> None:
        """To be called when all that a trace gave has been let go: all that it made is gone, or somebody holds it."""
        assert self.now == sum(activation.nbytes for activation in set(self._found.values())), "bytes are miscounted"
        if not self.now:
            return
        gc.collect()
        tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
        with torch._C.DisableTorchFunction():
            strided = [item for item in tensors if item.layout is torch.strided]  # others have no storage to ask for
            left = [item for item in strided if self._storage(item)._cdata in self._found]
        del tensors, strided
        # Autograd's own references are none that Python knows of.
        held = any(referrer is not left for tensor in left for referrer in gc.get_referrers(tensor))
        assert not self.now or held, f"{self.now} bytes of activations are alive after the step, and nobody holds them"

    @staticmethod
    def _storage(tensor: Tensor) -> torch.UntypedStorage:
        return (tensor.elem if isinstance(tensor, ShapeTensor) else tensor).untyped_storage()
