"""A checkpoint folder becomes a module without a Trainer, as a stock file does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.checkpoint.serialize import TENSORS, WEIGHTS
from lightning_protrain.models.module import CausalLMModule, RestorableModule, load_module
from tests.support.exported_models import LORA, make, pretrained
from tests.support.module_runs import LLAMA, VOCAB, Sequences
from tests.support.tiny_networks import tiny_config


class Own(LightningModule):
    """A module of somebody else, with hyperparameters and something of its own in checkpoints."""

    def __init__(self, width: int, rate: float = 0.1, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="layer")
        self.layer = nn.Linear(width, 1) if layer is None else layer
        self.seen: Tensor | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(4, self.hparams["width"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = torch.arange(3)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]


class Restorable(Own, RestorableModule):
    """The same, above our class."""


LOADERS: dict[str, Callable[..., Own]] = {
    "function": lambda *args, **kwargs: load_module(Own, *args, **kwargs),
    "class": Restorable.load_from_checkpoint,
}


def trained(module: LightningModule, root: Path, strategy: str = "auto", frozen: Any = "auto", **fit: Any) -> str:
    """The best checkpoint of a short run."""
    saver = ProTrainCheckpoint(root, every_n_train_steps=2, frozen=frozen)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=2, strategy=strategy, callbacks=[saver], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, **fit)
    assert Path(saver.best_model_path).is_dir()
    return saver.best_model_path


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    expected = other.state_dict()
    assert one.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("strategy", ["auto", "protrain"])
def test_the_best_checkpoint_is_loaded_by_its_path(strategy: str, tmp_path: Path) -> None:
    module = CausalLMModule(config={name: value for name, value in LLAMA.items() if name != "vocab_size"})
    best = trained(module, tmp_path, strategy, datamodule=Sequences(num_tokens=70))
    loaded = CausalLMModule.load_from_checkpoint(best, learning_rate=0.5)
    assert_same_weights(loaded, module)
    assert dict(loaded.hparams) == {**module.hparams, "learning_rate": 0.5}
    assert loaded.hparams["vocab_size"] == 128
    # What is loaded is not mapped from the folder.
    for file in Path(best).iterdir():
        os.truncate(file, 0)
    assert_same_weights(loaded, module)


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_modules_of_others(load: Callable[..., Own], tmp_path: Path) -> None:
    module = Own(3)
    best = trained(module, tmp_path)
    loaded = load(best, rate=0.5)
    assert_same_weights(loaded, module)
    assert dict(loaded.hparams) == {"width": 3, "rate": 0.5}
    assert loaded.seen is not None
    assert loaded.seen.tolist() == [0, 1, 2]
    given = nn.Linear(3, 1)
    assert load(Path(best), layer=given).layer is given


@pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)
def test_other_weights_are_refused_unless_it_is_said(load: Callable[..., Own], tmp_path: Path) -> None:
    best = trained(Own(3), tmp_path)
    larger = nn.Sequential(nn.Linear(3, 1))
    with pytest.raises(RuntimeError, match=r"Missing key.*layer\.0\.weight"):
        load(best, layer=larger)
    with pytest.warns(UserWarning, match=r"not in the checkpoint: \['layer\.0\.weight'"):
        assert load(best, layer=larger, strict=False).layer is larger


def test_weights_go_where_they_are_wanted(tmp_path: Path) -> None:
    best = trained(Own(3), tmp_path)
    assert load_module(Own, best, map_location="cpu").device.type == "cpu"
    assert load_module(Own, best, lambda storage, location: storage).device.type == "cpu"


@pytest.mark.parametrize("name", [WEIGHTS, TENSORS, "state.pt"])
def test_a_changed_byte_is_found(name: str, tmp_path: Path) -> None:
    best = trained(Own(3), tmp_path)
    content = bytearray((Path(best) / name).read_bytes())
    content[-1] ^= 1
    (Path(best) / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"is not a good checkpoint: {name}"):
        Restorable.load_from_checkpoint(best)


def test_stock_files_are_loaded_as_ever(tmp_path: Path) -> None:
    module = Restorable(3)
    trainer = Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(module)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    hyperparameters = tmp_path / "given.yaml"
    hyperparameters.write_text("width: 3\nrate: 0.25\n")
    loaded = Restorable.load_from_checkpoint(tmp_path / "x.ckpt", hparams_file=hyperparameters, weights_only=True)
    assert_same_weights(loaded, module)
    assert loaded.hparams["rate"] == 0.25
    with open(tmp_path / "x.ckpt", "rb") as file:
        assert_same_weights(Restorable.load_from_checkpoint(file, weights_only=True), module)


def test_frozen_weights_come_from_their_source(tmp_path: Path) -> None:
    base = pretrained(tmp_path / "base", tiny_config("llama", vocab_size=VOCAB))
    module = make(model=base, lora=LORA)
    best = trained(module, tmp_path / "run", frozen="reference", datamodule=Sequences())
    assert_same_weights(CausalLMModule.load_from_checkpoint(best), module)
    os.rename(base, tmp_path / "moved")
    with pytest.raises(ValueError, match=r"cannot be found any more.*consolidate --source FOLDER"):
        CausalLMModule.load_from_checkpoint(best)


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    best = trained(Own(3), tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"is a folder with hyperparameters of its own.*in place of hparams_file='x.yaml'"
    ):
        Restorable.load_from_checkpoint(best, hparams_file="x.yaml")
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        load_module(Own, tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"is not a good checkpoint: manifest\.json"):
        Restorable.load_from_checkpoint(tmp_path / "run")
    with pytest.raises(TypeError, match="cannot be called on an instance"):
        Restorable(3).load_from_checkpoint(best)


def test_quantised_weights_are_for_a_trainer(tmp_path: Path) -> None:
    module = Own(3)
    module.hparams["quantization"] = {"load_in_4bit": True}
    best = trained(module, tmp_path)
    with pytest.raises(ValueError, match=r"adapters of quantised weights.*give it as `ckpt_path`.*merge"):
        load_module(Own, best)
