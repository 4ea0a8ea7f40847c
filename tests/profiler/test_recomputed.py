"""What a recomputation comes to is what the profile says, of every kind of end that a block can have."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.ops import operation_cost
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.records import OperationCost, Pass
from tests.profiler.attention_block import Attention


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
    assert sum(cost.count for cost in segment.forward.recomputed) == mode.counted
    assert sum(cost.count for cost in segment.forward.operations) >= mode.counted


def test_by_itself_a_pass_runs_again_as_a_whole() -> None:
    operations = OperationCost(1, 2, "float32"), OperationCost(3, 4, "float32")
    assert Pass(operations=operations).recomputed == operations
    assert Pass(operations=operations, recomputed_operations=()).recomputed == ()
    assert Pass(operations=operations, recomputed_operations=operations[:1]).recomputed == operations[:1]
