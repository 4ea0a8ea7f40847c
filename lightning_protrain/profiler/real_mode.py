"""Dispatch mode that runs a step with real tensors, if its shapes depend on values; weights are fetched on demand.

The model is not changed: each of its tensors is replaced by a *stand-in* on the device, and gradients are freed after
their accumulation. Weights that are already on the device are used in place; buffers are copied.

The stand-in of any other weight (on the host, or on the meta device) has no memory until an operation reads it. Then
its values are copied, or drawn as small reproducible random numbers if the weight is on the meta device. If all fetched
weights exceed a limit, the least recently read ones are freed (paper, section 3.2: on-demand tensor management).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_protrain.profiler.fake_mode import Observer, StandIns
from lightning_protrain.profiler.ops import written_tensors

# Standard deviation of random weights.
DRAWN_STD = 0.02


class RealMode(TorchDispatchMode):
    """A dispatch mode that runs the operations of this thread with real tensors on one device.

    At its end, random states and all tensors that existed before are restored, including their versions.

    Args:
        tensors: Parameters and buffers of a model.
        device: Device that runs the operations.
        limit: Maximum size of all fetched weights, bytes, unless a single operation reads more.

    Attributes:
        observer: Receiver of all events, or None.
        scopes: Names of the running units, innermost last.
        peak_bytes: Peak size of all fetched weights, bytes.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device | str = "cpu", limit: int = 0) -> None:
        super().__init__()
        self.device = torch.empty(0, device=device).device  # Including its index.
        self.observer: Observer | None = None
        self.scopes: list[str] = []
        self.peak_bytes = 0
        self._limit = limit
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        # By address of a model's storage: the storage, and the storage of its stand-in.
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        # By address of a stand-in's storage.
        self._sources: dict[int, _Source] = {}
        # Sources whose stand-in has memory, the least recently read first.
        self._present: dict[int, _Source] = {}
        self._own: set[StorageWeakRef] = set()
        self._journal: dict[int, object] = {}
        self._undo = ExitStack()
        self._lift = StandIns(self)
        for tensor in tensors:
            if id(tensor) not in self._stand_ins:
                self._stand_ins[id(tensor)] = tensor, self._make(tensor)

    def __enter__(self) -> RealMode:
        self._undo.callback(random.setstate, random.getstate())
        self._undo.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 (the global generator)
        self._undo.callback(torch.set_rng_state, torch.get_rng_state())
        if self.device.type != "cpu":
            states = torch.get_device_module(self.device)
            self._undo.callback(states.set_rng_state, states.get_rng_state(self.device), self.device)
        self._lift.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._lift.__exit__(*exception)
        with torch.no_grad():
            self._undo.close()
        for source in self._present.values():
            source.free()
        for known in (self._stand_ins, self._storages, self._sources, self._present, self._own, self._journal):
            known.clear()

    def lifted(self) -> StandIns:
        """Return a function mode that replaces tensors by stand-ins, for code where PyTorch disables function modes."""
        return StandIns(self)

    def storage(self, tensor: Tensor) -> torch.UntypedStorage:
        """Return the storage of the tensor's stand-in."""
        with torch._C.DisableTorchFunction():
            own = tensor.untyped_storage()
        return self._storages.get(own._cdata, (own, own))[1]

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return the stand-in of a tensor from outside the step; return tensors of the step themselves."""
        found = self._stand_ins.get(id(tensor))
        if found is not None:
            return found[1]
        with torch._C.DisableTorchFunction():
            if tensor.device == self.device or self.device.type == "cpu" or not self._is_from_outside(tensor):
                return tensor
            moved = self._make(tensor)
        self._stand_ins[id(tensor)] = tensor, moved
        return moved

    def elsewhere(self, gradient: Tensor) -> Tensor | None:
        """Return None: a copy of the gradient would take memory."""
        return None

    def check_read(self, name: str, value: object) -> None:
        """Fetch a weight when its address is read: a Triton kernel gets addresses, and dispatch modes do not see it."""
        if isinstance(value, Tensor):
            with torch._C.DisableTorchFunction():
                self._fetch({value.untyped_storage()._cdata})

    def attend(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run `scaled_dot_product_attention` with the device's own kernels."""
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._fetch(given)
        for tensor in written_tensors(func, args, kwargs):
            self._remember(tensor)
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._own.add(StorageWeakRef(tensor.untyped_storage()))
        if self.observer is not None:
            self.observer.operation(func, args, kwargs, result)
        return result

    def _is_from_outside(self, tensor: Tensor) -> bool:
        return tensor.grad_fn is None and StorageWeakRef(tensor.untyped_storage()) not in self._own

    def _make(self, tensor: Tensor) -> Tensor:
        """Return a stand-in on the device; tensors that share memory get stand-ins that share memory."""
        with torch._C._DisableTorchDispatch():
            storage, is_parameter = tensor.untyped_storage(), isinstance(tensor, nn.Parameter)
            if storage._cdata not in self._storages:
                standing = storage
                # Copy buffers, because some kernels (batch norm) change buffers without declaring it.
                if tensor.device != self.device or not is_parameter:
                    standing = torch.UntypedStorage(storage.nbytes(), device=self.device)
                # Keep a reference, so that the storage's address is not reused.
                self._storages[storage._cdata] = storage, standing
            standing = self._storages[storage._cdata][1]
            empty = torch.empty(0, dtype=tensor.dtype, device=self.device)
            made = empty.set_(standing, tensor.storage_offset(), tensor.shape, tensor.stride())
            if standing is not storage and standing._cdata not in self._sources:
                source = _Source(standing, storage, tensor.dtype, len(self._sources), not is_parameter)
                self._sources[standing._cdata] = source
            return made.requires_grad_(tensor.requires_grad)

    def _fetch(self, keys: set[int]) -> None:
        """Fetch the weights whose stand-ins have these storages, and free others to stay within the limit."""
        wanted = {key: self._sources[key] for key in keys & self._sources.keys()}
        if not wanted:
            return
        others = {key: source for key, source in self._present.items() if key not in wanted}
        taken = sum(source.nbytes for source in (*others.values(), *wanted.values()))
        for key, source in list(others.items()):
            if taken <= self._limit:
                break
            if not source.stays:
                source.free()
                taken -= others.pop(key).nbytes
        for source in wanted.values():
            source.come()
        self._present = others | wanted
        self.peak_bytes = max(self.peak_bytes, taken)

    def _remember(self, tensor: Tensor) -> None:
        """Store values, shape and version of a tensor from outside the step before it changes, to restore them."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._sources:
            self._sources[storage._cdata].stays = True
            return
        if StorageWeakRef(storage) in self._own:
            return
        if id(tensor) not in self._journal and not tensor.is_inference():
            self._journal[id(tensor)] = tensor
            self._undo.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
            self._undo.callback(tensor.as_strided_, tensor.shape, tensor.stride(), tensor.storage_offset())
        if storage._cdata not in self._journal:
            self._journal[storage._cdata] = storage
            self._undo.callback(storage.copy_, storage.clone())


class _Source:
    """The source of a stand-in's values.

    Args:
        standing: Storage of the stand-in; its memory is freed.
        outside: Storage of the model's tensor.
        dtype: Dtype of the tensor.
        seed: Seed of the random values of a meta tensor.
        stays: True if the stand-in must not be freed once it has been fetched, because the step may change it.

    Attributes:
        nbytes: Size of the storage, bytes.
    """

    def __init__(
        self,
        standing: torch.UntypedStorage,
        outside: torch.UntypedStorage,
        dtype: torch.dtype,
        seed: int,
        stays: bool,
    ) -> None:
        self.nbytes, self.stays = outside.nbytes(), stays
        self._standing, self._outside, self._dtype, self._seed = standing, outside, dtype, seed
        standing.resize_(0)

    def come(self) -> None:
        """Allocate the stand-in and set its values."""
        if self._standing.nbytes() or not self.nbytes:
            return
        self._standing.resize_(self.nbytes)
        if self._outside.device.type != "meta":
            self._standing.copy_(self._outside)
            return
        values = torch.empty(0, dtype=self._dtype, device=self._standing.device).set_(self._standing)
        if self._dtype.is_floating_point and self._dtype.itemsize > 1:
            generator = torch.Generator(self._standing.device).manual_seed(self._seed)
            values.normal_(0, DRAWN_STD, generator=generator)
        else:
            values.zero_()

    def free(self) -> None:
        """Free the memory of the stand-in."""
        self._standing.resize_(0)
