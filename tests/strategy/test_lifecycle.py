"""One model through several runs: evaluation around fits, fits after fits, and runs that end with an exception."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.distributed import launch
from lightning_protrain.strategy import sharded_states
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.models import LanguageModel, Mlp, ValidationModule, token_batches
from tests.support.parity import snapshot
from tests.support.plans import PlanChoice, alternating, kept
from tests.support.trainers import QUIET

PLANS: dict[str, Callable[[nn.Module], PlanChoice]] = {
    "offload": lambda module: "offload",
    "kept": kept,
    "alternating": alternating,
    "resident": lambda module: "resident",
}
plans = pytest.mark.parametrize("plan", PLANS)


def alternately(chosen: Sequence[str], one: str, other: str) -> list[Any]:
    """Return every plan with each of `chosen`, in turns with True and False."""
    pairs = itertools.product(enumerate(PLANS), enumerate(chosen))
    return [
        pytest.param(plan, each, (p + c) % 2 == 0, id=f"{plan}-{each}-{other if (p + c) % 2 else one}")
        for (p, plan), (c, each) in pairs
    ]


class Breaking(torch.autograd.Function):
    """Passes on what it gets, and raises in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("planned, in backward")


class Module(ValidationModule):
    """Does everything a Trainer can ask for, and breaks where and when it is told to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(LanguageModel([Mlp(), Mlp(), Mlp()]))
        self.breaks = ""
        self.error: BaseException = ArithmeticError("planned")
        self.evaluated: list[Tensor] = []
        for block in self.network.blocks:
            block.up.register_forward_hook(lambda *_: self.maybe_break("block"))
        self.network.blocks[1].register_forward_hook(
            lambda module, args, output: (
                Breaking.apply(output) if self.breaks == "backward" and self.step == self.break_at else output
            )
        )
        self.step, self.break_at = 0, 3

    def maybe_break(self, where: str) -> None:
        if self.breaks == where and self.step == self.break_at:
            raise self.error

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.step = batch_idx
        self.maybe_break("before the step")
        loss = super().training_step(batch, batch_idx)
        self.maybe_break("after the step")
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.maybe_break("hook")

    def on_before_zero_grad(self, *args: Any) -> None:
        self.maybe_break("zero_grad")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.maybe_break("validation")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.evaluated.append(self.loss(batch[0], batch_idx))

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.network(batch[0])


def _trainer(module: nn.Module, plan: str | None, **options: Any) -> L.Trainer:
    strategy = "auto" if plan is None else ProTrainStrategy(plan=PLANS[plan](module))
    short = {"max_epochs": 1, "limit_train_batches": 6, "limit_val_batches": 2, "limit_test_batches": 3}
    return L.Trainer(accelerator="cpu", devices=1, strategy=strategy, **{**QUIET, **short, **options})


def _assert_equal(plain: Module, found: Module) -> None:
    for name in ("losses", "val_losses", "evaluated"):
        pairs = zip(getattr(plain, name), getattr(found, name), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), name
    values = snapshot(found)
    for name, value in snapshot(plain).items():
        assert torch.equal(value, values[name]), name


def _assert_clean(module: nn.Module) -> None:
    """Nothing of a plan is left on the module, and it can be used and copied like any other."""
    assert not any("forward" in vars(inner) for inner in module.modules())
    for parameter in module.parameters():
        assert not parameter._post_accumulate_grad_hooks
        assert not parameter._backward_hooks
        assert torch.isfinite(parameter).all()


def _compare(drive: Callable[[Module, str | None], Any], plan: str) -> tuple[Any, Any]:
    """Drives one module plainly and one under `plan`, which must end equal and clean; returns what `drive` returns."""
    modules, results = [], []
    for kind in (None, plan):
        module = Module()
        torch.manual_seed(1)
        results.append(drive(module, kind))
        modules.append(module)
    _assert_equal(*modules)
    _assert_clean(modules[1])
    return results[0], results[1]


# --- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("plan", "fits", "one_trainer"), alternately(["no fit", "before", "after", "around"], "one trainer", "new trainers")
)
def test_evaluation_with_and_without_fit(plan: str, fits: str, one_trainer: bool) -> None:
    data = token_batches(seed=7)

    def drive(module: Module, kind: str | None) -> list[Any]:
        shared = _trainer(module, kind)

        def trainer() -> L.Trainer:
            return shared if one_trainer else _trainer(module, kind)

        def evaluate() -> list[Any]:
            metrics = trainer().validate(module, verbose=False)
            trainer().test(module, data, verbose=False)
            return [metrics, trainer().predict(module, data)]

        results = evaluate() if fits != "after" else []
        if fits != "no fit":
            trainer().fit(module)
        return results + (evaluate() if fits in ("after", "around") else [])

    plain, found = _compare(drive, plan)
    assert len(plain) == len(found) > 0
    for one, other in zip(plain, found, strict=True):
        if isinstance(one[0], Tensor):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        else:
            assert one == other


@pytest.mark.parametrize("plan", ["offload", "resident"])
@pytest.mark.parametrize("inference_mode", [True, False])
def test_evaluation_plans_for_weights_alone(plan: str, inference_mode: bool) -> None:
    """No gradients and no optimizer states: what evaluation needs is less than what training needs."""
    module = Module()
    sizes: list[int] = []

    class Spy(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            sizes.append(trainer.strategy.plan.memory.total)

    trainer = _trainer(module, plan, callbacks=[Spy()], inference_mode=inference_mode, num_sanity_val_steps=0)
    trainer.validate(module, verbose=False)
    trainer.fit(module)
    assert len(sizes) == 2
    assert sizes[0] < sizes[1]


# --- fit after fit ----------------------------------------------------------------------------------------------------


@plans
def test_fits_with_changing_strategies(plan: str) -> None:
    def drive(module: Module, kind: str | None) -> None:
        for strategy in (kind, None, kind, kind and "offload"):
            _trainer(module, strategy, max_steps=5).fit(module)

    _compare(drive, plan)


@plans
def test_weights_changed_between_two_fits(plan: str) -> None:
    def drive(module: Module, kind: str | None) -> None:
        trainer = _trainer(module, kind, max_steps=4)
        trainer.fit(module)
        with torch.no_grad():
            module.network.head.weight.mul_(0.5)
            module.network.blocks[0].up.weight.data = torch.full_like(module.network.blocks[0].up.weight, 0.1)
        module.network.blocks[1] = Mlp()
        _trainer(module, kind, max_steps=4).fit(module)

    _compare(drive, plan)


# --- exceptions -------------------------------------------------------------------------------------------------------

PLACES = ("before the step", "block", "after the step", "backward", "hook", "zero_grad", "validation")


@pytest.mark.sample(5)
@pytest.mark.parametrize(("plan", "place", "same_trainer"), alternately(PLACES, "same trainer", "new trainer"))
def test_a_fit_after_an_exception(place: str, plan: str, same_trainer: bool) -> None:
    def drive(module: Module, kind: str | None) -> None:
        trainer = _trainer(module, kind, num_sanity_val_steps=0, accumulate_grad_batches=2)
        module.breaks = place
        module.break_at = {"zero_grad": 2, "validation": 5}.get(place, 3)
        with pytest.raises(ArithmeticError, match="planned"):
            trainer.fit(module)
        _assert_clean(module)
        module.breaks = ""
        again = trainer if same_trainer else _trainer(module, kind, accumulate_grad_batches=2)
        again.fit(module)

    _compare(drive, plan)


@pytest.mark.sample(4)
@plans
@pytest.mark.parametrize("place", ["block", "hook"])
@pytest.mark.leaves("signal_handlers")
def test_a_fit_after_control_c(place: str, plan: str) -> None:
    def drive(module: Module, kind: str | None) -> None:
        module.breaks, module.error = place, KeyboardInterrupt()
        with pytest.raises(SystemExit):
            _trainer(module, kind).fit(module)
        _assert_clean(module)
        module.breaks = ""
        _trainer(module, kind, max_steps=5).fit(module)

    _compare(drive, plan)


class SaveOnException(L.Callback):
    """Looks at the weights when a run breaks, as `OnExceptionCheckpoint` does."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.weights = snapshot(pl_module)


@plans
@pytest.mark.parametrize("place", ["block", "backward"])
def test_weights_are_true_when_a_run_breaks(place: str, plan: str) -> None:
    def drive(module: Module, kind: str | None) -> dict[str, Tensor]:
        saver = SaveOnException()
        module.breaks = place
        with pytest.raises(ArithmeticError):
            _trainer(module, kind, callbacks=[saver]).fit(module)
        return saver.weights

    plain, found = _compare(drive, plan)
    assert plain.keys() == found.keys() != set()
    assert all(torch.equal(value, found[name]) for name, value in plain.items())


class FailingDevice(CPUDevice):
    """Fails at calls from some moment on, as CUDA does after a kernel that has failed."""

    failing: tuple[str, ...] = ()

    def __getattribute__(self, name: str) -> Any:
        if name in super().__getattribute__("failing"):
            raise RuntimeError(f"the device is gone ({name})")
        return super().__getattribute__(name)

    def close(self) -> None:
        try:
            self.synchronize()
        finally:
            super().close()


@pytest.mark.sample(5)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "failing",
    [
        ("settle",),
        ("wait_host",),
        ("resize",),
        ("synchronize",),
        ("upload", "wait", "wait_host", "settle", "resize", "synchronize"),
    ],
    ids=lambda names: names[0] if len(names) == 1 else "everything",
)
def test_a_device_that_fails_hides_neither_the_cause_nor_keeps_its_host_memory(
    failing: tuple[str, ...], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FailingDevice(torch.device("cpu"))

    def fail(*_: Any) -> None:
        device.failing = failing
        raise KeyError("the cause")

    class Broken(Module):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if batch_idx == 2:
                block = self.network.blocks[1]
                hook = block.register_forward_hook if where == "forward" else block.register_full_backward_hook
                hook(fail)
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(launch, "open_device", lambda *_: device)
    module = Broken()
    trainer = _trainer(module, "offload")
    with pytest.raises(KeyError, match="the cause") as caught:
        trainer.fit(module)
    notes = getattr(caught.value, "__notes__", [])
    assert any("the device is gone" in note for note in notes) or failing in [("wait_host",), ("resize",)]
    assert not device.host._open
    assert device.worker._pool is None
    _assert_clean(module)
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    monkeypatch.undo()
    trainer.fit(Module())  # The same strategy, with a device that works.
    assert trainer.state.finished


class Reserved(L.Callback):
    """Notes how many bytes are reserved for states when a step begins, and when a checkpoint has been restored."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen.append(sum(piece.nbytes() for piece in trainer.strategy._states.reserved))


def test_memory_of_optimizer_states_is_reserved_until_the_first_step_makes_them(tmp_path: Any) -> None:
    """Resident states made between the activations of a first step would fragment the device's memory."""
    module, seen = Module(), Reserved()
    trainer = L.Trainer(**QUIET, strategy=ProTrainStrategy(plan=alternating(module)), callbacks=[seen], max_steps=3)
    trainer.fit(module)
    resident = [fqn for chunk in trainer.strategy.plan.chunks if chunk.resident for fqn in chunk.parameters]
    state = trainer.optimizers[0].state
    made = sum(
        value.nbytes for fqn in resident for value in state[module.get_parameter(fqn)].values() if value.dim() > 0
    )
    assert seen.seen == [made, 0, 0]
    assert made > 0
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    again, seen = Module(), Reserved()
    strategy = ProTrainStrategy(plan=alternating(again))
    trainer = L.Trainer(**QUIET, strategy=strategy, callbacks=[seen], max_steps=4)
    trainer.fit(again, ckpt_path=tmp_path / "file.ckpt")
    assert seen.seen == [0]  # Restored states have their own memory.


def test_a_run_begins_where_the_memory_of_states_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*given: Any) -> list[Any]:
        raise torch.OutOfMemoryError("planned")

    monkeypatch.setattr(sharded_states, "reserve_states", exhausted)
    module, seen = Module(), Reserved()
    L.Trainer(**QUIET, strategy=ProTrainStrategy(plan="resident"), callbacks=[seen], max_steps=2).fit(module)
    assert seen.seen == [0, 0]
