"""A script as a user would start it, which waits before it loads a model and when everything is set up."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_protrain import CausalLMModule, ProTrainStrategy
from tests.support.trainers import QUIET


class Everywhere(ProTrainStrategy):
    """A strategy under which every rank loads the model."""

    def load_once(self, load: Callable[[], Any], outline: Callable[[], Any]) -> Any:
        return load()


class Module(CausalLMModule):
    """A module that writes its progress to a folder, and waits there for permission to continue."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(**options)
        self.folder = folder

    def configure_model(self) -> None:
        self.wait_for("load", os.getpid())
        super().configure_model()

    def on_fit_start(self) -> None:
        self.wait_for("end", sum(parameter.nbytes for parameter in self.parameters()))
        os._exit(0)

    def wait_for(self, word: str, told: int) -> None:
        part = self.folder / f"{word}-{self.trainer.global_rank}.part"
        part.write_text(str(told))
        part.rename(part.with_suffix(".said"))
        while not (self.folder / word).exists():
            time.sleep(0.02)


def main(model: str, folder: str, dtype: str, who: str, devices: str) -> None:
    """Loads and sets up, and trains nothing."""
    kind = Everywhere if who == "all" else ProTrainStrategy
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(devices),
        strategy=kind(sharding="shard", plan="offload", host_memory="8GiB", monitor=False),
        max_steps=1,
        **QUIET,
    )
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
    trainer.fit(Module(Path(folder), model=model, dtype=dtype), DataLoader(rows, batch_size=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
