"""In-place gradients: the same bits without memory of their own; `grad` is correct or raises."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.runtime.apply import RunOptions, apply_plan
from lightning_protrain.runtime.optim.async_step import Overlap
from lightning_protrain.runtime.optim.step import fused_host_step
from lightning_protrain.runtime.shadow import InPlaceGrad
from tests.runtime.applied import Applied, Net, adam, batches, differences, in_turns, mean_square
from tests.runtime.cases import CASES
from tests.runtime.low_precision import CASES_BY_DEVICE, assert_parity, low_layout, low_plan, mixed
from tests.runtime.overlapped import CLIPPINGS

Made = tuple[nn.Parameter, nn.Parameter]


def made() -> Made:
    """A parameter with a low gradient, and its like with the same gradient in the dtype of the weight."""
    torch.manual_seed(0)
    parameter, values = nn.Parameter(torch.randn(4, 3)), torch.randn(4, 3).bfloat16()
    like = nn.Parameter(parameter.detach().clone())
    parameter.grad, like.grad = InPlaceGrad(parameter, values), values.float()
    return parameter, like


def add_in_place(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad += 1


def set_data(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.data = torch.zeros(4, 3)


USES: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.grad.norm(),
    "item": lambda p: p.grad[0, 0].item(),
    "numpy": lambda p: p.grad.numpy().sum(),
    "tolist": lambda p: p.grad.tolist(),
    "all of it": lambda p: p.grad.isnan().any(),
    "another dtype": lambda p: p.grad.double().sum(),
    "detach": lambda p: p.grad.detach().sum(),
    "print": lambda p: str(p.grad),
    "copy": lambda p: copy.deepcopy(p.grad).sum(),
    "pickle": lambda p: pickle.loads(pickle.dumps(p.grad)).sum(),
    "memory": lambda p: p.grad.data_ptr() != 0,
    "shared memory": lambda p: p.grad.share_memory_().sum(),
    "in place": lambda p: p.grad.mul_(2).sum(),
    "plus": add_in_place,
    "data": set_data,
    "zero": lambda p: torch.optim.SGD([p]).zero_grad(set_to_none=False),
    "backward": lambda p: p.square().sum().backward(),
    "clipped by norm": lambda p: torch.nn.utils.clip_grad_norm_([p], 0.1),
    "clipped by value": lambda p: torch.nn.utils.clip_grad_value_([p], 0.1),
    "a step": lambda p: torch.optim.AdamW([p], foreach=False).step(),
    "a step of many": lambda p: torch.optim.AdamW([p], foreach=True).step(),
    "a fused step": lambda p: torch.optim.AdamW([p], fused=True).step(),
}


@pytest.mark.parametrize("use", USES)
def test_any_use_of_an_in_place_gradient_gets_the_gradient(use: str) -> None:
    parameter, like = made()
    found, expected = USES[use](parameter), USES[use](like)
    assert torch.equal(found, expected) if isinstance(found, Tensor) else found == expected
    assert torch.equal(parameter, like)
    assert parameter.grad is not None
    assert like.grad is not None
    assert torch.equal(parameter.grad, like.grad)
    assert parameter.grad.dtype == like.grad.dtype


@pytest.mark.parametrize("use", USES)
def test_any_use_of_an_in_place_gradient_after_the_step_raises(use: str) -> None:
    parameter, _ = made()
    assert isinstance(parameter.grad, InPlaceGrad)
    parameter.grad.give_up()
    with pytest.raises(RuntimeError, match=r'has been used in an optimizer step.*overlap_optimizer="off"'):
        USES[use](parameter)


@pytest.mark.parametrize("given_up", [False, True])
def test_what_needs_no_values_takes_no_memory(given_up: bool) -> None:
    parameter, like = made()
    low = parameter.grad
    assert isinstance(low, InPlaceGrad)
    if given_up:
        low.give_up()
    for name in ("dtype", "device", "shape", "layout", "is_sparse", "requires_grad", "nbytes", "ndim"):
        assert getattr(low, name) == getattr(like.grad, name)
    assert (low.numel(), low.size(), low.dim()) == (12, (4, 3), 2)
    assert parameter.grad is low
    torch.optim.SGD([parameter]).zero_grad()
    assert parameter.grad is None


def test_one_that_is_made_whole_while_a_worker_takes_its_norm() -> None:
    """A hook on the main thread reads gradients that are landing on the worker."""
    parameter, like = made()
    low = parameter.grad
    assert isinstance(low, InPlaceGrad)

    def meanwhile() -> None:
        low.downloads(lambda: None)
        low.whole()

    low.downloads(meanwhile)
    assert torch.equal(low.cast(), like.grad)
    assert parameter.grad is low.cast()


def test_a_step_that_may_be_writing_alone_reads_it() -> None:
    parameter, like = made()
    low = parameter.grad
    assert isinstance(low, InPlaceGrad)
    low.begin_step()
    assert like.grad is not None
    assert torch.equal(low.stored(), like.grad.bfloat16())
    for use in (low.cast, low.whole, low.norm):
        with pytest.raises(RuntimeError, match="has been used in an optimizer step"):
            use()


def test_reading_an_in_place_gradient_waits_for_its_download() -> None:
    parameter, like = made()
    low, waited = parameter.grad, list[str]()
    assert isinstance(low, InPlaceGrad)
    low.downloads(lambda: waited.append("landed"))
    assert torch.equal(low.cast(), like.grad)
    assert waited == ["landed"]
    assert parameter.grad is low  # A cast for the moment leaves it where it is.
    low.whole()
    assert waited == ["landed"] * 2
    assert low.cast() is low.stored() is low.whole() is parameter.grad


# --- trained ----------------------------------------------------------------------------------------------------------

WAYS = [way for way in itertools.product(Overlap, CLIPPINGS) if way != (Overlap.BACKWARD, "norm")]


@pytest.fixture
def wholes(monkeypatch: pytest.MonkeyPatch) -> list[InPlaceGrad]:
    """Return the in-place gradients that have moved to memory of their own."""
    found: list[InPlaceGrad] = []
    real = InPlaceGrad.whole
    monkeypatch.setattr(InPlaceGrad, "whole", lambda low: (found.append(low), real(low))[1])
    return found


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> list[InPlaceGrad]:
    """All that have been made."""
    found: list[InPlaceGrad] = []
    real = InPlaceGrad.__init__
    monkeypatch.setattr(InPlaceGrad, "__init__", lambda low, *given: (found.append(low), real(low, *given))[1])
    return found


@pytest.mark.sample(10)
@pytest.mark.parametrize("kind", ["cpu", "simulated"])
@pytest.mark.parametrize(("overlap", "clipping"), WAYS)
def test_parity(overlap: Overlap, clipping: str, kind: str, wholes: list[InPlaceGrad], lent: list[InPlaceGrad]) -> None:
    """Parity holds from the first step on, and no in-place gradient moves to memory of its own."""
    state = assert_parity(Net, mean_square, kind, overlap, lends=True, **CLIPPINGS[clipping])
    low = sum(len(chunk.parameters) for chunk in state.plan.chunks if chunk.streamed_dtype)
    assert len(lent) == (0 if overlap is Overlap.OFF else 4 * low)
    assert not wholes


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("case", "overlap", "accumulate"), in_turns((1, 2), CASES_BY_DEVICE, (Overlap.BACKWARD, Overlap.FORWARD)), ids=str
)
def test_parity_of_what_nobody_foresaw(case: tuple[str, str], overlap: Overlap, accumulate: int) -> None:
    """Hooks, several backwards and weights that are needed again cost memory, and change no bit."""
    name, kind = case
    build, step, _ = CASES[name]
    assert_parity(build, step, kind, overlap, accumulate=accumulate, lends=True)


def evaluated_before_the_step(model: nn.Module, state: Applied | None) -> dict[str, Tensor]:
    """Two steps, with an evaluation and a look at all gradients between backward and step."""
    optimizer, seen, step = adam(model), dict[str, Tensor](), mixed(mean_square)

    def closure(index: int, batch: Tensor) -> None:
        loss = step(model, batch, 0) if state is None else state.step(step, model, batch, 0)
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            later = step(model, batch, 0) if state is None else state.step(step, model, batch, 0, training=False)
        seen[f"evaluated {index}"] = later.clone()
        seen.update({f"{name} {index}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        if state is not None:
            state.runtime.settle()

    for index, batch in enumerate(batches(2)):
        whole = partial(closure, index, batch)
        if state is None:
            optimizer.step(whole)
            continue
        state.runtime.async_step.arm(optimizer, Overlap.FORWARD, lends=True)
        with fused_host_step(optimizer, whole, "cpu", state.runtime.async_step.launch) as final:
            optimizer.step(final)
        state.runtime.refresh()
    return seen | {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def test_a_copy_that_is_wanted_again_lets_the_gradient_go(wholes: list[InPlaceGrad]) -> None:
    torch.manual_seed(0)
    expected = evaluated_before_the_step(Net(), None)
    torch.manual_seed(0)
    model, device = Net(), CPUDevice(torch.device("cpu"))
    plan = low_plan(model, low_layout(model, mean_square))
    runtime = apply_plan(model, plan, low_layout(model, mean_square), device, RunOptions(lambda sentence: None))
    found = evaluated_before_the_step(model, Applied(model, plan, runtime, device))
    runtime.remove()
    assert differences(expected, found) == []
    assert len(wholes) == 2 * sum(len(chunk.parameters) for chunk in plan.chunks if chunk.streamed_dtype)


def test_a_plan_that_is_taken_off_before_the_step_leaves_gradients() -> None:
    grads = []
    for lends in (False, True):
        torch.manual_seed(0)
        model, device = Net(), CPUDevice(torch.device("cpu"))
        layout = low_layout(model, mean_square)
        plan = low_plan(model, layout)
        runtime = apply_plan(model, plan, layout, device, RunOptions(lambda sentence: None))
        runtime.async_step.arm(adam(model), Overlap.FORWARD, lends=lends)
        Applied(model, plan, runtime, device).step(mixed(mean_square), model, batches()[0], 0).backward()
        assert any(type(parameter.grad) is InPlaceGrad for parameter in model.parameters()) is lends
        runtime.remove()
        grads.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*grads, strict=True):
        assert type(other) is Tensor
        assert torch.equal(one, other)
