"""Residency knows what is true, and fetches early: hidden by what runs first, the same in number, never old."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.planner.plan import Plan
from lightning_protrain.runtime.chunk import ChunkState
from lightning_protrain.runtime.executor import Executor
from lightning_protrain.runtime.optim.async_step import Overlap
from lightning_protrain.runtime.prefetch_schedule import Timeline
from lightning_protrain.runtime.residency import Residency
from tests.runtime import overlapped
from tests.runtime.applied import (
    PLANS,
    Applied,
    Block,
    Net,
    applied,
    batches,
    differences,
    each_plan,
    mean_square,
    train,
)
from tests.runtime.cases import CASES
from tests.support.plans import half, place
from tests.support.simulated.device import Rates, SimulatedDevice

HOOKS: tuple[tuple[type, str], ...] = (
    (Executor, "enter"),
    (Executor, "exit"),
    (Executor, "before_backward"),
    (Executor, "take_gradient"),
)


def live(state: Applied) -> set[int]:
    return {index for index, chunk in enumerate(state.chunks) if chunk.state is not ChunkState.HOST}


def around(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: Callable[..., None]) -> None:
    """Calls `after` with what each call was given, when it has ended."""
    inner = getattr(owner, name)

    def method(self: Any, *given: Any) -> Any:
        result = inner(self, *given)
        after(self, name, *given)
        return result

    monkeypatch.setattr(owner, name, method)


@pytest.mark.sample(25)
@each_plan
@pytest.mark.parametrize("case", ["plain", "nested", "reused", "tied", "unused", "two losses", "two forwards"])
def test_what_is_live_and_in_use_is_known(monkeypatch: pytest.MonkeyPatch, case: str, make: Any) -> None:
    build, step, options = CASES[case]
    checked: list[str] = []
    with applied(build(), make) as state:
        residency = state.runtime._executor._residency

        def check(owner: Any, name: str, *given: Any) -> None:
            assert residency.live == live(state)
            running = {unit for unit in state.runtime._executor.context.blocks if unit.depth}
            assert set(residency.running) == running
            assert {index for unit in running for index in unit.chunks} <= residency.pinned() <= residency.live
            checked.append(name)

        for owner, name in HOOKS:
            around(monkeypatch, owner, name, check)
        train(state.model, step, state, **options)
        assert set(checked) == {name for _, name in HOOKS}
        assert residency.live == residency.pinned() == set()


def test_a_chunk_that_cannot_be_fetched_again_is_not_live() -> None:
    with applied(Net(), PLANS["kept"]) as state:
        weight = state.model.inp.weight

        def step(model: nn.Module, batch: Tensor) -> Tensor:
            hidden = model.inp(batch)
            weight.data = weight.data.double()
            return model.inp(hidden)

        with pytest.raises(RuntimeError, match=r"'inp\.weight' has become torch\.float64"):
            state.step(step, state.model, batches()[0])
        assert state.runtime._executor._residency.live == live(state)
        weight.data = weight.data.float()
        state.runtime.reset()
        assert live(state) == set()
        state.step(mean_square, state.model, batches()[0], 0).backward()


# --- constant cost ----------------------------------------------------------------------------------------------------
class Counted(tuple[Any, ...]):
    """Counts how many of its items anybody looks at."""

    seen = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            Counted.seen += 1
            yield item

    def __getitem__(self, index: Any) -> Any:
        Counted.seen += 1
        return super().__getitem__(index)


def visits(monkeypatch: pytest.MonkeyPatch, num_blocks: int, step: Callable[..., Any] = mean_square) -> dict[str, int]:
    """The most chunks, units and uses that one call of each hook looks at, in the first steps and later ones."""
    most: dict[str, int] = {}
    with monkeypatch.context() as patch, applied(Net([Block() for _ in range(num_blocks)]), PLANS["kept"]) as state:
        executor = state.runtime._executor
        for owner in (executor._residency, executor.grads):
            patch.setattr(owner, "_chunks", Counted(owner._chunks))
        for name in ("chunks", "blocks"):
            patch.setattr(executor.context, name, Counted(getattr(executor.context, name)))
        upcoming, next_use = Timeline.upcoming, Timeline.next_use

        def counted_upcoming(timeline: Timeline, position: int) -> Iterator[tuple[int, int]]:
            for use in upcoming(timeline, position):
                Counted.seen += 1
                yield use

        def counted_next_use(timeline: Timeline, chunk: int, position: int) -> int:
            Counted.seen += 1
            return next_use(timeline, chunk, position)

        def note(inner: Callable[..., Any], name: str) -> Callable[..., Any]:
            def method(self: Any, *given: Any) -> Any:
                before = Counted.seen
                result = inner(self, *given)
                most[name] = max(most.get(name, 0), Counted.seen - before)
                return result

            return method

        patch.setattr(Timeline, "upcoming", counted_upcoming)
        patch.setattr(Timeline, "next_use", counted_next_use)
        for hooked, name in HOOKS:
            patch.setattr(hooked, name, note(getattr(hooked, name), name))
        for index in range(3):
            state.step(step, state.model, batches()[0], index).backward()
            state.runtime.settle()
    return most


def test_no_hook_looks_at_more_in_a_model_of_more_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = visits(monkeypatch, 6), visits(monkeypatch, 40)
    assert few == many
    assert few.keys() == {name for _, name in HOOKS}
    assert 0 < max(few.values()) < 20


def test_the_count_finds_a_scan_of_all_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: what is pinned is found by asking every chunk."""
    pinned = Residency.pinned

    def scan(self: Residency) -> set[int]:
        return pinned(self) | {index for index, chunk in enumerate(self._chunks) if chunk is None}

    monkeypatch.setattr(Residency, "pinned", scan)
    assert visits(monkeypatch, 6)["enter"] < visits(monkeypatch, 40)["enter"]


def test_choices_are_forgotten_before_they_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_protrain.runtime.residency._MANY", 0)
    expected: dict[str, Tensor] = train(_seeded(), mean_square)
    model = _seeded()
    with applied(model, PLANS["kept"]) as state:
        found = train(model, mean_square, state)
        assert all(len(order.timeline.choices) <= 1 for order in state.runtime._executor.context._orders.values())
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def _seeded() -> nn.Module:
    torch.manual_seed(0)
    return Net()


# --- time -------------------------------------------------------------------------------------------------------------

# Each chunk takes as long to come as its block to compute.
EVEN = Rates(upload=3e6, download=1e12, flops=4e6, memory=1e15, host_memory=1e15)


def forward_seconds(make: Callable[[nn.Module], Plan], training: bool) -> tuple[float, float, float, int]:
    """Virtual seconds of a third step without backward, when its first upload begins, those it takes, and how many."""
    device, model = SimulatedDevice(EVEN), Net([Block() for _ in range(6)])
    with applied(model, make, device) as state, device, torch.set_grad_enabled(training):
        for parameter in model.parameters():
            if device.place(parameter) is None:
                device.set_place(parameter, "device")  # Nothing has told the clock where resident weights lie.
        for index in range(3):
            device.synchronize()
            begun, carried = device.elapsed, device.counters.uploads
            uploads = len(device._links[False].busy)
            state.step(mean_square, model, batches()[0], index, training=training)
        first = device._links[False].busy[uploads][0]
        return device.elapsed - begun, first - begun, device._up.busy / 3, device.counters.uploads - carried


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("make", [half, PLANS["kept"]], ids=["half", "kept"])
def test_the_first_upload_begins_with_the_first_unit(
    make: Any, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, first, uploading, uploads = forward_seconds(make, training)
    monkeypatch.setattr("lightning_protrain.runtime.block._first_unit", lambda *given: None)
    late_seconds, late_first, _, late_uploads = forward_seconds(make, training)
    assert uploads == late_uploads
    assert first == 0
    if make is half:
        # With the fewest buffers one chunk of the four comes while resident layers compute.
        assert late_first > 0
        assert seconds <= late_seconds - 0.9 * uploading / 4


def test_uploads_run_beside_a_resident_embedding() -> None:
    device, rows = SimulatedDevice(EVEN), torch.arange(400).remainder(8)
    model = nn.Sequential(nn.Embedding(8, 8), nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 1))

    def step() -> Tensor:
        hidden = model[0](rows)
        begun, ended = device._links[False].busy[0]
        assert 0 == begun < device.compute_stream().time < ended
        for block in model[1]:
            hidden = block(hidden)
        return model[2](hidden).mean()

    with applied(model, lambda module: place(module, resident=lambda index: index == 0), device) as state, device:
        device.set_place(model[0].weight, "device")
        state.step(step).backward()


# --- writers ----------------------------------------------------------------------------------------------------------
def clamping(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)
    return mean_square(model, batch, index)


def replacing(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9
    return mean_square(model, batch, index)


@pytest.mark.parametrize("step", [clamping, replacing])
@pytest.mark.parametrize("overlap", [Overlap.OFF, Overlap.FORWARD])
def test_weights_may_be_written_before_the_first_unit(step: Any, overlap: Overlap) -> None:
    torch.manual_seed(0)
    expected = overlapped.train(Net(), step=step)
    torch.manual_seed(0)
    model, device = Net(), SimulatedDevice()
    with applied(model, half, device) as state, device:
        found = overlapped.train(model, state, overlap, step)
        state.runtime.async_step.finish_all()
    assert differences(expected, found) == []


@pytest.mark.parametrize("kind", [True, False], ids=["training", "evaluation"])
def test_weights_may_be_exchanged_for_a_step(kind: bool) -> None:
    """Weight averaging exchanges weights through `data`, and back."""

    def averaged(model: nn.Module, batch: Tensor) -> Tensor:
        own = [parameter.data.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data.copy_(torch.full_like(parameter.data, 0.1))
        with torch.set_grad_enabled(kind):
            outputs = model(batch).detach().clone()
        for parameter, value in zip(model.parameters(), own, strict=True):
            parameter.data.copy_(value)
        return outputs

    torch.manual_seed(0)
    expected = averaged(Net(), batches()[0])
    with applied(Net(), half) as state:
        for _ in range(2):
            assert torch.equal(state.step(averaged, state.model, batches()[0], training=kind), expected)
