"""A checkpoint of one placement resumes under every other one, and has the optimizer states of all owners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.strategy import sharded_states
from tests.support.parity import snapshot
from tests.support.rank_models import Same, strategy_of
from tests.support.ranks import run_ranks, trainer_on_rank, values
from tests.support.trainers import QUIET

SAVED_AT, STEPS = 3, 6
# Adam's states are all there only if those of every owner are.
NUM_STATES = 17


def options_of(steps: int, path: Path | None) -> dict[str, Any]:
    options: dict[str, Any] = {"max_steps": steps, "max_epochs": -1, "use_distributed_sampler": False}
    # A plain Trainer reads folders with the plugin, and files by itself.
    return {**options, "plugins": [ProTrainCheckpointIO()]} if path is not None and path.is_dir() else options


def fit(rank: int, placement: str, steps: int, path: Path | None = None, **more: Any) -> tuple[Same, L.Trainer]:
    """Trains under a placement on all ranks, from a checkpoint if one is given."""
    torch.manual_seed(5 if path is not None else 0)
    module = Same("full")
    options = {**options_of(steps, path), **more}
    if placement != "ddp":
        options["kind"] = lambda **process: strategy_of(placement, module, **process)
    trainer = trainer_on_rank(rank, dist.get_world_size(), **options)
    trainer.fit(module, ckpt_path=path)
    return module, trainer


def plain_fit(steps: int, path: Path | None = None) -> tuple[Same, L.Trainer]:
    torch.manual_seed(5 if path is not None else 0)
    module = Same("full")
    trainer = L.Trainer(accelerator="cpu", devices=1, **QUIET, **options_of(steps, path))  # type: ignore[arg-type]
    trainer.fit(module, ckpt_path=path)
    return module, trainer


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def _save_and_resume(rank: int, folder: Path, saver: str, plain: Path) -> list[str]:
    """Saves under each placement, resumes under each, and says which of them are not what an unbroken run gives."""
    torch.set_num_threads(1)
    unbroken, _ = fit(rank, "ddp", STEPS)
    wrong, paths = [], {"one rank": plain}
    for placement in ("shard", "replicate", "shard half"):
        target = folder / f"{placement.replace(' ', '-')}.ckpt"
        if saver == "trainer":  # After the run: the runtime is gone, and states are still with their owners.
            _, trainer = fit(rank, placement, SAVED_AT)
            trainer.save_checkpoint(target)
        else:
            made: Any = ModelCheckpoint if saver == "ModelCheckpoint" else ProTrainCheckpoint
            callback = made(dirpath=folder / placement, every_n_train_steps=SAVED_AT, save_top_k=-1)
            fit(rank, placement, STEPS, callbacks=[callback], enable_checkpointing=True)
            target = sorted((folder / placement).glob(f"*step={SAVED_AT}*"))[0]
        dist.barrier()
        paths[placement] = target
    for saved, path in paths.items():
        for placement in ("ddp", "replicate", "shard"):
            module, _ = fit(rank, placement, STEPS, path)
            if not same(snapshot(module), snapshot(unbroken)):
                wrong.append(f"saved under {saved}, resumed under {placement}")
    return [*wrong, *(str(path) for path in paths.values())] if rank == 0 else wrong


def resume_everywhere(tmp_path: Path, saver: str) -> list[str]:
    """Return the differences after resuming the checkpoint of `saver` under all placements and on one rank."""
    expected, _ = plain_fit(STEPS)
    _, trainer = plain_fit(SAVED_AT)
    plain = tmp_path / "plain.ckpt"
    trainer.save_checkpoint(plain)
    folder = tmp_path / "ranks"
    folder.mkdir()
    first, second = values(run_ranks(_save_and_resume, 2, folder, tmp_path, saver, plain))
    wrong = [*second, *(text for text in first if text.startswith("saved under"))]
    for path in first[len(first) - 4 :]:
        module, _ = plain_fit(STEPS, Path(path))
        if not same(snapshot(module), snapshot(expected)):
            wrong.append(f"{path} on one rank")
        if Path(path).is_file():
            content = torch.load(path, weights_only=False)
            if len(content["optimizer_states"][0]["state"]) != NUM_STATES:
                wrong.append(f"{path} has {len(content['optimizer_states'][0]['state'])} states")
    return wrong


@pytest.mark.parametrize(
    "saver", ["trainer", pytest.param("ModelCheckpoint", marks=pytest.mark.slow), "ProTrainCheckpoint"]
)
def test_every_placement_resumes_what_any_other_has_saved(saver: str, tmp_path: Path) -> None:
    assert resume_everywhere(tmp_path, saver) == []


@pytest.mark.slow
def test_states_of_one_owner_only_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_states, "_owned", lambda optimizer, owners: {})
    wrong = resume_everywhere(tmp_path, "trainer")
    assert any("shard.ckpt has" in text for text in wrong)
    assert any(text.startswith("saved under shard, resumed under") for text in wrong)
