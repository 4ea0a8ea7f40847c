"""Tile by tile, on threads, in low precision, over chunks: bitwise what PyTorch's own step does to whole tensors."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_protrain.runtime.optim import host_step
from lightning_protrain.runtime.optim.fused import LINE, NO_CLIP
from lightning_protrain.runtime.optim.host_step import (
    FlatUpdate,
    Given,
    HostStep,
    ParamUpdate,
    hyperparameters,
)
from lightning_protrain.runtime.optim.threads import MOST_THREADS, StepThreads

# The scalar loop of a kernel must have something to differ in: sizes around vectors, cache lines and tiles.
SIZES = [0, 1, 7, LINE - 1, LINE, LINE + 1, 3 * LINE + 5, 10 * LINE, 1000, 4099]
FUSED: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (AdamW, {}),
    (AdamW, {"amsgrad": True, "maximize": True}),
    (AdamW, {"lr": torch.tensor(0.01), "weight_decay": 0.3}),
    (Adam, {"weight_decay": 0.1, "betas": (0.7, 0.9), "eps": 1e-3}),
    (Adam, {"amsgrad": True}),
    (Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (SGD, {}),
    (SGD, {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    (Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1}),
    (Adagrad, {"maximize": True}),
]
OTHERS = ["Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]


@pytest.fixture
def host() -> Iterator[HostStep]:
    made = HostStep(2, tile=LINE)
    yield made
    made.close()


def parameters(sizes: list[int], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in sizes]


def both(sizes: list[int], kind: type[Optimizer], options: dict[str, Any], **choice: Any) -> tuple[Optimizer, ...]:
    """Two optimizers of equal parameters: the first with the choice, the second with none."""
    first = parameters(sizes)
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    return kind(first, **{"lr": 0.01, **options, **choice}), kind(second, **{"lr": 0.01, **options})


def of(optimizer: Optimizer) -> list[Any]:
    return optimizer.param_groups[0]["params"]


def step_both(peer: Optimizer, ours: Optimizer, host: HostStep, dtype: torch.dtype, copied: bool = True) -> None:
    """One step of both on the same gradients, and all that must be equal afterwards."""
    updates = []
    for parameter, other in zip(of(peer), of(ours), strict=True):
        gradient = torch.randn_like(parameter).to(dtype)
        parameter.grad = gradient.to(parameter.dtype)
        low = torch.empty_like(other, dtype=torch.bfloat16, requires_grad=False) if copied else None
        updates.append(ParamUpdate(other, gradient, low))
    peer.step()
    host.step(ours, [(hyperparameters(ours.param_groups[0]), updates)])
    for update, parameter in zip(updates, of(peer), strict=True):
        assert torch.equal(update.parameter, parameter)
        assert update.parameter.grad is None
        assert update.copy is None or torch.equal(update.copy, parameter.detach().bfloat16())
    assert_same_state(peer, ours)


def assert_same_state(peer: Optimizer, ours: Optimizer) -> None:
    assert len(peer.state) == len(ours.state)
    for parameter, other in zip(of(peer), of(ours), strict=True):
        expected, found = peer.state.get(parameter, {}), ours.state.get(other, {})
        assert list(found) == list(expected)
        for one, value in zip(found.values(), expected.values(), strict=True):
            assert torch.equal(one, value) if isinstance(value, Tensor) else one == value
            if isinstance(value, Tensor):
                assert (one.dtype, one.stride(), one.requires_grad) == (value.dtype, value.stride(), False)


# --- the fused kernels ----------------------------------------------------------------------------------------------
@settings(max_examples=80, deadline=None)
@given(
    case=st.sampled_from(FUSED),
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=6),
    lines=st.sampled_from([1, 5, 4096]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    copied=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_equals_pytorchs_fused_step(case: Any, sizes: Any, lines: int, dtype: Any, copied: bool, seed: int) -> None:
    torch.manual_seed(seed)
    peer, ours = both(sizes, *case, fused=True)
    host = HostStep(1, tile=lines * LINE)
    for _ in range(3):
        step_both(peer, ours, host, dtype, copied)


@pytest.mark.parametrize(("kind", "options"), FUSED)
@pytest.mark.parametrize("threads", [1, 2])
def test_equals_a_large_step_of_pytorch_with_any_number_of_threads(
    kind: type[Optimizer], options: dict[str, Any], threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        peer, ours = both([100_003, *[3] * 50, 77], kind, options, fused=True)
        host = HostStep(1, tile=5 * LINE)
        for _ in range(2):
            step_both(peer, ours, host, torch.bfloat16)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="the kernels use no vectors")
def test_tiles_that_end_within_a_vector_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the scalar loop at the end of a range rounds differently."""
    torch.manual_seed(0)
    peer, ours = both([20_000], AdamW, {}, fused=True)

    def steps(host: HostStep) -> None:
        for _ in range(3):
            step_both(peer, ours, host, torch.bfloat16)

    monkeypatch.setattr(host_step, "LINE", 7)
    with pytest.raises(AssertionError):
        steps(HostStep(1, tile=7))


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40 * LINE), min_size=1, max_size=6),
    cores=st.sampled_from([1, 2, 3, 4, 7, 15]),
    tile=st.sampled_from([LINE, 3 * LINE]),
)
def test_calls_share_the_elements_equally(sizes: list[int], cores: int, tile: int) -> None:
    made, places = HostStep(cores, tile=tile), list[tuple[int, slice]]()

    def step(index: int, place: slice, gradient: Tensor) -> None:
        places.append((index, place))

    flat = [FlatUpdate.of(ParamUpdate(weight, weight), NO_CLIP) for weight in map(torch.zeros, sizes)]
    calls = list(made._calls([(one, partial(step, index)) for index, one in enumerate(flat)], tile, LINE))
    taken, seen = list[int](), 0
    for call in calls:
        call()
        taken.append(sum(-(-(place.stop - place.start) // LINE) for _, place in places[seen:]))
        seen = len(places)
    assert len(set(taken[:-1])) <= 1
    assert all(lines <= max(taken[:1]) <= tile // LINE * made._threads.width for lines in taken)
    assert all(place.start % LINE == 0 for _, place in places)
    covered = [element for index, place in places for element in ((index, at) for at in range(place.start, place.stop))]
    assert sorted(covered) == [(index, at) for index, size in enumerate(sizes) for at in range(size)]


@pytest.mark.parametrize("kind", [AdamW, SGD, Adagrad])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_other_dtypes(host: HostStep, kind: type[Optimizer], dtype: torch.dtype) -> None:
    first = parameters([1000, 3 * LINE + 5, 9], dtype)
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    peer, ours = kind(first, lr=0.01, fused=True), kind(second, lr=0.01)
    for _ in range(3):
        step_both(peer, ours, host, torch.bfloat16)


@pytest.mark.parametrize("shape", [(6, 5, 7, 9), (1, 5, 1, 9), (2, 3, 1, 1)])
def test_dense_tensors_in_another_order(host: HostStep, shape: tuple[int, ...]) -> None:
    first = nn.Parameter(torch.randn(shape).to(memory_format=torch.channels_last))
    second = nn.Parameter(first.detach().clone())
    transposed = nn.Parameter(torch.randn(33, 70).t())
    peer = AdamW([first, transposed], fused=True)
    ours = AdamW([second, nn.Parameter(transposed.detach().clone())])
    assert [each.stride() for each in of(ours)] == [first.stride(), transposed.stride()]
    for _ in range(3):
        step_both(peer, ours, host, torch.bfloat16)


def test_gradients_and_loaded_states_in_another_order(host: HostStep) -> None:
    """PyTorch's kernels go by memory and would mix up the elements; the for-loop shows what is right."""
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    plain, ours = nn.Parameter(weight.contiguous()), nn.Parameter(weight.clone())
    peer, optimizer = AdamW([plain], fused=True), AdamW([ours])
    for step in range(3):
        plain.grad = torch.randn(4, 3, 5, 5)
        peer.step()
        host.step(optimizer, [(hyperparameters(optimizer.param_groups[0]), [ParamUpdate(ours, plain.grad)])])
        torch.testing.assert_close(ours.detach(), plain.detach())
        if step == 0:
            optimizer.load_state_dict(copy.deepcopy(peer.state_dict()))
            assert optimizer.state[ours]["exp_avg"].is_contiguous()
    assert optimizer.state[ours]["exp_avg"].stride() == ours.stride()


@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_parameters_that_join_later(host: HostStep, kind: type[Optimizer]) -> None:
    """The first momentum of SGD is the gradient itself, for each parameter by itself."""
    options = {"momentum": 0.9} if kind is SGD else {}
    peers = [both([300], kind, options, fused=True) for _ in range(2)]
    ours = kind([of(second)[0] for _, second in peers], lr=0.01, **options)
    for step in range(3):
        updates = []
        for (peer, _), parameter in list(zip(peers, of(ours), strict=True))[: step + 1]:
            gradient = torch.randn(300).bfloat16()
            of(peer)[0].grad = gradient.float()
            peer.step()
            updates.append(ParamUpdate(parameter, gradient))
        host.step(ours, [(hyperparameters(ours.param_groups[0]), updates)])
    for (peer, _), parameter in zip(peers, of(ours), strict=True):
        assert torch.equal(of(peer)[0], parameter)


# --- the user's optimizer stays the user's --------------------------------------------------------------------------
def test_schedulers_and_resume_just_work(host: HostStep) -> None:
    peer, ours = both([1000, 9], AdamW, {}, fused=True)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in (peer, ours)]
    for step in range(4):
        step_both(peer, ours, host, torch.bfloat16)
        for schedule in schedules:
            schedule._step_count = 2  # `step` is not that of the optimizer, and the scheduler would warn of it
            schedule.step()
        if step == 1:
            state = ours.state_dict()
            ours = AdamW(of(ours), lr=0.01)
            ours.load_state_dict(state)
            schedules[1].optimizer = ours
    assert ours.state_dict()["param_groups"] == [{**peer.state_dict()["param_groups"][0], "fused": None}]


def test_a_snapshot_does_not_follow_the_group() -> None:
    optimizer = AdamW(parameters([3]), lr=torch.tensor(0.5))
    taken = hyperparameters(optimizer.param_groups[0])
    optimizer.param_groups[0]["lr"].fill_(0.1)
    optimizer.param_groups[0]["eps"] = 1.0
    assert "params" not in taken
    assert (float(taken["lr"]), taken["eps"]) == (0.5, 1e-8)


# --- the class's own step -------------------------------------------------------------------------------------------
@pytest.fixture
def own_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of parameters of each step that took the class's own way."""
    calls: list[int] = []
    own = host_step._own_step

    def noted(optimizer: Optimizer, group: Any, updates: Any) -> None:
        calls.append(len(updates))
        own(optimizer, group, updates)

    monkeypatch.setattr(host_step, "_own_step", noted)
    return calls


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_class_takes_its_own_step(host: HostStep, own_steps: list[int], name: str) -> None:
    peer, ours = both([42, 9], getattr(torch.optim, name), {})
    for _ in range(3):
        step_both(peer, ours, host, torch.bfloat16)
    assert own_steps == [2, 2, 2]


@pytest.mark.parametrize(
    "choice", [{"foreach": True}, {"foreach": False}, {"fused": False}, {"foreach": True, "fused": False}]
)
@pytest.mark.parametrize("kind", [AdamW, SGD, Adagrad])
def test_the_choice_of_the_user_is_kept(
    host: HostStep, own_steps: list[int], kind: type[Optimizer], choice: dict[str, Any]
) -> None:
    peer, ours = both([500, 3], kind, {}, **choice)
    ours.param_groups[0].update(choice)
    for _ in range(2):
        step_both(peer, ours, host, torch.float16)
    assert own_steps == [2, 2]


@pytest.mark.parametrize(("choice", "own"), [({}, [1]), ({"fused": True}, [])])
def test_an_open_choice_can_be_left_to_pytorch(own_steps: list[int], choice: dict[str, Any], own: list[int]) -> None:
    peer, ours = both([500], AdamW, {}, **choice)
    ours.param_groups[0].update(choice)
    step_both(peer, ours, HostStep(1, fuse=False), torch.bfloat16)
    assert own_steps == own


def test_a_class_of_the_user_takes_its_own_step(host: HostStep, own_steps: list[int]) -> None:
    class Doubled(AdamW):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.factor = 2.0

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(self.factor * parameter.grad)
                self.state[parameter]["seen"] = self.state[parameter].get("seen", 0) + 1

    one, other = parameters([5, 5])
    optimizer, before = Doubled([one, other]), one.detach().clone()
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("hooks belong to the whole step"))
    held = other.grad = torch.ones(5)
    host.step(optimizer, [(hyperparameters(optimizer.param_groups[0]), [ParamUpdate(one, torch.ones(5).bfloat16())])])
    assert torch.equal(one, before - 2)
    assert optimizer.state == {one: {"seen": 1}}
    assert optimizer.param_groups[0]["params"] == [one, other]
    assert other.grad is held
    assert own_steps == [1]


def test_sparse_gradients_beside_dense_ones(host: HostStep, own_steps: list[int]) -> None:
    weight, table = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    sparse = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 3), (4, 3), check_invariants=True)
    optimizer = SGD([weight, table], lr=1.0)
    written = torch.empty(4, 3)
    updates = [ParamUpdate(table, sparse, written), ParamUpdate(weight, sparse.to_dense())]
    host.step(optimizer, [(hyperparameters(optimizer.param_groups[0]), updates)])
    assert torch.equal(table, weight)
    assert torch.equal(written, table)
    assert table[1, 0] == -1
    assert own_steps == [1]


def test_a_scaler_is_left_to_the_class(host: HostStep, own_steps: list[int]) -> None:
    peer, ours = both([100], AdamW, {}, fused=True)
    ours.param_groups[0]["fused"] = True
    for optimizer in (peer, ours):
        optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    before = of(ours)[0].detach().clone()
    step_both(peer, ours, host, torch.float32)
    assert torch.equal(of(ours)[0], before)
    assert own_steps == [1]


# --- several groups -------------------------------------------------------------------------------------------------
def test_groups_of_a_chunk_step_as_each_of_them_says(host: HostStep) -> None:
    ours = parameters([500, 40, 7])
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    for parameter in theirs:
        parameter.grad = torch.randn_like(parameter)
    optimizer = AdamW(ours, lr=0.01)
    group = hyperparameters(optimizer.param_groups[0])
    updates = [ParamUpdate(one, other.grad.clone()) for one, other in zip(ours, theirs, strict=True)]
    host.step(optimizer, [(group, updates[:1]), ({**group, "lr": 0.5, "foreach": True}, updates[1:])])
    for peer in (AdamW(theirs[:1], lr=0.01, fused=True), AdamW(theirs[1:], lr=0.5, foreach=True)):
        peer.step()
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("cores", range(1, 130, 3))
def test_threads_compute_on_no_more_cores_than_there_are(cores: int) -> None:
    """With 16 computing threads on 15 cores, the thread that launches kernels was late for most of a backward."""
    seen: list[int] = []
    threads = StepThreads(cores)
    with closing(threads):
        threads.make([lambda: seen.append(torch.get_num_threads())])
        others = 0 if threads._pool is None else threads._pool._max_workers
    assert seen == [threads.width]
    assert 0.8 * cores <= (others + 1) * threads.width <= cores
    assert others < MOST_THREADS


@pytest.mark.parametrize("cores", [3, 7])
def test_threads_step_as_one_and_end_when_they_are_closed(cores: int) -> None:
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("protrain-step")]

    peer, ours = both([1000, 77] * 6, AdamW, {}, fused=True)
    host, before = HostStep(cores, tile=LINE), torch.get_num_threads()
    assert names() == []
    for _ in range(2):
        step_both(peer, ours, host, torch.bfloat16)
        assert 1 <= len(names()) <= 2
        host.close()
        assert names() == []
    assert torch.get_num_threads() == before


def test_an_error_of_a_kernel_is_raised(host: HostStep) -> None:
    _, ours = both([100], AdamW, {})
    given: Given = [(hyperparameters(ours.param_groups[0]), [ParamUpdate(of(ours)[0], torch.ones(100))])]
    host.step(ours, given)
    ours.state[of(ours)[0]]["exp_avg"] = torch.zeros(100, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="expected scalar type"):
        host.step(ours, given)


def test_lbfgs_is_refused_over_chunks(host: HostStep) -> None:
    with pytest.raises(ValueError, match="LBFGS works on all parameters as one vector"):
        host.step(torch.optim.LBFGS([torch.zeros(1)]), [])
