"""With `dtype="float32"` the masters of SplitAdamW are exported, not the bfloat16 weights that are cast."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_protrain import CausalLMModule, ProTrainCheckpoint, ProTrainStrategy, SavePretrained, SplitAdamW
from lightning_protrain.commands.file_commands import file_command
from tests.support.exported_models import LORA, make, pretrained
from tests.support.module_runs import LLAMA, VOCAB, Sequences
from tests.support.ranks import run_ranks, trainer_on_rank, values
from tests.support.tiny_networks import SIZES, tiny_config
from tests.support.trainers import SILENT

TIED = tiny_config("llama", vocab_size=VOCAB, tie_word_embeddings=True)
pytestmark = pytest.mark.filterwarnings("ignore:.*in terms that allow_drift permits")


def _train(module: CausalLMModule, folder: Path, *callbacks: Any, **more: Any) -> dict[str, Tensor]:
    """Two steps with SplitAdamW, and the checkpoint of the last one; return the masters."""
    if more.pop("split", True):

        def configure_optimizers() -> SplitAdamW:
            # Without names, in another order than that of the module.
            return SplitAdamW([each for each in module.parameters() if each.requires_grad][::-1], lr=1e-3)

        module.configure_optimizers = configure_optimizers  # type: ignore[method-assign]
    saver = ProTrainCheckpoint(folder / "checkpoints", every_n_train_steps=2)
    options = {"max_steps": 2, "precision": "bf16-true", "accelerator": "cpu", "devices": 1, **SILENT, **more}
    if "strategy" not in options:
        options["strategy"] = ProTrainStrategy(plan="offload", monitor=False)
    trainer = Trainer(callbacks=[saver, *callbacks], **options)
    trainer.fit(module, datamodule=Sequences())
    trainer.save_checkpoint(folder / "stock.ckpt")
    (optimizer,) = trainer.optimizers
    if not isinstance(optimizer, SplitAdamW):
        return {}
    model: Any = module.model
    return {name: optimizer.master(each) for name, each in model.named_parameters() if each.requires_grad}


def _equal(found: dict[str, Tensor], masters: dict[str, Tensor]) -> bool:
    assert all(not torch.equal(value, value.bfloat16().float()) for value in masters.values() if value.dim() > 1)
    return all(torch.equal(found[name], value) for name, value in masters.items())


def test_masters_of_a_whole_model(tmp_path: Path) -> None:
    module = make(TIED)
    masters = _train(module, tmp_path, SavePretrained(str(tmp_path / "called"), dtype="float32"))
    assert {each.dtype for each in module.parameters()} == {torch.bfloat16}
    checkpoint = next((tmp_path / "checkpoints").glob("*.ckpt"))
    for name, source in (("exported", checkpoint), ("of a file", tmp_path / "stock.ckpt")):
        assert file_command(["export", str(source), str(tmp_path / name), "--dtype=float32"]) == 0
    assert file_command(["export", str(checkpoint), str(tmp_path / "trained")]) == 0
    for name, dtype in (
        ("called", "float32"),
        ("exported", "float32"),
        ("of a file", "float32"),
        ("trained", "bfloat16"),
    ):
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == dtype
        found = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto").state_dict()
        assert {each.dtype for each in found.values()} == {getattr(torch, dtype)}
        assert _equal(found, masters) == (dtype == "float32")


@pytest.mark.parametrize("quantization", [None, {"load_in_8bit": True}])
def test_masters_of_adapters(quantization: Any, tmp_path: Path) -> None:
    base = pretrained(tmp_path / "base", tiny_config("llama", vocab_size=VOCAB, **SIZES))
    lora = {**LORA, "modules_to_save": ["lm_head", "norm"]}
    module = make(model=base, lora=lora, dtype="bfloat16", quantization=quantization)
    masters = _train(module, tmp_path, SavePretrained(str(tmp_path / "called"), dtype="float32"))
    checkpoint = str(next((tmp_path / "checkpoints").glob("*.ckpt")))
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    assert file_command(["merge", checkpoint, str(merged), "--dtype=float32", f"--adapter={adapter}"]) == 0
    wanted = {name.replace(".modules_to_save", "").replace(".default", ""): value for name, value in masters.items()}
    for folder in (adapter, tmp_path / "called"):
        assert _equal(load_file(folder / "adapter_model.safetensors"), wanted)
    ids = torch.arange(12)[None]
    whole = AutoModelForCausalLM.from_pretrained(merged, dtype="auto").eval()
    frozen = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).float()
    both = PeftModel.from_pretrained(frozen, str(adapter)).eval()
    torch.testing.assert_close(whole(input_ids=ids).logits, both(input_ids=ids).logits)


@pytest.mark.parametrize("plan", ["plain", "offload"])
def test_a_consolidated_file_resumes_in_mixed_precision(plan: str, tmp_path: Path) -> None:
    masters = _train(make(LLAMA), tmp_path)
    file = tmp_path / "mixed.ckpt"
    assert file_command(["consolidate", str(tmp_path / "checkpoints"), str(file), "--dtype=float32"]) == 0
    content = torch.load(file, weights_only=True)
    assert _equal({name.removeprefix("model."): each for name, each in content["state_dict"].items()}, masters)
    module = make(LLAMA)

    def configure_optimizers() -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in module.parameters() if each.requires_grad][::-1], lr=0.0)

    module.configure_optimizers = configure_optimizers  # type: ignore[method-assign]
    strategy = "auto" if plan == "plain" else ProTrainStrategy(plan="offload", monitor=False)
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "precision": "bf16-mixed", **SILENT}
    trainer = Trainer(max_steps=2, strategy=strategy, enable_checkpointing=False, **options)
    trainer.fit(module, datamodule=Sequences(), ckpt_path=file)
    model: Any = module.model
    assert _equal(model.state_dict(), masters)
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {2}


def test_weights_without_masters_are_cast_with_a_warning(tmp_path: Path) -> None:
    module = make(LLAMA)
    with pytest.warns(UserWarning, match="casts .* bfloat16 weights without masters to float32"):
        _train(module, tmp_path, SavePretrained(str(tmp_path / "called"), dtype="float32"), split=False)
    for number, command in enumerate(("export", "consolidate")):
        target = str(tmp_path / str(number))
        with pytest.warns(UserWarning, match=r"has no float32 masters of \d+ bfloat16 weights .* cast to float32"):
            assert file_command([command, str(tmp_path / "checkpoints"), target, "--dtype=float32"]) == 0
    model: Any = module.model
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "0", dtype="auto").state_dict()
    assert all(torch.equal(each, model.state_dict()[name].float()) for name, each in found.items())


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype='int8': give one of float32, bfloat16, float16"):
        SavePretrained("out", dtype="int8")


def _save_on_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    module = make(LLAMA)

    def configure_optimizers() -> SplitAdamW:
        return SplitAdamW(module.parameters(), lr=1e-3)

    module.configure_optimizers = configure_optimizers  # type: ignore[method-assign]
    kind = partial(ProTrainStrategy, plan="offload", sharding="shard", monitor=False)
    saver = SavePretrained(str(folder / "called"), dtype="float32")
    trainer = trainer_on_rank(rank, 2, kind=kind, max_steps=2, precision="bf16-true", callbacks=[saver])
    trainer.fit(module, datamodule=Sequences())
    trainer.save_checkpoint(folder / "stock.ckpt")


def test_masters_of_all_ranks_are_written(tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    values(run_ranks(_save_on_rank, 2, tmp_path / "meeting", tmp_path))
    assert file_command(["export", str(tmp_path / "stock.ckpt"), str(tmp_path / "out"), "--dtype=float32"]) == 0
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("called", "out"))
    assert _equal(found, wanted)
