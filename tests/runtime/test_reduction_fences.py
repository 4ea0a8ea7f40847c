"""On the simulated device: gradients come up from the host while others of their chunk are added, behind fences."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.planner.plan import Sharding
from lightning_protrain.runtime.comm.reduce import _Bucket
from tests.runtime.sending import Network
from tests.runtime.test_reduction import Case, Rank
from tests.simulation import ranked
from tests.support.simulated.device import SimulatedDevice
from tests.support.simulated.streams import RaceError

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
