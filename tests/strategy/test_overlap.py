"""The choice and the refusal of an overlap, and parity of Trainers with every overlap."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    Timer,
)
from torch import Tensor, nn

from lightning_protrain import ProTrainCheckpoint, ProTrainStrategy
from lightning_protrain.runtime.access_guard import AccessGuard
from lightning_protrain.runtime.optim.async_step import AsyncStep, Overlap
from lightning_protrain.strategy.overlap import OverlapPlan, plan_overlap
from tests.support.models import ParityModule, token_batches
from tests.support.overlapped_runs import MODELS, network, run
from tests.support.parity import CLIPPING, differences

# --- the choice -------------------------------------------------------------------------------------------------------


class Odd(Tensor):
    """A weight of a class of its own."""


class Hooked(L.LightningModule):
    """Has one parameter, and what a test gives it."""

    def __init__(self, optimizer: str = "AdamW", **given: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.made = getattr(torch.optim, optimizer)(self.parameters(), lr=0.1)


def a_hook(self: Any, *args: Any, **kwargs: Any) -> None:
    pass


def hooked(**hooks: Any) -> L.LightningModule:
    return type("Mine", (Hooked,), dict.fromkeys(hooks, a_hook))()


def a_callback(*names: str) -> L.Callback:
    return type("MyCallback", (L.Callback,), dict.fromkeys(names, a_hook))()


def choose(
    choice: str = "auto", module: L.LightningModule | None = None, device_type: str = "cuda", **options: Any
) -> OverlapPlan:
    trainer = L.Trainer(accelerator="cpu", logger=False, barebones=False, **options)
    module = module or hooked()
    return plan_overlap(choice, trainer, module, [module.made], device_type)


class MyStopping(EarlyStopping):
    """May override what the hooks of Lightning's own class call."""


def manual() -> L.LightningModule:
    module = hooked()
    module.automatic_optimization = False
    return module


NORM, VALUE = {"gradient_clip_val": 1.0}, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
CHOICES: list[tuple[str, dict[str, Any], Overlap]] = [
    ("nothing in the way", {}, Overlap.BACKWARD),
    ("the CPU", {"device_type": "cpu"}, Overlap.OFF),
    ("switched off", {"choice": "off"}, Overlap.OFF),
    ("asked for on the CPU", {"choice": "backward", "device_type": "cpu"}, Overlap.BACKWARD),
    ("forward asked for", {"choice": "forward"}, Overlap.FORWARD),
    ("clipping by norm", NORM, Overlap.FORWARD),
    ("clipping by value", VALUE, Overlap.BACKWARD),
    ("no clipping", {"gradient_clip_val": 0.0}, Overlap.BACKWARD),
    ("anomalies are detected", {"detect_anomaly": True}, Overlap.FORWARD),
    ("passive callbacks", {"callbacks": [EarlyStopping("loss"), Timer(), LearningRateMonitor()]}, Overlap.BACKWARD),
    ("a checkpoint callback of the package", {"callbacks": [ProTrainCheckpoint("never")]}, Overlap.BACKWARD),
    ("a callback before the step", {"callbacks": [a_callback("on_before_optimizer_step")]}, Overlap.FORWARD),
    ("a callback after backward", {"callbacks": [a_callback("on_after_backward")]}, Overlap.FORWARD),
    ("a callback after the step", {"callbacks": [a_callback("on_train_batch_end")]}, Overlap.BACKWARD),
    ("a function in a callback", {"callbacks": [LambdaCallback(on_after_backward=a_hook)]}, Overlap.FORWARD),
    *((f"{name} of the module", {"module": hooked(**{name: 1})}, Overlap.FORWARD) for name in (
        "on_before_optimizer_step", "on_after_backward", "configure_gradient_clipping", "backward"
    )),
    ("optimizer_step of the module", {"module": hooked(optimizer_step=1)}, Overlap.OFF),
    ("a whole-model optimizer", {"module": Hooked("LBFGS")}, Overlap.OFF),
]  # fmt: skip


@pytest.mark.parametrize(("options", "expected"), [entry[1:] for entry in CHOICES], ids=[entry[0] for entry in CHOICES])
def test_auto_takes_the_most_that_is_exact(options: dict[str, Any], expected: Overlap) -> None:
    assert choose(**options).overlap is expected


LENDS: list[tuple[str, dict[str, Any], bool]] = [
    ("nothing in the way", {}, True),
    ("clipping by norm", NORM, True),
    ("passive callbacks", {"callbacks": [EarlyStopping("loss"), Timer(), LearningRateMonitor()]}, True),
    ("the CPU", {"device_type": "cpu"}, False),
    ("several micro-batches", {"accumulate_grad_batches": 2}, False),
    ("several micro-batches later", {"callbacks": [GradientAccumulationScheduler({0: 1, 4: 2})]}, False),
    *((f"{name} of a callback", {"callbacks": [a_callback(name)]}, False) for name in (
        "on_before_zero_grad", "on_train_batch_end", "on_after_backward", "on_before_optimizer_step"
    )),
    ("averages", {"callbacks": [EMAWeightAveraging()]}, False),
    ("a class derived from Lightning's", {"callbacks": [MyStopping("loss")]}, False),
    ("callbacks that only set up", {"callbacks": [a_callback("on_fit_start", "setup", "on_exception")]}, True),
    ("manual optimization", {"module": manual()}, False),
    *((f"{name} of the module", {"module": hooked(**{name: 1})}, False) for name in (
        "optimizer_zero_grad", "configure_gradient_clipping", "on_train_batch_start", "lr_scheduler_step"
    )),
]  # fmt: skip


PASSES: list[tuple[str, dict[str, Any], tuple[bool, bool]]] = [
    ("nothing in the way", {}, (True, False)),
    ("clipping by value", VALUE, (True, False)),
    ("clipping by norm", NORM, (False, True)),
    ("norms and a checkpoint callback", {**NORM, "callbacks": [ProTrainCheckpoint("never")]}, (False, True)),
    ("norms and a callback", {**NORM, "callbacks": [a_callback("on_after_backward")]}, (False, False)),
    ("forward asked for", {"choice": "forward", **NORM}, (False, False)),
    ("several micro-batches", {"accumulate_grad_batches": 2, **NORM}, (False, False)),
    ("the CPU", {"device_type": "cpu"}, (False, False)),
]


@pytest.mark.parametrize(("options", "expected"), [entry[1:] for entry in PASSES], ids=[entry[0] for entry in PASSES])
def test_gradients_pass_where_no_gradient_waits(options: dict[str, Any], expected: tuple[bool, bool]) -> None:
    plan = choose(**options)
    assert (plan.passes, plan.clipping_keeps) == expected


def test_gradients_of_hooked_weights_and_of_weights_without_optimizer_do_not_pass() -> None:
    module = hooked()
    handle = module.weight.register_hook(lambda gradient: gradient)
    assert not choose(module=module).passes
    handle.remove()
    assert choose(module=module).passes
    module.extra = nn.Parameter(torch.zeros(2))
    assert not choose(module=module).passes
    assert not choose(module=Hooked("Adagrad")).passes  # Its states exist before the first step.


def test_no_gradient_lies_in_a_copy_where_one_could_not() -> None:
    module = hooked()
    assert choose(module=module).lends
    handle = module.made.register_step_post_hook(a_hook)
    assert not choose(module=module).lends
    handle.remove()
    module.extra = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    assert choose(module=module).lends
    assert not choose(module=module, **NORM).lends  # type: ignore[arg-type]
    assert choose(module=module, **VALUE).lends  # type: ignore[arg-type]
    module.extra = nn.Parameter(torch.zeros(2).as_subclass(Odd))
    assert not choose(module=module).lends
    module.extra.requires_grad_(False)
    assert choose(module=module).lends


@pytest.mark.parametrize(("options", "expected"), [entry[1:] for entry in LENDS], ids=[entry[0] for entry in LENDS])
def test_gradients_lie_in_copies_where_nobody_may_look(options: dict[str, Any], expected: bool) -> None:
    assert choose(**options).lends is expected


class Foreign(torch.optim.SGD):
    """A class that is not PyTorch's own."""


def foreign() -> L.LightningModule:
    module = hooked()
    module.made = Foreign(module.parameters(), lr=0.1)
    return module


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("backward", NORM, r"gradient_clip_val=1.0 clips by norm.*\"forward\" or \"auto\""),
    ("backward", {"detect_anomaly": True}, "detect_anomaly=True"),
    ("backward", {"module": hooked(backward=1)}, "Mine overrides `backward`"),
    ("backward", {"module": hooked(configure_gradient_clipping=1)}, "`configure_gradient_clipping`"),
    ("backward", {"module": hooked(on_after_backward=1)}, "`on_after_backward` of Mine"),
    ("backward", {"callbacks": [a_callback("on_before_optimizer_step")]}, "`on_before_optimizer_step` of MyCallback"),
    ("forward", {"module": hooked(optimizer_step=1)}, "Mine overrides `optimizer_step`"),
    ("forward", {"module": manual()}, "optimization is manual"),
    ("forward", {"module": foreign()}, "Foreign is not known to step each parameter on its own"),
    ("backward", {"module": Hooked("LBFGS")}, "LBFGS"),
]


@pytest.mark.parametrize(("choice", "options", "message"), REFUSED)
def test_what_would_not_be_exact_is_refused(choice: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(choice, **options)


def test_the_strategy_refuses_before_anything_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProTrainStrategy, "_place", lambda *_: pytest.fail("placed"))
    with pytest.raises(ValueError, match="clips by norm"):
        run(MODELS["tied"](), "backward", **CLIPPING["norm"])
    for choice in (None, "sometimes"):
        with pytest.raises(ValueError, match=f"overlap_optimizer={choice!r}: give one of 'auto'"):
            ProTrainStrategy(overlap_optimizer=choice)


@pytest.mark.parametrize(
    ("options", "takes"),
    [
        (NORM, True),
        (VALUE, False),
        ({}, False),
        ({**NORM, "module": hooked(on_after_backward=1)}, False),
        ({**NORM, "module": hooked(configure_gradient_clipping=1)}, False),
        ({**NORM, "callbacks": [a_callback("on_before_optimizer_step")]}, False),
    ],
)
def test_norms_are_taken_early_where_nobody_changes_gradients(options: dict[str, Any], takes: bool) -> None:
    assert choose(**options).take_norms is takes


# --- the same bits ----------------------------------------------------------------------------------------------------


class Scheduled(ParityModule):
    """Has a scheduler that is asked after every step, and validates in the middle of the epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses.append(self.loss(batch[0], batch_idx).detach().clone())

    def val_dataloader(self) -> Any:
        return token_batches()


def scheduled() -> Scheduled:
    return Scheduled(network())


class Reader(L.Callback):
    """Looks at weights in every hook that comes after a step, and keeps an average and histograms."""

    def __init__(self, hook: str) -> None:
        self.seen: list[Tensor] = []
        self.average: dict[str, Tensor] = {}
        setattr(self, hook, self._look)

    def _look(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        norms = [parameter.norm().detach() for parameter in pl_module.parameters()]
        histogram = torch.histc(next(pl_module.parameters()).detach(), 7)
        for name, parameter in pl_module.named_parameters():
            value = self.average.setdefault(name, parameter.detach().clone())
            value.lerp_(parameter.detach(), 0.2)
        self.seen += [torch.stack(norms), histogram, *(value.clone() for value in self.average.values())]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "hook",
    ["on_train_batch_end", "on_train_batch_start", "on_train_epoch_end", "on_validation_start", "on_train_end"],
)
@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_readers_see_whole_weights(overlap: str, hook: str) -> None:
    options = {"max_epochs": 2, "val_check_interval": 5, "num_sanity_val_steps": 0}
    expected, found = Reader(hook), Reader(hook)
    run(scheduled(), callbacks=[expected], **options)
    run(scheduled(), overlap, callbacks=[found], **options)
    assert len(expected.seen) == len(found.seen) > 0
    assert all(torch.equal(one, other) for one, other in zip(expected.seen, found.seen, strict=True))


# --- that it happens at all -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["backward", "forward", "off"])
def test_steps_are_taken_by_the_worker(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[int] = []
    submit = AsyncStep._submit

    def count(self: AsyncStep, index: int, *rest: Any) -> None:
        submitted.append(index)
        submit(self, index, *rest)

    monkeypatch.setattr(AsyncStep, "_submit", count)
    run(MODELS["tied"](), overlap)
    assert len(submitted) >= 3 * 13 if overlap != "off" else not submitted


def test_a_resident_plan_overlaps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AccessGuard, "watch", lambda *_: pytest.fail("watched"))
    assert differences(run(MODELS["tied"]()), run(MODELS["tied"](), "backward", "resident")) == []
