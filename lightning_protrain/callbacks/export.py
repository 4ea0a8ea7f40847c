"""`SavePretrained`: what was trained, as a folder that transformers or PEFT read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info


class SavePretrained(Callback):
    """Writes the module's `model` with `save_pretrained` when training ends, the tokenizer beside it.

    A model with adapters leaves those alone, in PEFT's format; any other leaves its config and all weights, as
    safetensors. The folder appears when it is whole. For a run that is to go on, save checkpoints: optimizer states are
    not in it.

    Args:
        dirpath: Folder to be made; it must not exist.

    Raises:
        ValueError: Before training: the folder is there already, or the module has no `model` that can be saved.
    """

    def __init__(self, dirpath: str) -> None:
        self.dirpath = dirpath

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses what could not be saved, before the training and not after it."""
        if Path(self.dirpath).exists():
            raise ValueError(f"SavePretrained would write to {self.dirpath!r}, which is there already. Move it away.")
        if not callable(getattr(getattr(pl_module, "model", None), "save_pretrained", None)):
            raise ValueError(
                f"SavePretrained needs a model of transformers or PEFT as `model` of {type(pl_module).__name__}, and "
                f"finds {type(getattr(pl_module, 'model', None)).__name__}."
            )
        if trainer.is_global_zero:
            Path(self.dirpath).absolute().parent.mkdir(parents=True, exist_ok=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the folder, on rank zero."""
        if not trainer.is_global_zero:
            return
        partial = Path(f"{self.dirpath}.partial")
        if partial.exists():  # of a run that was killed while it wrote
            shutil.rmtree(partial)
        model: Any = pl_module.model
        model.save_pretrained(partial)
        datamodule = getattr(trainer, "datamodule", None)
        for name in ("tokenizer", "processor"):
            save = getattr(getattr(datamodule, name, None), "save_pretrained", None)
            if callable(save):
                save(partial)
        os.rename(partial, self.dirpath)
        rank_zero_info(f"The trained model is in {self.dirpath}.")
