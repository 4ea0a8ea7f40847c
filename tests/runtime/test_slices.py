"""Row-wise modules run on slices of the tokens, and train as without them up to rounding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lightning_protrain.planner.plan import BlockPolicy, Plan
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.row_wise import Slices
from lightning_protrain.runtime.slices import run_in_slices
from tests.parity.test_peft import FORMS
from tests.runtime.applied import Block, Net, applied, batches, mean_square, train
from tests.support.models import HuggingFaceModule, ParityModule, _llama, zoo
from tests.support.parity import run
from tests.support.plans import PlanMaker, kept, place, plans, preset
from tests.support.simulated.device import SimulatedDevice

TOKENS = 5
PLANS = {
    **plans(),
    "checkpointed": lambda module: place(module, checkpointed=lambda index: True),
    "swapped": lambda module: place(module, swap_bytes=lambda index: 1 << 20),
}


def sliced(make: PlanMaker, module: ParityModule) -> Plan:
    """The plan of `make`, with every slice that the profile finds; it streams float32 weights whole."""
    plan = make(module)
    if isinstance(plan, str):
        plan = preset(module, plan)  # type: ignore[arg-type]
    batch = next(iter(module.train_dataloader()))
    step = partial(module.training_step, batch, 0)
    profile = profile_model(module, describe_model(module), step, slices=Slices(run_in_slices, 99, TOKENS))
    assert profile.sliced
    module.losses.clear()
    return replace(plan, slice_tokens=profile.slice_tokens, sliced=profile.sliced)


@pytest.mark.parametrize("shape", [(7, 4), (1, 7, 4), (2, 7, 4), (9, 2, 4), (2, 7, 2, 4)], ids=str)
def test_a_slice_has_no_more_tokens_than_allowed(shape: tuple[int, ...]) -> None:
    layer, seen, given = nn.Linear(4, 3), [], torch.randn(shape, requires_grad=True)

    def forward(part: Tensor) -> Tensor:
        assert part.is_contiguous()
        seen.append(part.shape[:-1].numel() // (shape[2] if len(shape) == 4 else 1))
        return layer(part)

    expected, whole = torch.autograd.grad(layer(given).square().sum(), [given, *layer.parameters()]), layer(given)
    made = run_in_slices(forward, given, 4)
    assert_close(made, whole, rtol=1e-5, atol=1e-6)
    rows = given.shape[: 1 if len(shape) == 2 else 2].numel()
    assert max(seen) <= 4
    assert sum(seen) == rows
    assert_close(torch.autograd.grad(made.square().sum(), [given, *layer.parameters()]), expected)
    assert sum(seen) == 2 * rows, "each slice runs again in backward"
    with torch.no_grad():
        assert_close(run_in_slices(forward, given, 4), whole, rtol=1e-5, atol=1e-6)
    assert run_in_slices(lambda part: part, given, rows) is given


@pytest.mark.sample(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", sorted({*zoo()} - {"dropout"}))
def test_training_is_that_without_slices_up_to_rounding(name: str, plan: str) -> None:
    """The optimizer is SGD: Adam turns differences of gradients near zero into whole steps."""
    expected = run(zoo()[name](optimizer="sgd"), limit_train_batches=4)
    module = zoo()[name](optimizer="sgd")
    found = run(module, sliced(PLANS[plan], module), limit_train_batches=4)
    assert_close(found.losses, expected.losses, rtol=1e-5, atol=0)
    assert_close(found.norms, expected.norms, rtol=1e-5, atol=1e-7)
    assert_close(found.weights, expected.weights, rtol=1e-4, atol=1e-6)


@pytest.mark.sample(3)
@pytest.mark.parametrize("form", ["lora", "lora with biases", "dora", "whole modules"])
@pytest.mark.parametrize("plan", ["kept", "checkpointed"])
def test_adapters_train_as_without_slices_up_to_rounding(form: str, plan: str) -> None:
    def make() -> ParityModule:
        torch.manual_seed(0)
        return HuggingFaceModule(FORMS[form](_llama(num_layers=3, tied=False)))

    expected, module = run(make(), limit_train_batches=4), make()
    found = run(module, sliced(PLANS[plan], module), limit_train_batches=4)
    assert_close(found.losses, expected.losses, rtol=1e-5, atol=0)
    assert_close(found.norms, expected.norms, rtol=1e-5, atol=1e-7)


# --- with streamed weights ------------------------------------------------------------------------------------------

NAMES = ("inp", *(f"blocks.{index}" for index in range(4)), "head")


def whole_blocks(make: Callable[[nn.Module], Plan], model: nn.Module) -> Plan:
    return replace(make(model), slice_tokens=2, sliced=NAMES)


@pytest.mark.parametrize("plan", ["kept", "checkpointed", "swapped"])
def test_streams_do_not_race_and_recomputed_slices_find_their_weights(plan: str) -> None:
    expected = train(Net(), mean_square)
    torch.manual_seed(0)
    expected = train(Net(), mean_square)
    torch.manual_seed(0)
    model, device = Net(), SimulatedDevice()
    with applied(model, partial(whole_blocks, PLANS[plan]), device) as state, device:
        found = train(model, mean_square, state)
    assert found.keys() == expected.keys()
    assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_without_the_weights_of_the_device_recomputed_slices_would_read_others() -> None:
    """The positive control: host parameters are registered when the slices run again."""
    torch.manual_seed(0)
    model, device = Net(), SimulatedDevice()
    with applied(model, partial(whole_blocks, kept), device) as state, device:
        for block in state.runtime._executor.context.blocks:
            block.recomputes_itself = False
        with pytest.raises(RuntimeError, match=r"host|device"):
            train(model, mean_square, state)


def test_forwards_are_restored_and_copies_are_plain() -> None:
    model = Net([Block() for _ in range(2)])
    own = {name: vars(module).get("forward") for name, module in model.named_modules()}
    make = lambda module: replace(kept(module), slice_tokens=2, sliced=("inp", "blocks.0", "head"))  # noqa: E731
    with applied(model, make) as state:
        state.step(mean_square, model, batches()[0], 0)
        copied = copy.deepcopy(model)
        assert {name: vars(module).get("forward") for name, module in copied.named_modules()} == own
        assert "forward" in vars(model.head)
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} == own


def test_evaluation_runs_on_slices_too() -> None:
    model, seen = Net([Block()]), list[int]()
    expected = model(batches()[0])
    model.blocks[0].norm.register_forward_hook(lambda module, given, made: seen.append(len(given[0])))
    make = lambda module: replace(kept(module), slice_tokens=2, sliced=("blocks.0",))  # noqa: E731
    with applied(model, make) as state, torch.no_grad():
        assert_close(state.step(model, batches()[0], training=False), expected)
    assert seen == [2, 2]


def test_a_plan_with_slices_is_read_back() -> None:
    plan: Any = replace(kept(Net()), slice_tokens=2, sliced=("blocks.0",))
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.does_anything
    assert all(block.policy is BlockPolicy.KEEP for block in plan.blocks)


def test_a_plan_that_slices_a_missing_module_is_refused_before_anything_is_placed() -> None:
    model = Net([Block()])
    own = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    make = lambda module: replace(kept(module), slice_tokens=2, sliced=("inp", "blocks.7.mlp", "other"))  # noqa: E731
    refused = pytest.raises(ValueError, match=r"runs 'blocks\.7\.mlp' on slices .* \(2 of the plan's 3 are missing\)")
    with refused, applied(model, make):
        pass
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == own
