"""Counts what a step does: what it saves, casts and computes, by call and by segment."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from lightning_protrain.products import is_product
from lightning_protrain.profiler.attention import KERNELS, workspace_bytes
from lightning_protrain.profiler.liveness import Activation, LiveBytes
from lightning_protrain.profiler.operations import count_flops, operation_cost, written_tensors
from lightning_protrain.profiler.records import ModelProfile, ParameterUse, UnitCall, UnitInfo, swapped_bytes
from lightning_protrain.profiler.segments import SegmentRecorder

_ATEN = torch.ops.aten


class Mode(Protocol):
    """What runs the operations of a step, and knows what stands for the tensors of the model."""

    scopes: list[str]

    def lifted(self) -> AbstractContextManager[Any]:
        """Puts stand-ins in the place of tensors from outside, where PyTorch has taken function modes off."""

    def storage(self, tensor: Tensor) -> torch.UntypedStorage:
        """The storage that stands for the memory of `tensor`, as the recorder sees it."""

    def stand_in(self, tensor: Tensor) -> Tensor:
        """What takes the place of a tensor that was made outside."""

    def elsewhere(self, gradient: Tensor) -> Tensor | None:
        """What takes the place of the gradient of a parameter once it is accumulated; made by no operation."""


def in_backward() -> bool:
    """Whether autograd's engine runs."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class Call:
    """A call that runs, or has run; bytes by storage."""

    unit: UnitInfo
    inputs: dict[StorageWeakRef, int] = field(default_factory=dict)
    outputs: dict[StorageWeakRef, int] = field(default_factory=dict)
    saved: dict[StorageWeakRef, int] = field(default_factory=dict)
    # By version of the contents too.
    swapped: dict[tuple[StorageWeakRef, int], int] = field(default_factory=dict)
    live_before: int = 0
    live_peak: int = 0
    flops: int = 0


class Recorder:
    """Counts what a trace does. Storages are held weakly, and so that no address ever stands for two of them."""

    def __init__(
        self, mode: Mode, parameters: Mapping[str, Tensor], buffers: Iterable[Tensor], compiled: Collection[str] = ()
    ) -> None:
        """`compiled` are the names of units of which a part is."""
        self._mode = mode
        self._named = parameters
        self._compiled = compiled
        # By address of a storage, which the mode keeps alive: the parameters in it.
        self._parameters: dict[int, list[tuple[str, Tensor]]] = {}
        for fqn, parameter in parameters.items():
            self._parameters.setdefault(mode.storage(parameter)._cdata, []).append((fqn, parameter))
        self._states = {*self._parameters, *(mode.storage(mode.stand_in(buffer))._cdata for buffer in buffers)}
        self._casts: dict[str, list[str]] = {fqn: [] for fqn in parameters}
        self._direct_uses: Counter[str] = Counter()
        self._saves: Counter[str] = Counter()
        self._dtype_reads: Counter[str] = Counter()
        self._copies: dict[StorageWeakRef, str] = {}
        self._live = LiveBytes()
        self._segments = SegmentRecorder(self._live)
        self._accumulated = False
        self._step = Call(UnitInfo("", False, ()))
        self._outside: dict[StorageWeakRef, int] = {}
        self._calls: list[Call] = []
        self._running: list[Call] = []
        self._attention: Counter[str] = Counter()

    def lifted(self) -> AbstractContextManager[Any]:
        """Within it, stand-ins take the place of tensors from outside, where that has been taken off."""
        return self._mode.lifted()

    @contextmanager
    def call(self, unit: UnitInfo, inputs: object) -> Iterator[Call]:
        """Around the forward of a unit."""
        call = Call(unit, self._bytes_of(inputs), live_before=self._live.now, live_peak=self._live.now)
        is_segment = not unit.encloses and all(running.unit.encloses for running in self._running)
        if is_segment:
            self._segments.enter(unit.name, self._activations(inputs), unit.name in self._compiled)
        self._calls.append(call)
        self._running.append(call)
        self._mode.scopes.append(unit.name)
        try:
            yield call
        finally:
            self._running.pop()
            self._mode.scopes.pop()
            if is_segment:
                self._segments.leave()

    def watch_gradients(self) -> None:
        """Lets go of gradients of parameters as soon as they are accumulated."""
        for fqn, parameter in self._named.items():
            stand_in = self._mode.stand_in(parameter)
            if stand_in.requires_grad:
                stand_in.register_post_accumulate_grad_hook(functools.partial(self._accumulate, fqn))

    def _accumulate(self, fqn: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._accumulated = True
        self._segments.accumulated(fqn)
        activation = self._live.find(self._mode.storage(parameter.grad))
        if activation is not None:  # else the gradient was added to what is there
            activation.is_gradient = True
            # The program may want to look at it. What takes its place was made by no operation.
            parameter.grad = self._mode.elsewhere(parameter.grad)

    def run_backward(self, outputs: object) -> None:
        """Goes through backward from the loss in `outputs`, if the step has not done it itself."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1 and not self._accumulated:
            loss.backward()

    def check_conserved(self) -> None:
        """To be called when what the step gave has been let go."""
        self._live.check_conserved()

    def give_out(self, call: Call, outputs: object) -> None:
        """Notes what the forward of a unit returns."""
        call.outputs = self._bytes_of(outputs)

    def dtype_read(self, tensor: Tensor) -> None:
        """Part of `standins.Observer`."""
        if in_backward():
            return
        self._dtype_reads.update(fqn for fqn, _ in self._parameters.get(self._mode.storage(tensor)._cdata, ()))

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Part of `standins.Observer`."""
        fused = self._attention.total()
        yield
        self._attention["math"] += not in_backward() and self._attention.total() == fused

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Part of `standins.Observer`."""
        with torch._C.DisableTorchFunction():
            self._operation(func, args, kwargs, result)

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        before = self._live.now
        read = {tensor.untyped_storage()._cdata for tensor in inputs}
        made = {tensor.untyped_storage()._cdata for tensor in outputs}
        fresh = [each.untyped_storage() for each in outputs if each.untyped_storage()._cdata not in read]
        for storage in fresh:
            self._live.add(storage)
        flops = count_flops(func, args, kwargs, result)
        cost = operation_cost(func, flops, inputs, outputs)
        products = self._found(fresh) if is_product(func, args, kwargs) else []
        self._segments.operation(cost, before, workspace_bytes(func, args), products)
        if in_backward():
            return
        for activation in self._found(tensor.untyped_storage() for tensor in written_tensors(func, args, kwargs)):
            self._segments.written(activation)
        if func in KERNELS:
            self._attention[KERNELS[func]] += 1
        for call in (self._step, *self._running):
            call.flops += flops
            call.live_peak = max(call.live_peak, self._live.now)
        for key in read & self._parameters.keys():
            if func._schema.is_mutable or key not in made:  # else a view
                self._count_use(key, func, inputs, kwargs, outputs)

    def _count_use(
        self, key: int, func: Any, inputs: list[Tensor], kwargs: dict[str, Any], outputs: list[Tensor]
    ) -> None:
        for fqn, parameter in self._parameters[key]:
            whole = (inputs[0].shape, inputs[0].stride()) == (parameter.shape, parameter.stride())
            if func is _ATEN._to_copy.default and kwargs.keys() == {"dtype"} and whole:
                self._casts[fqn].append(str(kwargs["dtype"]).removeprefix("torch."))
                self._copies[StorageWeakRef(outputs[0].untyped_storage())] = fqn
            else:
                self._direct_uses[fqn] += 1

    def pack(self, tensor: Tensor) -> Tensor:
        """Autograd saves `tensor`; what it is to keep."""
        storage = self._mode.storage(tensor)
        activation = self._live.find(storage)
        if in_backward():
            return tensor if activation is None else self._live.shadow(tensor, activation)
        self._segments.packed()
        self._saves.update(fqn for fqn, _ in self._parameters.get(storage._cdata, ()))
        if storage._cdata not in self._states:
            key, nbytes = StorageWeakRef(storage), storage.nbytes()
            self._step.saved[key] = nbytes
            if not any(call.unit.is_block for call in self._running):
                self._outside[key] = nbytes
            for call in self._running:
                call.swapped[key, tensor._version] = swapped_bytes(nbytes)
                if key not in call.inputs:
                    call.saved[key] = nbytes
            if activation is not None:
                self._segments.save(activation, self._copies.get(key))
                return self._live.shadow(tensor, activation)
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        """Autograd asks for what it has kept."""
        self._segments.asked()
        return tensor

    def profile(self) -> ModelProfile:
        """What was counted."""
        in_blocks = set[StorageWeakRef]().union(*(call.saved for call in self._calls if call.unit.is_block))
        outside = {key: nbytes for key, nbytes in self._outside.items() if key not in in_blocks}
        return ModelProfile(
            calls=tuple(self._call(order, call) for order, call in enumerate(self._calls)),
            parameters=tuple(
                ParameterUse(fqn, tuple(casts), self._direct_uses[fqn], self._saves[fqn], self._dtype_reads[fqn])
                for fqn, casts in self._casts.items()
            ),
            outside_saved_bytes=sum(outside.values()),
            outside_saved_casts=self._saved_casts(outside),
            saved_bytes=sum(self._step.saved.values()),
            flops=self._step.flops,
            peak_bytes=self._step.live_peak,
            segments=self._segments.segments(),
            attention=tuple(sorted((+self._attention).items())),
        )

    def _call(self, order: int, call: Call) -> UnitCall:
        return UnitCall(
            name=call.unit.name,
            order=order,
            saved_bytes=sum(call.saved.values()),
            saved_casts=self._saved_casts(call.saved),
            input_bytes=sum(call.inputs.values()),
            output_bytes=sum(call.outputs.values()),
            flops=call.flops,
            peak_bytes=call.live_peak - call.live_before,
            swap_bytes=sum(call.swapped.values()),
        )

    def _saved_casts(self, saved: dict[StorageWeakRef, int]) -> tuple[tuple[str, int], ...]:
        return tuple((self._copies[key], nbytes) for key, nbytes in saved.items() if key in self._copies)

    def _bytes_of(self, values: object) -> dict[StorageWeakRef, int]:
        """Bytes of all tensors in `values` that are not the model's, by storage."""
        found = (storage for storage in self._storages(values) if storage._cdata not in self._states)
        return {StorageWeakRef(storage): storage.nbytes() for storage in found}

    def _activations(self, values: object) -> list[Activation]:
        """Those among the tensors in `values` that operations made."""
        return self._found(self._storages(values))

    def _found(self, storages: Iterable[torch.UntypedStorage]) -> list[Activation]:
        found = map(self._live.find, storages)
        return [activation for activation in found if activation is not None]

    def _storages(self, values: object) -> list[torch.UntypedStorage]:
        with torch._C.DisableTorchFunction():
            leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
            return [self._mode.storage(self._mode.stand_in(leaf)) for leaf in leaves]
