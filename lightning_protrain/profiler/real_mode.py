"""Runs code with real tensors where shapes alone do not do, with weights that come when they are needed.

[Note: Measured steps]
A step whose shapes depend on values is run once on the real device, under the same recorder as a traced one. The model
is not touched: stand-ins take the place of its tensors, and gradients are dropped as soon as they are accumulated. A
weight that is on the device already is read where it lies; buffers are copied. Any other weight (on the host, or on the
meta device) has no memory until an operation reads it; then its values are copied, or drawn, small and always the same,
where there are none. When such weights take more than a limit, those that have been read the longest ago lose their
memory again (the paper, section 3.2: on-demand tensor management). Every operation of forward and backward passes here,
so views and what autograd has saved come and go with their weights.
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

# Weights without values are drawn from a normal distribution of this width.
DRAWN_STD = 0.02


class RealMode(TorchDispatchMode):
    """Within it, every operation of this thread runs with real tensors on one device; see [Note: Measured steps].

    Random states and all tensors that existed before are as they were when it ends, values and versions.

    Args:
        tensors: Parameters and buffers of a model.
        device: Where it runs.
        limit: Bytes of weights from elsewhere that may have memory at one time, if no single operation reads more.

    Attributes:
        observer: Is told about everything that happens, if there is one.
        scopes: Names of the modules that run.
        peak_bytes: The most bytes of weights from elsewhere that had memory at one time.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device | str = "cpu", limit: int = 0) -> None:
        super().__init__()
        self.device = torch.empty(0, device=device).device  # with its number
        self.observer: Observer | None = None
        self.scopes: list[str] = []
        self.peak_bytes = 0
        self._limit = limit
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        # By address of a storage outside: that storage, and the one that stands for it.
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        # By address of one that stands for another: what fills it.
        self._sources: dict[int, _Source] = {}
        # Those that have memory, the one that was read the longest ago first.
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
        """Puts stand-ins in the place of tensors from outside, where PyTorch has taken function modes off."""
        return StandIns(self)

    def storage(self, tensor: Tensor) -> torch.UntypedStorage:
        """The storage that stands for the memory of `tensor`."""
        with torch._C.DisableTorchFunction():
            own = tensor.untyped_storage()
        return self._storages.get(own._cdata, (own, own))[1]

    def stand_in(self, tensor: Tensor) -> Tensor:
        """What takes the place of a tensor that was made outside, always the same object."""
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
        """None: what takes the place of a gradient would take memory."""
        return None

    def check_read(self, name: str, value: object) -> None:
        """Give memory to a weight whose address a kernel asks for: Triton's are no operations that dispatch shows."""
        if isinstance(value, Tensor):
            with torch._C.DisableTorchFunction():
                self._fetch({value.untyped_storage()._cdata})

    def attend(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The device has its own kernels."""
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._fetch(given)  # for a view too: it must lie within what has memory
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
        """A leaf on the device; tensors that share memory share it too."""
        with torch._C._DisableTorchDispatch():
            storage, is_parameter = tensor.untyped_storage(), isinstance(tensor, nn.Parameter)
            if storage._cdata not in self._storages:
                standing = storage
                # Not every kernel says that it changes buffers (batch norm): the step gets copies of these.
                if tensor.device != self.device or not is_parameter:
                    standing = torch.UntypedStorage(storage.nbytes(), device=self.device)
                # The real storage is kept, or its address might be given to another one.
                self._storages[storage._cdata] = storage, standing
            standing = self._storages[storage._cdata][1]
            empty = torch.empty(0, dtype=tensor.dtype, device=self.device)
            made = empty.set_(standing, tensor.storage_offset(), tensor.shape, tensor.stride())
            if standing is not storage and standing._cdata not in self._sources:
                source = _Source(standing, storage, tensor.dtype, len(self._sources), not is_parameter)
                self._sources[standing._cdata] = source
            return made.requires_grad_(tensor.requires_grad)

    def _fetch(self, keys: set[int]) -> None:
        """Gives memory to the weights in these storages, and takes it from others."""
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
        """Notes the values, shape and version of a tensor from outside that is about to change."""
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
    """What fills the storage that stands for one outside.

    Args:
        standing: That storage; it loses its memory.
        outside: What it stands for.
        dtype: Of what is in it.
        seed: Of what is drawn where there are no values.
        stays: Whether it keeps memory once it has some, as what the step changes must.

    Attributes:
        nbytes: Its size.
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
        """It has memory and values."""
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
        """It has no memory."""
        self._standing.resize_(0)
