"""Gradients leave the device as they land.

[Note: Landing]
Autograd accumulates into the twin; at once the gradient goes to `host.grad` and the twin's is dropped, so that the
device holds one gradient at a time. With an older gradient on the host (accumulation) the sum is made there, in the
same order as autograd makes it. When all gradients of a chunk are on their way, they may be taken over by whoever steps
the chunk early: waiting for them and adding them up is then the work of the host's worker.

[Note: Direct use]
A weight used outside its own block (a penalty over `self.parameters()`) takes part in the graph through its host
parameter. Autograd would add both parts before it adds them to an older gradient; so the older gradient is set aside
until backward ends. What cannot be brought into autograd's own order is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_protrain.device import Device
from lightning_protrain.runtime.chunk import Chunk, Slot
from lightning_protrain.runtime.gradient_memory import GradientMemory
from lightning_protrain.runtime.guard import below_guard
from lightning_protrain.runtime.updates import Updates


@dataclass
class _Sum:
    """A landed gradient that waits to be added to the one before, or to be cast."""

    fence: object
    index: int
    slot: Slot
    part: Tensor


class Landing:
    """Moves gradients from twins to host parameters, see [Note: Landing].

    Args:
        chunks: The chunks whose gradients land.
        device: Where they come from.
        begin: Called before the first gradient of a backward, so that its end is noticed.
        updates: Takes gradients of whole chunks over.
        is_past: Whether no call that reads the chunk is awaited any more.
        num_uses: In how many places calls of units have used a parameter in the present step.
        pending_bytes: The most bytes of sums that may wait for their copies; None: two of the largest chunks.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        device: Device,
        begin: Callable[[], None],
        updates: Updates,
        is_past: Callable[[int], bool],
        num_uses: Callable[[Slot], int],
        pending_bytes: int | None = None,
    ) -> None:
        self._device = device
        self._begin = begin
        self._updates = updates
        self._is_past = is_past
        self._num_uses = num_uses
        two_chunks = 2 * max((chunk.nbytes for chunk in chunks), default=0)
        self._pending_bytes = two_chunks if pending_bytes is None else pending_bytes
        # Those that land take no more than the second largest, while the next one is computed: two of the largest.
        sizes = sorted(slot.twin.nbytes for chunk in chunks if chunk.plan.trainable for slot in chunk.slots)
        device.hold_bytes = sizes[-2] if len(sizes) > 1 else 0
        self._chunks = tuple(chunks)
        # Where gradients stay, and where those wait that are added to older ones or cast.
        self._stays = [GradientMemory(device.host, [slot.host.nbytes for slot in chunk.slots]) for chunk in chunks]
        self._waits = [GradientMemory(device.host, [slot.twin.nbytes for slot in chunk.slots]) for chunk in chunks]
        self._places = {slot: (index, at) for index, chunk in enumerate(chunks) for at, slot in enumerate(chunk.slots)}
        self._missing: dict[int, set[Slot]] = {}
        # Under way, by chunk: gradients that stay, sums in the order of landing, and the latest copy of either kind.
        self._sums: deque[_Sum] = deque()
        self._sum_bytes = 0
        self._fences: dict[int, list[object]] = {}
        self._latest: dict[int, object] = {}
        self._landed: set[Slot] = set()
        self._aside: dict[Slot, Tensor | None] = {}
        for slot in self._places:
            self._attach(slot)

    def finish(self) -> None:
        """Ends all landings: afterwards every host gradient is whole."""
        self._finish_copies()
        self._updates.end_backward()
        for slot, older in self._aside.items():
            if older is not None:
                assert slot.host.grad is not None
                older.add_(slot.host.grad)
                slot.host.grad = older
        self._aside.clear()
        self.forget()

    def forget(self) -> None:
        """Drops what is under way, after an exception; the copies end first, as their memory is used again."""
        self._land_fences()
        for item in self._sums:
            self._device.land(item.fence)
        for slot, older in self._aside.items():
            slot.host.grad = older
        self._sums.clear()
        self._sum_bytes = 0
        self._latest.clear()
        self._landed.clear()
        self._aside.clear()
        self._missing.clear()

    def _attach(self, slot: Slot) -> None:
        if slot.twin.is_floating_point() or slot.twin.is_complex():
            trained = slot.host.requires_grad
            slot.host.requires_grad_(True)
            slot.twin.requires_grad_(True)
            slot.hooks.append(slot.twin.register_post_accumulate_grad_hook(lambda _: self._land(slot)))
            direct = slot.host.register_hook(lambda _: self._use_directly(slot))
            slot.own_hook = direct.id
            slot.hooks.append(direct)
            slot.host.requires_grad_(trained)
            slot.twin.requires_grad_(trained)

    def _land(self, slot: Slot) -> None:
        self._begin()
        twin, host = slot.twin, slot.host
        with below_guard():  # Without it each costs a look at the class of the twin.
            grad = twin.grad
            twin.grad = None
        if grad is None or not host.requires_grad:
            # Frozen since the forward (`toggle_optimizer`): without offloading nothing would be accumulated either.
            return
        if slot in self._aside and self._num_uses(slot) > 1:
            raise _refusal(slot, "it is also used by several calls of its block")
        index, place = self._places[slot]
        self._landed.add(slot)
        older = host.grad
        if grad.is_sparse:
            self._land_latest(index)
            grad = grad.to(host.device)
            host.grad = grad if older is None else older.add_(grad)
        elif older is None and grad.dtype == host.dtype:
            host.grad = target = self._stays[index].empty_like(grad, place)
            fence = self._device.download(grad, target)
            self._fences.setdefault(index, []).append(fence)
            self._latest[index] = fence
        else:
            part = self._waits[index].empty_like(grad, place)
            fence = self._device.download(grad, part)
            self._sums.append(_Sum(fence, index, slot, part))
            self._sum_bytes += part.nbytes
            self._latest[index] = fence
            self._add(self._pending_bytes if fence is not None else 0)
        if host._post_accumulate_grad_hooks:
            self._call_user_hooks(slot)
        if self._updates.takes_landings:
            self._hand_over(index, slot)

    def _hand_over(self, index: int, slot: Slot) -> None:
        """Gives the gradients of the chunk away, if this was the last of them, see [Note: Landing]."""
        slots = self._chunks[index].slots
        missing = self._missing.get(index)
        if missing is None:
            missing = self._missing[index] = {other for other in slots if other.host.requires_grad}
        missing.discard(slot)
        if missing or not self._updates.wants(index) or not self._is_past(index):
            return
        if self._aside and any(other in self._aside for other in slots):
            return
        fences, latest = self._fences.pop(index, []), self._latest.pop(index, None)
        sums = [item for item in self._sums if item.index == index]
        if sums:
            self._sums = deque(item for item in self._sums if item.index != index)
        for item in sums:
            item.fence = latest  # All copies to the block have ended then, see [Note: Gradient memory].
            self._sum_bytes -= item.part.nbytes

        def land() -> None:
            for fence in fences:
                self._device.land(fence)
            for item in sums:
                self._add_up(item)

        self._updates.landed(index, land)

    def _add(self, keep_bytes: int) -> None:
        """Adds landed gradients, oldest first, until no more than `keep_bytes` wait."""
        while self._sums and (self._sum_bytes > keep_bytes or keep_bytes == 0):
            item = self._sums.popleft()
            self._sum_bytes -= item.part.nbytes
            self._add_up(item)

    def _add_up(self, item: _Sum) -> None:
        self._device.land(item.fence)
        self._land_latest(item.index)
        host = item.slot.host
        if host.grad is None:
            host.grad = item.part.to(host.dtype)  # As autograd does behind a cast.
        elif host.grad.is_sparse:
            host.grad = item.part + host.grad
        else:
            host.grad.add_(item.part)

    def _use_directly(self, slot: Slot) -> None:
        """Runs before autograd accumulates into the host parameter itself, see [Note: Direct use]."""
        self._begin()
        if slot in self._landed:
            raise _refusal(slot, "that use comes before its block's forward (after it, it would be exact)")
        if slot.mirrored or slot.host._post_accumulate_grad_hooks:
            raise _refusal(slot, "it has hooks, which would see a part of its gradient")
        if slot not in self._aside:
            self._aside[slot] = slot.host.grad
            slot.host.grad = None

    def _call_user_hooks(self, slot: Slot) -> None:
        self._finish_copies()
        for hook in list((slot.host._post_accumulate_grad_hooks or {}).values()):
            hook(slot.host)

    def _finish_copies(self) -> None:
        """Ends the copies under way, so that somebody may look at a gradient during backward."""
        self._land_fences()
        self._add(0)

    def _land_fences(self) -> None:
        for fences in self._fences.values():
            for fence in fences:
                self._device.land(fence)
        self._fences.clear()

    def _land_latest(self, index: int) -> None:
        """Ends the copies to gradients of a chunk, see [Note: Gradient memory]; they run one after the other."""
        latest = self._latest.get(index)
        if latest is not None:
            self._device.land(latest)


def _refusal(slot: Slot, reason: str) -> RuntimeError:
    return RuntimeError(
        f"{slot.fqn!r} is used outside its own block and streamed at the same time, and {reason}: the sum could not be "
        "made in autograd's order. Use the weight inside its block, or make its chunk resident "
        "(`num_persistent_chunks`)."
    )
