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

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_protrain.device import Device
from lightning_protrain.runtime.chunk import Chunk, Slot
from lightning_protrain.runtime.updates import Updates


@dataclass
class _Sum:
    """A landed gradient that waits to be added to the one before, or to be cast."""

    fence: object
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
        pending_bytes: The most bytes of sums that may wait for their copies; None: two of the largest chunks.

    Attributes:
        uses: How many unit calls of the present step used each parameter; kept by the executor.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        device: Device,
        begin: Callable[[], None],
        updates: Updates,
        is_past: Callable[[int], bool],
        pending_bytes: int | None = None,
    ) -> None:
        self._device = device
        self._begin = begin
        self._updates = updates
        self._is_past = is_past
        two_chunks = 2 * max((chunk.nbytes for chunk in chunks), default=0)
        self._pending_bytes = two_chunks if pending_bytes is None else pending_bytes
        # Those that land take no more than the second largest, while the next one is computed: two of the largest.
        sizes = sorted(slot.twin.nbytes for chunk in chunks if chunk.plan.trainable for slot in chunk.slots)
        device.hold_bytes = sizes[-2] if len(sizes) > 1 else 0
        self._chunks = tuple(chunks)
        self._index = {slot: index for index, chunk in enumerate(chunks) for slot in chunk.slots}
        self._missing: dict[int, set[Slot]] = {}
        self._sums: list[_Sum] = []
        self._fences: list[tuple[Slot, object]] = []
        self._landed: set[Slot] = set()
        self._aside: dict[Slot, Tensor | None] = {}
        self.uses: dict[Slot, int] = {}
        for chunk in chunks:
            for slot in chunk.slots:
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
        for fence in (*(fence for _, fence in self._fences), *(item.fence for item in self._sums)):
            self._device.land(fence)
        for slot, older in self._aside.items():
            slot.host.grad = older
        self._sums.clear()
        self._fences.clear()
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
        grad = slot.twin.grad
        slot.twin.grad = None
        if grad is None or not slot.host.requires_grad:
            # Frozen since the forward (`toggle_optimizer`): without offloading nothing would be accumulated either.
            return
        if slot in self._aside and self.uses.get(slot, 0) > 1:
            raise _refusal(slot, "it is also used by several calls of its block")
        self._landed.add(slot)
        if grad.is_sparse:
            grad = grad.to(slot.host.device)
            slot.host.grad = grad if slot.host.grad is None else slot.host.grad.add_(grad)
        elif slot.host.grad is None and grad.dtype == slot.host.dtype:
            slot.host.grad = self._device.host.empty_like(grad)
            self._fences.append((slot, self._device.download(grad, slot.host.grad)))
        else:
            part = self._device.host.empty_like(grad)
            self._sums.append(_Sum(self._device.download(grad, part), slot, part))
            self._add(self._pending_bytes if self._sums[-1].fence is not None else 0)
        self._call_user_hooks(slot)
        self._hand_over(slot)

    def _hand_over(self, slot: Slot) -> None:
        """Gives the gradients of the chunk away, if this was the last of them, see [Note: Landing]."""
        if not self._updates.takes_landings:
            return
        index = self._index[slot]
        slots = self._chunks[index].slots
        missing = self._missing.setdefault(index, {other for other in slots if other.host.requires_grad})
        missing.discard(slot)
        if missing or not self._updates.wants(index) or not self._is_past(index):
            return
        if any(other in self._aside for other in slots):
            return
        fences = [fence for other, fence in self._fences if self._index[other] == index]
        sums = [item for item in self._sums if self._index[item.slot] == index]
        self._fences = [entry for entry in self._fences if self._index[entry[0]] != index]
        self._sums = [item for item in self._sums if self._index[item.slot] != index]

        def land() -> None:
            for fence in fences:
                self._device.land(fence)
            for item in sums:
                self._add_up(item)

        self._updates.landed(index, land)

    def _add(self, keep_bytes: int) -> None:
        """Adds landed gradients, oldest first, until no more than `keep_bytes` wait."""
        waiting = sum(item.part.nbytes for item in self._sums)
        while self._sums and (waiting > keep_bytes or keep_bytes == 0):
            item = self._sums.pop(0)
            waiting -= item.part.nbytes
            self._add_up(item)

    def _add_up(self, item: _Sum) -> None:
        self._device.land(item.fence)
        if item.slot.host.grad is None:
            item.slot.host.grad = item.part.to(item.slot.host.dtype)  # As autograd does behind a cast.
        elif item.slot.host.grad.is_sparse:
            item.slot.host.grad = item.part + item.slot.host.grad
        else:
            item.slot.host.grad.add_(item.part)

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
        hooks = slot.host._post_accumulate_grad_hooks
        if hooks:
            self._finish_copies()
            for hook in list(hooks.values()):
                hook(slot.host)

    def _finish_copies(self) -> None:
        """Ends the copies under way, so that somebody may look at a gradient during backward."""
        for _, fence in self._fences:
            self._device.land(fence)
        self._fences.clear()
        self._add(0)


def _refusal(slot: Slot, reason: str) -> RuntimeError:
    return RuntimeError(
        f"{slot.fqn!r} is used outside its own block and streamed at the same time, and {reason}: the sum could not be "
        "made in autograd's order. Use the weight inside its block, or make its chunk resident "
        "(`num_persistent_chunks`)."
    )
