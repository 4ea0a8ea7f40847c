"""The plan reserves the bytes that the copy of a checkpoint in host memory takes, and few more."""

from __future__ import annotations

import io
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.checkpoint.setup import _BESIDE_STATES, copy_of, stored
from lightning_protrain.checkpoint.save import Snapshot, aligned
from lightning_protrain.checkpoint.serialize import split
from lightning_protrain.config import Knobs
from lightning_protrain.planner.explain import short_bytes
from lightning_protrain.planner.memory import HostUse, host_bytes, host_terms, loading_terms
from lightning_protrain.planner.memory_timeline import memory_timeline
from lightning_protrain.planner.plan import Plan, RankLayout
from lightning_protrain.planner.problem import Problem
from lightning_protrain.planner.search import NoFeasiblePlan, find_any, search
from lightning_protrain.runtime.optim.step import state_bytes_per_element
from lightning_protrain.strategy.describe import HoldsHostCopy, copied_bytes
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.planner.brute import all_candidates, fastest
from tests.planner.problems import random_problem
from tests.support.adapter_runs import Stop, adapted
from tests.support.exported_models import make, pretrained
from tests.support.machines import GIB
from tests.support.module_runs import Sequences
from tests.support.plan_cases import asking, case
from tests.support.trainers import SILENT

OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "Rprop": torch.optim.Rprop,
    "Adadelta": torch.optim.Adadelta,
}


class Tied(nn.Module):
    """A module with odd sizes, a tied weight, an unsaved buffer, a complex buffer, and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(71, 53)
        self.norm = nn.BatchNorm1d(53)
        self.head = nn.Linear(53, 71, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.ones(33), persistent=False)
        self.register_buffer("phase", torch.ones(3, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.ones(0, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(tokens)))


def taken(module: nn.Module, optimizers: list[Any]) -> int:
    """Return the bytes that a snapshot of the module and its optimizers takes."""
    content = {"state_dict": module.state_dict(), "optimizer_states": [each.state_dict() for each in optimizers]}
    snapshot = Snapshot(lambda: 1 << 40)
    snapshot.take(split(content))
    return snapshot.nbytes


def step(module: nn.Module, optimizer: Any) -> None:
    (module(torch.arange(71)).square().sum() + module.empty.sum()).backward()
    optimizer.step()


@pytest.mark.parametrize("frozen", ["nothing", "half"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_copy_takes_what_was_expected_before_the_first_step(name: str, frozen: str) -> None:
    module = Tied()
    if frozen == "half":
        module.norm.requires_grad_(False)
    optimizer = OPTIMIZERS[name](module.parameters())
    state_bytes = state_bytes_per_element([optimizer])
    expected = copy_of(module, (), [optimizer], state_bytes)
    step(module, optimizer)
    assert expected == copy_of(module, (), [optimizer], state_bytes)
    # A forgotten state of the embedding alone would be 15,052 bytes.
    assert 0 <= expected - taken(module, [optimizer]) <= 4 * _BESIDE_STATES


def test_a_model_without_values_is_as_large() -> None:
    with torch.device("meta"):
        empty = Tied()
    one, other = (torch.optim.AdamW(each.parameters()) for each in (empty, Tied()))
    assert copy_of(empty, (), [one], 8.0) == copy_of(Tied(), (), [other], 8.0)
    assert sorted(stored(empty)) == sorted(set(Tied().state_dict()) - {"phase"})


def test_of_unknown_optimizers_the_mean_is_taken() -> None:
    class Own(torch.optim.Optimizer):
        """An optimizer that is not PyTorch's."""

    module = nn.Linear(16, 16, bias=False)
    optimizer = Own(module.parameters(), {})
    assert copy_of(module, (), [optimizer], 6.0) == 1024 + 6 * 256 + _BESIDE_STATES


def test_what_is_left_out_does_not_count() -> None:
    module = Tied()
    assert copy_of(module, ["norm.weight", "embed.weight", "head.weight"], (), 0.0) == (
        copy_of(module, (), (), 0.0) - aligned(4 * 53) - aligned(4 * 71 * 53)
    )


class Watched(ProTrainCheckpoint):
    """Remembers how large the copy was."""

    taken = 0

    def _close(self, trainer: L.Trainer) -> None:
        self.taken, self.module = self._snapshot.nbytes, trainer.lightning_module
        super()._close(trainer)


def fitted(module: Any, root: Path, **options: Any) -> tuple[ProTrainStrategy, Watched]:
    saver = Watched(root, every_n_train_steps=2, **{"asynchronous": True, **options})
    strategy = ProTrainStrategy(device_memory="1GiB", monitor=False)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=4, strategy=strategy, callbacks=[saver, Stop(2)], **SILENT
    )
    trainer.fit(module, datamodule=Sequences())
    return strategy, saver


def phases(strategy: ProTrainStrategy) -> dict[str, int]:
    assert strategy.plan is not None
    assert strategy.plan.prediction is not None
    return {phase.name: phase.host.get("checkpoint_copy", 0) for phase in strategy.plan.prediction.phases}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return pretrained(tmp_path_factory.mktemp("models") / "base")


def explained(strategy: ProTrainStrategy) -> str:
    assert strategy.plan is not None
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(strategy.plan.explain())
    return console.export_text()


def half_frozen(base: str) -> Any:
    module = make(model=base)
    module.configure_model()
    for number, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    return module


def of_a_lost_model(base: str) -> Any:
    module = adapted(base)
    module.configure_model()
    module.hparams["model"] = f"{base}-moved"
    return module


MODULES: dict[str, Any] = {
    "full": lambda base: make(model=base),
    "LoRA": adapted,
    "half frozen": half_frozen,
    "LoRA of a lost model": of_a_lost_model,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("kind", "frozen"),
    [
        ("full", "auto"),
        ("LoRA", "auto"),
        ("LoRA", "store"),
        ("half frozen", "reference"),
        ("half frozen", "store"),
        ("LoRA of a lost model", "auto"),
    ],
)
def test_the_plan_has_the_bytes_of_the_copy(kind: str, frozen: str, base: str, tmp_path: Path) -> None:
    strategy, saver = fitted(MODULES[kind](base), tmp_path, frozen=frozen)
    assert saver.taken > 0
    loading, *others = phases(strategy).values()
    assert loading == 0
    (planned,) = set(others)
    number = len([parameter for parameter in saver.module.parameters() if parameter.requires_grad])
    assert 0 <= planned - saver.taken <= number * _BESIDE_STATES


def test_the_plan_names_the_bytes_of_the_copy(base: str, tmp_path: Path) -> None:
    strategy, _ = fitted(adapted(base), tmp_path)
    planned = max(phases(strategy).values())
    assert f"Of the host, {short_bytes(planned)} are the copy of the checkpoint" in explained(strategy)


@pytest.mark.filterwarnings("ignore:The last step of this run, [0-9]+, is not saved")
@pytest.mark.parametrize("options", [{"asynchronous": False}, {"save_top_k": 0}])
def test_without_a_copy_the_plan_names_none(options: dict[str, Any], base: str, tmp_path: Path) -> None:
    strategy, saver = fitted(adapted(base), tmp_path, **options)
    assert saver.taken == 0
    assert strategy.plan is not None
    assert strategy.plan.prediction is not None
    assert all("checkpoint_copy" not in phase.host for phase in strategy.plan.prediction.phases)
    assert "copy" not in explained(strategy)


def test_weights_alone_are_less(base: str, tmp_path: Path) -> None:
    strategy, saver = fitted(adapted(base), tmp_path, save_weights_only=True)
    assert max(phases(strategy).values()) == saver.taken > 0


def test_only_callbacks_that_keep_one_are_asked(tmp_path: Path) -> None:
    module = Tied()
    saver = ProTrainCheckpoint(tmp_path, asynchronous=True)
    assert isinstance(saver, HoldsHostCopy)
    trainer: Any = SimpleNamespace(lightning_module=module, callbacks=[L.Callback(), saver])
    assert copied_bytes(trainer, [], 8.0) == copy_of(module, (), (), 8.0)
    assert copied_bytes(SimpleNamespace(callbacks=[L.Callback()]), [], 8.0) == 0  # type: ignore[arg-type]


# --- in the planner ---------------------------------------------------------------------------------------------------


def on_host(problem: Problem, plan: Plan) -> int:
    """Return the peak host memory of a plan, as the sum of its terms."""
    layout, machine, again = problem.layout, problem.hardware, problem.training.accumulate
    trains = max(
        host_bytes(layout, plan.chunks, problem.state_bytes, plan.blocks),
        sum(host_terms(layout, plan, problem.state_bytes, HostUse(1, again), machine.asynchronous).values()),
    )
    loads = sum(loading_terms(layout, plan, machine.asynchronous).values())
    return max(trains + problem.checkpoint_copy, loads)


@pytest.mark.parametrize("seed", range(8))
def test_the_search_leaves_room_for_the_copy(seed: int) -> None:
    source = random.Random(seed)
    problem = replace(random_problem(seed, 4, 8), checkpoint_copy=source.choice([1, 5000, 100_000]))
    candidates = list(all_candidates(problem, Knobs()))
    needed = [on_host(problem, each.plan) for each in candidates]
    budget = source.choice(sorted(needed)[: len(needed) // 2 + 1])
    fitting = [each for each, nbytes in zip(candidates, needed, strict=True) if nbytes <= budget]
    found = find_any(replace(problem, host_bytes=budget), Knobs())
    assert on_host(problem, found.plan) <= budget
    assert found.fastest <= 1.01 * fastest(problem, fitting)
    with pytest.raises(NoFeasiblePlan, match=rf"{problem.checkpoint_copy} bytes?.* are the copy of the checkpoint"):
        search(replace(problem, host_bytes=min(needed) - 1), Knobs())


def test_it_is_a_term_of_every_phase_but_loading() -> None:
    problem = random_problem(1, 4, 8)
    plan = find_any(problem, Knobs()).plan
    plain, more = (memory_timeline(replace(problem, checkpoint_copy=nbytes), plan) for nbytes in (0, 777))
    for before, after in zip(plain.phases, more.phases, strict=True):
        copied = {} if before.name == "loading" else {"checkpoint_copy": 777}
        assert replace(before, host={**before.host, **copied}) == after


@pytest.mark.parametrize("choice", ["offload", "resident"])
def test_a_plan_that_is_not_searched_for_leaves_room_too(choice: str) -> None:
    found = case(GIB, choice=choice, host_memory=GIB)
    plan = found.plan()
    copied = replace(found, workload=replace(found.workload, copied_bytes=1000))
    assert copied.plan() == plan
    assert copied.spare_host_bytes(plan) == found.spare_host_bytes(plan) - 1000
    least = host_bytes(found.workload.layout, plan.chunks, found.workload.state_bytes, plan.blocks)
    for made in (choice, plan):
        assert asking(copied, choice=made, host_memory=least + 1000).plan() == plan
        if least:
            with pytest.raises(ValueError, match=r"1000 bytes.* are the copy of the checkpoint"):
                asking(copied, choice=made, host_memory=least + 999).plan()
            with pytest.raises(ValueError, match="host memory") as caught:
                asking(copied, choice=made, host_memory=least - 1).plan()
            assert "copy" not in str(caught.value)


def test_ranks_of_a_machine_share_one_copy() -> None:
    found = case(GIB, host_memory=GIB)
    found = replace(found, workload=replace(found.workload, copied_bytes=1001))
    shared = replace(found, ranks=RankLayout(1, 4))
    assert [each._checkpoint_copy for each in (found, shared)] == [1001, 251]
