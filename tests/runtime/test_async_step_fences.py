"""Overlapped steps on the simulated device: missing fences are caught, random schedules are right, time is hidden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_protrain.device.device import StreamDevice
from lightning_protrain.planner.memory import memory_terms
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.runtime import swap
from lightning_protrain.runtime.access_guard import AccessGuard
from lightning_protrain.runtime.grad_offload import GradOffload
from lightning_protrain.runtime.optim.async_step import AsyncStep, Overlap
from lightning_protrain.runtime.step_context import StepContext
from tests.runtime.applied import PLANS, Block, Net, applied, differences
from tests.runtime.overlapped import CLIPPINGS, train
from tests.runtime.swapped import PLANS as SWAPPED
from tests.support.plans import STATE_BYTES, place
from tests.support.simulated.device import Rates, SimulatedDevice
from tests.support.simulated.streams import RaceError


def run(
    build: Callable[[], nn.Module],
    make: Callable[[nn.Module], Plan],
    overlap: Overlap,
    device: SimulatedDevice | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    device = device or SimulatedDevice()
    torch.manual_seed(0)
    model = build()
    with applied(model, make, device) as state, device:
        found = train(model, state, overlap, **options)
        state.runtime.async_step.finish_all()
        device.worker.close()  # What nobody has waited for runs late, but it runs.
    return found


# --- missing fences ---------------------------------------------------------------------------------------------------


def submit_before_gradients(self: AsyncStep, index: int, pending: Any, land: Any) -> None:
    SUBMIT(self, index, pending, (lambda: None) if land is not None else None)


def add_without_waiting(self: GradOffload, item: Any) -> None:
    ADD_UP(self, replace(item, fence=self._device.compute_stream().record_event()))


def upload_at_once(self: StreamDevice, source: Tensor, target: Tensor, after: Any = None) -> Any:
    return UPLOAD(self, source, target)


def trust_the_worker(self: AsyncStep, index: int) -> None:
    update = self._pending.pop(index, None)
    if update is not None:
        self.guard.unwatch(param.host for param in update.params)


def forget_the_norms(self: AsyncStep) -> None:
    if self._armed is not None:
        self._armed.arrivals.clear()


def look(model: nn.Module, index: int) -> Tensor:
    return model.head.weight.detach().clone()


SUBMIT, ADD_UP, UPLOAD = AsyncStep._submit, GradOffload._add_up, StreamDevice.upload
BUGS: dict[str, tuple[type, str, Callable[..., Any], Overlap, dict[str, Any]]] = {
    "a step before its gradients": (AsyncStep, "_submit", submit_before_gradients, Overlap.BACKWARD, {}),
    "a step before its sums": (GradOffload, "_add_up", add_without_waiting, Overlap.BACKWARD, {"accumulate": 2}),
    "an upload before its step": (StreamDevice, "upload", upload_at_once, Overlap.FORWARD, {}),
    "a forward before its step": (AsyncStep, "finish", trust_the_worker, Overlap.FORWARD, {}),
    "clipping before the norms": (AsyncStep, "end_backward", forget_the_norms, Overlap.FORWARD, {"norm": 0.05}),
    "a reader before the step": (AccessGuard, "watch", lambda self, parameters: None, Overlap.FORWARD, {"look": look}),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_missing_fence_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement, overlap, options = BUGS[bug]
    run(Net, PLANS["offload"], overlap, **options)
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises((RaceError, KeyError) if bug == "clipping before the norms" else RaceError):
        run(Net, PLANS["offload"], overlap, **options)


class Detached(Block):
    """A block that reads a weight only for its input in its first call."""

    first = True

    def forward(self, hidden: Tensor) -> Tensor:
        if self.first:
            return hidden + nn.functional.linear(hidden, self.up.weight.detach()[:8])
        return super().forward(hidden)


class Twice(Net):
    """Calls each block twice; only the second call gives gradients to its weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.inp(hidden)
        for block in self.blocks:
            block.first = True
            hidden = block(hidden)
            block.first = False
            hidden = block(hidden)
        return self.head(hidden)


def twice() -> nn.Module:
    return Twice([Detached() for _ in range(3)])


def test_a_chunk_that_is_read_again_is_not_stepped_early(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    expected = train(twice())
    assert differences(expected, run(twice, PLANS["kept"], Overlap.BACKWARD)) == []
    monkeypatch.setattr(StepContext, "has_read", lambda self, index: True)
    with pytest.raises(RuntimeError, match="changed between a forward and its backward"):
        run(twice, PLANS["kept"], Overlap.BACKWARD)


def test_arming_waits_for_no_step_before() -> None:
    seen: list[tuple[int, int]] = []
    device, model = SimulatedDevice(), Net()
    with applied(model, PLANS["kept"], device) as state, device:
        updates = state.runtime.async_step

        def arm_again(model: nn.Module, index: int) -> None:
            before = len(updates._pending)
            updates.arm(torch.optim.SGD(model.parameters(), lr=0.1), Overlap.BACKWARD)
            seen.append((before, len(updates._pending)))

        train(
            state.model, state, Overlap.BACKWARD, num_steps=3, look=lambda *given: arm_again(*given) or torch.zeros(())
        )
    assert seen == [(0, 0), (6, 6), (6, 6)]


# --- random schedules -------------------------------------------------------------------------------------------------


def walk(order: list[int]) -> Callable[[nn.Module, Tensor, int], Tensor]:
    """A step through the blocks in `order`, another part of it in each step."""

    def step(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        hidden = model.inp(batch)
        for at in order[index % 2 :]:
            hidden = model.blocks[at](hidden)
        return model.head(hidden).square().mean()

    return step


@pytest.mark.slow
@pytest.mark.parametrize("overlap", list(Overlap))
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    clipping=st.sampled_from(list(CLIPPINGS)),
    accumulate=st.integers(1, 2),
    order=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    resident=st.sets(st.integers(0, 5)),
    checkpointed=st.sets(st.integers(0, 3)),
    buffers=st.integers(0, 3),
    chunk_bytes=st.sampled_from([None, 1]),
)
def test_random_schedules_are_exact_and_free_of_races(
    overlap: Overlap,
    clipping: str,
    accumulate: int,
    order: list[int],
    resident: set[int],
    checkpointed: set[int],
    buffers: int,
    chunk_bytes: int | None,
) -> None:
    clipping = "value" if (overlap, clipping) == (Overlap.BACKWARD, "norm") else clipping
    options = {"accumulate": accumulate, "step": walk(order), "num_steps": 3, **CLIPPINGS[clipping]}

    def make(module: nn.Module) -> Plan:
        plan = place(
            module,
            resident=lambda index: index in resident,
            checkpointed=lambda index: index in checkpointed,
            chunk_bytes=chunk_bytes,
        )
        number = plan.num_chunk_buffers + buffers
        terms = memory_terms(describe_model(module), plan.chunks, number, STATE_BYTES, plan.blocks)
        return replace(plan, num_chunk_buffers=number, memory=terms)

    torch.manual_seed(0)
    expected = train(Net(), **options)
    assert differences(expected, run(Net, make, overlap, **options)) == []


# --- the virtual clock ------------------------------------------------------------------------------------------------


def step_time(
    overlap: Overlap, rates: Rates, make: Callable[[nn.Module], Plan] = PLANS["kept"], **options: Any
) -> tuple[float, float, float]:
    """Virtual seconds of one step, and of these the busy ones of the device and of the host's step."""
    ends = []
    for num_steps in (2, 7):
        device = SimulatedDevice(rates)
        run(lambda: Net([Block() for _ in range(12)]), make, overlap, device, num_steps=num_steps, **options)
        host = device.worker.stream.busy + device.host_stream.busy
        ends.append((device.elapsed, device.compute_stream().busy, host))
    return tuple((after - before) / 5 for before, after in zip(*ends, strict=True))


FAST_LINK = {"upload": 1e12, "download": 1e12, "memory": 1e15, "flops": 2e6}
# Bytes per second of the host: its step takes from a twelfth of the device's time to half of it.
HOSTS = [1e8, 3e7, 2e7]


@pytest.mark.sample(2)
@pytest.mark.parametrize("host_memory", HOSTS)
@pytest.mark.parametrize(
    ("overlap", "options", "share"),
    [(Overlap.BACKWARD, {}, 0.90), (Overlap.FORWARD, {}, 0.80), (Overlap.FORWARD, {"norm": 0.05}, 0.80)],
    ids=["backward", "forward", "forward, clipped"],
)
def test_the_step_of_the_host_is_hidden(
    overlap: Overlap, options: dict[str, Any], share: float, host_memory: float
) -> None:
    rates = Rates(host_memory=host_memory, **FAST_LINK)
    plain, computing, host = step_time(Overlap.OFF, rates, **options)
    hidden, _, _ = step_time(overlap, rates, **options)
    assert plain >= computing + 0.95 * host
    # A third of a step is forward; what does not fit behind it cannot be hidden by it.
    fits = host if overlap is Overlap.BACKWARD else min(host, computing / 3)
    assert plain - hidden >= share * fits
    bound = max(computing, computing + host - fits)
    assert hidden <= 1.05 * bound + (1 - share) * fits


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"norm": 0.05}], ids=["unclipped", "clipped"])
def test_swapped_blocks_wait_for_no_step_but_their_own(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding out which tensors are weights does not count as reading them."""
    monkeypatch.setattr(swap, "least_swapped", lambda swap_bytes: 1)
    rates = Rates(host_memory=HOSTS[-1], **FAST_LINK)
    plain, computing, host = step_time(Overlap.OFF, rates, SWAPPED["swapped"], **options)
    hidden, _, _ = step_time(Overlap.FORWARD, rates, SWAPPED["swapped"], **options)
    assert plain - hidden >= 0.80 * min(host, computing / 3)


@pytest.mark.sample(9)
@pytest.mark.parametrize("plan", SWAPPED)
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_swapped_blocks_are_exact_behind_forward(plan: str, clipping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "least_swapped", lambda swap_bytes: 1)
    torch.manual_seed(0)
    expected = train(Net(), accumulate=2, **CLIPPINGS[clipping])
    found = run(Net, SWAPPED[plan], Overlap.FORWARD, accumulate=2, **CLIPPINGS[clipping])
    assert differences(expected, found) == []
