"""Validation, test and prediction on several ranks: every row once, in the order of the data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from torch import Tensor

from tests.data.chat_runs import Recorder, _batches, _data, _trainer


def _scored(batches: list[dict[str, Tensor]]) -> list[list[int]]:
    """The trained tokens of each row that has any."""
    rows = [row[row != -100].tolist() for batch in batches for row in batch["labels"]]
    return [row for row in rows if row]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 11])
def test_ranks_evaluate_every_row_once(
    chats: str, monkeypatch: pytest.MonkeyPatch, world_size: int, batch_size: int
) -> None:
    data = _data(chats, batch_size=batch_size)
    data.setup("validate")
    expected = _scored(_batches(data.val_dataloader()))
    data.trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    monkeypatch.setattr(Trainer, "world_size", world_size)
    shares = []
    for rank in range(world_size):
        monkeypatch.setattr(Trainer, "global_rank", rank)
        shares.append(_batches(data.val_dataloader()))
    assert len({len(share) for share in shares}) == 1
    assert len(expected) == 8
    for rank, share in enumerate(shares):
        assert _scored(share) == expected[rank::world_size]


class Writer(Recorder):
    """Writes down what a rank evaluates."""

    def on_test_start(self) -> None:
        self.batches: list[dict[str, Tensor]] = []

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.batches.append(batch)

    def on_test_end(self) -> None:
        found = [len(self.batches), _scored(self.batches)]
        Path(f"rank{self.global_rank}.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("use_distributed_sampler", [True, False])
def test_two_processes_evaluate_every_row_once(chats: str, use_distributed_sampler: bool) -> None:
    """Seven rows: Lightning's own sampler would make them eight."""
    data = _data(chats, batch_size=2, val_fraction=7 / 40)
    data.setup("test")
    expected = _scored(_batches(data.test_dataloader()))
    assert len(expected) == 7
    _trainer(devices=2, strategy="ddp_fork", use_distributed_sampler=use_distributed_sampler).test(
        Writer(), datamodule=_data(chats, batch_size=2, val_fraction=7 / 40), verbose=False
    )
    found = [json.loads(Path(f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [count for count, _ in found] == [2, 2]
    assert [rows for _, rows in found] == [expected[::2], expected[1::2]]
