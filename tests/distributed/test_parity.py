"""Ranks give the weights of DDP however they are started, and the losses of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_protrain import CausalLMModule, ChatDataModule, ProTrainCheckpointIO, ProTrainStrategy
from tests.data.conftest import conversation
from tests.distributed import launched
from tests.support.machines import CPU
from tests.support.rank_models import Module
from tests.support.ranks import run_ranks, trainer_on_rank, values

ROOT = Path(__file__).resolve().parents[2]
STARTS = {
    "script": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    "spawn": [sys.executable],
}


def launch(how: str, plan: str, folder: Path) -> dict[str, Tensor]:
    path = folder / f"{plan}.pt"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*STARTS[how], str(launched.__file__), how, plan, str(path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Tensor] = torch.load(path, weights_only=True)
    newest = path.with_suffix("") / "last"
    saved = ProTrainCheckpointIO().load_checkpoint(newest)["state_dict"]
    assert saved.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in saved.items())
    return found


def _train_with_ddp(rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Module("tied")
    trainer_on_rank(rank, 2, max_steps=5).fit(module)
    return {name: value.numpy() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def weights_of_ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = values(run_ranks(_train_with_ddp, 2, tmp_path_factory.mktemp("ddp")))[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", STARTS)
def test_every_way_to_start_gives_the_weights_of_ddp(how: str, weights_of_ddp: dict[str, Any], tmp_path: Path) -> None:
    found = launch(how, "offload", tmp_path)
    assert list(found) == list(weights_of_ddp)
    assert [
        name for name, value in weights_of_ddp.items() if not torch.equal(torch.from_numpy(value), found[name])
    ] == []


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
GLOBAL_BATCH = 12


def chats(folder: Path, batch_size: int) -> ChatDataModule:
    """Return conversations of many lengths, of which a fifth is for validation."""
    path = folder / "chats.jsonl"
    if not path.exists():
        lines = [json.dumps(conversation(f"Question {i}?", "word " * (1 + i % 7))) + "\n" for i in range(60)]
        path.write_text("".join(lines))
    options: dict[str, Any] = {"vocab_size": 280, "batch_size": batch_size, "val_fraction": 0.2}
    return ChatDataModule(str(path), cache_dir=str(folder / "cache"), **options)


def train_own(rank: int, world_size: int, folder: Path, lora: bool, budget: str) -> tuple[dict[str, float], bool, int]:
    """Return the losses, whether the plan was searched for, and the number of offloaded chunks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = chats(folder, GLOBAL_BATCH // world_size)
    module = CausalLMModule(config=LLAMA, warmup_steps=0, learning_rate=1e-2, lora={"r": 4} if lora else None)

    def strategy(**process: Any) -> ProTrainStrategy:
        return ProTrainStrategy(device_memory=budget, hardware=CPU, monitor=False, **process)

    options: dict[str, Any] = {"max_steps": 6, "val_check_interval": 2, "check_val_every_n_epoch": None}
    trainer = trainer_on_rank(rank, world_size, kind=strategy, num_sanity_val_steps=0, **options)
    trainer.fit(module, data)
    losses = {name: float(trainer.callback_metrics[name]) for name in ("train_loss", "val_loss")}
    plan = trainer.strategy.plan
    return losses, plan.prediction is not None, plan.num_offloaded_chunks


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "budget"), [(False, "2400KiB"), (True, "2MiB")], ids=["full", "lora"])
def test_two_and_three_ranks_end_with_the_loss_of_one_process(lora: bool, budget: str, tmp_path: Path) -> None:
    chats(tmp_path, 1).setup("fit")  # The tokenizer is made once, and kept.
    found = []
    for world_size in (1, 2, 3):
        meeting = tmp_path / str(world_size)
        meeting.mkdir()
        found.append(values(run_ranks(train_own, world_size, meeting, world_size, tmp_path, lora, budget)))
    ((alone, _, _),) = found[0]
    for ranks in found:
        for losses, searched, offloaded in ranks:
            assert losses == pytest.approx(alone, abs=1e-3)
            assert searched
            assert offloaded or lora  # Frozen weights fit where batches are small.
