"""Steps that are slower than predicted are warned of, with the resource that takes longer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor

from lightning_protrain import ProTrainStrategy
from lightning_protrain.callbacks import slow_steps
from lightning_protrain.callbacks.plan_monitor import PlanMonitor
from lightning_protrain.callbacks.slow_steps import busy_seconds, slowest
from lightning_protrain.device.device import CPUDevice
from lightning_protrain.device.recording import Lane
from lightning_protrain.planner.problem import Training
from lightning_protrain.planner.step_time import step_time
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.runtime.comm.collectives import Collectives
from tests.planner.virtual import Case, plan_of, problem_of, profile_of, rates_of, run
from tests.support.machines import CPU
from tests.support.models import ParityModule, fit, zoo
from tests.support.rank_models import Module
from tests.support.ranks import run_ranks, trainer_on_rank, values
from tests.support.simulated.device import SimulatedDevice

# --- the resource that is slow ----------------------------------------------------------------------------------------

PLANTED = {
    "compute": {"flops": 0.5, "memory": 0.5},
    "upload": {"upload": 0.5},
    "download": {"download": 0.5},
    "host": {"host_memory": 0.5},
}


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("training", [Training(), Training(overlap="backward"), Training(accumulate=2)], ids=str)
def test_the_planted_resource_is_found(planted: str, training: Training) -> None:
    case = Case(training=training)
    problem = problem_of(case)
    predicted = step_time(problem, plan_of(case, problem.layout, problem.profile))
    rates = rates_of(case, *profile_of(case.num_blocks, case.num_tokens, case.tied))
    slow = replace(rates, **{name: getattr(rates, name) * by for name, by in PLANTED[planted].items()})
    for given, found in ((rates, None), (slow, planted)):
        took = busy_seconds(run(case, SimulatedDevice(given))[1], copies_beside=True, on_host=True)
        expected = {name: asdict(predicted)[name] for name in took}
        longer = {name: took[name] / max(expected[name], 1e-12) for name in ("compute", "upload", "download", "host")}
        if found is None:
            assert all(0.9 < ratio < 1.15 for ratio in longer.values()), longer
        else:
            assert slowest(took, expected) == found, longer
            assert longer.pop(found) > 1.8
            assert all(0.9 < ratio < 1.15 for ratio in longer.values()), longer


# --- in a run ---------------------------------------------------------------------------------------------------------


class Slow(ParityModule):
    """Computes for longer than anybody predicts."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.06)
        return super().training_step(batch, batch_idx)


class Held(torch.optim.AdamW):
    """Steps for longer than anybody predicts."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        time.sleep(0.06)
        return loss


class Steps(ParityModule):
    def configure_optimizers(self) -> Any:
        return Held(self.parameters(), lr=0.01)


def trained(module: ParityModule, hardware: HardwareProfile = CPU, **options: Any) -> tuple[L.Trainer, list[str]]:
    """The Trainer after eight steps, and what was warned of."""
    budget = int(2.5 * sum(weight.nbytes for weight in module.parameters()))
    strategy = ProTrainStrategy(device_memory=budget, hardware=hardware, rehearse=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(module, strategy=strategy, **{"max_steps": 8, "max_epochs": -1, **options})
    return trainer, [str(one.message) for one in caught if "were predicted" in str(one.message)]


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_steps, "NUM_STEPS", 4)
    monkeypatch.setattr(slow_steps, "LEAST_SECONDS", 1e-6)


def held(method: Any, lane: Lane) -> Any:
    """Return a copy of a device that takes longer than anybody predicts."""

    def copy(device: CPUDevice, source: Tensor, target: Tensor, *args: Any) -> Any:
        with device.span(lane):
            time.sleep(0.02)
        return method(device, source, target, *args)

    return copy


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["compute", "upload", "download", "host"])
def test_slow_steps_are_warned_of_once_with_what_is_slow(
    name: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = zoo()["dropout"]().network
    module: ParityModule = {"compute": Slow, "host": Steps}.get(name, ParityModule)(network)
    module.logits = lambda tokens, index: network(input_ids=tokens, use_cache=False).logits  # type: ignore[method-assign]
    if name in ("upload", "download"):
        monkeypatch.setattr(CPUDevice, name, held(getattr(CPUDevice, name), name))
    _, warned = trained(module, accumulate_grad_batches=accumulate)
    (sentence,) = warned
    which = {"upload": "the upload of the link", "download": "the download of the link"}.get(name, name)
    assert f"Most of it is {which}: " in sentence
    assert "the median of 4" in sentence


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("why", ["faster than predicted", "short steps"])
def test_other_steps_are_no_news(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware = replace(CPU, flops=dict.fromkeys(CPU.flops, 1e3), memory=1e3)  # Slower than any.
    if why == "short steps":
        hardware = CPU
        monkeypatch.setattr(slow_steps, "LEAST_SECONDS", 0.02)
    network = zoo()["dropout"]().network
    module = Slow(network)
    module.logits = lambda tokens, index: network(input_ids=tokens, use_cache=False).logits  # type: ignore[method-assign]
    assert trained(module, hardware)[1] == []


def slow_network(rank: int) -> list[str]:
    end = Collectives.end

    def late(collectives: Collectives, *args: Any) -> None:
        with collectives._device.span("network"):
            time.sleep(0.03)
        end(collectives, *args)

    Collectives.end = late  # type: ignore[method-assign]
    slow_steps.NUM_STEPS, slow_steps.LEAST_SECONDS = 4, 1e-6
    torch.set_num_threads(1)

    budget = 3 * sum(weight.nbytes for weight in Module("full").parameters())

    def strategy(**process: Any) -> ProTrainStrategy:
        return ProTrainStrategy(device_memory=budget, hardware=CPU, rehearse=False, sharding="replicate", **process)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_on_rank(rank, 2, kind=strategy, max_steps=8).fit(Module("full"))
    return [str(one.message) for one in caught if "Most of it is network: " in str(one.message)]


def test_a_slow_network_is_named_on_rank_0(tmp_path: Path) -> None:
    assert [len(told) for told in values(run_ranks(slow_network, 2, tmp_path))] == [1, 0]


# --- the progress bar -------------------------------------------------------------------------------------------------


class Bar(TQDMProgressBar):
    """Keeps what it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        self.shown.append(self.get_metrics(trainer, pl_module))


class Watching(L.Callback):
    """Keeps what other callbacks see."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen.append({*trainer.callback_metrics, *trainer.progress_bar_metrics, *trainer.logged_metrics})


@contextmanager
def peaks(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(CPUDevice, "peak_bytes", lambda device: nbytes)
        yield


def test_the_bar_shows_time_and_peak_beside_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    bar, watching = Bar(), Watching()
    with peaks(2048, monkeypatch):
        trainer, _ = trained(
            zoo()["dropout"](), callbacks=[bar, watching, PlanMonitor()], max_steps=4, enable_progress_bar=True
        )
    prediction = trainer.strategy.plan.prediction
    told = slow_steps.short_seconds(prediction.step_seconds)
    assert all(shown["step"].endswith(f" ({told})") for shown in bar.shown[2:])
    assert all(shown["peak"].startswith("2.0 KiB (") for shown in bar.shown)
    assert set().union(*watching.seen) == set()
    assert "get_metrics" not in vars(bar)
