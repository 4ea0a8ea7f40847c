"""The optimizer step of resident weights in a rehearsal: what it measures, and that it leaves nothing behind."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Muon, NAdam, Optimizer

from lightning_protrain import ProTrainStrategy
from lightning_protrain.device.device import CPUDevice
from lightning_protrain.runtime.optim import host_step
from lightning_protrain.strategy import plan_session, rehearsed_step
from lightning_protrain.strategy.rehearsed_step import device_step_seconds
from tests.support.machines import CPU
from tests.support.models import fit, zoo

OPTIMIZERS: dict[str, Any] = {
    "AdamW": partial(AdamW, lr=0.1),
    "fused AdamW": partial(AdamW, lr=0.1, fused=True),
    "SGD": partial(SGD, lr=0.1, momentum=0.9),
    "NAdam": NAdam,
    "Adafactor": Adafactor,
    "Muon": Muon,
}


def weights() -> list[Tensor]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(12, 8)) for _ in range(3)]
    made[0].data[0] = -0.0  # Adding 0 would make it 0.0.
    for weight in made:
        weight.grad = torch.randn(12, 8)
    return made


def seconds(optimizer: Optimizer, some: list[Tensor], spare: int = 1 << 20) -> float | None:
    with closing(CPUDevice(torch.device("cpu"))) as device:
        return device_step_seconds([optimizer], some, device, spare)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_taken_back(name: str) -> None:
    every = weights()
    optimizer = OPTIMIZERS[name]([{"params": every[:2]}, {"params": every[2:], "weight_decay": 0.5}])
    steps: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append("a hook of the user"))
    before = [(weight.detach().numpy().tobytes(), weight.grad.clone(), weight._version) for weight in every]
    took = seconds(optimizer, every[1:])
    assert took is not None
    assert took > 0
    for weight, (bits, gradient, version) in zip(every, before, strict=True):
        assert (weight.detach().numpy().tobytes(), weight._version) == (bits, version)
        assert torch.equal(weight.grad, gradient)
    assert (len(optimizer.state), steps) == (0, [])
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]


class Wrapping(AdamW):
    """Steps by an optimizer of its own, which nobody else knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.inner = AdamW([weight for group in self.param_groups for weight in group["params"]])

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Refusing(AdamW):
    """Steps only within training, as those of schedulefree."""

    def step(self, closure: Any = None) -> Any:
        raise Exception("It is not in train mode.")


@pytest.mark.parametrize("kind", [Wrapping, Refusing])
def test_classes_of_others_are_not_stepped(kind: Any) -> None:
    """Their step may change more than its parameters, run hooks, or wait for other ranks."""
    every = weights()
    optimizer, before = kind(every), [weight._version for weight in every]
    assert seconds(optimizer, every) is None
    assert [weight._version for weight in every] == before
    assert not optimizer.state
    assert not getattr(optimizer, "inner", optimizer).state


def test_tensors_of_groups_do_not_change() -> None:
    every = weights()
    optimizer = AdamW([{"params": every, "lr": torch.tensor(0.1), "steps": torch.zeros(1)}])
    lr = optimizer.param_groups[0]["lr"]
    assert seconds(optimizer, every) is not None
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.1)


@pytest.mark.parametrize("error", [ValueError("planned"), torch.OutOfMemoryError("planned")], ids=repr)
def test_a_step_that_raises_is_taken_back(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three raises, when weights have changed."""
    steps: list[int] = []

    def raising(trial: Any) -> Any:
        def step() -> None:
            steps.append(1)
            for weight in trial.param_groups[0]["params"]:
                weight.add_(1.0)
            if len(steps) == 2:
                raise error

        return step

    monkeypatch.setattr(host_step, "class_step", raising)
    every = weights()
    optimizer = SGD(every, lr=0.1)
    before = [weight.detach().clone() for weight in every]
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError, match="planned"):
            seconds(optimizer, every)
    else:
        assert seconds(optimizer, every) is None
    assert all(torch.equal(weight, value) for weight, value in zip(every, before, strict=True))


def test_nothing_is_measured_without_memory_for_a_copy_or_with_a_step_that_needs_a_closure() -> None:
    every = weights()
    nbytes = sum(weight.nbytes for weight in every)
    assert seconds(AdamW(every), every, nbytes - 1) is None
    assert seconds(AdamW(every), every, nbytes) is not None
    assert seconds(LBFGS(every), every) is None


class Rehearsing:
    """Trains with a rehearsal, and notes each optimizer step of it: the weights, and whether memory is reserved."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.steps: list[tuple[set[int], bool]] = []
        self.were_reserved: list[bool] = []  # While micro-batches ran.
        self.errors: list[torch.OutOfMemoryError] = []
        measure = rehearsed_step.measure
        patch.setattr(rehearsed_step, "measure", lambda *args: self.note_reserved() or measure(*args))
        patch.setattr(plan_session, "user_folder", lambda: folder)
        patch.setattr(rehearsed_step, "device_step_seconds", self.step)

    def train(self, rehearse: bool) -> dict[str, Tensor]:
        module = zoo()["tied"]()
        self.budget = int(3.5 * sum(weight.nbytes for weight in module.parameters()))  # Some are resident.
        self.strategy = ProTrainStrategy(device_memory=self.budget, hardware=CPU, monitor=False, rehearse=rehearse)
        fit(module, strategy=self.strategy)
        return {name: value.clone() for name, value in module.state_dict().items()}

    def note_reserved(self) -> None:
        self.were_reserved.append(bool(self.strategy._states.reserved))

    def step(self, optimizers: Any, weights: list[Tensor], *args: Any) -> float | None:
        self.steps.append(({id(weight) for weight in weights}, bool(self.strategy._states.reserved)))
        if self.errors:
            raise self.errors.pop()
        return device_step_seconds(optimizers, weights, *args)


@pytest.fixture
def rehearsing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearsing:
    return Rehearsing(monkeypatch, tmp_path)


def test_a_rehearsal_steps_the_resident_weights_in_the_memory_reserved_for_states(rehearsing: Rehearsing) -> None:
    without = rehearsing.train(False)
    assert not rehearsing.steps
    found = rehearsing.train(True)
    assert all(torch.equal(value, found[name]) for name, value in without.items())
    strategy = rehearsing.strategy
    resident = [fqn for chunk in strategy.plan.chunks if chunk.resident for fqn in chunk.parameters]
    assert 0 < len(resident) < len(without)
    stepped, is_reserved = rehearsing.steps[-1]
    assert stepped == {id(strategy.lightning_module.get_parameter(fqn)) for fqn in resident}
    assert all(rehearsing.were_reserved)
    assert not is_reserved


def test_a_device_that_is_too_small_for_the_optimizer_step_gets_a_smaller_plan(
    rehearsing: Rehearsing, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    without = rehearsing.train(False)
    rehearsing.errors = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has")]
    found = rehearsing.train(True)
    assert all(torch.equal(value, found[name]) for name, value in without.items())
    assert [line for line in caplog.messages if "ran out of memory as the plan was rehearsed" in line]
    assert rehearsing.strategy.budget == rehearsing.budget - 2048
