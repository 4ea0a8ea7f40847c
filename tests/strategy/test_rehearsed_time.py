"""After a rehearsal, steps take what is predicted, whatever rates were planted.

All times are those of this process on the processor, on one thread: a machine that others use as well changes them by a
few per cent, where it changes the times of a clock by factors.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_protrain import CausalLMModule, ProTrainStrategy
from lightning_protrain.device.device import CPUDevice
from lightning_protrain.strategy import plan_session
from tests.strategy.planted import WRONG
from tests.support.machines import CPU
from tests.support.trainers import QUIET

SIZES = {"hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 1536}
CONFIG = {"model_type": "llama", "vocab_size": 300, "num_attention_heads": 8, "tie_word_embeddings": False, **SIZES}
# Steps of a run; the first ones allocate.
STEPS, WARM = 12, 3


class Clock(L.Callback):
    """Keeps when steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.process_time())


@pytest.fixture(autouse=True)
def _processor_time(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(CPUDevice, "mark", lambda device, lane: time.process_time())
    monkeypatch.setattr(CPUDevice, "host_clock", lambda device: time.process_time())
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def predicted_over_measured(by: float, rehearse: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Of one run whose rates of computation and of the link are planted wrong by this factor."""
    monkeypatch.setattr(plan_session, "user_folder", lambda: folder)
    hardware = WRONG["link"](WRONG["compute"](CPU, by), by)
    strategy = ProTrainStrategy(device_memory="64MiB", hardware=hardware, rehearse=rehearse, monitor=False)
    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, max_steps=STEPS, callbacks=[clock], limit_val_batches=0, **QUIET
    )
    torch.manual_seed(0)
    ids = torch.randint(0, 300, (4, 72))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    trainer.fit(CausalLMModule(config=CONFIG, learning_rate=1e-3), DataLoader([batch] * STEPS, batch_size=None))
    assert strategy.plan.num_offloaded_chunks
    took = [end - begin for begin, end in pairwise(clock.ends)]
    return strategy.plan.prediction.step_seconds / median(took[WARM:])


@pytest.mark.slow
@pytest.mark.parametrize("by", [0.25, 4.0])
def test_a_step_takes_what_is_predicted_after_a_rehearsal(
    by: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = predicted_over_measured(by, False, tmp_path / "without", monkeypatch)
    assert not 1 / 1.5 < without < 1.5
    # A rehearsal measures a single micro-batch, which another process may disturb: the middle one of several counts.
    ratios = list[float]()
    while len(ratios) < 3 or (len(ratios) < 5 and abs(median(ratios) - 1) > 0.05):
        ratios.append(predicted_over_measured(by, True, tmp_path / str(len(ratios)), monkeypatch))
    assert median(ratios) == pytest.approx(1.0, abs=0.05), ratios
