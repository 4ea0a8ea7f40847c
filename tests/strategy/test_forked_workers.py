"""Workers of a DataLoader that live on while the host steps do not inherit what it steps, and so do not double it."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_protrain import ProTrainStrategy
from tests.support.models import QUIET

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="only Linux says what is inherited")
# A weight of 1 MiB.
WIDTH = 1 << 9


class Wide(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def fit(module: Wide, folder: Path, callback: L.Callback, resumes: Path | None = None, **options: Any) -> L.Trainer:
    precision, persistent = options.pop("precision", "32-true"), options.pop("persistent", False)
    loader = DataLoader(
        torch.ones(4, WIDTH), num_workers=2, persistent_workers=persistent, multiprocessing_context="fork"
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=1, precision=precision, callbacks=[callback], **QUIET, **options,
        strategy=ProTrainStrategy(plan="offload", monitor=False), default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, loader, ckpt_path=resumes)
    return trainer


def number_inherited(tensors: Iterable[Tensor], process: int) -> int:
    """Return how many of the tensors a process has, by the middle of their memory."""
    texts = [line.split()[0].split("-") for line in Path(f"/proc/{process}/maps").read_text().splitlines()]
    ranges = [(int(begin, 16), int(end, 16)) for begin, end in texts]
    places = [tensor.data_ptr() + tensor.nbytes // 2 for tensor in tensors]
    return sum(any(begin <= place < end for begin, end in ranges) for place in places)


class Looks(L.Callback):
    """Looks in each epoch, while its workers live, at what they have of optimizer states and of weights."""

    def __init__(self) -> None:
        self.states: list[int] = []
        self.weights: list[int] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Tensor, index: int) -> None:
        if index == 0:
            states = trainer.optimizers[0].state.values()
            moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
            for worker in multiprocessing.active_children():
                self.states.append(number_inherited(moments, worker.pid or 0) if moments else -1)
                self.weights.append(number_inherited(module.parameters(), worker.pid or 0))


@pytest.mark.parametrize(("precision", "weights"), [("32-true", 2), ("bf16-mixed", 0)])
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_inherit_neither_states_nor_masters(
    precision: str, weights: int, persistent: bool, tmp_path: Path
) -> None:
    """Weights that are streamed as they are lie in page-locked memory on a GPU, which workers never inherit."""
    looks = Looks()
    trainer = fit(Wide(), tmp_path, looks, precision=precision, persistent=persistent, max_epochs=2)
    first = [-1] * 2  # There were no states when the workers were forked.
    if persistent:
        trainer.save_checkpoint(tmp_path / "first.ckpt")
        looks, first = Looks(), []
        options = {"precision": precision, "persistent": True, "max_epochs": 3}
        fit(Wide(), tmp_path, looks, tmp_path / "first.ckpt", **options)
    assert looks.states == [*first, 0, 0]
    assert set(looks.weights) == {weights}


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

    module = Wide()
    trainer = fit(module, tmp_path, Forks(), max_steps=1)
    state = trainer.optimizers[0].state[module.blocks[0].weight]["exp_avg"]
    assert codes == [-signal.SIGSEGV, 0]
    assert [exit_code(state), exit_code(module.blocks[0].weight)] == [0, 0]
