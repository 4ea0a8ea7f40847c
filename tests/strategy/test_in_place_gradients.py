"""Trainers whose gradients lie in the memory of copies: plain Lightning's bits, and the host bytes that are planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_protrain import ProTrainStrategy
from lightning_protrain.planner.memory import host_terms
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.records import ModelLayout
from lightning_protrain.runtime.optim.bnb_optimizers import mean_state_bytes
from lightning_protrain.runtime.shadow import InPlaceGrad
from tests.support.machines import CPU
from tests.support.models import LanguageModel, Mlp, ParityModule, Wide, fit
from tests.support.parity import Result, differences, snapshot
from tests.support.parity import run as run_with_norms
from tests.support.trainers import QUIET

KINDS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW8bit": lambda p: bnb.optim.AdamW8bit(p, lr=1e-2, min_8bit_size=256),
    # Neither a fused kernel nor a table.
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}
MIXED: dict[str, Any] = {"precision": "bf16-mixed", "limit_train_batches": 5}
LOOPS: dict[str, dict[str, Any]] = {
    "alone": {},
    "norms clipped": {"gradient_clip_val": 0.5},
    "values clipped": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
}


class Module(ParityModule):
    """A parity module with an optimizer of `KINDS`; it calls `during` in every training step."""

    during: Callable[[Module, int], Any] | None = None

    def configure_optimizers(self) -> Any:
        return KINDS[self.optimizer](self.parameters())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.during is not None:
            self.during(self, batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses.append(self.loss(batch[0], batch_idx).detach().clone())

    val_dataloader = ParityModule.train_dataloader


def module(kind: str = "AdamW8bit") -> Module:
    torch.manual_seed(0)
    return Module(LanguageModel([Mlp() for _ in range(3)]), optimizer=kind)


def strategy(overlap: Any = "forward", **options: Any) -> ProTrainStrategy:
    return ProTrainStrategy(plan="offload", overlap_optimizer=overlap, monitor=False, **options)


def result(one: ParityModule) -> Result:
    return Result(tuple(one.losses), snapshot(one))


@functools.cache
def plain(kind: str, loop: str) -> Result:
    one = module(kind)
    fit(one, limit_val_batches=0, **MIXED, **LOOPS[loop])
    return result(one)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`lent` for each gradient in the memory of a copy, `whole` when one leaves it for memory of its own."""
    found: list[str] = []
    made, whole = InPlaceGrad.__init__, InPlaceGrad.whole
    monkeypatch.setattr(InPlaceGrad, "__init__", lambda low, *given: (found.append("lent"), made(low, *given))[1])
    monkeypatch.setattr(InPlaceGrad, "whole", lambda low: (found.append("whole"), whole(low))[1])
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("overlap", "loop"),
    [("backward", "alone"), ("backward", "values clipped"), *[("forward", loop) for loop in LOOPS], ("off", "alone")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_parity(kind: str, overlap: str, loop: str, events: list[str]) -> None:
    found = module(kind)
    fit(found, strategy=strategy(overlap), limit_val_batches=0, **MIXED, **LOOPS[loop])
    assert differences(plain(kind, loop), result(found)) == []
    lends = overlap != "off" and loop != "accumulated"
    assert set(events) == ({"lent"} if lends else set())


def test_hooks_see_gradients(events: list[str]) -> None:
    """A hook that may look at gradients gets ordinary tensors; the norms it sees are those of a plain run."""
    options = {**MIXED, "gradient_clip_val": 0.5, "limit_val_batches": 0}
    expected = run_with_norms(module(), **options)
    for overlap in ("auto", "forward"):
        found = run_with_norms(module(), None, strategy=strategy(overlap), **options)
        assert differences(expected, found) == []
    assert not events


@pytest.mark.filterwarnings("ignore:The loss is")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_no_numbers(bad: float) -> None:
    def spoil(one: Module, index: int) -> None:
        with torch.no_grad():
            one.network.head.weight.mul_(bad if index == 2 else 1.0)

    results = []
    for options in ({}, {"strategy": strategy(on_nonfinite="warn")}):
        one = module("AdamW")
        one.during = spoil
        fit(one, limit_val_batches=0, gradient_clip_val=0.5, **MIXED, **options)
        results.append(result(one))
    for expected, found in zip(results[0].weights.values(), results[1].weights.values(), strict=True):
        assert torch.equal(expected.isnan(), found.isnan())
        assert torch.equal(expected.nan_to_num(), found.nan_to_num())
    assert any(value.isnan().any() for value in results[0].weights.values())


def test_a_training_step_that_reads_a_gradient_is_told_that_it_is_gone() -> None:
    one = module()
    one.during = lambda one, index: index and one.network.head.weight.grad.norm()
    with pytest.raises(RuntimeError, match=r'has been used in an optimizer step.*overlap_optimizer="off"'):
        fit(one, strategy=strategy(), limit_val_batches=0, **MIXED)


def test_a_hook_on_a_parameter_reads_what_it_always_reads(events: list[str]) -> None:
    """The hook is registered in fit, after the strategy has looked for hooks."""
    results, seen = [], list[list[float]]()
    for options in ({}, {"strategy": strategy("backward")}):
        one, norms = module(), list[float]()

        def register(one: Module, index: int, norms: list[float] = norms) -> None:
            if index == 2:
                weight = one.network.blocks[1].up.weight
                weight.register_post_accumulate_grad_hook(lambda weight: norms.append(weight.grad.norm().item()))

        one.during = register
        fit(one, limit_val_batches=0, **MIXED, **options)
        results.append(result(one))
        seen.append(norms)
    assert differences(*results) == []
    assert seen[0] == seen[1] != []
    assert events.count("whole") == len(seen[0])


def test_an_exception_and_a_resumed_run(tmp_path: Path) -> None:
    whole, begun, resumed = module(), module(), module()
    options = {**MIXED, "limit_val_batches": 0, "max_epochs": 2}
    fit(whole, **options)

    def fail(one: Module, index: int) -> None:
        if one.current_epoch and index == 2:
            raise KeyError("in the middle")

    begun.during = fail
    saving = L.pytorch.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="last")
    with pytest.raises(KeyError, match="in the middle"):
        fit(begun, strategy=strategy(), callbacks=[saving], **{**options, "enable_checkpointing": True})
    assert not any(isinstance(parameter.grad, InPlaceGrad) for parameter in begun.parameters())
    again = L.Trainer(accelerator="cpu", devices=1, strategy=strategy(), **options, **QUIET)
    again.fit(resumed, ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    both = Result((*begun.losses[:5], *resumed.losses), snapshot(resumed))
    assert differences(result(whole), both) == []


def test_behind_a_run_nothing_stands_for_a_gradient() -> None:
    one = module()
    fit(one, strategy=strategy(), limit_val_batches=0, **MIXED)
    low = [name for name, parameter in one.named_parameters() if parameter.grad is None]
    assert {"network.blocks.0.up.weight", "network.head.weight"} <= set(low)
    assert not any(isinstance(parameter.grad, InPlaceGrad) for parameter in one.parameters())
    one.double()
    fit(one.float(), limit_val_batches=0, **MIXED)  # without a plan


class Looks(L.Callback):
    def on_before_zero_grad(self, *args: Any) -> None:
        pass


class Wides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 128, bias=False)
        self.blocks = nn.ModuleList(Wide() for _ in range(8))
        self.last = nn.Linear(128, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.first(tokens[..., None].float() / 32)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


def held(one: Module, layout: ModelLayout, plan: Plan) -> dict[str, int]:
    """Bytes of the host, in the middle of a run."""
    optimizer = one.optimizers(use_pl_optimizer=False)
    states = [value for state in optimizer.state.values() for key, value in state.items() if not key.startswith("qmap")]
    grads = [parameter.grad for parameter in one.parameters()]
    return {
        "parameters": sum(parameter.nbytes for parameter in one.parameters()),
        "low_precision_copies": sum(chunk.nbytes for chunk in plan.chunks if chunk.streamed_dtype is not None),
        "gradients": sum(grad.nbytes for grad in grads if grad is not None and not isinstance(grad, InPlaceGrad)),
        "optimizer_states": sum(value.nbytes for value in states if isinstance(value, Tensor)),
    }


@pytest.mark.parametrize(("kind", "expected"), [("AdamW8bit", 8.03), ("AdamW", 14.0)])
def test_bytes_are_as_planned(kind: str, expected: float) -> None:
    torch.manual_seed(0)
    one, made = Module(Wides(), optimizer=kind), strategy()
    found: dict[str, int] = {}

    def look(one: Module, index: int) -> None:
        if index == 3:
            assert made.plan is not None
            found.update(held(one, layout, made.plan))

    layout, one.during = describe_model(one), look
    fit(one, strategy=made, limit_val_batches=0, **MIXED)
    assert made.plan is not None
    low = {fqn for chunk in made.plan.chunks if chunk.streamed_dtype for fqn in chunk.parameters}
    assert low == {name for name, _ in one.named_parameters()}
    elements = sum(parameter.numel() for parameter in one.parameters())
    assert sum(found.values()) / elements == pytest.approx(expected, rel=0.01)
    state_bytes = mean_state_bytes([KINDS[kind](one.parameters())])
    lending = ModelLayout(layout.parameters, layout.units, layout.buffer_bytes, lends_copies=True)
    planned = host_terms(lending, made.plan, state_bytes)
    # At most one chunk is cast at one time, for its norm.
    assert planned.pop("landing_gradients") == max(4 * (chunk.nbytes // 2) for chunk in made.plan.chunks)
    assert sum(planned.values()) == pytest.approx(sum(found.values()), rel=0.01)
    assert planned["gradients"] == found["gradients"] == 0


@pytest.mark.parametrize(
    ("options", "lends"),
    [({}, True), ({"accumulate_grad_batches": 2}, False), ({"callbacks": [Looks()]}, False), ({"off": True}, False)],
    ids=["alone", "accumulated", "looked at", "off"],
)
def test_the_search_counts_them(options: dict[str, Any], lends: bool) -> None:
    made = ProTrainStrategy(
        overlap_optimizer="off" if options.pop("off", False) else "forward", device_memory="1MiB",
        num_persistent_chunks=0, hardware=CPU, monitor=False,
    )  # fmt: skip
    one = Module(Wides(), optimizer="AdamW")
    fit(one, strategy=made, limit_val_batches=0, **MIXED, **options)
    assert made.plan is not None
    assert made.plan.prediction is not None
    terms = next(phase for phase in made.plan.prediction.phases if phase.name == "step").host
    weights = sum(parameter.nbytes for parameter in one.parameters())
    assert terms["parameters"] == weights
    assert terms["gradients"] == (0 if lends else pytest.approx(weights, rel=0.05))
