"""Checkpoints without frozen weights, saved by ranks under every placement, go on to the bit, also on other numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.checkpoint.discover import find_checkpoints
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.checkpoint.references import FROZEN
from lightning_protrain.checkpoint.serialize import WEIGHTS
from lightning_protrain.checkpoint.verification import verify
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.adapter_runs import Stop, adapted, one_bit
from tests.support.exported_models import pretrained
from tests.support.module_runs import VOCAB
from tests.support.rank_models import strategy_of
from tests.support.ranks import run_ranks, trainer_on_rank, values
from tests.support.trainers import SILENT

PLACEMENTS = ("resident", "replicate", "shard")
SAVED_AT, STEPS = 2, 4


class Same(L.LightningDataModule):
    """One batch, the same on every rank: averages are those of one rank, to the bit."""

    def train_dataloader(self) -> DataLoader[Any]:
        tokens = torch.randint(VOCAB, (4, 9), generator=torch.Generator().manual_seed(3))
        return DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=4)  # type: ignore[arg-type]


def fit(
    base: str, make: Any, root: Path, stop: int, frozen: str, path: Any = None, **more: Any
) -> tuple[dict[str, Tensor], ProTrainCheckpoint]:
    """Trains adapters up to a step; what the weights are then, on this rank."""
    module = more.pop("module", None) or adapted(base)
    torch.manual_seed(1)
    saver = ProTrainCheckpoint(root, every_n_train_steps=SAVED_AT, save_top_k=-1, frozen=frozen, **more)  # type: ignore[arg-type]
    trainer = make(module, max_steps=STEPS, max_epochs=-1, callbacks=[Stop(stop), saver], use_distributed_sampler=False)
    trainer.fit(module, datamodule=Same(), ckpt_path=path)
    assert trainer.global_step == stop
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, saver


def on_rank(rank: int, placement: str, module: Any, **options: Any) -> L.Trainer:
    kind = partial(strategy_of, placement, module)
    return trainer_on_rank(rank, dist.get_world_size(), kind, enable_checkpointing=True, **options)


def alone(strategy: Any, module: Any, **options: Any) -> L.Trainer:
    return L.Trainer(accelerator="cpu", devices=1, strategy=strategy, **SILENT, **options)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return pretrained(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def whole(base: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Return the final weights of an uninterrupted run on one rank."""
    return fit(base, partial(alone, "auto"), tmp_path_factory.mktemp("whole"), STEPS, "store")[0]


def _save_and_resume(rank: int, base: str, root: Path, placement: str, frozen: str, behind: bool) -> Any:
    torch.set_num_threads(1)
    make = partial(on_rank, rank, placement)
    fit(base, make, root, SAVED_AT, frozen, asynchronous=behind)
    dist.barrier()
    found, _ = fit(base, make, root, STEPS, frozen, "last", asynchronous=behind)
    return {name: value.tolist() for name, value in found.items()}


def meeting(folder: Path) -> Path:
    found = folder / f"meeting{len(list(folder.glob('meeting*')))}"
    found.mkdir()
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*was saved with world_size=2 and is resumed with")
@pytest.mark.parametrize(
    ("placement", "frozen", "behind"),
    [
        ("shard", "auto", False),
        ("replicate", "reference", True),
        pytest.param("resident", "auto", True, marks=pytest.mark.slow),
        pytest.param("resident", "reference", False, marks=pytest.mark.slow),
        pytest.param("replicate", "auto", False, marks=pytest.mark.slow),
        pytest.param("shard", "reference", True, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_save_adapters_alone_and_go_on_to_the_bit(
    base: str, whole: dict[str, Tensor], tmp_path: Path, placement: str, frozen: str, behind: bool
) -> None:
    root = tmp_path / "root"
    arguments = base, root, placement, frozen, behind
    for found in values(run_ranks(_save_and_resume, 2, meeting(tmp_path), *arguments)):
        assert same({name: torch.tensor(value) for name, value in found.items()}, whole)
    saved = find_checkpoints(root).found
    assert [each.manifest.step for each in saved] == [STEPS, SAVED_AT]
    for each in saved:
        assert verify(each.path) == []
        content = ProTrainCheckpointIO().load_checkpoint(each.path)  # It reads the source.
        assert content["state_dict"].keys() == whole.keys()
        assert FROZEN not in content
        assert each.manifest.record["frozen"]["nbytes"] > each.manifest.files[WEIGHTS].size
    _resume_elsewhere(base, whole, tmp_path, saved[1].path, frozen)


def _resume_elsewhere(base: str, whole: dict[str, Tensor], folder: Path, path: Path, frozen: str) -> None:
    """Check that a checkpoint resumes with the same weights on one rank and on three."""
    for strategy in ("auto", ProTrainStrategy(plan="offload", monitor=False)):
        found, _ = fit(base, partial(alone, strategy), folder / f"one{strategy}"[:20], STEPS, frozen, path)
        assert same(found, whole)
    for placement in ("replicate", "shard"):
        arguments = base, folder / f"three-{placement}", placement, frozen, path
        for found in values(run_ranks(_resume, 3, meeting(folder), *arguments)):
            got = {name: torch.tensor(value) for name, value in found.items()}
            # A third of three equal numbers may be off by a rounding.
            assert got.keys() == whole.keys()
            assert all(torch.allclose(got[name], whole[name], rtol=1e-5, atol=1e-6) for name in whole)


def _resume(rank: int, base: str, root: Path, placement: str, frozen: str, path: Path) -> Any:
    torch.set_num_threads(1)
    found, _ = fit(base, partial(on_rank, rank, placement), root, STEPS, frozen, path)
    return {name: value.tolist() for name, value in found.items()}


@pytest.mark.filterwarnings("ignore:.*was saved with world_size=1 and is resumed with")
def test_a_rank_whose_frozen_weights_are_others_stops_all(base: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    fit(base, partial(alone, "auto"), root, SAVED_AT, "auto")

    def act(rank: int) -> None:
        module = adapted(base)
        if rank == 1:
            one_bit(module)
        fit(base, partial(on_rank, rank, "replicate"), root, STEPS, "auto", "last", module=module)

    first, second = run_ranks(act, 2, meeting(tmp_path))
    assert first.error is not None
    assert second.error is not None
    assert first.error.startswith("FailedElsewhere: Loading")
    assert "failed on rank 1" in first.error
    assert second.error.startswith("ValueError")
    assert all("refers to the frozen weights of" in each for each in (first.error, second.error))
    assert "hangs" not in (first.error, second.error)
