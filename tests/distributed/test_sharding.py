"""The choice of `sharding="auto"` on real ranks follows the predictions for the rank with the least memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_protrain import ProTrainStrategy
from lightning_protrain.device.device import CPUDevice, Device
from lightning_protrain.distributed import rank_sync
from lightning_protrain.planner.network import Network, Route
from lightning_protrain.planner.request import SHARE_OF_ALL
from lightning_protrain.strategy import joint_plan, plan_session
from tests.support.loading_ranks import Everywhere, Once, loader, module_of, save, tensors_of
from tests.support.machines import CPU, GIB
from tests.support.rank_models import Module
from tests.support.ranks import run_ranks, trainer_on_rank, values

STEPS = 4
FAST, SLOW = Route(1e-6, 1e12), Route(1e-3, 1e6)
# By what is taken: made-up networks on which the other sharding is slower.
NETWORKS = {"replicate": Network(FAST, SLOW, owners=2), "shard": Network(SLOW, FAST, owners=2)}


class Taken(NamedTuple):
    """The result of one rank: its plan, owners of weights, messages on plans, and weights after the run."""

    plan: str
    sharding: str
    num_offloaded: int
    said: list[str]
    weights: dict[str, Tensor]


def listen() -> list[str]:
    """Return a list that receives all messages on plans in this process from now on."""
    said: list[str] = []
    rank_sync.rank_zero_info = joint_plan.rank_zero_info = plan_session.rank_zero_info = said.append
    return said


def of(strategy: Any, said: list[str], module: nn.Module) -> Taken:
    plan = strategy.plan
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return Taken(plan.to_json(), str(plan.sharding), plan.num_offloaded_chunks, said, weights)


def train(rank: int, kind: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    module = Module("full")
    trainer = trainer_on_rank(rank, 2, kind=kind, max_steps=STEPS)
    trainer.fit(module)
    return module, trainer.strategy


def choose(rank: int, networks: list[str], options: dict[str, Any]) -> list[tuple[Taken, bool]]:
    """Return the chosen sharding on each network, and whether the weights equal those of DDP."""
    torch.set_num_threads(1)
    expected = train(rank, DDPStrategy)[0].state_dict()
    found = []
    for name in networks:
        plan_session.measure_collectives = lambda *_, name=name: NETWORKS[name]  # Of this process.
        said = listen()
        module, strategy = train(rank, partial(ProTrainStrategy, hardware=CPU, **options))
        taken = of(strategy, said, module)
        equal = all(torch.equal(value, expected[key]) for key, value in taken.weights.items())
        found.append((taken._replace(weights={}), equal))
    return found


def test_the_faster_sharding_is_taken_and_trains_as_ddp_does(tmp_path: Path) -> None:
    first, second = values(run_ranks(choose, 2, tmp_path, list(NETWORKS), {"device_memory": "64KiB"}))
    assert [equal for _, equal in first + second] == [True] * 4
    assert [(taken.sharding, taken.num_offloaded > 0) for taken, _ in first] == [(name, True) for name in NETWORKS]
    assert [taken.plan for taken, _ in first] == [taken.plan for taken, _ in second]
    for taken, _ in first:
        (said,) = (sentence for sentence in taken.said if "sharding=" in sentence)
        assert said.startswith(f'sharding="auto" takes "{taken.sharding}": a step is expected to take ')
        assert said.replace('"', '\\"') in taken.plan  # As `explain()` says it.


def crowd(rank: int, rooms: list[int], options: dict[str, Any]) -> tuple[Taken, bool]:
    """Return the chosen sharding if ranks have this free memory to share, and whether weights equal those of DDP."""
    torch.set_num_threads(1)
    expected = train(rank, DDPStrategy)[0].state_dict()
    plan_session.measure_collectives = lambda *_: NETWORKS["shard"]
    joint_plan.free_shared_bytes = lambda: rooms[rank]
    said = listen()
    module, strategy = train(rank, partial(ProTrainStrategy, hardware=CPU, **options))
    taken = of(strategy, said, module)
    equal = all(torch.equal(value, expected[key]) for key, value in taken.weights.items())
    return taken._replace(weights={}), equal


@pytest.mark.parametrize(
    ("rooms", "options"),
    [([64 << 20, 1000], {"device_memory": "64KiB"}), ([1000, 64 << 20], {"plan": "offload"})],
    ids=["rank 1, searched", "rank 0, given"],
)
def test_ranks_that_cannot_share_so_much_have_a_copy_each(
    rooms: list[int], options: dict[str, Any], tmp_path: Path
) -> None:
    first, second = values(run_ranks(crowd, 2, tmp_path, rooms, options))
    small = rooms.index(1000)
    for taken, equal in (first, second):
        assert equal
        assert (taken.sharding, taken.num_offloaded > 0) == ("replicate", True)
    (said,) = (sentence for sentence in first[0].said if "sharding=" in sentence)
    assert said.startswith('sharding="auto" takes "replicate": ')
    assert f'under "shard" there is no plan (/dev/shm has 1000 B free on the node of rank {small}, needs ' in said


# --- loaded once ------------------------------------------------------------------------------------------------------


# What DDP trains as well; the rest is compared with ranks that have all loaded.
PLAIN = ("full", "lora", "tied", "head")


def load(rank: int, kind: str, folder: Path) -> tuple[list[str], str, bool]:
    """Return the differences from a run in which every rank loads, the sharding, and whether this rank has loaded."""
    torch.set_num_threads(1)
    plan_session.measure_collectives = lambda *_: NETWORKS["replicate"]
    options: dict[str, Any] = {"device_memory": "64KiB", "hardware": CPU, "monitor": False}
    before: Any = DDPStrategy if kind in PLAIN else partial(Everywhere, sharding="replicate", **options)
    ends = []
    for strategy in (before, partial(Once, **options)):
        torch.manual_seed(5)
        trainer = trainer_on_rank(rank, 2, strategy, max_steps=3)
        module = module_of(kind, folder)
        trainer.fit(module, loader())
        ends.append(tensors_of(module))
    expected, tensors = ends
    wrong = [name for name in expected if not torch.equal(expected[name], tensors[name])]
    found: Any = trainer.strategy
    return [*wrong, *(expected.keys() ^ tensors.keys())], str(found.plan.sharding), found.loaded_outline


@pytest.mark.parametrize(
    "kind", ["full", "lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("tied", "head", "nf4", "dora"))]
)
def test_ranks_that_have_loaded_nothing_get_their_copies(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path / "model")
    found = values(run_ranks(load, 2, tmp_path, kind, tmp_path / "model"))
    assert found == [([], "replicate", False), ([], "replicate", True)]


# --- the rank with the least memory -----------------------------------------------------------------------------------


class Limited(CPUDevice):
    """A CPU that says how much it has free."""

    free = GIB

    def free_bytes(self) -> int | None:
        return self.free


class OnLimited(ProTrainStrategy):
    """A strategy on a device with `free` bytes."""

    free = GIB

    def open_device(self) -> Device:
        device = Limited(self.root_device)
        device.free = self.free
        return device


def limit(rank: int, device: list[int], host: list[int]) -> tuple[Taken, int | None, int]:
    """Return the result for ranks with these free bytes, the budget, and the predicted device memory."""
    torch.set_num_threads(1)
    OnLimited.free = device[rank]
    plan_session.free_host_bytes = lambda: host[rank]
    said = listen()
    module, strategy = train(rank, partial(OnLimited, hardware=CPU, sharding="shard"))
    taken = of(strategy, said, module)
    prediction = strategy.plan.prediction
    return taken._replace(weights={}), strategy.budget, prediction.device_bytes


@pytest.mark.parametrize("small", [0, 1])
def test_the_plan_fits_the_rank_with_the_least(small: int, tmp_path: Path) -> None:
    device = [64 << 10 if rank == small else GIB for rank in range(2)]
    (first, budget, nbytes), second = values(run_ranks(limit, 2, tmp_path, device, [GIB, GIB]))
    assert second[0].plan == first.plan
    assert budget == second[1] == int((64 << 10) * SHARE_OF_ALL)
    assert nbytes <= budget
    assert first.num_offloaded > 0
    named = [sentence for sentence in first.said if "of its device free" in sentence]
    expected = "Rank 1 has 64.0 KiB of its device free, rank 0 1.0 GiB: the plan of all ranks is made for 64.0 KiB."
    assert named == ([expected] if small == 1 else [])


def test_a_host_that_is_too_small_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    outcomes = run_ranks(limit, 2, tmp_path, [64 << 10] * 2, [GIB, 0])
    errors = [outcome.error or "" for outcome in outcomes]
    assert errors[0] == errors[1]
    assert errors[0].startswith("NoPlanForHost: No plan fits")


def leave(rank: int) -> None:
    """Rank 1 fails when the others wait for what it has free."""

    def fail(*_: Any) -> Any:
        raise OSError("no such file")

    if rank == 1:
        plan_session.free_host_bytes = fail
    train(rank, partial(OnLimited, hardware=CPU))


def test_a_rank_that_cannot_say_what_it_has_ends_all(tmp_path: Path) -> None:
    first, second = run_ranks(leave, 2, tmp_path)
    assert second.error == "OSError: no such file"
    assert "rank 1 failed" in (first.error or "")
    assert "OSError: no such file" in (first.error or "")
