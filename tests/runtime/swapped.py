"""Plans with swapped blocks, and a device that counts what they leave on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_protrain.device.device import CPUDevice, Device
from lightning_protrain.device.host import PAGE
from lightning_protrain.planner.plan import Plan
from lightning_protrain.runtime.swap import ActivationSwap
from tests.runtime.applied import Applied, in_turns
from tests.runtime.cases import CASES
from tests.support.plans import place

# Host bytes of a call: more than any block of these tests saves.
SLAB = 64 * PAGE


def plans(slab: int) -> dict[str, Callable[[nn.Module], Plan]]:
    """Plans by name, which take a module; a call of a swapped block has `slab` bytes of host memory."""

    def every(num: int) -> Callable[[int], int]:
        return lambda index: slab * (index % num == 0)

    return {
        "swapped": lambda module: place(module, swap_bytes=every(1)),
        "resident": lambda module: place(module, resident=lambda index: True, swap_bytes=every(1)),
        "beside kept": lambda module: place(module, resident=lambda index: index % 2 == 0, swap_bytes=every(2)),
        "beside checkpointed": lambda module: place(
            module,
            resident=lambda index: index % 2 == 1,
            checkpointed=lambda index: index % 2 == 1,
            swap_bytes=every(2),
        ),
        "inputs alone": lambda module: place(module, checkpointed=lambda index: index % 3 > 0, swap_bytes=every(1)),
        "inputs of all": lambda module: place(module, checkpointed=lambda index: True, swap_bytes=every(1)),
    }


PLANS = plans(SLAB)
# Half of all pairs of a case and a plan, where calls save what is planned; the other half where they save more. Inputs
# alone are too few to be more than planned.
AS_PLANNED, MORE_THAN_PLANNED = (
    [(case, plan) for case, plan, half in in_turns((0, 1), list(CASES), list(PLANS)[:-1]) if half == which]
    for which in (0, 1)
)
small = pytest.mark.usefixtures("everything_is_swapped")


def engine_of(state: Applied) -> ActivationSwap:
    """Return the activation swap of an applied plan."""
    found = state.runtime._executor.swap
    assert found is not None
    return found


class Counting(CPUDevice):
    """Counts the bytes of all storages that it has copied out or in, as long as they live.

    Attributes:
        others: Storages that somebody else holds on to; a weak reference keeps the address from being given to another.
        seen: The storages that are counted, with their bytes.
        peak: The most bytes there were.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.others: dict[int, StorageWeakRef] = {}
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def count(self, tensor: Tensor | None = None) -> int:
        if tensor is not None:
            storage = tensor.untyped_storage()
            self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.seen = {key: entry for key, entry in self.seen.items() if not entry[0].expired()}
        live = sum(nbytes for _, nbytes in self.seen.values())
        self.peak = max(self.peak, live)
        return live

    def swap_out(self, source: Tensor, target: Tensor) -> None:
        self.count(None if source.untyped_storage()._cdata in self.others else source)
        super().swap_out(source, target)

    def swap_in(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Sequence[None]:
        for _, target in copies:
            self.count(target)
        return super().swap_in(copies)


def free_bytes(device: Device) -> int:
    """Return the unused bytes of the swap's host memory."""
    return sum(size * len(blocks) for size, blocks in device.host._free.items())
