"""Training under any plan is bitwise plain Lightning's, or on two ranks DDP's: losses, gradient norms and weights."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.runtime import hooks
from lightning_protrain.runtime.chunk import Chunk, ChunkState
from lightning_protrain.runtime.grad_offload import GradOffload
from lightning_protrain.runtime.param import OffloadedParam
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.models import HAS_BF16_LSTM, HIDDEN, OPTIMIZERS, LanguageModel, ParityModule, variants, zoo
from tests.support.parity import CLIPPING, Result, differences, run, snapshot
from tests.support.plans import PlanChoice, plans
from tests.support.ranks import run_ranks, trainer_on_rank, values

# Some cases step bfloat16 weights by plain SGD.
pytestmark = pytest.mark.filterwarnings("ignore:.* of the updates are lost")
MODELS = zoo()
PLANS = plans()
ACCUMULATION = (1, 3)
PRECISIONS: dict[str, torch.dtype | None] = {
    "32-true": None,
    "bf16-mixed": None,
    "bf16-true": torch.bfloat16,
    "16-mixed": None,
    "64-true": torch.float64,
}
OVERLAPS = ("off", "backward", "forward")
# One process, or two that hold the offloaded weights each or together.
RANKS = ("one", "replicate", "shard")


class Case(NamedTuple):
    plan: str
    model: str
    clipping: str
    accumulation: int
    optimizer: str
    precision: str
    overlap: str
    ranks: str = "one"

    @property
    def is_possible(self) -> bool:
        """Return True if the strategy accepts the case, and oneDNN has its layers."""
        if self.precision == "16-mixed":
            return self.overlap == "off" and self.model != "lstm" and self.ranks == "one"
        if self.ranks != "one" and self.model == "lstm" and "bf16" in self.precision and not HAS_BF16_LSTM:
            return False
        return (self.clipping, self.overlap) != ("norm", "backward")

    def plain(self) -> Result:
        return _plain(self.model, self.clipping, self.accumulation, self.optimizer, self.precision)

    def make(self) -> tuple[ParityModule, PlanChoice]:
        """A module, and its plan for the dtypes that it trains in; Lightning converts the same again."""
        module = MODELS[self.model](optimizer=self.optimizer)
        return module, PLANS[self.plan](module.to(PRECISIONS[self.precision]))

    def options(self) -> dict[str, Any]:
        """An epoch has fourteen batches: fourteen steps, or two times five with accumulation."""
        epochs = 1 if self.accumulation == 1 else 2
        options = {"max_epochs": epochs, "accumulate_grad_batches": self.accumulation, **CLIPPING[self.clipping]}
        if self.precision == "16-mixed":
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            return {**options, "plugins": MixedPrecision("16-mixed", "cpu", scaler)}
        return {**options, "precision": self.precision}


DIMENSIONS: tuple[tuple[Any, ...], ...] = (
    tuple(PLANS),
    tuple(MODELS),
    tuple(CLIPPING),
    ACCUMULATION,
    tuple(OPTIMIZERS),
    tuple(PRECISIONS),
    OVERLAPS,
    RANKS,
)


def _pairs(case: Case) -> list[tuple[Any, ...]]:
    """Return pairs in the same order in every process, because pytest's workers must collect the same cases."""
    return list(itertools.combinations(enumerate(case), 2))


@functools.cache
def _selection() -> list[Case]:
    """Two cases of one process and one of two ranks for every plan and model; every possible pair of values occurs."""
    selected: list[Case] = []
    seen: Counter[Any] = Counter()
    for ranks, plan, model in itertools.product((RANKS[:1], RANKS[:1], RANKS[1:]), PLANS, MODELS):
        every = [Case(plan, model, *rest) for rest in itertools.product(*DIMENSIONS[2:-1], ranks)]
        # The one with the rarest pairs so far.
        possible = [case for case in every if case.is_possible and case not in selected]
        best = max(possible, key=lambda case: sum(0.1 ** seen[pair] for pair in _pairs(case)))
        seen.update(_pairs(best))
        selected.append(best)
    return selected


@functools.cache
def _plain(model: str, clipping: str, accumulation: int, optimizer: str, precision: str) -> Result:
    """A run without the strategy, made once."""
    case = Case("", model, clipping, accumulation, optimizer, precision, "off")
    return run(MODELS[model](optimizer=optimizer), **case.options())


def _name(case: Case) -> str:
    return "-".join(map(str, case))


@pytest.mark.sample(14)
@pytest.mark.parametrize("case", [case for case in _selection() if case.ranks == "one"], ids=_name)
def test_parity(case: Case) -> None:
    module, plan = case.make()
    expected = case.plain()
    found = run(module, plan, overlap=case.overlap, **case.options())
    if case.overlap == "off":
        assert len(expected.norms) >= 2 * 10, "two entries for each step"
    else:  # Nobody may look at gradients.
        expected = replace(expected, norms=())
    assert differences(expected, found) == []


def _train_on_rank(rank: int, kind: Callable[..., Any], module: ParityModule, case: Case) -> Result:
    trainer = trainer_on_rank(rank, 2, kind=partial(kind, find_unused_parameters=True), **case.options())
    # What `torch.manual_seed` seeds beside this it has no device for, and formats the stack.
    torch.default_generator.manual_seed(rank)
    trainer.fit(module)
    return Result(tuple(module.losses), snapshot(module))


def _compare_on_rank(rank: int, cases: list[Case]) -> list[tuple[str, list[str]]]:
    """The cases that are not bitwise as under DDP, and what differs; plain runs are made once."""
    torch.set_num_threads(1)
    plain: dict[Case, Result] = {}
    wrong = []
    for case in cases:
        module, plan = case.make()
        known = case._replace(plan="", overlap="", ranks="")
        if known not in plain:
            plain[known] = _train_on_rank(rank, DDPStrategy, MODELS[case.model](optimizer=case.optimizer), case)
        options = {"plan": plan, "sharding": case.ranks, "overlap_optimizer": case.overlap, "monitor": False}
        found = _train_on_rank(rank, partial(ProTrainStrategy, **options), module, case)
        strategy: Any = module.trainer.strategy
        assert strategy.plan.num_offloaded_chunks > 0 or case.plan == "resident"
        if changed := differences(plain[known], found):
            wrong.append((_name(case), changed))
    return wrong


@pytest.mark.sample(4)
@pytest.mark.parametrize("model", MODELS)
def test_parity_of_two_ranks(model: str, tmp_path: Path) -> None:
    cases = [case for case in _selection() if case.ranks != "one" and case.model == model]
    assert values(run_ranks(_compare_on_rank, 2, tmp_path, cases)) == [[], []]


def test_the_selection_has_every_possible_pair_of_values() -> None:
    assert len(set(_selection())) == len(_selection()) == 105
    every = (Case(*values) for values in itertools.product(*DIMENSIONS))
    possible = set().union(*(_pairs(case) for case in every if case.is_possible))
    assert possible == set().union(*map(_pairs, _selection()))


def test_two_equal_runs_do_not_differ_and_two_seeds_do() -> None:
    plain = run(MODELS["dropout"]())
    assert differences(plain, run(MODELS["dropout"]())) == []
    assert any(name.startswith("losses") for name in differences(plain, run(MODELS["dropout"](), seed=1)))


@pytest.mark.sample(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", variants())
def test_parity_of_variants(model: str, plan: str) -> None:
    """Buffers that change in every forward, optimization by hand, validation between steps."""
    module = variants()[model]()
    assert differences(run(variants()[model]()), run(module, PLANS[plan](module))) == []


class Spectral(nn.Module):
    """Its power iteration moves a buffer in every forward, and the weight is divided by what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(HIDDEN, HIDDEN))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden).relu()


@pytest.mark.parametrize("plan", PLANS)
def test_parity_where_a_forward_reads_a_buffer_that_it_changes(plan: str) -> None:
    def make() -> ParityModule:
        torch.manual_seed(0)
        return ParityModule(LanguageModel([Spectral(), Spectral()]))

    module = make()
    assert differences(run(make()), run(module, PLANS[plan](module))) == []


def test_clipping_and_accumulation_change_the_run() -> None:
    every = itertools.product(CLIPPING, ACCUMULATION)
    runs = [_plain("tied", clipping, accumulation, "sgd", "32-true") for clipping, accumulation in every]
    for one, other in itertools.combinations(runs, 2):
        assert any(name.startswith("network.") for name in differences(one, other))


# --- planted bugs: what the comparison must not miss ------------------------------------------------------------------


def _skip_landing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of one weight never arrive."""
    land = GradOffload.take

    def lose(self: GradOffload, param: OffloadedParam) -> None:
        if param.fqn.endswith("1.down.weight"):
            param.device_param.grad = None
        else:
            land(self, param)

    monkeypatch.setattr(GradOffload, "take", lose)


def _upload_first_values_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device never sees what the optimizer did."""
    first: dict[int, Tensor] = {}

    def upload(self: CPUDevice, source: Tensor, target: Tensor, after: Any = None) -> None:
        target.copy_(first.setdefault(source.data_ptr(), source.clone()))

    monkeypatch.setattr(CPUDevice, "upload", upload)


def _never_release_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is live is taken as it is, although the host has stepped since."""
    monkeypatch.setattr(Chunk, "release", lambda self: None)
    fetch, wait = Chunk.fetch, Chunk.wait

    def fetch_once(self: Chunk, *how: Any) -> None:
        if self.state is ChunkState.HOST:
            fetch(self, *how)

    def trust(self: Chunk, in_backward: bool) -> None:
        for param in self.params:
            param.read_version = param.seen_version = param.host._version
        wait(self, in_backward)

    monkeypatch.setattr(Chunk, "fetch", fetch_once)
    monkeypatch.setattr(Chunk, "wait", trust)


def _recompute_with_other_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def checkpoint(function: Callable[..., Any], inputs: tuple[tuple[Any, ...], dict[str, Any]], *_: Any) -> Any:
        bound = functools.partial(function, **inputs[1])
        return torch.utils.checkpoint.checkpoint(bound, *inputs[0], use_reentrant=False, preserve_rng_state=False)

    monkeypatch.setattr(hooks, "checkpoint", checkpoint)


def _overwrite_instead_of_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch replaces the gradients of the one before."""
    land = GradOffload.take

    def replace(self: GradOffload, param: OffloadedParam) -> None:
        param.host.grad = None
        land(self, param)

    monkeypatch.setattr(GradOffload, "take", replace)


@pytest.mark.parametrize(
    ("plant", "model", "accumulation"),
    [
        (_skip_landing, "reused", 1),
        (_upload_first_values_only, "tied", 1),
        (_never_release_after_the_step, "moe", 1),
        (_recompute_with_other_random_numbers, "dropout", 1),
        (_overwrite_instead_of_add, "lstm", 3),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)).strip("_"),
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    model: str,
    accumulation: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("offload", model, "unclipped", accumulation, "adamw", "32-true", "off")
    expected = case.plain()
    plant(monkeypatch)
    changed = differences(expected, run(MODELS[model](), "offload", **case.options()))
    assert any(name.startswith("losses") for name in changed)
    assert any(name.startswith("norms") for name in changed)
    assert any(name.startswith("network.") for name in changed)
