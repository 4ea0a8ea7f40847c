"""Trainers whose gradients pass through a few host buffers: plain Lightning's bits, and the bytes that are planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_protrain import ProTrainStrategy
from lightning_protrain.config import Knobs
from lightning_protrain.planner.memory import (
    HostTooSmall,
    HostUse,
    StatesProblem,
    gradient_buffers_of,
    host_bytes,
    host_terms,
)
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.presets import make_plan
from lightning_protrain.planner.problem import Training, Workload
from lightning_protrain.planner.request import PlanRequest
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.runtime.grad_offload import GradientMemory
from lightning_protrain.runtime.optim.bnb_optimizers import mean_state_bytes
from lightning_protrain.runtime.optim.split_adamw import SplitAdamW
from lightning_protrain.runtime.param import OffloadedParam
from lightning_protrain.runtime.shadow import InPlaceGrad
from lightning_protrain.strategy import rehearsed_step
from tests.support.machines import CPU
from tests.support.models import ParityModule, Wide, fit
from tests.support.parity import Result, differences, snapshot
from tests.support.plan_cases import asking, case
from tests.support.trainers import QUIET

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW8bit": lambda p: bnb.optim.AdamW8bit(p, lr=1e-2, min_8bit_size=256),
    # Neither a fused kernel nor a table.
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "SplitAdamW": lambda p: SplitAdamW(p, lr=1e-2, moments="8bit"),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
}
TRUE: dict[str, Any] = {"precision": "bf16-true", "limit_train_batches": 5, "limit_val_batches": 0}
NUM_BLOCKS = 24


class Wides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(32, 128)
        self.blocks = nn.ModuleList(Wide() for _ in range(NUM_BLOCKS))
        self.last = nn.Linear(128, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.first(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


class Module(ParityModule):
    """A parity module with an optimizer of `KINDS`; it calls `during` in every training step."""

    during: Callable[[Module, int], Any] | None = None

    def configure_optimizers(self) -> Any:
        return KINDS[self.optimizer](self.parameters())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.during is not None:
            self.during(self, batch_idx)
        return super().training_step(batch, batch_idx)


def module(kind: str) -> Module:
    torch.manual_seed(0)
    return Module(Wides(), optimizer=kind)


def needed(kind: str, passes: bool) -> int:
    """Host bytes of the offload plan of the model in bfloat16."""
    one = module(kind).bfloat16()
    layout = replace(describe_model(one), passes_gradients=True)
    state_bytes = mean_state_bytes([one.configure_optimizers()])
    made = make_plan(StatesProblem(layout, state_bytes), "offload")
    buffers = gradient_buffers_of(layout, made.chunks, state_bytes) if passes else 0
    return host_bytes(layout, made.chunks, state_bytes, made.blocks, HostUse(gradient_buffers=buffers))


def strategy(kind: str, passes: bool = True, **options: Any) -> ProTrainStrategy:
    """A strategy for a host that is as small as the plan allows."""
    options = {"plan": "offload", "overlap_optimizer": "backward", "monitor": False, **options}
    return ProTrainStrategy(host_memory=needed(kind, passes), **options)


def result(one: ParityModule) -> Result:
    return Result(tuple(one.losses), snapshot(one))


def state_bytes_of(one: Module) -> int:
    return sum(
        value.nbytes
        for optimizer in one.trainer.optimizers
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and not key.startswith("qmap")
    )


def held(one: Module, made: ProTrainStrategy) -> int:
    """Bytes that the run holds on the host: weights, gradients in whichever memory, and optimizer states."""
    runtime = made._runtime
    assert runtime is not None
    grads = runtime._executor.grads
    own = grads._all_stay.allocated_bytes if grads._ring is not None else 0
    return runtime._device.host.allocated_bytes + own + state_bytes_of(one)


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Module, ProTrainStrategy], list[int]]:
    """Return a function that lists the bytes held whenever gradients get memory, and at the end of each step."""

    def watch(one: Module, made: ProTrainStrategy) -> list[int]:
        found: list[int] = []
        new, end = GradientMemory._new_block, OffloadedParam.end_step

        def new_block(memory: GradientMemory) -> Any:
            block = new(memory)
            if made._runtime is not None:
                found.append(held(one, made))
            return block

        def end_step(param: OffloadedParam) -> None:
            found.append(held(one, made))  # The states exist, and the gradient does as well.
            end(param)

        monkeypatch.setattr(GradientMemory, "_new_block", new_block)
        monkeypatch.setattr(OffloadedParam, "end_step", end_step)
        return found

    return watch


def planned(one: Module, plan: Plan) -> dict[str, int]:
    """Host memory that the plan counts, with the bytes that the states of the optimizer have."""
    layout = replace(describe_model(one), passes_gradients=True)
    numel = sum(parameter.numel() for parameter in one.parameters())
    return host_terms(layout, plan, state_bytes_of(one) / numel, asynchronous=False)


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["AdamW", "AdamW8bit", "NAdam", "SplitAdamW"])
@pytest.mark.parametrize("clipping", [{}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}])
def test_parity_and_bytes_as_planned(
    kind: str, clipping: dict[str, Any], peaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: list[InPlaceGrad] = []
    real = InPlaceGrad.whole
    monkeypatch.setattr(InPlaceGrad, "whole", lambda low: (whole.append(low), real(low))[1])
    expected, found, made = module(kind), module(kind), strategy(kind)
    fit(expected, **TRUE, **clipping)
    bytes_held = peaks(found, made)
    fit(found, strategy=made, **TRUE, **clipping)
    assert differences(result(expected), result(found)) == []
    assert made.plan is not None
    assert made.plan.gradient_buffers == 3
    assert not whole  # Else gradients would move to memory that nobody counts.
    terms = planned(found, made.plan)
    weights = sum(parameter.nbytes for parameter in found.parameters())
    assert terms["gradients"] < 0.2 * weights
    assert max(bytes_held) == pytest.approx(sum(terms.values()), rel=0.03)
    assert f"The host has memory for gradients of {made.plan.gradient_buffers} chunks" in " ".join(
        str(made.plan).split()
    )


def test_a_rehearsal_and_the_first_step_keep_all_gradients_where_states_will_be(
    peaks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lightning_protrain.strategy.plan_session.user_folder", lambda: tmp_path)
    rehearsed: list[int] = []
    measure = rehearsed_step.measure
    monkeypatch.setattr(rehearsed_step, "measure", lambda *given: (rehearsed.append(1), measure(*given))[1])
    expected, found = module("AdamW"), module("AdamW")
    made = strategy("AdamW", num_persistent_chunks=0, plan="auto", device_memory="3MiB", hardware=CPU, rehearse=True)
    fit(expected, **TRUE)
    bytes_held = peaks(found, made)
    fit(found, strategy=made, **TRUE)
    assert differences(result(expected), result(found)) == []
    assert rehearsed
    assert made.plan is not None
    assert made.plan.gradient_buffers == 3
    assert max(bytes_held) == pytest.approx(sum(planned(found, made.plan).values()), rel=0.03)


def test_a_resumed_run_has_states_and_never_all_gradients(tmp_path: Path, peaks: Any) -> None:
    whole, begun, resumed = module("AdamW"), module("AdamW"), module("AdamW")
    fit(whole, **TRUE, max_epochs=2)
    saving = L.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="last")
    fit(begun, strategy=strategy("AdamW"), callbacks=[saving], **{**TRUE, "enable_checkpointing": True})
    made = strategy("AdamW")
    bytes_held = peaks(resumed, made)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=made, **TRUE, **QUIET, max_epochs=2)
    trainer.fit(resumed, ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    both = Result((*begun.losses, *resumed.losses), snapshot(resumed))
    assert differences(result(whole), both) == []
    assert made.plan is not None
    assert max(bytes_held) <= 1.03 * sum(planned(resumed, made.plan).values())
    assert made.plan.gradient_buffers == 3


def test_the_memory_of_the_states_must_hold_the_gradients_of_the_first_step() -> None:
    """SGD has no states, so the first step needs memory for all gradients, and nothing is saved."""
    assert needed("SGD", passes=True) == needed("SGD", passes=False)


class Looks(L.Callback):
    def on_before_zero_grad(self, *args: Any) -> None:
        pass


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"callbacks": [Looks()]},
        {"hooked": True},
        {"frozen": True},
        {"overlap_optimizer": "off"},
        {"overlap_optimizer": "forward", "gradient_clip_val": 0.5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_makes_gradients_wait_has_memory_for_all_of_them(options: dict[str, Any]) -> None:
    one, options = module("AdamW"), dict(options)
    if options.pop("hooked", False):
        one.network.last.weight.register_hook(lambda gradient: gradient)
    if options.pop("frozen", False):  # A weight that is trained and that no optimizer steps.
        one.configure_optimizers = lambda: KINDS["AdamW"](one.network.blocks.parameters())  # type: ignore[method-assign]
    own = {"overlap_optimizer": options.pop("overlap_optimizer", "backward")}
    with pytest.raises(HostTooSmall, match="of host memory"):
        fit(one, strategy=strategy("AdamW", **own), **TRUE, **options)
    made = ProTrainStrategy(plan="offload", monitor=False, **own)
    fit(one, strategy=made, **TRUE, **options)
    assert made.plan is not None
    assert made.plan.gradient_buffers == 0


def test_gradients_have_memory_if_the_host_has() -> None:
    one, made = module("AdamW"), strategy("AdamW", passes=False)
    fit(one, strategy=made, **TRUE)
    assert made.plan is not None
    assert made.plan.gradient_buffers == 0


def test_reading_a_gradient_after_its_step_raises_and_after_the_run_it_is_none() -> None:
    one = module("AdamW")
    one.during = lambda one, index: index and one.network.last.weight.grad.norm()
    with pytest.raises(RuntimeError, match=r'has been used in an optimizer step.*overlap_optimizer="off"'):
        fit(one, strategy=strategy("AdamW"), **TRUE)
    assert not any(isinstance(parameter.grad, InPlaceGrad) for parameter in one.parameters())


def test_the_search_lets_gradients_pass_on_a_host_that_is_too_small_otherwise() -> None:
    options = {"plan": "auto", "device_memory": "3MiB", "hardware": CPU, "rehearse": False}
    plans = []
    for passes in (False, True):
        one, made = module("AdamW"), strategy("AdamW", passes, num_persistent_chunks=0, **options)
        fit(one, strategy=made, **TRUE)
        assert made.plan is not None
        plans.append(made.plan)
    assert [plan.gradient_buffers for plan in plans] == [0, 3]
    phases = [
        max(phase.host["gradients"] for phase in plan.prediction.phases if phase.host.get("gradients"))
        for plan in plans
        if plan.prediction
    ]
    assert phases[1] < 0.2 * phases[0]
    assert Plan.from_json(plans[1].to_json()) == plans[1]


def clipped(host_memory: int, keeps: bool = True) -> PlanRequest:
    """Ask for a plan of a run that clips by norm, on a device that holds few chunks."""
    one = module("AdamW").bfloat16()
    layout, batch = describe_model(one), one.train_dataloader().dataset[0:2]
    profile = profile_model(one, layout, lambda: one.training_step(batch, 0))
    training = Training("forward", clips=True)
    workload = Workload(layout, profile, state_bytes=4.0, training=training, clipping_keeps=keeps)
    knobs = Knobs(num_persistent_chunks=0) if host_memory > 1 << 30 else Knobs()
    return asking(case(), workload=workload, device_memory="2MiB", host_memory=host_memory, knobs=knobs)


@pytest.mark.slow
def test_a_plan_says_what_clipping_by_norm_costs() -> None:
    """In a plan, and in the refusal of a host that is too small for all gradients alone."""
    plan = clipped(1 << 40).plan()
    assert plan.prediction is not None
    (sentence,) = [sentence for sentence in plan.prediction.advice if "Gradients wait for their norm" in sentence]
    assert sentence == (
        'Gradients wait for their norm in 3.0 MiB of the host; with gradient_clip_algorithm="value", or without '
        "clipping, 384.0 KiB would do."
    )
    with pytest.raises(HostTooSmall, match='It fits with gradient_clip_algorithm="value", or without clipping, as a'):
        clipped(needed("AdamW", passes=True) + (1 << 18)).plan()
    with pytest.raises(HostTooSmall) as error:
        clipped(needed("AdamW", passes=True) + (1 << 18), keeps=False).plan()
    assert "gradient_clip_algorithm" not in str(error.value)
