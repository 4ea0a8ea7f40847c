"""Gradients that owners have are clipped to the bit as one rank with all of them would."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_protrain.runtime.optim.step import NormScratch, bound_norm, take_norms, total_norm
from lightning_protrain.runtime.shadow import InPlaceGrad

NUM_RANKS = 3


class Given(NamedTuple):
    """A parameter: its elements, who owns it (None: everybody has its gradient), and its gradient, if there is one."""

    numel: int
    owner: int | None
    present: bool = True
    scale: float = 1.0
    dtype: torch.dtype = torch.float32


GIVEN = st.builds(
    Given,
    st.integers(0, 40),
    st.one_of(st.none(), st.integers(0, NUM_RANKS - 1)),
    st.booleans(),
    st.sampled_from([1.0, 1e-6, 1e18, 3.7]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)


class Node:
    """Adds what ranks in threads tell each other."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(NUM_RANKS, timeout=20)
        self._told: list[Tensor] = []

    def sum_of_node(self, told: Tensor) -> Tensor:
        self._told.append(told.clone())
        self._barrier.wait()
        told.copy_(torch.stack(self._told).sum(0))
        self._barrier.wait()
        return told


def gradients(items: list[Given]) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(7)
    made = [torch.randn(item.numel, generator=generator).mul(item.scale).to(item.dtype) for item in items]
    return [grad if item.present else None for grad, item in zip(made, items, strict=True)]


def clip(items: list[Given], max_norm: float) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients clipped by one rank that has all, and by those that own them; the latter agree where several have."""
    alone = [nn.Parameter(torch.zeros(item.numel, dtype=item.dtype)) for item in items]
    for parameter, grad in zip(alone, gradients(items), strict=True):
        parameter.grad = grad
    torch.nn.utils.clip_grad_norm_(alone, max_norm)
    node: Any = Node()

    def run(rank: int) -> list[Tensor | None]:
        mine = [nn.Parameter(torch.zeros(item.numel, dtype=item.dtype)) for item in items]
        for parameter, grad, item in zip(mine, gradients(items), items, strict=True):
            parameter.grad = grad if item.owner in (None, rank) else None
        shared = {id(p) for p, item in zip(mine, items, strict=True) if item.owner is not None}
        bound_norm(mine, max_norm, None, (), shared, node)
        return [parameter.grad for parameter in mine]

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        ranks = list(pool.map(run, range(NUM_RANKS)))
    for at, item in enumerate(items):
        holders = [grads[at] for grads in ranks if grads[at] is not None]
        assert len(holders) == (0 if not item.present else NUM_RANKS if item.owner is None else 1)
        assert same(holders, holders[:1] * len(holders))
    found = [next((grads[at] for grads in ranks if grads[at] is not None), None) for at in range(len(items))]
    return [parameter.grad for parameter in alone], found


def same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
        for a, b in zip(one, other, strict=True)
    )


@settings(max_examples=40)
@given(st.lists(GIVEN, max_size=9))
def test_owners_clip_as_one_rank_that_has_all(items: list[Given]) -> None:
    assert same(*clip(items, max_norm=0.3))


def test_what_is_within_the_bound_stays_as_it_is() -> None:
    items = [Given(5, 0), Given(3, 1), Given(2, None)]
    _, found = clip(items, max_norm=1e9)
    assert same(gradients(items), found)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_known_to_all(bad: float) -> None:
    expected, found = clip([Given(4, 0, scale=bad), Given(3, 1), Given(2, None)], max_norm=1.0)
    assert found[1] is not None
    assert not found[1].any() or found[1].isnan().all()
    assert same(expected, found)


def _rank_by_rank(
    parameters: list[Tensor], max_norm: float, known: None, later: tuple[()], shared: set[int], node: Any
) -> None:
    """A mistake: every rank takes the norm of what it has, and a norm of norms is told."""
    square = sum((p.grad.norm() ** 2 for p in parameters if p.grad is not None), torch.zeros(()))
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, node.sum_of_node(square.reshape(1)).sqrt()[0])


def test_a_gradient_that_is_counted_by_every_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Given(37, 0), Given(20, 1), Given(11, None)]
    assert same(*clip(items, max_norm=0.3))
    monkeypatch.setitem(globals(), "bound_norm", _rank_by_rank)
    assert not same(*clip(items, max_norm=0.3))


def test_norms_that_are_told_in_half_precision_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Given(37, at % NUM_RANKS) for at in range(5)]
    tell = Node.sum_of_node
    monkeypatch.setattr(Node, "sum_of_node", lambda node, told: told.copy_(tell(node, told.half()).double()))
    assert not same(*clip(items, max_norm=0.3))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.data())
def test_known_norms_stand_for_gradients(sizes: list[int], data: st.DataObject) -> None:
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape)
    expected = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    known = {}
    for parameter in parameters:
        if data.draw(st.booleans()):
            assert parameter.grad is not None
            known[id(parameter)] = torch.linalg.vector_norm(parameter.grad)
            parameter.grad = None
    assert torch.equal(total_norm(parameters, known), expected)


@pytest.mark.parametrize("num_ranks", [1, NUM_RANKS])
def test_gradients_that_are_scaled_later_are_left_alone(num_ranks: int) -> None:
    items = [Given(37, 0), Given(20, 1), Given(11, 2), Given(5, 0, present=False)]
    expected, _ = clip(items, max_norm=0.3)
    node: Any = Node() if num_ranks > 1 else None

    def run(rank: int) -> tuple[list[Tensor | None], Tensor | None]:
        parameters = [nn.Parameter(torch.zeros(item.numel)) for item in items]
        for parameter, grad, item in zip(parameters, gradients(items), items, strict=True):
            parameter.grad = grad if num_ranks == 1 or item.owner == rank else None
        # What has been taken stands for a gradient; the last ones are not stepped later.
        known = {id(p): torch.linalg.vector_norm(p.grad) for p in parameters[:2] if p.grad is not None}
        later = {id(p) for p in parameters[:2]}
        shared = {id(p) for p in parameters} if num_ranks > 1 else set[int]()
        factor = bound_norm(parameters, 0.3, known, later, shared, node)
        assert factor is not None
        for parameter in parameters[:2]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return [parameter.grad for parameter in parameters], factor

    with ThreadPoolExecutor(num_ranks) as pool:
        ranks = list(pool.map(run, range(num_ranks)))
    found = [next((grads[at] for grads, _ in ranks if grads[at] is not None), None) for at in range(len(items))]
    assert same(expected, found)
    assert same([factor for _, factor in ranks], [ranks[0][1]] * num_ranks)


class Allocations(TorchDispatchMode):
    """Count elements of the tensors that operations make; what they fill or view is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(result, Tensor) and all(result is not each for each in args):
            self.elements += result.numel()
        return result


def low_gradients(sizes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    """Parameters with bf16 gradients, the first of which is stored column by column."""
    parameters = []
    for at, size in enumerate(sizes):
        values = torch.randn(size).bfloat16()
        values = values.t() if at == 0 else values
        parameter = nn.Parameter(values.float())
        parameter.grad = InPlaceGrad(parameter, values)
        parameters.append(parameter)
    return parameters


def test_norms_of_low_precision_gradients_make_no_memory_after_the_first() -> None:
    torch.manual_seed(0)
    parameters = low_gradients([(300, 70), (50,), (120, 33), (0, 4)])
    expected = [torch.linalg.vector_norm(parameter.grad.cast()) for parameter in parameters]  # type: ignore[union-attr]
    scratch = NormScratch()
    for elements in (300 * 70 + len(parameters), len(parameters)):  # The scratch and one scalar for each norm; scalars.
        norms: dict[int, Tensor] = {}
        with Allocations() as allocations:
            take_norms(parameters, norms, lambda: None, scratch)
        assert allocations.elements == elements
        assert all(torch.equal(norms[id(p)], each) for p, each in zip(parameters, expected, strict=True))
