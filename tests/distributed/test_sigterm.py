"""SIGTERM on any rank, at any place of a run, ends all ranks before the same batch, and none waits for another one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_protrain.distributed.rank_sync import SigtermNote
from tests.support.rank_models import strategy_of
from tests.support.ranks import run_ranks, trainer_on_rank
from tests.support.terminated_ranks import PLACES, SOON, Told


def _train(rank: int, placement: str, who: tuple[int, ...], place: str) -> Any:
    """After how many batches which exception ends the run, and whether the handler of before is back."""
    torch.set_num_threads(1)
    before = signal.getsignal(signal.SIGTERM)
    module = Told(rank in who, place)
    options = {"limit_train_batches": 6, "limit_val_batches": 2, "val_check_interval": 3, "max_epochs": 2}
    trainer = trainer_on_rank(rank, 2, kind=lambda **process: strategy_of(placement, module, **process), **options)
    try:
        trainer.fit(module)
    except BaseException as error:  # noqa: BLE001 (whatever it is, the test wants to see it)
        end = type(error).__name__
    else:
        end = "none"
    return end, module.num_batches, signal.getsignal(signal.SIGTERM) == before, dist.get_rank()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)], ids=str)
def test_all_ranks_end_before_the_same_batch(who: tuple[int, ...], place: str, tmp_path: Path) -> None:
    outcomes = run_ranks(_train, 2, tmp_path, "shard", who, place)
    batches = {"validation": 3, "last batch": 6}.get(place, 5)
    assert [outcome.value for outcome in outcomes] == [("SIGTERMException", batches, True, rank) for rank in range(2)]
    assert max(outcome.seconds for outcome in outcomes) < SOON


@pytest.mark.parametrize("agrees", [False, True])
def test_a_signal_is_written_down_for_whoever_looks_for_it(agrees: bool) -> None:
    """Before ranks meet, Lightning ends the rank by itself; from then on nothing but the note knows."""
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    note = SigtermNote()
    note.listen(trainer)
    if agrees:
        note.wait_for_others()
    connector = trainer._signal_connector
    connector.register_signal_handlers()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (trainer.received_sigterm, note.received) == (not agrees, agrees)
    finally:
        connector.teardown()
    note.close()
    assert "_sigterm_notifier_fn" not in vars(connector)
    note.listen(trainer)
    assert not note.received
