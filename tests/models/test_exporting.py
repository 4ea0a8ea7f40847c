"""Exported weights equal those of the checkpoint bit for bit, load as a module, and are read by other libraries."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.callbacks.save_pretrained import SavePretrained
from lightning_protrain.checkpoint.serialize import TENSORS, WEIGHTS
from lightning_protrain.commands.file_commands import file_command
from lightning_protrain.models import export
from lightning_protrain.models.module import CausalLMModule, RestorableModule, load_module
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.data import llava
from tests.support.adapter_runs import changed
from tests.support.exported_models import LORA, make, pretrained
from tests.support.module_runs import LLAMA, VOCAB, Sequences
from tests.support.tiny_networks import SIZES, tiny_config
from tests.support.trainers import QUIET, SILENT

CONFIGS: dict[str, dict[str, Any]] = {
    name: tiny_config(kind, vocab_size=VOCAB, **more)
    for name, kind, more in (
        ("llama", "llama", {}),
        ("tied", "llama", {"tie_word_embeddings": True}),
        ("gpt2", "gpt2", {}),
        ("experts", "qwen3_moe", {}),
        ("mamba", "mamba", {}),
    )
}


EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 3},  # The first two have no experts.
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
}
GEMMA: dict[str, Any] = {
    **LLAMA,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def train(
    module: CausalLMModule, folder: Path, stock: bool = False, strategy: Any = "auto", data: Any = None, *callbacks: Any
) -> Path:
    """Two steps, and the checkpoint of the last one."""
    saver = ProTrainCheckpoint(folder / "checkpoints", every_n_train_steps=2)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        strategy=strategy,
        callbacks=[*callbacks] if stock else [saver, *callbacks],
        enable_checkpointing=not stock,
        **SILENT,
    )
    trainer.fit(module, datamodule=Sequences() if data is None else data)
    if stock:
        trainer.save_checkpoint(folder / "last.ckpt")
        return folder / "last.ckpt"
    return next((folder / "checkpoints").glob("*.ckpt"))


def assert_weights(found: Any, wanted: Any) -> None:
    theirs: dict[str, Tensor] = wanted.state_dict()
    assert found.state_dict().keys() == theirs.keys()
    for name, value in found.state_dict().items():
        assert value.dtype == theirs[name].dtype
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize(("name", "stock"), [*((name, False) for name in CONFIGS), ("tied", True)])
def test_a_trained_model_is_read_by_transformers(name: str, stock: bool, tmp_path: Path) -> None:
    module = make(CONFIGS[name])
    checkpoint = train(module, tmp_path, stock, ProTrainStrategy(plan="offload", monitor=False))
    assert file_command(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    assert_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), module.model)
    assert {each.name for each in tmp_path.glob("out*")} == {"out"}


def test_tokenizer_and_generation_come_from_where_the_model_came_from(tmp_path: Path) -> None:
    module = make(model=pretrained(tmp_path / "base"), vocab_size=VOCAB + 8)
    checkpoint = train(module, tmp_path)
    file_command(["export", str(checkpoint), str(tmp_path / "out")])
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_weights(found, module.model)
    assert found.config.vocab_size == VOCAB + 8
    assert found.generation_config.max_new_tokens == 7
    wanted = AutoTokenizer.from_pretrained(tmp_path / "base")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == wanted.get_vocab()


class WithPictures(Sequences):
    """Has the state of a data module whose user chose settings of the processor."""

    def state_dict(self) -> dict[str, Any]:
        return {"processor_kwargs": {"do_normalize": False}}


@pytest.mark.parametrize("stock", [True, False])
def test_the_processor_is_exported_with_the_settings_of_the_run(stock: bool, tmp_path: Path) -> None:
    base = pretrained(tmp_path / "base")
    llava.save(tmp_path / "base")
    for name, data, normalises in (("with", WithPictures(), False), ("without", Sequences(), True)):
        (tmp_path / name).mkdir()
        checkpoint = train(make(model=base), tmp_path / name, stock, data=data)
        file_command(["export", str(checkpoint), str(tmp_path / name / "out")])
        found = AutoProcessor.from_pretrained(tmp_path / name / "out")
        assert (type(found).__name__, found.image_processor.do_normalize) == ("LlavaProcessor", normalises)


def test_another_tokenizer_and_another_dtype(tmp_path: Path) -> None:
    module = make(LLAMA)
    checkpoint = train(module, tmp_path)
    pretrained(tmp_path / "base")
    command = ["export", str(checkpoint), str(tmp_path / "out"), f"--tokenizer={tmp_path / 'base'}"]
    file_command([*command, "--dtype=bfloat16"])
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert module.model is not None
    assert_weights(found, module.model.to(torch.bfloat16))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out" / "tokenizer_config.json").exists()


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", ["export", "merge"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "ernie4_5_moe"])  # The bias is a buffer, a parameter.
@pytest.mark.filterwarnings("ignore:.*may compute its logits outside its head")
def test_a_bias_that_chooses_experts_is_never_rounded(kind: str, command: str, tmp_path: Path) -> None:
    base, name = (
        pretrained(tmp_path / "base", tiny_config(kind, vocab_size=VOCAB, **EXPERTS[kind])),
        "e_score_correction_bias",
    )
    weights = load_file(tmp_path / "base" / "model.safetensors")
    biases = {key: 8 + torch.rand_like(value) for key, value in weights.items() if key.endswith(name)}
    save_file({**weights, **biases}, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    module = make(model=base, lora=LORA if command == "merge" else None)
    called = SavePretrained(str(tmp_path / "called"), dtype="bfloat16")
    checkpoint = train(module, tmp_path, False, "auto", None, called)
    file_command([command, str(checkpoint), str(tmp_path / "out"), "--dtype=bfloat16"])
    for folder in ("out", "called")[: 1 if command == "merge" else 2]:
        written = load_file(tmp_path / folder / "model.safetensors")
        assert biases
        assert all(torch.equal(written[key], value) for key, value in biases.items())
        assert written["model.embed_tokens.weight"].dtype is torch.bfloat16


class TopLayer(CausalLMModule):
    """Trains one layer."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            model: Any = self.model
            model.requires_grad_(False).model.layers[-1].requires_grad_(True)


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_weights_with_equal_bytes_are_exported(tied: bool, tmp_path: Path) -> None:
    base = pretrained(tmp_path / "base", CONFIGS["tied" if tied else "llama"])
    module = TopLayer(model=base)
    best = trained(module, tmp_path / "run", frozen="reference", datamodule=Sequences())
    file_command(["export", best, str(tmp_path / "out")])
    assert_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), module.model)


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize(
    "more",
    [
        {"model_type": "gemma3n_text", "activation_sparsity_pattern": [0.0] * 4},
        {"model_type": "gemma4_text", "global_head_dim": 8},
    ],
)
@pytest.mark.filterwarnings("ignore:.*may compute its logits outside its head")
def test_all_sizes_that_follow_the_vocabulary_are_exported(more: dict[str, Any], lora: Any, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**GEMMA, **more})).save_pretrained(tmp_path / "base")
    module = changed(str(tmp_path / "base"), vocab_size=VOCAB + 8, lora=lora)
    checkpoint = tmp_path / "a.ckpt"
    torch.save({"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}, checkpoint)
    file_command(["export" if lora is None else "merge", str(checkpoint), str(tmp_path / "out")])
    found: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model: Any = module.model
    assert_weights(found, model if lora is None else model.merge_and_unload())
    assert found.config.vocab_size_per_layer_input == VOCAB + 8


@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        ({}, "bfloat16"),
        ({"use_dora": True}, "float32"),
        ({"use_rslora": True}, "bfloat16"),
        ({"modules_to_save": ["lm_head"]}, "float32"),
    ],
)
def test_adapters_are_merged_and_read_back_by_both(more: dict[str, Any], dtype: Any, tmp_path: Path) -> None:
    base = pretrained(tmp_path / "base")
    module = make(model=base, lora={**LORA, **more}, dtype=dtype)
    checkpoint = train(module, tmp_path, strategy=ProTrainStrategy(plan="offload", monitor=False))
    file_command(["merge", str(checkpoint), str(tmp_path / "out"), f"--adapter={tmp_path / 'adapter'}"])
    assert module.model is not None
    module.model.eval()
    read: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype)), tmp_path / "adapter"
    )
    trained = {name: value for name, value in module.model.state_dict().items() if "lora_" in name}
    assert trained
    assert all(torch.equal(read.state_dict()[name], value) for name, value in trained.items())
    ids = torch.arange(12)[None]
    assert torch.equal(read(input_ids=ids).logits, module.model(input_ids=ids).logits)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert_weights(merged, module.model.merge_and_unload())
    assert merged.config.dtype == getattr(torch, dtype)
    assert merged.generation_config.max_new_tokens == 7
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()


def test_the_folder_of_a_run_is_exported_and_it_is_said_what_was_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = make(model=pretrained(tmp_path / "base"), lora=LORA)
    checkpoint = train(module, tmp_path)
    out, adapter = tmp_path / "models" / "out", tmp_path / "adapters" / "mine"  # in folders that are made
    assert file_command(["merge", str(checkpoint.parent), str(out), "--take=last", f"--adapter={adapter}"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in said] == [f"Wrote {out}", f"Wrote {adapter}"]
    assert all(f"from {checkpoint}: " in line for line in said)
    assert "model.safetensors" in said[0]
    assert "adapter_model.safetensors" in said[1]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    whole, target = train(make(LLAMA), tmp_path, stock=True), tmp_path / "out"
    other = tmp_path / "other.ckpt"
    content = torch.load(whole, weights_only=True)
    torch.save({"state_dict": content["state_dict"]}, other)
    less = tmp_path / "less.ckpt"
    content["state_dict"].popitem()
    torch.save(content, less)
    torn = tmp_path / "torn.ckpt"
    torn.write_bytes(whole.read_bytes()[:1000])
    for arguments, message in (
        (["export", whole, tmp_path], "already exists"),
        (["export", whole, torn / "out"], "File exists"),
        (["merge", whole, target], "has no adapters to merge"),
        (["merge", whole, target, f"--adapter={tmp_path}"], "already exists"),
        (["merge", whole, target, f"--adapter={target}"], "is given for the merged model and for the adapters"),
        (["export", other, target], "was not trained with CausalLMModule"),
        (["export", less, target], "lm_head.weight is missing"),
        (["export", torn, target], "is truncated"),
        (["export", tmp_path / "nothing.ckpt", target], "nothing.ckpt"),
        (["export", whole, target, "--tokenizer=nowhere"], "The model 'nowhere' is not in the cache"),
        (["export", whole, target, "--dtype=int8"], "invalid choice: 'int8'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            file_command([str(each) for each in arguments])
    assert {each.name for each in tmp_path.glob("out*")} == set()


@pytest.mark.parametrize("command", ["export", "merge"])
def test_a_disk_that_is_too_full_is_told_before_anything_is_written(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = {"lora": LORA, "model": pretrained(tmp_path / "base")} if command == "merge" else {"config": LLAMA}
    checkpoint = train(make(**lora), tmp_path)
    monkeypatch.setattr(export.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
    with pytest.raises(ValueError, match=r"its disk has 1\.00 MiB \(1048576 bytes\) free. Nothing was written"):
        file_command([command, str(checkpoint), str(tmp_path / "out")])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


@pytest.mark.parametrize("command", ["export", "merge"])
def test_a_pretrained_model_that_has_moved_is_named_with_what_helps(command: str, tmp_path: Path) -> None:
    checkpoint = train(make(model=pretrained(tmp_path / "base"), lora=LORA), tmp_path)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(
        ValueError, match=r"no longer in '.*/base'\. Put it back, or a link to it\. \(There is no folder"
    ):
        file_command([command, str(checkpoint), str(tmp_path / "out")])
    (tmp_path / "base").symlink_to(tmp_path / "moved")
    assert file_command([command, str(checkpoint), str(tmp_path / "out")]) == 0


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
    """`Own` with the `load_from_checkpoint` of this package."""


LOADERS: dict[str, Callable[..., Own]] = {
    "function": lambda *args, **kwargs: load_module(Own, *args, **kwargs),
    "class": Restorable.load_from_checkpoint,
}


def trained(module: LightningModule, root: Path, strategy: str = "auto", frozen: Any = "auto", **fit: Any) -> str:
    """The best checkpoint of a short run."""
    saver = ProTrainCheckpoint(root, every_n_train_steps=2, frozen=frozen)
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=2, strategy=strategy, callbacks=[saver], **SILENT)
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
    with pytest.raises(ValueError, match=f"is a damaged checkpoint: {name}"):
        Restorable.load_from_checkpoint(best)


def test_stock_files_are_loaded_as_ever(tmp_path: Path) -> None:
    module = Restorable(3)
    trainer = Trainer(accelerator="cpu", max_steps=1, **QUIET)
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
    with pytest.raises(ValueError, match=r"cannot be found.*consolidate --source FOLDER"):
        CausalLMModule.load_from_checkpoint(best)


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    best = trained(Own(3), tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"is a folder that contains hyperparameters.*instead of hparams_file='x.yaml'"
    ):
        Restorable.load_from_checkpoint(best, hparams_file="x.yaml")
    with pytest.raises(FileNotFoundError, match="There is no checkpoint"):
        load_module(Own, tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"such as .*/epoch=0-step=2\.ckpt\.$"):
        Restorable.load_from_checkpoint(tmp_path / "run")
    with pytest.raises(TypeError, match="cannot be called on an instance"):
        Restorable(3).load_from_checkpoint(best)


def test_quantised_weights_are_for_a_trainer(tmp_path: Path) -> None:
    module = Own(3)
    module.hparams["quantization"] = {"load_in_4bit": True}
    best = trained(module, tmp_path)
    with pytest.raises(ValueError, match=r"adapters of quantised weights.*give it as `ckpt_path`.*merge"):
        load_module(Own, best)


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
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
            accelerator="cpu",
            devices=1,
            max_epochs=2,
            limit_train_batches=STEPS,
            limit_val_batches=0,
            strategy=strategy,
            callbacks=[losses, *savers],
            enable_checkpointing=bool(savers),
            **SILENT,
        )
        trainer.fit(module, datamodule=Sequences(), ckpt_path=checkpoint, weights_only=True)
        return module, losses.seen

    return train


def offload() -> ProTrainStrategy:
    return ProTrainStrategy(plan="offload", monitor=False)


def after_one_epoch(saved: Path) -> Path:
    return min(saved.glob("*.ckpt"), key=lambda path: int(path.name.partition("step=")[2].partition(".")[0]))


@pytest.mark.sample(3)
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
