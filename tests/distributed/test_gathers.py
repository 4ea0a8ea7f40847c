"""Chunks that ranks gather from parts on their devices train to the bits of chunks that each of them uploads whole."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn

from lightning_protrain import ProTrainStrategy, parallel, parallelism
from lightning_protrain.counters import TransferCounters
from lightning_protrain.runtime import parts
from lightning_protrain.runtime.script import Walk
from tests.distributed.test_overlap import CLIP, STEPS, TwoMachines, accumulating, differing, module_of, slow_steps
from tests.distributed.test_parity import KINDS, Module
from tests.plans import half
from tests.ranks import BOUND, run_ranks, trainer_on_rank, values


def strategy_of(gather: str, overlap: str, part: bool, module: nn.Module, **process: Any) -> ProTrainStrategy:
    plan: Any = half(module) if part else "offload"
    options: Any = {"sharding": "shard", "overlap_optimizer": overlap, "adapter_grad_sync": "ddp", "gather": gather}
    return ProTrainStrategy(plan=plan, monitor=False, **options, **process)


def fit(
    rank: int,
    world_size: int,
    gather: str,
    overlap: str = "backward",
    part: bool = False,
    kind: str = "full",
    cls: type[Module] = Module,
    **options: Any,
) -> tuple[dict[str, Tensor], TransferCounters]:
    """Trains with small windows, and gives the weights of this rank and what has been moved."""
    torch.set_num_threads(1)
    parts.WINDOW = 2048
    module = module_of(kind, cls)
    make = partial(strategy_of, gather, overlap, part, module)
    trainer = trainer_on_rank(rank, world_size, kind=make, **{"max_steps": STEPS, **options})
    trainer.fit(module)
    strategy = trainer.strategy
    assert isinstance(strategy, ProTrainStrategy)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, strategy.counters


# --- parity -----------------------------------------------------------------------------------------------------------


def _compare(
    rank: int, world_size: int, kind: str, ways: list[tuple[str, int, dict[str, Any]]], part: bool
) -> list[str]:
    """What differs from ranks that upload chunks whole, whose steps are not overlapped."""
    wrong = []
    wanted: dict[str, tuple[dict[str, Tensor], TransferCounters]] = {}
    for overlap, accumulate, clipping in ways:
        options: dict[str, Any] = {"part": part, "kind": kind, **accumulating(accumulate), **clipping}
        if str(options) not in wanted:
            wanted[str(options)] = fit(rank, world_size, "host", "off", **options)
        expected, whole = wanted[str(options)]
        # Every rank is late in turn, so that others wait for it.
        with slow_steps(0.002 if rank == accumulate % world_size else 0.0):
            found, gathered = fit(rank, world_size, "device", overlap, **options)
        wrong += [f"{overlap} {options}: {name}" for name in differing(expected, found)[:1]]
        if not 0 == whole.gathers < gathered.gathers or gathered.uploaded_bytes >= whole.uploaded_bytes:
            wrong.append(f"{overlap} {options}: nothing is gathered")
    return wrong


BOTH: list[tuple[str, int, dict[str, Any]]] = [
    (overlap, accumulate, clipping)
    for accumulate in (1, 3)
    for overlap, clipping in (("backward", {}), ("forward", CLIP))
]
OTHER: list[tuple[str, int, dict[str, Any]]] = [
    ("off", 1, CLIP), ("backward", 1, {}), ("forward", 1, {}),
    ("off", 3, {}), ("backward", 3, {}), ("forward", 3, CLIP),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_come_to_the_same_bits(kind: str, tmp_path: Path) -> None:
    assert values(run_ranks(_compare, 2, tmp_path, 2, kind, BOTH, False)) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "tied", "lora"])
def test_so_do_they_in_other_ways(kind: str, tmp_path: Path) -> None:
    assert values(run_ranks(_compare, 2, tmp_path, 2, kind, OTHER, True)) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "part"), [("tied", True), ("lora", False)])
def test_so_do_four(kind: str, part: bool, tmp_path: Path) -> None:
    """In each way of overlap, and clipped or not."""
    ways: list[tuple[str, int, dict[str, Any]]] = [
        ("backward", 1, {}), ("off", 1, {}), ("forward", 3, CLIP), ("off", 3, CLIP),
    ]  # fmt: skip
    assert values(run_ranks(_compare, 4, tmp_path, 4, kind, ways, part)) == [[]] * 4


def test_four_ranks_come_to_the_same_bits(tmp_path: Path) -> None:
    ways: list[tuple[str, int, dict[str, Any]]] = [("forward", 1, {}), ("forward", 3, {})]
    assert values(run_ranks(_compare, 4, tmp_path, 4, "full", ways, False)) == [[]] * 4


def _two_machines(rank: int) -> tuple[list[str], int]:
    torch.set_num_threads(1)
    parts.WINDOW = 2048
    weights, gathers = [], 0
    for gather in ("host", "device"):
        module = module_of()
        strategy = strategy_of(gather, "backward", False, module, process_group_backend="gloo")
        strategy.cluster_environment = TwoMachines(rank)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        options: dict[str, Any] = {**quiet, "max_steps": STEPS}
        L.Trainer(accelerator="cpu", devices=2, num_nodes=2, strategy=strategy, **options).fit(module)
        weights.append({name: value.detach().clone() for name, value in module.state_dict().items()})
        gathers = strategy.counters.gathers
    return differing(*weights), gathers


def test_ranks_of_two_machines_gather_on_each(tmp_path: Path) -> None:
    found = values(run_ranks(_two_machines, 4, tmp_path))
    assert [wrong for wrong, _ in found] == [[]] * 4
    assert len({gathers for _, gathers in found}) == 1
    assert found[0][1] > 0


def _low_precision(rank: int) -> list[str]:
    weights = [fit(rank, 2, gather, precision="bf16-mixed")[0] for gather in ("host", "device")]
    return differing(*weights)


def test_copies_in_low_precision_are_gathered(tmp_path: Path) -> None:
    assert values(run_ranks(_low_precision, 2, tmp_path)) == [[], []]


# --- what is sent -----------------------------------------------------------------------------------------------------


def _count(rank: int, accumulate: int) -> tuple[int, int, int]:
    """Collectives that PyTorch is given for gathers, those that the script has, and those that are counted."""
    patch, given, owed = pytest.MonkeyPatch(), [], []
    reach, cut = Walk.reach, parts.windows
    gather = parts.Communicator.begin_gather

    def note(walk: Walk, event: int) -> bool:
        stays = reach(walk, event)
        if stays and event >= 0:
            owed.append(event)
        return stays

    chunks: list[int] = []
    patch.setattr(Walk, "reach", note)
    patch.setattr(parts.Communicator, "begin_gather", lambda *what: (given.append(what), gather(*what))[1])
    patch.setattr(parts, "windows", lambda *what: (chunks.append(len(cut(*what)[0])), cut(*what))[1])
    _, counters = fit(rank, 2, "device", accumulate_grad_batches=accumulate)
    patch.undo()
    assert len(owed) == len(chunks)
    return len(given), sum(chunks), counters.gathers


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_gathered_is_what_the_script_has(accumulate: int, tmp_path: Path) -> None:
    (first, second) = values(run_ranks(_count, 2, tmp_path, accumulate))
    assert first == second
    given, scripted, counted = first
    assert given == scripted == counted > 0


class Evaluated(Module):
    """Validates in the middle of an epoch."""

    def validation_step(self, batch: list[Tensor]) -> STEP_OUTPUT:
        return self.training_step(batch)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def _validate(rank: int) -> tuple[list[str], list[int]]:
    """Ranks have different numbers of batches to validate, which nobody gathers."""
    seen: list[int] = []

    class Counting(Evaluated):
        def on_validation_start(self) -> None:
            seen.append(self.trainer.strategy.counters.gathers)

        def on_validation_end(self) -> None:
            seen.append(self.trainer.strategy.counters.gathers)

    options = {"val_check_interval": 3, "limit_val_batches": 1 + rank, "num_sanity_val_steps": 0, "max_steps": 7}
    weights = [fit(rank, 2, gather, cls=Counting, **options)[0] for gather in ("host", "device")]
    return differing(*weights), seen[4:]


def test_validation_gathers_nothing(tmp_path: Path) -> None:
    for wrong, seen in values(run_ranks(_validate, 2, tmp_path)):
        assert wrong == []
        assert seen[0::2] == seen[1::2]
        assert seen[-1] > 0


# --- ranks that come apart --------------------------------------------------------------------------------------------


class Leaving(Module):
    """Leaves a layer out in one micro-batch on one rank."""

    at = -1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        (tokens,) = batch
        hidden = self.model.embedding(tokens[:, :-1])
        for layer in self.model.layers[: 2 if batch_idx == self.at else 3]:
            hidden = layer(hidden)
        loss: Tensor = nn.functional.cross_entropy(self.model.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
        return loss


def _leave(rank: int, who: int, accumulate: int, overlap: str) -> tuple[list[str], int, int]:
    """What differs, how often this rank left a script, and what it gathered."""
    patch, left, end = pytest.MonkeyPatch(), [], Walk.end
    mine: Any = type("Mine", (Leaving,), {"at": 4 * accumulate - 1 if rank == who else -1})
    options = {"accumulate_grad_batches": accumulate, "max_steps": 7}
    expected, _ = fit(rank, 2, "host", overlap, cls=mine, **options)
    patch.setattr(Walk, "end", lambda walk: (end(walk), left.append(walk.left))[0])
    found, counters = fit(rank, 2, "device", overlap, cls=mine, **options)
    patch.undo()
    return differing(expected, found), sum(left), counters.gathers


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(("accumulate", "overlap"), [(1, "backward"), (2, "forward")])
def test_a_rank_that_leaves_the_script_holds_up_nobody(accumulate: int, overlap: str, who: int, tmp_path: Path) -> None:
    outcomes = run_ranks(_leave, 2, tmp_path, who, accumulate, overlap)
    found = values(outcomes)
    assert [wrong for wrong, _, _ in found] == [[], []]
    # What it expects of the next micro-batch, of the other kind, is then another order, too.
    assert [left for _, left, _ in found] == [accumulate * (rank == who) for rank in range(2)]
    assert found[0][2] == found[1][2] > 0


class Wild(Module):
    """Takes other ways through its layers in some micro-batches, and looks at weights in others."""

    ways: dict[int, list[int]] = {}
    looks: tuple[int, ...] = ()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        (tokens,) = batch
        if batch_idx in self.looks:
            self.model.layers[0].up.weight.sum().item()
        hidden = self.model.embedding(tokens[:, :-1])
        for layer in self.ways.get(batch_idx, [0, 1, 2]):
            hidden = self.model.layers[layer](hidden)
        loss: Tensor = nn.functional.cross_entropy(self.model.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
        return loss


def _go_wild(rank: int, world_size: int) -> tuple[list[str], int]:
    """What differs, and how often this rank left a script."""
    patch, left, end, wrong = pytest.MonkeyPatch(), [], Walk.end, []
    patch.setattr(Walk, "end", lambda walk: (end(walk), left.append(walk.left))[0])
    for seed in range(4 * (world_size - 2), 4 * (world_size - 1)):
        own, common = random.Random(f"{seed} {rank}"), random.Random(seed)
        accumulate, overlap = common.choice([1, 2]), common.choice(["off", "backward", "forward"])
        batches = range(10 * accumulate)
        ways = {at: own.choice([[1, 2], [0, 1], [0, 0, 1, 2], [1, 0, 2]]) for at in batches if own.random() < 0.08}
        mine: Any = type("Mine", (Wild,), {"ways": ways, "looks": [at for at in batches if own.random() < 0.04]})
        options = {"accumulate_grad_batches": accumulate, "max_steps": 10}
        expected, _ = fit(rank, world_size, "host", overlap, cls=mine, **options)
        found, _ = fit(rank, world_size, "device", overlap, cls=mine, **options)
        wrong += [f"{seed}: {name}" for name in differing(expected, found)[:1]]
    patch.undo()
    return wrong, sum(left)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_leave_anywhere_come_to_the_same_bits(world_size: int, tmp_path: Path) -> None:
    found = values(run_ranks(_go_wild, world_size, tmp_path, world_size))
    assert [wrong for wrong, _ in found] == [[]] * world_size
    assert sum(left for _, left in found) > 5


class Failing(Leaving):
    """One rank raises in the middle of a step in which the others gather."""

    fails = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.fails and batch_idx == 4:
            self.model.layers[1].register_forward_pre_hook(lambda *_: 1 // 0)
        return super().training_step(batch, batch_idx)


def _fail(rank: int) -> None:
    fit(rank, 2, "device", cls=type("Mine", (Failing,), {"fails": rank == 1}), max_steps=7)


def test_a_rank_that_fails_is_named_and_nobody_hangs(tmp_path: Path) -> None:
    begin = time.monotonic()
    first, second = run_ranks(_fail, 2, tmp_path)
    assert "ZeroDivisionError" in str(second.error)
    assert "Training at step 4 ends on rank 0: rank 1 failed (training at step 4)" in str(first.error), first.error
    assert time.monotonic() - begin < 2 * BOUND


def _again(rank: int) -> list[str]:
    """A run after one that was broken off in the middle of a step on all ranks."""
    with pytest.raises(ZeroDivisionError):
        fit(rank, 2, "device", cls=type("Mine", (Failing,), {"fails": True}), max_steps=7)
    dist.barrier()
    return differing(fit(rank, 2, "host")[0], fit(rank, 2, "device")[0])


def test_a_run_after_one_that_failed_is_whole(tmp_path: Path) -> None:
    assert values(run_ranks(_again, 2, tmp_path)) == [[], []]


# --- where there is nothing to gather ---------------------------------------------------------------------------------


class Manual(Module):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.automatic_optimization = False


def _refuse(rank: int) -> str:
    module = module_of(cls=Manual)
    trainer = trainer_on_rank(rank, 2, kind=partial(ProTrainStrategy, plan="offload", gather="device"), max_steps=1)
    with pytest.raises(ValueError, match='gather="device" makes chunks of parts that ranks share') as caught:
        trainer.fit(module)
    return str(caught.value)


def test_what_nobody_could_agree_on_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for text in values(run_ranks(_refuse, 2, tmp_path)):
        assert "under manual optimization" in text


def _say(rank: int, how: dict[str, Any]) -> tuple[list[str], int]:
    """What is said of gathers, and how often ranks gathered."""
    patch, said = pytest.MonkeyPatch(), []
    for module in (parallelism, parallel):
        patch.setattr(module, "rank_zero_info", said.append)
    options: Any = {"plan": "offload", "gather": "device", "adapter_grad_sync": "ddp", **how}
    trainer = trainer_on_rank(rank, 2, kind=partial(ProTrainStrategy, **options), max_steps=4)
    trainer.fit(module_of())
    patch.undo()
    strategy = trainer.strategy
    assert isinstance(strategy, ProTrainStrategy)
    assert strategy.plan is not None
    assert strategy.plan.gathered_by == (2 if strategy.counters.gathers else 1)
    return [each for each in said if "gather" in each], strategy.counters.gathers


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"plan": "resident"}, 'gather="device": the plan offloads nothing, so there are no parts to gather.'),
        ({}, "Each rank uploads a part of every chunk, and the ranks of a machine gather them."),
    ],
    ids=["resident", "offload"],
)
def test_ranks_say_once_whether_they_gather(how: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    for said, gathers in values(run_ranks(_say, 2, tmp_path, how)):
        assert said == [sentence]
        assert (gathers > 0) is (not how)


def test_one_rank_trains_as_ever() -> None:
    weights = []
    for gather in ("host", "device"):
        module = module_of()
        options: Any = {"plan": "offload", "gather": gather, "monitor": False}
        trainer = L.Trainer(
            strategy=ProTrainStrategy(**options),
            accelerator="cpu",
            devices=1,
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(module)
        weights.append({name: value.detach().clone() for name, value in module.state_dict().items()})
    assert differing(*weights) == []
