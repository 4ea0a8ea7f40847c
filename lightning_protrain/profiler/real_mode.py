"""Dispatch mode that runs a step with real tensors, if its shapes depend on values; weights are fetched on demand.

The model is not changed: each of its tensors is replaced by a *stand-in* on the device, and gradients are freed after
their accumulation. Weights that are already on the device are used in place; buffers are copied.

The stand-in of any other weight (on the host, or on the meta device) has no memory until an operation reads it. Then
its values are copied, or drawn as small reproducible random numbers if the weight is on the meta device. If all fetched
weights exceed a limit, the least recently read ones are freed (paper, section 3.2: on-demand tensor management).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from lightning_protrain.profiler.fake_mode import StepMode
from lightning_protrain.profiler.ops import written_tensors

# Standard deviation of random weights.
DRAWN_STD = 0.02


class RealMode(StepMode):
    """A dispatch mode that runs the operations of this thread with real tensors on one device.

    Args:
        tensors: Parameters and buffers of a model.
        device: Device that runs the operations.
        limit: Maximum size of all fetched weights, bytes, unless a single operation reads more.

    Attributes:
        peak_bytes: Peak size of all fetched weights, bytes.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device | str = "cpu", limit: int = 0) -> None:
        super().__init__(torch.empty(0, device=device).device)  # Including its index.
        self.peak_bytes = 0
        self._limit = limit
        # By address of a stand-in's storage.
        self._sources: dict[int, _Source] = {}
        # Sources whose stand-in has memory, the least recently read first.
        self._present: dict[int, _Source] = {}
        for tensor in tensors:
            if id(tensor) not in self._stand_ins:
                self._replace(tensor)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for source in self._present.values():
            source.free()
        self._sources.clear()
        self._present.clear()

    def check_read(self, name: str, value: object) -> None:
        """Fetch a weight when its address is read: a Triton kernel gets addresses, and dispatch modes do not see it."""
        if isinstance(value, Tensor):
            with torch._C.DisableTorchFunction():
                self._fetch({value.untyped_storage()._cdata})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        read = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._fetch(read)
        for tensor in written_tensors(func, args, kwargs):
            self._remember(tensor)
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in read:
                self._own.add(StorageWeakRef(tensor.untyped_storage()))
        if self.observer is not None:
            self.observer.operation(func, args, kwargs, result)
        return result

    def _needs_stand_in(self, tensor: Tensor) -> bool:
        if self.device.type == "cpu" or tensor.device == self.device or tensor.grad_fn is not None:
            return False
        return StorageWeakRef(tensor.untyped_storage()) not in self._own

    def _make(self, tensor: Tensor) -> Tensor:
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

    def _remember(self, tensor: Tensor, has_values: bool = True) -> None:
        source = self._sources.get(tensor.untyped_storage()._cdata)
        if source is None:
            super()._remember(tensor, has_values)
        else:
            source.stays = True


class _Source:
    """The source of a stand-in's values.

    Args:
        standing: Storage of the stand-in; its memory is freed.
        outside: Storage of the model's tensor.
        seed: Seed of the random values of a meta tensor.
        stays: True if the stand-in must not be freed once it has been fetched, because the step may change it.
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
