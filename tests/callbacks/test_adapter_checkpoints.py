"""Checkpoints of adapters without what they adapt: small, resumed to the bit, and by nothing but the right model."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_protrain.callbacks.checkpoint import frozen as frozen_module
from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.checkpoint.frozen import FrozenWeights, drop_missing, frozen_keys
from lightning_protrain.checkpoint.consolidation import consolidate, load_folder
from lightning_protrain.checkpoint.inspection import inspect
from lightning_protrain.checkpoint.io import ProTrainCheckpointIO
from lightning_protrain.checkpoint.manifest import Manifest
from lightning_protrain.checkpoint.references import FROZEN, References
from lightning_protrain.checkpoint.serialize import WEIGHTS
from lightning_protrain.checkpoint.verification import read_manifest
from lightning_protrain.commands.file_commands import file_command
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.adapter_runs import Stop, adapted, one_bit
from tests.support.exported_models import make, pretrained
from tests.support.module_runs import VOCAB, Sequences
from tests.support.tiny_networks import SIZES, tiny_config
from tests.support.trainers import SILENT

PLANS: dict[str, Any] = {
    "plain": lambda: "auto",
    "offload": lambda: ProTrainStrategy(plan="offload", monitor=False),
    "resident": lambda: ProTrainStrategy(plan="resident", monitor=False),
}


def saver(root: Path, frozen: Any = "reference", **options: Any) -> ProTrainCheckpoint:
    return ProTrainCheckpoint(root, every_n_train_steps=2, save_top_k=-1, frozen=frozen, **options)


def fit(module: Any, callback: Any, stop: int, strategy: Any = "auto", path: str | None = None, **more: Any) -> None:
    torch.manual_seed(1)
    callbacks = [Stop(stop), *([] if callback is None else [callback])]
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=4, strategy=strategy, callbacks=callbacks, **SILENT, **more
    )
    trainer.fit(module, datamodule=Sequences(), ckpt_path=path)
    assert trainer.global_step == stop


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return pretrained(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def saved(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of step 2, by reference."""
    root = tmp_path_factory.mktemp("saved")
    fit(adapted(base), saver(root), 2)
    return next(root.glob("*.ckpt"))


def manifest(folder: Path) -> Manifest:
    return read_manifest(folder)


@pytest.mark.parametrize(
    ("plan", "frozen"), [("plain", "auto"), ("offload", "reference"), ("offload", "auto"), ("resident", "reference")]
)
def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(
    plan: str, frozen: str, base: str, tmp_path: Path
) -> None:
    whole = adapted(base)
    fit(whole, None, 4, enable_checkpointing=False)
    fit(adapted(base), saver(tmp_path, frozen), 2, PLANS[plan]())
    resumed = adapted(base)
    fit(resumed, saver(tmp_path, frozen), 4, PLANS[plan](), path="last")
    wanted = whole.state_dict()
    assert resumed.state_dict().keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in resumed.state_dict().items())
    assert all("frozen" in manifest(each).record for each in tmp_path.glob("*.ckpt"))


def test_saves_behind_the_training_copy_the_adapters_alone(base: str, saved: Path, tmp_path: Path) -> None:
    fit(adapted(base), saver(tmp_path, asynchronous=True), 2)
    found, wanted = (load_folder(each) for each in (next(tmp_path.glob("*.ckpt")), saved))
    assert found[FROZEN] == wanted[FROZEN]
    assert found["state_dict"].keys() == wanted["state_dict"].keys()
    assert all(torch.equal(value, wanted["state_dict"][name]) for name, value in found["state_dict"].items())


def test_bytes_are_those_of_the_adapters(base: str, saved: Path, tmp_path: Path) -> None:
    fit(adapted(base), saver(tmp_path, "store"), 2)
    stored = manifest(next(tmp_path.glob("*.ckpt")))
    module = adapted(base)
    module.configure_model()
    trained = sum(each.nbytes for each in module.parameters() if each.requires_grad)
    frozen = sum(each.nbytes for each in module.parameters() if not each.requires_grad)
    sizes = {name: entry.size for name, entry in manifest(saved).files.items()}
    assert trained < sizes[WEIGHTS] < trained + 8192
    assert stored.files[WEIGHTS].size > sizes[WEIGHTS] + frozen
    assert manifest(saved).record["frozen"] == {
        "source": base,
        "weights": len(load_folder(saved)[FROZEN]["weights"]),
        "nbytes": frozen,
    }
    text, good = inspect(saved, check=True)
    assert good
    assert f"({frozen} bytes, 0.000 GB) are not stored but refer to {base}" in text


def test_one_bit_of_a_frozen_weight_is_found(base: str, saved: Path, tmp_path: Path) -> None:
    module = adapted(base)
    name = one_bit(module)
    with pytest.raises(ValueError, match="refers to the frozen weights of") as caught:
        fit(module, saver(tmp_path), 4, path=str(saved))
    assert name in str(caught.value)
    assert base in str(caught.value)


def test_a_loader_that_compares_nothing_misses_it(
    base: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(References, "refuse_others", lambda *_: None)
    module = adapted(base)
    name = one_bit(module)
    fit(module, saver(tmp_path), 4, path=str(saved))
    wanted = adapted(base)
    wanted.configure_model()
    assert not torch.equal(module.state_dict()[name], wanted.state_dict()[name])


@pytest.mark.parametrize("fault", ["gone", "unexpected"])
def test_other_keys_are_as_strict_as_ever(fault: str, base: str, saved: Path, tmp_path: Path) -> None:
    content = load_folder(saved)
    name = next(iter(content["state_dict"]))
    weight = content["state_dict"].pop(name)
    if fault == "unexpected":
        content["state_dict"].update({name: weight, "model.nowhere": weight})
    ProTrainCheckpointIO().save_checkpoint(content, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=name if fault == "gone" else "nowhere"):
        fit(adapted(base), saver(tmp_path), 4, path=str(tmp_path / "other.ckpt"))


@pytest.mark.parametrize(("was", "now"), [("frozen", "trained"), ("trained", "frozen")])
def test_a_weight_that_is_trained_or_frozen_now_is_named(
    was: str, now: str, base: str, saved: Path, tmp_path: Path
) -> None:
    module = adapted(base)
    module.configure_model()
    name, weight = next((n, each) for n, each in module.named_parameters() if each.requires_grad == (was == "trained"))
    weight.requires_grad_(now == "trained")
    with pytest.raises(ValueError, match=f"{name} was {was}, and is {now} now"):
        fit(module, saver(tmp_path), 4, path=str(saved))


def test_a_consolidated_file_holds_all_and_resumes_anywhere(base: str, saved: Path, tmp_path: Path) -> None:
    consolidate(saved, tmp_path / "stock.ckpt")
    fit(adapted(base), saver(tmp_path / "stored", "store"), 2)
    wanted = load_folder(next((tmp_path / "stored").glob("*.ckpt")))["state_dict"]
    found = torch.load(tmp_path / "stock.ckpt", weights_only=True)
    assert FROZEN not in found
    assert found["state_dict"].keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in found["state_dict"].items())
    module = adapted(base)
    fit(module, None, 4, path=str(tmp_path / "stock.ckpt"), enable_checkpointing=False)


def test_without_the_callback_the_source_is_read(base: str, saved: Path) -> None:
    module, wanted = adapted(base), adapted(base)
    name = one_bit(module)
    wanted.configure_model()
    fit(module, None, 4, path=str(saved), plugins=[ProTrainCheckpointIO()], enable_checkpointing=False)
    assert torch.equal(module.state_dict()[name], wanted.state_dict()[name])


@pytest.mark.parametrize("command", ["export", "merge"])
def test_adapters_are_exported_and_merged_as_from_whole_checkpoints(
    command: str, base: str, saved: Path, tmp_path: Path
) -> None:
    fit(adapted(base), saver(tmp_path / "stored", "store"), 2)
    whole = next((tmp_path / "stored").glob("*.ckpt"))
    for checkpoint, name in ((saved, "one"), (whole, "other")):
        assert file_command([command, str(checkpoint), str(tmp_path / name)]) == 0
    files = {each.name for each in (tmp_path / "other").glob("*.safetensors")}
    assert files
    assert all((tmp_path / "one" / each).read_bytes() == (tmp_path / "other" / each).read_bytes() for each in files)


def test_auto_stores_what_the_source_does_not_have(base: str, tmp_path: Path) -> None:
    """Rows for a larger vocabulary are random: no source has them."""
    fit(adapted(base, vocab_size=VOCAB + 8), saver(tmp_path, "auto"), 2)
    content = load_folder(next(tmp_path.glob("*.ckpt")))
    stored = [name for name in content["state_dict"] if "lora_" not in name]
    assert stored
    assert all("embed_tokens" in name or "lm_head" in name for name in stored)
    assert not content[FROZEN]["weights"].keys() & content["state_dict"].keys()


def test_auto_stores_all_of_a_model_without_adapters(base: str, tmp_path: Path) -> None:
    fit(make(model=base), saver(tmp_path, "auto"), 2)
    assert FROZEN not in load_folder(next(tmp_path.glob("*.ckpt")))


@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "int8"])
def test_companions_of_quantised_weights_are_frozen_with_them(kind: str) -> None:
    pytest.importorskip("bitsandbytes")
    from tests.support.quantised import QuantisedNet

    net = QuantisedNet(kind).to("cpu")
    net(torch.zeros(2, 8))
    state_dict = net.state_dict()
    keys = frozen_keys(net, state_dict)
    trained = {name for name, each in net.named_parameters() if each.requires_grad}
    assert keys.keys() == {key for key, value in state_dict.items() if isinstance(value, Tensor)} - trained
    assert len(keys) > len([each for each in net.parameters() if not each.requires_grad])


@pytest.mark.parametrize(("kind", "frozen"), [("nf4", "reference"), ("nested", "auto")])
def test_adapters_of_quantised_weights_are_resumed_to_the_bit(kind: str, frozen: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    folder = pretrained(tmp_path / "wide", tiny_config("llama", vocab_size=VOCAB, **SIZES))
    quantization = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": kind == "nested"}
    whole, first, resumed = (adapted(folder, quantization=quantization) for _ in range(3))
    fit(whole, None, 4, enable_checkpointing=False, limit_val_batches=0)
    fit(first, saver(tmp_path / "run", frozen), 2, limit_val_batches=0)
    content = load_folder(next((tmp_path / "run").glob("*.ckpt")))
    held = [name for name in content["state_dict"] if "lora_" not in name]
    # A source has no quantised weights: "auto" holds these.
    assert any("absmax" in name for name in held) == (frozen == "auto")
    fit(resumed, saver(tmp_path / "run", frozen), 4, path="last", limit_val_batches=0)
    wanted = whole.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in resumed.state_dict().items())


class Layered(L.LightningModule):
    """A frozen layer, one that is trained, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros(1))


def test_a_fingerprint_is_made_once_and_again_when_the_weight_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(frozen_module, "digest_of", lambda tensor: made.append(tensor.numel()) or str(tensor.sum()))
    module, weights = Layered(), FrozenWeights("reference")
    trainer: Any = type("Of", (), {"lightning_module": module, "is_global_zero": True})

    def take() -> dict[str, Any]:
        checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
        weights.take_out(trainer, checkpoint, {})
        return checkpoint

    first = take()
    assert first["state_dict"].keys() == {"head.weight", "head.bias", "count"}
    assert sorted(made) == [4, 16]
    assert take()[FROZEN] == first[FROZEN]
    assert sorted(made) == [4, 16]
    with torch.no_grad():
        module.base.weight.add_(1)
    assert take()[FROZEN] != first[FROZEN]
    assert len(made) == 3
    kept = module.base.bias.data
    module.base.bias.data = kept.clone()
    take()
    assert len(made) == 4
    module.base = nn.Linear(4, 4).requires_grad_(False)
    gc.collect()
    last = take()
    assert len(made) == 6
    other = {"state_dict": {name: value + 1 for name, value in module.state_dict().items()}}
    weights.take_out(trainer, other, {})
    assert other[FROZEN] != last[FROZEN]
    assert take()[FROZEN] == last[FROZEN]
    with torch.inference_mode():  # Its weights have no version to go by.
        module.base = nn.Linear(4, 4).requires_grad_(False)
        inferred = take()
        module.base.weight.add_(1)
        assert take()[FROZEN] != inferred[FROZEN]


def test_a_hook_lets_keys_be_missing_once() -> None:
    module = Layered()
    partial = {name: value for name, value in module.state_dict().items() if not name.startswith("base")}
    module.register_load_state_dict_post_hook(drop_missing(["base.weight", "base.bias"]))
    module.load_state_dict(partial)
    with pytest.raises(RuntimeError, match=r"base\.weight"):
        module.load_state_dict(partial)


def test_a_mode_there_is_not() -> None:
    with pytest.raises(ValueError, match="frozen='none'"):
        ProTrainCheckpoint(frozen="none")  # type: ignore[arg-type]
