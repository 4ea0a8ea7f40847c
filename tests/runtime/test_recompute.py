"""Checkpointed blocks repeat their forward bit for bit, and what cannot be repeated is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, noop_context_fn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from lightning_protrain.models.loss import chunked_cross_entropy
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.runtime import recompute
from lightning_protrain.runtime.apply import RunOptions, apply_plan
from lightning_protrain.runtime.recompute import (
    checkpoint,
    one_of_each_device,
    refuse_compiled,
    refuse_cuda_graphs,
    refuse_own_checkpointing,
    stop_caching,
)
from tests.runtime.applied import PLANS, WIDTH, Block, Net, StepFunction, applied, assert_parity, batches, mean_square
from tests.support.plans import kept


def forget(tensor: Tensor) -> tuple[Tensor, list[str]]:
    """Runs a function through `checkpoint` and says when it ran."""
    calls: list[str] = []

    def function(value: Tensor, *, scale: Tensor, name: str) -> Tensor:
        calls.append(name)
        return torch.tanh(value * scale)

    return checkpoint(function, ((tensor,), {"scale": torch.tensor(2.0), "name": "block"}), nn.Module(), "block"), calls


def checkpoint_of_2_11(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Any] = noop_context_fn,
) -> Any:
    """Repeats `torch.utils.checkpoint` of torch 2.11, whose hooks are on until the generator ends or is freed."""
    hooks = _checkpoint_without_reentrant_generator(
        function, preserve_rng_state, context_fn, "default", False, True, *args
    )
    next(hooks)
    result = function(*args)
    next(hooks, None)
    return result


RUNS: dict[str, Callable[[Callable[..., Any], Tensor], Any]] = {
    "whole": lambda function, value: checkpoint(function, ((value,), {}), nn.Module(), "block"),
    "selective": lambda function, value: checkpoint(function, ((value,), {}), nn.Module(), "block", selective=True),
    "loss": lambda function, value: chunked_cross_entropy(value, function, torch.zeros(1, 3, dtype=torch.int64)),
}


@pytest.mark.parametrize("kind", RUNS)
def test_nothing_stays_on_after_an_exception_whose_traceback_lives(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger or a debugger holds it, and the next fit would save its tensors in the frame of this one."""
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint_of_2_11)

    def fails(value: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        RUNS[kind](fails, torch.ones(1, 3, 4, requires_grad=True))
    assert caught.value.__traceback__ is not None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert _get_current_dispatch_mode() is None


def test_an_exception_of_the_recomputation_reaches_backward() -> None:
    calls: list[str] = []

    def fails_again(value: Tensor) -> Tensor:
        calls.append("run")
        if len(calls) == 2:
            raise KeyError("again")
        return value.tanh()

    output = RUNS["whole"](fails_again, torch.ones(3, requires_grad=True))
    with pytest.raises(KeyError, match="again"):
        output.sum().backward()


def test_the_random_state_of_a_gpu_is_read_once_for_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode(), torch.device("cuda:0"):
        given = [torch.empty(2), torch.empty(3), torch.empty(1, device="cuda:1"), torch.empty(1, device="cpu"), "word"]
        found = one_of_each_device(given)
    assert [(str(each.device), each.numel()) for each in found] == [("cuda:0", 0), ("cuda:1", 0)]
    read: list[int] = []
    written: list[Any] = []
    monkeypatch.setattr(recompute, "one_of_each_device", lambda values: found)
    monkeypatch.setattr(recompute, "get_device_states", lambda *each: (read.append(len(each)) or [0, 1], ["state"]))
    monkeypatch.setattr(recompute, "set_device_states", lambda *states: written.append(states))
    value = torch.randn(3, requires_grad=True)
    output, _ = forget(value)
    assert read == [2]
    output.sum().backward()
    assert read == [2, 2]  # what the recomputation gives back
    assert written == [([0, 1], ["state"])] * 2


@pytest.mark.parametrize("whole", [False, True], ids=["forward", "module"])
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_of_streamed_weights_are_refused_before_anything_is_placed(mode: str, whole: bool) -> None:
    model = Net()
    if whole:
        model.blocks[1].up.compile(mode=mode)
    else:
        model.blocks[1].up.forward = torch.compile(model.blocks[1].up.forward, mode=mode)
    layout, plan = describe_model(model), kept(model)
    device: Any = SimpleNamespace(torch_device=torch.device("cuda"))
    with pytest.raises(ValueError, match=r"'blocks\.1\.up' is compiled with CUDA graphs .*reduce-overhead"):
        apply_plan(model, plan, layout, device, RunOptions(print))


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_other_modes_of_compilation_are_taken(mode: str) -> None:
    model = Net()
    model.blocks[1].forward = torch.compile(model.blocks[1].forward, mode=mode)
    refuse_cuda_graphs(model.blocks[1], "blocks.1")


def test_a_function_runs_again_in_backward_with_the_same_arguments() -> None:
    value = torch.randn(3, requires_grad=True)
    output, calls = forget(value)
    assert calls == ["block"]
    output.sum().backward()
    assert calls == ["block", "block"]
    other = value.detach().clone().requires_grad_()
    torch.tanh(other * 2).sum().backward()
    assert torch.equal(value.grad, other.grad)


@pytest.mark.parametrize("reserved", ["use_reentrant", "context_fn", "debug", "preserve_rng_state"])
def test_arguments_of_any_name_reach_the_function(reserved: str) -> None:
    value = torch.randn(3, requires_grad=True)
    output = checkpoint(lambda value, **named: value * named[reserved], ((value,), {reserved: 3}), nn.Module(), "block")
    output.sum().backward()
    assert torch.equal(value.grad, torch.full((3,), 3.0))


@pytest.mark.parametrize("named", [True, False])
def test_an_input_changed_before_the_recomputation_raises(named: bool) -> None:
    weight = torch.randn(3, requires_grad=True)
    value = torch.randn(3)
    arguments: Any = ((), {"value": value}) if named else ((value,), {})
    output = checkpoint(lambda value: (value * weight).tanh(), arguments, nn.Module(), "block")
    value.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


class Dropping(Block):
    """Draws random numbers."""

    def forward(self, hidden: Tensor, *, rate: float = 0.3) -> Tensor:
        return super().forward(nn.functional.dropout(hidden, rate)) * torch.rand(WIDTH)


class Counting(nn.Module):
    """Has buffers that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.block(hidden)) * 2


class Spectral(Block):
    """Has buffers that every forward first reads and then changes: one iteration towards a singular vector."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(self.up)


@pytest.mark.parametrize("plan", ["checkpointed", "alternating", "offload"])
@pytest.mark.parametrize("block", [Dropping, Counting, Spectral])
def test_parity(block: type[nn.Module], plan: str) -> None:
    assert_parity(lambda: Net([block() for _ in range(3)]), PLANS[plan])


class Halving(Block):
    """Is another function in evaluation, with tensors of the same shapes."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden * (1.0 if self.training else 0.5))


def in_evaluation(module: nn.Module, batch: Tensor, index: int) -> Tensor:
    module.eval()
    loss = module(batch).pow(2).mean()
    module.train()
    return loss


def with_other_weights(module: nn.Module, batch: Tensor, index: int) -> Tensor:
    for block in module.blocks:
        weights = {name: weight * 1.5 for name, weight in block.named_parameters()}
        batch = functional_call(block, weights, (batch,))
    return batch.pow(2).mean()


@pytest.mark.parametrize("plan", ["checkpointed", "offload"])
@pytest.mark.parametrize("step", [in_evaluation, with_other_weights])
def test_a_recomputation_is_that_of_the_forward(step: StepFunction, plan: str) -> None:
    assert_parity(lambda: Net([Halving() for _ in range(3)]), PLANS[plan], step)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Change the default dtype, as Lightning's plugin for true half precision does around a forward."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


AROUND_FORWARD: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: default_dtype(torch.bfloat16),
    "attention kernels": lambda: sdpa_kernel(SDPBackend.MATH),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without a cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "default device": lambda: torch.device("meta"),
}


def seen_settings() -> list[Any]:
    """Return the global settings that a forward can see."""
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    attention = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    made = torch.empty(1)
    return [torch.is_grad_enabled(), autocast, attention, made.dtype, made.device]


@pytest.mark.parametrize("name", AROUND_FORWARD)
def test_settings_around_the_forward_are_those_of_the_recomputation(name: str) -> None:
    seen: list[list[Any]] = []

    def function(value: Tensor) -> Tensor:
        seen.append(seen_settings())
        return torch.tanh(value.tanh())

    outside, value = seen_settings(), torch.randn(3, requires_grad=True)
    with AROUND_FORWARD[name]():
        output = checkpoint(function, ((value,), {}), nn.Module(), "block")
    assert outside == seen_settings()
    output.backward(torch.ones(3))
    assert outside == seen_settings()
    assert outside != seen[0] == seen[1]


class Made(Block):
    """Makes tensors in the default dtype: numbers, and a mask by hand."""

    def forward(self, hidden: Tensor) -> Tensor:
        gate = torch.linspace(0, 1, hidden.shape[-1]).to(hidden.dtype)
        return super().forward(hidden * (torch.rand(len(hidden), 1) > 0.3)) * gate


@pytest.mark.parametrize("plan", ["checkpointed", "offload"])
def test_parity_where_the_default_dtype_is_set_around_the_forward(plan: str) -> None:
    def step(module: nn.Module, batch: Tensor, index: int) -> Tensor:
        with default_dtype(torch.bfloat16):
            return module(batch.bfloat16()).float().pow(2).mean()

    assert_parity(lambda: Net([Made() for _ in range(3)]).bfloat16(), PLANS[plan], step)


def test_every_checkpointed_block_runs_twice_and_no_other() -> None:
    calls: list[int] = []
    model = Net()
    with applied(model, PLANS["alternating"]) as state:
        for index, block in enumerate(model.blocks):
            block.norm.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
        loss = state.step(mean_square, model, batches()[0], 0)
        assert calls == [0, 1, 2, 3]
        loss.backward()
        assert calls == [0, 1, 2, 3, 3, 1]


def test_two_kinds_of_checkpointing_at_once_are_refused() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    refuse_own_checkpointing(model)
    model[0].gradient_checkpointing = True
    with pytest.raises(ValueError, match=r"'0', but the plan decides .*gradient_checkpointing_disable"):
        refuse_own_checkpointing(model)


def test_a_compiled_block_is_refused_by_name() -> None:
    """Also one that is compiled when its plan has been applied; see `test_apply.py` for what is compiled before."""
    model = Net()
    with applied(model, PLANS["checkpointed"]) as state:
        for block in model.blocks:
            block.compile(backend="eager")
        with pytest.raises(ValueError, match=r"'blocks\.0' is compiled .*plan=\"resident\""):
            state.step(mean_square, model, batches()[0], 0)


def test_a_module_around_a_compiled_one_is_refused_by_name() -> None:
    refuse_compiled(nn.Linear(1, 1), "head")
    with pytest.raises(ValueError, match=r"'head' is compiled .*torch\.compile"):
        refuse_compiled(torch.compile(nn.Linear(1, 1), backend="eager"), "head")


def test_caches_are_switched_off_once_each() -> None:
    on, off = SimpleNamespace(use_cache=True), SimpleNamespace(use_cache=False)
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].config = model[1].config = on
    model[2].config = off
    assert stop_caching(model) == [on]
    assert on.use_cache is False
    assert stop_caching(model) == []


def attend(hidden: Tensor, *, cache: Any, layer: int = 0) -> Tensor:
    """Keys of all tokens, those that the cache holds before them."""
    own = getattr(cache, "self_attention_cache", cache)
    keys, values = own.update(hidden, hidden.square(), layer)
    return torch.tanh(keys).sum(-2, keepdim=True) * values.mean(-2, keepdim=True)


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_cache_that_is_given_is_filled_once(crossed: bool, backwards: int) -> None:
    """Prefix tuning gives such a cache, and the prefix gets its gradient through it."""
    results = []
    for recomputed in (False, True):
        prefix = torch.ones(1, 1, 2, 3, requires_grad=True)
        hidden = torch.full((1, 1, 4, 3), 0.5, requires_grad=True)
        held = DynamicCache()
        held.update(prefix * 2, prefix * 3, 0)
        cache = EncoderDecoderCache(held, DynamicCache()) if crossed else held
        if recomputed:
            output = checkpoint(attend, ((hidden,), {"cache": cache}), nn.Module(), "block")
        else:
            output = attend(hidden, cache=cache)
        for _ in range(backwards):
            output.sum().backward(retain_graph=True)
        assert held.layers[0].keys.shape[-2] == 6
        results.append((output, prefix.grad, hidden.grad))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected, found)
