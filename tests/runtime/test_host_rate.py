"""Every optimizer is planned at the speed of its own class on the host, beside AdamW's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, NAdam, Optimizer

from lightning_protrain import ProTrainStrategy
from lightning_protrain.device.host import HostWorker
from lightning_protrain.planner.explain import short_seconds
from lightning_protrain.runtime.optim import host_rate
from lightning_protrain.runtime.optim.host_rate import host_slowdown
from lightning_protrain.strategy import describe
from tests.support.machines import CPU
from tests.support.models import LanguageModel, Mlp, ParityModule, fit


class Clock:
    """A clock that only optimizers of `Timed` move."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


CLOCK = Clock()


class Timed(Optimizer):
    """Takes some seconds for each element; with `products`, more for each row, and multiplies the matrix by itself."""

    def __init__(self, parameters: Any, seconds: float = 1.0, products: float = 0.0, **_: Any) -> None:
        super().__init__(parameters, {"seconds": seconds, "products": products})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                rows = weight.shape[0] if weight.dim() else 1
                CLOCK.seconds += weight.numel() * (group["seconds"] + group["products"] * rows)
                self.state[weight]["moment"] = torch.zeros_like(weight)
                if group["products"]:
                    torch.mm(weight, weight.T)


@pytest.fixture(name="worker")
def _worker() -> Iterator[HostWorker]:
    worker = HostWorker(1)
    yield worker
    worker.close()


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rate, "_MEASURED", {})
    monkeypatch.setattr(host_rate, "_clock", CLOCK)
    monkeypatch.setattr(host_rate, "AdamW", Timed)
    monkeypatch.setattr(host_rate, "MOST_ELEMENTS", 1 << 14)
    monkeypatch.setattr(host_rate, "MOST_OF_PRODUCTS", 1 << 14)


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes]


@pytest.mark.usefixtures("_clock")
@pytest.mark.parametrize("shapes", [[(8,)], [(512, 512)], [(3, 700, 300)], [()], [(8,), (40, 300), (2, 2)]], ids=str)
def test_the_time_of_an_element_is_that_of_the_class(shapes: list[tuple[int, ...]], worker: HostWorker) -> None:
    assert host_slowdown([Timed(weights(*shapes), 5.0)], worker) == pytest.approx(5.0)


@pytest.mark.usefixtures("_clock")
def test_one_kind_of_step_is_measured_once(worker: HostWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [host_slowdown([Timed(weights((40, 40), (8,)), seconds)], worker) for seconds in (5.0, 6.0)]
    monkeypatch.setattr(host_rate, "_times", lambda *_: pytest.fail("measured again"))
    assert [host_slowdown([Timed(weights((8,), (40, 40)), seconds)], worker) for seconds in (5.0, 6.0)] == found
    assert found == pytest.approx([5.0, 6.0])


@pytest.mark.usefixtures("_clock")
@pytest.mark.parametrize("side", [64, 128, 512, 4096])
def test_products_of_a_large_matrix_are_followed_to_its_size(side: int, worker: HostWorker) -> None:
    optimizer = Timed(weights((side, side)), 5.0, products=0.5)
    assert host_slowdown([optimizer], worker) == pytest.approx(5.0 + 0.5 * side)


@pytest.mark.usefixtures("_clock")
def test_optimizers_count_by_their_elements(worker: HostWorker) -> None:
    two = [Timed(weights((30, 10)), 2.0), Timed(weights((100,)), 6.0)]
    assert host_slowdown(two, worker) == pytest.approx(3.0)
    groups = Timed([{"params": weights((300,)), "seconds": 2.0}, {"params": weights((100,)), "seconds": 6.0}])
    assert host_slowdown([groups], worker) == pytest.approx(3.0)
    assert host_slowdown([], worker) == 1.0


def test_a_fused_kernel_and_what_needs_a_closure_are_not_measured(
    worker: HostWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_rate, "_times", lambda *_: pytest.fail("measured"))
    shapes = weights((4, 4))
    assert host_slowdown([AdamW(shapes), SGD(shapes, lr=1.0), LBFGS(shapes)], worker) == 1.0
    with pytest.warns(UserWarning, match="AdamW is planned as AdamW's"):  # A loop that the user chose is measured.
        host_slowdown([AdamW(shapes, foreach=True)], worker)


class Refusing(SGD):
    """Refuses to step."""

    def step(self, closure: Any = None) -> Any:
        raise Exception("not in train mode")


@pytest.mark.usefixtures("_clock")
def test_a_class_that_cannot_be_measured_is_named(worker: HostWorker) -> None:
    with pytest.warns(UserWarning, match=r"Refusing is planned as AdamW's, because .* Exception: not in train mode"):
        assert host_slowdown([Refusing(weights((4, 4)), lr=1.0)], worker) == 1.0


def test_measuring_leaves_the_optimizer_and_random_numbers_as_they_were(worker: HostWorker) -> None:
    weight = nn.Parameter(torch.ones(64, 64))
    optimizer = NAdam([weight], lr=1e-3)
    before = {name: value for name, value in vars(optimizer).items() if name != "state"}
    random = torch.random.get_rng_state()
    assert host_slowdown([optimizer], worker) > 0
    assert vars(optimizer) == {**before, "state": {}}
    assert torch.equal(weight, torch.ones(64, 64))
    assert weight.grad is None
    assert torch.equal(torch.random.get_rng_state(), random)


@pytest.mark.parametrize(("slowdown", "is_told"), [(1.0, False), (38.0, True)])
def test_a_plan_says_what_a_slow_optimizer_costs(
    slowdown: float, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describe, "host_slowdown", lambda *_: slowdown)
    strategy = ProTrainStrategy(device_memory="1MiB", num_persistent_chunks=0, hardware=CPU, monitor=False)
    fit(ParityModule(LanguageModel([Mlp() for _ in range(3)])), strategy=strategy)
    assert strategy.plan is not None
    prediction = strategy.plan.prediction
    assert prediction is not None
    works = short_seconds(prediction.busy["host"])
    sentence = f"The host steps this optimizer 38 times as slowly as AdamW, and works for {works} in a step."
    assert (sentence in prediction.advice) is is_told
    elements = sum(weight.numel() for weight in LanguageModel([Mlp() for _ in range(3)]).parameters())
    assert prediction.busy["host"] >= (1 - 1e-9) * slowdown * elements / CPU.host_step
