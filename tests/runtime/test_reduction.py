"""Averages of offloaded chunks: exact, as many messages on every rank, in any order, behind fences."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.planner.plan import Sharding
from lightning_protrain.runtime.comm.reduce import GradReducer, _Bucket, _Region
from lightning_protrain.runtime.param import OffloadedParam, Ownership
from tests.runtime.sending import Communicator, Copies, Network
from tests.simulation import ranked
from tests.support.simulated.device import SimulatedDevice
from tests.support.simulated.streams import RaceError

CPU = CPUDevice(torch.device("cpu"))


class Case(NamedTuple):
    """Chunks by the shapes of their parameters, with the owner of each; None: every rank gets every average."""

    shapes: list[list[tuple[int, ...]]]
    owners: list[list[int]] | None = None

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(index, at) for index, chunk in enumerate(self.shapes) for at in range(len(chunk))]


class Rank:
    """A rank with parameters of its own, and averages as `GradOffload` takes them to the host."""

    def __init__(self, case: Case, network: Network, rank: int, dtype: torch.dtype | None = None) -> None:
        self.rank = rank
        self.params: dict[tuple[int, int], OffloadedParam] = {}
        self.past: set[int] = set()
        self.received: list[tuple[int, int]] = []
        chunks = []
        self.communicator = Communicator(network, rank, dtype)
        for index, shapes in enumerate(case.shapes):
            params = [self._param(index, at, shape) for at, shape in enumerate(shapes)]
            owners = case.owners[index] if case.owners is not None else [None] * len(params)
            by_param = dict(zip(params, owners, strict=True))
            for param, owner in by_param.items():
                if owner is not None:
                    param.ownership = Ownership(here=owner == self.communicator.ranks.local_rank)
            chunks.append(SimpleNamespace(params=params, owner=by_param.__getitem__, machine=lambda param: None))
        self.context = SimpleNamespace(chunks=chunks, device=CPU, has_left=self.past.__contains__)
        self.reduction = GradReducer(self.context, self.communicator)  # type: ignore[arg-type]

    def _param(self, index: int, at: int, shape: tuple[int, ...]) -> OffloadedParam:
        host = nn.Parameter(torch.zeros(shape))
        self.params[index, at] = OffloadedParam(
            f"chunk{index}.weight{at}", host, nn.Parameter(host.detach().clone()), 0
        )
        return self.params[index, at]

    def _receive(self, param: OffloadedParam, grad: Tensor) -> None:
        self.received.append(next(place for place, other in self.params.items() if other is param))
        if param.host.grad is None:
            param.host.grad = grad.clone()
        else:
            param.host.grad.add_(grad)

    def backward(self, gradients: dict[tuple[int, int], Tensor], order: list[tuple[int, int]], averages: bool) -> None:
        """One backward that makes gradients in some order, and may go beyond chunks before all of theirs are there."""
        if not averages:
            for place in order:
                self._receive(self.params[place], gradients[place])
            return
        self.past.clear()
        self.reduction.begin()
        left = list(order)
        for place in order:
            self.reduction.add(place[0], self.params[place], gradients[place].clone())
            left.remove(place)
            self.past.update({place[0]} - {other[0] for other in left})
            self.send_complete()
        self.finish()

    def send_complete(self, *kept_back: int) -> None:
        """Sends what is complete but for chunks that are kept back, as `GradOffload.take` does."""
        while (index := self.reduction.next_complete(kept_back)) is not None:
            self.reduction.send(index)
            for param, average in self.reduction.arrived(but=1):
                self._receive(param, average)

    def finish(self) -> None:
        for param, average in self.reduction.finish():
            self._receive(param, average)


def gradient(rank: int, micro: int, place: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    seed = 1000 * rank + 100 * micro + 10 * place[0] + place[1]
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def average(
    case: Case, num_ranks: int, used: list[list[set[tuple[int, int]]]], dtype: torch.dtype | None = None, seed: int = 0
) -> list[Rank]:
    """Run the backwards of `used` on each rank; the last one averages gradients over ranks.

    Args:
        case: The chunks.
        num_ranks: Number of ranks.
        used: By rank and micro-batch, the parameters that get a gradient.
        dtype: Dtype in which gradients are sent; None: their own.
        seed: Seed of the order of gradients, which differs between ranks.
    """
    network = Network(num_ranks)

    def run(number: int) -> Rank:
        rank = Rank(case, network, number, dtype)
        shuffled = random.Random(seed + number)
        for micro, places in enumerate(used[number]):
            order = shuffled.sample(sorted(places), len(places))
            found = {place: gradient(number, micro, place, case.shapes[place[0]][place[1]]) for place in places}
            rank.backward(found, order, averages=micro == len(used[number]) - 1)
        return rank

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def expected(case: Case, used: list[list[set[tuple[int, int]]]], place: tuple[int, int]) -> Tensor | None:
    """Return DDP's gradient: each rank sums its micro-batches, oldest first, and divides; then ranks are summed."""
    shape = case.shapes[place[0]][place[1]]
    parts = []
    for rank, micros in enumerate(used):
        present = [gradient(rank, micro, place, shape) for micro, places in enumerate(micros) if place in places]
        # With one older gradient the new one is the first: a sum of two is the same either way.
        parts.append(sum(present[1:], present[0]) if present else None)
    if all(part is None for part in parts):
        return None
    scaled = [torch.zeros(shape) if part is None else part * (1.0 / len(used)) for part in parts]
    return sum(scaled[1:], scaled[0])


SHAPE = st.sampled_from([(3,), (2, 3), (1,), (0, 2), (5, 1)])
NUM_RANKS = 2


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, list[list[set[tuple[int, int]]]]]:
    shapes = draw(st.lists(st.lists(SHAPE, min_size=1, max_size=3), min_size=1, max_size=5))
    owners = [[draw(st.integers(0, NUM_RANKS - 1)) for _ in chunk] for chunk in shapes]
    case = Case(shapes, draw(st.sampled_from([None, owners])))
    places = st.sets(st.sampled_from(case.places))
    num_micros = draw(st.integers(1, 2))
    return case, [[draw(places) for _ in range(num_micros)] for _ in range(NUM_RANKS)]


def check(case: Case, used: list[list[set[tuple[int, int]]]], seed: int) -> None:
    """Averages are exact, and messages are those of the plan, on every rank."""
    ranks = average(case, NUM_RANKS, used, seed=seed)
    sizes = []
    for index in reversed(range(len(case.shapes))):
        numbers = [torch.Size(shape).numel() + 1 for shape in case.shapes[index]]  # One flag behind the gradients.
        owners = case.owners[index] if case.owners is not None else [None] * len(numbers)
        sizes += [
            (owner, 4 * sum(number for number, other in zip(numbers, owners, strict=True) if other == owner))
            for owner in dict.fromkeys(owners)
        ]
    for rank in ranks:
        assert rank.communicator.sizes == sizes
        for index, at in case.places:
            found, mean = rank.params[index, at].host.grad, expected(case, used, (index, at))
            owned = case.owners is None or case.owners[index][at] == rank.rank
            assert (found is None) == (mean is None or not owned), f"{index, at} on rank {rank.rank}"
            if found is not None and mean is not None:
                assert torch.equal(found, mean)


@settings(max_examples=60)
@given(cases(), st.integers(0, 10))
def test_averages_are_those_of_ddp_in_messages_of_the_plan(
    drawn: tuple[Case, list[list[set[tuple[int, int]]]]], seed: int
) -> None:
    check(*drawn, seed)


TWO = Case([[(3,)], [(2,), (4,)], [(5,)]], [[0], [1, 0], [1]])
EVERYTHING = [[set(TWO.places)]] * NUM_RANKS


def test_an_unused_gradient_that_is_not_zeroed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [[set(TWO.places)], [{(0, 0)}]]
    check(TWO, used, 0)
    monkeypatch.setattr(torch.Tensor, "zero_", lambda tensor: tensor.fill_(3.0))
    with pytest.raises(AssertionError):
        check(TWO, used, 0)


def test_an_average_that_a_rank_does_not_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check(TWO, EVERYTHING, 0)
    make = Communicator.__init__

    def as_rank_0(self: Communicator, *args: Any) -> None:
        make(self, *args)
        self.ranks.local_rank = 0

    monkeypatch.setattr(Communicator, "__init__", as_rank_0)
    with pytest.raises(AssertionError):
        check(TWO, EVERYTHING, 0)


def test_averages_land_from_the_last_chunk_to_the_first() -> None:
    ranks = average(Case([[(2,)]] * 4), NUM_RANKS, [[{(index, 0) for index in range(4)}]] * NUM_RANKS, seed=5)
    for rank in ranks:
        assert rank.received == [(3, 0), (2, 0), (1, 0), (0, 0)]


def test_sending_and_computing_overlap_with_two_messages_at_most() -> None:
    case = Case([[(2,)]] * 6)
    ranks = average(case, NUM_RANKS, [[set(case.places)]] * NUM_RANKS)
    assert [rank.communicator.most_under_way for rank in ranks] == [2, 2]


@pytest.mark.parametrize(("dtype", "nbytes"), [(None, 44), (torch.bfloat16, 22), (torch.float64, 88)])
def test_gradients_are_sent_in_the_chosen_dtype(dtype: torch.dtype | None, nbytes: int) -> None:
    case = Case([[(10,)]])
    used = [[{(0, 0)}]] * NUM_RANKS
    for rank in average(case, NUM_RANKS, used, dtype):
        assert rank.communicator.sizes == [(None, nbytes)]
        found, mean = rank.params[0, 0].host.grad, expected(case, used, (0, 0))
        assert found is not None
        assert mean is not None
        assert found.dtype is torch.float32
        assert torch.allclose(found, mean, rtol=0.02 if dtype is torch.bfloat16 else 1e-6, atol=0.02)


def one_rank(case: Case) -> Rank:
    return Rank(case, Network(1), 0)


def test_what_has_been_averaged_before_is_not_divided_again() -> None:
    """Two backwards in one step, each with averages: the second adds its own mean to the first."""
    for owners in (None, [[0]]):
        rank = one_rank(Case([[(3,)]], owners))
        first, second = torch.randn(3), torch.randn(3)
        for grad in (first, second):
            rank.backward({(0, 0): grad}, [(0, 0)], averages=True)
        found = rank.params[0, 0].host.grad
        assert found is not None
        assert torch.equal(found, second + first)


def test_a_chunk_is_sent_when_nothing_may_add_to_it() -> None:
    rank = one_rank(Case([[(2,)], [(2,)]]))
    rank.reduction.begin()
    rank.reduction.add(1, rank.params[1, 0], torch.ones(2))
    rank.send_complete()
    assert rank.communicator.sizes == []  # Backward is still within the calls that read it.
    rank.past.add(1)
    rank.send_complete(0, 1)
    assert rank.communicator.sizes == []  # A direct use may add to it.
    rank.past.add(0)
    rank.send_complete(0)
    assert len(rank.communicator.sizes) == 1
    rank.finish()
    assert len(rank.communicator.sizes) == 2
    assert not rank.reduction.runs


def test_what_was_frozen_with_a_gradient_keeps_it() -> None:
    rank = one_rank(Case([[(2,), (2,)]]))
    frozen = rank.params[0, 1].host
    frozen.grad = torch.full((2,), 3.0)
    frozen.requires_grad_(False)
    rank.backward({(0, 0): torch.ones(2)}, [(0, 0)], averages=True)
    assert rank.received == [(0, 0)]
    assert torch.equal(frozen.grad, torch.full((2,), 3.0))


def test_the_host_waits_for_no_upload_of_older_gradients_before_their_chunk_has_been_sent() -> None:
    rank = one_rank(Case([[(2,), (3,)]]))
    rank.context.device = device = Copies()
    for param in rank.params.values():
        param.host.grad = torch.full_like(param.host, 3.0)
    rank.reduction.begin()
    rank.reduction.add(0, rank.params[0, 1], torch.ones(3))
    assert device.log == ["upload", "upload", "wait"]
    rank.finish()
    assert device.log[:3] == ["upload", "upload", "wait"]
    assert device.log[-2:] == ["wait_host", "wait_host"]
    assert "wait_host" not in device.log[:-2]
    expected = {(0, 0): torch.full((2,), 3.0), (0, 1): torch.full((3,), 4.0)}
    for place, param in rank.params.items():
        assert torch.equal(param.host.grad, expected[place])  # type: ignore[arg-type]


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("used", [True, False])
def test_what_comes_to_the_host_after_its_chunk_has_begun_counts(older: bool, used: bool) -> None:
    """The gradient of a use outside the block arrives before that of the block."""
    rank = one_rank(Case([[(2,), (2,)]]))
    host = rank.params[0, 1].host
    host.grad = torch.full((2,), 3.0) if older else None
    rank.reduction.begin()
    rank.reduction.add(0, rank.params[0, 0], torch.ones(2))
    host.grad = torch.full((2,), 5.0)
    if used:
        rank.reduction.add(0, rank.params[0, 1], torch.ones(2))
    rank.finish()
    assert torch.equal(host.grad, torch.full((2,), 5.0 + 3.0 * older + used))


def test_after_an_exception_no_upload_reads_what_the_host_has() -> None:
    rank = one_rank(Case([[(2,)]]))
    rank.context.device = device = Copies()
    rank.params[0, 0].host.grad = torch.ones(2)
    rank.reduction.begin()
    rank.reduction.add(0, rank.params[0, 0], torch.ones(2))
    rank.reduction.forget()
    assert device.log == ["upload", "wait", "wait_host"]


def test_what_is_frozen_is_not_sent() -> None:
    rank = one_rank(Case([[(2,), (3,)], [(4,)]]))
    rank.params[0, 0].host.requires_grad_(False)
    rank.params[1, 0].host.requires_grad_(False)
    rank.backward({(0, 1): torch.ones(3)}, [(0, 1)], averages=True)
    assert rank.communicator.sizes == [(None, 16)]


def test_strides_are_those_of_the_weight() -> None:
    rank = one_rank(Case([[(2, 3)]]))
    param = rank.params[0, 0]
    param.host.data = torch.zeros(3, 2).t()
    rank.backward({(0, 0): torch.arange(6.0).view(2, 3)}, [(0, 0)], averages=True)
    assert torch.equal(param.host.grad, torch.arange(6.0).view(2, 3))  # type: ignore[arg-type]


def test_a_sparse_gradient_is_refused() -> None:
    rank = one_rank(Case([[(4, 2)]]))
    rank.reduction.begin()
    with pytest.raises(RuntimeError, match=r"gradient of 'chunk0.weight0' is sparse, .* Use `sparse=False`"):
        rank.reduction.add(0, rank.params[0, 0], torch.eye(4, 2).to_sparse())


def test_a_gradient_that_comes_too_late_is_refused() -> None:
    rank = one_rank(Case([[(2,)]]))
    rank.past.add(0)
    rank.reduction.begin()
    rank.reduction.add(0, rank.params[0, 0], torch.ones(2))
    rank.send_complete()
    with pytest.raises(RuntimeError, match=r"'chunk0.weight0' came after its chunk had been averaged"):
        rank.reduction.add(0, rank.params[0, 0], torch.ones(2))


def test_after_an_exception_nothing_is_under_way() -> None:
    rank = one_rank(Case([[(2,)], [(2,)]]))
    rank.past.add(1)
    rank.reduction.begin()
    for index in (1, 0):
        rank.reduction.add(index, rank.params[index, 0], torch.full((2,), 7.0))
        rank.send_complete()
    rank.reduction.forget()
    rank.finish()
    assert len(rank.communicator.sizes) == 1
    rank.backward({(0, 0): torch.ones(2)}, [(0, 0)], averages=True)
    assert torch.equal(rank.params[0, 0].host.grad, torch.ones(2))  # type: ignore[arg-type]
    assert rank.params[1, 0].host.grad is None


class Operations(TorchDispatchMode):
    """Remembers what ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("filled", [0, 1, 2])
def test_flags_are_made_on_the_device(filled: int) -> None:
    """A copy of them from the host would wait for everything that the device computes."""
    params = [param for _, param in sorted(one_rank(Case([[(3,), (2,)]])).params.items())]
    region = _Region(None, params, CPU)
    with Operations() as operations:
        region.end_filling(set(params[:filled]))
    assert not {name for name in operations.names if "copy" in name}
    assert region.flags() == [1.0] * filled + [0.0] * (2 - filled)
    assert all(not region.view(param).any() for param in params[filled:])


def test_a_second_dtype_is_sent_and_not_what_was_filled() -> None:
    rank = Rank(Case([[(3,)]]), Network(1), 0, torch.bfloat16)
    grad = torch.tensor([1.0, 1.0 + 2**-20, -3.0])
    rank.backward({(0, 0): grad}, [(0, 0)], averages=True)
    assert torch.equal(rank.params[0, 0].host.grad, grad.bfloat16().float())  # type: ignore[arg-type]


SHAPES = [(2,), (3, 2), (1,)]


def accumulate(order: tuple[int, ...]) -> SimulatedDevice:
    """A backward with averages on top of older gradients; those of the one chunk come in this order."""
    rank, device = Rank(Case([SHAPES]), Network(1), 0), SimulatedDevice()
    rank.context.device = device
    for param in rank.params.values():
        param.host.grad = torch.full_like(param.host, 3.0)
        device.note_host(param.host.grad)
    gradients = {(0, at): torch.ones(SHAPES[at]) for at in order}
    with device:
        rank.reduction.begin()
        for place, gradient in gradients.items():
            device.set_place(gradient, "device")
            rank.reduction.add(0, rank.params[place], gradient)
        rank.finish()
    for place, param in rank.params.items():
        assert torch.equal(param.host.grad, torch.full(SHAPES[place[1]], 3.0 + (place[1] in order)))  # type: ignore[arg-type]
    return device


@pytest.mark.parametrize("order", [order for count in range(4) for order in permutations(range(3), count)])
def test_gradients_are_added_to_older_ones_in_any_order(order: tuple[int, ...]) -> None:
    accumulate(order)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1,)])
def test_adding_to_what_is_not_there_yet_is_found(monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]) -> None:
    add = _Bucket.add

    def without_waiting(self: _Bucket, *what: object) -> None:
        arriving, self._arriving = self._arriving, {}
        add(self, *what)  # type: ignore[arg-type]
        self._arriving = arriving

    monkeypatch.setattr(_Bucket, "add", without_waiting)
    with pytest.raises(RaceError, match="compute writes in aten::add_ what up wrote in copy"):
        accumulate(order)


def test_sending_what_is_not_there_yet_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Bucket, "wait", lambda self: None)
    with pytest.raises(RaceError, match="compute writes in aten::mul_ what up wrote in copy"):
        accumulate((2,))  # The first that comes up: the others are still on their way.


@pytest.mark.parametrize("older", [False, True])
def test_what_comes_to_the_host_behind_another_is_added_on_the_device(older: bool) -> None:
    rank, device = Rank(Case([SHAPES]), Network(1), 0), SimulatedDevice()
    rank.context.device = device
    (param, *_), gradient = rank.params.values(), torch.ones(SHAPES[0])
    found = [torch.full(SHAPES[0], value) for value in (3.0, 5.0)]
    for each in found:
        device.note_host(each)
    with device:
        rank.reduction.begin()
        device.set_place(gradient, "device")
        param.host.grad = found[0] if older else None
        rank.reduction.add(0, param, gradient)
        param.host.grad = found[1]
        rank.finish()
    assert torch.equal(param.host.grad, torch.full(SHAPES[0], 6.0 + 3.0 * older))


class Penalised(ranked.Case):
    """A weight is used outside its block, too."""

    def loss(self, model: nn.Module, rank: int, step: int, micro: int) -> Tensor:
        loss = super().loss(model, rank, step, micro)
        return loss + model.get_parameter("blocks.1.up.weight").square().sum()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("sharding", list(Sharding))
def test_direct_uses_are_averaged_with_what_was_set_aside_for_them(accumulate: int, sharding: Sharding) -> None:
    case = Penalised(accumulate=accumulate, sharding=sharding, skips=False)
    ranked.assert_exact(case, ranked.train(case))
