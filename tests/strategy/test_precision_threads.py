"""The main thread steps offloaded weights on as many threads as the host's worker has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_protrain.device.device import Device
from lightning_protrain.strategy import overlap
from lightning_protrain.strategy import protrain as strategy_module
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.models import ParityModule, fit, zoo
from tests.support.simulated.device import SimulatedDevice

MANY = 3
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the messages of the strategy to the user."""
    sentences: list[str] = []
    monkeypatch.setattr(strategy_module, "rank_zero_info", sentences.append)
    return sentences


class Beside(ProTrainStrategy):
    """A strategy on a device that counts as a GPU, so that its worker has threads of its own."""

    simulated: SimulatedDevice

    def open_device(self) -> Device:
        self.simulated.worker.threads = MANY
        return self.simulated


class Counting(torch.optim.SGD):
    """Notes on how many threads it steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.seen: list[int] = []

    def step(self, closure: Any = None) -> Any:
        result = closure() if closure is not None else None
        self.seen.append(torch.get_num_threads())
        super().step()
        return result


class Scaler(torch.amp.GradScaler):
    """Notes on how many threads it unscales."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=8.0)
        self.seen: list[int] = []

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(torch.get_num_threads())
        super().unscale_(optimizer)


def with_counting() -> tuple[ParityModule, list[int], list[int]]:
    """A model, on how many threads its optimizer will step, and its batches will be computed."""
    module, computed = zoo()["tied"](), list[int]()
    optimizer = Counting(module.parameters())
    module.configure_optimizers = lambda: optimizer
    module.network.register_forward_pre_hook(lambda *_: computed.append(torch.get_num_threads()))
    return module, optimizer.seen, computed


def run(choice: Any = "auto", **options: Any) -> tuple[list[int], list[int]]:
    """Return the numbers of threads that compute, and that step the optimizer, in two steps."""
    module, stepped, computed = with_counting()
    strategy = Beside(plan="offload", overlap_optimizer=choice)
    with SimulatedDevice() as strategy.simulated:
        fit(module, strategy=strategy, max_steps=2, **options)
    return computed, stepped


def test_an_optimizer_that_nobody_knows(said: list[str]) -> None:
    computed, stepped = run("off")
    assert (computed, stepped) == ([1, 1], [MANY, MANY])
    assert f"The host steps the optimizer on {MANY} threads while the device waits." in said


def test_the_first_step_is_not_overlapped(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step leaves nothing to the main thread: the simulated worker steps its parts."""
    monkeypatch.setattr(overlap, "steps_parameters_alone", lambda _: True)
    computed, stepped = run("forward")
    assert (computed, stepped[0], set(stepped[1:])) == ([1, 1], MANY, {1})
    assert any(sentence.startswith(f"The host steps the optimizer on {MANY} threads while") for sentence in said)


def test_a_scaler_unscales_on_as_many() -> None:
    scaler = Scaler()
    computed, stepped = run(plugins=MixedPrecision("16-mixed", "cpu", scaler))
    assert (computed, stepped, scaler.seen) == ([1, 1], [MANY, MANY], [MANY, MANY])


def test_on_the_cpu_the_step_has_those_of_the_model(said: list[str]) -> None:
    module, stepped, computed = with_counting()
    torch.set_num_threads(2)
    try:
        fit(module, strategy=ProTrainStrategy(plan="offload"), max_steps=1)
    finally:
        torch.set_num_threads(1)
    assert (computed, stepped) == ([2], [2])
    assert "The host steps the optimizer on 2 threads while the device waits." in said
