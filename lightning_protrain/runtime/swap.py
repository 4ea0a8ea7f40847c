"""Activations that are swapped out to host memory, and that memory.

[Note: Growth]
A call that saves more than planned takes further slabs, as long as the host has memory to spare. They are whole pieces
of memory, kept when their graph has died and given to the next call that asks for the same size, of whatever block. The
sizes are multiples of an eighth of the planned slab, so few are asked for, and new memory is taken only for a batch
that is larger than those before it. Idle pieces go back to the system where another size is wanted and there would be
no room: what the spare bytes bound is what live graphs hold, and never is more than that taken.

[Note: Swap]
While a swapped block runs its forward, autograd asks here what to keep for each tensor that it saves (paper, section
3.1.2). Each storage is copied once for each version of its contents, whole, to the block's *slab*: one piece of host
memory of exactly the planned bytes, which is given back when the graph dies. If that is full, the call takes further
slabs, see [Note: Growth] in `slabs.py`. What the block is given and what it returns are copied as well, whoever else
may hold them: if they stayed, every swapped block would leave its input on the device and the bytes there would grow
with the depth of the model. What stays are weights and buffers, with all their views, whatever cannot be made again
from a storage, and what is smaller than a page.

[Note: Windows]
A storage that has been copied stays on the device until the next call has ended: so long the copy may take, then the
compute stream waits for it. When the backward of a call begins, what the call before it has saved is on its way back,
and what later calls still have on the device goes. So no more than two neighbours are there at one time, however far
the host runs ahead, and nothing of what lies between the two passes. Their bytes are those that they save, more than
planned if the batch is larger: nothing bounds them. Where the source has not gone yet, it is used. A graph that is
retained fetches again.

[Note: Changes]
PyTorch does not look for in-place changes of tensors that hooks have packed. Every packed tensor leaves an empty one
that shares its version counter, and the check is made here.
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

from lightning_protrain.device.device import Device
from lightning_protrain.device.host import PAGE, HostMemory
from lightning_protrain.runtime.access_guard import below_guard

# The planned slab has so many times the bytes of the smallest one that a call grows by.
GROWTH_STEPS = 8

_CAUSES = (
    "Either this batch is larger than the one the plan was made with, or is padded where that one was not: give "
    "batches of one size, or the largest first (for a data module with `largest_batch()`, such as `ChatDataModule`, "
    "the plan is made with that one). Or parameters train that did not when the plan was made (a callback has unfrozen "
    "them): begin another fit once they are unfrozen, which plans again"
)


@dataclass(eq=False)
class Slab:
    """A piece of the host memory of one call; `fence` is that of the latest copy from or to it."""

    memory: Tensor
    used: int = 0
    fence: Any = None


@dataclass(eq=False)
class _Piece:
    """Memory that grown slabs are made of, one after the other."""

    memory: HostMemory
    nbytes: int
    in_use: bool = False


class SlabPool:
    """Gives calls their slabs, and takes them back when the last copy from or to them has ended.

    Args:
        device: Its host memory is given.
        log_once: Takes a sentence for the user.
        spare_bytes: What the host may give beyond what is planned, see [Note: Growth].
    """

    def __init__(self, device: Device, log_once: Callable[[str], None], spare_bytes: int) -> None:
        self.log_once = log_once
        self.said = False
        self._device = device
        self._limit = spare_bytes
        self._pieces: list[_Piece] = []
        self._cooling: deque[Slab] = deque()

    @property
    def grown_bytes(self) -> int:
        """What has been taken from the host beyond what is planned, in use or kept for the next call."""
        return sum(piece.nbytes for piece in self._pieces)

    @property
    def spare_bytes(self) -> int:
        """What a call may still have beyond what is planned."""
        return self._limit - sum(piece.nbytes for piece in self._pieces if piece.in_use)

    def planned(self, nbytes: int) -> Slab:
        """A slab of exactly `nbytes`."""
        return Slab(torch.frombuffer(self._device.host.empty(nbytes), dtype=torch.uint8, count=nbytes))

    def grown(self, nbytes: int, step: int) -> Slab | None:
        """A slab of at least `nbytes`, a multiple of `step` where there is room for it; None: there is no room.

        Args:
            nbytes: Whole pages.
            step: Whole pages.
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
        # When the last tensor over it has died.
        weakref.finalize(view, setattr, piece, "in_use", False).atexit = False
        return Slab(torch.frombuffer(view, dtype=torch.uint8))

    def close(self) -> None:
        """Unlocks what has been taken beyond what is planned, once the device has ended all copies."""
        while self._pieces:
            self._drop(self._pieces[-1])

    def _drop(self, piece: _Piece) -> None:
        piece.memory.close()
        self._pieces.remove(piece)

    def take_back(self, slab: Slab, owner: object) -> None:
        """Has `slab` cool down when `owner` has died."""
        weakref.finalize(owner, self._cooling.append, slab).atexit = False

    def cool(self, wait: bool = True) -> None:
        """Gives the host memory of dead graphs back.

        Args:
            wait: Whether the host waits for the last copy from or to it; else what is under way stays.
        """
        while self._cooling and (wait or self._device.has_ended(self._cooling[0].fence)):
            self._device.land(self._cooling[0].fence)
            self._cooling.popleft()


class CallSlabs:
    """The slabs of one call; who holds on to what lies in them holds on to this.

    Args:
        pool: Where they come from.
        name: The unit's name.
        planned_bytes: Bytes of the first one.
    """

    def __init__(self, pool: SlabPool, name: str, planned_bytes: int) -> None:
        self._pool = pool
        self._name = name
        self._planned_bytes = planned_bytes
        self._has_planned = False
        self._slabs: list[Slab] = []

    @property
    def used_bytes(self) -> int:
        """Of all slabs, in whole pages."""
        return sum(slab.used for slab in self._slabs)

    def reserve(self, nbytes: int) -> tuple[Slab, Tensor]:
        """Memory of `nbytes`, and the slab that it belongs to, whose fence the caller sets.

        Raises:
            RuntimeError: It does not fit what is planned, nor what the host has to spare.
        """
        size = -(-nbytes // PAGE) * PAGE
        slab = next((slab for slab in self._slabs if slab.used + size <= slab.memory.nbytes), None)
        if slab is None:
            slab = self._another(size)
            self._slabs.append(slab)
            self._pool.take_back(slab, self)
        memory = slab.memory[slab.used : slab.used + nbytes]
        slab.used += size
        return slab, memory

    def tell_growth(self) -> None:
        """Says once for all calls of the pool that one has grown, if this one has."""
        if self._pool.said or self.used_bytes <= self._planned_bytes:
            return
        self._pool.said = True
        self._pool.log_once(
            f"{self._name!r} is swapped and saves more than planned: {self._planned_bytes} bytes of host memory are "
            f"planned for one call, this one took {self.used_bytes}. The host gives them; on the device, too, the step "
            f"takes more than was predicted, and may run out of memory. {_CAUSES}."
        )

    def _another(self, size: int) -> Slab:
        """A slab with room for `size` bytes: the planned one, or else one that the host has to spare."""
        if size <= self._planned_bytes and not self._has_planned:
            self._has_planned = True
            return self._pool.planned(self._planned_bytes)
        slab = self._pool.grown(size, step=-(-self._planned_bytes // (GROWTH_STEPS * PAGE)) * PAGE)
        if slab is None:
            raise RuntimeError(
                f"{self._name!r} is swapped and saves more than planned: {self._planned_bytes} bytes of host memory "
                f"are planned for one call, at least {self.used_bytes + size} are needed, and beyond the plan the host "
                f"may give {self._pool.spare_bytes} more. {_CAUSES}, or checkpoint the blocks "
                "(`num_checkpoint_blocks`) instead of swapping them. Or raise `host_memory`."
            )
        return slab


# A smaller tensor takes more host memory, which is given in pages, than it frees on the device.
MIN_BYTES = PAGE


@dataclass(eq=False)
class _Call:
    """What one call of a block has swapped; it lives as long as anything that it has saved.

    While it runs it `holds` all of it: what dies at once (a value that is only logged) may be saved again.
    """

    swap: ActivationSwap
    name: str
    number: int
    slabs: CallSlabs
    weights: frozenset[int]
    # By storage and version, in the order of saving.
    stored: dict[tuple[int, int], weakref.ref[_Stored]] = field(default_factory=dict)
    holds: list[_Stored] = field(default_factory=list)


@dataclass(eq=False)
class _Stored:
    """One storage of a call: in a slab, and for a while on the device too, see [Note: Windows]."""

    call: _Call
    slab: Slab
    host: Tensor
    device: Tensor | None
    arrival: _Copy | None = None


@dataclass(eq=False)
class _Copy:
    """A copy that the compute stream has not waited for yet, and what must live until then."""

    number: int
    order: int
    fence: Any
    device: Tensor
    host: Tensor
    stored: weakref.ref[_Stored]


@dataclass(eq=False)
class _Packed:
    """What stands for a saved tensor: itself, or what it takes to make it again; `probe` has its version counter."""

    name: str
    probe: Tensor
    version: int
    stored: _Stored | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0


class ActivationSwap:
    """Moves what blocks save to the host and back, see [Note: Swap] and [Note: Windows].

    Args:
        device: Where activations come from and go back to.
        weights: Tensors that stay wherever they are saved: all parameters, device parameters and buffers.
        log_once: Takes a sentence for the user.
        spare_bytes: What the host may give beyond what is planned, see [Note: Growth].
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
        self._running: list[_Call] = []
        self._issued = 0
        self._leaving: list[_Copy] = []
        self._arriving: dict[int, _Copy] = {}
        self._nothing = torch.empty(0, dtype=torch.uint8, device=device.torch_device)
        # PyTorch never lets go of the functions it is given: they hold on to nothing.
        self._hooks = (functools.partial(_pack, weakref.ref(self)), _unpack)

    @contextmanager
    def call(self, name: str, module: nn.Module, number: int, swap_bytes: int) -> Iterator[None]:
        """Around a forward that autograd may go back through; what it saves is swapped if `swap_bytes` are planned.

        Args:
            name: The unit's name.
            module: The unit.
            number: The call's number, see [Note: Calls].
            swap_bytes: Host bytes that are planned for the call.

        Raises:
            RuntimeError: The call saves more than that, and more than the host has to spare.
        """
        begin = self._issued
        if swap_bytes:
            self._slabs.cool()
            with below_guard():  # Which weights they are can be known while they are stepped.
                own = frozenset(key for key, _ in _storages([*module.parameters(), *module.buffers()]))
            self._running.append(_Call(self, name, number, CallSlabs(self._slabs, name, swap_bytes), own))
            try:
                with torch.autograd.graph.saved_tensors_hooks(*self._hooks):
                    yield
                self._running[-1].slabs.tell_growth()
            finally:
                self._running.pop().holds.clear()
        else:
            yield
        self._leave(copy for copy in self._leaving if copy.order < begin)

    def before_backward(self, number: int, following: int | None, end: int) -> None:
        """The backward of call `number` begins; `following` comes next, calls from `end` on have been gone through."""
        self._leave(copy for copy in self._leaving if copy.number not in (number, following))
        for later, call in list(self._calls.items()):
            if later >= end:
                self._forget(call)
        for wanted in (number, following):
            call_of = self._calls.get(wanted) if wanted is not None else None
            for stored in reversed(_alive(call_of)) if call_of is not None else ():
                self._fetch(stored)

    def settle(self) -> None:
        """Between forwards and backwards: nothing swapped is on the device, and the compute stream has waited for it.

        The host waits for nothing: it does so before it gives a slab to somebody else.
        """
        self._leave(self._leaving)
        for call in list(self._calls.values()):
            self._forget(call)
        for copy in list(self._arriving.values()):
            self._give_up(copy)
        self._slabs.cool(wait=False)

    def close(self) -> None:
        """After the device has ended all copies: gives back what was taken beyond the plan."""
        self._slabs.close()

    # --- saving -----------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> _Packed:
        """What autograd keeps in place of `tensor`.

        Raises:
            RuntimeError: It does not fit what is planned for the block, nor what the host has to spare.
        """
        call = self._running[-1]
        # With its history, a tensor saved by the node that makes it would keep that node, and itself, for ever.
        probe = tensor if tensor.grad_fn is None else tensor.detach()
        if not self._is_swapped(tensor, call):
            return _Packed(call.name, probe, probe._version)
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor._version)
        stored = call.stored[key]() if key in call.stored else None
        # Only while the source is held no other storage can have come to its address.
        if stored is None or stored.device is None:
            stored = self._store(call, storage)
            call.stored[key] = weakref.ref(stored)
            call.holds.append(stored)
        probe = tensor.detach()
        probe.data = self._nothing
        shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return _Packed(call.name, probe, probe._version, stored, tensor.dtype, shape, stride, offset)

    def _is_swapped(self, tensor: Tensor, call: _Call) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        if tensor.device.type != self._device.torch_device.type or tensor.is_conj() or tensor.is_neg():
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < MIN_BYTES or storage._cdata in call.weights:
            return False
        known = self._weights.get(storage._cdata)
        return known is None or known.expired()

    def _store(self, call: _Call, storage: torch.UntypedStorage) -> _Stored:
        """Issues the copy of `storage` to a slab of `call`."""
        nbytes = storage.nbytes()
        slab, host = call.slabs.reserve(nbytes)
        self._calls[call.number] = call
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))
        stored = _Stored(call, slab, host, source)
        slab.fence = self._device.swap_out(source, host)
        self._leaving.append(_Copy(call.number, self._issued, slab.fence, source, host, weakref.ref(stored)))
        self._issued += 1
        return stored

    # --- bringing back ----------------------------------------------------------------------------------------------

    def bring(self, stored: _Stored) -> Tensor:
        """The bytes of `stored` on the device, ready for the compute stream."""
        self._fetch(stored)
        if stored.arrival is not None:
            self._device.wait(stored.arrival.fence)
            del self._arriving[stored.arrival.order]
            stored.arrival = None
        assert stored.device is not None
        return stored.device

    def _fetch(self, stored: _Stored) -> None:
        """Issues the copy back to the device, if nothing of it is there."""
        if stored.device is not None:
            return
        storage = torch.UntypedStorage(0, device=self._device.torch_device)
        nbytes = stored.host.nbytes
        self._device.resize(storage, nbytes)
        target = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (nbytes,), (1,))
        fence = stored.slab.fence = self._device.swap_in(stored.host, target)
        copy = _Copy(stored.call.number, self._issued, fence, target, stored.host, weakref.ref(stored))
        stored.device, stored.arrival = target, copy
        self._arriving[copy.order] = copy
        self._issued += 1

    # --- letting go -------------------------------------------------------------------------------------------------

    def _leave(self, copies: Iterable[_Copy]) -> None:
        """Frees the sources of copies to the host, once the compute stream has waited for the copies."""
        leaving = list(copies)
        if not leaving:
            return
        self._device.wait(leaving[-1].fence)  # They run one after the other.
        for copy in leaving:
            stored = copy.stored()
            if stored is not None and stored.device is copy.device:
                stored.device = None
        gone = set(leaving)
        self._leaving = [copy for copy in self._leaving if copy not in gone]

    def _forget(self, call: _Call) -> None:
        """Frees what has come back to the device; whoever still needs it fetches it again."""
        for stored in _alive(call):
            if stored.arrival is not None:
                self._give_up(stored.arrival)
            stored.device = None

    def _give_up(self, copy: _Copy) -> None:
        """Frees what has been fetched for nobody; autograd holds no view of it."""
        self._device.wait(copy.fence)
        self._device.resize(copy.device.untyped_storage(), 0)
        del self._arriving[copy.order]
        stored = copy.stored()
        if stored is not None:
            stored.device = stored.arrival = None


def _pack(swap: weakref.ref[ActivationSwap], tensor: Tensor) -> _Packed:
    target = swap()
    assert target is not None, "a forward runs under a plan that has been taken off"
    return target.pack(tensor)


def _unpack(packed: _Packed) -> Tensor:
    """The tensor that `packed` stands for.

    Raises:
        RuntimeError: It was changed in place, see [Note: Changes].
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
