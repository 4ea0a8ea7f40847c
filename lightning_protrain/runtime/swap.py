"""Swaps activations of blocks to host memory and back, and manages that memory.

While a swapped block runs its forward, autograd asks `ActivationSwap.pack` what to keep for each tensor that it saves
(paper, section 3.1.2). Each storage is copied whole, once for each version of its contents, to the *slab* of the call:
one piece of host memory of exactly the planned bytes, which is returned when the graph dies. If the slab is full, the
call takes further slabs, see [Note: Growth]. Inputs and outputs of the block are copied too, even if other code holds
them. Otherwise every swapped block would leave its input on the device, and device memory would grow with the depth of
the model. Weights and buffers with all their views stay on the device, as do tensors that cannot be rebuilt from a
storage, and storages smaller than a page or than a 1024th of the planned slab: they are many, and each would cost the
host time.

A checkpointed block saves its inputs alone. Those that an earlier call was given stay on the device, because that call
holds them anyway: masks and position embeddings, which all blocks share.

[Note: Growth]
A call that saves more than planned takes further slabs, as long as the host has memory to spare. Each such slab is a
piece of memory of its own. It is kept when its graph has died, and given to the next call of any block that asks for
the same size. Sizes are multiples of an eighth of the planned slab. So only few sizes occur, and new memory is taken
only for a batch that is larger than all before it. If another size is wanted and there is no room for it, idle pieces
are freed. The slabs of live graphs and the idle pieces together never take more than the spare bytes.

[Note: Windows]
A storage that has been swapped out stays on the device until the next call has ended: then the compute stream waits for
the transfer. When the backward of a call begins, the activations of the call before it are already on their way back,
and those of later calls are freed. So the activations of at most two neighbouring calls are on the device at one time,
however far the host runs ahead, and none between forward and backward. A batch larger than planned makes the
activations of these two calls larger, and nothing bounds them. If backward needs a storage that is still on the device,
it is not transferred. A retained graph swaps its storages in again.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_protrain.config import format_bytes
from lightning_protrain.device.device import Device
from lightning_protrain.device.host import PAGE, HostMemory
from lightning_protrain.profiler.blocks import modules_in
from lightning_protrain.profiler.records import least_swapped
from lightning_protrain.runtime.access_guard import below_guard

# The planned slab is this many times as large as the smallest slab that a call grows by.
GROWTH_STEPS = 8

_CAUSES = (
    "Either this batch is larger than the one the plan was made with, or is padded and that one was not. Then give "
    "batches of one size, or the largest first, or a data module with `largest_batch()`, such as `ChatDataModule`. Or "
    "a callback has unfrozen parameters after the plan was made. Then begin another fit, which plans again"
)


@dataclass(eq=False)
class Slab:
    """A piece of the host memory of one call."""

    memory: Tensor
    used: int = 0


@dataclass(eq=False)
class Slabs:
    """All host memory of one call; `fence` is that of the latest transfers from or to it."""

    taken: list[Slab] = field(default_factory=list)
    fence: Any = None


@dataclass(eq=False)
class _Piece:
    """Memory that grown slabs use one at a time."""

    memory: HostMemory
    nbytes: int
    in_use: bool = False


class SlabPool:
    """A pool that gives slabs to calls, and takes them back when the last transfer from or to them has ended.

    Args:
        device: Device that allocates the host memory.
        log_once: Shows a sentence to the user.
        spare_bytes: Host memory that calls may take beyond the plan, bytes, see [Note: Growth].
    """

    def __init__(self, device: Device, log_once: Callable[[str], None], spare_bytes: int) -> None:
        self.log_once = log_once
        self.said = False
        self._device = device
        self._limit = spare_bytes
        self._pieces: list[_Piece] = []
        self._cooling: deque[Slabs] = deque()

    @property
    def grown_bytes(self) -> int:
        """Host memory taken beyond the plan, in use or kept for the next call, bytes."""
        return sum(piece.nbytes for piece in self._pieces)

    @property
    def spare_bytes(self) -> int:
        """Host memory beyond the plan that a call may still take, bytes."""
        return self._limit - sum(piece.nbytes for piece in self._pieces if piece.in_use)

    def planned(self, nbytes: int) -> Slab:
        """Return a slab of exactly `nbytes`."""
        return Slab(torch.frombuffer(self._device.host.empty(nbytes), dtype=torch.uint8, count=nbytes))

    def grown(self, nbytes: int, step: int) -> Slab | None:
        """Return a slab of at least `nbytes`, a multiple of `step` if there is room; None if there is no room.

        Args:
            nbytes: Needed size in whole pages, bytes.
            step: Granularity of slab sizes, in whole pages, bytes.
        """
        rounded = -(-nbytes // step) * step
        size = rounded if rounded <= self.spare_bytes else nbytes
        if size > self.spare_bytes:
            return None
        idle = [piece for piece in self._pieces if not piece.in_use]
        piece = next((piece for piece in idle if piece.nbytes == size), None)
        if piece is None:
            while self.grown_bytes + size > self._limit:
                self._drop(idle.pop())
            piece = _Piece(self._device.new_host_memory(), size)
            self._pieces.append(piece)
        view = piece.memory.empty(size)
        piece.in_use = True
        # The piece is idle when the last tensor over it has died.
        weakref.finalize(view, setattr, piece, "in_use", False).atexit = False
        return Slab(torch.frombuffer(view, dtype=torch.uint8))

    def close(self) -> None:
        """Release the memory taken beyond the plan, once the device has ended all transfers."""
        while self._pieces:
            self._drop(self._pieces[-1])

    def _drop(self, piece: _Piece) -> None:
        piece.memory.close()
        self._pieces.remove(piece)

    def take_back(self, slabs: Slabs, owner: object) -> None:
        """Have slabs returned to the pool when `owner` has died and their transfers have ended."""
        weakref.finalize(owner, self._cooling.append, slabs).atexit = False

    def cool(self, wait: bool = True) -> None:
        """Return the host memory of dead graphs.

        Args:
            wait: Whether the host waits for the last transfers; else slabs in transfer stay.
        """
        while self._cooling and (wait or self._device.has_ended(self._cooling[0].fence)):
            self._device.wait_host(self._cooling[0].fence)
            self._cooling.popleft()


class CallSlabs:
    """The slabs of one call, alive as long as anything stored in them is referenced.

    Args:
        pool: Pool that slabs are taken from.
        name: Name of the block.
        planned_bytes: Size of the first slab, bytes.
    """

    def __init__(self, pool: SlabPool, name: str, planned_bytes: int) -> None:
        self._pool = pool
        self._name = name
        self._planned_bytes = planned_bytes
        self._has_planned = False
        self._slabs = Slabs()
        pool.take_back(self._slabs, self)

    @property
    def used_bytes(self) -> int:
        """Used size of all slabs, in whole pages, bytes."""
        return sum(slab.used for slab in self._slabs.taken)

    def reserve(self, nbytes: int) -> Tensor:
        """Return memory of `nbytes`.

        Raises:
            RuntimeError: The bytes fit neither the plan nor the spare host memory.
        """
        size = -(-nbytes // PAGE) * PAGE
        slab = next((slab for slab in self._slabs.taken if slab.used + size <= slab.memory.nbytes), None)
        if slab is None:
            slab = self._another(size)
            self._slabs.taken.append(slab)
        memory = slab.memory[slab.used : slab.used + nbytes]
        slab.used += size
        return memory

    def note_fence(self, fence: Any) -> None:
        """Note the fence of the latest transfers from or to the memory."""
        self._slabs.fence = fence

    def tell_growth(self) -> None:
        """Log that this call has grown beyond the plan, once for all calls of the pool."""
        if self._pool.said or self.used_bytes <= self._planned_bytes:
            return
        self._pool.said = True
        self._pool.log_once(
            f"{self._name!r} is swapped and saves more than planned: {format_bytes(self._planned_bytes)} of host "
            f"memory are planned for one call, this one took {format_bytes(self.used_bytes)}. The host has room for "
            f"them. The step also takes more device memory than predicted, and may run out of it. {_CAUSES}."
        )

    def _another(self, size: int) -> Slab:
        """Return a slab with room for `size` bytes: the planned slab, or else a grown one."""
        if size <= self._planned_bytes and not self._has_planned:
            self._has_planned = True
            return self._pool.planned(self._planned_bytes)
        slab = self._pool.grown(size, step=-(-self._planned_bytes // (GROWTH_STEPS * PAGE)) * PAGE)
        if slab is None:
            raise RuntimeError(
                f"{self._name!r} is swapped and saves more than planned: {format_bytes(self._planned_bytes)} of host "
                f"memory are planned for one call, at least {format_bytes(self.used_bytes + size)} are needed, and "
                f"beyond the plan the host may give {format_bytes(self._pool.spare_bytes)} more. {_CAUSES}, or "
                "checkpoint the blocks (`num_checkpoint_blocks`) instead of swapping them. Or raise `host_memory`."
            )
        return slab


@dataclass(eq=False)
class _Call:
    """The swapped activations of one call; it lives as long as any tensor that the call has saved.

    `holds` keeps what has no fence yet, with its source: a tensor that dies at once (a logged value) may come again.
    """

    swap: ActivationSwap
    name: str
    number: int
    slabs: CallSlabs
    stay: frozenset[int]
    least_bytes: int
    # By storage and version, in the order of saving.
    stored: dict[tuple[int, int], weakref.ref[_Stored]] = field(default_factory=dict)
    holds: list[tuple[_Stored, Tensor]] = field(default_factory=list)


@dataclass(eq=False)
class _Stored:
    """A storage of a call: in a slab, and temporarily on the device too, see [Note: Windows]."""

    call: _Call
    host: Tensor
    device: Tensor | None
    arrival: _Arrival | None = None


@dataclass(eq=False)
class _Departure:
    """Storages on their way to the host, and the tensors that must live until the compute stream has waited."""

    number: int
    fence: Any
    sources: list[tuple[weakref.ref[_Stored], Tensor, Tensor]]


@dataclass(eq=False)
class _Arrival:
    """A storage on its way to the device, and the tensors that must live until the compute stream has waited."""

    fence: Any
    device: Tensor
    host: Tensor
    stored: weakref.ref[_Stored]


@dataclass(eq=False)
class _Packed:
    """A stand-in for a saved tensor: the tensor itself, or what is needed to rebuild it from a storage.

    PyTorch does not check tensors that hooks have packed for in-place changes. So `probe` shares the version counter of
    the saved tensor, and `_unpack` makes the check.
    """

    name: str
    probe: Tensor
    version: int
    stored: _Stored | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0


class ActivationSwap:
    """The swap of activations to the host and back, see the module docstring and [Note: Windows].

    Args:
        device: Device that activations are swapped out of.
        weights: Tensors that are never swapped: all parameters, device parameters and buffers.
        log_once: Shows a sentence to the user.
        spare_bytes: Host memory that calls may take beyond the plan, bytes, see [Note: Growth].
    """

    def __init__(
        self, device: Device, weights: Iterable[Tensor], log_once: Callable[[str], None], spare_bytes: int = 0
    ) -> None:
        self._device = device
        self._slabs = SlabPool(device, log_once, spare_bytes)
        # Weak references keep the address of a storage from being given to another one.
        with below_guard():
            self._weights = {key: StorageWeakRef(storage) for key, storage in _storages(weights)}
        self._calls: weakref.WeakValueDictionary[int, _Call] = weakref.WeakValueDictionary()
        self._given: dict[int, StorageWeakRef] = {}  # Live inputs of all calls.
        self._running: list[_Call] = []
        self._leaving: list[_Departure] = []
        self._arriving: dict[_Arrival, None] = {}  # In the order of their transfers.
        self._nothing = torch.empty(0, dtype=torch.uint8, device=device.torch_device)
        # PyTorch never frees these functions, so they must not keep the swap alive.
        self._hooks = (functools.partial(_pack, weakref.ref(self)), _unpack)

    def given_before(self, inputs: Iterable[Tensor]) -> frozenset[int]:
        """Return the storages among the inputs of a call that an earlier call was given, too."""
        with below_guard():
            storages = dict(_storages(inputs))
        live = {key: held for key, held in self._given.items() if not held.expired()}
        self._given = live | {key: StorageWeakRef(storage) for key, storage in storages.items() if key not in live}
        return frozenset(live.keys() & storages.keys())

    @contextmanager
    def call(
        self, name: str, module: nn.Module, number: int, swap_bytes: int, stay: frozenset[int] = frozenset()
    ) -> Iterator[None]:
        """Run a forward that autograd may go back through, and swap its saved tensors if `swap_bytes` are planned.

        Args:
            name: Name of the block.
            module: The block's module.
            number: Number of the call, see [Note: Calls].
            swap_bytes: Host memory planned for the call, bytes; 0: swap nothing.
            stay: Storages that stay on the device.

        Raises:
            RuntimeError: The call saves more than planned, and more than the host can spare.
        """
        earlier = list(self._leaving)
        if swap_bytes:
            self._slabs.cool()
            with below_guard():  # Finding the storages of weights need not wait for their steps.
                tables = [table for part in modules_in(module) for table in (part._parameters, part._buffers) if table]
                weights = [weight for table in tables for weight in table.values() if weight is not None]
                unmoved = stay.union([key for key, _ in _storages(weights)])
            slabs, least_bytes = CallSlabs(self._slabs, name, swap_bytes), least_swapped(swap_bytes)
            self._running.append(_Call(self, name, number, slabs, unmoved, least_bytes))
            try:
                with torch.autograd.graph.saved_tensors_hooks(*self._hooks):
                    yield
                self._running[-1].slabs.tell_growth()
            finally:
                self._depart(self._running.pop())
        else:
            yield
        self._leave(departure for departure in self._leaving if departure in earlier)

    def before_backward(self, number: int, following: int | None, end: int) -> None:
        """Begin the backward of call `number`; `following` runs next; calls from `end` on have finished."""
        for call in self._running:
            self._depart(call)
        self._leave(departure for departure in self._leaving if departure.number not in (number, following))
        for later, call in list(self._calls.items()):
            if later >= end:
                self._forget(call)
        for wanted in (number, following):
            call_of = self._calls.get(wanted) if wanted is not None else None
            self._fetch(*reversed(_alive(call_of)) if call_of is not None else ())

    def settle(self) -> None:
        """Free all swapped activations on the device, after the compute stream has waited for their transfers.

        The host does not wait here; it waits before a slab is given to another call.
        """
        for call in self._running:
            self._depart(call)
        self._leave(self._leaving)
        for call in list(self._calls.values()):
            self._forget(call)
        for arrival in list(self._arriving):
            self._give_up(arrival)
        self._slabs.cool(wait=False)

    def close(self) -> None:
        """Release the memory taken beyond the plan, after the device has ended all transfers."""
        self._slabs.close()

    # --- saving -----------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> _Packed:
        """Return the stand-in that autograd keeps for `tensor`.

        Raises:
            RuntimeError: The storage fits neither the block's planned memory nor the spare host memory.
        """
        call = self._running[-1]
        # With its history, a tensor saved by its own node would keep that node, and so itself, alive for ever.
        probe = tensor if tensor.grad_fn is None else tensor.detach()
        if not self._is_swapped(tensor, call):
            return _Packed(call.name, probe, probe._version)
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version)
        stored = call.stored[key]() if key in call.stored else None
        # The key is reliable only while the source is held: later another storage may have its address.
        if stored is None or stored.device is None:
            stored = self._store(call, storage)
            call.stored[key] = weakref.ref(stored)
        probe = tensor.detach()
        probe.data = self._nothing
        shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return _Packed(call.name, probe, probe._version, stored, tensor.dtype, shape, stride, offset)

    def _is_swapped(self, tensor: Tensor, call: _Call) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        if tensor.device != self._nothing.device or tensor.is_conj() or tensor.is_neg():
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < call.least_bytes or storage._cdata in call.stay:
            return False
        known = self._weights.get(storage._cdata)
        return known is None or known.expired()

    def _store(self, call: _Call, storage: torch.UntypedStorage) -> _Stored:
        """Issue the transfer of `storage` to a slab of `call`."""
        nbytes = storage.nbytes()
        host = call.slabs.reserve(nbytes)
        self._calls[call.number] = call
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))
        stored = _Stored(call, host, source)
        self._device.swap_out(source, host)
        call.holds.append((stored, source))
        return stored

    def _depart(self, call: _Call) -> None:
        """Fence what a call has swapped out since it was last fenced."""
        if not call.holds:
            return
        fence = self._device.after_swaps()
        call.slabs.note_fence(fence)
        sources = [(weakref.ref(stored), source, stored.host) for stored, source in call.holds]
        self._leaving.append(_Departure(call.number, fence, sources))
        call.holds.clear()

    # --- bringing back ----------------------------------------------------------------------------------------------

    def bring(self, stored: _Stored) -> Tensor:
        """Return the bytes of `stored` on the device, ready for the compute stream."""
        self._fetch(stored)
        if stored.arrival is not None:
            self._device.wait(stored.arrival.fence)
            del self._arriving[stored.arrival]
            stored.arrival = None
        assert stored.device is not None
        return stored.device

    def _fetch(self, *wanted: _Stored) -> None:
        """Issue the transfers back to the device of all storages that are not there, in this order."""
        away: list[tuple[_Stored, Tensor]] = []
        for stored in (stored for stored in wanted if stored.device is None):
            storage, nbytes = torch.UntypedStorage(0, device=self._device.torch_device), stored.host.nbytes
            self._device.resize(storage, nbytes)
            target = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))
            away.append((stored, target))
        fences = self._device.swap_in([(stored.host, target) for stored, target in away])
        for (stored, target), fence in zip(away, fences, strict=True):
            stored.call.slabs.note_fence(fence)
            stored.device, stored.arrival = target, _Arrival(fence, target, stored.host, weakref.ref(stored))
            self._arriving[stored.arrival] = None

    # --- letting go -------------------------------------------------------------------------------------------------

    def _leave(self, departures: Iterable[_Departure]) -> None:
        """Free the sources of transfers to the host, once the compute stream has waited for the transfers."""
        leaving = list(departures)
        if not leaving:
            return
        self._device.wait(leaving[-1].fence)  # Transfers run in order, so the last one ends last.
        for reference, source, _ in (entry for departure in leaving for entry in departure.sources):
            stored = reference()
            if stored is not None and stored.device is source:
                stored.device = None
        self._leaving = [departure for departure in self._leaving if departure not in leaving]

    def _forget(self, call: _Call) -> None:
        """Free the storages that have been swapped in; later uses swap them in again."""
        for stored in _alive(call):
            if stored.arrival is not None:
                self._give_up(stored.arrival)
            stored.device = None

    def _give_up(self, arrival: _Arrival) -> None:
        """Free a storage that was swapped in and not used; autograd holds no view of it."""
        self._device.wait(arrival.fence)
        self._device.resize(arrival.device.untyped_storage(), 0)
        del self._arriving[arrival]
        stored = arrival.stored()
        if stored is not None:
            stored.device = stored.arrival = None


def _pack(swap: weakref.ref[ActivationSwap], tensor: Tensor) -> _Packed:
    target = swap()
    assert target is not None, "a forward runs under a plan that has been taken off"
    return target.pack(tensor)


def _unpack(packed: _Packed) -> Tensor:
    """Return the tensor that `packed` stands in for.

    Raises:
        RuntimeError: The tensor was changed in place after it was saved.
    """
    if packed.probe._version != packed.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"saved in {packed.name!r} is at version {packed.probe._version}; expected version {packed.version} "
            "instead. Change it out of place (`x = x + y` for `x += y`)."
        )
    if packed.stored is None:
        return packed.probe
    storage = packed.stored.call.swap.bring(packed.stored).untyped_storage()
    tensor = torch.empty(0, dtype=packed.dtype, device=storage.device)
    return tensor.set_(storage, packed.offset, packed.shape, packed.stride)


def _alive(call: _Call) -> list[_Stored]:
    return [stored for reference in call.stored.values() if (stored := reference()) is not None]


def _storages(tensors: Iterable[Tensor]) -> Iterator[tuple[int, torch.UntypedStorage]]:
    for tensor in tensors:
        if tensor.layout is torch.strided and not tensor.is_meta:
            storage = tensor.untyped_storage()
            yield storage._cdata, storage
