"""Blocks with a compiled forward are streamed outside of the graph: parity, in one compiled graph or two."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from lightning.pytorch import Trainer
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.data import DataLoader

from lightning_protrain import CausalLMModule
from lightning_protrain.planner.replay import product_bytes
from lightning_protrain.profiler.blocks import describe_model, discover_blocks
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.machines import CPU
from tests.support.models import fit
from tests.support.networks import NetworkModule, module
from tests.support.plans import alternating, half, kept
from tests.support.trainers import QUIET

SLOW = {"qwen3": "kept", "bert": "half", "vit": "alternating", "shared-weights": "offload"}
PLANS: dict[str, Any] = {"offload": lambda _: "offload", "kept": kept, "half": half, "alternating": alternating}


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(name: str, backend: str = "aot_eager") -> tuple[NetworkModule, CompileCounterWithBackend]:
    """The module of a network with its blocks compiled, and what counts the graphs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    one = module(name)
    for block in map(one.get_submodule, discover_blocks(one)):
        block.forward = torch.compile(block.forward, backend=counter)
    return one, counter


def names_below(one: NetworkModule, name: str) -> list[str]:
    return [fqn for fqn, _ in one.get_submodule(name).named_parameters(prefix=name)]


def assert_equal(plain: NetworkModule, found: NetworkModule) -> None:
    assert all(torch.equal(one, other) for one, other in zip(plain.losses, found.losses, strict=True))
    weights = found.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in plain.state_dict().items())


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "plan"),
    [*(("llama", plan) for plan in PLANS), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW.items())],
)
def test_a_compiled_forward_is_streamed(name: str, plan: str) -> None:
    plain, expected = compiled(name)
    fit(plain)
    found, counter = compiled(name)
    fit(found, strategy=ProTrainStrategy(plan=PLANS[plan](found), monitor=False))
    assert_equal(plain, found)
    # One graph for all streamed blocks, one for all that are resident; no more with more steps.
    mixed = plan in ("half", "alternating")
    assert 0 < counter.frame_count <= expected.frame_count * (2 if mixed else 1)


def test_what_a_compiled_forward_reads_is_not_streamed_in_two_bytes() -> None:
    """Compiled code reads memory itself, as the dtype that the parameter claims to have."""
    plain, _ = compiled("llama")
    fit(plain, precision="bf16-mixed")
    found, _ = compiled("llama")
    strategy = ProTrainStrategy(plan="offload", monitor=False)
    fit(found, precision="bf16-mixed", strategy=strategy)
    assert_equal(plain, found)
    own = {fqn for name in discover_blocks(found) for fqn in names_below(found, name)}
    low = {fqn for chunk in strategy.plan.chunks if chunk.streamed_dtype for fqn in chunk.parameters}  # type: ignore[union-attr]
    assert low
    assert own.isdisjoint(low)


def test_a_plan_that_streams_a_compiled_forward_in_two_bytes_is_refused() -> None:
    eager = ProTrainStrategy(plan="offload", monitor=False)
    fit(module("llama"), precision="bf16-mixed", strategy=eager)
    found, _ = compiled("llama")
    with pytest.raises(ValueError, match=r"in two bytes, but a compiled forward reads it as float32"):
        fit(found, precision="bf16-mixed", strategy=ProTrainStrategy(plan=eager.plan, monitor=False))


@pytest.mark.slow
def test_what_a_profile_has_run_is_compiled_in_training() -> None:
    plain, expected = compiled("llama")
    fit(plain)
    found, counter = compiled("llama")
    strategy = ProTrainStrategy(device_memory=200_000, hardware=CPU, monitor=False)
    fit(found, strategy=strategy)
    assert_equal(plain, found)
    assert strategy.plan is not None
    assert strategy.plan.num_offloaded_chunks > 0
    assert 0 < counter.frame_count <= expected.frame_count * 2


WHOLE: dict[str, Callable[[NetworkModule], object]] = {
    "module": lambda one: setattr(one, "network", torch.compile(one.network, backend="aot_eager")),
    "in place": lambda one: one.network.compile(backend="aot_eager"),
    "forward": lambda one: setattr(one.network, "forward", torch.compile(one.network.forward, backend="aot_eager")),
    "training step": lambda one: setattr(one, "training_step", torch.compile(one.training_step, backend="aot_eager")),
}


@pytest.mark.parametrize("how", WHOLE)
def test_a_network_that_is_compiled_as_a_whole_is_refused_where_it_would_be_streamed(how: str) -> None:
    one = module("llama")
    WHOLE[how](one)
    with pytest.raises(ValueError, match=r"is compiled.*module\.forward = torch\.compile\(module\.forward\)"):
        fit(one, strategy=ProTrainStrategy(plan="offload", monitor=False))


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("module", marks=pytest.mark.slow), "forward"])
def test_a_network_that_is_compiled_as_a_whole_trains_where_everything_fits(how: str) -> None:
    losses = []
    for strategy in ("auto", ProTrainStrategy(device_memory="1GiB", hardware=CPU, monitor=False)):
        torch._dynamo.reset()
        one = module("llama")
        one.network.model.layers = one.network.model.layers[:1]  # type: ignore[index, union-attr]
        WHOLE[how](one)
        fit(one, strategy=strategy, max_steps=2)
        losses.append(one.losses)
    assert all(map(torch.equal, *losses))


@pytest.mark.parametrize("part", ["", "mlp"])
def test_the_products_of_what_is_compiled_are_not_to_be_kept(part: str) -> None:
    """A block that keeps its products would run uncompiled."""
    one = module("llama")
    layout = describe_model(one)
    first = one.get_submodule(layout.blocks[0].name).get_submodule(part)
    first.forward = torch.compile(first.forward, backend="aot_eager")
    batch = next(iter(one.train_dataloader()))
    profile = profile_model(one, layout, lambda: one.training_step(batch, 0))
    kept = {segment.unit: product_bytes(segment) for segment in profile.segments}
    compiled, *others = [kept[block.name] for block in layout.blocks]
    assert compiled is None
    assert all(others)


def test_a_compiled_block_is_refused_with_what_to_do() -> None:
    one = module("llama")
    one.network.model.layers[0].compile()  # type: ignore[operator, union-attr, index]
    with pytest.raises(ValueError, match=r"is compiled.*module\.forward = torch\.compile\(module\.forward\)"):
        fit(one, strategy=ProTrainStrategy(plan="offload", monitor=False))


@pytest.mark.slow
@pytest.mark.leaves("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@torch._inductor.config.patch(compile_threads=1)
def test_the_default_compiler(precision: Any) -> None:
    plain, _ = compiled("llama", "inductor")
    fit(plain, precision=precision)
    found, _ = compiled("llama", "inductor")
    fit(found, precision=precision, strategy=ProTrainStrategy(plan="offload", monitor=False))
    assert_equal(plain, found)
    if precision != "32-true":
        return
    eager = module("llama")
    fit(eager)
    # The compiler fuses products and sums, so they round in other places.
    torch.testing.assert_close(torch.stack(found.losses), torch.stack(eager.losses), rtol=1e-5, atol=0)


def test_the_module_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path(__file__, "../../../docs/how/activations.md").resolve().read_text(encoding="utf-8")
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "torch.compile" in each)
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    names: dict[str, Any] = {}
    exec(compile(code, "activations.md", "exec"), names)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 40, **sizes}
    ids = torch.arange(4, 36).view(2, 16)
    rows, weights = [{"input_ids": each, "labels": each} for each in ids], []
    for kind in (CausalLMModule, names["CompiledModule"]):
        torch.manual_seed(0)
        one = kind(config=config)
        trainer = Trainer(
            max_epochs=2,
            strategy=ProTrainStrategy(plan="offload", monitor=False),
            accelerator="cpu",
            devices=1,
            **QUIET,
        )
        trainer.fit(one, DataLoader(rows, batch_size=2))
        weights.append(one.state_dict())
    assert counter.frame_count > 0
    eager, found = weights
    assert eager.keys() == found.keys()
    for name, value in eager.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
