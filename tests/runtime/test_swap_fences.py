"""Every fence of swapping that is taken away is caught, and the copies hide behind the blocks between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_protrain.device.device import StreamDevice
from lightning_protrain.device.host import PAGE
from lightning_protrain.runtime import swap
from lightning_protrain.runtime.step_context import StepContext
from lightning_protrain.runtime.swap import ActivationSwap, CallSlabs, Slab, SlabPool
from tests.runtime.applied import WIDTH, Block, Net, applied, batches, mean_square
from tests.runtime.swapped import PLANS, SLAB, engine_of, plans
from tests.support.simulated.device import Rates, SimulatedDevice
from tests.support.simulated.streams import RaceError


@pytest.fixture
def everything_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of small models as well."""
    monkeypatch.setattr(swap, "MIN_BYTES", 1)


small = pytest.mark.usefixtures("everything_is_swapped")


def out_without_waiting(self: StreamDevice, source: Tensor, target: Tensor) -> Any:
    self.copy(self._out, source, target)
    return self._out.record_event()


def in_without_waiting(self: StreamDevice, source: Tensor, target: Tensor) -> Any:
    self.copy(self._in, source, target)
    return self._in.record_event()


def store_without_holding(self: ActivationSwap, call: Any, storage: torch.UntypedStorage) -> Any:
    stored = STORE(self, call, storage)
    self._leaving.pop()
    stored.device = None
    return stored


def unfenced(name: str) -> Callable[..., Any]:
    """The method of that name, with a compute stream that waits for nothing meanwhile."""
    method = getattr(ActivationSwap, name)

    def without(self: ActivationSwap, *args: Any) -> Any:
        self._device.wait = lambda fence: None
        try:
            return method(self, *args)
        finally:
            del self._device.wait

    return without


STORE = ActivationSwap._store
FENCES: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "7: a swap-out that does not wait for compute": (StreamDevice, "swap_out", out_without_waiting),
    "8: a source that is freed while it is copied": (ActivationSwap, "_leave", unfenced("_leave")),
    "8: a source that nobody holds": (ActivationSwap, "_store", store_without_holding),
    "9: a swap-in that does not wait for compute": (StreamDevice, "swap_in", in_without_waiting),
    "10: a use that does not wait for the swap-in": (ActivationSwap, "bring", unfenced("bring")),
    "10: memory freed while it is filled": (ActivationSwap, "_give_up", unfenced("_give_up")),
    "11: host memory given away while it is copied": (SlabPool, "cool", lambda self, wait=True: self._cooling.clear()),
}


def use_every_fence(slab: int = SLAB) -> None:
    """Three steps, the second fetches more than it needs, the third nothing at all; then the host takes the slabs."""
    torch.manual_seed(0)
    model, device = Net(), SimulatedDevice()
    with device, applied(model, plans(slab)["swapped"], device, SLAB) as state:
        state.step(mean_square, model, batches()[0], 0).backward()
        seen: list[Tensor] = []
        model.blocks[2].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
        loss = state.step(mean_square, model, batches()[1], 0)
        torch.autograd.grad(loss, seen)
        del loss
        state.step(mean_square, model, batches()[2], 0)
        del seen[:]
        engine_of(state).settle()
        engine_of(state)._slabs.cool()
        count = len(device.host._free[slab])
        memories = [device.host] * count + [piece.memory for piece in engine_of(state)._slabs._pieces]
        held = [torch.frombuffer(memory.empty(slab), dtype=torch.uint8).fill_(0) for memory in memories]
        assert len(held) == (NUM_PLANNED if slab == SLAB else NUM_GROWN)


# Slabs that there were at one time, planned ones and such of one page.
NUM_PLANNED, NUM_GROWN = 6, 30
# A slab for all that a call saves, or many that the call grows by.
each_slab = pytest.mark.parametrize("slab", [SLAB, PAGE], ids=["planned", "grown"])


@small
@each_slab
def test_the_planted_bugs_find_none_without_them(slab: int) -> None:
    use_every_fence(slab)


@small
@each_slab
@pytest.mark.parametrize("bug", FENCES)
def test_a_missing_fence_is_caught(bug: str, slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FENCES[bug])
    with pytest.raises(RaceError):
        use_every_fence(slab)


def first_slab_alone(self: SlabPool, slab: Slab, owner: CallSlabs) -> None:
    """What a call has grown by is given away at once."""
    if slab is owner._slabs[0]:
        TAKE_BACK(self, slab, owner)


TAKE_BACK = SlabPool.take_back


@small
def test_what_a_call_has_grown_by_is_fenced_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlabPool, "take_back", first_slab_alone)
    use_every_fence()
    with pytest.raises(RaceError):
        use_every_fence(PAGE)


def test_copies_are_hidden_by_the_blocks_between() -> None:
    """On a device that computes far longer than it copies, nothing waits for activations."""
    rates = Rates(upload=1e9, download=1e9, flops=1e6, memory=1e15, host_memory=1e15)
    exposed = {}
    for ahead in (True, False):
        device, model, batch = SimulatedDevice(rates), Net([Block() for _ in range(4)]), torch.randn(512, WIDTH)
        with device, applied(model, PLANS["swapped"], device) as state, pytest.MonkeyPatch.context() as patch:
            if not ahead:
                patch.setattr(StepContext, "call_after", lambda context, call: None)
            state.step(mean_square, model, batch, 0).backward()
            of_chunks = device._up.busy + device._down.busy
            exposed[ahead] = max(device.exposed - of_chunks, 0) / device._in.busy
    assert exposed[True] == 0
    assert exposed[False] > 0.3
