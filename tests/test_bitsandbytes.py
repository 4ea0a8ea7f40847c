"""Models of bitsandbytes under the strategy: what plain Lightning computes, from the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.companions import packed_nbytes
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.strategy import ProTrainStrategy
from tests.models import VOCABULARY, HuggingFaceModule, fit, zoo
from tests.parity import Result, differences, run, snapshot
from tests.plans import plans
from tests.quantised import LAYERS, WIDTH, build, module

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


@pytest.mark.parametrize("plan", ["offload", "kept", "alternating", "half"])
@pytest.mark.parametrize("kind", LAYERS)
def test_parity(kind: str, plan: str) -> None:
    """Neither module is quantised before: the strategy does it where plain Lightning does, at set-up."""
    expected = run(module(kind), **SHORT)
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


def qlora(kind: str) -> HuggingFaceModule:
    """A Llama whose layers are quantised, with PEFT's adapters on them."""
    from peft import LoraConfig, get_peft_model

    one = zoo()["frozen"]()
    for block in one.network.model.layers:
        for name, linear in [pair for pair in block.named_modules() if isinstance(pair[1], nn.Linear)]:
            parent, _, attribute = name.rpartition(".")
            quantised = LAYERS[kind]()
            fresh = type(quantised)(linear.in_features, linear.out_features, bias=False, **_settings(quantised))
            fresh.weight.data = linear.weight.data.clone()
            setattr(block.get_submodule(parent), attribute, fresh.requires_grad_(False))
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
    return HuggingFaceModule(get_peft_model(one.network.to("cpu"), config))


def _settings(layer: nn.Module) -> dict[str, Any]:
    if isinstance(layer, bnb.nn.Linear8bitLt):
        return {"has_fp16_weights": False}
    weight = layer.weight
    return {"quant_type": weight.quant_type, "compress_statistics": weight.compress_statistics}


@pytest.mark.parametrize("plan", ["offload", "kept"])
@pytest.mark.parametrize("kind", ["nf4 nested", "fp4 nested", "int8"])
def test_parity_with_adapters_of_peft(kind: str, plan: str) -> None:
    expected = run(qlora(kind), **SHORT)
    found = qlora(kind)
    assert differences(expected, run(found, plans()[plan](found), **SHORT)) == []


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
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        again = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, strategy=strategy, **SHORT, **quiet)
        again.fit(resumed, ckpt_path=path, weights_only=False)
        both = Result((*begun.losses, *resumed.losses), snapshot(resumed))
        assert differences(Result(tuple(whole.losses), snapshot(whole)), both) == []


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
