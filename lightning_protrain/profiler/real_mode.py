"""Runs a step with real tensors if shapes are not enough, with weights that get memory on demand.

A step whose shapes depend on values runs once on the real device, under the recorder that traces also use. The model is
not touched: stand-ins replace its tensors, and gradients are dropped once they are accumulated. A weight on the device
is read in place; buffers are copied. Any other weight (on the host, or on the meta device) has no memory until an
operation reads it. Then its values are copied. Without values, small reproducible random numbers are drawn. If such
weights exceed a limit, the least recently read ones lose their memory again (paper, section 3.2: on-demand tensor
management). Every operation of forward and backward passes through this mode, so views and saved tensors stay
consistent with their weights.
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
    """A mode in which every operation of this thread runs with real tensors on one device.

    When it ends, random states and all tensors that existed before have their former values and versions.

    Args:
        tensors: Parameters and buffers of a model.
        device: Device that runs the operations.
        limit: Maximum bytes of fetched weights with memory, unless a single operation reads more.

    Attributes:
        observer: Receives all events; None if they are not needed.
        scopes: Names of the running modules.
        peak_bytes: Peak of the bytes of fetched weights with memory.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device | str = "cpu", limit: int = 0) -> None:
        super().__init__()
        self.device = torch.empty(0, device=device).device  # with its number
        self.observer: Observer | None = None
        self.scopes: list[str] = []
        self.peak_bytes = 0
        self._limit = limit
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        # For each address of a model's storage: that storage, and its stand-in.
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        # For each address of a stand-in storage: its source.
        self._sources: dict[int, _Source] = {}
        # Sources with memory, the least recently read first.
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
        self._undo.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 (users draw from this one)
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
            source.leave()
        for known in (self._stand_ins, self._storages, self._sources, self._present, self._own, self._journal):
            known.clear()

    def lifted(self) -> StandIns:
        """Return a mode with stand-ins, for code that runs while PyTorch has switched function modes off."""
        return StandIns(self)

    def storage(self, tensor: Tensor) -> torch.UntypedStorage:
        """Return the stand-in storage for the memory of `tensor`."""
        with torch._C.DisableTorchFunction():
            own = tensor.untyped_storage()
        return self._storages.get(own._cdata, (own, own))[1]

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return the stand-in of a tensor from outside the step; it is always the same object."""
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
        """Return None: a replacement for a gradient would take memory."""
        return None

    def check_read(self, name: str, value: object) -> None:
        """Give memory to a weight whose address a kernel reads, because dispatch does not see Triton kernels."""
        if isinstance(value, Tensor):
            with torch._C.DisableTorchFunction():
                self._fetch({value.untyped_storage()._cdata})

    def attend(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run attention with the device's own kernels."""
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._fetch(given)  # also for a view, which needs memory at its offset
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
        """Return a leaf on the device; tensors that share memory share it on the device, too."""
        with torch._C._DisableTorchDispatch():
            storage, is_parameter = tensor.untyped_storage(), isinstance(tensor, nn.Parameter)
            if storage._cdata not in self._storages:
                standing = storage
                # Some kernels change buffers without declaring it (batch norm): the step gets copies of buffers.
                if tensor.device != self.device or not is_parameter:
                    standing = torch.UntypedStorage(storage.nbytes(), device=self.device)
                # Keep the real storage, because its address might be given to another storage.
                self._storages[storage._cdata] = storage, standing
            standing = self._storages[storage._cdata][1]
            empty = torch.empty(0, dtype=tensor.dtype, device=self.device)
            made = empty.set_(standing, tensor.storage_offset(), tensor.shape, tensor.stride())
            if standing is not storage and standing._cdata not in self._sources:
                source = _Source(standing, storage, tensor.dtype, len(self._sources), not is_parameter)
                self._sources[standing._cdata] = source
            return made.requires_grad_(tensor.requires_grad)

    def _fetch(self, keys: set[int]) -> None:
        """Give memory to the weights in these storages, and take memory from other weights."""
        wanted = {key: self._sources[key] for key in keys & self._sources.keys()}
        if not wanted:
            return
        others = {key: source for key, source in self._present.items() if key not in wanted}
        taken = sum(source.nbytes for source in (*others.values(), *wanted.values()))
        for key, source in list(others.items()):
            if taken <= self._limit:
                break
            if not source.stays:
                source.leave()
                taken -= others.pop(key).nbytes
        for source in wanted.values():
            source.come()
        self._present = others | wanted
        self.peak_bytes = max(self.peak_bytes, taken)

    def _remember(self, tensor: Tensor) -> None:
        """Store the values, shape and version of an outside tensor that is about to change."""
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
    """The source of a stand-in storage's values.

    Args:
        standing: Stand-in storage; it loses its memory.
        outside: Storage of the model that the stand-in replaces.
        dtype: Dtype of the weights in the storage.
        seed: Seed of the random numbers if there are no values.
        stays: True if the stand-in keeps its memory, because the step changes it.

    Attributes:
        nbytes: Size of the storage.
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
        """Give memory and values to the stand-in."""
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

    def leave(self) -> None:
        """Take the memory from the stand-in."""
        self._standing.resize_(0)
