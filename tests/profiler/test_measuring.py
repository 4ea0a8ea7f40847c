"""A step that depends on values is measured in a real step, and the model is unchanged afterwards."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.fake_mode import DataDependentError, MetaMode
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.real_mode import RealMode, _Source
from lightning_protrain.profiler.records import ModelProfile, castable
from tests.profiler.against_real_run import PRECISIONS, check_against_real_run, loss_of, photograph
from tests.profiler.models import CASES, tokens
from tests.support.models import LanguageModel, Mlp

MEASURED = r"run once on 'cpu' to measure it, because it cannot be traced: .*"


class Routed(nn.Module):
    """A block of two experts, each of which gets the tokens whose first feature has its sign."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Mlp(), Mlp()])
        self.register_buffer("load", torch.zeros(2))

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, 1)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (chosen,) = ((flat[:, 0] > 0) == bool(number)).nonzero(as_tuple=True)
            self.load[number] += len(chosen)
            if len(chosen):
                result = result.index_add(0, chosen, expert(flat[chosen]))
        return hidden + result.view_as(hidden)


class Shortened(nn.Module):
    """A block that drops positions; how many is the value of a floating-point tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.share = nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        kept = max(int(float(torch.sigmoid(self.share)) * hidden.shape[1]), 1)
        return self.mlp(hidden[:, :kept])


def measured(model: nn.Module, step: Callable[[], object], precision: str = "32-true") -> ModelProfile:
    with pytest.warns(UserWarning, match=MEASURED):
        return profile_model(model, describe_model(model), step, PRECISIONS[precision])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("block", [Routed, Shortened])
@pytest.mark.filterwarnings("ignore:The training step is measured")
def test_what_depends_on_values_is_measured(block: Callable[[], nn.Module], precision: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel([block(), block()])
    batch = torch.arange(24).reshape(2, 12) % 16
    step = lambda: loss_of(model(batch))  # noqa: E731
    profile = check_against_real_run(model, step, PRECISIONS[precision])
    assert "needs the values" in profile.measured
    assert profile.segments
    assert profile.flops > 0
    assert "blocks.0" in {segment.unit for segment in profile.segments}


@pytest.mark.parametrize("block", [Routed, Shortened])
def test_a_model_without_weights_is_measured_too(block: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = LanguageModel([block() for _ in range(4)])
    batch = torch.arange(24).reshape(2, 12) % 16
    profile = measured(model, lambda: loss_of(model(batch)), "bf16-mixed")
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())
    assert all(buffer.is_meta for buffer in model.buffers())
    assert profile == measured(model, lambda: loss_of(model(batch)), "bf16-mixed")
    assert "head.weight" in castable(profile, "bfloat16")


def launch(target: Tensor, *sources: Tensor) -> None:
    """Write the product of two tensors, rows by a row, through their addresses, as a kernel of Triton does."""
    views = [np.ctypeslib.as_array((ctypes.c_float * each.numel()).from_address(each.data_ptr())) for each in sources]
    result = (ctypes.c_float * target.numel()).from_address(target.data_ptr())
    np.ctypeslib.as_array(result)[:] = (views[0].reshape(-1, views[1].size) * views[1]).ravel()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, scale)
        result = torch.empty_like(hidden)
        launch(result, hidden, scale)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, scale = ctx.saved_tensors
        result = torch.empty_like(hidden)
        launch(result, gradient.contiguous(), scale)
        return result, (hidden * gradient).sum((0, 1))


class ScaledMlp(Mlp):
    """Scales its output in a kernel that no dispatch mode sees, or by an operation."""

    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.hides = hides
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        return Scaled.apply(hidden, self.scale) if self.hides else hidden * self.scale


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_kernels_that_read_addresses_are_measured(device: str) -> None:
    """Without memory behind a weight such a kernel would read address zero."""
    profiles = []
    for hides in (True, False):
        with torch.device(device):
            model = LanguageModel([ScaledMlp(hides), ScaledMlp(hides)])
        step = lambda: loss_of(model(tokens()))  # noqa: B023, E731
        profiles.append(measured(model, step) if hides else both_ways(model, step, "32-true")[1])
        assert all(parameter.grad is None for parameter in model.parameters())
    found, expected = profiles
    assert found.measured.startswith("Tensor.data_ptr in 'blocks.0' reads the values")
    assert [call.saved_bytes for call in found.calls] == [call.saved_bytes for call in expected.calls]


TRACEABLE = ["llama-tied", "mixtral", "gpt2", "bert", "mamba", "lora", "lstm", "llava", "transformer"]


def both_ways(model: nn.Module, step: Callable[[], Tensor], precision: str) -> list[ModelProfile]:
    """Traced, and measured because the step looks at its loss."""

    def looks() -> Tensor:
        loss = step()
        assert loss.tolist() == loss.tolist()
        return loss

    traced = profile_model(model, describe_model(model), step, PRECISIONS[precision])
    return [traced, measured(model, looks, precision)]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "device", "precision"),
    [
        (name, device, list(PRECISIONS)[(number + (device == "meta")) % 2])
        for number, name in enumerate(TRACEABLE)
        for device in ("cpu", "meta")
    ],
)
def test_records_are_those_of_a_trace(name: str, device: str, precision: str) -> None:
    with torch.device(device):
        model = CASES[name].build().train()
    inputs = CASES[name].inputs()
    traced, real = both_ways(model, lambda: loss_of(model(**inputs)), precision)
    assert real.measured
    assert replace(real, measured="") == traced


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was(fails: bool) -> None:
    model = LanguageModel([Routed(), nn.Sequential(Mlp(), nn.BatchNorm1d(4)), Routed()])
    model.head.weight.grad = torch.ones_like(model.head.weight)
    batch = torch.arange(8).reshape(2, 4)
    before = photograph(model)

    def step() -> Tensor:
        batch.add_(1).t_()
        torch.randperm(4), random.random(), np.random.rand()  # noqa: NPY002
        loss = model(batch.t()).sum()
        with torch.no_grad():
            model.head.weight.mul_(2)
        if fails:
            raise KeyError("in the end")
        return loss

    raised = pytest.raises(KeyError, match="in the end") if fails else nullcontext()
    with pytest.warns(UserWarning, match=MEASURED), raised:
        profile_model(model, describe_model(model), step)
    assert photograph(model) == before
    assert batch.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_the_model_itself_raises_is_raised_and_nothing_is_measured(recwarn: pytest.WarningsRecorder) -> None:
    model = LanguageModel([Mlp()])
    with pytest.raises(RuntimeError, match="reduction dim"):
        profile_model(model, describe_model(model), lambda: model.head(torch.ones(2, 3)).sum())
    assert not [warning for warning in recwarn if "measured" in str(warning.message)]
    routed = LanguageModel([Routed()])

    def wrong() -> Tensor:
        return F.cross_entropy(routed(tokens())[0], torch.zeros(3, dtype=torch.int64))

    with pytest.warns(UserWarning, match=MEASURED), pytest.raises(ValueError, match="batch_size"):
        profile_model(routed, describe_model(routed), wrong)


def test_measuring_can_be_ruled_out() -> None:
    model = LanguageModel([Routed(), Routed()])
    with pytest.raises(DataDependentError, match=r"nonzero.* in 'blocks\.0'"):
        profile_model(model, describe_model(model), lambda: model(tokens()).sum(), log_once=None)


def test_weights_have_memory_only_while_they_are_read() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
    one = 64 * 64 * 4
    mode = RealMode(model.parameters(), "cpu", limit=2 * one)
    with mode, torch.enable_grad():
        hidden = model(torch.ones(2, 64))
        with torch.no_grad():
            first = model[0](torch.ones(2, 64))
        hidden.sum().backward()
        again = model[0](torch.ones(2, 64))
        assert torch.equal(first, again)  # it was drawn anew
        assert first.std() > 0
    assert mode.peak_bytes == 2 * one
    assert all(parameter.is_meta for parameter in model.parameters())


def losses_with(limit: int) -> tuple[list[float], int]:
    """Return losses and gradients of two steps of a model on the meta device, and the peak of weights with memory."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
    losses = []
    with RealMode(model.parameters(), "cpu", limit) as mode, torch.enable_grad():
        for _ in range(2):
            inputs = torch.ones(2, 8, requires_grad=True)
            loss = model(inputs).square().sum()
            loss.backward()
            losses += [loss.item(), inputs.grad.sum().item()]
    return losses, mode.peak_bytes


@given(limit=st.integers(0, 8000))
def test_how_much_memory_weights_may_have_changes_no_value(limit: int) -> None:
    expected, everything = losses_with(1 << 20)
    found, peak = losses_with(limit)
    assert found == expected
    # The largest weight with its bias is read at one time, whatever the limit.
    assert peak <= min(everything, max(limit, 4 * (16 * 32 + 16)))


def _draw_anew(source: _Source) -> None:
    if not source._standing.nbytes():
        source._standing.resize_(source.nbytes)
        torch.empty(0).set_(source._standing).normal_()


@pytest.mark.parametrize("bug", ["", "memory stays", "other values come"])
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "memory stays":
        monkeypatch.setattr(_Source, "free", lambda self: None)
    elif bug:
        monkeypatch.setattr(_Source, "come", _draw_anew)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    with RealMode(model.parameters(), "cpu", 0) as mode, torch.no_grad():
        first, second = (model(torch.ones(1, 64)) for _ in range(2))
        present = [mode.storage(parameter).nbytes() for parameter in model.parameters()]
    assert (present != [0, 64 * 64 * 4]) == (bug == "memory stays")
    assert torch.equal(first, second) == (bug != "other values come")


def test_a_weight_that_the_step_changes_stays() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    with RealMode(model.parameters(), "cpu", limit=64 * 64 * 4), torch.no_grad():
        model[0].weight.fill_(1)
        model(torch.ones(2, 64))
        assert torch.equal(model[0](torch.ones(2, 64)), torch.full((2, 64), 64.0))


@pytest.mark.parametrize("mode", [MetaMode, RealMode])
def test_weights_that_are_there_are_read_where_they_lie(mode: Any) -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with mode([weight]) as inside:
        storage = inside.storage(weight)
    assert (storage._cdata == weight.untyped_storage()._cdata) == (mode is RealMode)
