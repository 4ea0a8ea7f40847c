"""Optimizers of bitsandbytes over host memory: their own bits, in the memory that is there."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_protrain.runtime.optim import adam8bit, bnb_optimizers
from lightning_protrain.runtime.optim.adam8bit import BLOCK, BlockwiseStep, is_blockwise, is_unchanged
from lightning_protrain.runtime.optim.bnb_optimizers import (
    in_tiles,
    load_by_reference,
    mean_state_bytes,
    refuse_without_host_step,
)
from lightning_protrain.runtime.optim.fused import NO_CLIP, Clip
from lightning_protrain.runtime.optim.step import steps_parameters_alone
from lightning_protrain.runtime.optim.threads import StepThreads

Parameters = list[nn.Parameter]
TILE = 4 * BLOCK
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW8bit": lambda p: bnb.optim.AdamW8bit(p, weight_decay=0.1),
    "PagedAdamW8bit": lambda p: bnb.optim.PagedAdamW8bit(p, lr=1e-2, weight_decay=0.0),
    "Adam8bit": lambda p: bnb.optim.Adam8bit(p),
    "Lion8bit": lambda p: bnb.optim.Lion8bit(p, weight_decay=0.1),
    "SGD8bit": lambda p: bnb.optim.SGD8bit(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "RMSprop8bit": lambda p: bnb.optim.RMSprop8bit(p),
    "Adagrad8bit": lambda p: bnb.optim.Adagrad8bit(p, weight_decay=0.1),
    "LAMB8bit": lambda p: bnb.optim.LAMB8bit(p),
    "AdEMAMix8bit": lambda p: bnb.optim.AdEMAMix8bit(p),
    "AdamW": lambda p: bnb.optim.AdamW(p),
    "LAMB": lambda p: bnb.optim.LAMB(p, max_unorm=1.0),
}
WITH_TABLES = ("AdamW8bit", "PagedAdamW8bit", "Adam8bit", "Lion8bit")
ODD = (math.inf, -math.inf, math.nan, 0.0, 1e-45, -1e-40, 1e20, 3e38)


@pytest.fixture(autouse=True)
def quiet_and_without_overrides() -> Iterator[None]:
    known = vars(bnb.optim.GlobalOptimManager.get_instance())
    held = {name: value.copy() for name, value in known.items() if isinstance(value, dict | list)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        yield
    known.update(held)


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Parameters:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradient_of(parameter: Tensor, index: int, odd: bool = False) -> Tensor:
    """Return a gradient that is partly zero, in whole blocks, too."""
    generator = torch.Generator().manual_seed(index)
    made = torch.randn(parameter.shape, generator=generator)
    made *= 10 ** (torch.rand(parameter.shape, generator=generator) * 6 - 6)
    made.view(-1)[: min(300 * index, parameter.numel() // 2)] = 0
    if odd:
        made.view(-1)[-len(ODD) :] = torch.tensor(ODD)[-made.numel() :]
    return made.to(parameter.dtype)


def step_alone(
    optimizer: Any, parameter: Tensor, gradient: Tensor, copy: Tensor | None = None, clip: Clip = NO_CLIP
) -> None:
    """One parameter, in small tiles."""
    group = next(group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
    with torch.no_grad():
        for call in BlockwiseStep(optimizer, TILE).calls({**group, "params": []}, parameter, gradient, copy, clip):
            call()


def bits(value: Any) -> Any:
    return value.detach().contiguous().view(-1).view(torch.uint8) if isinstance(value, Tensor) else value


def same(one: Any, other: Any) -> bool:
    return torch.equal(bits(one), bits(other)) if isinstance(one, Tensor) else bool(one == other)


def assert_same(expected: Any, found: Any) -> None:
    """Weights and states of two optimizers."""
    pairs = zip(expected.param_groups[0]["params"], found.param_groups[0]["params"], strict=True)
    for one, other in pairs:
        assert same(one, other)
        assert expected.state[one].keys() == found.state[other].keys()
        for name, value in expected.state[one].items():
            assert same(value, found.state[other][name]), name


def assert_as_the_library(
    kind: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, odd: bool = False, count: int = 3
) -> None:
    expected, found = (OPTIMIZERS[kind](parameters(*shapes, dtype=dtype)) for _ in range(2))
    for index in range(count):
        for optimizer in (expected, found):
            for parameter in optimizer.param_groups[0]["params"]:
                gradient = gradient_of(parameter, index, odd and index == 1)
                if optimizer is found:
                    step_alone(optimizer, parameter, gradient)
                else:
                    parameter.grad = gradient
        expected.step()
    assert_same(expected, found)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_bits_are_those_of_the_library(kind: str, dtype: torch.dtype, odd: bool) -> None:
    assert_as_the_library(kind, (64, 128), (3, 8, BLOCK), (5001,), (9,), dtype=dtype, odd=odd)


@pytest.mark.parametrize("kind", WITH_TABLES)
def test_another_default_dtype_changes_no_bit(kind: str) -> None:
    """`precision="bf16-true"` changes the default dtype while the model computes, and steps may run then."""
    (one,), (other,) = parameters((5001,)), parameters((5001,))
    expected, found = OPTIMIZERS[kind]([one]), OPTIMIZERS[kind]([other])
    for index in range(3):
        one.grad = gradient_of(one, index, odd=index == 1)
        expected.step()
        gradient = one.grad.clone()
        torch.set_default_dtype(torch.bfloat16)
        try:
            step_alone(found, other, gradient)
        finally:
            torch.set_default_dtype(torch.float32)
    assert_same(expected, found)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(4096, 40 * BLOCK), kind=st.sampled_from(WITH_TABLES), odd=st.booleans())
def test_bits_are_those_of_the_library_for_any_size(size: int, kind: str, odd: bool) -> None:
    assert_as_the_library(kind, (size,), odd=odd)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_tables_step_what_they_know(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = bnb.functional.optimizer_update_8bit_blockwise
    monkeypatch.setattr(
        bnb.functional, "optimizer_update_8bit_blockwise", lambda *a, **k: (asked.append(a[1].numel()), real(*a, **k))
    )
    (parameter,) = held = parameters((20 * BLOCK + 3,))
    optimizer = OPTIMIZERS[kind](held)
    for index in range(2):
        step_alone(optimizer, parameter, gradient_of(parameter, index))
    assert optimizer.state[parameter]["step"] == 2
    assert list(optimizer.state) == [parameter]
    by_tables = kind in WITH_TABLES or kind in ("AdamW", "LAMB")
    assert sum(asked) == (0 if by_tables else 2 * (20 * BLOCK + 3))


@pytest.mark.parametrize("way", ["without tables", "rate in a tensor", "derived"])
def test_the_library_steps_the_rest(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = bnb.functional.optimizer_update_8bit_blockwise
    (one,), (other,) = parameters((10 * BLOCK + 3, 2)), parameters((10 * BLOCK + 3, 2))
    kind = Changed if way == "derived" else bnb.optim.AdamW8bit
    lr: Any = torch.tensor(1e-3) if way == "rate in a tensor" else 1e-3
    expected, found = kind([one], lr=lr), kind([other], lr=lr)
    if way == "without tables":
        monkeypatch.setattr("lightning_protrain.runtime.optim.adam8bit.table_of", lambda values: None)
    for index in range(3):
        one.grad = gradient_of(one, index)
        expected.step()
    monkeypatch.setattr(
        bnb.functional, "optimizer_update_8bit_blockwise", lambda *a, **k: (sizes.append(a[1].numel()), real(*a, **k))
    )
    for index in range(3):
        step_alone(found, other, gradient_of(other, index))
    # Nobody knows whether a class that others derive looks at one element at a time.
    assert sizes[0] == (one.numel() if way == "derived" else TILE)
    assert sum(sizes) == 3 * one.numel()
    assert_same(expected, found)


class Derived(bnb.optim.AdamW8bit):
    """A user's optimizer that is derived from one of bitsandbytes."""


class Changed(bnb.optim.AdamW8bit):
    """One that steps in a way of its own."""

    def update_step(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
        super().update_step(group, p, gindex, pindex)
        p.mul_(0.5)


def test_they_are_known() -> None:
    held = parameters((8,))
    found = [OPTIMIZERS[kind](held) for kind in OPTIMIZERS] + [Derived(held)]
    assert all(is_blockwise(one) and is_unchanged(one) and steps_parameters_alone(one) for one in found)
    assert is_blockwise(Changed(held))
    assert not is_unchanged(Changed(held))
    assert not steps_parameters_alone(Changed(held))
    assert not is_blockwise(torch.optim.AdamW(held))
    assert not is_unchanged(torch.optim.AdamW(held))


@pytest.mark.parametrize("override", [{"percentile_clipping": 5}, {"block_wise": False}, {"max_unorm": 0.5}])
def test_what_looks_at_a_whole_parameter_is_not_cut(override: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two are options of older versions; the last one is none of states of 8 bits."""
    sizes: list[int] = []
    for name in ("optimizer_update_8bit_blockwise", "optimizer_update_32bit"):
        real = getattr(bnb.functional, name)
        wrapped = lambda *a, _real=real, **k: (sizes.append(a[2].numel()), _real(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(bnb.functional, name, wrapped)
    (parameter,) = held = parameters((2 * TILE,))
    bits = 32 if "max_unorm" in override else 8
    bnb.optim.GlobalOptimManager.get_instance().override_config(parameter, key_value_dict=override)
    step_alone(bnb.optim.AdamW(held, optim_bits=bits, min_8bit_size=1), parameter, gradient_of(parameter, 1))
    assert sizes == [2 * TILE]


@pytest.mark.parametrize("kind", ["AdamW8bit", "Lion8bit", "AdamW", "LAMB8bit"])
@pytest.mark.parametrize("clip", [Clip(bound=0.01), Clip(coefficient=torch.tensor(0.3))], ids=["value", "norm"])
def test_gradients_are_clipped_and_copies_written(kind: str, clip: Clip) -> None:
    (one,), (other,) = parameters((5001,)), parameters((5001,))
    expected, found = OPTIMIZERS[kind]([one]), OPTIMIZERS[kind]([other])
    copy = torch.empty(5001, dtype=torch.bfloat16)
    for index in range(2):
        one.grad, gradient = gradient_of(one, index), gradient_of(one, index)
        clip.apply([one.grad])
        expected.step()
        step_alone(found, other, gradient, copy, clip)
        assert torch.equal(gradient, one.grad)
    assert_same(expected, found)
    assert torch.equal(copy, one.detach().bfloat16())


@pytest.mark.parametrize("kind", ["AdamW8bit", "Lion8bit", "SGD8bit"])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_gradient_in_another_dtype_counts_in_that_of_its_weight(kind: str, dtypes: tuple[Any, Any]) -> None:
    (one,), (other,) = parameters((5001,), dtype=dtypes[0]), parameters((5001,), dtype=dtypes[0])
    expected, found = OPTIMIZERS[kind]([one]), OPTIMIZERS[kind]([other])
    gradient = gradient_of(torch.empty(5001, dtype=dtypes[1]), 1)
    one.grad = gradient.to(one.dtype)
    expected.step()
    step_alone(found, other, gradient)
    assert_same(expected, found)


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW", "LAMB8bit"])
def test_weights_stay_in_their_memory_and_order(kind: str) -> None:
    """The library would give a weight in another order of dimensions memory of its own, away from its chunk."""
    (one,), (other,) = parameters((16, 32, 4, 4)), parameters((16, 32, 4, 4))
    for each in (one, other):
        each.data = each.data.to(memory_format=torch.channels_last)
    expected, found = OPTIMIZERS[kind]([one]), OPTIMIZERS[kind]([other])
    place, strides = other.data_ptr(), other.stride()
    for index in range(2):
        one.grad = gradient_of(one, index).to(memory_format=torch.channels_last)
        gradient = one.grad.clone()
        before = gradient.data_ptr()
        step_alone(found, other, gradient)
        expected.step()
        assert gradient.data_ptr() == before
        assert other.grad is None
    assert (other.data_ptr(), other.stride()) == (place, strides)
    assert_same(expected, found)


def step_all(optimizer: Any, held: Parameters, index: int, alone: bool) -> None:
    """One step of all parameters, each by itself or as the library does it."""
    for parameter in held:
        if alone:
            step_alone(optimizer, parameter, gradient_of(parameter, index))
        else:
            parameter.grad = gradient_of(parameter, index)
    if not alone:
        optimizer.step()


def test_each_group_has_its_own_hyperparameters() -> None:
    results = []
    for alone in (False, True):
        held = parameters((64, 128), (5000,), (7,))
        groups: list[dict[str, Any]] = [
            {"params": held[:1], "betas": (0.8, 0.9), "weight_decay": 0.3},
            {"params": held[1:], "lr": 0.05, "eps": 1e-4},
        ]
        optimizer = bnb.optim.AdamW8bit(groups)
        for index in range(3):
            step_all(optimizer, held, index, alone)
            optimizer.param_groups[1]["lr"] *= 0.5
        results.append(torch.cat([parameter.detach().view(-1) for parameter in held]))
    assert torch.equal(*results)


@pytest.mark.parametrize("registered", [False, True])
def test_an_override_is_that_of_the_parameter(registered: bool) -> None:
    """An embedding with states of 32 bits: found although it is stepped alone, and by no other parameter."""
    results = []
    for alone in (False, True):
        held = parameters((64, 128), (64, 128), (5000,))
        manager = bnb.optim.GlobalOptimManager.get_instance()
        manager.initialize()
        manager.override_config(held[0], key_value_dict={"optim_bits": 32, "lr": 0.5})
        if registered:
            manager.register_parameters(held)
        optimizer = bnb.optim.AdamW8bit(held)
        for index in range(3):
            step_all(optimizer, held, index, alone)
        assert [optimizer.state[each]["state1"].dtype for each in held] == [torch.float32, torch.uint8, torch.uint8]
        results.append(torch.cat([parameter.detach().view(-1) for parameter in held]))
    assert torch.equal(*results)


def test_what_stands_for_methods_is_not_taken_for_one() -> None:
    """A scheduler puts a step of its own in the optimizer, and so does a step in tiles."""
    (parameter,) = held = parameters((5000,))
    optimizer = bnb.optim.LAMB8bit(held)
    vars(optimizer)["update_step"] = vars(optimizer)["get_config"] = None
    step_alone(optimizer, parameter, gradient_of(parameter, 1))
    assert optimizer.state[parameter]["step"] == 1


def steps(optimizer: Any, count: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def states(optimizer: Any, held: Parameters) -> list[dict[str, Any]]:
    return [dict(optimizer.state[parameter]) for parameter in held]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_tiles_change_no_bit(kind: str, dtype: torch.dtype) -> None:
    shapes = [(64, 128), (3, 8, BLOCK), (5000,), (7,)]
    expected, found = (OPTIMIZERS[kind](parameters(*shapes, dtype=dtype)) for _ in range(2))
    steps(expected)
    with in_tiles(found):
        steps(found)
    assert_same(expected, found)


def test_several_threads_change_no_bit() -> None:
    whole, tiled = (OPTIMIZERS["Lion8bit"](parameters((7 * adam8bit.TILE + 5,))) for _ in range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with in_tiles(tiled):
            steps(tiled, 2)
    finally:
        torch.set_num_threads(before)
    steps(whole, 2)
    assert_same(whole, tiled)


def test_a_step_is_left_as_it_was() -> None:
    held = parameters((8,))
    optimizer = bnb.optim.AdamW8bit(held)
    with pytest.raises(KeyError), in_tiles(optimizer):
        raise KeyError
    assert not {"update_step", "get_config"} & vars(optimizer).keys()
    with in_tiles(optimizer):
        steps(optimizer, 2)
    assert not {"update_step", "get_config"} & vars(optimizer).keys()
    assert optimizer.state[held[0]]["step"] == 2
    assert list(optimizer.state) == held


def test_overrides_are_found_when_parameters_are_left_out() -> None:
    """If some parameters are stepped elsewhere, the indices of the others in their group change."""
    results = []
    for shortened in (False, True):
        held = parameters((64, 128), (64, 128), (5000,))
        manager = bnb.optim.GlobalOptimManager.get_instance()
        manager.initialize()
        manager.override_config(held[0], key_value_dict={"lr": 0.5, "optim_bits": 32})
        manager.register_parameters(held)
        optimizer = bnb.optim.AdamW8bit(held)
        steps(optimizer, 1)
        held[0].grad = None
        groups = optimizer.param_groups
        with in_tiles(optimizer):
            if shortened:
                optimizer.param_groups = [{**groups[0], "params": held[1:]}]
            optimizer.step()
        optimizer.param_groups = groups
        results.append(torch.cat([parameter.detach().view(-1) for parameter in held]))
    assert torch.equal(*results)


def test_optimizers_of_others_are_left_alone() -> None:
    optimizer = torch.optim.AdamW(parameters((8,)))
    before = dict(vars(optimizer))
    with in_tiles(optimizer):
        assert vars(optimizer) == before


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_bytes_of_states_are_exact(kind: str) -> None:
    held = parameters((64, 128), (5000,), (33, 7), (9,))
    optimizer = OPTIMIZERS[kind](held)
    expected = mean_state_bytes([optimizer])
    assert not optimizer.state
    steps(optimizer, 1)
    tensors = [
        value
        for state in states(optimizer, held)
        for name, value in state.items()
        if isinstance(value, Tensor) and not name.startswith("qmap")
    ]
    assert expected * sum(parameter.numel() for parameter in held) == pytest.approx(sum(t.nbytes for t in tensors))


def test_bytes_of_several_optimizers_are_averaged_over_elements() -> None:
    first = bnb.optim.AdamW8bit(parameters((64, 128)))
    second = torch.optim.AdamW(parameters((64, 384)))
    assert mean_state_bytes([first]) == 2 + 8 / BLOCK
    assert mean_state_bytes([first, second]) == pytest.approx((2 + 8 / BLOCK + 3 * 8) / 4)
    assert mean_state_bytes([]) == 0.0


def test_tables_that_are_shared_stay_where_they_are() -> None:
    """Counting the bytes of states must not move them to the meta device."""
    held = parameters((64, 128))
    optimizer = bnb.optim.AdamW8bit(held)
    mean_state_bytes([optimizer])
    assert {table.device.type for table in optimizer.name2qmap.values()} == {"cpu"}
    steps(optimizer)
    assert held[0].isfinite().all()


def test_a_version_without_a_step_on_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizers = [torch.optim.SGD(parameters((8,))), bnb.optim.Lion8bit(parameters((8,)))]
    refuse_without_host_step(optimizers)
    monkeypatch.setattr(bnb_optimizers, "_KERNEL", "bitsandbytes::dequantize_4bit.out")
    with pytest.raises(ValueError, match="Lion8bit of the installed bitsandbytes has no step"):
        refuse_without_host_step(optimizers)
    refuse_without_host_step(optimizers[:1])


class Table(nn.Module):
    """An embedding that asks for states of 32 bits, as those of bitsandbytes and of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 128)
        self.linear = nn.Linear(128, 64, bias=False)


def test_bytes_know_what_modules_override() -> None:
    """Before any step, and without a change to what all optimizers share."""
    module = Table()
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.register_module_override(module.embedding, "weight", {"optim_bits": 32})
    optimizer = bnb.optim.AdamW8bit(module.parameters())
    assert mean_state_bytes([optimizer]) == (8 + 2 + 8 / BLOCK) / 2
    assert id(module.embedding.weight) not in manager.pid2config
    steps(optimizer)
    assert optimizer.state[module.embedding.weight]["state1"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["AdamW8bit", "AdEMAMix8bit", "AdamW", "torch"])
def test_states_are_loaded_by_reference(kind: str) -> None:
    """A second copy would be 14 GB for 7 billion parameters; what was loaded keeps its form."""
    make = OPTIMIZERS.get(kind, torch.optim.AdamW)
    held = parameters((64, 128), (5000,), (7,))
    first = make(held)
    steps(first)
    saved = first.state_dict()
    expected = copy.deepcopy(saved)
    reference, found = make(parameters((64, 128), (5000,), (7,))), make(parameters((64, 128), (5000,), (7,)))
    reference.load_state_dict(copy.deepcopy(saved))
    load_by_reference(found, saved)
    memory = {value.data_ptr() for value in _tensors(saved["state"])}
    for one, other in zip(reference.state.values(), found.state.values(), strict=True):
        assert one.keys() == other.keys()
        assert all(same(one[name], other[name]) for name in one)
        assert {value.data_ptr() for value in other.values() if isinstance(value, Tensor)} <= memory
    assert _structure(saved) == _structure(expected)
    assert found.param_groups[0] is not saved["param_groups"][0]
    found.param_groups[0]["lr"] = 7.0
    assert saved["param_groups"][0]["lr"] != 7.0


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _structure(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _structure(each) for name, each in value.items()}
    return None if isinstance(value, Tensor) else value


@pytest.mark.parametrize("kind", WITH_TABLES)
def test_the_host_and_the_device_have_code_tables_of_their_own(kind: str) -> None:
    """The library moves its tables to the device of a new state: the main thread's are on a GPU, here on "meta"."""
    (expected,), (weight,) = parameters((5001,)), parameters((5001,))
    alone, shared = OPTIMIZERS[kind]([expected]), OPTIMIZERS[kind]([weight])
    if not shared.name2qmap:
        shared.fill_qmap()
    on_device = {name: table.to("meta") for name, table in shared.name2qmap.items()}
    host = BlockwiseStep(shared)
    shared.name2qmap.update(on_device)
    expected.grad = gradient_of(expected, 0)
    alone.step()
    StepThreads(1).make(host.calls(shared.param_groups[0], weight, expected.grad))
    assert_same(alone, shared)
    assert shared.name2qmap == on_device
