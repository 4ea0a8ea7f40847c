"""Steps that are slower than predicted are warned of, with the resource that takes longer."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor

from lightning_protrain import ProTrainStrategy
from lightning_protrain.device.device import CPUDevice
from lightning_protrain.device.recording import Lane
from lightning_protrain.planner.problem import Training
from lightning_protrain.planner.step_time import step_time
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.report import plan_monitor
from lightning_protrain.report.plan_monitor import PlanMonitor, busy_seconds
from lightning_protrain.runtime.comm.collectives import Collectives
from lightning_protrain.strategy import plan_session
from tests.planner.virtual import Case, plan_of, problem_of, profile_of, rates_of, run
from tests.support.machines import CPU
from tests.support.models import ParityModule, fit, zoo
from tests.support.rank_models import Module
from tests.support.ranks import run_ranks, trainer_on_rank, values
from tests.support.simulated.device import SimulatedDevice
from tests.support.work_clock import WorkClock

# --- the resource that is slow ----------------------------------------------------------------------------------------

PLANTED = {
    "compute": {"flops": 0.5, "memory": 0.5},
    "upload": {"upload": 0.5},
    "download": {"download": 0.5},
    "host": {"host_memory": 0.5},
}


@pytest.mark.sample(5)
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
            assert max(took, key=lambda name: took[name] - expected[name]) == found, longer
            assert longer.pop(found) > 1.8
            assert all(0.9 < ratio < 1.15 for ratio in longer.values()), longer


# --- in a run ---------------------------------------------------------------------------------------------------------


CLOCK = WorkClock(CPU)


class Slow(ParityModule):
    """Computes for longer than anybody predicts."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        CLOCK.seconds += 0.06
        return super().training_step(batch, batch_idx)


class Held(torch.optim.AdamW):
    """Steps for longer than anybody predicts."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        CLOCK.seconds += 0.06
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


def own(kind: type[ParityModule]) -> ParityModule:
    """A module of this kind with the network that has dropout."""
    network = zoo()["dropout"]().network
    module = kind(network)
    module.logits = lambda tokens, index: network(input_ids=tokens, use_cache=False).logits  # type: ignore[method-assign]
    return module


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compare four steps, however short, by a clock that does not depend on the machine."""
    monkeypatch.setattr(plan_monitor, "NUM_STEPS", 4)
    monkeypatch.setattr(plan_monitor, "LEAST_SECONDS", 1e-6)
    monkeypatch.setattr(plan_monitor, "time", SimpleNamespace(perf_counter=lambda: CLOCK.seconds))
    with CLOCK.running():
        yield


def held(method: Any, lane: Lane) -> Any:
    """Return a copy of a device that takes longer than anybody predicts."""

    def copy(device: CPUDevice, source: Tensor, target: Tensor, *args: Any) -> Any:
        with device.span(lane):
            CLOCK.seconds += 0.02
        return method(device, source, target, *args)

    return copy


class Recorded(L.Callback):
    """Keeps in which micro-batches the device records."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if trainer.strategy.device.recording is not None:
            self.batches.append(trainer.fit_loop.total_batch_idx)


@pytest.mark.sample(3)
@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", ["compute", "upload", "download", "host"])
def test_slow_steps_are_warned_of_once_with_what_is_slow(
    name: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = own({"compute": Slow, "host": Steps}.get(name, ParityModule))
    if name in ("upload", "download"):
        monkeypatch.setattr(CPUDevice, name, held(getattr(CPUDevice, name), name))
    recorded = Recorded()
    _, warned = trained(module, accumulate_grad_batches=accumulate, callbacks=[recorded])
    (sentence,) = warned
    assert recorded.batches == [*range(recorded.batches[0], recorded.batches[0] + accumulate)]
    assert sentence.endswith('No rehearsal was made: plan="auto" with rehearse=True plans with measured times.')
    which = {"upload": "the upload of the link", "download": "the download of the link"}.get(name, name)
    assert f"Most of the difference is {which}: " in sentence
    assert "the median of 4" in sentence


@pytest.mark.usefixtures("few_steps")
def test_short_steps_are_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_monitor, "LEAST_SECONDS", 0.02)
    assert trained(own(Slow))[1] == []


class Rehearsed(L.Callback):
    """Says that the plan was rehearsed."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        session = trainer.strategy.session
        session.request = replace(session.request, node=replace(session.request.node, is_rehearsed=True))


@pytest.mark.usefixtures("few_steps")
def test_a_possible_cause_is_named_if_the_plan_was_rehearsed() -> None:
    (sentence,) = trained(own(Slow), callbacks=[Rehearsed()])[1]
    assert sentence.endswith(" Other processes may use the device, or it runs at a lower clock.")


class Smaller(ParityModule):
    """Trains on batches that are smaller than the one that is planned with."""

    def largest_batch(self) -> list[Tensor]:
        (tokens,) = next(iter(self.train_dataloader()))
        return [torch.cat((tokens, tokens[:1]))]


SLOWEST = replace(CPU, flops=dict.fromkeys(CPU.flops, 1e3), memory=1e3)
BETTER = "A better plan may exist. "


@pytest.mark.sample(2)
@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(
    ("kind", "is_rehearsed", "ends"),
    [
        (ParityModule, False, BETTER + plan_monitor._REHEARSE),
        (ParityModule, True, BETTER + plan_monitor._AGAIN),
        (Smaller, False, None),
    ],
)
def test_faster_steps_are_told_once_if_another_plan_may_be_faster(
    kind: type[ParityModule], is_rehearsed: bool, ends: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    callbacks = [Rehearsed()] if is_rehearsed else []
    assert trained(own(kind), SLOWEST, callbacks=callbacks, max_steps=12)[1] == []
    told = [line for line in caplog.messages if "were predicted" in line]
    assert len(told) == (0 if ends is None else 1)
    for line in told:
        assert re.match(
            r"A step takes .*, the median of 4; .* were predicted: \d+% less\. Most of the difference is compute: ",
            line,
        )
        assert line.endswith(ends)


class SlowAtFirst(ParityModule):
    """Computes for longer in its first micro-batches, of which the last ones are rehearsed."""

    seconds: Iterator[float] = iter(())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        CLOCK.seconds += next(self.seconds)
        return super().training_step(batch, batch_idx)


REHEARSED = "The plan was rehearsed: a step takes 60.1 ms, "


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (0.0, [REHEARSED, "A step takes ", REHEARSED, "A step takes "]),
        (0.06, [REHEARSED, "The plan was rehearsed in an earlier run: a step takes 60.1 ms."]),
    ],
)
def test_the_next_run_rehearses_again_if_steps_are_faster_than_rehearsed(
    later: float, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(plan_session, "user_folder", lambda: tmp_path)
    for _ in range(2):
        monkeypatch.setattr(SlowAtFirst, "seconds", chain([0.06] * 5, repeat(later)))
        module = own(SlowAtFirst)
        budget = int(2.5 * sum(weight.nbytes for weight in module.parameters()))
        fit(module, strategy=ProTrainStrategy(device_memory=budget, hardware=CPU, rehearse=True), max_steps=12)
    told = [line for line in caplog.messages if "rehearse" in line]
    assert all(line.startswith(begin) for line, begin in zip(told, expected, strict=True)), told
    assert all(line.endswith(BETTER + plan_monitor._AGAIN) for line in told if line.startswith("A step takes "))


@pytest.mark.usefixtures("few_steps")
def test_faster_steps_are_no_news_where_everything_is_resident(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    strategy = ProTrainStrategy(device_memory="1GiB", hardware=SLOWEST)
    fit(own(ParityModule), strategy=strategy, max_steps=8, max_epochs=-1)
    assert not strategy.plan.does_anything
    assert "were predicted" not in caplog.text


@pytest.mark.sample(2)
@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(("part", "callbacks"), [(0.5, []), (0.9, []), (0.5, [Rehearsed()])])
def test_less_memory_than_predicted_is_told_once_unless_it_was_measured_before(
    part: float, callbacks: list[L.Callback], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    module = own(ParityModule)
    plan = trained(own(ParityModule))[0].strategy.plan
    with peaks(int(part * plan.prediction.device_bytes), monkeypatch):
        trained(module, callbacks=callbacks, max_steps=12)
    told = [line for line in caplog.messages if line.startswith("The device holds ")]
    assert len(told) == (1 if part == 0.5 and not callbacks else 0)
    assert all(f"were predicted: 50% less. {BETTER}{plan_monitor._REHEARSE}" in line for line in told)


def slow_network(rank: int) -> list[str]:
    end = Collectives.end

    def late(collectives: Collectives, *args: Any) -> None:
        with collectives._device.span("network"):
            time.sleep(0.03)
        end(collectives, *args)

    Collectives.end = late  # type: ignore[method-assign]
    plan_monitor.NUM_STEPS, plan_monitor.LEAST_SECONDS = 4, 1e-6
    torch.set_num_threads(1)

    budget = 3 * sum(weight.nbytes for weight in Module("full").parameters())

    def strategy(**process: Any) -> ProTrainStrategy:
        return ProTrainStrategy(device_memory=budget, hardware=CPU, rehearse=False, sharding="replicate", **process)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_on_rank(rank, 2, kind=strategy, max_steps=8).fit(Module("full"))
    return [str(one.message) for one in caught if "Most of the difference is network: " in str(one.message)]


def test_a_slow_network_is_named_on_rank_0(tmp_path: Path) -> None:
    assert [len(told) for told in values(run_ranks(slow_network, 2, tmp_path))] == [1, 0]


# --- the progress bar -------------------------------------------------------------------------------------------------


class Bar(TQDMProgressBar):
    """A progress bar that records what it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        self.shown.append(self.get_metrics(trainer, pl_module))


class Watching(L.Callback):
    """A callback that records what callbacks see."""

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
    told = plan_monitor.short_seconds(prediction.step_seconds)
    assert all(shown["step"].endswith(f" (predicted: {told})") for shown in bar.shown[2:])
    assert all(shown["peak"].startswith("2.0 KiB (predicted: ") for shown in bar.shown)
    assert set().union(*watching.seen) == set()
    assert "get_metrics" not in vars(bar)
