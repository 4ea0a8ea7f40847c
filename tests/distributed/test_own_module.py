"""The project's own module and data under a searched plan: any number of ranks end with the loss of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_protrain import CausalLMModule, ChatDataModule, ProTrainStrategy
from tests.data.conftest import conversation
from tests.support.machines import CPU
from tests.support.ranks import run_ranks, trainer_on_rank, values

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


def train(rank: int, world_size: int, folder: Path, lora: bool, budget: str) -> tuple[dict[str, float], bool, int]:
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


@pytest.mark.parametrize(("lora", "budget"), [(False, "2400KiB"), (True, "2MiB")], ids=["full", "lora"])
def test_two_and_three_ranks_end_with_the_loss_of_one_process(lora: bool, budget: str, tmp_path: Path) -> None:
    chats(tmp_path, 1).setup("fit")  # The tokenizer is made once, and kept.
    found = []
    for world_size in (1, 2, 3):
        meeting = tmp_path / str(world_size)
        meeting.mkdir()
        found.append(values(run_ranks(train, world_size, meeting, world_size, tmp_path, lora, budget)))
    ((alone, _, _),) = found[0]
    for ranks in found:
        for losses, searched, offloaded in ranks:
            assert losses == pytest.approx(alone, abs=1e-3)
            assert searched
            assert offloaded or lora  # Frozen weights fit where batches are small.
