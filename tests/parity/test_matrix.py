"""Training under any plan is bitwise equal to Lightning's plain Trainer: losses, gradient norms and weights."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.runtime import hooks
from lightning_protrain.runtime.chunk import Chunk, ChunkState
from lightning_protrain.runtime.grad_offload import GradOffload
from lightning_protrain.runtime.param import OffloadedParam
from tests.support.models import HIDDEN, OPTIMIZERS, LanguageModel, ParityModule, variants, zoo
from tests.support.parity import CLIPPING, Result, differences, run
from tests.support.plans import plans

MODELS = zoo()
PLANS = plans()
ACCUMULATION = (1, 3)
DIMENSIONS: tuple[tuple[Any, ...], ...] = (
    tuple(PLANS),
    tuple(MODELS),
    tuple(CLIPPING),
    ACCUMULATION,
    tuple(OPTIMIZERS),
)
Case = tuple[str, str, str, int, str]
Reference = Callable[[str, str, int, str], Result]


def _selection() -> list[Case]:
    """Two cases for every plan and model, such that every pair of values of any two dimensions occurs."""
    selected = []
    for (p, plan), (m, model), turn in itertools.product(enumerate(PLANS), enumerate(MODELS), range(2)):
        clipping = DIMENSIONS[2][(p + m + turn) % 3]
        accumulation = ACCUMULATION[(p + turn) % 2]
        optimizer = DIMENSIONS[4][(p + 2 * m + 2 * turn + m // 3) % 3]
        selected.append((plan, model, clipping, accumulation, optimizer))
    return selected


def _options(clipping: str, accumulation: int) -> dict[str, Any]:
    """An epoch has fourteen batches: fourteen steps, or two times five with accumulation."""
    epochs = 1 if accumulation == 1 else 2
    return {"max_epochs": epochs, "accumulate_grad_batches": accumulation, **CLIPPING[clipping]}


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Plain runs, each made once."""

    @functools.cache
    def plain(model: str, clipping: str, accumulation: int, optimizer: str) -> Result:
        return run(MODELS[model](optimizer=optimizer), **_options(clipping, accumulation))

    return plain


def _name(case: Case) -> str:
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", _selection(), ids=_name)
def test_parity(case: Case, reference: Reference) -> None:
    plan, model, clipping, accumulation, optimizer = case
    module = MODELS[model](optimizer=optimizer)
    found = run(module, PLANS[plan](module), **_options(clipping, accumulation))
    expected = reference(model, clipping, accumulation, optimizer)
    assert differences(expected, found) == []
    assert len(expected.norms) >= 2 * 10, "two entries for each step"


def test_the_selection_has_every_pair_of_values() -> None:
    assert len(set(_selection())) == len(_selection()) == 70
    for first, second in itertools.combinations(range(len(DIMENSIONS)), 2):
        covered = {(case[first], case[second]) for case in _selection()}
        assert covered == set(itertools.product(DIMENSIONS[first], DIMENSIONS[second]))


def test_two_equal_runs_do_not_differ_and_two_seeds_do(reference: Reference) -> None:
    plain = reference("dropout", "unclipped", 1, "adamw")
    assert differences(plain, run(MODELS["dropout"]())) == []
    assert any(name.startswith("losses") for name in differences(plain, run(MODELS["dropout"](), seed=1)))


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


def test_clipping_and_accumulation_change_the_run(reference: Reference) -> None:
    runs = [reference("tied", clipping, accumulation, "sgd") for clipping in CLIPPING for accumulation in ACCUMULATION]
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
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    found = run(MODELS[model](), "offload", **_options("unclipped", accumulation))
    changed = differences(reference(model, "unclipped", accumulation, "adamw"), found)
    assert any(name.startswith("losses") for name in changed)
    assert any(name.startswith("norms") for name in changed)
    assert any(name.startswith("network.") for name in changed)
