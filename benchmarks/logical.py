"""Counter of the logical bytes on the device, without an allocator's rounding, while a step runs on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_protrain.device.device import Device
from lightning_protrain.strategy.protrain import ProTrainStrategy


@dataclass
class _Held:
    reference: StorageWeakRef
    nbytes: int = 0


class LogicalBytes(TorchDispatchMode):
    """A dispatch mode that counts the storages that would be on the device, if the CPU were a GPU and its host.

    On the device are: the tensors `present`, storages that the `Device` resizes (chunks, swapped activations), and
    results of operations on tensors on the device. All other tensors are on the host: host parameters, downloaded
    gradients, optimizer states.

    Args:
        present: Tensors that stay on the device.
        batch: Inputs of the model, which are not counted.
        device: The strategy's device.

    Attributes:
        now: Upper bound of the bytes on the device.
        peak: Peak of the bytes on the device since `restart`.
    """

    def __init__(self, present: Iterable[Tensor], batch: Iterable[Tensor], device: Device) -> None:
        super().__init__()
        # By address of a storage; a weak reference keeps the address from being reused.
        self._alive: dict[int, _Held] = {}
        self._device = device
        self._resize = device.resize
        self.now = self.peak = 0
        for tensor in present:
            self._set(tensor.untyped_storage(), tensor.untyped_storage().nbytes())
        for tensor in batch:
            self._set(tensor.untyped_storage(), 0)

    def __enter__(self) -> LogicalBytes:
        def resize(storage: torch.UntypedStorage, nbytes: int) -> None:
            self._resize(storage, nbytes)
            self._set(storage, nbytes)

        vars(self._device)["resize"] = resize
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        del vars(self._device)["resize"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            return result
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        if any(tensor.numel() > 1 and tensor.untyped_storage()._cdata not in self._alive for tensor in inputs):
            return result  # On the host.
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self._set(leaf.untyped_storage(), leaf.untyped_storage().nbytes())
        return result

    def restart(self, elsewhere: Iterable[Tensor]) -> None:
        """Reset the peak, and stop counting the tensors `elsewhere`."""
        self._sweep()
        for tensor in elsewhere:
            held = self._alive.pop(tensor.untyped_storage()._cdata, None)
            self.now -= held.nbytes if held is not None else 0
        self.peak = self.now

    def _set(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = _Held(StorageWeakRef(storage))
        self.now += nbytes - self._alive[key].nbytes
        self._alive[key].nbytes = nbytes
        if self.now > self.peak:
            self._sweep()
            self.peak = max(self.peak, self.now)

    def _sweep(self) -> None:
        """Remove freed storages, because Python is not notified if autograd had the last reference."""
        for key in [key for key, held in self._alive.items() if held.reference.expired()]:
            self.now -= self._alive.pop(key).nbytes


class PeakOfStep(L.Callback):
    """A callback that measures one step.

    Args:
        step: Number of the step, from 0; in the second step, optimizer states exist.

    Attributes:
        peak: Peak of the logical bytes in the step.
    """

    def __init__(self, step: int = 1) -> None:
        self.step = step
        self.peak = 0
        self._counted: LogicalBytes | None = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ProTrainStrategy)
        assert strategy.plan is not None
        assert strategy._device is not None
        resident = [fqn for chunk in strategy.plan.chunks if chunk.resident for fqn in chunk.parameters]
        batch = [leaf for leaf in tree_leaves(vars(module).get("batch", ())) if isinstance(leaf, Tensor)]
        present = [*(module.get_parameter(fqn) for fqn in resident), *module.buffers()]
        self._counted = LogicalBytes(present, batch, strategy._device)
        self._counted.__enter__()

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._counted is not None
        if batch_idx == self.step:
            states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
            values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
            # Step counters are on the host.
            self._counted.restart(value for value in values if value.dim() == 0)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._counted is not None
        if batch_idx == self.step:
            self.peak = self._counted.peak
            self._counted.__exit__(None, None, None)
