"""A second thread that looks at weights whose step another thread is waiting for already."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.runtime.optim.async_step import Overlap
from lightning_protrain.runtime.param import OffloadedParam
from tests.runtime.applied import Net, applied, differences
from tests.runtime.overlapped import train
from tests.support.plans import place

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
    """Also for steps of chunks that no forward has needed since, and where nobody has looked at a gradient."""
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
