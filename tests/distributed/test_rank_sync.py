"""Ranks meet before each batch and behind the last; those that differ are named on all, and rank 0 decides."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_protrain.distributed import rank_sync
from lightning_protrain.distributed.failures import FirstRankRefused
from lightning_protrain.distributed.rank_sync import (
    decide,
    length_is_known,
    meet_in_epochs,
    refuse_differences,
    refuse_others,
    refuse_uneven,
    say_if_weights_differ,
    validation_place,
)
from lightning_protrain.planner.plan import Plan
from lightning_protrain.profiler.blocks import describe_model
from tests.support.plans import preset
from tests.support.ranks import run_ranks, values
from tests.support.trainers import QUIET


def _frozen() -> nn.Module:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    return model


def _turned() -> nn.Module:
    """Return a linear layer whose parameters are registered in the opposite order."""
    model = nn.Linear(3, 2)
    bias = model._parameters.pop("bias")
    model._parameters = {"bias": bias, "weight": model.weight}
    return model


# What differs from `nn.Linear(3, 2)`, and how that is said.
MODELS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: nn.Linear(3, 2), ""),
    (
        lambda: nn.Linear(2, 3),
        "(2 of 2 tensors differ). Rank 0: 'weight' is float32[2, 3], trained; rank 1: 'weight' is float32[3, 2]",
    ),
    (
        lambda: nn.Linear(3, 2, bias=False),
        "(1 of 2 tensors differ). Rank 0: 'bias' is float32[2], trained; rank 1: 1 tensors, not",
    ),
    (lambda: nn.Linear(3, 2).bfloat16(), "rank 1: 'weight' is bfloat16[2, 3], trained"),
    (
        _frozen,
        "(1 of 2 tensors differ). Rank 0: 'bias' is float32[2], trained; rank 1: 'bias' is float32[2], frozen",
    ),
    (
        lambda: nn.Sequential(nn.Linear(3, 2)),
        "(4 of 4 tensors differ). Rank 0: 'weight' is float32[2, 3], trained; rank 1: 2 tensors",
    ),
    (_turned, "(0 of 2 tensors differ). The same tensors are in another order"),
]
# The same of `torch.optim.AdamW`.
OPTIMIZERS: list[tuple[Callable[[nn.Module], list[torch.optim.Optimizer]], str]] = [
    (lambda model: [torch.optim.AdamW(model.parameters())], ""),
    (lambda model: [torch.optim.AdamW(model.named_parameters())], ""),
    (lambda model: [torch.optim.AdamW([{"params": [*model.parameters()], "note": object()}])], ""),
    (lambda model: [torch.optim.SGD(model.parameters())], "rank 1 has SGD with {'lr': 0.001"),
    (lambda model: [torch.optim.AdamW(model.parameters(), lr=0.5)], "rank 1 has AdamW with {'lr': 0.5"),
    (lambda model: [torch.optim.AdamW([model.weight])], "'parameters': 1}"),
    (lambda model: [], "rank 1 has none"),
]


def _compare(rank: int) -> tuple[list[str], list[str]]:
    """Return the errors on this rank if the last rank has another model, and if it has other optimizers."""
    models, optimizers = [], []
    for make, _ in MODELS:
        layout = describe_model(make() if rank else nn.Linear(3, 2))
        models.append(_attempt(lambda layout=layout: refuse_others(layout, "cpu", "32-true")))
    model = nn.Linear(3, 2)
    for among, _ in OPTIMIZERS:
        own = (among if rank else OPTIMIZERS[0][0])(model)
        how = describe_model(model), "cpu", "32-true", "auto", own
        optimizers.append(_attempt(lambda how=how: refuse_others(*how)))
    return models, optimizers


def test_other_models_and_optimizers_are_named_on_all_ranks(tmp_path: Path) -> None:
    found, second = values(run_ranks(_compare, 2, tmp_path))
    assert found == second
    for said, (_, expected) in zip(found[0], MODELS, strict=True):
        assert said.startswith("The ranks have different models" if expected else "None"), said
        assert expected in said
    for said, (_, expected) in zip(found[1], OPTIMIZERS, strict=True):
        assert said.startswith("The ranks have different optimizers: rank 0 has AdamW" if expected else "None"), said
        assert expected in said


def _attempt(action: Callable[[], Any]) -> str:
    try:
        return str(action())
    except ValueError as error:
        return str(error)


def _agree(rank: int) -> list[str]:
    """Return the refusals and decisions that this rank gets."""
    said: list[str] = []
    rank_sync.rank_zero_info = said.append
    same = {"versions": "torch 2", "models": "abc"}
    torch.manual_seed(rank)
    equal, different = nn.Linear(3, 2), nn.Linear(3, 2)
    nn.init.ones_(equal.weight)
    nn.init.ones_(equal.bias)
    found = [
        _attempt(lambda: refuse_differences(same)),
        _attempt(lambda: refuse_differences({**same, "models": f"abc{rank == 2}"})),
        _attempt(lambda: say_if_weights_differ(equal)),
        _attempt(lambda: say_if_weights_differ(different)),
        _attempt(lambda: say_if_weights_differ(nn.Linear(3, 2, device="meta"))),
        _attempt(lambda: refuse_uneven(5)),
        _attempt(lambda: refuse_uneven(float("inf"))),
        _attempt(lambda: refuse_uneven(5 + (rank == 1))),
    ]
    return [*found, *said]


def test_three_ranks_agree_or_all_of_them_say_who_differs(tmp_path: Path) -> None:
    found = values(run_ranks(_agree, 3, tmp_path))
    assert found[0] == found[1] == found[2]
    assert "".join(found[0]).count("None") == 6
    models, batches, weights = (text for text in found[0] if text != "None")
    assert models == (
        "The ranks have different models: rank 0 has abcFalse, rank 2 has abcTrue. All ranks must build the same "
        "model, with the same settings and packages, on the same kind of device."
    )
    assert batches == (
        "The ranks have different numbers of training batches (rank 0: 5, rank 1: 6, rank 2: 5), so some would wait "
        "for ranks without a batch. Give all ranks the same number (`drop_last=True`, a DistributedSampler), or set "
        "Trainer(limit_train_batches=...)."
    )
    assert weights == (
        "The weights of rank 1, 2 differ from those of rank 0, and will be replaced by them. To avoid this, call "
        "`seed_everything` with the same seed before the model is made."
    )


def _decide(rank: int) -> tuple[list[str], bool]:
    """The names of the plan on this rank, why there is none, and whether it had to make one itself."""
    made = []

    def make() -> Plan:
        made.append(dist.get_rank())
        return preset(nn.Linear(3, 2), "offload")

    def fail() -> Plan:
        raise ValueError("no plan fits")

    with pytest.raises(ValueError, match="no plan fits") as refusal:
        decide(fail)
    assert isinstance(refusal.value.__cause__, FirstRankRefused) == (rank > 0)
    plan = decide(make)
    return [*plan.chunks[0].parameters, _attempt(lambda: decide(fail)), plan.to_json()], made == [0]


def test_rank_0_decides_or_fails_for_all(tmp_path: Path) -> None:
    (first, makes), (second, second_makes) = values(run_ranks(_decide, 2, tmp_path))
    assert first == second
    assert first[:3] == ["weight", "bias", "no plan fits"]
    assert (makes, second_makes) == (True, False)


class Speaker(BoringModel):
    """A module that records the order of hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.patches = ExitStack()

    def on_train_start(self) -> None:
        meet_in_epochs(self.trainer, lambda: self.notes.append("before"), self.notes.append, self.patches)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.notes.append("trains")
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        self.notes.append(validation_place(self.trainer))

    def on_train_epoch_end(self) -> None:
        self.notes.append("ends")


def _fit(**options: Any) -> tuple[Speaker, Trainer]:
    model = Speaker()
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=2, limit_train_batches=2, **QUIET, **options)
    trainer.fit(model)
    return model, trainer


def test_ranks_meet_before_hooks_that_may_wait_for_others() -> None:
    model, trainer = _fit(limit_val_batches=1)
    first = ["trains", "trains", "validation after batch 2 of epoch 0", "the end of epoch 0", "ends"]
    second = ["trains", "trains", "validation after batch 2 of epoch 1", "the end of epoch 1", "ends"]
    assert model.notes == ["", *first, *second]  # The check before the first batch is nowhere.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor()  # One process has no need of it.
    assert model.notes[-1] == "before"
    model.patches.close()
    assert not {"on_advance_end", "_broadcast_sigterm_tensor"} & {
        *vars(trainer.fit_loop),
        *vars(trainer.fit_loop.epoch_loop),
    }


@pytest.mark.parametrize("theirs", [False, True])
def test_what_a_run_replaces_is_put_back(theirs: bool) -> None:
    """Others may have replaced it before; and what they replace during the run stays."""
    trainer, calls = Trainer(accelerator="cpu", devices=1, **QUIET), []
    loop, patches = trainer.fit_loop, ExitStack()
    if theirs:
        loop.on_advance_end = lambda: calls.append("theirs")  # type: ignore[method-assign]
    before = dict(vars(loop))
    meet_in_epochs(trainer, lambda: None, calls.append, patches)
    if theirs:
        loop.on_advance_end()
        assert calls == ["the end of epoch 0", "theirs"]
    patches.close()
    assert vars(loop) == before
    meet_in_epochs(trainer, lambda: None, calls.append, patches)
    loop.on_advance_end = later = lambda: None  # type: ignore[method-assign]
    patches.close()
    assert loop.on_advance_end is later


@pytest.mark.parametrize("strategy", ["auto", "protrain"])
def test_a_step_of_others_is_called_in_each_run(strategy: str) -> None:
    trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=1, limit_val_batches=1, **QUIET)
    calls: list[str] = []
    loops = {"fit": trainer.fit_loop.epoch_loop.val_loop, "validate": trainer.validate_loop}
    for name, loop in loops.items():
        loop._evaluation_step = functools.partial(_counted, calls, name, loop._evaluation_step)  # type: ignore[method-assign]
    theirs = {name: loop._evaluation_step for name, loop in loops.items()}
    model = BoringModel()
    for _ in range(2):
        trainer.fit(model)
        trainer.validate(model, verbose=False)
        assert {name: loop._evaluation_step for name, loop in loops.items()} == theirs
    assert calls.count("validate") == 2
    assert "fit" in calls


def _counted(calls: list[str], name: str, own: Callable[..., None], *args: Any) -> None:
    calls.append(name)
    own(*args)


class Stream(IterableDataset[Tensor]):
    """Nobody knows before how many rows."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(4, 32))


@pytest.mark.parametrize("limit", [1, 1.0])
@pytest.mark.parametrize("is_known", [True, False])
def test_one_loader_of_several_without_a_length_leaves_it_unknown(is_known: bool, limit: float) -> None:
    model, found = BoringModel(), []
    known = model.train_dataloader()

    def training_step(batch: dict[str, Tensor], batch_idx: int) -> Any:
        found.append(length_is_known(model.trainer))
        return BoringModel.training_step(model, batch["a"], batch_idx)

    model.training_step = training_step  # type: ignore[method-assign]
    loaders = {"a": known, "b": known if is_known else DataLoader(Stream())}
    Trainer(accelerator="cpu", devices=1, max_steps=1, limit_train_batches=limit, **QUIET).fit(model, loaders)
    assert found == [is_known]
