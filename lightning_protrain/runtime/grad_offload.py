"""Downloads gradients to the host, averaged over ranks first if there are several, within a budget of bytes.

Autograd accumulates into the device parameter. The gradient is downloaded to `host.grad` at once. The device parameter
drops its gradient, so the device memory is free when the download ends. If the host already has an older gradient
(accumulation), the host adds the new one to it, in the same order as autograd would. When all gradients of a chunk are
being downloaded, the host's worker waits for them and adds them up. It does so in a separate job or as part of the
chunk's step. The main thread goes on with backward, and waits only for host memory.

[Note: Small gradients]
Downloading a small gradient takes less time than issuing the download, and a model may have hundreds of adapters. The
gradients of a chunk of adapters (`gathers_gradients`) are kept on the device until the last one has arrived. Then they
are laid out as on the host, and downloaded in one transfer. Gradients of only one chunk are kept at a time. An
incomplete set is downloaded one by one when a gradient of another chunk arrives or when backward ends. Averages over
ranks are also downloaded one by one.

[Note: Direct use]
A weight used outside its own block (a penalty over `self.parameters()`) takes part in the graph through its host
parameter. Autograd would add the gradients of both parameters before it adds the sum to an older gradient, so the older
gradient is set aside until backward ends. If the gradients cannot be added in autograd's order, the use is refused.

[Note: Gradients in passing]
Where steps run behind backward, a gradient needs host memory only from its download until its step. If the plan says so
(`Plan.gradient_buffers`), gradients are downloaded into a ring of buffers, each for one chunk. A buffer is free again
when no tensor uses it, which is usually when the step has ended. If all buffers are in use, backward waits for the
oldest step. If some weights of a chunk get no gradient, the chunk is stepped once backward has left it. Otherwise it
would hold its buffer until backward ends. As in [Note: Gradients in shadows], `grad` is a stand-in.

Two backwards keep all gradients: that of the rehearsal, and that of the first step, because no weight may change before
it has ended. The gradients use memory that the plan has for optimizer states, which do not exist yet. The first step of
a chunk allocates the chunk's states, and then returns the memory of its gradients to the system. If the states are
smaller than the gradients, the plan counts the difference. A resumed run has states and a checkpoint to return to, so
its first step already runs behind backward.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_protrain.device.host import HostMemory, Job, in_block
from lightning_protrain.planner.plan import chunk_offsets, unit_bytes
from lightning_protrain.progress import bar
from lightning_protrain.runtime.access_guard import below_guard
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.comm.collectives import Collectives
from lightning_protrain.runtime.comm.reduce import GradReducer
from lightning_protrain.runtime.optim.async_step import AsyncStep
from lightning_protrain.runtime.param import OffloadedParam
from lightning_protrain.runtime.residency import Residency
from lightning_protrain.runtime.shadow import is_given_up
from lightning_protrain.runtime.step_context import StepContext


class DownloadBudget:
    """The bytes of gradients that may be in flight to the host while the next gradient is computed.

    The plan has room for the two largest gradients, so that one can be in flight while the other is computed. The size
    of the next gradient is predicted from the order of the previous backward. So the device waits for the host only if
    the next gradient would not fit beside those in flight. After a gradient out of that order (another expert, another
    branch), each next gradient of this backward is assumed to be as large as the largest. The gradient out of order may
    itself be larger than predicted. Then more gradients are in flight than the plan has room for.

    Args:
        sizes: Size of each gradient that is downloaded, bytes.

    Attributes:
        hold_bytes: Bytes that may be in flight while the largest gradient is computed.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        largest = sorted(sizes)[-2:]
        self._total = sum(largest)
        self.hold_bytes = largest[0] if len(largest) > 1 else 0
        # Gradients with their bytes in the order of download: in the previous backward, and in this one.
        self._expected: list[tuple[OffloadedParam, int]] = []
        self._seen: list[tuple[OffloadedParam, int]] = []
        self._as_expected = True

    def arrive(self, param: OffloadedParam, nbytes: int) -> int:
        """Return the bytes that may be in flight, this gradient included, until the next gradient arrives."""
        at = len(self._seen)
        self._seen.append((param, nbytes))
        self._as_expected = self._as_expected and at < len(self._expected) and self._expected[at][0] is param
        if not self._as_expected:
            return self.hold_bytes
        following = self._expected[at + 1 : at + 2]
        return self._total - following[0][1] if following else self._total

    def end(self) -> None:
        """Record the order of a backward that has ended."""
        if self._seen:
            self._expected = self._seen
        self.forget()

    def forget(self) -> None:
        """Forget the order of this backward, which has failed or been recorded."""
        self._seen, self._as_expected = [], True


# Dtypes that NumPy knows: through NumPy, making a tensor over a part of a block takes a third of the time.
_NUMPY_TYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float16: np.dtype("float16"),
    torch.float32: np.dtype("float32"),
    torch.float64: np.dtype("float64"),
}


class GradientRing:
    """Host memory for the gradients of a few chunks at the same time, see [Note: Gradients in passing].

    Args:
        memory: Host memory that buffers are allocated from.
        nbytes: Size of a buffer, bytes.
        count: Number of buffers.
    """

    def __init__(self, memory: HostMemory, nbytes: int, count: int) -> None:
        self._memory = memory
        self._used: list[weakref.ref[memoryview]] = []
        self.nbytes = nbytes
        self.count = count

    @property
    def is_full(self) -> bool:
        """True if tensors use all buffers."""
        self._used = [used for used in self._used if used() is not None]
        return len(self._used) >= self.count

    def empty(self, nbytes: int) -> memoryview:
        """Return a buffer for `nbytes` uninitialised bytes; it is free again when no tensor uses it."""
        assert nbytes <= self.nbytes
        buffer = self._memory.empty(self.nbytes)
        self._used.append(weakref.ref(buffer))
        return buffer


class GradientMemory:
    """Host memory for the gradients of one chunk.

    A memory block is allocated for the first gradient of a chunk, and freed when the last tensor over it dies. Each
    gradient has its own place in the block, and a storage of its own over that place. A place is given out once in the
    life of a block, because code may still hold the gradient in it. If the place is needed again, a new block is
    allocated. So no gradient is ever overwritten, and one held gradient keeps its whole block alive.

    Args:
        memory: Host memory that blocks are allocated from.
        sizes: Size of each gradient, bytes.

    Attributes:
        nbytes: Size of a block, bytes.
        offsets: Offset of each gradient in a block, bytes.
        has_been_used: Whether a block has ever been allocated.
    """

    def __init__(self, memory: HostMemory | GradientRing, sizes: Sequence[int]) -> None:
        self._memory = memory
        self.offsets, self.nbytes = chunk_offsets(sizes)
        self._block: weakref.ref[np.ndarray[Any, Any]] | None = None
        self._free: set[int] = set()
        self.has_been_used = False

    def empty_like(self, gradient: Tensor, place: int) -> Tensor:
        """Return an uninitialised host tensor with shape, strides and dtype of `gradient`, which must be dense.

        Args:
            gradient: Gradient with as many bytes as the place.
            place: Index into `sizes`.
        """
        block = self._block() if self._block is not None and place in self._free else None
        if block is None:
            block = self._new_block()
        self._free.discard(place)
        offset = self.offsets[place]
        kind = _NUMPY_TYPES.get(gradient.dtype)
        if kind is not None and gradient.is_contiguous():
            return torch.from_numpy(np.ndarray(gradient.shape, kind, block, offset))
        return in_block(block.data, offset, gradient)

    @property
    def has_block(self) -> bool:
        """True if a tensor uses the present block."""
        return self._block is not None and self._block() is not None

    def begin(self) -> None:
        """Put the gradients that follow, one for each place, into one block."""
        if len(self._free) < len(self.offsets):
            self._block = None

    def whole(self) -> Tensor:
        """Return the present block, shape (nbytes,), uint8; a gradient in it must be alive."""
        block = self._block() if self._block is not None else None
        assert block is not None
        return torch.from_numpy(block)[: self.nbytes]

    def _new_block(self) -> np.ndarray[Any, Any]:
        """Return a new block with every place free; the array keeps the memory alive through a tensor."""
        block: np.ndarray[Any, Any] = torch.frombuffer(self._memory.empty(self.nbytes), dtype=torch.uint8).numpy()
        self._block = weakref.ref(block)
        self.has_been_used = True
        self._free = set(range(len(self.offsets)))
        return block


@dataclass
class _Sum:
    """A downloaded gradient that is still to be added to an older one, or to be cast."""

    fence: object
    index: int
    part: Tensor
    host: nn.Parameter
    cast: Tensor | None = None  # Target of the cast; None: an older gradient exists, or a cast allocates its own.


@dataclass
class _Place:
    """Destination of a gradient on the host.

    Attributes:
        arrive: Callback that takes the fence of the issued download.
        block: Host memory of the whole chunk, of which `target` is a part.
        offset: Offset of `target` in it, bytes.
    """

    target: Tensor
    arrive: Callable[[object], None]
    block: GradientMemory | Chunk
    offset: int


class GradOffload:
    """The path of gradients from device parameters to host parameters, see the module docstring.

    Args:
        context: State of the present step.
        residency: Releases chunks whose gradients are sent to other ranks.
        async_step: Takes over the gradients of whole chunks.
        communicator: Averages gradients over ranks first; None: a single rank.
        pending_bytes: Largest size of sums that may wait for their downloads, bytes; None: twice the size of the
            largest unit.
    """

    def __init__(
        self,
        context: StepContext,
        residency: Residency,
        async_step: AsyncStep,
        communicator: Collectives | None = None,
        pending_bytes: int | None = None,
    ) -> None:
        chunks, device = context.chunks, context.device
        self.reduction = GradReducer(context, communicator) if communicator is not None else None
        self._context = context
        self._residency = residency
        self._device = device
        self._async_step = async_step
        # Independent of the chunk size, so that the worker always has work while the device recomputes a block.
        in_units = unit_bytes(chunk.plan for chunk in chunks)
        self._pending_bytes = 2 * max(in_units, default=0) if pending_bytes is None else pending_bytes
        self._gathered = {i for i, chunk in enumerate(chunks) if chunk.gathers_gradients and communicator is None}
        self._kept: dict[OffloadedParam, Tensor] = {}  # Gradients of one chunk, see [Note: Small gradients].
        with below_guard():  # Otherwise low-precision device parameters report the dtype of their weights.
            self._nbytes = {param: param.device_param.nbytes for chunk in chunks for param in chunk.params}
        on_device = [[self._nbytes[param] for param in chunk.params] for chunk in chunks]
        sizes = (
            [chunk.nbytes] if index in self._gathered else on_device[index]
            for index, chunk in enumerate(chunks)
            if chunk.plan.trainable
        )
        self._in_flight = DownloadBudget(list(chain.from_iterable(sizes)))
        device.hold_bytes = self._in_flight.hold_bytes
        self._chunks = chunks
        # Memory that gradients stay in, and memory for gradients that are added to older ones or cast.
        sizes_on_host = [[param.host.nbytes for param in chunk.params] for chunk in chunks]
        self._all_stay = device.new_host_memory() if async_step.gradient_buffers else device.host
        self._stays = [GradientMemory(self._all_stay, sizes) for sizes in sizes_on_host]
        self._ring: GradientRing | None = None
        if async_step.gradient_buffers:
            taken = [stays.nbytes for chunk, stays in zip(chunks, self._stays, strict=True) if _takes_memory(chunk)]
            self._ring = GradientRing(device.host, max(taken), async_step.gradient_buffers)
            self._passing = [GradientMemory(self._ring, sizes) for sizes in sizes_on_host]
        self._waits = [GradientMemory(device.host, sizes) for sizes in on_device]
        # Memory for averages, which only owners get; for a chunk that this rank owns whole, the memory in `_stays`.
        owned = [[param.host.nbytes if param.owned else 0 for param in chunk.params] for chunk in chunks]
        whole = [all(param.owned for param in chunk.params) for chunk in chunks]
        self._averages = [
            stays if all_here else GradientMemory(device.host, sizes)
            for stays, all_here, sizes in zip(self._stays, whole, owned, strict=True)
        ]
        self._places = {
            param: (index, at) for index, chunk in enumerate(chunks) for at, param in enumerate(chunk.params)
        }
        self._missing: dict[int, set[OffloadedParam]] = {}
        self._handed_over: set[int] = set()
        self._overflow_said = False
        # Pending sums in the order of download.
        self._sums: deque[_Sum] = deque()
        # Jobs in which the worker sums whole chunks, with their bytes; and the bytes of all pending sums.
        self._jobs: deque[tuple[Job, int]] = deque()
        self._sum_bytes = 0
        self._fences: dict[int, list[object]] = {}  # By chunk, of gradients that stay.
        self._landed: set[OffloadedParam] = set()
        self._aside: dict[OffloadedParam, Tensor | None] = {}

    def reserve(self, lends: bool) -> None:
        """Allocate and page-lock host memory for gradients now; later it would delay the first backward by seconds.

        Args:
            lends: Whether gradients lie in the memory of shadow copies, if there are any.
        """
        chunks = [
            stays.nbytes
            for chunk, stays in zip(self._chunks, self._stays, strict=True)
            if chunk.plan.trainable and not (lends and chunk.plan.streamed_dtype)
        ]
        self._all_stay.reserve(bar(chunks, "Page-locking memory for gradients", unit="chunk"))  # The ring comes later.

    def release_reserved(self) -> None:
        """Return memory for all gradients to the system, because optimizer states take it from now on."""
        if self._ring is not None:
            self._all_stay.shrink()

    def close(self) -> None:
        """Release memory for all gradients; gradients in it stay valid."""
        if self._ring is not None:
            self._all_stay.close()

    def take(self, param: OffloadedParam) -> None:
        """Take the gradient that autograd has accumulated into a device parameter.

        Raises:
            RuntimeError: The parameter is used outside of its block in a way that has no exact sum.
        """
        device_param, host = param.device_param, param.host
        with below_guard():  # Otherwise every read would pass the class of the device parameter, which is slow.
            grad, trained, hooked = device_param.grad, host.requires_grad, bool(host._post_accumulate_grad_hooks)
            device_param.grad = None
        if grad is None or not trained:
            # Frozen since the forward (`toggle_optimizer`): without offloading, autograd would accumulate nothing.
            return
        if param in self._aside and self._context.num_uses(param) > 1:
            raise _refusal(param, "it is also used by several calls of its block")
        index, _ = self._places[param]
        self._landed.add(param)
        reduction = self.reduction
        if reduction is not None and reduction.runs:
            with below_guard():
                reduction.add(index, param, grad)
                kept_back = {self._places[number][0] for number in self._aside}
                while (ready := reduction.next_complete(kept_back)) is not None:
                    self._residency.release_to_owner(ready)
                    reduction.send(ready)
                    self._receive_all(reduction.arrived(but=1))
        else:
            if reduction is not None:
                reduction.refuse_mixing(param)
            if index in self._gathered and not hooked and not grad.is_sparse:
                self._keep(index, param, grad)
            else:
                self._receive(param, grad)

    def before_direct_gradient(self, param: OffloadedParam) -> None:
        """Prepare for a gradient that autograd accumulates into the host parameter, see [Note: Direct use].

        Raises:
            RuntimeError: Both gradients could not be added in autograd's order.
        """
        if param in self._landed:
            raise _refusal(param, "that use comes before its block's forward (after it, it would be exact)")
        if param.mirrored or param.host._post_accumulate_grad_hooks:
            raise _refusal(param, "it has hooks, which would see a part of its gradient")
        if param not in self._aside:
            self._aside[param] = param.host.grad
            param.host.grad = None

    def finish(self) -> None:
        """End all downloads and sums, so that every host gradient is complete."""
        with below_guard():  # The guard already watches shared weights when averages of their gradients arrive.
            if self.reduction is not None:
                self._finish_reduction(self.reduction)
            self._finish_copies()
        self._in_flight.end()
        self._async_step.end_backward()
        self._refuse_direct_uses()
        for param, older in self._aside.items():
            if older is not None:
                assert param.host.grad is not None
                older.add_(param.host.grad)
                param.host.grad = older
        self._aside.clear()
        self.forget()

    def _refuse_direct_uses(self) -> None:
        """Refuse direct uses of as many chunks as there are buffers: their gradients wait until backward ends."""
        ring, waiting = self._ring, {self._places[param][0] for param in self._aside}
        if ring is not None and len(waiting) >= ring.count and self._async_step.gives_up:
            if self._async_step.takes_landings:  # Too late: weights may have been stepped.
                self._say_overflow()
                return
            fqn = next(iter(self._aside)).fqn
            raise self._async_step.refusal_to_wait(f"Too many weights are used outside their blocks, such as {fqn!r}.")

    def forget(self) -> None:
        """Drop pending gradients after an exception; wait for downloads first, as their memory is used again."""
        self._in_flight.forget()
        self._kept.clear()
        if self.reduction is not None:
            self.reduction.forget()
        self._land_fences()
        for item in self._sums:
            self._device.wait_host(item.fence)
        while self._jobs:
            self._jobs.popleft()[0].exception()
        for param, older in self._aside.items():
            param.host.grad = older
        self._sums.clear()
        self._sum_bytes = 0
        self._landed.clear()
        self._aside.clear()
        self._missing.clear()
        self._handed_over.clear()

    def start_anew(self) -> None:
        """Forget that this rank has collected gradients of its own, so that averages take only the room that they need.

        Call it only when no code holds a gradient any more.
        """
        self.forget()
        for memory in self._stays:
            memory.has_been_used = False

    def _finish_reduction(self, reduction: GradReducer) -> None:
        """Average the remaining gradients; older gradients that were set aside are part of the average."""
        if reduction.runs:
            for param, older in self._aside.items():
                if older is not None:
                    reduction.add(self._places[param][0], param, older, on_host=True)
            self._aside.clear()
            for index in range(len(self._chunks)):
                self._residency.release_to_owner(index)
        self._receive_all(reduction.finish())

    def _receive_all(self, averages: Iterable[tuple[OffloadedParam, Tensor]]) -> None:
        for param, average in averages:  # In a function of its own: its end frees the last average.
            self._receive(param, average)

    def _keep(self, index: int, param: OffloadedParam, grad: Tensor) -> None:
        """Keep a gradient until all gradients of its chunk have arrived, see [Note: Small gradients]."""
        if self._kept and (param in self._kept or self._places[next(iter(self._kept))][0] != index):
            self._send_kept()
        self._kept[param] = grad
        if len(self._kept) == len(self._chunks[index].params):
            self._send_kept()

    def _send_kept(self) -> None:
        """Download the kept gradients."""
        gradients, self._kept = self._kept, {}
        if not gradients or not self._send_together(gradients):
            for param, grad in gradients.items():
                self._receive(param, grad)

    def _send_together(self, gradients: dict[OffloadedParam, Tensor]) -> bool:
        """Download all gradients of a chunk, in one transfer if they go to one block; return False if some are missing.

        A gradient also counts as missing if the step has overwritten the older gradient that it is added to.
        """
        index, _ = self._places[next(iter(gradients))]
        params = self._chunks[index].params
        with below_guard():
            if len(gradients) < len(params) or any(is_given_up(param.host.grad) for param in params):
                return False
            self._make_room(index)
            for memory in (self._home(index), self._waits[index]):
                memory.begin()
            places = [self._place(param, gradients[param]) for param in params]
            block = places[0].block
            together = all(place.block is block for place in places)
            if together:
                whole = block.whole() if isinstance(block, GradientMemory) else block.source
                staged = gradients[params[0]].new_empty(whole.nbytes, dtype=torch.uint8)
                torch._foreach_copy_(
                    [
                        staged[place.offset :][: grad.nbytes].view(grad.dtype).as_strided(grad.shape, grad.stride())
                        for place, grad in zip(places, map(gradients.__getitem__, params), strict=True)
                    ],
                    [gradients[param] for param in params],
                )
                self._device.hold_bytes = self._in_flight.arrive(params[0], staged.nbytes)
                fence = self._device.download(staged, whole)
            for param, place in zip(params, places, strict=True):
                if not together:
                    self._device.hold_bytes = self._in_flight.arrive(param, self._nbytes[param])
                    fence = self._device.download(gradients[param], place.target)
                place.arrive(fence)
        for param in params:
            self._arrived(index, param)
        return True

    def _receive(self, param: OffloadedParam, grad: Tensor) -> None:
        """Download a gradient of this rank, or an average over ranks, into `host.grad`."""
        host, (index, _) = param.host, self._places[param]
        self._make_room(index)
        self._device.hold_bytes = self._in_flight.arrive(param, self._nbytes[param])
        with below_guard():
            older = host.grad
            if older is not None and is_given_up(older):
                return  # The older gradient is gone, so no sum exists until `zero_grad`.
            if grad.is_sparse:
                self._finish_copies()  # A backward that has failed may have left a pending sum for the same weight.
                grad = grad.to(host.device)
                host.grad = grad if older is None else older.add_(grad)
            else:
                arrival = self._place(param, grad)
                arrival.arrive(self._device.download(grad, arrival.target))
            hooked = bool(host._post_accumulate_grad_hooks)
        if hooked:
            self._finish_copies()
            for hook in list((host._post_accumulate_grad_hooks or {}).values()):
                hook(host)
        self._arrived(index, param)

    def _place(self, param: OffloadedParam, grad: Tensor) -> _Place:
        """Return the host memory that a dense gradient is downloaded to, and what happens to it there."""
        index, at = self._places[param]
        host, older = param.host, param.host.grad
        if older is None and grad.dtype == host.dtype:
            home = self._home(index)
            target = home.empty_like(grad, at)
            if self._ring is not None and param.shadow is None and self._async_step.lends_copy(index, param):

                def passes(fence: object) -> None:
                    param.receive_in_passing(target, lambda: self._device.wait_host(fence))
                    self._stay(index, fence)

                return _Place(target, passes, home, home.offsets[at])
            host.grad = target
            return _Place(target, lambda fence: self._stay(index, fence), home, home.offsets[at])
        lends = older is None and param.shadow is not None and self._async_step.lends_copy(index, param)
        low = param.shadow.lend(grad) if lends and param.shadow is not None else None
        if low is not None:
            host.grad = low

            def lend(fence: object) -> None:
                low.downloads(lambda: self._device.wait_host(fence))
                self._stay(index, fence)

            return _Place(low.stored(), lend, self._chunks[index], param.offset)
        waits = self._waits[index]
        part = waits.empty_like(grad, at)
        cast = None
        if older is None:
            # Allocate here, as the cast may run on the worker: only this thread allocates.
            cast = self._home(index).empty_like(torch.empty_like(grad, dtype=host.dtype, device="meta"), at)

        def wait(fence: object) -> None:
            self._sums.append(_Sum(fence, index, part, host, cast))
            self._sum_bytes += part.nbytes
            if fence is None:
                self._add(0)

        return _Place(part, wait, waits, waits.offsets[at])

    def _arrived(self, index: int, param: OffloadedParam) -> None:
        self._hand_over(index, param)
        if self._sums or self._jobs:
            self._add(self._pending_bytes)

    def _home(self, index: int) -> GradientMemory:
        """Return the memory in which a gradient of the chunk stays.

        Averages need room only for the parameters that this rank owns. But if the rank has also collected gradients of
        its own, a block for the whole chunk already exists, is free when averages arrive, and is used for them.
        """
        stays = self._stays[index]
        if self._ring is not None:
            # The next micro-batch of a rehearsal uses the memory again. After the first step, optimizer states need it.
            self._all_stay.keeps_free = not self._async_step.gives_up
            if not (self._passes_behind_backward and _takes_memory(self._chunks[index])):
                return stays
            self._all_stay.shrink()
            return self._passing[index]
        averages = self.reduction is not None and self.reduction.runs and not stays.has_been_used
        return self._averages[index] if averages else stays

    def _stay(self, index: int, fence: object) -> None:
        """Note that a gradient of the chunk is being downloaded to the memory in which it stays."""
        self._fences.setdefault(index, []).append(fence)

    def _hand_over(self, index: int, param: OffloadedParam) -> None:
        """Hand the gradients of the chunk to the worker if this was the last one."""
        params = self._chunks[index].params
        missing = self._missing.get(index)
        if missing is None:
            owned = self.reduction is not None and self.reduction.runs  # Only owners get averages.
            with below_guard():
                trained = [other for other in params if other.host.requires_grad]
            missing = self._missing[index] = {other for other in trained if other.owned or not owned}
        missing.discard(param)
        if not (missing or not self._context.has_read(index) or self._has_direct_use(index)):
            self._hand_on(index)

    def _hand_on(self, index: int) -> None:
        """Hand the gradients of the chunk to the worker; no gradient follows."""
        self._handed_over.add(index)
        wanted = self._async_step.wants(index)
        sums = [item for item in self._sums if item.index == index]
        if not wanted and not sums:
            return
        fences = self._fences.pop(index, []) if wanted else []
        self._sums = deque(item for item in self._sums if item.index != index)

        def wait() -> None:
            with below_guard(), torch.no_grad():
                for fence in fences:
                    self._device.wait_host(fence)
                for item in sums:
                    self._add_up(item)

        nbytes = sum(item.part.nbytes for item in sums)
        if wanted:
            self._sum_bytes -= nbytes
            self._async_step.arrived(index, wait)
        else:
            self._jobs.append((self._device.worker.submit(wait), nbytes))

    @property
    def _passes_behind_backward(self) -> bool:
        return self._ring is not None and self._async_step.gives_up and self._async_step.takes_landings

    def _make_room(self, index: int) -> None:
        """Wait for a buffer for the gradients of a chunk, see [Note: Gradients in passing]."""
        ring = self._ring
        if ring is None or not _takes_memory(self._chunks[index]) or not self._passes_behind_backward:
            return
        assert index not in self._handed_over, "a gradient arrives after its chunk was handed over"
        while ring.is_full and not self._passing[index].has_block:
            if not (self._async_step.wait_for_step() or self._hand_over_left()):
                self._say_overflow()
                return

    def _hand_over_left(self) -> bool:
        """Hand over a chunk that backward has left with some gradients missing; return False if there is none."""
        for index in self._missing.keys() - self._handed_over:
            if self._context.has_left(index) and not self._has_direct_use(index) and self._async_step.wants(index):
                self._hand_on(index)
                return True
        return False

    def _say_overflow(self) -> None:
        if not self._overflow_said:
            self._overflow_said = True
            self._context.log_once(
                "More gradients wait for their steps than the plan has host memory for, because weights are used "
                "outside their blocks or blocks run in another order. They take more memory than planned; "
                'overlap_optimizer="forward" plans memory for all gradients.'
            )

    def _has_direct_use(self, index: int) -> bool:
        return bool(self._aside) and any(param in self._aside for param in self._chunks[index].params)

    def _add(self, keep_bytes: int) -> None:
        """Add downloaded gradients, oldest first, until at most `keep_bytes` wait."""
        while self._jobs and (self._sum_bytes > keep_bytes or keep_bytes == 0):
            job, nbytes = self._jobs.popleft()
            self._sum_bytes -= nbytes
            job.result()
        while self._sums and (self._sum_bytes > keep_bytes or keep_bytes == 0):
            item = self._sums.popleft()
            self._sum_bytes -= item.part.nbytes
            self._add_up(item)

    def _add_up(self, item: _Sum) -> None:
        self._device.wait_host(item.fence)  # Downloads run in order: those to the older gradient have ended, too.
        host = item.host
        with self._device.span("host", "sums of gradients"):
            if host.grad is None:
                # Autograd casts the same way.
                host.grad = item.part.to(host.dtype) if item.cast is None else item.cast.copy_(item.part)
            elif host.grad.is_sparse:
                host.grad = item.part + host.grad
            else:
                host.grad.add_(item.part)

    def _finish_copies(self) -> None:
        """End all downloads and sums, so that code may read a gradient during backward."""
        self._send_kept()
        self._land_fences()
        self._add(0)

    def _land_fences(self) -> None:
        for fences in self._fences.values():
            for fence in fences:
                self._device.wait_host(fence)
        self._fences.clear()


def _takes_memory(chunk: Chunk) -> bool:
    """Return whether gradients of a chunk take memory of their own where gradients lie in shadow copies."""
    return chunk.plan.trainable and not chunk.plan.streamed_dtype


def _refusal(param: OffloadedParam, reason: str) -> RuntimeError:
    return RuntimeError(
        f"{param.fqn!r} is used outside its own block and streamed at the same time, and {reason}: the sum could not "
        "be made in autograd's order. Use the weight inside its block, or make its chunk resident "
        "(`num_persistent_chunks`)."
    )
