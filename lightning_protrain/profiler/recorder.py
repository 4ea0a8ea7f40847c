"""Recorder of a step: live activations, saved bytes, casts and operations, by unit call and by segment.

An activation policy can only free an activation that nothing but autograd references. To detect this, autograd saves a
*shadow* in place of a traced tensor: a tensor of the same shape and strides with its own storage. Shadow and original
count as one activation. If the original has been freed, only autograd references the activation.

Operations of backward are assigned to segments by autograd's sequence numbers: nodes are numbered in order of creation,
and backward runs them from high to low numbers. So the numbers at the begin and end of a segment's forward determine
its backward. Operations without such a number, including recomputation, belong to the segment whose backward runs.
Nodes that accumulate gradients run as early as possible.
"""

from __future__ import annotations

import functools
import sys
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from lightning_protrain.profiler.attention import KERNELS, workspace_bytes
from lightning_protrain.profiler.fake_mode import ShapeTensor, StepMode
from lightning_protrain.profiler.op_kinds import is_product
from lightning_protrain.profiler.ops import count_flops, operation_cost, tensors_in, written_tensors
from lightning_protrain.profiler.records import (
    LEAST_SQUARE,
    Backward,
    Forward,
    ModelProfile,
    OperationCost,
    ParameterUse,
    Segment,
    Storage,
    UnitCall,
    UnitInfo,
    least_swapped,
    swapped_bytes,
)
from lightning_protrain.profiler.row_wise import Slices, is_row_wise

NEVER = sys.maxsize


class Activation:
    """A storage that an operation has made, together with its shadow; alive as long as either exists.

    Args:
        nbytes: Size of the storage, bytes.
        made: Time when an operation makes it.

    Attributes:
        freed: Time from which on the original storage does not exist, so that only autograd references the activation.
        gone: Time from which on nothing references the activation.
        is_gradient: True if it has become the gradient of a parameter.
    """

    __slots__ = ("_holders", "_shadow", "freed", "gone", "is_gradient", "made", "nbytes")

    def __init__(self, nbytes: int, made: int) -> None:
        self.nbytes, self.made = nbytes, made
        self.freed = self.gone = NEVER
        self.is_gradient = False
        self._holders = 0
        self._shadow: tuple[int, weakref.ref[torch.UntypedStorage]] | None = None


class LiveBytes:
    """Counters of live activations, bytes.

    Attributes:
        now: All live activations.
        held_gradients: Parameter gradients that were freed after accumulation, since the last reset to 0.
        time: Number of operations of forward, of begins and ends of calls, and of begins of backward so far.
        every: All activations that operations have made.
    """

    def __init__(self) -> None:
        self.now = 0
        self.held_gradients = 0
        self.time = 0
        self.every: list[Activation] = []
        # By address of a live storage.
        self._found: dict[int, Activation] = {}

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage that an operation has made, once."""
        if storage._cdata not in self._found:
            self.every.append(Activation(storage.nbytes(), self.time + 1))
            self.now += self.every[-1].nbytes
            self._join(storage, self.every[-1], True)

    def find(self, storage: torch.UntypedStorage) -> Activation | None:
        """Return the activation of `storage`, or None if no operation made it."""
        return self._found.get(storage._cdata)

    def shadow(self, tensor: Tensor, activation: Activation) -> Tensor:
        """Return the shadow that autograd saves in place of `tensor`, see the module's docstring."""
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
        """Return the shadow of `storage`, with the same values; a new one if the old one was freed or is outdated."""
        if activation._shadow is not None and activation._shadow[0] == version:
            shadow = activation._shadow[1]()
            if shadow is not None:
                return shadow
        fresh = torch.UntypedStorage(storage.nbytes(), device=storage.device)
        if storage.device.type != "meta":
            fresh.copy_(storage)
        activation._shadow = version, weakref.ref(fresh)
        self._join(fresh, activation, False)
        return fresh

    def _join(self, storage: torch.UntypedStorage, activation: Activation, is_original: bool) -> None:
        activation._holders += 1
        self._found[storage._cdata] = activation
        weakref.finalize(storage, self._leave, storage._cdata, is_original).atexit = False

    def _leave(self, key: int, is_original: bool) -> None:
        activation = self._found.pop(key)
        activation._holders -= 1
        if is_original:
            activation.freed = self.time + 1
        if not activation._holders:
            activation.gone = self.time + 1
            self.now -= activation.nbytes
            self.held_gradients += activation.nbytes * activation.is_gradient


# FLOPs, bytes and dtype of an operation.
Cost = tuple[int, int, str]
_Record = TypeVar("_Record")


@dataclass
class _Backward:
    live: int = 0
    peak: int = 0
    with_gradients: int = 0
    without_casts: int = 0
    costs: Counter[Cost] = field(default_factory=Counter)

    def reach(self, now: int, gradients: int, casts: int) -> None:
        """Update the peaks: `now` are all live activations, with casts but without accumulated gradients."""
        self.peak = max(self.peak, now)
        self.with_gradients = max(self.with_gradients, now + gradients)
        self.without_casts = max(self.without_casts, now - casts)


@dataclass(eq=False)
class _Segment:
    """A segment that is being recorded."""

    unit: str
    between: bool
    # Number of the first autograd node that the segment makes; time and live bytes at its begin.
    number: int
    begin: int
    live: int
    given: dict[Activation, None]
    # Activations that are made or freed in its forward.
    touched: dict[Activation, None] = field(default_factory=dict)
    # Times of the end of the segment, of the begin of backward, and when a swap of its activations would end.
    end: int = 0
    back: int = NEVER
    swapped: int = NEVER
    saved: dict[Activation, None] = field(default_factory=dict)
    casts: dict[Activation, str] = field(default_factory=dict)
    products: set[Activation] = field(default_factory=set)
    # Live bytes when the segment's backward first unpacked a saved tensor.
    asked: int = 0
    # True if selective checkpointing cannot keep the products.
    unkeepable: bool = False
    # Inputs that have been freed when backward begins.
    unkept: list[Activation] = field(default_factory=list)
    # Inputs of a block that no earlier block was given; None: one of them has to stay on the device.
    fresh: list[Activation] | None = None
    # Costs of the forward's operations; True if they make products. Time and number of costs at the last save.
    costs: list[tuple[Cost, bool]] = field(default_factory=list)
    last_saved: tuple[int, int] = (0, 0)
    backward: _Backward | None = None
    gradients: list[str] = field(default_factory=list)
    # Modules that run on slices of the tokens, relative to the unit.
    sliced: dict[str, None] = field(default_factory=dict)


class SegmentRecorder:
    """A recorder of the memory and operations of the segments of a step.

    Args:
        live: Counters of live activations.
    """

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self._segments: list[_Segment] = []
        self._numbers: list[int] = []
        self._whole: dict[str, _Segment] = {}
        self._products: dict[Activation, _Segment] = {}
        self._casts: set[Activation] = set()
        # The segment whose backward runs, and the first autograd number after the forward.
        self._in_backward: _Segment | None = None
        self._end = 0
        # Times when backward begins.
        self._backwards: list[int] = []
        self._open("", (), between=True)

    def enter(
        self,
        unit: str,
        given: Iterable[Activation],
        compiled: bool = False,
        fresh: list[Activation] | None = None,
    ) -> None:
        """Begin the call of a unit.

        Args:
            unit: Name of the unit.
            given: Inputs of the call.
            compiled: True if the unit contains a compiled module, whose products cannot be kept.
            fresh: Inputs of a block that no earlier block was given; None if one of them is no activation.
        """
        self._open(unit, given, between=False)
        self._segments[-1].unkeepable = compiled
        self._segments[-1].fresh = fresh

    def end_call(self) -> None:
        """End the call of a unit."""
        self._open("", (), between=True)

    def operation(
        self, cost: Cost | None, before: int, workspace: int = 0, products: Iterable[Activation] = ()
    ) -> None:
        """Record an operation.

        Args:
            cost: Cost of the operation; None if it does not read or write memory.
            before: Live bytes before the operation.
            workspace: Temporary memory of the operation, bytes.
            products: Products that the operation has made.
        """
        segment = self._segments[-1]
        if torch._C._current_graph_task_id() != -1:
            segment, back = self._of_node(before)
            back.reach(self._live.now + workspace, self._live.held_gradients, _alive(segment.casts))
            back.costs.update([cost] if cost is not None else ())
            return
        self._in_backward = None
        self._live.time += 1
        made = set(products)
        segment.products |= made
        self._products.update(dict.fromkeys(made, segment))
        if cost is not None:
            segment.costs.append((cost, bool(made)))

    def place_of(self, name: str) -> str | None:
        """Return the name of a module relative to the unit that runs; None if it is outside of it."""
        segment = self._segments[-1]
        if segment.between or not f"{name}.".startswith(f"{segment.unit}." if segment.unit else ""):
            return None
        return name[len(segment.unit) :].lstrip(".")

    def slice(self, place: str) -> None:
        """Record that a module of the running unit runs on slices of the tokens; its products cannot be kept."""
        self._segments[-1].sliced[place] = None
        self._segments[-1].unkeepable = True

    def packed(self) -> None:
        """Record that autograd saves a tensor, maybe a weight: recomputation would run all operations so far."""
        segment = self._segments[-1]
        segment.last_saved = self._live.time, len(segment.costs)

    def save(self, activation: Activation, cast: str | None) -> None:
        """Record that autograd saves an activation; `cast` names the parameter if the activation is a cast of one."""
        segment = self._segments[-1]
        segment.saved[activation] = None
        if cast is not None and (activation in segment.casts or activation not in self._casts):
            segment.casts[activation] = cast
            self._casts.add(activation)

    def unpacked(self) -> None:
        """Record that backward unpacks a saved tensor."""
        segment = self._segments[bisect_right(self._numbers, self._number()) - 1]
        segment.asked = segment.asked or self._live.now

    def written(self, activation: Activation) -> None:
        """Record that an operation has changed an activation in place."""
        if activation in self._products:
            self._products[activation].unkeepable = True

    def accumulated(self, fqn: str) -> None:
        """Record that the gradient of a parameter has been accumulated."""
        self._whole[fqn] = self._in_backward or self._segments[-1]

    def segments(self) -> tuple[Segment, ...]:
        """Return the recorded segments; empty if backward did not run."""
        if all(segment.backward is None for segment in self._segments):
            return ()
        for fqn, segment in self._whole.items():
            segment.gradients.append(fqn)
        swapped, end = NEVER, self._live.time + 1
        for segment in reversed(self._segments):
            later = bisect_right(self._backwards, segment.begin)
            segment.back = self._backwards[later] if later < len(self._backwards) else NEVER
            segment.end, segment.swapped = end, min(swapped, segment.back)
            swapped, end = swapped if segment.between else end, segment.begin
        begins = [segment.begin for segment in self._segments]
        for activation in self._live.every:
            for time in (activation.made, activation.gone):
                self._segments[bisect_left(begins, time) - 1].touched[activation] = None
        seen = _Seen(
            savers=Counter(it for segment in self._segments for it in segment.saved if it.gone > segment.back),
            takers=Counter(it for segment in self._segments for it in segment.given),
        )
        return tuple(_record(segment, seen) for segment in self._segments if not _is_empty(segment))

    def _open(self, unit: str, given: Iterable[Activation], between: bool) -> None:
        self._live.time += 1
        number, live = torch._C._autograd._get_sequence_nr(), self._live
        segment = _Segment(unit, between, number, live.time, live.now, dict.fromkeys(given))
        self._segments.append(segment)
        self._numbers.append(segment.number)

    def _number(self) -> int:
        """Return the number of autograd's current node; without one, the first number after the forward."""
        node: Any = torch._C._current_autograd_node()
        return self._end if node is None else int(node._sequence_nr())

    def _of_node(self, before: int) -> tuple[_Segment, _Backward]:
        """Return the segment to which autograd's current node belongs, and its backward."""
        if self._in_backward is None:
            self._live.time += 1
            self._backwards.append(self._live.time)
            self._end = torch._C._autograd._get_sequence_nr()
        number, segment = self._number(), self._in_backward or self._segments[-1]
        if number < self._end:
            segment = self._segments[bisect_right(self._numbers, number) - 1]
        back = segment.backward = segment.backward or _Backward()
        if segment is not self._in_backward:
            self._in_backward = segment
            self._live.held_gradients = 0
            back.live = max(back.live, before)
            back.reach(before, 0, _alive(segment.casts))
            segment.unkept = [activation for activation in segment.given if activation.gone < NEVER]
        return segment, back


@dataclass
class _Seen:
    """Numbers of segments that save and take activations; inputs of earlier segments; equal tuples, to share them."""

    savers: Counter[Activation]
    takers: Counter[Activation]
    given: set[Activation] = field(default_factory=set)
    unkept: set[Activation] = field(default_factory=set)
    records: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def first(seen: set[Activation], activations: Iterable[Activation]) -> list[Activation]:
        fresh = [activation for activation in activations if activation not in seen]
        seen.update(fresh)
        return fresh

    def shared(self, records: Iterable[_Record]) -> tuple[_Record, ...]:
        made = tuple(records)
        return cast(tuple[_Record, ...], self.records.setdefault(made, made))

    def is_alone(self, activation: Activation, segment: _Segment) -> bool:
        saved = activation in segment.saved and activation.gone > segment.back
        return self.savers[activation] == saved and self.takers[activation] == (activation in segment.given)


def _is_empty(segment: _Segment) -> bool:
    backward = segment.backward.costs if segment.backward is not None else ()
    return segment.between and not (segment.costs or backward)


def _record(segment: _Segment, seen: _Seen) -> Segment:
    # A block moves all its fresh inputs, so none of them may be of use to another segment.
    fresh = segment.fresh or []
    moved = sum(swapped_bytes(it.nbytes) for it in fresh)
    least = least_swapped(moved)
    moves = all(it.freed <= segment.swapped and seen.is_alone(it, segment) and it.nbytes >= least for it in fresh)
    last, reached = segment.last_saved
    costs = Counter((*cost, at >= reached) for at, cost in enumerate(segment.costs))
    operations = seen.shared(OperationCost(*cost, count, *kind) for (cost, *kind), count in costs.items())
    storages = seen.shared(_storages(segment, seen))
    back = segment.backward or _Backward()
    return Segment(
        unit=segment.unit,
        forward=Forward(segment.live, operations, storages, max(last - segment.begin, 0)),
        backward=Backward(
            live_bytes=back.live,
            peak_bytes=back.peak,
            operations=seen.shared(OperationCost(*cost, count) for cost, count in back.costs.items()),
            peak_with_gradients=back.with_gradients,
            cast_bytes=back.peak - back.without_casts,
            asked_live=segment.asked if segment.backward is not None else 0,
        ),
        input_bytes=_total(seen.first(seen.given, segment.given)),
        casts=tuple((fqn, activation.nbytes) for activation, fqn in segment.casts.items()),
        gradients=tuple(segment.gradients),
        lost_inputs=_total(segment.unkept),
        first_lost_inputs=_total(seen.first(seen.unkept, segment.unkept)),
        keeps_products=not segment.unkeepable,
        between=segment.between,
        sliced=tuple(segment.sliced),
        input_swap_bytes=moved if moves else 0,
    )


def _storages(segment: _Segment, seen: _Seen) -> Iterator[Storage]:
    """Yield the activations that a forward saves, and the sums of others with equal times."""
    after, others = segment.end - segment.begin, Counter[tuple[int, int, bool]]()
    for it in segment.saved | segment.touched:
        made, freed, gone = (min(max(time - segment.begin, 0), after) for time in (it.made, it.freed, it.gone))
        makes = it in segment.products
        if it in segment.saved:
            yield Storage(
                nbytes=it.nbytes,
                made=made,
                freed=freed,
                gone=gone,
                is_product=makes,
                is_saved=True,
                is_input=it in segment.given,
                is_cast=it in segment.casts,
                is_alone=it.gone > segment.back and seen.is_alone(it, segment),
                uses=(it.freed > segment.end) + (it.freed > segment.swapped),
            )
        elif made < after and (made or 0 < gone < after):
            others[made, gone, makes] += it.nbytes
    for (made, gone, makes), nbytes in others.items():
        yield Storage(nbytes, made, gone, gone, makes)


def _total(activations: Iterable[Activation]) -> int:
    return sum(it.nbytes for it in activations)


def _alive(activations: Iterable[Activation]) -> int:
    return sum(it.nbytes for it in activations if it.gone == NEVER)


_ATEN = torch.ops.aten


def in_backward() -> bool:
    """Return True if backward runs on this thread."""
    return torch._C._current_graph_task_id() != -1


@dataclass
class Call:
    """A running or finished call of a unit, with its inputs and the bytes of its saved tensors by storage."""

    unit: UnitInfo
    inputs: set[StorageWeakRef]
    saved: dict[StorageWeakRef, int] = field(default_factory=dict)
    # By storage and version of the tensor.
    swapped: dict[tuple[StorageWeakRef, int], int] = field(default_factory=dict)


class Recorder:
    """A recorder of one step, the observer of a `StepMode`.

    Args:
        mode: Mode that runs the step.
        parameters: Parameters of the model, by their first names.
        buffers: Buffers of the model.
        compiled: Names of the units that contain a compiled module.
    """

    def __init__(
        self,
        mode: StepMode,
        parameters: Mapping[str, Tensor],
        buffers: Iterable[Tensor],
        compiled: Collection[str] = (),
    ) -> None:
        self._mode = mode
        self._named = parameters
        self._compiled = compiled
        # Parameters by the address of their storage, which the mode keeps alive.
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
        self._saved: dict[StorageWeakRef, int] = {}
        self._flops = 0
        self._calls: list[Call] = []
        self._running: list[Call] = []
        self._given_to_blocks: set[StorageWeakRef] = set()
        self._attention: Counter[str] = Counter()
        self._squares: dict[int, int] = {}
        # Names of modules that run on slices. True while one does: what is inside of it does not.
        self._sliced: set[str] = set()
        self._slices = False

    @property
    def observes(self) -> bool:
        """False while `is_row_wise` runs a module."""
        return self._mode.observer is self

    def lifted(self) -> AbstractContextManager[Any]:
        """Return the function mode of `StepMode.lifted`."""
        return self._mode.lifted()

    @contextmanager
    def call(self, unit: UnitInfo, inputs: object) -> Iterator[None]:
        """Record the forward of a unit within the context."""
        call = Call(unit, set(map(StorageWeakRef, self._storages(inputs))))
        is_segment = not unit.encloses and all(running.unit.encloses for running in self._running)
        if is_segment:
            fresh = self._fresh(inputs) if unit.is_block else None
            given = self._found(self._storages(inputs))
            self._segments.enter(unit.name, given, unit.name in self._compiled, fresh)
        self._calls.append(call)
        self._running.append(call)
        self._mode.scopes.append(unit.name)
        try:
            yield
        finally:
            self._running.pop()
            self._mode.scopes.pop()
            if is_segment:
                self._segments.end_call()

    def sliced(self, name: str, forward: Callable[[Tensor], Any], given: Tensor, slices: Slices) -> Tensor | None:
        """Run a forward on slices of the tokens if it belongs to a unit and is row-wise; else return None.

        Args:
            name: Name of the module.
            forward: Its forward.
            given: Its only input.
            slices: How to slice.
        """
        if in_backward():  # A function around the module is checkpointed, and runs again as it ran before.
            return slices(forward, given) if name in self._sliced else None
        place = None if self._slices else self._segments.place_of(name)
        compiled = self._running and self._running[-1].unit.name in self._compiled
        if place is None or compiled or not is_row_wise(forward, given, self._mode):
            return None
        self._segments.slice(place)
        self._sliced.add(name)
        self._slices = True
        try:
            return slices(forward, given)
        finally:
            self._slices = False

    @contextmanager
    def watch_gradients(self) -> Iterator[None]:
        """Free gradients of parameters after their accumulation."""
        watched = []
        for fqn, parameter in self._named.items():
            stand_in = self._mode.stand_in(parameter)
            if not stand_in.requires_grad:
                continue
            stand_in.register_post_accumulate_grad_hook(functools.partial(self._accumulate, fqn))
            if stand_in is not parameter:
                moved = functools.partial(self._accumulate_moved, fqn, stand_in)
                with torch._C.DisableTorchFunction():  # else the hook is the stand-in's
                    hooks = parameter._post_accumulate_grad_hooks
                    watched.append((parameter, hooks, parameter.register_post_accumulate_grad_hook(moved)))
        try:
            yield
        finally:
            with torch._C.DisableTorchFunction():
                for parameter, hooks, handle in watched:
                    handle.remove()
                    parameter._post_accumulate_grad_hooks = hooks

    def _accumulate_moved(self, fqn: str, stand_in: Tensor, parameter: Tensor) -> None:
        """Handle a gradient of the parameter itself: `apply = Function.apply`, kept from before, has no stand-ins."""
        with torch._C.DisableTorchFunction():
            stand_in.grad, parameter.grad = parameter.grad, None
        self._accumulate(fqn, stand_in)

    def _accumulate(self, fqn: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._accumulated = True
        self._segments.accumulated(fqn)
        activation = self._live.find(self._mode.storage(parameter.grad))
        if activation is not None:  # None if the gradient was added to an existing one.
            activation.is_gradient = True
            # The step may read the gradient, so it is replaced, not deleted.
            parameter.grad = self._mode.elsewhere(parameter.grad)

    def run_backward(self, outputs: object) -> None:
        """Run backward from the loss in a step's outputs, unless the step has run backward itself."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1 and not self._accumulated:
            loss.backward()

    def dtype_read(self, tensor: Tensor) -> None:
        """Record a read of a parameter's dtype."""
        if in_backward():
            return
        self._dtype_reads.update(fqn for fqn, _ in self._parameters.get(self._mode.storage(tensor)._cdata, ()))

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Count a call of attention, as math if no fused kernel runs within the context."""
        fused = self._attention.total()
        yield
        self._attention["math"] += not in_backward() and self._attention.total() == fused

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record an operation."""
        with torch._C.DisableTorchFunction():
            self._operation(func, args, kwargs, result)

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        inputs = tensors_in((args, kwargs))
        outputs = tensors_in(result)
        before = self._live.now
        read = {tensor.untyped_storage()._cdata for tensor in inputs}
        made = {tensor.untyped_storage()._cdata for tensor in outputs}
        fresh = [storage for tensor in outputs if (storage := tensor.untyped_storage())._cdata not in read]
        for storage in fresh:
            self._live.add(storage)
        for tensor in outputs:
            shape = tensor.shape[tensor.dim() - 2 :] if tensor.dim() > 3 else (0, 1)
            if shape[0] == shape[1] >= LEAST_SQUARE:
                self._squares[shape[0]] = max(self._squares.get(shape[0], 0), tensor.untyped_storage().nbytes())
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
        self._flops += flops
        for key in read & self._parameters.keys():
            if func._schema.is_mutable or key not in made:  # not a view
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
        """Record that autograd saves `tensor`, and return the tensor that it saves instead."""
        storage = self._mode.storage(tensor)
        activation = self._live.find(storage)
        if in_backward():
            return tensor if activation is None else self._live.shadow(tensor, activation)
        self._segments.packed()
        self._saves.update(fqn for fqn, _ in self._parameters.get(storage._cdata, ()))
        if storage._cdata not in self._states:
            key, nbytes = StorageWeakRef(storage), storage.nbytes()
            self._saved[key] = nbytes
            for call in self._running:
                call.swapped[key, tensor._version] = swapped_bytes(nbytes)
                if key not in call.inputs:
                    call.saved[key] = nbytes
            if activation is not None:
                self._segments.save(activation, self._copies.get(key))
                return self._live.shadow(tensor, activation)
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        """Record that backward unpacks a saved tensor."""
        self._segments.unpacked()
        return tensor

    def profile(self) -> ModelProfile:
        """Return the profile of the step."""
        return ModelProfile(
            calls=tuple(map(self._call, self._calls)),
            parameters=tuple(
                ParameterUse(fqn, tuple(casts), self._direct_uses[fqn], self._saves[fqn], self._dtype_reads[fqn])
                for fqn, casts in self._casts.items()
            ),
            saved_bytes=sum(self._saved.values()),
            flops=self._flops,
            segments=self._segments.segments(),
            attention=tuple(sorted((+self._attention).items())),
            squares=tuple(sorted(self._squares.items())),
        )

    def _call(self, call: Call) -> UnitCall:
        return UnitCall(
            name=call.unit.name,
            saved_bytes=sum(call.saved.values()),
            saved_casts=tuple((self._copies[key], size) for key, size in call.saved.items() if key in self._copies),
            swap_bytes=sum(call.swapped.values()),
        )

    def _fresh(self, inputs: object) -> list[Activation] | None:
        """Return the inputs of a block that no earlier block was given; None if one of them is no activation."""
        given = {StorageWeakRef(storage): storage for storage in self._storages(inputs)}
        fresh = [
            storage
            for key, storage in given.items()
            if key not in self._given_to_blocks and storage._cdata not in self._states
        ]
        self._given_to_blocks.update(given)
        activations = self._found(fresh)
        return activations if len(activations) == len(fresh) else None

    def _found(self, storages: Iterable[torch.UntypedStorage]) -> list[Activation]:
        return [activation for activation in map(self._live.find, storages) if activation is not None]

    def _storages(self, values: object) -> list[torch.UntypedStorage]:
        with torch._C.DisableTorchFunction():
            leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
            return [self._mode.storage(self._mode.stand_in(leaf)) for leaf in leaves]
