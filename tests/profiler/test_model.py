"""A profile has the bytes and the casts of a real step, and leaves the model as it was."""

from __future__ import annotations

import itertools
import json
import random
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.records import castable
from lightning_protrain.runtime.swap import ActivationSwap
from tests.profiler.against_real_run import BATCHED, MODELS, PRECISIONS, check_against_real_run, loss_of, photograph
from tests.profiler.models import CASES, tokens
from tests.runtime.applied import applied
from tests.support.models import HIDDEN, LanguageModel, Mlp, variants, zoo
from tests.support.plans import place


def alternately(names: Iterable[str], *both: str) -> list[tuple[str, str]]:
    """Return each name with one precision, in turns, and those of `both` with all."""
    pairs = list(zip(names, itertools.cycle(PRECISIONS), strict=False))
    return [*pairs, *((name, each) for name in both for each in PRECISIONS if (name, each) not in pairs)]


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("name", "precision"), alternately(MODELS, "llama", "gpt2", "llama-tied", "t5", "llava", "lora")
)
def test_bytes_and_casts_are_those_of_a_real_step(name: str, precision: str) -> None:
    build, inputs = MODELS[name]
    model = build().train()
    profile = check_against_real_run(model, lambda: loss_of(model(**inputs)), PRECISIONS[precision])
    assert json.loads(json.dumps(asdict(profile)))["saved_bytes"] == profile.saved_bytes
    assert {call.name for call in profile.calls} >= {unit.name for unit in describe_model(model).blocks} - {""}
    if precision == "32-true":
        assert not castable(profile, "bfloat16")


@pytest.mark.parametrize(("name", "precision"), alternately(sorted({**zoo(), **variants()}.keys() - {"moe"}), "tied"))
def test_bytes_and_casts_of_lightning_modules(name: str, precision: str) -> None:
    module = {**zoo(), **variants()}[name]()
    batch = torch.arange(16).reshape(2, 8)
    check_against_real_run(module, lambda: module.loss(batch, 0), PRECISIONS[precision])


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", ["llama-tied", "mixtral", "gpt2", "t5", "bert", "lstm", "lora"])
def test_a_model_on_the_meta_device_has_the_same_profile(name: str) -> None:
    profiles = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = CASES[name].build().train()
        inputs = CASES[name].inputs()
        step = lambda model=model, inputs=inputs: loss_of(model(**inputs))  # noqa: E731
        profiles.append(profile_model(model, describe_model(model), step, PRECISIONS["bf16-mixed"]))
    assert profiles[0] == profiles[1]
    assert castable(profiles[0], "bfloat16")


class Changes(nn.Module):
    """Saves one storage at two versions, one twice, its inputs, a view, and less than a page."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.ones(64, 64))

    def forward(self, hidden: Tensor) -> Tensor:
        held = hidden.exp()
        first = (held.detach() * self.scale).sum()
        held = held.detach().mul_(2)
        second = held * self.scale + held.t() * self.scale + hidden[:8, :8].sum() * self.scale
        return hidden * (first + second.mean() + (self.table * self.scale).sum() + self.scale.exp())


def large_batch(name: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Return a model, and a step whose tensors are larger than a page."""
    if name == "changes":
        model, inputs = nn.Sequential(*(nn.Sequential(Changes()) for _ in range(2))), {"input": torch.ones(64, 64)}
    else:
        build, small = MODELS[name]
        model = build().train()
        inputs = {key: value.repeat(64, *[1] * (value.dim() - 1)) for key, value in small.items()}
        if name == "wav2vec2":
            model.config.layerdrop = 0.0
    return model, lambda: loss_of(model(**inputs))


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "precision"), alternately([*BATCHED, "changes"], "llama", "gpt2", "changes"))
def test_swap_bytes_are_those_that_a_call_swaps(name: str, precision: str, used_bytes: dict[str, int]) -> None:
    model, step = large_batch(name)
    planned = profile_model(model, describe_model(model), step, PRECISIONS[precision]).swap_bytes()
    names = [unit.name for unit in describe_model(model).blocks]
    make = lambda module: place(module, lambda index: True, swap_bytes=lambda index: planned[names[index]])  # noqa: E731
    with applied(model, make) as state, PRECISIONS[precision]():
        state.step(step)
    assert used_bytes == {name: planned[name] for name in names}
    assert min(used_bytes.values()) > 0


@pytest.mark.sample(9)
@pytest.mark.parametrize(("name", "precision"), alternately(BATCHED, "llama", "gpt2", "gemma3"))
def test_input_swap_bytes_are_those_that_a_checkpointed_call_swaps(
    name: str, precision: str, used_bytes: dict[str, int]
) -> None:
    model, step = large_batch(name)
    layout = describe_model(model)
    given = profile_model(model, layout, step, PRECISIONS[precision]).input_swap_bytes
    planned = [given.get(unit.name, 0) for unit in layout.blocks]
    make = lambda module: place(module, lambda index: True, lambda index: True, None, planned.__getitem__)  # noqa: E731
    with applied(model, make) as state, PRECISIONS[precision]():
        state.step(step)
    assert used_bytes == {unit.name: nbytes for unit, nbytes in zip(layout.blocks, planned, strict=True) if nbytes}
    assert used_bytes


@pytest.fixture
def used_bytes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of the slabs that swapped calls have used, the most for each block."""
    used: dict[str, int] = {}
    call = ActivationSwap.call

    @contextmanager
    def observed(self: ActivationSwap, name: str, *args: Any) -> Iterator[None]:
        with call(self, name, *args):
            yield
            if self._running:
                used[name] = max(used.get(name, 0), self._running[-1].slabs.used_bytes)

    monkeypatch.setattr(ActivationSwap, "call", observed)
    return used


class Busy(nn.Module):
    """A block that does whatever a block should not, and then, if it is told to, fails."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()
        self.embedding = nn.Embedding(4, 16, max_norm=0.1)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("scale", torch.ones(16))
        self.seen: list[Tensor] = []
        self.cache: dict[str, Tensor] = {"old": torch.ones(1)}
        self.fails = False

    def forward(self, hidden: Tensor) -> Tensor:
        self.scale.mul_(2)
        self.scale = self.scale + 1
        self.fresh = hidden
        self.seen.append(hidden)
        self.cache.clear()
        self.mlp.extra = nn.Parameter(torch.ones(2))
        self.eval()
        self.mlp.requires_grad_(False)
        torch.randperm(4), random.random(), np.random.rand()  # noqa: NPY002
        rows = self.embedding(torch.arange(hidden.shape[0]) % 4)[:, None]
        hidden = self.norm(self.train().mlp(hidden + rows).flatten(0, 1)).view_as(hidden) * self.scale
        if self.fails:
            raise KeyError("in the middle")
        return hidden


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_the_model_is_as_it_was(fails: bool, backward: bool) -> None:
    model = LanguageModel([Busy(), Busy()])
    model.blocks[1].fails = fails
    model.blocks[0].mlp.forward = model.blocks[0].mlp.forward  # an attribute of the instance, as some libraries set
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.blocks[0].mlp.up.weight.register_hook(pytest.fail)
    batch = torch.tensor([[1, 2], [3, 4]])
    before = photograph(model)

    def step() -> Tensor:
        batch.add_(1)
        loss = model(batch).sum()
        if backward:
            loss.backward()
        return loss

    with torch.no_grad(), pytest.raises(KeyError) if fails else nullcontext():
        profile_model(model, describe_model(model), step)
    assert photograph(model) == before
    assert batch.tolist() == [[1, 2], [3, 4]]


def test_backward_is_seen_by_the_modes_of_this_thread() -> None:
    model, seen = Mlp(), []

    def step() -> Tensor:
        loss = model(torch.ones(1, HIDDEN)).sum()
        loss.register_hook(lambda _: seen.append(torch._C._is_multithreading_enabled()))
        return loss

    profile_model(model, describe_model(model, blocks=[Mlp]), step)
    assert seen == [False]
    assert torch._C._is_multithreading_enabled()


def test_a_second_profile_is_the_same() -> None:
    model = LanguageModel([Busy(), Mlp()])
    layout = describe_model(model)
    profiles = [profile_model(model, layout, lambda: model(tokens()).sum()) for _ in range(2)]
    assert profiles[0] == profiles[1]


class Reads(nn.Module):
    """Looks at a floating-point value."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(hidden) if hidden.mean().item() > 1 else hidden


def test_the_unit_that_reads_a_value_is_named() -> None:
    model = LanguageModel([Reads(), Reads()])
    layout = describe_model(model)
    with pytest.raises(ValueError, match=r"_local_scalar_dense.* in 'blocks\.1' needs the values"):
        profile_model(model, layout, lambda: model(tokens(), order=[1]).sum(), log_once=None)
    with pytest.raises(ValueError, match="in code outside all blocks"):
        profile_model(model, layout, lambda: model(tokens(), order=[]).sum().item() > 1, log_once=None)
    module = zoo()["moe"]()
    with pytest.raises(ValueError, match=r"'network\.blocks\.0'"):
        profile_model(module, describe_model(module), lambda: module.loss(tokens(), 0), log_once=None)


@pytest.mark.parametrize("name", ["gpt2", "bert", "conv"])
def test_flops_are_those_of_torch(name: str) -> None:
    convolutions = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2), nn.Flatten(), nn.Linear(4 * 16, 2)]
    if name == "conv":
        model: nn.Module = nn.Sequential(*convolutions)
        inputs: dict[str, Tensor] = {"input": torch.ones(2, 3, 8, 8)}
    else:
        model, inputs = CASES[name].build(), CASES[name].inputs()
        model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    profile = profile_model(model, describe_model(model), lambda: model(**inputs))
    assert profile.flops == counter.get_total_flops() > 0


@pytest.mark.slow
def test_seven_billion_parameters_need_no_memory() -> None:
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig())
    batch = torch.arange(2048)[None]
    step = lambda: model(input_ids=batch, labels=batch).loss  # noqa: E731
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profile = profile_model(model, describe_model(model), step, PRECISIONS["bf16-mixed"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert len(castable(profile, "bfloat16")) == 32 * 7 + 1
    weights = sum(info.numel for info in describe_model(model).parameters) - 32000 * 4096
    assert 2 * 2048 * weights < profile.flops < 2.5 * 2048 * weights
