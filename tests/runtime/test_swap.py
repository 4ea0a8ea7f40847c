"""Swapped activations: parity in every mix, tensors as they were, and a missing fence is caught."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_protrain.device.device import CPUDevice, StreamDevice
from lightning_protrain.device.host import PAGE
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.records import least_swapped
from lightning_protrain.runtime.step_context import StepContext
from lightning_protrain.runtime.swap import ActivationSwap, SlabPool
from tests.runtime.applied import WIDTH, Block, Net, applied, assert_parity, assert_same, batches, mean_square, train
from tests.runtime.cases import CASES
from tests.runtime.swapped import AS_PLANNED, PLANS, SLAB, Counting, engine_of, free_bytes, plans, small
from tests.support.plans import place
from tests.support.simulated.device import Rates, SimulatedDevice
from tests.support.simulated.streams import RaceError

# What a block recomputes by itself in backward finds the host parameters registered.
RECOMPUTES = "reentrant"
WRITES_IN_THE_STEP = "weights change in the step"


# --- parity -----------------------------------------------------------------------------------------------------------
@pytest.mark.sample(40)
@small
@pytest.mark.parametrize(("name", "plan"), AS_PLANNED)
def test_parity(name: str, plan: str) -> None:
    build, step, options = CASES[name]
    state = assert_parity(build, PLANS[plan], step, **options)
    counters = state.device.counters
    assert counters.swapped_out_bytes > 0
    assert counters.swapped_in_bytes <= counters.swapped_out_bytes * (
        2 if name in ("two backwards", "two losses") else 1
    )


@pytest.mark.sample(7)
@small
@pytest.mark.parametrize("plan", ["swapped", "beside checkpointed", "inputs of all"])
@pytest.mark.parametrize("name", [name for name in CASES if name not in (RECOMPUTES, WRITES_IN_THE_STEP)])
def test_parity_without_races(name: str, plan: str) -> None:
    build, step, options = CASES[name]
    device = SimulatedDevice()
    assert_same(build, lambda model, state: train(model, step, state, **options), PLANS[plan], device)
    assert device.counters.swapped_out_bytes > 0


@pytest.mark.parametrize(("swapped", "hooks"), [(lambda index: 0, 0), (lambda index: SLAB * (index == 0), 4)])
def test_all_blocks_are_watched_if_one_swaps(swapped: Callable[[int], int], hooks: int) -> None:
    with applied(Net(), lambda module: place(module, lambda index: True, swap_bytes=swapped)) as state:
        assert state.runtime.num_hooks == hooks


class Dropping(Block):
    """Draws random numbers, also while it is recomputed."""

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(hidden), 0.3)


@small
@given(
    st.lists(st.sampled_from(["keep", "checkpoint", "swap", "swap inputs"]), min_size=4, max_size=4).filter(
        lambda policies: any("swap" in policy for policy in policies)
    ),
    st.integers(0, 63),
    st.sampled_from([None, 1]),
)
@settings(max_examples=15, deadline=None)
def test_parity_of_any_plan(policies: list[str], resident: int, chunk_bytes: int | None) -> None:
    def make(module: nn.Module) -> Plan:
        return place(
            module,
            lambda index: bool(resident >> index & 1),
            lambda index: policies[index] in ("checkpoint", "swap inputs"),
            chunk_bytes,
            lambda index: SLAB * ("swap" in policies[index]),
        )

    assert_parity(lambda: Net([Dropping() for _ in range(4)]), make, num_steps=2)


# --- graphs -----------------------------------------------------------------------------------------------------------
@small
def test_a_retained_graph_keeps_nothing_on_the_device() -> None:
    model, device = Net(), Counting()
    with applied(model, PLANS["resident"], device) as state:
        loss = state.step(mean_square, model, batches()[0], 0)
        loss.backward(retain_graph=True)
        first = [parameter.grad.clone() for parameter in model.parameters()]
        copied = device.counters.swapped_in_bytes
        left = device.count()
        model.zero_grad()
        loss.backward()
        assert all(torch.equal(one, parameter.grad) for one, parameter in zip(first, model.parameters(), strict=True))
        assert device.counters.swapped_in_bytes > copied > 0
        # The outputs of the last block and of the first layer belong to others as well.
        assert left <= 2 * batches()[0].nbytes


class Changing(Block):
    """Changes in place what autograd has saved: an activation, or a weight."""

    changes = "activation"

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.tanh(self.up(hidden))
        out = self.down(inner)
        with torch.no_grad():
            (inner if self.changes == "activation" else self.down.weight).mul_(2)
        return out


@small
@pytest.mark.parametrize("changes", ["activation", "weight"])
def test_a_change_of_what_is_saved_raises_as_ever(changes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Changing, "changes", changes)
    model = Net([Changing() for _ in range(3)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mean_square(model, batches()[0], 0).backward()
    with (
        applied(model, PLANS["resident"]) as state,
        pytest.raises(RuntimeError, match=r"modified by an inplace operation.*'blocks\.2' is at version \d; expected"),
    ):
        state.step(mean_square, model, batches()[0], 0).backward()


@small
def test_the_graph_of_a_backward_is_refused_where_it_is_swapped() -> None:
    model = Net()
    one = lambda index: SLAB * (index == 1)  # noqa: E731
    with applied(model, lambda module: place(module, lambda index: True, swap_bytes=one)) as state:
        loss = state.step(mean_square, model, batches()[0], 0)
        with pytest.raises(RuntimeError, match=r"through 'blocks\.1', .*swap no activations"):
            torch.autograd.grad(loss, model.inp.weight, create_graph=True)
        state.runtime.reset()
        loss = state.step(mean_square, model, batches()[0], 0)
        (gradient,) = torch.autograd.grad(loss, model.blocks[3].up.weight, create_graph=True)
        assert gradient.requires_grad


class Small(nn.Module):
    """Saves an output that is too small to be swapped."""

    def forward(self, value: Tensor) -> Tensor:
        return torch.exp(value)


def test_what_stays_dies_with_its_graph() -> None:
    """If a node saves its own output, packing it with its history would keep it alive forever."""
    engine, packed = ActivationSwap(CPUDevice(torch.device("cpu")), (), print), []
    pack = engine.pack
    engine.pack = lambda tensor: packed.append(weakref.ref(result := pack(tensor))) or result
    with engine.call("block", nn.Module(), 0, 1 << 20):
        out = Small()(torch.ones(1, requires_grad=True))
    assert len(packed) == 1
    assert packed[0]() is not None
    del out
    assert packed[0]() is None


# --- tensors ----------------------------------------------------------------------------------------------------------
class Saving(torch.autograd.Function):
    """Saves what it is given, and hands it to `seen` in backward."""

    seen: tuple[Tensor, ...] = ()

    @staticmethod
    def forward(ctx: Any, value: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        Saving.seen = ctx.saved_tensors
        return (gradient, *(None for _ in ctx.saved_tensors))


def swap_through(*tensors: Tensor, weights: tuple[Tensor, ...] = ()) -> tuple[CPUDevice, list[Tensor]]:
    """Saves `tensors` in a swapped call, and what comes back from it."""
    device = CPUDevice(torch.device("cpu"))
    engine = ActivationSwap(device, weights, print)
    with engine.call("block", nn.Module(), 0, 1 << 20):
        out = Saving.apply(torch.ones((), requires_grad=True), *tensors)
    engine.settle()
    out.backward()
    found, Saving.seen = list(Saving.seen), ()
    return device, found


def parts() -> dict[str, Tensor]:
    base = torch.randn(64, 64)
    return {
        "whole": base,
        "transposed": base.t(),
        "part": base[3:9, 1::2],
        "expanded": base[:1].expand(8, 64),
        "reinterpreted": base.view(torch.int32),
        "complex": torch.randn(64, 64, dtype=torch.complex64),
        "bits": base > 0,
        "scalar of a large one": base[5, 7],
    }


@small
@pytest.mark.parametrize("name", parts())
def test_tensors_come_back_as_they_were(name: str) -> None:
    tensor = parts()[name]
    device, (found,) = swap_through(tensor)
    assert device.counters.swapped_out_bytes == device.counters.swapped_in_bytes == tensor.untyped_storage().nbytes()
    assert found.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(found, tensor)


def test_a_storage_is_copied_once_for_all_its_views() -> None:
    tensors = [tensor for name, tensor in parts().items() if name not in ("complex", "bits")]
    base = tensors[0]
    views = [base, base.t(), base[3:], base.detach()]
    device, found = swap_through(*views)
    assert device.counters.swapped_out_bytes == base.nbytes
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
    assert all(torch.equal(one, other) for one, other in zip(found, views, strict=True))


def test_what_stays() -> None:
    weight, base = torch.randn(64, 64), torch.randn(64, 64)
    staying = [
        weight.t()[2:],
        torch.randn(PAGE // 4 - 1),
        torch.randn(64, 64, dtype=torch.complex64).conj(),
        base.to_sparse(),
        torch.empty(64, 64, device="meta"),
        torch.nested.nested_tensor([base, base], layout=torch.jagged),
    ]
    device, found = swap_through(*staying, weights=(weight,))
    assert device.counters.swapped_out_bytes == 0
    assert len(found) == len(staying)
    assert found[0].untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    # Exactly a page is not small any more.
    assert swap_through(torch.randn(PAGE // 4))[0].counters.swapped_out_bytes == PAGE
    # The slab is 1 MiB in these tests; in a larger one, a page is small.
    assert [least_swapped(nbytes) for nbytes in (1 << 20, 1 << 23)] == [PAGE, 1 << 13]


def test_what_is_saved_again_after_its_graph_has_died_is_copied_once() -> None:
    device = CPUDevice(torch.device("cpu"))
    engine, tensor = ActivationSwap(device, (), print), torch.ones(64, 64)
    with engine.call("block", nn.Module(), 0, tensor.nbytes):
        Saving.apply(torch.ones((), requires_grad=True), tensor)
        out = Saving.apply(torch.ones((), requires_grad=True), tensor)
    assert device.counters.swapped_out_bytes == tensor.nbytes
    assert device.host.allocated_bytes == tensor.nbytes
    del out
    engine.settle()
    assert free_bytes(device) == tensor.nbytes


def test_a_change_between_two_saves_is_copied_again() -> None:
    device = CPUDevice(torch.device("cpu"))
    engine, tensor = ActivationSwap(device, (), print), torch.ones(64, 64)
    with engine.call("block", nn.Module(), 0, 1 << 20):
        Saving.apply(torch.ones((), requires_grad=True), tensor)
        tensor.add_(1)
        out = Saving.apply(torch.ones((), requires_grad=True), tensor)
    assert device.counters.swapped_out_bytes == 2 * tensor.nbytes
    engine.settle()
    out.backward()
    assert torch.equal(Saving.seen[0], torch.full((64, 64), 2.0))
    Saving.seen = ()


def out_without_waiting(self: StreamDevice, source: Tensor, target: Tensor) -> None:
    self.copy(self._out, source, target)


def in_without_waiting(self: StreamDevice, copies: Sequence[tuple[Tensor, Tensor]]) -> list[Any]:
    fences = []
    for source, target in copies:
        self.copy(self._in, source, target)
        fences.append(self._in.record_event())
    return fences


def store_without_holding(self: ActivationSwap, call: Any, storage: torch.UntypedStorage) -> Any:
    stored = STORE(self, call, storage)
    _, source = call.holds.pop()
    call.holds.append((stored, torch.empty_like(source)))
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
    "8: a fence before the copies": (StreamDevice, "after_swaps", lambda self: self.compute_stream().record_event()),
    "8: a source that is freed while it is copied": (ActivationSwap, "_leave", unfenced("_leave")),
    "8: a source that nobody holds": (ActivationSwap, "_store", store_without_holding),
    "9: a swap-in that does not wait for compute": (StreamDevice, "swap_in", in_without_waiting),
    "10: a use that does not wait for the swap-in": (ActivationSwap, "bring", unfenced("bring")),
    "10: memory freed while it is filled": (ActivationSwap, "_give_up", unfenced("_give_up")),
    "11: host memory given away while it is copied": (SlabPool, "cool", lambda self, wait=True: self._cooling.clear()),
}


def use_every_fence(slab: int = SLAB, plan: str = "swapped") -> None:
    """Three steps, the second fetches more than it needs, the third nothing at all; then the host takes the slabs."""
    torch.manual_seed(0)
    model, device = Net(), SimulatedDevice()
    with device, applied(model, plans(slab)[plan], device, SLAB) as state:
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
        assert len(held) == (NUM_PLANNED if slab == SLAB else NUM_GROWN) or plan != "swapped"


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


@small
@pytest.mark.parametrize("bug", FENCES)
def test_a_missing_fence_of_inputs_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_every_fence(plan="inputs of all")
    monkeypatch.setattr(*FENCES[bug])
    with pytest.raises(RaceError):
        use_every_fence(plan="inputs of all")


@pytest.mark.parametrize("plan", ["swapped", "inputs of all"])
def test_copies_are_hidden_by_the_blocks_between(plan: str) -> None:
    """If computing takes far longer than copying, nothing waits for activations."""
    rates = Rates(upload=1e9, download=1e9, flops=1e6, memory=1e15, host_memory=1e15)
    exposed = {}
    for ahead in (True, False):
        device, model, batch = SimulatedDevice(rates), Net([Block() for _ in range(4)]), torch.randn(512, WIDTH)
        with device, applied(model, PLANS[plan], device) as state, pytest.MonkeyPatch.context() as patch:
            if not ahead:
                patch.setattr(StepContext, "call_after", lambda context, call: None)
            state.step(mean_square, model, batch, 0).backward()
            of_chunks = device._up.busy + device._down.busy
            exposed[ahead] = max(device.exposed - of_chunks, 0) / device._in.busy
    assert exposed[True] == 0
    assert exposed[False] > 0.3
