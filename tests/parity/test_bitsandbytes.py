"""Models of bitsandbytes under the strategy: what plain Lightning computes, from the same bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import lightning as L
import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lightning_protrain.callbacks.checkpoint.callback import ProTrainCheckpoint
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.quant_state import packed_nbytes
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.models import VOCABULARY, HuggingFaceModule, ValidationModule, _llama, fit, zoo
from tests.support.parity import Result, differences, run, snapshot
from tests.support.plans import plans
from tests.support.quantised import LAYERS, WIDTH, QuantisedLanguageModel, build, module
from tests.support.trainers import QUIET, SILENT

SHORT: dict[str, Any] = {"limit_train_batches": 4}
EMBEDDINGS: dict[str, Any] = {
    "4-bit embedding": lambda: bnb.nn.Embedding4bit(VOCABULARY, WIDTH, quant_type="nf4").requires_grad_(False),
    "8-bit embedding": lambda: bnb.nn.Embedding8bit(VOCABULARY, WIDTH).requires_grad_(False),
}


def losses(one: Any, **options: Any) -> list[Tensor]:
    fit(one, **{**SHORT, **options})
    return list(one.losses)


def assert_equal(expected: list[Tensor], found: list[Tensor]) -> None:
    assert len(expected) == len(found)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@cache
def plain(kind: str) -> Result:
    """The kind in plain Lightning."""
    return run(module(kind), **SHORT)


@pytest.mark.parametrize("plan", ["offload", "kept", "alternating", "half"])
@pytest.mark.parametrize("kind", LAYERS)
def test_parity(kind: str, plan: str) -> None:
    """Neither module is quantised before: both runs quantise at set-up."""
    expected = plain(kind)
    quantised = module(kind).to("cpu")
    assert differences(expected, run(module(kind), plans()[plan](quantised), **SHORT)) == []


@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str)
def test_parity_of_the_loop(kind: str, options: dict[str, Any]) -> None:
    expected = run(module(kind), **SHORT, **options)
    assert differences(expected, run(module(kind), "offload", **SHORT, **options)) == []


@pytest.mark.parametrize("kind", LAYERS)
def test_parity_of_a_plan_that_was_searched_for(kind: str) -> None:
    """Profiling the step leaves no trace in the layers, which keep what their first forward has made."""
    expected, found = module(kind), module(kind)
    strategy = ProTrainStrategy(device_memory="112KiB", num_persistent_chunks=1, monitor=False)
    assert_equal(losses(expected), losses(found, strategy=strategy))
    assert strategy.plan is not None
    assert strategy.plan.prediction is not None
    assert strategy.plan.num_offloaded_chunks > 0


@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_parity_of_quantised_embeddings(embedding: str) -> None:
    make = EMBEDDINGS[embedding]
    assert_equal(losses(module("nf4", make)), losses(module("nf4", make), strategy=ProTrainStrategy(plan="offload")))


def qlora(kind: str, **options: Any) -> HuggingFaceModule:
    """A Llama whose layers are quantised, with PEFT's adapters on them."""
    one = zoo()["frozen"]()
    for block in one.network.model.layers:
        for name, linear in [pair for pair in block.named_modules() if isinstance(pair[1], nn.Linear)]:
            parent, _, attribute = name.rpartition(".")
            quantised = LAYERS[kind]()
            fresh = type(quantised)(linear.in_features, linear.out_features, bias=False, **_settings(quantised))
            fresh.weight.data = linear.weight.data.clone()
            setattr(block.get_submodule(parent), attribute, fresh.requires_grad_(False))
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1, **options)
    return HuggingFaceModule(peft.get_peft_model(one.network.to("cpu"), config))


def _settings(layer: nn.Module) -> dict[str, Any]:
    if isinstance(layer, bnb.nn.Linear8bitLt):
        return {"has_fp16_weights": False}
    weight = layer.weight
    return {"quant_type": weight.quant_type, "compress_statistics": weight.compress_statistics}


@pytest.mark.sample(4)
@pytest.mark.parametrize("plan", ["offload", "kept"])
@pytest.mark.parametrize("kind", ["nf4 nested", "fp4 nested", "int8"])
def test_parity_with_adapters_of_peft(kind: str, plan: str) -> None:
    expected = run(qlora(kind), **SHORT)
    found = qlora(kind)
    assert differences(expected, run(found, plans()[plan](found), **SHORT)) == []


CONFIGS: dict[str, Any] = {
    "nf4": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    ),
    "int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of transformers, on disk."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    _llama(num_layers=3, tied=False).save_pretrained(path)
    return path


def loaded(folder: Path, kind: str) -> HuggingFaceModule:
    """Return a model quantised by transformers and adapted by PEFT, with an 8-bit optimizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=CONFIGS[kind]())
    prepared = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    one = HuggingFaceModule(peft.get_peft_model(prepared, config).train())
    trained = [parameter for parameter in one.parameters() if parameter.requires_grad]
    one.configure_optimizers = lambda: bnb.optim.AdamW8bit(trained, lr=0.01, min_8bit_size=16)  # type: ignore[method-assign]
    return one


@pytest.mark.parametrize("plan", ["offload", "kept"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_parity_of_a_checkpoint_that_transformers_quantises(kind: str, plan: str, folder: Path) -> None:
    expected, found = run(loaded(folder, kind), **SHORT), loaded(folder, kind)
    assert differences(expected, run(found, plans()[plan](found), **SHORT)) == []


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_is_saved_and_resumed_in_parts(kind: str, folder: Path, tmp_path: Path) -> None:
    whole, begun, resumed = (loaded(folder, kind) for _ in range(3))
    fit(whole, max_epochs=2, **SHORT)
    for one, epochs in ((begun, 1), (resumed, 2)):
        strategy, saving = ProTrainStrategy(plan="offload", monitor=False), ProTrainCheckpoint(tmp_path)
        options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, **SILENT, **SHORT}
        trainer = L.Trainer(max_epochs=epochs, strategy=strategy, callbacks=[saving], **options)
        path = max(tmp_path.glob("*.ckpt"), default=None)
        trainer.fit(one, ckpt_path=path, weights_only=False)
    assert_equal(list(whole.losses), [*begun.losses, *resumed.losses])


@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
def test_validation_streams_too(kind: str) -> None:
    """Plain bitsandbytes gives 4-bit weights another layout on some CPUs here, and cannot train on."""
    runs = []
    for num_batches in (0, 2):
        torch.manual_seed(0)
        one = ValidationModule(QuantisedLanguageModel(kind))
        options = {"limit_val_batches": num_batches, "max_epochs": 2}
        fit(one, strategy=ProTrainStrategy(plan="offload", monitor=False), **SHORT, **options)
        runs.append(one)
    assert_equal(list(runs[0].losses), list(runs[1].losses))
    assert torch.stack(runs[1].val_losses).isfinite().all()


@pytest.mark.parametrize("kind", LAYERS)
def test_a_run_is_resumed_by_plain_lightning_and_from_it(kind: str, tmp_path: Path) -> None:
    """The strategy reads what either has written, strictly; plain Lightning cannot read 4-bit weights at all."""
    whole = module(kind)
    fit(whole, max_epochs=2, **SHORT)
    for first in ("auto", ProTrainStrategy(plan="offload", monitor=False)):
        begun = module(kind)
        trainer = fit(begun, strategy=first, **SHORT)
        path = tmp_path / f"{type(first).__name__}.ckpt"
        trainer.save_checkpoint(path)
        resumed = module(kind)
        strategy = ProTrainStrategy(plan="offload", monitor=False)
        again = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, strategy=strategy, **SHORT, **QUIET)
        again.fit(resumed, ckpt_path=path, weights_only=False)
        both = Result((*begun.losses, *resumed.losses), snapshot(resumed))
        assert differences(Result(tuple(whole.losses), snapshot(whole)), both) == []


@pytest.mark.parametrize("kind", ["nf4 nested", "fp4 nested"])
def test_parity_of_dora_which_reads_the_weight_beside_its_layer(kind: str) -> None:
    """Weights of 8 bits are left out: on the CPU, PEFT and bitsandbytes cannot train DoRA on them."""
    expected = run(qlora(kind, use_dora=True), **SHORT)
    found = qlora(kind, use_dora=True)
    assert differences(expected, run(found, plans()["kept"](found), **SHORT)) == []


@pytest.mark.parametrize("kind", LAYERS)
def test_a_plan_counts_the_bytes_of_companions(kind: str) -> None:
    net = build(kind)
    weight = net.blocks[0].base.weight
    info = describe_model(net).parameter("blocks.0.base.weight")
    assert info.nbytes == packed_nbytes(weight) > weight.nbytes
    strategy = ProTrainStrategy(plan="offload", monitor=False)
    one = module(kind)
    fit(one, strategy=strategy, **SHORT)
    assert strategy.plan is not None
    live = strategy.counters.peak_live_bytes
    assert live == strategy.plan.memory.chunk_buffers


def test_parity_of_layers_that_cast_their_bias() -> None:
    runs = []
    for plan in (None, "offload"):
        one = module("nf4 nested")
        for block in one.network.blocks:
            block.base.compute_dtype, block.base.compute_type_is_set = torch.bfloat16, True
        runs.append(run(one, plan, **SHORT))
    assert differences(*runs) == []
    assert runs[1].weights["network.blocks.0.base.bias"].dtype is torch.bfloat16
