"""Uses of weights by a step and its recomputation, and the peak of live tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_protrain.planner.replay import recomputed
from lightning_protrain.profiler import profile
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.fake_mode import MetaMode, ShapeTensor
from lightning_protrain.profiler.ops import operation_cost
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.recorder import NEVER, LiveBytes, Recorder
from lightning_protrain.profiler.records import ParameterUse, castable
from tests.profiler.against_real_run import PRECISIONS
from tests.profiler.attention_block import Attention
from tests.profiler.models import CASES, tokens
from tests.support.models import zoo


class KeepsWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return hidden @ weight.to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.saved_tensors[0].t(), None


WEIGHT_USES: dict[str, tuple[Callable[[Tensor, Tensor], object], ParameterUse]] = {
    "autocast": (lambda x, w: F.linear(x, w), ParameterUse("w", ("bfloat16",))),
    "cast": (lambda x, w: x @ w.bfloat16(), ParameterUse("w", ("bfloat16",), 0, 0, 1)),
    "twice": (lambda x, w: F.linear(F.linear(x, w), w), ParameterUse("w", ("bfloat16",) * 2)),
    "other": (lambda x, w: x @ w.to(torch.float16), ParameterUse("w", ("float16",), 0, 0, 1)),
    "direct": (lambda x, w: x * w, ParameterUse("w", (), 1, 1)),
    "view": (lambda x, w: F.linear(x, w.t()), ParameterUse("w", (), 1)),
    "part": (lambda x, w: F.linear(x[:, :2], w[:, :2]), ParameterUse("w", (), 1)),
    "beside": (lambda x, w: F.linear(x, w) * w, ParameterUse("w", ("bfloat16",), 1, 1)),
    "dtype": (lambda x, w: F.linear(x.to(w.dtype), w), ParameterUse("w", ("bfloat16",), 0, 0, 1)),
    "type_as": (lambda x, w: F.linear(x.type_as(w), w), ParameterUse("w", ("bfloat16",), 0, 0, 1)),
    "saved": (lambda x, w: KeepsWeight.apply(x.bfloat16(), w), ParameterUse("w", ("bfloat16",), 0, 1, 1)),
    "changed": (lambda x, w: w.detach().add_(1), ParameterUse("w", (), 1)),
    "shape": (lambda x, w: x.expand(*w.shape), ParameterUse("w")),
}


@pytest.mark.parametrize("name", WEIGHT_USES)
def test_how_a_weight_is_used(name: str) -> None:
    compute, expected = WEIGHT_USES[name]
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(4, 4))
    inputs = torch.ones(4, 4, requires_grad=True)
    profile = profile_model(model, describe_model(model), lambda: compute(inputs, model.w), PRECISIONS["bf16-mixed"])
    assert profile.parameters == (expected,)
    assert castable(profile, "bfloat16") == ({"w"} if name == "autocast" else set())


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return gradient @ weight.t(), hidden.t() @ gradient


def test_an_autograd_function_gives_the_weight_itself_no_gradient() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(4, 4))
    apply = Product.apply
    step = lambda: apply(torch.ones(4, 4), model.w).sum()  # noqa: E731
    profile = profile_model(model, describe_model(model), step)
    assert model.w.grad is None
    assert profile.flops == 2 * 4**3


def test_a_block_that_runs_twice_has_two_calls() -> None:
    module = zoo()["reused"]()
    profile = profile_model(module, describe_model(module), lambda: module.loss(tokens(), 0), PRECISIONS["bf16-mixed"])
    twice = profile.calls[2:4]
    assert {call.name for call in twice} == {"network.blocks.1"}
    assert twice[0].saved_bytes == twice[1].saved_bytes > 0
    names = castable(profile, "bfloat16")
    assert "network.blocks.0.up.weight" in names
    assert "network.blocks.1.up.weight" not in names
    assert not names & {fqn for fqn, _ in twice[0].saved_casts}
    once = profile.calls[1]
    # The weights are 16 * 32 twice, their biases 32 and 16; autograd keeps copies of the weights alone.
    assert sum(nbytes for fqn, nbytes in once.saved_casts if fqn in names) == 2 * 16 * 32 * 2


def test_what_backward_does_is_not_counted() -> None:
    model = CASES["llama"].build().train()
    layout = describe_model(model)
    forward = profile_model(model, layout, lambda: model(tokens(), labels=tokens()).loss)
    both = profile_model(model, layout, lambda: model(tokens(), labels=tokens()).loss.backward())
    assert forward == both


class ReadsDtype(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.to(self.weight.dtype))


def test_what_a_recomputation_does_is_not_counted() -> None:
    model = nn.Sequential(ReadsDtype(4, 4, bias=False))
    inputs = torch.ones(4, 4, requires_grad=True)
    step = lambda: checkpoint(model, inputs, use_reentrant=False).sum()  # noqa: E731
    profile = profile_model(model, describe_model(model), step, PRECISIONS["bf16-mixed"])
    assert profile.parameters == (ParameterUse("0.weight", ("bfloat16",), 0, 0, 1),)


class Dropping(nn.Module):
    """A residual branch that ends with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + nn.functional.dropout(self.down(self.up(hidden).relu()), 0.5)


RECOMPUTED = {
    "linear": lambda: nn.Linear(8, 8),
    "activation at the end": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU()),
    "linear at the end": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
    "result saved": lambda: nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1)),
    "norm": lambda: nn.LayerNorm(8),
    "mask": Dropping,
    "attention": Attention,
}


class Counting(TorchDispatchMode):
    """Counts what takes time, as a profile does."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [
            [each for each in tree_leaves(some) if isinstance(each, Tensor)] for some in ((args, kwargs), result)
        ]
        self.counted += operation_cost(func, 0, *tensors) is not None
        return result


@pytest.mark.parametrize("block", RECOMPUTED)
def test_a_recomputation_ends_where_autograd_saves_last(block: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(RECOMPUTED[block]()))
    inner, hidden = model[1], torch.ones(1, 16, 8, requires_grad=True)
    mode = Counting()
    loss = checkpoint(inner, hidden, use_reentrant=False, context_fn=lambda: (nullcontext(), mode)).sum()
    loss.backward()
    profile = profile_model(model, describe_model(model, blocks=["1"]), lambda: model(torch.ones(1, 16, 8)).sum())
    (segment,) = [one for one in profile.segments if one.unit == "1"]
    assert sum(cost.count for cost in recomputed(segment.forward)) == mode.counted
    assert sum(cost.count for cost in segment.forward.operations) >= mode.counted


@pytest.mark.parametrize("traced", [False, True])
def test_a_shadow_counts_as_one_with_its_original(traced: bool) -> None:
    live = LiveBytes()
    with MetaMode() as mode:
        tensor = torch.ones(4, 6) if traced else torch.arange(24).reshape(4, 6)
        storage = mode.storage(tensor)
        nbytes = storage.nbytes()
        live.add(storage)
        live.add(storage)
        activation = live.find(storage)
        assert activation is not None
        assert live.now == nbytes
        shadow = live.shadow(tensor[1:].t(), activation)
        second = live.shadow(tensor, activation)
        assert (shadow.shape, shadow.stride(), shadow.storage_offset()) == ((6, 3), (1, 6), 6)
        assert isinstance(shadow, ShapeTensor) == traced
        assert traced or shadow.tolist() == tensor[1:].t().tolist()
        assert live.now == nbytes
        del tensor, storage
        assert activation.freed < activation.gone == NEVER
        del shadow
        assert live.now == nbytes
        activation.is_gradient = True
        del second
        assert (live.now, live.held_gradients, activation.gone) == (0, nbytes, live.time + 1)


@pytest.mark.parametrize("is_planted", [False, True])
def test_all_activations_of_a_step_are_freed(is_planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorders: list[Recorder] = []

    def recorder(*arguments: Any) -> Recorder:
        recorders.append(Recorder(*arguments))
        return recorders[-1]

    monkeypatch.setattr(profile, "Recorder", recorder)
    if is_planted:
        monkeypatch.setattr(LiveBytes, "_leave", lambda *_: None)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
    assert profile.profile_model(model, describe_model(model), lambda: model(torch.ones(2, 4)).sum()).segments
    gc.collect()
    assert (recorders[0]._live.now > 0) is is_planted
