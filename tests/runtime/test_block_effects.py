"""Side effects of blocks (containers, random states, hooks, new data) are as without streaming."""

from __future__ import annotations

import random
from collections import UserDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.runtime.applied import PLANS, applied, batches

WIDTH = 8
WRAPS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "user dictionary": (lambda x: UserDict(x=x), lambda value: value["x"]),
    "namespace": (lambda x: SimpleNamespace(x=x), lambda value: value.x),
    "deque": (lambda x: deque([x]), lambda value: value[0]),
    "distribution": (lambda x: torch.distributions.Normal(x, 1.0), lambda value: value.loc),
    "nested": (lambda x: [{"a": (x,)}], lambda value: value[0]["a"][0]),
}


class Layer(nn.Module):
    """Scales what `draw` says, and hands the result over in a container."""

    def __init__(self, wrap: str = "nested", draw: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.wrap, self.draw = wrap, draw

    def forward(self, x: Tensor) -> Any:
        return WRAPS[self.wrap][0](torch.tanh(x @ self.weight) * self.gain * self.draw())


class Limited(Layer):
    """Gives its weight new data of limited norm in every forward."""

    def forward(self, x: Tensor) -> Any:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        return super().forward(x)


class Stack(nn.Module):
    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = WRAPS[block.wrap][1](block(x))
        return x.square().mean()


def losses(model: nn.Module, run: Callable[..., Tensor], rest: Callable[[], None]) -> list[Tensor]:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for batch in batches()[:4]:
        loss = run(batch[..., :1].expand(-1, WIDTH) if batch.shape[-1] != WIDTH else batch)
        loss.backward()
        rest()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def check(make: Callable[[], nn.Module], plan: Any) -> None:
    torch.manual_seed(0)
    plain = make()
    expected = losses(plain, plain, lambda: None)
    torch.manual_seed(0)
    with applied(make(), plan) as state:
        found = losses(state.model, lambda batch: state.step(lambda: state.model(batch)), state.runtime.settle)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        for (name, weight), other in zip(plain.named_parameters(), state.model.parameters(), strict=True):
            assert torch.equal(weight, other), name


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
@pytest.mark.parametrize("wrap", WRAPS)
def test_outputs_in_any_container_are_announced(wrap: str, plan: Any) -> None:
    check(lambda: Stack([Layer(wrap) for _ in range(3)]), plan)


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_random_states_repeat_in_recomputation(draw: Callable[[], float], plan: Any) -> None:
    check(lambda: Stack([Layer(draw=draw) for _ in range(3)]), plan)


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_new_data_given_in_a_forward_is_kept(plan: Any) -> None:
    check(lambda: Stack([Limited() for _ in range(3)]), plan)


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_gradient_hooks_run_in_the_order_of_registration(plan: Any) -> None:
    with applied(Stack([Layer() for _ in range(3)]), plan) as state:
        order: list[int] = []
        weight = state.model.blocks[1].weight
        for index in range(4):
            weight.register_hook(lambda _, index=index: order.append(index))
        losses(state.model, lambda batch: state.step(lambda: state.model(batch)), state.runtime.settle)
        assert order == [0, 1, 2, 3] * 4
