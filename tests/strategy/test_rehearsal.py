"""A plan is tried before training: what is measured corrects it, and training is the same bit for bit."""

from __future__ import annotations

import gc
import itertools
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_protrain import ProTrainStrategy
from lightning_protrain.config import NO_KNOBS, PlanOptions, format_bytes
from lightning_protrain.device.device import CPUDevice
from lightning_protrain.device.host import HostMemory
from lightning_protrain.device.recording import Span, busy
from lightning_protrain.distributed import launch
from lightning_protrain.planner.advice import larger_steps
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.problem import Problem, Training
from lightning_protrain.planner.search import search
from lightning_protrain.planner.step_time import Busy, micro_batch, step_time
from lightning_protrain.profiler.records import Segment
from lightning_protrain.runtime.apply import RunOptions, Runtime, apply_plan
from lightning_protrain.strategy import plan_session, protrain, rehearsal, rehearsed_step
from tests.planner.virtual import (
    CHECKPOINT,
    KEEP,
    SWAP,
    Case,
    model_of,
    plan_of,
    problem_of,
    profile_of,
    rates_of,
    tokens,
)
from tests.strategy.planted import WRONG
from tests.support.machines import CPU
from tests.support.models import HIDDEN, LanguageModel, Mlp, ParityModule, fit, token_batches, variants, zoo
from tests.support.plan_cases import case
from tests.support.simulated.device import SimulatedDevice

MODELS = {**zoo(), **variants()}
# Lists of this module: what a step appends to a list of its own is taken back.
RAN: list[str] = []
LOCKED: list[int] = []


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as the first run of its configuration."""
    monkeypatch.setattr(plan_session, "user_folder", lambda: tmp_path)


def trained(module: ParityModule, rehearse: Any, share: float, **options: Any) -> tuple[L.Trainer, dict[str, Tensor]]:
    """The Trainer and what it has computed, under a budget of so many times the bytes of the weights."""
    budget = int(share * sum(weight.nbytes for weight in module.parameters()))
    knobs = {name: options.pop(name) for name in list(options) if name.startswith("num_")}
    strategy = ProTrainStrategy(device_memory=budget, hardware=CPU, monitor=False, rehearse=rehearse, **knobs)
    trainer = fit(module, strategy=strategy, **options)
    computed = {f"loss {index}": loss for index, loss in enumerate(module.losses)}
    return trainer, {**computed, **{name: value.clone() for name, value in module.state_dict().items()}}


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [line for line in caplog.messages if part in line]


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(value, other[name]) for name, value in one.items())


# --- training is the same ---------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "share"), list(zip(MODELS, itertools.cycle([2.5, 3.5]), strict=False)))
def test_training_is_the_same_with_a_rehearsal(name: str, share: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    _, without = trained(MODELS[name](), False, share)
    assert "rehears" not in caplog.text
    trainer, found = trained(MODELS[name](), True, share)
    assert equal(without, found)
    if trainer.lightning_module.automatic_optimization:
        assert "The plan was rehearsed" in caplog.text
    else:
        manual = "The plan is not rehearsed: Under manual optimization the module calls backward itself."
        assert lines(caplog, "rehearsed") == [manual]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {"num_swap_blocks": 1, "gradient_clip_val": 0.1},
        {"accumulate_grad_batches": 3, "precision": "bf16-mixed"},
        {"num_checkpoint_blocks": 1, "max_epochs": 2},
    ],
    ids=str,
)
def test_training_is_the_same_under_every_option(options: dict[str, Any]) -> None:
    results = [trained(MODELS["dropout"](), rehearse, 3, **options)[1] for rehearse in (False, True)]
    assert equal(*results)


def lock(address: int, size: int) -> bool:
    LOCKED.append(address)
    RAN.append("lock")
    return True


def test_memory_that_is_locked_in_a_rehearsal_is_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(device: torch.device, log_once: object) -> CPUDevice:
        return CPUDevice(device, host=HostMemory(lock, LOCKED.remove))

    monkeypatch.setattr(launch, "open_device", opened)
    RAN.clear()
    trained(MODELS["dropout"](), True, 3, num_swap_blocks=1)
    assert RAN
    assert not LOCKED


class Scheduled(ParityModule):
    """Has a schedule, and shuffles."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(token_batches().dataset, batch_size=2, shuffle=True)


class Resumable(ParityModule):
    """Its loader can be resumed in the middle of an epoch, and no batch is taken from it ahead of training."""

    def train_dataloader(self) -> Any:
        stateful = pytest.importorskip("torchdata.stateful_dataloader")
        return stateful.StatefulDataLoader(token_batches().dataset, batch_size=2, shuffle=True)

    def largest_batch(self) -> list[Tensor]:
        return next(iter(token_batches()))


class Normed(nn.Module):
    """A block with running statistics of batches, of which the forward counts how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.norm(self.up(hidden).transpose(1, 2)).transpose(1, 2)


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    network = LanguageModel([Mlp() for _ in range(3)]).requires_grad_(False)
    return peft.inject_adapter_in_model(peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["up", "down"]), network)


WAYS: dict[str, tuple[Callable[[], ParityModule], dict[str, Any]]] = {
    "schedule and shuffled data": (lambda: Scheduled(LanguageModel([Mlp() for _ in range(3)])), {}),
    "resumable loader": (lambda: Resumable(LanguageModel([Mlp() for _ in range(3)])), {}),
    "batch norm": (lambda: ParityModule(LanguageModel([Normed() for _ in range(3)])), {}),
    "LoRA": (lambda: ParityModule(adapted()), {}),
    "averages of weights": (
        lambda: Scheduled(LanguageModel([Mlp() for _ in range(3)])),
        {"callbacks": lambda: [EMAWeightAveraging(decay=0.5)]},
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", WAYS)
def test_training_is_the_same_in_every_way_to_train(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, options = WAYS[name]
    caplog.set_level("INFO")
    found = []
    for rehearse in (False, True):
        torch.manual_seed(3)
        given = {key: value() for key, value in options.items()}
        found.append(trained(make(), rehearse, 1.7 if name == "LoRA" else 2.5, **given)[1])
    assert equal(*found)
    assert len(lines(caplog, "The plan was rehearsed: ")) > 0


class Counting(ParityModule):
    """Says outside of itself how often its step has run."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        RAN.append("step")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("seconds", "counted"),
    [
        pytest.param([3.0, 1.39, 1.03, 1.02], (1.02, 4), id="warms up"),
        pytest.param([1.0, 1.0, 1.01], (1.0, 3), id="steady"),
        pytest.param([9.0, 2.0, 1.9, 1.8, 1.7, 1.6, 1.5], (1.6, 6), id="never steady"),
    ],
)
def test_micro_batches_run_until_they_get_no_faster(seconds: list[float], counted: tuple[float, int]) -> None:
    taken: list[float] = []

    def run(index: int) -> tuple[rehearsed_step.Rehearsed, bool]:
        assert index == (1 if taken else 0)
        taken.append(seconds[len(taken)])
        return rehearsed_step.Rehearsed(taken[-1], Busy(taken[-1], 0.0, 0.0), 100 + len(taken)), False

    found = rehearsed_step._measure_steady(run)
    assert (found.seconds, len(taken)) == counted
    assert found.busy.compute == found.seconds
    assert found.peak_bytes == 100 + len(taken)


class Holding(ParityModule):
    """Notes in each step of a rehearsal whether gradients of the step before take memory, and how large they are."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        gradients = [weight.grad.abs().sum().item() for weight in self.parameters() if weight.grad is not None]
        RAN.append(f"{sum(gradients):.2e}" if gradients else "none")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_take_memory_in_a_rehearsed_forward_as_in_training(accumulate: int) -> None:
    RAN.clear()
    module = Holding(MODELS["reused"]().network)
    trained(module, True, 2, max_steps=1, limit_val_batches=0, accumulate_grad_batches=accumulate)
    rehearsed = RAN[RAN.index("none", 1) if "none" in RAN[1:] else 0 :]
    first, *others = rehearsed[:3]
    assert first == "none"
    assert "none" not in others
    assert (len(set(others)) == 1) is (accumulate == 1), "gradients are added up only if training adds them up"


def test_the_host_steps_while_a_micro_batch_runs() -> None:
    device = CPUDevice(torch.device("cpu"))
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])
    asked: list[object] = []

    def beside() -> None:
        for _ in range(5):  # What a micro-batch asks of the worker is done between two steps.
            asked.append(device.worker.submit(lambda: "done").result())

    try:
        assert rehearsed_step.host_step_rate([optimizer], device, 1 << 12, beside)
        assert asked == ["done"] * 5
        with pytest.raises(ArithmeticError, match="planned"):
            rehearsed_step.host_step_rate([optimizer], device, 1 << 12, raising)
        assert device.worker.submit(lambda: "alive").result() == "alive"
    finally:
        device.close()
    assert not optimizer.state


def raising() -> None:
    raise ArithmeticError("planned")


def test_a_rehearsal_takes_few_micro_batches_and_leaves_no_count() -> None:
    steps = []
    for rehearse in (False, True):
        RAN.clear()
        trainer, _ = trained(Counting(MODELS["reused"]().network), rehearse, 2)
        steps.append(len(RAN))
    assert 3 <= steps[1] - steps[0] <= rehearsal.ROUNDS * rehearsed_step.MOST_BATCHES == 12
    alone = fit(MODELS["reused"](), strategy=ProTrainStrategy(plan=trainer.strategy.plan, monitor=False))
    assert trainer.strategy.plan.num_offloaded_chunks
    for count in ("uploads", "uploaded_bytes", "downloaded_bytes", "prefetch_hits", "peak_live_bytes", "live_bytes"):
        assert getattr(trainer.strategy.counters, count) == getattr(alone.strategy.counters, count), count


@pytest.mark.parametrize("share", [50, 2])
def test_nothing_is_rehearsed_where_everything_fits_or_nobody_asks(share: float) -> None:
    RAN.clear()
    trained(Counting(MODELS["reused"]().network), True if share == 50 else "auto", share)
    profiled = len(RAN)
    RAN.clear()
    trained(Counting(MODELS["reused"]().network), False, share)
    assert len(RAN) == profiled


# --- what cannot be rehearsed -----------------------------------------------------------------------------------------


class Awkward(ParityModule):
    """Its step does something while it is rehearsed."""

    does: Callable[[Awkward], None] | None = None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.does is not None:
            self.does()
        return super().training_step(batch, batch_idx)


def while_rehearsed(monkeypatch: pytest.MonkeyPatch, does: Callable[[Awkward], None]) -> Awkward:
    module, rehearse = Awkward(MODELS["reused"]().network), rehearsal.rehearse

    def doing(*args: Any) -> Any:
        module.does = MethodType(does, module)  # type: ignore[assignment]
        try:
            return rehearse(*args)
        finally:
            module.does = None

    monkeypatch.setattr(rehearsal, "rehearse", doing)
    return module


def test_a_step_that_raises_is_trained_without_a_rehearsal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raises(module: Awkward) -> None:
        module.scale.item()

    caplog.set_level("INFO")
    _, without = trained(Awkward(MODELS["reused"]().network), False, 2)
    _, found = trained(while_rehearsed(monkeypatch, raises), True, 2)
    told = [line for line in caplog.messages if "rehearsed" in line]
    assert told == [
        "The plan is not rehearsed: the step raises AttributeError ('Awkward' object has no attribute 'scale')."
    ]
    assert equal(without, found)


def test_a_step_that_changes_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def writes(module: Awkward) -> None:
        with torch.no_grad():
            module.network.head.weight.mul_(0.5)

    with pytest.raises(RuntimeError, match=r"changes weights \(network\.head\.weight\).*rehearse=False"):
        trained(while_rehearsed(monkeypatch, writes), True, 2)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_other_choices_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"rehearse={re.escape(repr(value))}: give 'auto', True or False"):
        ProTrainStrategy(rehearse=value)
    with pytest.raises(ValueError, match="rehearse="):
        PlanOptions(rehearse=value)


# --- a device that is smaller than it claims --------------------------------------------------------------------------


def test_training_begins_on_a_device_that_is_smaller_than_it_claims(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = MODELS["tied"]()
    budget = 4 * sum(weight.nbytes for weight in module.parameters())
    has, run_step = int(0.8 * budget), Runtime.run_step

    def limited(runtime: Runtime, *args: Any, **kwargs: Any) -> Any:
        assert runtime.plan.prediction is not None
        short = runtime.plan.prediction.device_bytes - has
        if short > 0:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {short / 1024:.2f} KiB. GPU 0 has")
        return run_step(runtime, *args, **kwargs)

    _, without = trained(MODELS["tied"](), False, 4)
    monkeypatch.setattr(Runtime, "run_step", limited)
    with pytest.raises(torch.OutOfMemoryError):
        trained(MODELS["tied"](), False, 4)
    caplog.clear()
    caplog.set_level("INFO")
    trainer, found = trained(module, True, 4)
    assert equal(without, found)
    assert trainer.strategy.plan.prediction.device_bytes <= has
    assert trainer.strategy.budget < budget
    told = [line for line in caplog.messages if "ran out of memory" in line]
    assert len(told) == 1


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_placement_ends_before_the_next_one_begins(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Python's collector: it may not run between placements, each of which holds the streamed weights."""
    held, overlaps = [], []

    def placed(*args: Any, **kwargs: Any) -> Runtime:
        overlaps.append([type(reference()).__name__ for reference in held if reference() is not None])
        runtime = apply_plan(*args, **kwargs)
        held.append(weakref.ref(runtime))
        held.extend(weakref.ref(chunk) for chunk in runtime._chunks)
        return runtime

    def too_small(trainer: Any, runtime: Runtime, *rest: Any) -> Any:
        rehearse(trainer, runtime, *rest)
        if len(overlaps) <= 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 KiB. GPU 0 has")
        raise rehearsed_step.NotRehearsed("It has been tried often enough.")

    rehearse = rehearsal.rehearse
    monkeypatch.setattr(protrain, "apply_plan", placed)
    monkeypatch.setattr(rehearsal, "rehearse", too_small)
    gc.collect()
    gc.disable()
    try:
        trained(MODELS["tied"](), True, 4, precision=precision)
    finally:
        gc.enable()
    assert overlaps == [[]] * 4


def test_a_device_that_is_too_small_for_any_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_fits(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")  # It does not say of how much.

    monkeypatch.setattr(Runtime, "run_step", nothing_fits)
    monkeypatch.setattr(rehearsal, "MOST_SHRINKS", 100)
    with pytest.raises(ValueError, match="device_memory"):
        trained(MODELS["tied"](), True, 3)


def test_a_training_that_runs_out_of_memory_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, run_step = 4 * sum(weight.nbytes for weight in MODELS["tied"]().parameters()), Runtime.run_step

    def fails_once(runtime: Runtime, *args: Any, **kwargs: Any) -> Any:
        RAN.append("step")
        if len(RAN) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has a total of")
        return run_step(runtime, *args, **kwargs)

    RAN.clear()
    monkeypatch.setattr(Runtime, "run_step", fails_once)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as raised:
        trained(MODELS["tied"](), False, 4)
    (note,) = raised.value.__notes__
    assert re.fullmatch(
        r"The device ran out of memory, .* were predicted for a micro-batch of 2 samples; this one has tensors of "
        r"\[2, 8\]\. Set device_memory to .*, or give the data module a method `largest_batch` to plan with, or "
        r"smaller batches\.",
        note,
    )
    assert f"({budget - 2048} bytes)" in note


@pytest.mark.parametrize("missing", ["400.00 GiB", "2.00 KiB below the smallest plan"])
def test_a_batch_that_no_plan_can_hold_does_not_end_later_runs(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_step, weights = Runtime.run_step, sum(weight.nbytes for weight in MODELS["tied"]().parameters())
    kibibytes = (4 * weights >> 10) - 2  # A budget of about 2 KiB is left, which no plan fits.
    size = missing if missing.endswith("GiB") else f"{kibibytes}.00 KiB"

    def fails(runtime: Runtime, *args: Any, **kwargs: Any) -> Any:
        if RAN:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size}. GPU 0 has")
        return run_step(runtime, *args, **kwargs)

    RAN.clear()
    begun = L.Callback()
    begun.on_train_batch_start = lambda *_: RAN.append("in training")  # type: ignore[method-assign]
    monkeypatch.setattr(rehearsal, "WORTH_CHANGING", 0.0)
    monkeypatch.setattr(Runtime, "run_step", fails)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trained(MODELS["tied"](), True, 4, callbacks=[begun])
    (note,) = raised.value.__notes__
    assert ("Set device_memory to" in note) is not missing.endswith("GiB")
    assert note.endswith("the data module a method `largest_batch` to plan with, or smaller batches.")
    RAN.clear()
    assert trained(MODELS["tied"](), True, 4)[0].strategy.budget == 4 * weights


# --- what the next run knows ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("not_installed")
def test_the_next_run_begins_with_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rehearsal, "WORTH_CHANGING", 0.0)  # Times are those of a busy machine: the plan stays.
    caplog.set_level("INFO")
    module = MODELS["reused"]()
    first, without = trained(module, True, 2)
    assert len(lines(caplog, "The plan was rehearsed: ")) == 1
    monkeypatch.setattr(rehearsal, "rehearse", None)  # Nothing is rehearsed again.
    again, found = trained(MODELS["reused"](), True, 2)
    assert equal(without, found)
    assert len(lines(caplog, "The plan was rehearsed in an earlier run: a step takes ")) == 1
    plans = [trainer.strategy.plan for trainer in (first, again)]
    assert len({(plan.chunks, plan.blocks, plan.prediction.step_seconds) for plan in plans}) == 1
    trained(MODELS["reused"](), False, 2)
    assert len(lines(caplog, "rehearsed")) == 2


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("tied", {}),
    "accumulate": ("reused", {"accumulate_grad_batches": 2}),
    "knob": ("reused", {"num_chunk_buffers": 3}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_configuration_begins_anew(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rehearsal, "WORTH_CHANGING", 0.0)
    caplog.set_level("INFO")
    trained(MODELS["reused"](), True, 2)
    model, options = OTHERS[name]
    trained(MODELS[model](), True, 2, **options)
    assert len(lines(caplog, "The plan was rehearsed: ")) == 2


@pytest.mark.parametrize("how", ["cut", "other text", "a folder"])
def test_a_file_that_is_damaged_is_warned_of_and_ignored(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rehearsal, "WORTH_CHANGING", 0.0)
    _, without = trained(MODELS["reused"](), True, 2)
    (path,) = tmp_path.glob("rehearsal-*.json")
    text = path.read_text()
    path.unlink()
    if how == "a folder":
        path.mkdir()
    else:
        path.write_text(text[: len(text) // 2] if how == "cut" else text.replace('"alpha": null', '"alpha": 3.0'))
    caplog.clear()
    caplog.set_level("INFO")
    with pytest.warns(UserWarning, match=f"{path.name} is ignored\\. Delete it\\. Reading it raised "):
        _, found = trained(MODELS["reused"](), True, 2)
    assert equal(without, found)
    assert len(lines(caplog, "The plan was rehearsed: ")) == 1


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(plan_session, "user_folder", lambda: tmp_path / "file")
    with pytest.warns(UserWarning, match="The next run will not know what this one has measured"):
        trained(MODELS["reused"](), True, 2)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in a rehearsal", "in training"])
def test_a_run_that_ran_out_of_memory_lowers_the_budget_of_the_next(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rehearsal, "WORTH_CHANGING", 0.0)
    run_step, budget = Runtime.run_step, 4 * sum(weight.nbytes for weight in MODELS["tied"]().parameters())
    begun, failures = L.Callback(), []
    # How many micro-batches a rehearsal runs depends on the speed of the machine.
    begun.on_train_batch_start = lambda *_: RAN.append("in training")  # type: ignore[method-assign]

    def fails_once(runtime: Runtime, *args: Any, **kwargs: Any) -> Any:
        if not failures and bool(RAN) is (where == "in training"):
            failures.append(where)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB. GPU 0 has a total of")
        return run_step(runtime, *args, **kwargs)

    RAN.clear()
    monkeypatch.setattr(Runtime, "run_step", fails_once)
    with pytest.raises(torch.OutOfMemoryError) if where == "in training" else nullcontext():
        trained(MODELS["tied"](), True, 4, callbacks=[begun])
    assert failures == [where]
    caplog.set_level("INFO")
    trainer, _ = trained(MODELS["tied"](), True, 4)
    assert trainer.strategy.budget == budget - 2048
    (line,) = lines(caplog, "an earlier run of this configuration ran out of memory. Delete")
    assert line.startswith(f"device_memory is {format_bytes(budget - 2048)} in place of {format_bytes(budget)}")
    # A budget that is lower still counts, and one that excludes every plan does not.
    assert trained(MODELS["tied"](), True, 3.5)[0].strategy.budget == int(3.5 * budget / 4)


# --- what is measured -------------------------------------------------------------------------------------------------

CASES = {
    "offload": Case(),
    "checkpoint": Case(policies=lambda index: CHECKPOINT, num_buffers=2),
    "swap": Case(policies=lambda index: SWAP if index < 3 else KEEP),
    "slow link": Case(link=3.0),
    "slow host": Case(host=3.0, training=Training(overlap="backward")),
}


def measured(case: Case, plan: Plan) -> rehearsed_step.Rehearsed:
    """Return the measurements of a rehearsal on a machine with the case's rates."""
    layout, profile = profile_of(case.num_blocks, case.num_tokens, case.tied)
    model, device = model_of(case), SimulatedDevice(rates_of(case, layout, profile))
    runtime = apply_plan(model, plan, layout, device, RunOptions(print))
    with device:
        for weight in model.parameters():
            if device.place(weight) is None:
                device.set_place(weight, "device")
        for _ in range(2):  # The first one records the order of blocks.
            model.zero_grad()
            found = rehearsed_step.measure(lambda: {"loss": model(tokens(case.num_tokens))}, runtime, device)
        runtime.reset()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        rate = rehearsed_step.host_step_rate([optimizer], device, 1 << 12)
    assert not optimizer.state
    runtime.remove()
    return replace(found, host_step=rate)


@pytest.mark.parametrize("name", CASES)
def test_what_is_measured_is_what_streams_have_done(name: str) -> None:
    case = CASES[name]
    problem = problem_of(case)
    plan = plan_of(case, problem.layout, problem.profile)
    found, wanted = measured(case, plan), micro_batch(problem, plan)
    for resource in ("compute", "upload", "download"):
        assert getattr(found.busy, resource) == pytest.approx(getattr(wanted, resource), rel=0.02), resource
    assert found.host_step == pytest.approx(problem.hardware.host_step, rel=0.02)


@cache
def limited(name: str) -> Problem:
    """A problem in which not everything fits: half of what the model would take."""
    problem = problem_of(CASES[name])
    weights = sum(info.nbytes for info in problem.layout.parameters)
    return replace(problem, device_bytes=int(1.5 * weights) + problem.profile.saved_bytes // 2, chunk_bytes=(None,))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["offload", "slow link", "slow host"])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("by", [0.25, 4.0])
def test_a_plan_from_wrong_rates_becomes_that_from_true_ones(name: str, wrong: str, by: float) -> None:
    true = limited(name)
    told = replace(true, hardware=WRONG[wrong](true.hardware, by))
    for _ in range(rehearsal.ROUNDS):
        plan = search(told, NO_KNOBS)
        told = replace(told, hardware=measured(CASES[name], plan).correct(told, plan, told.hardware))
    ends, best = search(told, NO_KNOBS), search(true, NO_KNOBS)
    assert step_time(true, ends).seconds <= 1.02 * step_time(true, best).seconds
    assert step_time(told, ends).seconds == pytest.approx(step_time(true, ends).seconds, rel=0.05)


def wrong_in(problem: Problem, by: float, chosen: Callable[[int, int], bool]) -> Problem:
    """The problem with so many times the work in some blocks, by their index and number."""
    names = [block.name for block in problem.layout.blocks]

    def more(costs: Any) -> Any:
        return tuple(replace(cost, flops=round(cost.flops * by), nbytes=round(cost.nbytes * by)) for cost in costs)

    def changed(segment: Segment) -> Segment:
        if segment.unit not in names or not chosen(names.index(segment.unit), len(names)):
            return segment
        ahead, back = segment.forward, segment.backward
        ahead = replace(ahead, operations=more(ahead.operations))
        return replace(segment, forward=ahead, backward=replace(back, operations=more(back.operations)))

    return replace(problem, profile=replace(problem.profile, segments=tuple(map(changed, problem.profile.segments))))


SOME: dict[str, Callable[[int, int], bool]] = {
    "first half": lambda index, count: index < count // 2,
    "second half": lambda index, count: index >= count // 2,
    "every other": lambda index, count: index % 2 == 0,
}


@pytest.mark.parametrize("some", SOME)
def test_one_factor_for_computation_is_enough_where_some_blocks_are_wrong(some: str) -> None:
    true = limited("slow host")
    told = wrong_in(true, 4.0, SOME[some])
    best = step_time(true, search(true, NO_KNOBS)).seconds
    assert step_time(true, search(told, NO_KNOBS)).seconds > 1.1 * best  # Without a rehearsal.
    for _ in range(rehearsal.ROUNDS):
        plan = search(told, NO_KNOBS)
        told = replace(told, hardware=measured(CASES["slow host"], plan).correct(told, plan, told.hardware))
    ends = search(told, NO_KNOBS)
    assert step_time(true, ends).seconds <= 1.02 * best
    assert step_time(told, ends).seconds == pytest.approx(step_time(true, ends).seconds, rel=0.1)


def test_the_fragmentation_factor_becomes_that_with_which_the_plan_takes_what_was_held() -> None:
    request = case(60_000)
    request = replace(request, node=replace(request.node, measure=lambda _: replace(CPU, asynchronous=True)))
    plan, problem = request.plan(), request.here()
    phases = memory_timeline(replace(problem, alpha=1.3), plan).phases
    held = max(phase.total for phase in phases if phase.name in ("forward", "backward", "step"))
    found = rehearsed_step.Rehearsed(1.0, micro_batch(problem, plan), held)
    corrected, _ = rehearsal._corrected(request, plan, found)
    told, now = request.expects(plan), corrected.expects(plan)
    assert (told.alpha, now.alpha) == (1.1, pytest.approx(1.3, abs=1e-3))
    assert abs(now.device_bytes - held) <= 2
    assert "(fragmentation factor 1.30 in place of 1.10)" in rehearsal._compared(found, now, told)
    less, _ = rehearsal._corrected(request, plan, replace(found, peak_bytes=told.device_bytes // 2))
    assert less.workload.alpha < 1
    assert less.here().device_bytes == problem.device_bytes


def test_gains_are_those_over_the_rehearsed_step(tmp_path: Path) -> None:
    """The plan stays, and its other advice."""
    request, stale = case(60_000), "Twice the micro-batch size is expected to train 999 % more tokens per second."
    plan = request.plan()
    assert plan.prediction is not None
    plan = replace(plan, prediction=plan.prediction.with_advice(stale, "Stay."))
    found = rehearsed_step.Rehearsed(1.0, micro_batch(request.here(), plan), None)
    corrected, kept = rehearsal.Rehearsal(tmp_path)._search_again(request, plan, found)
    assert kept.prediction is not None
    gains = tuple(larger_steps(corrected.here(), kept, NO_KNOBS))
    assert kept.prediction.advice == ("Stay.", *gains)


def test_a_factor_with_which_no_plan_fits_is_not_remembered(tmp_path: Path) -> None:
    """The plan has run, so the next run of the same configuration finds it as well."""
    request = case(60_000)
    request = replace(request, node=replace(request.node, measure=lambda _: replace(CPU, asynchronous=True)))
    first = rehearsal.Rehearsal(tmp_path)
    request = first.recall(request, {})
    plan = request.plan()
    found = rehearsed_step.Rehearsed(1.0, micro_batch(request.here(), plan), 3 * request.budget())
    with pytest.raises(ValueError, match="fits"):
        rehearsal._corrected(request, plan, found)[0].plan()
    assert rehearsal._decisions(first._search_again(request, plan, found)[1]) == rehearsal._decisions(plan)
    again = rehearsal.Rehearsal(tmp_path).recall(request, {})
    assert rehearsal._decisions(again.plan()) == rehearsal._decisions(plan)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("by", "is_used", "is_kept"),
    [(1.9, True, True), (0.55, True, True), (2.1, False, False), (86.0, False, False), (0.04, True, False)],
    ids=str,
)
@pytest.mark.parametrize(("resource", "word"), [("compute", "computation"), ("upload", "uploads")])
def test_a_correction_out_of_bounds_is_said_and_not_kept(
    resource: str, word: str, by: float, is_used: bool, is_kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rates that are far lower are those of small operations, and are used; far higher ones are wrong."""
    caplog.set_level("INFO")
    request, first = case(60_000), rehearsal.Rehearsal(tmp_path, is_measured=True)
    request = first.recall(request, {})
    plan = request.plan()
    busy_for = micro_batch(request.here(), plan)
    found = rehearsed_step.Rehearsed(
        1.0, replace(busy_for, **{resource: getattr(busy_for, resource) / by}), None, request.here().hardware.host_step
    )
    corrected, _ = first._search_again(request, plan, found)
    if is_used:  # A second round finds the same rates.
        corrected, _ = first._search_again(corrected, plan, found)
    again = rehearsal.Rehearsal(tmp_path, is_measured=True).recall(case(60_000), {})
    for later, counts in ((corrected, is_used), (again, is_kept)):
        rates, name = later.here().hardware, "memory" if resource == "compute" else resource
        assert getattr(rates, name) == pytest.approx(getattr(CPU, name) * (by if counts else 1.0))
    phrase = f"{word} at {by:.2g} times the measured rate."
    lines = (f"For this run alone: {phrase}", f"Not used, as rates of a machine change by less: {phrase}")
    assert [line in caplog.text for line in lines] == [is_used and not is_kept, not is_used]


def test_a_measured_host_step_is_that_beside_copies() -> None:
    request = case(60_000)
    told = replace(CPU, host_beside=0.5, asynchronous=True)
    request = replace(request, node=replace(request.node, measure=lambda _: told))
    plan = request.plan()
    found = rehearsed_step.Rehearsed(1.0, micro_batch(request.here(), plan), None, host_step=0.5 * told.host_step)
    corrected, _ = rehearsal._corrected(request, plan, found)
    rates = corrected.here().hardware
    assert rates.host_step * rates.host_beside == pytest.approx(0.5 * told.host_step)


def test_what_was_measured_with_another_optimizer_is_not_known(tmp_path: Path) -> None:
    request = case(60_000)
    found = rehearsed_step.Rehearsed(1.0, micro_batch(request.here(), request.plan()), None, device_step=1e9)
    run = rehearsal.Rehearsal(tmp_path)
    request = run.recall(request, {})
    run._search_again(request, request.plan(), found)
    for optimizers, rate in (((), 1e9), (("theirs.Lion",), CPU.device_step)):
        later = case(60_000)
        later = replace(later, workload=replace(later.workload, optimizers=optimizers))
        assert rehearsal.Rehearsal(tmp_path).recall(later, {}).here().hardware.device_step == rate


def test_corrections_of_several_runs_do_not_add_up(tmp_path: Path) -> None:
    for expected in (1.0, 1.9, 1.9):
        run = rehearsal.Rehearsal(tmp_path, is_measured=True)
        request = run.recall(case(60_000), {})
        plan = request.plan()
        busy_for = micro_batch(request.here(), plan)
        found = rehearsed_step.Rehearsed(1.0, replace(busy_for, compute=busy_for.compute / 1.9), None)
        assert request.here().hardware.memory == pytest.approx(CPU.memory * expected)
        run._search_again(request, plan, found)


def test_rates_that_the_user_gives_are_corrected_without_a_bound(tmp_path: Path) -> None:
    """They may be those of another machine."""
    run = rehearsal.Rehearsal(tmp_path)
    request = run.recall(case(60_000), {})
    plan = request.plan()
    busy_for = micro_batch(request.here(), plan)
    found = rehearsed_step.Rehearsed(1.0, replace(busy_for, compute=busy_for.compute / 86), None)
    corrected, _ = run._search_again(request, plan, found)
    assert corrected.here().hardware.memory == pytest.approx(86 * CPU.memory)


@pytest.mark.parametrize("share", [0.85, 0.95])
def test_a_resident_plan_is_rehearsed_if_it_is_tight(share: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    module = MODELS["reused"]()
    trainer, without = trained(module, False, 50)
    assert not trainer.strategy.plan.does_anything
    weights = sum(weight.nbytes for weight in module.parameters())
    tight = trainer.strategy.plan.prediction.device_bytes / share / weights
    trainer, found = trained(MODELS["reused"](), True, tight)
    assert not trainer.strategy.plan.does_anything
    assert bool(lines(caplog, "The plan was rehearsed: ")) is (share > 0.9)
    assert equal(without, found)


def test_the_time_that_lanes_work_together_counts_once() -> None:
    spans = [Span("upload", 0, 2), Span("swap_in", 1, 4), Span("upload", 6, 7), Span("download", 0, 9)]
    assert busy(spans, "upload", "swap_in") == 5
    assert busy(spans, "upload") == 3
    assert busy(spans, "stall") == 0
