"""Validation and test through Lightning give the same numbers on any number of ranks and for any batch size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from lightning_protrain.callbacks.evaluator import Evaluator
from lightning_protrain.data.datamodule import ChatDataModule
from lightning_protrain.models.module import CausalLMModule
from tests.data.conftest import conversation
from tests.support.ranks import BOUND, kill_this_rank, run_ranks, trainer_on_rank, values

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
NAMES = {"val_loss", "val_perplexity", "val_accuracy"}


def chats(folder: Path, number: int, batch_size: int) -> ChatDataModule:
    """Conversations of many lengths, about half of them for validation."""
    path = folder / "chats.jsonl"
    lines = [json.dumps(conversation(f"Question {i}?", "word " * (1 + i % 7))) + "\n" for i in range(2 * number)]
    path.write_text("".join(lines))
    return ChatDataModule(
        str(path), vocab_size=280, batch_size=batch_size, val_fraction=0.5, cache_dir=str(folder / "cache")
    )


def module() -> CausalLMModule:
    torch.manual_seed(0)
    return CausalLMModule(config=LLAMA, warmup_steps=0)


CASES = [(number, batch_size) for number in (1, 5, 8) for batch_size in (1, 3, 20)]


def validate_all(rank: int, world_size: int, folder: Path) -> list[dict[str, float]]:
    results = []
    for number, batch_size in CASES:
        data = chats(folder / str(number), number, batch_size)
        results.append(dict(trainer_on_rank(rank, world_size).validate(module(), data, verbose=False)[0]))
    return results


@pytest.fixture(scope="module")
def by_world(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[list[dict[str, float]]]]:
    """All cases on all ranks, one start for each number of ranks."""
    folder = tmp_path_factory.mktemp("chats")
    for number in {number for number, _ in CASES}:
        (folder / str(number)).mkdir()
        chats(folder / str(number), number, 1).setup("validate")  # the tokenizer is made once, and kept
    return {
        size: values(run_ranks(validate_all, size, tmp_path_factory.mktemp("ranks"), size, folder))
        for size in (1, 2, 3)
    }


@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_is_that_of_one_process(
    by_world: dict[int, list[list[dict[str, float]]]], world_size: int, case: int
) -> None:
    same_rows = next(index for index, (number, _) in enumerate(CASES) if number == CASES[case][0])
    alone = by_world[1][0][same_rows]
    assert set(alone) == NAMES
    for results in by_world[world_size]:
        assert results[case] == pytest.approx(alone, rel=1e-6)


class Sharded(CausalLMModule):
    """Its weights are gathered for every forward: all ranks have to run as many."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            assert self.model is not None
            base: Any = self.model
            for layer in [*base.model.layers, base.model, base.lm_head]:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


def validate_sharded(rank: int, world_size: int, folder: Path, number: int) -> dict[str, float]:
    torch.manual_seed(0)
    trainer = trainer_on_rank(rank, world_size, ModelParallelStrategy)
    found = trainer.validate(Sharded(config=LLAMA, warmup_steps=0), chats(folder, number, 2), verbose=False)
    return dict(found[0])


@pytest.mark.parametrize("number", [1, 5])
def test_ranks_that_run_out_take_part_in_forwards_that_gather_weights(tmp_path: Path, number: int) -> None:
    """Three ranks: with five rows some have one batch less of their own, with one row two have none."""
    chats(tmp_path, number, 1).setup("validate")
    folders = [tmp_path / name for name in ("alone", "sharded")]
    for folder in folders:
        folder.mkdir()
    (alone,) = values(run_ranks(validate, 1, folders[0], 1, tmp_path, number))
    for each in values(run_ranks(validate_sharded, 3, folders[1], 3, tmp_path, number)):
        assert each == pytest.approx(alone, rel=1e-6)


def validate(rank: int, world_size: int, folder: Path, number: int) -> dict[str, float]:
    return dict(trainer_on_rank(rank, world_size).validate(module(), chats(folder, number, 2), verbose=False)[0])


def fit(rank: int, folder: Path, how: str) -> dict[str, float]:
    data, extra = chats(folder, 5, 2), chats(folder, 5, 3)

    class Failing(CausalLMModule):
        def validation_step(self, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> None:
            if rank == 1 and batch_idx == 1 and self.global_step == 2:
                if how == "raises":
                    raise ValueError("a bad row")
                if how == "dies":
                    kill_this_rank()
            super().validation_step(batch, batch_idx)

    torch.manual_seed(0)
    trainer = trainer_on_rank(
        rank,
        2,
        max_steps=3,
        val_check_interval=1,
        callbacks=[Evaluator({"extra": extra}, every_n_steps=1)],
        num_sanity_val_steps=0,
    )
    trainer.fit(Failing(config=LLAMA, warmup_steps=0), data)
    logged = trainer.callback_metrics
    return {name: float(value) for name, value in logged.items() if name.startswith(("val_", "extra_"))}


def test_validation_and_evaluator_agree_in_a_fit_on_two_ranks(tmp_path: Path) -> None:
    chats(tmp_path, 5, 2).setup("fit")
    first, second = values(run_ranks(fit, 2, tmp_path, tmp_path, "goes on"))
    assert first == second
    assert {first[name] for name in NAMES} == {first[name.replace("val", "extra")] for name in NAMES}


@pytest.mark.parametrize(("how", "error"), [("raises", "ValueError: a bad row"), ("dies", "killed")])
def test_a_rank_that_fails_in_validation_ends_the_run(tmp_path: Path, how: str, error: str) -> None:
    chats(tmp_path, 5, 2).setup("fit")
    first, second = run_ranks(fit, 2, tmp_path, tmp_path, how)
    assert second.error == error
    assert first.error is not None
    assert "rank" in first.error
    assert max(first.seconds, second.seconds) < BOUND
