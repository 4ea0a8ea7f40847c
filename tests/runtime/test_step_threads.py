"""The step of the main thread has the threads that the plan counts on, and gives them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.runtime.optim.step import fused_host_step

MANY = 3


class Counting(torch.optim.Optimizer):
    """Notes on how many threads it steps; derived from no optimizer, whose step would call all hooks once more."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.seen: list[int] = []
        self.work: Callable[[], Any] = lambda: None

    def step(self, closure: Any = None) -> Any:
        result = closure()
        self.seen.append(torch.get_num_threads())
        self.work()
        return result


def weight(device: str = "cpu") -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2, device=device))
    parameter.grad = torch.ones_like(parameter)
    return parameter


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("threads", [None, 1, MANY])
def test_only_the_step_has_the_threads(threads: int | None) -> None:
    optimizer, outside = Counting([weight()]), []

    def note(*_: Any) -> None:
        outside.append(torch.get_num_threads())

    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(note)
    with fused_host_step(optimizer, note, "cuda", threads=threads) as final:
        optimizer.step(final)
        note()
    assert outside == [1, 1, 1, 1]
    assert optimizer.seen == [threads or 1]


@pytest.mark.usefixtures("one_thread")
def test_each_call_of_a_closure_has_those_of_before() -> None:
    parameter, seen = weight(), []
    optimizer = torch.optim.LBFGS([parameter], max_iter=4)

    def closure() -> Tensor:
        seen.append(torch.get_num_threads())
        optimizer.zero_grad()
        loss = (parameter - 3).pow(4).sum()
        loss.backward()
        return loss

    with fused_host_step(optimizer, closure, "cuda", threads=MANY) as final:
        optimizer.step(final)
        assert torch.get_num_threads() == 1
    assert len(seen) > 1
    assert set(seen) == {1}


def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("where", ["closure", "stepped", "step"])
def test_they_go_back_after_an_exception(where: str) -> None:
    optimizer = Counting([weight()])
    closure: Callable[[], Any] = fail if where == "closure" else lambda: None
    stepped: Any = fail if where == "stepped" else frozenset
    if where == "step":
        optimizer.work = fail
    with pytest.raises(ZeroDivisionError), fused_host_step(optimizer, closure, "cuda", stepped, MANY) as final:
        optimizer.step(final)
    assert torch.get_num_threads() == 1
    assert optimizer.seen == ([MANY] if where == "step" else [])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("devices", "elsewhere", "expected"),
    [
        (("cpu",), False, MANY),
        (("meta", "cpu"), False, MANY),
        (("meta",), False, 1),
        (("meta", "cpu"), True, 1),
    ],
    ids=["host", "both", "device", "stepped elsewhere"],
)
def test_without_host_parameters_nothing_changes(devices: Sequence[str], elsewhere: bool, expected: int) -> None:
    """The device here is `meta`, which stands for any other than the CPU."""
    parameters = [weight(device) for device in devices]
    optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=False)
    others = {id(parameters[-1])} if elsewhere else frozenset[int]()
    with fused_host_step(optimizer, lambda: None, "cuda", lambda: others, MANY) as final:
        final()
        assert torch.get_num_threads() == expected
