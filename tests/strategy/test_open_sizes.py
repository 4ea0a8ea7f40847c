"""`batch_size="auto"` and `max_length="auto"`: what is chosen trains exactly as if the user had given it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lightning_protrain import CausalLMModule, ChatDataModule, ProTrainStrategy
from lightning_protrain.planner.search import NoFeasiblePlan
from lightning_protrain.trainer import PlanningTrainer
from tests.data.conftest import conversation
from tests.support.machines import CPU
from tests.support.ranks import run_ranks, trainer_on_rank, values
from tests.support.trainers import QUIET

POSITIONS = 2048
LLAMA = {
    "model_type": "llama",
    "vocab_size": 280,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": POSITIONS,
}
# A step of the optimizer takes as long as computing many rows, so that larger batches are faster.
SLOW_STEPS = replace(CPU, device_step=1e6, host_step=1e6)
AUTO: dict[str, Any] = {"batch_size": "auto", "max_length": "auto"}


def chats(folder: Path, longest: int = 700, **sizes: Any) -> ChatDataModule:
    """Return 40 conversations with answers of up to `longest` words; a fifth is for validation."""
    path = folder / f"chats-{longest}.jsonl"
    if not path.exists():
        answers = ["word " * (1 + i * longest // 39) for i in range(40)]
        lines = [json.dumps(conversation(f"Question {i}?", each)) + "\n" for i, each in enumerate(answers)]
        path.write_text("".join(lines))
    options: dict[str, Any] = {"vocab_size": 280, "val_fraction": 0.2, **sizes}
    return ChatDataModule(str(path), cache_dir=str(folder / "cache"), **options)


def model() -> CausalLMModule:
    torch.manual_seed(0)
    return CausalLMModule(config=LLAMA, warmup_steps=1, learning_rate=1e-2)


def strategy(budget: str, **options: Any) -> ProTrainStrategy:
    return ProTrainStrategy(device_memory=budget, hardware=SLOW_STEPS, monitor=False, **options)


def train(data: ChatDataModule, budget: str, trainer: Trainer | None = None, **options: Any) -> dict[str, Tensor]:
    """Return the weights after a run, in which the learning rate falls to zero, and its last loss."""
    module = model()
    trainer = trainer or Trainer(accelerator="cpu", strategy=strategy(budget), **{"max_epochs": 1, **QUIET, **options})
    trainer.fit(module, data)
    return {**module.state_dict(), "train_loss": trainer.callback_metrics["train_loss"]}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "cuts"), [("16MiB", False), ("2200KiB", True)])
def test_chosen_sizes_train_as_if_they_were_given(
    budget: str, cuts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch.utilities.rank_zero")
    data = chats(tmp_path, **AUTO)
    found = train(data, budget)
    sizes = {"batch_size": data.batch_size, "max_length": data.max_length}
    assert (data.max_length < data.longest_row()) is False
    assert (data.max_length < 720) is cuts
    assert (data.batch_size > 1) is not cuts
    assert f'max_length="auto" is {data.max_length:,}' in caplog.text
    assert ("no training conversation is cut" in caplog.text) is not cuts
    assert_same(found, train(chats(tmp_path, **sizes), budget))


@pytest.mark.slow
def test_one_size_may_be_given(tmp_path: Path) -> None:
    data = chats(tmp_path, max_length=128, batch_size="auto")
    train(data, "64MiB")
    assert data.max_length == 128
    assert data.batch_size > 1
    data = chats(tmp_path, max_length="auto", batch_size=3)
    train(data, "64MiB")
    assert (data.batch_size, data.max_length) == (3, data.longest_row())


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "cuts"), [("64MiB", False), ("2200KiB", True)])
def test_packed_rows_are_no_longer_than_the_longest_conversation(budget: str, cuts: bool, tmp_path: Path) -> None:
    data = chats(tmp_path, packing=True, **AUTO)
    found = train(data, budget)
    assert (data.max_length < 720) is cuts
    sizes = {"batch_size": data.batch_size, "max_length": data.max_length}
    assert_same(found, train(chats(tmp_path, packing=True, **sizes), budget))


def test_longer_conversations_for_validation_do_not_shorten_training(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    for split, words in {"train": 500, "validation": 1900}.items():
        rows = [json.dumps(conversation(f"Question {i}?", "word " * words)) + "\n" for i in range(4)]
        (path / f"{split}.jsonl").write_text("".join(rows))
    data = ChatDataModule(str(path), cache_dir=str(tmp_path / "cache"), vocab_size=280, max_length="auto", batch_size=1)
    train(data, "3MiB")
    assert 500 < data.max_length < 600


def test_a_text_shorter_than_all_that_fit_is_planned_and_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch.utilities.rank_zero")
    data = chats(tmp_path, **AUTO)
    with pytest.raises(NoFeasiblePlan):
        train(data, "100KiB")
    assert 'max_length="auto" is 64: not even the least is planned to fit' in caplog.text


@pytest.mark.slow
def test_each_fit_chooses_anew(tmp_path: Path) -> None:
    data, sizes = chats(tmp_path, **AUTO), []
    for budget in ("16MiB", "2200KiB", "16MiB"):
        train(data, budget)
        sizes.append((data.batch_size, data.max_length))
    assert sizes[0] == sizes[2]
    assert sizes[0][1] > sizes[1][1]


def test_conversations_are_cut_at_the_positions_of_the_model(tmp_path: Path) -> None:
    data = chats(tmp_path, longest=POSITIONS, max_length="auto", batch_size=1)
    train(data, "256MiB", limit_train_batches=1, limit_val_batches=1)
    assert data.max_length == POSITIONS


@pytest.mark.slow
def test_a_resumed_run_keeps_its_sizes(tmp_path: Path) -> None:
    saved = tmp_path / "begun.ckpt"

    def save(trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(saved)

    first, second = chats(tmp_path, **AUTO), chats(tmp_path, **AUTO)
    expected = train(first, "2200KiB", max_steps=4, callbacks=[LambdaCallback(on_train_batch_end=save)])
    module = model()
    resumed = Trainer(accelerator="cpu", strategy=strategy("64MiB"), max_steps=4, **QUIET)
    resumed.fit(module, second, ckpt_path=saved)
    assert (second.batch_size, second.max_length) == (first.batch_size, first.max_length)
    assert_same(module.state_dict(), {name: expected[name] for name in module.state_dict()})


def test_a_run_resumed_from_given_sizes_keeps_them(tmp_path: Path) -> None:
    given = Trainer(accelerator="cpu", strategy=strategy("16MiB"), max_steps=2, **QUIET)
    train(chats(tmp_path, batch_size=2, max_length=300), "", given)
    given.save_checkpoint(tmp_path / "given.ckpt")
    data, resumed = (
        chats(tmp_path, **AUTO),
        Trainer(accelerator="cpu", strategy=strategy("16MiB"), max_steps=4, **QUIET),
    )
    resumed.fit(model(), data, ckpt_path=tmp_path / "given.ckpt")
    assert (data.batch_size, data.max_length) == (2, 300)


def on_rank(rank: int, world_size: int, folder: Path, sizes: dict[str, Any]) -> tuple[int, int, float]:
    torch.set_num_threads(1)
    data = chats(folder, **sizes)

    def made(**process: Any) -> ProTrainStrategy:
        return strategy("4MiB", **process)

    found = train(data, "", trainer_on_rank(rank, world_size, kind=made, max_epochs=1, num_sanity_val_steps=0))
    return data.batch_size, data.max_length, float(found["train_loss"])


@pytest.mark.slow
def test_ranks_train_with_the_same_sizes(tmp_path: Path) -> None:
    chats(tmp_path, batch_size=1).setup("fit")  # The tokenizer is made once, and kept.
    found = values(run_ranks(on_rank, 2, tmp_path, 2, tmp_path, AUTO))
    assert found[0] == found[1]
    sizes = {"batch_size": found[0][0], "max_length": found[0][1]}
    (tmp_path / "given").mkdir()
    assert values(run_ranks(on_rank, 2, tmp_path / "given", 2, tmp_path, sizes)) == found


@pytest.mark.slow
def test_the_plan_of_another_gpu_chooses_sizes_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = PlanningTrainer(accelerator="cpu", strategy="protrain", **QUIET)
    data = chats(tmp_path, **AUTO)
    trainer.plan(model(), data, gpu=["T4"], host_memory="16GiB", host_cores=8)
    assert f"a micro-batch of {data.batch_size} x {data.max_length} tokens" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ValueError, match='"auto" is chosen for one GPU'):
        trainer.plan(model(), chats(tmp_path, **AUTO), gpu=["T4", "L4"], host_memory="16GiB", host_cores=8)
    trainer.plan(model(), ChatDataModule("missing.jsonl", **AUTO), gpu=["T4"], host_memory="16GiB", host_cores=8)
    assert "without it, give batch_size and length" in " ".join(capsys.readouterr().out.split())


def test_without_training_rows_are_whole_and_alone(tmp_path: Path) -> None:
    data = chats(tmp_path, **AUTO)
    trainer = Trainer(accelerator="cpu", strategy="protrain", **QUIET)
    trainer.validate(model(), data, verbose=False)
    assert data.batch_size == 1
    assert data.longest_row() > 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "auto"}, "chosen by ProTrainStrategy during `fit`, and the Trainer has SingleDeviceStrategy"),
        ({"strategy": "protrain"}, "the device has no limit"),
        ({"strategy": ProTrainStrategy(plan="offload", device_memory="64MiB")}, "a plan or all its knobs are given"),
    ],
    ids=["another strategy", "no limit", "a given plan"],
)
def test_what_cannot_be_chosen_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(accelerator="cpu", max_epochs=1, **QUIET, **options).fit(model(), chats(tmp_path, **AUTO))


def test_without_a_trainer_there_are_no_training_batches(tmp_path: Path) -> None:
    data = chats(tmp_path, **AUTO)
    data.setup("fit")
    with pytest.raises(ValueError, match="there is no Trainer"):
        data.train_dataloader()
    with pytest.raises(ValueError, match="max_length=0"):
        chats(tmp_path, max_length=0)
    for wrong in ("most", 2.5, True, None):
        with pytest.raises(ValueError, match=f'batch_size={wrong!r}: give at least 1, or "auto"'):
            chats(tmp_path, batch_size=wrong)


class FailsOnTwoRows(CausalLMModule):
    """A model whose step fails on batches of more than one row, on rank 0."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if len(batch["input_ids"]) > 1 and self.trainer.global_rank == 0:
            raise OSError("two rows")
        return super().training_step(batch, batch_idx)


def fail_on_rank(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)

    def made(**process: Any) -> ProTrainStrategy:
        return strategy("16MiB", **process)

    module = FailsOnTwoRows(config=LLAMA, warmup_steps=1)
    trainer_on_rank(rank, world_size, kind=made, max_epochs=1).fit(module, chats(folder, batch_size="auto"))


@pytest.mark.slow
def test_an_error_while_a_size_is_tried_ends_all_ranks(tmp_path: Path) -> None:
    chats(tmp_path, batch_size=1).setup("fit")
    first, second = (str(each.error) for each in run_ranks(fail_on_rank, 2, tmp_path, 2, tmp_path))
    assert "two rows" in first
    assert "The choice of batch_size failed on rank 0 (OSError: two rows)" in second
