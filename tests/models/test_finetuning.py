"""From a pretrained folder through an interrupted run to a folder that others read: the loss goes on at every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.file_commands import file_command
from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.module_runs import VOCAB, Sequences
from tests.support.tiny_networks import SIZES, tiny_config

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
LORA = {"r": 4, "lora_alpha": 16}
# The architecture, what is trained of it, and how far merging may move the loss.
KINDS: dict[str, tuple[str, dict[str, Any], float]] = {
    "full": ("mistral", {}, 0.0),
    "experts": ("qwen3_moe", {}, 0.0),
    "lora": ("mistral", {"lora": LORA}, 1e-5),
    "qlora": ("mistral", {"lora": LORA, "quantization": NF4}, 0.02),
}
STEPS = 4  # in an epoch; there are two
Run = Callable[..., tuple[CausalLMModule, list[Tensor]]]


class Losses(Callback):
    """Records every loss."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.seen.append(outputs["loss"].detach().clone())


def loss_of(model: Any) -> Tensor:
    """The mean loss over fixed sequences, in train mode: bitsandbytes rewrites its weights for inference on a CPU."""
    rows = (torch.arange(12)[None] + torch.arange(6)[:, None]) % 31
    with torch.no_grad():
        return model.train()(input_ids=rows, labels=rows, use_cache=False).loss


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def base(kind: str, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    own = {"head_dim": 32} if KINDS[kind][0] == "mistral" else {}
    config = tiny_config(KINDS[kind][0], vocab_size=VOCAB, **SIZES, **own)
    module = CausalLMModule(config=config)
    module.configure_model()
    assert module.model is not None
    module.model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def run(kind: str, base: Path) -> Run:
    def train(strategy: Any, saved: Path | None = None, checkpoint: Path | None = None) -> Any:
        torch.manual_seed(1)
        module = CausalLMModule(model=str(base), warmup_steps=0, learning_rate=1e-2, **KINDS[kind][1])
        losses, savers = Losses(), []
        if saved is not None:
            savers.append(ProTrainCheckpoint(saved, every_n_epochs=1, save_top_k=-1))
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=2, limit_train_batches=STEPS, limit_val_batches=0,
            strategy=strategy, callbacks=[losses, *savers], logger=False, enable_checkpointing=bool(savers),
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, datamodule=Sequences(), ckpt_path=checkpoint, weights_only=True)
        return module, losses.seen

    return train


def offload() -> ProTrainStrategy:
    return ProTrainStrategy(plan="offload", monitor=False)


def after_one_epoch(saved: Path) -> Path:
    return min(saved.glob("*.ckpt"), key=lambda path: int(path.name.partition("step=")[2].partition(".")[0]))


def test_the_loss_goes_on(kind: str, base: Path, run: Run, tmp_path: Path) -> None:
    _, expected = run("auto")
    # Save: the run is that of a plain Trainer.
    whole, losses = run(offload(), tmp_path / "saved")
    assert len(losses) == 2 * STEPS
    assert all(torch.equal(one, other) for one, other in zip(expected, losses, strict=True))
    # Resume: it goes on where it was.
    resumed, rest = run(offload(), tmp_path / "more", after_one_epoch(tmp_path / "saved"))
    assert all(torch.equal(one, other) for one, other in zip(losses[STEPS:], rest, strict=True))
    weights = dict(resumed.named_parameters())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in whole.named_parameters())
    # Merge, or export what needs no merging.
    last = max((tmp_path / "saved").glob("*.ckpt"), key=lambda path: path != after_one_epoch(tmp_path / "saved"))
    adapted = whole.hparams["lora"] is not None
    more = [f"--adapter={tmp_path / 'adapter'}"] if adapted else []
    assert file_command(["merge" if adapted else "export", str(last), str(tmp_path / "out"), *more]) == 0
    # Reload: as others read it, and to train it further.
    final, tolerance = loss_of(whole.model), KINDS[kind][2]
    read = loss_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert abs(read - final) <= tolerance
    assert read < loss_of(AutoModelForCausalLM.from_pretrained(base)) - 0.05
    again = CausalLMModule(model=str(tmp_path / "out"))
    again.configure_model()
    assert torch.equal(loss_of(again.model), read)
    if adapted:
        fresh = CausalLMModule(model=str(base), **KINDS[kind][1])
        fresh.configure_model()
        assert fresh.model is not None
        under: Any = fresh.model.unload()  # type: ignore[operator]
        assert torch.equal(loss_of(PeftModel.from_pretrained(under, tmp_path / "adapter")), final)
