"""Interceptions: what they find in outputs, what they refuse, and that they leave nothing behind."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from lightning_protrain.runtime.hooks import ViewWatch, find_tensors
from tests.runtime.applied import (
    PLANS,
    WIDTH,
    Block,
    Net,
    applied,
    assert_parity,
    batches,
    each_plan,
    mean_square,
    poison_released_memory,
)


@dataclass
class Packed:
    hidden: Tensor
    count: int = 0


class Named(NamedTuple):
    hidden: Tensor
    rest: tuple[Tensor, ...]


class Slotted:
    """An object of no known kind."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda hidden: (hidden, None, 3), lambda out: out[0]),
    "list": (lambda hidden: [[hidden]], lambda out: out[0][0]),
    "dict": (lambda hidden: {"hidden": hidden, "n": 1}, lambda out: out["hidden"]),
    "dataclass": (Packed, lambda out: out.hidden),
    "named tuple": (lambda hidden: Named(hidden, (hidden * 2,)), lambda out: out.rest[0]),
    "model output": (lambda hidden: BaseModelOutput(hidden_states=(hidden,)), lambda out: out.hidden_states[0]),
    "object": (Slotted, lambda out: out.hidden),
    "nested": (lambda hidden: {"a": [Packed(hidden)]}, lambda out: out["a"][0].hidden),
}


class Shaped(Block):
    """Takes and returns its hidden states in some form."""

    form = "tuple"

    def forward(self, packed: Any) -> Any:
        pack, unpack = FORMS[self.form]
        return pack(super().forward(unpack(packed)))


class ShapedNet(Net):
    def forward(self, hidden: Tensor) -> Tensor:
        pack, unpack = FORMS[self.blocks[0].form]
        packed = pack(self.inp(hidden))
        for block in self.blocks:
            packed = block(packed)
        return self.head(unpack(packed))


@each_plan
@pytest.mark.parametrize("form", FORMS)
def test_outputs_of_any_form(monkeypatch: pytest.MonkeyPatch, form: str, make: Any) -> None:
    poison_released_memory(monkeypatch)
    monkeypatch.setattr(Shaped, "form", form)
    assert_parity(lambda: ShapedNet([Shaped() for _ in range(3)]), make)


def test_tensors_are_found_in_depth_and_in_order() -> None:
    a, b, c, d = (torch.zeros(index) for index in range(4))
    found = list(
        find_tensors({"x": [a, (b, 1, None)], "y": Packed(c), "z": BaseModelOutput(hidden_states=(d,)), 1: Packed})
    )
    assert [tensor.numel() for tensor in found] == [0, 1, 2, 3]
    assert list(find_tensors("text")) == []


class Through(Block):
    """A block that returns its input, alone or beside a result of its own."""

    alone = False

    def forward(self, hidden: Tensor, before: Tensor) -> Any:
        return (hidden, before) if self.alone else (super().forward(hidden), hidden)


class ThroughNet(Net):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = before = self.inp(hidden)
        for block in self.blocks:
            hidden, before = block(hidden, before)
        return self.head(hidden + before)


@each_plan
def test_inputs_that_are_handed_through(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    poison_released_memory(monkeypatch)
    assert_parity(lambda: ThroughNet([Through() for _ in range(3)]), make)


def test_a_block_that_hands_everything_through_holds_nothing() -> None:
    model = ThroughNet([Through() for _ in range(3)])
    for block in model.blocks:
        block.alone = True
    with applied(model, PLANS["kept"]) as state:
        loss = state.step(mean_square, model, batches()[0], 0)
        before = state.device.counters.uploads
        loss.backward()
        assert state.device.counters.uploads - before <= 2  # The head and the first layer.


class Viewing(Block):
    """Returns a view."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)[:, :]


def changing_views(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    hidden = model.inp(batch)
    for block in model.blocks:
        hidden = block(hidden)
        hidden += 1
    return model.head(hidden).square().mean()


def test_a_view_changed_in_place_is_refused() -> None:
    with applied(Net([Viewing() for _ in range(3)])) as state:
        with pytest.raises(ValueError, match=r"'blocks\.0' is a view and was changed in place .*`output\.clone\(\)`"):
            state.step(changing_views, state.model, batches()[0], 0)
        state.runtime.reset()
        # Said of that step alone, and the next one is right.
        state.step(mean_square, state.model, batches()[0], 0).backward()


@each_plan
def test_views_that_stay_as_they_are(make: Any) -> None:
    state = assert_parity(lambda: Net([Viewing() for _ in range(3)]), make)
    assert state.sentences == []


def test_dead_views_are_forgotten() -> None:
    watch = ViewWatch()
    watch.add(torch.zeros(3)[:2], "block")
    watch.check()
    view = torch.zeros(3)[:2]
    watch.add(view, "block")
    view.add_(1)
    with pytest.raises(ValueError, match="'block'"):
        watch.check()
    watch.check()


class Position(nn.Module):
    """Returns its weight as it is, a part of it, or a copy."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
        self.form = form

    def forward(self, count: int) -> Any:
        part = {"whole": self.weight, "detached": self.weight.detach()[:count]}.get(self.form, self.weight[:count])
        return {"copy": part.clone(), "dict": {"part": part}}.get(self.form, part)


class PositionNet(Net):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.position = Position(form)

    def forward(self, hidden: Tensor) -> Tensor:
        position = self.position(len(hidden))
        hidden = super().forward(hidden)
        position = position["part"] if isinstance(position, dict) else position
        return hidden * position[: len(hidden)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("form", ["whole", "part", "detached", "dict"])
def test_a_unit_that_returns_its_weight_is_refused(form: str, training: bool) -> None:
    with applied(PositionNet(form)) as state, torch.set_grad_enabled(training):
        with pytest.raises(ValueError, match=r"'position' returns one of its weights.*`weight\.clone\(\)`"):
            state.step(mean_square, state.model, batches()[0], 0, training=training)
        assert state.model.position.weight.grad is None


@each_plan
def test_a_unit_that_returns_a_copy_of_its_weight(make: Any) -> None:
    assert_parity(lambda: PositionNet("copy"), make)


@pytest.mark.parametrize("pickling", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_pickling_an_applied_model_is_refused(pickling: Callable[[nn.Module], Any]) -> None:
    model = Net()
    with (
        applied(model),
        pytest.raises(
            ValueError, match=r"cannot be pickled while its plan is applied, which replaces the forward of 'inp'"
        ),
    ):
        pickling(model)
    pickling(model)


def test_a_copy_of_an_applied_model_is_a_plain_one() -> None:
    model = Net()
    before, kept = attributes(copy.deepcopy(model)), attributes(model)
    with applied(model) as state:
        state.step(mean_square, model, batches()[0], 0)
        during = attributes(model)
        whole, part = copy.deepcopy(model), copy.deepcopy(model.blocks)
        assert attributes(model) == during != kept
        assert [names for _, names, _ in attributes(whole)] == [names for _, names, _ in before]
        for copied, original in ((whole, model), (part, model.blocks)):
            assert {each: (type(p), p.grad, p._backward_hooks) for each, p in copied.named_parameters()} == {
                each: (nn.Parameter, None, None) for each, _ in original.named_parameters()
            }
            for (name, value), (_, expected) in zip(
                copied.named_parameters(), original.named_parameters(), strict=True
            ):
                assert torch.equal(value, expected), name
                assert value.data_ptr() != expected.data_ptr()
        expected = model(batches()[0])
    assert torch.equal(whole(batches()[0]), expected)
    assert attributes(model) == kept
    pickle.dumps(whole)


def attributes(model: nn.Module) -> list[tuple[str, list[str], list[int]]]:
    """Names and identities of everything in every module's `__dict__`, and what its dictionaries hold."""
    found = []
    for name, module in model.named_modules():
        held = [id(value) for value in vars(module).values()]
        inner = [id(value) for values in vars(module).values() if isinstance(values, dict) for value in values.values()]
        found.append((name, list(vars(module)), held + inner))
    return found


def test_removal_leaves_every_module_as_it_was() -> None:
    model = Net()
    own = functools.partial(Block.forward, model.blocks[1])
    model.blocks[1].forward = own
    before = attributes(model)
    with applied(model) as state:
        assert "forward" in vars(model.blocks[0])
        assert model.blocks[1].forward is not own
        state.step(mean_square, model, batches()[0], 0).backward()
    assert attributes(model) == before
    assert model.blocks[1].forward is own


def test_a_forward_of_the_instance_is_the_one_that_runs() -> None:
    def build() -> nn.Module:
        model = Net()
        for block in model.blocks:
            block.forward = lambda hidden, block=block: Block.forward(block, hidden) * 0.5
        return model

    assert_parity(build, PLANS["checkpointed"])


def test_signatures_are_those_of_the_forward() -> None:
    model = Net()
    before = inspect.signature(model.blocks[0].forward)
    with applied(model):
        assert inspect.signature(model.blocks[0].forward) == before
        assert model.blocks[0].forward.__doc__ == Block.forward.__doc__


@pytest.mark.parametrize("plan", ["kept", "checkpointed"])
def test_hooks_of_the_user_fire(plan: str) -> None:
    """Hooks on a block fire once in every forward; hooks inside a checkpointed block also fire in the recomputation."""
    calls: list[str] = []
    model = Net()

    def watch(module: nn.Module, name: str) -> None:
        module.register_forward_pre_hook(lambda *_: calls.append(f"{name} before"))
        module.register_forward_hook(lambda *_: calls.append(f"{name} after"))
        module.register_full_backward_hook(lambda *_: calls.append(f"{name} backward"))

    watch(model.blocks[0], "block")
    watch(model.blocks[0].up, "inside")
    with applied(model, PLANS[plan]) as state:
        loss = state.step(mean_square, model, batches()[0], 0)
        assert calls == ["block before", "inside before", "inside after", "block after"]
        calls.clear()
        loss.backward()
    again = ["inside before", "inside after"] if plan == "checkpointed" else []
    assert [call for call in calls if call != "inside backward"] == [*again, "block backward"]
    assert "inside backward" in calls


def test_hooks_that_replace_inputs_and_outputs() -> None:
    def build() -> nn.Module:
        model = Net()
        model.blocks[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
        model.blocks[1].register_forward_hook(lambda module, inputs, output: output.tanh())
        return model

    for plan in PLANS.values():
        assert_parity(build, plan)
