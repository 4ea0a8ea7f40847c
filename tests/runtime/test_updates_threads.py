"""A second thread that looks at weights whose step another thread is waiting for already."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lightning_protrain.device import CPUDevice
from lightning_protrain.runtime.updates import Overlap
from tests.plans import place
from tests.runtime.applied import Net, applied, differences
from tests.runtime.overlapped import train

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
            updates, seen = state.runtime.updates, list[Tensor]()
            threads = [begun(updates.finish_all), begun(lambda: seen.append(model.inp.weight.detach().clone()))]
            waiting = [thread.is_alive() for thread in threads]
            go.set()
            for thread in threads:
                thread.join()
            assert waiting == [index == 1] * 2  # The first step is not overlapped.
            return seen[0]

        found = train(state.model, state, Overlap.FORWARD, step=hold, num_steps=2, look=look)
    assert differences(expected, found) == []
