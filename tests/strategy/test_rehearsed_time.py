"""After a rehearsal, steps take what is predicted, whatever rates were planted.

Times are those of `WorkClock`, so that they do not depend on the machine; `benchmarks/rehearsal.py` takes real ones.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_protrain import CausalLMModule, ProTrainStrategy
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.strategy import plan_session
from tests.strategy.planted import WRONG
from tests.support.machines import CPU
from tests.support.trainers import QUIET
from tests.support.work_clock import WorkClock

SIZES = {"hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 1536}
CONFIG = {"model_type": "llama", "vocab_size": 300, "num_attention_heads": 4, "tie_word_embeddings": False, **SIZES}
STEPS = 5


class Ends(L.Callback):
    """Keeps when steps end."""

    def __init__(self, clock: WorkClock) -> None:
        self.clock = clock
        self.seconds: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds.append(self.clock.seconds)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def predicted_over_measured(
    hardware: HardwareProfile, rehearse: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> float:
    """Return predicted over measured step time of a run that plans with these rates."""
    monkeypatch.setattr(plan_session, "user_folder", lambda: folder)
    options = {"device_memory": "64MiB", **options}
    strategy = ProTrainStrategy(hardware=hardware, rehearse=rehearse, monitor=False, **options)
    clock = WorkClock(CPU)
    ends = Ends(clock)
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, max_steps=STEPS, callbacks=[ends], limit_val_batches=0, **QUIET
    )
    torch.manual_seed(0)
    ids = torch.randint(0, 300, (4, 40))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    with clock.running():
        trainer.fit(CausalLMModule(config=CONFIG, learning_rate=1e-3), DataLoader([batch] * STEPS, batch_size=None))
    assert strategy.plan.num_offloaded_chunks
    took = [end - begin for begin, end in pairwise(ends.seconds)]
    return strategy.plan.prediction.step_seconds / median(took)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [
        {"compute": 0.25, "device step": 0.25, "link": 4.0, "host": 0.25},
        {"compute": 4.0, "device step": 4.0, "link": 0.25, "host": 4.0},
        {"device step": 0.02},
    ],
    ids=str,
)
def test_a_step_takes_what_is_predicted_after_a_rehearsal(
    wrong: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = CPU
    for name, by in wrong.items():
        hardware = WRONG[name](hardware, by)
    # A search would offload all that the device steps so slowly.
    options: dict[str, Any] = (
        {"num_persistent_chunks": 2, "device_memory": "80MiB"} if list(wrong) == ["device step"] else {}
    )
    without = predicted_over_measured(hardware, False, tmp_path / "without", monkeypatch, **options)
    assert not 1 / 1.5 < without < 1.5
    found = predicted_over_measured(hardware, True, tmp_path / "with", monkeypatch, **options)
    assert found == pytest.approx(1.0, abs=0.02)
