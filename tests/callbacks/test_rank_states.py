"""States of callbacks and data modules that are not the same on all ranks; whole runs: test_checkpoint_world.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from lightning_protrain.callbacks.checkpoint.resume import MOST_COMPARED, restore_own_states, small_states
from lightning_protrain.checkpoint.rank_state import capture
from lightning_protrain.checkpoint.serialize import RANK_STATES


class Data(L.LightningDataModule):
    pass


def _trainer(rank: int = 0, world_size: int = 2, data: Any = None) -> Any:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    return SimpleNamespace(global_rank=rank, world_size=world_size, strategy=strategy, datamodule=data)


CHECKPOINT = {"callbacks": {"A": {"x": 1}, "large": {"w": [torch.zeros(MOST_COMPARED)]}}, "Data": {"at": 3}, "other": 1}


def test_what_is_small_is_compared() -> None:
    assert list(small_states(_trainer(data=Data()), CHECKPOINT)) == ["callbacks/A", "Data"]
    assert list(small_states(_trainer(), CHECKPOINT)) == ["callbacks/A"]
    assert small_states(_trainer(world_size=1), CHECKPOINT) == {}
    assert small_states(_trainer(), {"callbacks": {"A": {"x": 1}}}) == small_states(_trainer(), CHECKPOINT)


def _content(**others: Any) -> dict[str, Any]:
    counts = {"ready": 4, "completed": 4}
    progress = {"current": dict(counts), "total": dict(counts), "is_last_batch": False}
    states = [
        {"random": capture(torch.device("cpu")), "data": None, "others": others if rank else {}} for rank in (0, 1)
    ]
    loops = {"fit_loop": {"epoch_loop.batch_progress": progress}}
    return {"callbacks": {"A": {"x": 0}, "B": 5}, "Data": {"at": 0}, RANK_STATES: states, "loops": loops}


def test_a_rank_gets_what_was_its_own() -> None:
    own = small_states(_trainer(data=Data()), {"callbacks": {"A": {"x": 7}}, "Data": {"at": 9}})
    for rank, expected in ((0, (0, 0)), (1, (7, 9))):
        content = _content(**own)
        assert restore_own_states(_trainer(rank), content, "x") is content[RANK_STATES][rank]
        assert (content["callbacks"]["A"]["x"], content["Data"]["at"]) == expected
        assert content["callbacks"]["B"] == 5


def test_another_number_of_ranks_is_told() -> None:
    content = _content()
    with pytest.warns(UserWarning, match=r"x was saved by 2 ranks and is resumed by 4\..*4/2 of the samples"):
        restore_own_states(_trainer(3, 4), content, "x")
    assert content["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"] == 2
    with pytest.warns(UserWarning, match="falls between two batches"):
        restore_own_states(_trainer(0, 3), _content(), "x")


def test_a_checkpoint_without_them_has_none() -> None:
    assert restore_own_states(_trainer(), {}, "x") is None
