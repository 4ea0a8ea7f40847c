"""Clipping in tiles and over owners equals separate passes, or one rank, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_protrain.runtime.optim.fused import LINE, Clip
from lightning_protrain.runtime.optim.host_step import HostStep, ParamUpdate, hyperparameters
from lightning_protrain.runtime.optim.step import NormScratch, bound_norm, take_norms, total_norm
from lightning_protrain.runtime.shadow import InPlaceGrad

CLASSES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (AdamW, {}),
    (Adam, {"amsgrad": True}),
    (SGD, {"momentum": 0.9}),
    (Adagrad, {}),
    (NAdam, {}),  # takes its own step
    (AdamW, {"foreach": True}),  # the same
]
CLIPS: dict[str, Callable[[], Clip]] = {
    "coefficient": lambda: Clip(coefficient=torch.tensor(0.3)),
    "bound": lambda: Clip(bound=0.1),
    "bound of zero": lambda: Clip(bound=0.0),
    "both": lambda: Clip(0.5, torch.tensor(0.7)),
    "not a number": lambda: Clip(coefficient=torch.tensor(torch.nan)),
}


# --- clipping ---------------------------------------------------------------------------------------------------------
def clip_in_passes(clip: Clip, parameters: list[nn.Parameter]) -> None:
    if clip.bound is not None:
        torch.nn.utils.clip_grad_value_(parameters, clip.bound)
    for parameter in parameters if clip.coefficient is not None else ():
        assert parameter.grad is not None
        parameter.grad.mul_(clip.coefficient)


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, with whatever is no number."""
    return torch.equal(found.view(torch.int32), expected.view(torch.int32))


@settings(max_examples=60, deadline=None)
@given(
    case=st.sampled_from(CLASSES),
    clip=st.sampled_from(sorted(CLIPS)),
    sizes=st.lists(st.sampled_from([0, 1, LINE, 3 * LINE + 5, 1000, 4099]), min_size=1, max_size=5),
    tile=st.sampled_from([LINE, 4096]),
    copied=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_gradients_are_clipped_in_place(
    case: Any, clip: str, sizes: list[int], tile: int, copied: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    kind, options = case
    ours = [nn.Parameter(torch.randn(size)) for size in sizes]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    plain = options | ({"fused": True} if kind is not NAdam and not options.get("foreach") else {})
    optimizer, peer = kind(ours, lr=0.01, **options), kind(theirs, lr=0.01, **plain)
    host = HostStep(1, tile=tile)
    for _ in range(2):
        clipping, updates = CLIPS[clip](), []
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
            low = torch.empty_like(one, dtype=torch.bfloat16, requires_grad=False) if copied else None
            updates.append(ParamUpdate(one, one.grad, low))
        clip_in_passes(clipping, theirs)
        peer.step()
        host.step(optimizer, [(hyperparameters(optimizer.param_groups[0]), updates)], clipping)
        for update, other in zip(updates, theirs, strict=True):
            assert other.grad is not None
            assert same(update.gradient, other.grad)
            assert same(update.parameter.detach(), other.detach())
            if update.copy is not None and clip != "not a number":
                assert torch.equal(update.copy, other.detach().bfloat16())


def a_view(gradient: Tensor) -> Tensor:
    return torch.stack([gradient, gradient], -1)[..., 0]


@pytest.mark.parametrize("layout", [a_view, lambda gradient: gradient.t().contiguous().t()])
@pytest.mark.parametrize("clip", [name for name in CLIPS if name != "not a number"])
def test_gradients_that_do_not_lie_like_the_weight(clip: str, layout: Callable[[Tensor], Tensor]) -> None:
    """The kernel reads a copy of them, but they themselves are to be clipped, and once."""
    ours, theirs = nn.Parameter(torch.ones(9, 30)), nn.Parameter(torch.ones(9, 30))
    theirs.grad = torch.randn(9, 30)
    optimizer, peer = AdamW([ours]), AdamW([theirs], fused=True)
    gradient = layout(theirs.grad.clone())
    assert gradient.stride() != ours.stride()
    given = [(hyperparameters(optimizer.param_groups[0]), [ParamUpdate(ours, gradient)])]
    HostStep(1).step(optimizer, given, CLIPS[clip]())
    clip_in_passes(CLIPS[clip](), [theirs])
    peer.step()
    assert same(gradient.contiguous(), theirs.grad)
    assert same(ours.detach(), theirs.detach())


@pytest.mark.parametrize("strides", ["alike", "others"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_low_precision_are_scaled_in_that_of_their_weights(dtype: torch.dtype, strides: str) -> None:
    weight = torch.ones(3 * LINE + 5, 2)
    ours, theirs = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    gradient, coefficient = torch.randn_like(weight).to(dtype), torch.tensor(0.3)
    theirs.grad = gradient.float().mul_(coefficient)
    given = gradient.clone() if strides == "alike" else gradient.t().contiguous().t()
    optimizer, peer = AdamW([ours]), AdamW([theirs], fused=True)
    clip = Clip(coefficient=coefficient)
    updates = [(hyperparameters(optimizer.param_groups[0]), [ParamUpdate(ours, given)])]
    HostStep(1, tile=LINE).step(optimizer, updates, clip)
    peer.step()
    assert torch.equal(given, gradient)
    assert same(ours.detach(), theirs.detach())


def test_a_sparse_gradient_is_scaled_in_a_pass_of_its_own() -> None:
    table = nn.Parameter(torch.ones(4, 3))
    gradient = torch.sparse_coo_tensor([[1]], torch.ones(1, 3), (4, 3), check_invariants=True)
    optimizer = SGD([table], lr=1.0)
    clip = Clip(coefficient=torch.tensor(0.5))
    HostStep(1).step(optimizer, [(hyperparameters(optimizer.param_groups[0]), [ParamUpdate(table, gradient)])], clip)
    assert table.tolist() == [[1.0] * 3, [0.5] * 3, [1.0] * 3, [1.0] * 3]
    assert gradient.to_dense()[1].tolist() == [0.5] * 3


@pytest.mark.parametrize("bug", ["twice", "never"])
def test_a_wrong_number_of_scalings_would_be_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bugs."""
    apply, ours = Clip.apply, nn.Parameter(torch.ones(3 * LINE))
    monkeypatch.setattr(Clip, "apply", lambda self, given: [apply(self, given) for _ in range(2 * (bug == "twice"))])
    gradient, optimizer = torch.full_like(ours, 4.0), SGD([ours], lr=1.0)
    clip = Clip(coefficient=torch.tensor(0.5))
    HostStep(1).step(optimizer, [(hyperparameters(optimizer.param_groups[0]), [ParamUpdate(ours, gradient)])], clip)
    assert not torch.equal(gradient, torch.full_like(ours, 2.0))


# --- nothing is kept from one step to the next ------------------------------------------------------------------------
def load_state(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    for value in optimizer.state[parameter].values():
        value.mul_(2)


def repoint_data(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    parameter.data = parameter.detach() * 2


def repoint_state(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    state = optimizer.state[parameter]
    state["exp_avg"].data = state["exp_avg"] * 3
    state["exp_avg_sq"] = state["exp_avg_sq"] * 2


def delete_state(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    del optimizer.state[parameter]


def change_options(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    optimizer.param_groups[0].update(lr=0.5, betas=(0.5, 0.6), weight_decay=0.3, maximize=True)


def change_one_number(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    optimizer.param_groups[0].update(eps=1e-3)


CHANGES = [load_state, repoint_data, repoint_state, delete_state, change_options, change_one_number]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_between_steps_counts(
    change: Callable[[Optimizer, nn.Parameter], None], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(size)) for size in (1000, 77, 5000)]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizer, peer = AdamW(ours, lr=0.01), AdamW(theirs, lr=0.01, fused=True)
    host = HostStep(1, tile=LINE)
    for step in range(4):
        gradients = [torch.randn_like(parameter).to(dtype) for parameter in ours]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.float()
        peer.step()
        updates = [ParamUpdate(parameter, gradient) for parameter, gradient in zip(ours, gradients, strict=True)]
        host.step(optimizer, [(hyperparameters(optimizer.param_groups[0]), updates)])
        assert all(same(one.detach(), other.detach()) for one, other in zip(ours, theirs, strict=True))
        if step < 3:
            with torch.no_grad():
                change(optimizer, ours[step])
                change(peer, theirs[step])


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
    """Sums over ranks in threads."""

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
        assert all_same(holders, holders[:1] * len(holders))
    found = [next((grads[at] for grads in ranks if grads[at] is not None), None) for at in range(len(items))]
    return [parameter.grad for parameter in alone], found


def all_same(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
        for a, b in zip(one, other, strict=True)
    )


@settings(max_examples=40)
@given(st.lists(GIVEN, max_size=9))
def test_owners_clip_as_one_rank_that_has_all(items: list[Given]) -> None:
    assert all_same(*clip(items, max_norm=0.3))


def test_what_is_within_the_bound_stays_as_it_is() -> None:
    items = [Given(5, 0), Given(3, 1), Given(2, None)]
    _, found = clip(items, max_norm=1e9)
    assert all_same(gradients(items), found)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_known_to_all(bad: float) -> None:
    expected, found = clip([Given(4, 0, scale=bad), Given(3, 1), Given(2, None)], max_norm=1.0)
    assert found[1] is not None
    assert not found[1].any() or found[1].isnan().all()
    assert all_same(expected, found)


def _rank_by_rank(
    parameters: list[Tensor], max_norm: float, known: None, later: tuple[()], shared: set[int], node: Any
) -> None:
    """A mistake: every rank takes the norm of what it has, and a norm of norms is told."""
    square = sum((p.grad.norm() ** 2 for p in parameters if p.grad is not None), torch.zeros(()))
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, node.sum_of_node(square.reshape(1)).sqrt()[0])


def test_a_gradient_that_is_counted_by_every_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Given(37, 0), Given(20, 1), Given(11, None)]
    assert all_same(*clip(items, max_norm=0.3))
    monkeypatch.setitem(globals(), "bound_norm", _rank_by_rank)
    assert not all_same(*clip(items, max_norm=0.3))


def test_norms_that_are_told_in_half_precision_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Given(37, at % NUM_RANKS) for at in range(5)]
    tell = Node.sum_of_node
    monkeypatch.setattr(Node, "sum_of_node", lambda node, told: told.copy_(tell(node, told.half()).double()))
    assert not all_same(*clip(items, max_norm=0.3))


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


@pytest.mark.parametrize("max_norm", [0.3, 10.0, 1e9])  # The norm is 8.
@pytest.mark.parametrize("num_ranks", [1, NUM_RANKS])
def test_gradients_that_are_scaled_later_are_left_alone(num_ranks: int, max_norm: float) -> None:
    items = [Given(37, 0), Given(20, 1), Given(11, 2), Given(5, 0, present=False)]
    expected, _ = clip(items, max_norm)
    node: Any = Node() if num_ranks > 1 else None

    def run(rank: int) -> tuple[list[Tensor | None], Tensor | None]:
        parameters = [nn.Parameter(torch.zeros(item.numel)) for item in items]
        for parameter, grad, item in zip(parameters, gradients(items), items, strict=True):
            parameter.grad = grad if num_ranks == 1 or item.owner == rank else None
        # What has been taken stands for a gradient; the last ones are not stepped later.
        known = {id(p): torch.linalg.vector_norm(p.grad) for p in parameters[:2] if p.grad is not None}
        later = {id(p) for p in parameters[:2]}
        shared = {id(p) for p in parameters} if num_ranks > 1 else set[int]()
        factor = bound_norm(parameters, max_norm, known, later, shared, node)
        assert factor is not None
        for parameter in parameters[:2]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return [parameter.grad for parameter in parameters], factor

    with ThreadPoolExecutor(num_ranks) as pool:
        ranks = list(pool.map(run, range(num_ranks)))
    found = [next((grads[at] for grads, _ in ranks if grads[at] is not None), None) for at in range(len(items))]
    assert all_same(expected, found)
    assert all_same([factor for _, factor in ranks], [ranks[0][1]] * num_ranks)


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
