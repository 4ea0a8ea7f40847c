"""Machines that divide optimizer steps: the weights and states of DDP, each of them stepped on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor

from lightning_protrain import ProTrainStrategy
from lightning_protrain.planner.host import host_terms
from lightning_protrain.planner.scaling import exchanged_bytes
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.runtime.comm import Communicator
from tests.distributed import test_parity
from tests.distributed.test_checkpoints import Same
from tests.distributed.test_overlap import accumulating, differing, module_of, slow_steps
from tests.distributed.test_parity import KINDS, Module
from tests.plans import half
from tests.ranks import run_ranks, values

STEPS = 4
CLIP = {"gradient_clip_val": 0.1}


class Machines(LightningEnvironment):
    """Processes that are there already, so many on each machine."""

    creates_processes_externally = True

    def __init__(self, rank: int, world_size: int, local_size: int) -> None:
        super().__init__()
        self._local_size = local_size
        self.set_global_rank(rank)
        self.set_world_size(world_size)

    def local_rank(self) -> int:
        return self.global_rank() % self._local_size

    def node_rank(self) -> int:
        return self.global_rank() // self._local_size


class Case(NamedTuple):
    """How weights are placed and stepped on two machines; the defaults are those of DDP, in effect.

    Attributes:
        divided: Whether machines divide steps.
        local_size: Ranks of each machine.
        overlap: As of the strategy.
        part: Whether half of the weights are resident.
        trainer: What the Trainer is told.
        num_machines: How many there are.
        divides: What the strategy is told of divided steps.
        gather: As of the strategy.
    """

    divided: bool
    local_size: int = 1
    overlap: str = "off"
    part: bool = False
    trainer: dict[str, Any] = {}
    num_machines: int = 2
    divides: dict[str, Any] = {"shard_optimizer": "world"}
    gather: str = "host"


def trainer_of(rank: int, module: L.LightningModule, case: Case, **options: Any) -> L.Trainer:
    """The Trainer of one rank."""
    torch.set_num_threads(1)
    how: dict[str, Any] = {"sharding": "shard", **case.divides} if case.divided else {}
    strategy = ProTrainStrategy(
        **{
            "plan": half(module) if case.part else "offload",
            "sharding": "auto",
            "monitor": False,
            "gather": case.gather,
            "overlap_optimizer": case.overlap,
            "adapter_grad_sync": "ddp",
            "process_group_backend": "gloo",
            "cluster_environment": Machines(rank, case.num_machines * case.local_size, case.local_size),
            **how,
        }
    )
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    given: dict[str, Any] = {**quiet, "max_steps": STEPS, **case.trainer, **options}
    return L.Trainer(
        accelerator="cpu", devices=case.local_size, num_nodes=case.num_machines, strategy=strategy, **given
    )


def fit(
    rank: int, module: L.LightningModule, case: Case, path: Path | None = None, **options: Any
) -> tuple[dict[str, Tensor], L.Trainer]:
    """Trains, from a checkpoint if one is given, and gives the weights of this rank."""
    trainer = trainer_of(rank, module, case, **options)
    trainer.fit(module, ckpt_path=path)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, trainer


# --- parity -----------------------------------------------------------------------------------------------------------


# By micro-batches of a step. Behind backward nothing is clipped.
WAYS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [("off", CLIP), ("backward", {}), ("forward", CLIP)],
    3: [("off", {}), ("backward", {}), ("forward", {})],
}


def _compare(rank: int, kind: str, local_size: int, part: bool) -> list[str]:
    """What differs from machines that each step everything."""
    wrong = []
    for accumulate, ways in WAYS.items():
        expected = {}
        for overlap, clipping in ways:
            given = {**accumulating(accumulate), **clipping}
            if str(clipping) not in expected:
                plain = Case(False, local_size, part=part, trainer=given)
                expected[str(clipping)], _ = fit(rank, module_of(kind), plain)
            with slow_steps(0.002 if rank == accumulate % 2 else 0.0):
                found, _ = fit(rank, module_of(kind), Case(True, local_size, overlap, part, given))
            wrong += [f"{overlap} {given}: {name}" for name in differing(expected[str(clipping)], found)[:1]]
    return wrong


OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("tied", "lora")]


@pytest.mark.parametrize("kind", [KINDS[0], *OTHERS])
def test_two_machines_of_one_rank_give_the_same_weights(kind: str, tmp_path: Path) -> None:
    assert values(run_ranks(_compare, 2, tmp_path, kind, 1, kind != KINDS[0])) == [[], []]


@pytest.mark.parametrize("kind", [KINDS[0], *OTHERS])
def test_two_machines_of_two_ranks_give_the_same_weights(kind: str, tmp_path: Path) -> None:
    assert values(run_ranks(_compare, 4, tmp_path, kind, 2, False)) == [[]] * 4


def _low_precision(rank: int, overlap: str) -> list[str]:
    given = {"precision": "bf16-mixed"}
    expected, _ = fit(rank, module_of(), Case(False, trainer=given))
    found, trainer = fit(rank, module_of(), Case(True, overlap=overlap, trainer=given))
    assert any(chunk.streamed_dtype for chunk in trainer.strategy.plan.chunks)
    return differing(expected, found)


@pytest.mark.parametrize("overlap", ["off", "backward", "forward"])
def test_copies_in_low_precision_follow_what_comes(overlap: str, tmp_path: Path) -> None:
    assert values(run_ranks(_low_precision, 2, tmp_path, overlap)) == [[], []]


class Thawing(Module):
    """Trains the first layers later, and freezes the last one between backward and its step."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.model.layers[:2].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.model.layers[:2].requires_grad_(True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 3:
            self.model.layers[2].requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class ByHand(Module):
    """Two optimizers in turn, each of its own weights, and one backward in between that no step follows."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        layers = self.model.layers
        rest = [*self.model.embedding.parameters(), *self.model.head.parameters()]
        return torch.optim.AdamW(layers.parameters(), lr=0.01), torch.optim.SGD(rest, lr=0.1)


def _unusual(rank: int, cls: type[Module]) -> list[str]:
    given = {"max_steps": 5}
    expected, _ = fit(rank, module_of(cls=cls), Case(False, trainer=given))
    found, _ = fit(rank, module_of(cls=cls), Case(True, trainer=given))
    return differing(expected, found)


@pytest.mark.parametrize("cls", [Thawing, ByHand])
def test_what_is_trained_may_change(cls: type[Module], tmp_path: Path) -> None:
    assert values(run_ranks(_unusual, 2, tmp_path, cls)) == [[], []]


# --- what it takes ----------------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """Of one rank.

    Attributes:
        states: Names of weights that it has optimizer states of.
        grads: Those that have a gradient at the end.
        nbytes: Of all their states.
        collectives: In all.
        sent: Bytes.
    """

    states: list[str]
    grads: list[str]
    nbytes: int
    collectives: int
    sent: int


def _take(rank: int, case: Case) -> Taken:
    grads: list[str] = []

    class Watched(Module):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            if self.global_step:
                grads[:] = [name for name, value in self.named_parameters() if value.grad is not None]

    module = module_of(cls=Watched)
    _, trainer = fit(rank, module, case)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    state = trainer.optimizers[0].state
    nbytes = sum(value.nbytes for each in state.values() for value in each.values() if value.ndim)
    counters = trainer.strategy.counters
    states = [names[id(parameter)] for parameter in state]
    return Taken(states, grads, nbytes, counters.collectives, counters.communicated_bytes)


@pytest.mark.parametrize(("local_size", "overlap"), [(1, "off"), (2, "forward")])
def test_each_weight_is_stepped_once_in_the_world(local_size: int, overlap: str, tmp_path: Path) -> None:
    world_size = 2 * local_size
    found = values(run_ranks(_take, world_size, tmp_path, Case(True, local_size, overlap)))
    names = [name for name, _ in module_of().named_parameters()]
    assert sorted(name for each in found for name in each.states) == sorted(names)
    assert [sorted(each.states) == sorted(each.grads) for each in found] == [True] * world_size
    whole = 2 * sum(parameter.nbytes for parameter in module_of().parameters())
    machines = [sum(each.nbytes for each in found[at : at + local_size]) for at in range(0, world_size, local_size)]
    assert sum(machines) == whole
    assert max(machines) < 0.62 * whole


def _hold(rank: int, local_size: int) -> tuple[int, list[int]]:
    """Bytes that this rank holds of the host beside weights, and what is planned for one machine, alone or of two."""
    test_parity.WIDTH = 128  # Of this process: pages are little beside weights.
    held: list[int] = []

    class Measured(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            held.append(self.trainer.strategy._device.host.allocated_bytes)

    module = module_of(cls=Measured)
    _, trainer = fit(rank, module, Case(True, local_size, trainer={"max_steps": 3}))
    states = sum(value.nbytes for each in trainer.optimizers[0].state.values() for value in each.values() if value.ndim)
    how = describe_model(module), trainer.strategy.plan, 8.0, 1, False, local_size
    planned = [sum(host_terms(*how, machines).values()) - host_terms(*how)["parameters"] for machines in (1, 2)]
    return max(held) + states, planned


@pytest.mark.parametrize("local_size", [1, 2])
def test_a_machine_holds_its_part_and_no_more_than_is_planned(local_size: int, tmp_path: Path) -> None:
    found = values(run_ranks(_hold, 2 * local_size, tmp_path, local_size))
    machines = [sum(held for held, _ in found[at : at + local_size]) for at in range(0, 2 * local_size, local_size)]
    _, (alone, divided) = found[0]
    assert max(machines) <= divided < 0.85 * alone
    assert 0.95 * alone < sum(machines) < 1.05 * alone


def test_what_is_sent_is_what_is_said(tmp_path: Path) -> None:
    """One sum for each of the five chunks, each of its weights once; flags of gradients and meetings beside them."""
    once, twice = (
        values(run_ranks(_take, 2, _empty(tmp_path / str(steps)), Case(True, trainer={"max_steps": steps})))
        for steps in (2, 3)
    )
    weights = [parameter.nbytes for parameter in module_of().parameters()]
    for before, after in zip(once, twice, strict=True):
        assert after.collectives - before.collectives == 5 + len(weights)
        assert after.sent - before.sent == 2 * sum(weights) + 4 * len(weights)


def _send(rank: int, num_machines: int, local_size: int, part: bool, precision: str) -> tuple[int, int, int, float]:
    """Bytes of weights that this rank gets and sends in a step, those of all offloaded ones, and what is predicted."""
    patch, plain, got, given = pytest.MonkeyPatch(), Communicator.send_weights, [0], [0]

    def noting(communicator: Communicator, flat: Tensor, machine: int) -> Any:
        if machine == communicator.ranks.machine:
            given[0] += (num_machines - 1) * flat.nbytes
        else:
            got[0] += flat.nbytes
        return plain(communicator, flat, machine)

    patch.setattr(Communicator, "send_weights", noting)
    how = {"max_steps": 3, "precision": precision}
    module = module_of()
    _, trainer = fit(rank, module, Case(True, local_size, "off", part, how, num_machines))
    patch.undo()
    plan, weights = trainer.strategy.plan, dict(module.named_parameters())
    offloaded = sum(weights[fqn].nbytes for chunk in plan.chunks if not chunk.resident for fqn in chunk.parameters)
    return got[0] // 3, given[0] // 3, offloaded, exchanged_bytes(plan, num_machines)


@pytest.mark.parametrize(
    ("num_machines", "local_size", "part", "precision"),
    [(2, 1, False, "32-true"), (2, 2, True, "32-true"), (3, 1, False, "bf16-mixed")],
)
def test_machines_send_each_other_what_is_predicted(
    num_machines: int, local_size: int, part: bool, precision: str, tmp_path: Path
) -> None:
    ranks = num_machines * local_size
    found = values(run_ranks(_send, ranks, tmp_path, num_machines, local_size, part, precision))
    got, given = sum(each[0] for each in found), sum(each[1] for each in found)
    _, _, offloaded, said = found[0]
    assert got == given == (num_machines - 1) * offloaded
    assert 1 <= num_machines * said / got < 1.12  # In a plan weights are aligned; these are very small.


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _save(rank: int, folder: Path, case: Case) -> list[str]:
    """Saves in the middle under each, resumes what the other has saved, and says what differs from an unbroken run."""
    again: dict[str, Any] = {"max_epochs": -1, "use_distributed_sampler": False}
    ways = {"divided": case, "plain": case._replace(divided=False)}
    whole, _ = fit(rank, module_of(cls=Same), ways["plain"], **again)
    for name, each in ways.items():
        saving = L.pytorch.callbacks.ModelCheckpoint(folder / name, filename="at", every_n_train_steps=2)
        options = {**again, "max_steps": 2, "callbacks": [saving], "enable_checkpointing": True}
        fit(rank, module_of(cls=Same), each, **options)
    torch.distributed.barrier()
    wrong = []
    for name, resumed in (("divided", "plain"), ("plain", "divided"), ("divided", "divided")):
        module = module_of(cls=Same)
        torch.nn.init.zeros_(module.model.head.weight)
        found, _ = fit(rank, module, ways[resumed], folder / name / "at.ckpt", **again)
        wrong += [f"{name} as {resumed}: {key}" for key in differing(whole, found)[:1]]
    return wrong


@pytest.mark.parametrize("local_size", [1, 2])
def test_checkpoints_are_those_of_machines_that_step_everything(local_size: int, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    found = values(run_ranks(_save, 2 * local_size, tmp_path, folder, Case(True, local_size, "forward")))
    assert found == [[]] * (2 * local_size)
    plain, divided = (torch.load(folder / name / "at.ckpt", weights_only=False) for name in ("plain", "divided"))
    assert differing(plain["state_dict"], divided["state_dict"]) == []
    (one,), (other,) = plain["optimizer_states"], divided["optimizer_states"]
    assert one["param_groups"] == other["param_groups"]
    assert len(one["state"]) == len(other["state"]) == 17
    for index, state in one["state"].items():
        assert differing(state, other["state"][index]) == []
