"""Overlapped steps give the bits of steps that are not overlapped, and no code sees half a step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.device.device import CPUDevice, Device
from lightning_protrain.planner.plan import Plan
from lightning_protrain.runtime.optim.async_step import Overlap
from lightning_protrain.runtime.optim.host_step import HostStep
from lightning_protrain.runtime.param import OffloadedParam
from tests.runtime.applied import PLANS, Applied, Net, applied, differences, in_turns, mean_square
from tests.runtime.cases import CASES
from tests.runtime.overlapped import CLIPPINGS, train
from tests.support.plans import place
from tests.support.simulated.device import SimulatedDevice

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "foreach": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, foreach=True),
    "tensor rate": lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01)),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "asgd": lambda model: torch.optim.ASGD(model.parameters(), lr=0.01),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "two groups": lambda model: torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.02},
        ],
        lr=0.01,
    ),
}
WAYS = [
    (overlap, clipping)
    for overlap, clipping in itertools.product((Overlap.BACKWARD, Overlap.FORWARD), CLIPPINGS)
    if (overlap, clipping) != (Overlap.BACKWARD, "norm")
]
DEVICES = ("cpu", "simulated")


def a_device(kind: str) -> Device:
    return SimulatedDevice() if kind == "simulated" else CPUDevice(torch.device("cpu"))


@contextmanager
def running(model: nn.Module, make: Callable[[nn.Module], Plan], kind: str = "cpu") -> Iterator[Applied]:
    device = a_device(kind)
    with applied(model, make, device) as state, device if isinstance(device, SimulatedDevice) else nullcontext():
        yield state
        state.runtime.async_step.finish_all()


def compare(
    build: Callable[[], nn.Module], make: Callable[[nn.Module], Plan], overlap: Overlap, kind: str, **options: Any
) -> list[str]:
    torch.manual_seed(0)
    expected = train(build(), **options)
    torch.manual_seed(0)
    model = build()
    with running(model, make, kind) as state:
        return differences(expected, train(model, state, overlap, **options))


@pytest.mark.sample(12)
@pytest.mark.parametrize(("way", "plan", "accumulate", "kind"), in_turns(DEVICES, WAYS, list(PLANS), (1, 3)), ids=str)
def test_parity(way: tuple[Overlap, str], plan: str, accumulate: int, kind: str) -> None:
    overlap, clipping = way
    assert compare(Net, PLANS[plan], overlap, kind, accumulate=accumulate, **CLIPPINGS[clipping]) == []


# PyTorch's own clipping by value raises where no parameter has a gradient.
HARD = [
    (overlap, clipping, name)
    for (overlap, clipping), name in itertools.product(WAYS, CASES)
    if name != "reentrant" and (name, clipping) != ("no loss", "value")
]


@pytest.mark.sample(18)
@pytest.mark.parametrize(
    ("overlap", "clipping", "name", "kind"), [(*hard, kind) for hard, kind in in_turns(DEVICES, HARD)]
)
def test_parity_of_hard_cases(overlap: Overlap, clipping: str, name: str, kind: str) -> None:
    build, step, _ = CASES[name]
    assert compare(build, PLANS["kept"], overlap, kind, step=step, **CLIPPINGS[clipping]) == []


@pytest.mark.sample(31)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("overlap", "clipping"), WAYS)
def test_parity_of_optimizers(overlap: Overlap, clipping: str, optimizer: str) -> None:
    options = {"optimizer": OPTIMIZERS[optimizer], **CLIPPINGS[clipping]}
    assert compare(Net, PLANS["offload"], overlap, "cpu", **options) == []


# --- when -------------------------------------------------------------------------------------------------------------
class Order:
    """Records what the worker is given, and when backward ends."""

    def __init__(self, state: Applied, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        updates = state.runtime.async_step
        submit, end = updates._submit, updates.end_backward

        def submitted(index: int, pending: Any, land: Any) -> None:
            self.events.append(updates._chunks[index].plan.unit)
            submit(index, pending, land)

        def ended() -> None:
            self.events.append("end of backward")
            end()

        monkeypatch.setattr(updates, "_submit", submitted)
        monkeypatch.setattr(updates, "end_backward", ended)


BACKWARD_ORDER = ["head", "blocks.3", "blocks.2", "blocks.1", "blocks.0", "inp"]


@pytest.mark.parametrize(
    ("overlap", "options", "expected"),
    [
        (Overlap.BACKWARD, {}, [*BACKWARD_ORDER, "end of backward"]),
        (Overlap.FORWARD, {}, ["end of backward", *BACKWARD_ORDER[::-1]]),
        (Overlap.FORWARD, {"norm": 1.0}, ["end of backward", *BACKWARD_ORDER[::-1]]),
        (Overlap.OFF, {}, ["end of backward"]),
    ],
)
def test_steps_are_submitted_where_they_are_told(
    overlap: Overlap, options: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(Net(), PLANS["kept"]) as state:
        order = Order(state, monkeypatch)
        train(state.model, state, overlap, num_steps=3, **options)
        assert order.events == ["end of backward", *expected, *expected]


def test_only_the_last_micro_batch_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(Net(), PLANS["kept"]) as state:
        order = Order(state, monkeypatch)
        train(state.model, state, Overlap.BACKWARD, num_steps=2, accumulate=3)
        assert order.events == [*["end of backward"] * 5, *BACKWARD_ORDER, "end of backward"]


def test_a_step_of_several_backwards_is_never_stepped_in_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    build, step, _ = CASES["two backwards"]
    with running(build(), PLANS["kept"]) as state:
        order = Order(state, monkeypatch)
        train(state.model, state, Overlap.BACKWARD, step=step, num_steps=3)
        assert order.events.index("inp") > 3
        assert state.runtime.async_step.partially_stepped is None


def test_a_second_backward_after_a_step_is_refused() -> None:
    def changing(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        if index == 2:
            model(batch).mean().backward()
        return mean_square(model, batch, index)

    with running(Net(), PLANS["kept"]) as state:
        with pytest.raises(RuntimeError, match="second backward"):
            train(state.model, state, Overlap.BACKWARD, step=changing)
        state.runtime.reset()
        with pytest.raises(RuntimeError, match="partially stepped"):
            state.runtime.async_step.refuse_partially_stepped()


def test_hooks_of_the_user_see_weights_before_the_step() -> None:
    """A hook on one gradient may read any weight."""

    def compare_with_hook(state: Applied | None, model: nn.Module) -> dict[str, Any]:
        seen: list[Tensor] = []
        model.inp.weight.register_hook(lambda gradient: seen.append(model.head.weight.detach().clone()))
        return {**train(model, state, Overlap.BACKWARD), **{f"seen {i}": value for i, value in enumerate(seen)}}

    torch.manual_seed(0)
    expected = compare_with_hook(None, Net())
    torch.manual_seed(0)
    with running(Net(), PLANS["kept"]) as state:
        assert differences(expected, compare_with_hook(state, state.model)) == []


@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_step_that_is_watched_is_not_overlapped(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        getattr(made, hook)(lambda *_: seen.append(float(model.head.weight.sum())))
        return made

    torch.manual_seed(0)
    train(Net(), optimizer=optimizer)
    expected, seen[:] = list(seen), []
    torch.manual_seed(0)
    with running(Net(), PLANS["kept"]) as state:
        order = Order(state, monkeypatch)
        train(state.model, state, Overlap.FORWARD, optimizer=optimizer)
        assert set(order.events) == {"end of backward"}
    assert seen == expected


# --- readers ----------------------------------------------------------------------------------------------------------
class Average:
    """An exponential moving average, and the histogram of one weight."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def __call__(self, model: nn.Module, index: int) -> Tensor:
        for name, parameter in model.named_parameters():
            self.values[name].lerp_(parameter.detach(), 0.1)
        histogram = torch.histc(model.head.weight.detach(), 5)
        return torch.cat([histogram, *(value.flatten() for value in self.values.values())])


LOOKS: dict[str, Callable[[nn.Module], Callable[[nn.Module, int], Any]]] = {
    "average and histogram": Average,
    "norms": lambda _: lambda model, index: torch.stack([p.norm() for p in model.parameters()]),
    "last weight alone": lambda _: lambda model, index: model.head.weight.clone(),
    "gradients": lambda _: lambda model, index: torch.cat([p.grad.flatten() for p in model.parameters()]),
    "state dict": lambda _: lambda model, index: torch.cat([v.flatten() for v in model.state_dict().values()]),
    "every second step": lambda _: lambda model, index: model.inp.weight.norm() if index % 2 else torch.zeros(()),
    "write": lambda _: lambda model, index: model.inp.weight.data.mul_(0.5).clone(),
}


@pytest.mark.sample(16)
@pytest.mark.parametrize(("look", "way", "kind"), in_turns(DEVICES, list(LOOKS), WAYS), ids=str)
def test_code_that_reads_weights_after_a_step_sees_whole_weights(
    look: str, way: tuple[Overlap, str], kind: str
) -> None:
    overlap, clipping = way
    torch.manual_seed(0)
    model = Net()
    expected = train(model, look=LOOKS[look](model), **CLIPPINGS[clipping])
    torch.manual_seed(0)
    model = Net()
    look_at = LOOKS[look](model)
    with running(model, PLANS["kept"], kind) as state:
        found = train(model, state, overlap, look=look_at, **CLIPPINGS[clipping])
        assert differences(expected, found) == []


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize(
    ("overlap", "accumulate"), [(Overlap.BACKWARD, 1), (Overlap.FORWARD, 1), (Overlap.BACKWARD, 2)]
)
def test_a_penalty_in_the_step_sees_whole_weights(overlap: Overlap, accumulate: int, detached: bool) -> None:
    """A gradient of its own sets that of earlier micro-batches aside; no step may come before it is back."""

    def penalty(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        loss = mean_square(model, batch, index)
        total = 0.1 * sum(p.square().sum() for p in model.parameters())
        return loss + (total.detach() if detached else total)

    assert compare(Net, PLANS["kept"], overlap, "cpu", step=penalty, accumulate=accumulate) == []


# --- what goes wrong --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["cpu", "simulated"])
@pytest.mark.parametrize("overlap", [Overlap.BACKWARD, Overlap.FORWARD])
def test_an_optimizer_that_raises_tears_the_weights(
    overlap: Overlap, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = HostStep.step, list[int]()

    def breaking(self: HostStep, *given: Any) -> None:
        calls.append(1)
        if len(calls) == 9:
            raise RuntimeError("out of luck")
        step(self, *given)

    monkeypatch.setattr(HostStep, "step", breaking)
    with running(Net(), PLANS["kept"], kind) as state:
        with pytest.raises(RuntimeError, match="out of luck"):
            train(state.model, state, overlap)
        state.runtime.reset()
        with pytest.raises(RuntimeError, match="the optimizer raised"):
            state.runtime.async_step.refuse_partially_stepped()


def raise_in_backward(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    hidden = model.blocks[0](model.inp(batch))
    if index == 2:
        hidden.register_hook(lambda gradient: 1 // 0)
    for block in model.blocks[1:]:
        hidden = block(hidden)
    return model.head(hidden).square().mean()


def test_an_exception_after_the_first_step_tears_the_weights() -> None:
    with running(Net(), PLANS["kept"]) as state:
        with pytest.raises(ZeroDivisionError):
            train(state.model, state, Overlap.BACKWARD, step=raise_in_backward)
        with pytest.raises(RuntimeError, match="can be neither saved nor trained on"):
            state.runtime.async_step.refuse_partially_stepped()
        state.runtime.reset()
        with pytest.raises(RuntimeError, match="an exception came"):
            state.runtime.async_step.arm(torch.optim.SGD(state.model.parameters()), Overlap.OFF)
        assert all(type(parameter) is nn.Parameter for parameter in state.model.parameters())


@pytest.mark.parametrize("overlap", [Overlap.OFF, Overlap.FORWARD])
def test_an_exception_in_backward_changes_no_weight(overlap: Overlap) -> None:
    torch.manual_seed(0)
    expected = train(Net(), num_steps=2)
    torch.manual_seed(0)
    with running(Net(), PLANS["kept"]) as state:
        with pytest.raises(ZeroDivisionError):
            train(state.model, state, overlap, step=raise_in_backward)
        state.runtime.reset()
        state.runtime.async_step.refuse_partially_stepped()
        found = dict(state.model.state_dict())
        assert differences({name: expected[name] for name in found}, found) == []


@pytest.mark.parametrize("overlap", [Overlap.BACKWARD, Overlap.FORWARD])
@pytest.mark.parametrize("index", [1, 2, 3])
def test_an_exception_in_forward_ends_the_step_before(overlap: Overlap, index: int) -> None:
    def break_off(model: nn.Module, batch: Tensor, at: int) -> Tensor:
        if at == index:
            model.blocks[0](model.inp(batch))
            raise KeyError("in forward")
        return mean_square(model, batch, at)

    torch.manual_seed(0)
    expected = train(Net(), num_steps=index)
    torch.manual_seed(0)
    with running(Net(), PLANS["kept"]) as state:
        with pytest.raises(KeyError, match="in forward"):
            train(state.model, state, overlap, step=break_off)
        state.runtime.reset()
        state.runtime.async_step.refuse_partially_stepped()
        found = dict(state.model.state_dict())
        assert differences({name: expected[name] for name in found}, found) == []


def test_a_weight_read_in_backward_after_its_step_is_refused() -> None:
    def reading(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        hidden = model.blocks[0](model.inp(batch))
        if index:
            hidden.register_hook(lambda gradient: gradient * model.head.weight.norm())
        for block in model.blocks[1:]:
            hidden = block(hidden)
        return model.head(hidden).square().mean()

    with running(Net(), PLANS["kept"]) as state:
        with pytest.raises(RuntimeError, match=r"after it was stepped.*overlap_optimizer=\"forward\""):
            train(state.model, state, Overlap.BACKWARD, step=reading)
        state.runtime.reset()
    assert compare(Net, PLANS["kept"], Overlap.FORWARD, "cpu", step=reading) == []


@pytest.mark.parametrize("clipping", ["unclipped", "norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_do_what_they_do_without(value: float, clipping: str) -> None:
    def spoiled(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        loss = mean_square(model, batch, index)
        return loss * value if index == 2 else loss

    def as_text(found: dict[str, Tensor]) -> dict[str, str]:
        return {name: repr(tensor.tolist()) for name, tensor in found.items()}

    torch.manual_seed(0)
    expected = as_text(train(Net(), step=spoiled, **CLIPPINGS[clipping]))
    for overlap in (Overlap.FORWARD, *([Overlap.BACKWARD] if clipping == "unclipped" else [])):
        torch.manual_seed(0)
        with running(Net(), PLANS["kept"]) as state:
            assert as_text(train(state.model, state, overlap, step=spoiled, **CLIPPINGS[clipping])) == expected


# Long enough for a thread to get as far as it can.
_MEANWHILE = 0.2


def begun(work: Callable[[], object]) -> threading.Thread:
    """A thread that has done `work`, or waits for something in it."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(_MEANWHILE)
    return thread


def test_both_wait_for_its_end() -> None:
    device, go = CPUDevice(torch.device("cpu")), threading.Event()

    def hold(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        if index == 1:
            go.clear()
            device.worker.submit(go.wait)  # before the step
        return model(batch).square().mean()

    torch.manual_seed(0)
    expected = train(Net(), num_steps=2, look=lambda model, _: model.inp.weight.detach().clone())
    torch.manual_seed(0)
    with applied(Net(), partial(place, resident=lambda index: index > 0), device) as state:

        def look(model: nn.Module, index: int) -> Tensor:
            updates, seen = state.runtime.async_step, list[Tensor]()
            threads = [begun(updates.finish_all), begun(lambda: seen.append(model.inp.weight.detach().clone()))]
            waiting = [thread.is_alive() for thread in threads]
            go.set()
            for thread in threads:
                thread.join()
            assert waiting == [index == 1] * 2  # The first step is not overlapped.
            return seen[0]

        found = train(state.model, state, Overlap.FORWARD, step=hold, num_steps=2, look=look)
    assert differences(expected, found) == []


def test_what_is_left_when_backward_ends_is_stepped_as_forward_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device, go, stepped = CPUDevice(torch.device("cpu")), threading.Event(), list[str]()
    note = OffloadedParam.end_step
    monkeypatch.setattr(OffloadedParam, "end_step", lambda param: (stepped.append(param.fqn), note(param))[1])

    def hold(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        go.clear()
        stepped.clear()
        device.worker.submit(go.wait)  # before the first chunk that is stepped behind backward
        return model(batch).square().mean()

    with applied(Net(), place, device) as state:

        def look(model: nn.Module, index: int) -> None:
            go.set()
            state.runtime.async_step.finish_all()
            if index:  # The first step is not overlapped behind backward.
                assert stepped == [fqn for chunk in state.plan.chunks for fqn in chunk.parameters]

        train(state.model, state, Overlap.BACKWARD, step=hold, num_steps=3, look=look)


@pytest.mark.parametrize("what", ["a backward", "a step without a backward"])
def test_what_comes_next_waits_for_every_step_before(what: str) -> None:
    """This includes steps of chunks that no forward has needed since, and gradients that no code has read."""
    device, go, made = CPUDevice(torch.device("cpu")), threading.Event(), list[torch.optim.Optimizer]()

    def hold(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        if index == 1:
            device.worker.submit(go.wait)  # before the step
        return model(batch).square().mean()

    def make(model: nn.Module) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(model.parameters(), lr=0.1))
        return made[0]

    with applied(Net(), place, device) as state:
        updates = state.runtime.async_step

        def look(model: nn.Module, index: int) -> None:
            if index == 0:  # The first step is not overlapped.
                assert not updates._pending
                return
            assert updates._pending
            jobs = [update.job for update in updates._pending.values()]
            if what == "a backward":
                then = updates.begin_backward
            else:
                updates.arm(made[0], Overlap.FORWARD)
                then = updates.launch
            thread = begun(then)
            waits = thread.is_alive()
            go.set()
            thread.join()
            assert waits
            assert all(job.done() for job in jobs)
            updates.finish_all()

        train(state.model, state, Overlap.FORWARD, step=hold, optimizer=make, num_steps=2, look=look)


def test_what_the_caller_steps_waits_until_all_ranks_have_left_it() -> None:
    with running(Net(), PLANS["kept"]) as state:
        updates, step_sync = state.runtime.async_step, Mock()
        updates._step_sync = step_sync
        updates.arm(torch.optim.SGD(state.model.parameters(), lr=0.1), Overlap.OFF)
        updates.launch()
        updates._step_sync = None
    assert [call[0] for call in step_sync.method_calls][-2:] == ["release_weights", "wait_until_left"]
