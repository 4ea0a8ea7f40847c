"""Functions that keep weights on `ctx`, where autograd does not see them, are right under every activation policy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.planner.plan import Plan
from tests.runtime import swapped
from tests.runtime.applied import PLANS, WIDTH, Applied, Net, assert_same, mean_square, poison_released_memory, train
from tests.support.quantised import WIDTH as QUANTISED_WIDTH
from tests.support.quantised import linear_4bit
from tests.support.simulated.device import SimulatedDevice

pytestmark = swapped.small
RANK = 2
EVERY_PLAN: dict[str, Callable[[nn.Module], Plan]] = {**PLANS, **swapped.PLANS}


class FusedMlp(torch.autograd.Function):
    """An MLP with adapters as one autograd function with its own backward, like fused LoRA kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, low: Tensor, high: Tensor, down: Tensor, keeps: str) -> Tensor:
        hidden = torch.tanh(x @ up.t() + x @ low.t() @ high.t())
        ctx.save_for_backward(x, hidden)
        ctx.keeps = keeps
        ctx.weights = (up.t(), low, high, down.detach()) if keeps == "views" else (up, low, high, down)
        return hidden @ down.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden = ctx.saved_tensors
        up, low, high, down = ctx.weights
        up = up.t() if ctx.keeps == "views" else up
        inner = gradients[0] @ down * (1 - hidden.square())
        through = inner @ high
        of_low, of_high = through.t() @ x, inner.t() @ (x @ low.t())
        return inner @ up + through @ low, None, of_low, of_high, None, None


class FusedBlock(nn.Module):
    """A residual block around it; the two large weights are frozen."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.keeps = keeps
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False).requires_grad_(False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.low = nn.Linear(WIDTH, RANK, bias=False)
        self.high = nn.Linear(RANK, 2 * WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        weights = self.up.weight, self.low.weight, self.high.weight, self.down.weight
        mixed: Tensor = FusedMlp.apply(self.norm(hidden), *weights, self.keeps)
        return hidden + mixed


class FusedQuantised(torch.autograd.Function):
    """Keeps codes and their state, and dequantises in backward, as kernels for QLoRA do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, state: Any) -> Tensor:
        ctx.codes, ctx.state = codes, state
        return x @ dequantised(codes, state).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] @ dequantised(ctx.codes, ctx.state), None, None


def dequantised(codes: Tensor, state: Any) -> Tensor:
    import bitsandbytes as bnb

    found: Tensor = bnb.functional.dequantize_4bit(codes, state)
    return found


class QuantisedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, QUANTISED_WIDTH)
        self.base = linear_4bit("nf4", nested=True, bias=False).requires_grad_(False)
        self.out = nn.Linear(QUANTISED_WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.base.weight
        mixed = FusedQuantised.apply(self.inp(hidden), weight, weight.quant_state)
        return hidden + self.out(torch.tanh(mixed))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "weights": lambda: FusedBlock("weights"),
    "views": lambda: FusedBlock("views"),
    "codes": QuantisedBlock,
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Net([BLOCKS[kind]() for _ in range(4)]).to("cpu")


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)


def trained(model: nn.Module, state: Applied | None, accumulate: int = 1) -> dict[str, Tensor]:
    found = train(model, mean_square, state, optimizer=adam, accumulate=accumulate)
    assert state is None or state.num_live == 0
    return found


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_kernel_is_right_without_offloading(kind: str) -> None:
    """Else the rest would prove nothing."""
    if kind == "codes":
        block: Any = build(kind).blocks[0]
        hidden = torch.randn(3, QUANTISED_WIDTH, requires_grad=True)
        FusedQuantised.apply(hidden, block.base.weight, block.base.weight.quant_state).sum().backward()
        expected = torch.ones(3, QUANTISED_WIDTH) @ dequantised(block.base.weight, block.base.weight.quant_state)
        assert torch.equal(hidden.grad, expected)
        return
    shapes = [(3, WIDTH), (6, WIDTH), (RANK, WIDTH), (6, RANK), (WIDTH, 6)]
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=index != 1) for index, shape in enumerate(shapes)]
    tensors[4].requires_grad_(False)
    assert torch.autograd.gradcheck(lambda *given: FusedMlp.apply(*given, kind), tensors)


@pytest.mark.parametrize("plan", EVERY_PLAN)
@pytest.mark.parametrize("kind", BLOCKS)
def test_parity_where_released_memory_is_poisoned(kind: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_released_memory(monkeypatch)
    assert_same(lambda: build(kind), trained, EVERY_PLAN[plan])


@pytest.mark.sample(10)
@pytest.mark.parametrize("plan", EVERY_PLAN)
@pytest.mark.parametrize("kind", BLOCKS)
def test_parity_on_a_device_that_is_late(kind: str, plan: str) -> None:
    assert_same(lambda: build(kind), trained, EVERY_PLAN[plan], SimulatedDevice())


@pytest.mark.parametrize("plan", ["kept", "offload", "swapped"])
def test_gradients_that_are_accumulated(plan: str) -> None:
    assert_same(lambda: build("views"), partial(trained, accumulate=2), EVERY_PLAN[plan])
