"""Workers of a DataLoader that live on while the host steps do not double what it steps."""

from __future__ import annotations

import multiprocessing
import re
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_protrain import ProTrainStrategy
from lightning_protrain.device import device
from tests.support.models import QUIET

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").is_file(), reason="only Linux says what processes share"
)
WIDTH, DEPTH = 1 << 10, 6
WEIGHTS = DEPTH * 4 * WIDTH**2


class Tall(L.LightningModule):
    """Weights of 24 MiB in float32, and two states for each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def anonymous_bytes() -> int:
    """Memory of this process and its children without files, bytes; shared pages count once."""
    paths = [Path(f"/proc/{child.pid}/smaps_rollup") for child in multiprocessing.active_children()]
    texts = [path.read_text() for path in (Path("/proc/self/smaps_rollup"), *paths)]
    return sum(int(size) << 10 for text in texts for size in re.findall(r"Pss_Anon:\s+(\d+) kB", text))


class Grown(L.Callback):
    """Measures how much the processes grow in the first step of each epoch, with the states of the step before."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.num_workers: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.num_workers.append(len(multiprocessing.active_children()))
        self.steps.append(-anonymous_bytes())

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps[-1] += anonymous_bytes()


def fit(folder: Path, precision: Any, persistent: bool, resumes: Path | None = None, **options: Any) -> Grown:
    """Train one step in each epoch, in the last one with workers that were forked when there were states."""
    torch.manual_seed(0)
    grown = Grown()
    loader = DataLoader(
        torch.ones(4, WIDTH), 4, num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=1, precision=precision, callbacks=[grown], **QUIET, **options,
        strategy=ProTrainStrategy(plan="offload", monitor=False), default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Tall(), loader, ckpt_path=resumes)
    if resumes is None:
        trainer.save_checkpoint(folder / "first.ckpt")
    return grown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "persistent", "kept"),
    [
        pytest.param("32-true", False, 2 * WEIGHTS, id="states"),
        pytest.param("bf16-mixed", True, 3 * WEIGHTS, id="states and masters"),
    ],
)
def test_workers_that_live_on_do_not_double_states_and_masters(
    precision: str, persistent: bool, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of Python's own objects are doubled as well, so two runs are compared."""
    first = fit(tmp_path, precision, persistent, max_epochs=1 if persistent else 2)

    def again() -> Grown:  # Persistent workers are forked once, in a run that resumes with the states of another one.
        return fit(tmp_path, precision, persistent, tmp_path / "first.ckpt", max_epochs=2) if persistent else first

    grown = again()
    monkeypatch.setattr(device, "KeptFromForks", lambda tensors: None)
    first = fit(tmp_path, precision, persistent, max_epochs=1 if persistent else 2)
    doubled = again()
    assert grown.num_workers[-1] == doubled.num_workers[-1] == 2
    assert doubled.steps[-1] - grown.steps[-1] > 0.8 * kept


def exit_code(tensor: Tensor) -> int | None:
    """Return the exit code of a forked process that reads a tensor."""
    process = multiprocessing.get_context("fork").Process(target=tensor.tolist)
    process.start()
    process.join()
    return process.exitcode


def test_what_is_kept_from_forks_is_inherited_after_the_run(tmp_path: Path) -> None:
    codes: list[int | None] = []

    class Forks(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
            state = trainer.optimizers[0].state[module.blocks[0].weight]["exp_avg"]
            codes.extend(map(exit_code, (state, module.blocks[0].weight)))

    module = Tall()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=1, callbacks=[Forks()], **QUIET, default_root_dir=tmp_path,
        strategy=ProTrainStrategy(plan="offload", monitor=False),
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.ones(4, WIDTH), 4))
    state = trainer.optimizers[0].state[module.blocks[0].weight]["exp_avg"]
    assert codes == [-signal.SIGSEGV, 0]
    assert [exit_code(state), exit_code(module.blocks[0].weight)] == [0, 0]
