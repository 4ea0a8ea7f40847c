"""Machines that divide weights: those of machines that divide steps, bit for bit, and each has its rows only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_protrain.runtime.comm import Communicator
from lightning_protrain.runtime.rows import row_ranges
from tests.distributed import test_parity
from tests.distributed.test_checkpoints import Same
from tests.distributed.test_exchange import Case, Machines, _save, fit, module_of
from tests.distributed.test_overlap import differing
from tests.distributed.test_parity import Module
from tests.ranks import run_ranks, values

ROWS = {"shard_weights": "world"}
STEPS = Case(True)
CLIP = {"gradient_clip_val": 0.1}
MIXED = {"precision": "bf16-mixed"}


def rows(case: Case) -> Case:
    return case._replace(divides=ROWS)


# --- parity -----------------------------------------------------------------------------------------------------------


class BySGD(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def _compare(rank: int, kind: str, cls: type[Module], case: Case) -> list[str]:
    expected, _ = fit(rank, module_of(kind, cls), case)
    module = module_of(kind, cls)
    found, _ = fit(rank, module, rows(case))
    offloaded = [isinstance(parameter, DTensor) for parameter in module.parameters()]
    assert any(offloaded)
    assert all(offloaded) or case.part
    return differing(expected, found)


class Drops(Module):
    """Drops some gradients of one step behind its backward, before anything else looks at them."""

    def on_after_backward(self) -> None:
        if self.global_step == 2:
            self.model.layers.zero_grad()


SLOW = pytest.mark.slow
PARITY = [
    ("full", BySGD, STEPS),
    ("full", Module, STEPS),
    (
        "tied",
        Module,
        STEPS._replace(trainer={"accumulate_grad_batches": 3, **CLIP, "gradient_clip_algorithm": "value"}),
    ),
    ("lora", Module, STEPS._replace(local_size=2)),
    ("full", Drops, STEPS),
    pytest.param("half frozen", Module, STEPS._replace(trainer={"accumulate_grad_batches": 2}), marks=SLOW),
    pytest.param("full", Module, STEPS._replace(part=True), marks=SLOW),
    pytest.param("full", Module, STEPS._replace(part=True, local_size=2), marks=SLOW),
    ("full", Module, STEPS._replace(trainer=MIXED, local_size=2)),
    pytest.param("tied", BySGD, STEPS._replace(trainer={**MIXED, "accumulate_grad_batches": 2}), marks=SLOW),
    pytest.param("full", Module, STEPS._replace(trainer={"precision": "bf16-true"}), marks=SLOW),
]


@pytest.mark.parametrize(("kind", "cls", "case"), PARITY)
def test_weights_are_those_of_machines_that_divide_steps(
    kind: str, cls: type[Module], case: Case, tmp_path: Path
) -> None:
    number = 2 * case.local_size
    assert values(run_ranks(_compare, number, tmp_path, kind, cls, case)) == [[]] * number


class Clamps(Module):
    """Bounds weights before a forward that is not the one that was traced."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        for parameter in self.parameters() if self.global_step > 1 else ():
            self.clamp(parameter)
        return super().training_step(batch)

    @torch.no_grad()
    def clamp(self, parameter: Tensor) -> None:
        parameter.clamp_(-0.05, 0.05)


class ClampsData(Clamps):
    def clamp(self, parameter: Tensor) -> None:
        parameter.data.clamp_(-0.05, 0.05)


def _clamp(rank: int) -> list[str]:
    case = rows(STEPS._replace(trainer=MIXED))
    expected, _ = fit(rank, module_of(cls=Clamps), case)
    found, trainer = fit(rank, module_of(cls=ClampsData), case)
    assert any(chunk.streamed_dtype for chunk in trainer.strategy.plan.chunks)
    return differing(expected, found)


def test_copies_follow_writes_that_no_version_tells_of(tmp_path: Path) -> None:
    assert values(run_ranks(_clamp, 2, tmp_path)) == [[], []]


def _near(rank: int, case: Case) -> float:
    expected, _ = fit(rank, module_of(), case)
    found, _ = fit(rank, module_of(), rows(case))
    return max((found[name] - value).abs().max().item() for name, value in expected.items())


@pytest.mark.parametrize("case", [STEPS._replace(trainer=CLIP, local_size=2), STEPS._replace(num_machines=3)])
def test_norms_of_rows_and_three_machines_round_otherwise(case: Case, tmp_path: Path) -> None:
    number = case.local_size * case.num_machines
    assert max(values(run_ranks(_near, number, tmp_path, case))) < 2e-6


# --- what each has ----------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """Of one rank: bytes that its node has mapped, of its states; shapes of its rows, and what a hook has seen."""

    mapped: int
    states: int
    rows: dict[str, tuple[int, ...]]
    seen: list[str]


def _hold(rank: int, case: Case) -> Held:
    test_parity.WIDTH = 128  # Of this process: pages are little beside weights.
    mapped: list[int] = []
    seen: list[str] = []

    class Watched(Module):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            weight = self.model.head.weight
            place = weight.grad is not None and weight.grad.placements
            seen.append(f"{type(weight).__name__} {tuple(weight.shape)} {place}")

        def on_train_batch_end(self, *_: Any) -> None:
            mapped.append(self.trainer.strategy._runtime._chunks[0].share.memory.nbytes)

    module = module_of(cls=Watched)
    _, trainer = fit(rank, module, case)
    states = [value for each in trainer.optimizers[0].state.values() for value in each.values() if value.ndim]
    shapes = {name: tuple(value.to_local().shape) for name, value in module.named_parameters()}
    nbytes = sum(value.to_local().nbytes for value in states)
    return Held(mapped[-1], nbytes, shapes, seen)


def test_a_machine_has_its_rows_and_nothing_else(tmp_path: Path) -> None:
    found = values(run_ranks(_hold, 2, tmp_path, rows(STEPS._replace(trainer={"max_steps": 2}))))
    test_parity.WIDTH, width = 128, test_parity.WIDTH
    try:
        parameters = dict(module_of().named_parameters())
    finally:
        test_parity.WIDTH = width
    weights = sum(parameter.nbytes for parameter in parameters.values())
    for rank, each in enumerate(found):
        assert each.mapped < 0.6 * weights
        assert each.states < 0.55 * 2 * weights
        for name, parameter in parameters.items():
            begin, end = row_ranges(parameter.shape[0], 2)[rank]
            assert each.rows[name] == (end - begin, *parameter.shape[1:])
        assert each.seen == ["DTensor (23, 128) (Shard(dim=0),)"] * 2
    assert sum(each.states for each in found) == 2 * weights


def _count(rank: int, local_size: int) -> tuple[int, int, int]:
    """Bytes of rows that come to this rank over the network in a run, of all offloaded weights, and the fetches."""
    case, sent = rows(STEPS._replace(local_size=local_size, trainer={"max_steps": 2})), [0, 0]
    plain = Communicator.send_rows

    def noting(self: Communicator, flat: Tensor, machine: int) -> Any:
        before = self._device.counters.communicated_bytes
        work = plain(self, flat, machine)
        if machine != self.ranks.machine:
            sent[0] += self._device.counters.communicated_bytes - before
            sent[1] += flat.nbytes
        return work

    Communicator.send_rows = noting  # type: ignore[method-assign]
    module = module_of()
    fit(rank, module, case)
    return sent[0], sent[1], sum(each.numel() % local_size for each in module.parameters())


@pytest.mark.parametrize("local_size", [1, pytest.param(2, marks=SLOW)])
def test_rows_come_to_a_machine_once(local_size: int, tmp_path: Path) -> None:
    for came, needed, uneven in values(run_ranks(_count, 2 * local_size, tmp_path, local_size)):
        assert not uneven
        assert came * local_size == needed > 0


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_size", [1, pytest.param(2, marks=SLOW)])
def test_checkpoints_are_those_of_machines_that_have_everything(local_size: int, tmp_path: Path) -> None:
    folder, case = tmp_path / "saved", rows(Case(True, local_size))
    assert values(run_ranks(_save, 2 * local_size, tmp_path, folder, case)) == [[]] * (2 * local_size)
    plain, divided = (torch.load(folder / name / "at.ckpt", weights_only=False) for name in ("plain", "divided"))
    assert differing(plain["state_dict"], divided["state_dict"]) == []
    assert {type(value) for value in divided["state_dict"].values()} == {Tensor}
    (one,), (other,) = plain["optimizer_states"], divided["optimizer_states"]
    assert one["param_groups"] == other["param_groups"]
    assert len(one["state"]) == len(other["state"]) == 17
    for index, state in one["state"].items():
        assert differing(state, other["state"][index]) == []


class Reloaded(Same):
    """Reads and loads its weights by itself, in the middle."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            state = self.state_dict()
            assert {type(value) for value in state.values()} == {Tensor}
            self.load_state_dict({name: 2 * value for name, value in state.items()})
            self.load_state_dict(state)


def _reload(rank: int) -> list[str]:
    expected, _ = fit(rank, module_of(cls=Same), rows(STEPS))
    found, _ = fit(rank, module_of(cls=Reloaded), rows(STEPS))
    return differing(expected, found)


def test_whole_weights_are_read_and_loaded_in_a_run(tmp_path: Path) -> None:
    assert values(run_ranks(_reload, 2, tmp_path)) == [[], []]


# --- evaluation, and what goes wrong ----------------------------------------------------------------------------------


class Evaluated(Module):
    """Validates on as many batches as it is told, of which the second rank may have others."""

    num_batches = (2, 2)

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("loss", self.training_step(batch), sync_dist=True)

    def val_dataloader(self) -> DataLoader[Any]:
        number = self.num_batches[self.global_rank]
        return DataLoader(TensorDataset(torch.ones(number, 9, dtype=torch.int64)), batch_size=1)


class Uneven(Evaluated):
    num_batches = (2, 1)


def _evaluate(rank: int, cls: type[Module]) -> float:
    how: dict[str, Any] = {"val_check_interval": 2, "num_sanity_val_steps": 2, "use_distributed_sampler": False}
    _, trainer = fit(rank, module_of(cls=cls), rows(STEPS._replace(trainer={**how, "max_steps": 4})))
    return float(trainer.callback_metrics["loss"])


def test_evaluation_fetches_together(tmp_path: Path) -> None:
    one, other = values(run_ranks(_evaluate, 2, tmp_path, Evaluated))
    assert one == other > 0


def test_a_rank_that_runs_out_of_batches_goes_on_fetching(tmp_path: Path) -> None:
    one, other = values(run_ranks(_evaluate, 2, tmp_path, Uneven))
    assert one == other > 0


class Skipping(Module):
    """Leaves a layer out on one rank."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        hidden = self.model.embedding(tokens[:, :-1])
        for at, layer in enumerate(self.model.layers):
            if not (self.global_step == 2 and at == 1 and self.global_rank):
                hidden = layer(hidden)
        return torch.nn.functional.cross_entropy(self.model.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


class Failing(Module):
    def on_after_backward(self) -> None:
        if self.global_step == 2 and self.global_rank:
            raise ValueError("it is full")


class ReadsDirectly(Module):
    def training_step(self, batch: list[Tensor]) -> Tensor:
        return super().training_step(batch) + self.model.head.weight.square().sum()


def _fit(rank: int, cls: type[Module], case: Case) -> None:
    fit(rank, module_of(cls=cls), case)


def test_a_rank_that_fetches_something_else_is_named_on_all(tmp_path: Path) -> None:
    for each in run_ranks(_fit, 2, tmp_path, Skipping, rows(STEPS)):
        assert "The ranks have come apart (rank 0: the fetch of " in str(each.error)
        assert ", rank 1: " in str(each.error)


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    one, other = run_ranks(_fit, 2, tmp_path, Failing, rows(STEPS))
    assert "rank 1 failed (training at step 2) with ValueError: it is full" in str(one.error)
    assert other.error == "ValueError: it is full"


def test_a_use_of_a_weight_outside_of_its_block_is_refused(tmp_path: Path) -> None:
    for each in run_ranks(_fit, 2, tmp_path, ReadsDirectly, rows(STEPS)):
        assert "'model.head.weight' is used outside its own block and streamed at the same time, and machines" in str(
            each.error
        )


class Alone(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2 and not self.global_rank:
            self.state_dict()


def test_a_rank_that_asks_alone_for_the_state_is_named_on_all(tmp_path: Path) -> None:
    for each in run_ranks(_fit, 2, tmp_path, Alone, rows(STEPS)):
        assert "have come apart (rank 0: the state of weights that machines divide, rank 1: " in str(each.error)


def test_environments_of_these_tests_know_their_machine() -> None:
    assert [Machines(rank, 4, 2).node_rank() for rank in range(4)] == [0, 0, 1, 1]


# --- refusals ---------------------------------------------------------------------------------------------------------


class ByHand(Module):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.automatic_optimization = False


class ByAdagrad(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.parameters())


class Hooked(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.model.head.weight.register_hook(lambda gradient: gradient)
        return super().configure_optimizers()


REFUSED = [
    (ByHand, STEPS, "under manual optimization"),
    (ByAdagrad, STEPS, "Adagrad is not known to step each element alone"),
    (Hooked, STEPS, "'model.head.weight' has a hook"),
    (Module, STEPS._replace(overlap="forward"), "overlap_optimizer='forward' is not built"),
]


@pytest.mark.parametrize(("cls", "case", "match"), REFUSED)
def test_what_is_not_built_is_refused_at_set_up(cls: type[Module], case: Case, match: str, tmp_path: Path) -> None:
    for each in run_ranks(_fit, 2, tmp_path, cls, rows(case)):
        assert str(each.error).startswith("ValueError: ")
        assert match in str(each.error)


def _alone(rank: int) -> bool:
    module: L.LightningModule = module_of()
    fit(rank, module, rows(STEPS._replace(num_machines=1)))
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def test_one_machine_has_nothing_to_divide(tmp_path: Path) -> None:
    assert values(run_ranks(_alone, 1, tmp_path)) == [False]
