"""The optimizers of bitsandbytes over host memory: their own bits, in tiles, and exactly so many bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_protrain.runtime import eightbit
from lightning_protrain.runtime.eightbit import (
    BLOCK,
    SLOWDOWN,
    host_slowdown,
    in_tiles,
    is_blockwise,
    mean_state_bytes,
    refuse_without_host_step,
)

Parameters = list[nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW8bit": lambda p: bnb.optim.AdamW8bit(p, weight_decay=0.1),
    "PagedAdamW8bit": lambda p: bnb.optim.PagedAdamW8bit(p),
    "Adam8bit": lambda p: bnb.optim.Adam8bit(p),
    "Lion8bit": lambda p: bnb.optim.Lion8bit(p, weight_decay=0.1),
    "SGD8bit": lambda p: bnb.optim.SGD8bit(p, lr=0.1, momentum=0.9),
    "RMSprop8bit": lambda p: bnb.optim.RMSprop8bit(p),
    "Adagrad8bit": lambda p: bnb.optim.Adagrad8bit(p),
    "LAMB8bit": lambda p: bnb.optim.LAMB8bit(p),
    "AdEMAMix8bit": lambda p: bnb.optim.AdEMAMix8bit(p),
    "AdamW": lambda p: bnb.optim.AdamW(p),
    "LAMB": lambda p: bnb.optim.LAMB(p, max_unorm=1.0),
}
OURS = ("AdamW8bit", "PagedAdamW8bit", "Lion8bit")


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(eightbit, "TILE", 8 * BLOCK)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Paged optimizers are not supported on CPU")
        yield


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Parameters:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def steps(optimizer: Any, count: int = 3) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def states(optimizer: Any, held: Parameters) -> list[dict[str, Any]]:
    return [dict(optimizer.state[parameter]) for parameter in held]


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def assert_same_as_whole(kind: str, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    whole, tiled = parameters(*shapes, dtype=dtype), parameters(*shapes, dtype=dtype)
    expected, found = OPTIMIZERS[kind](whole), OPTIMIZERS[kind](tiled)
    steps(expected)
    with in_tiles(found):
        steps(found)
    assert all(map(torch.equal, whole, tiled))
    for one, other in zip(states(expected, whole), states(found, tiled), strict=True):
        assert one.keys() == other.keys()
        assert all(same(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_tiles_change_no_bit(kind: str, dtype: torch.dtype) -> None:
    assert_same_as_whole(kind, (64, 128), (3, 8, BLOCK), (5000,), (7,), dtype=dtype)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(1, 40 * BLOCK), kind=st.sampled_from(OURS))
def test_tiles_change_no_bit_of_any_size(size: int, kind: str) -> None:
    assert_same_as_whole(kind, (size,))


def test_a_weight_in_another_order_of_dimensions_is_stepped_whole() -> None:
    shape = (16, 32, 4, 4)
    results = []
    for tiled in (False, True):
        (parameter,) = parameters(shape)
        parameter.data = parameter.data.to(memory_format=torch.channels_last)
        optimizer = bnb.optim.AdamW8bit([parameter])
        if tiled:
            with in_tiles(optimizer):
                steps(optimizer)
        else:
            steps(optimizer)
        results.append(parameter.detach())
    assert torch.equal(*results)


def test_what_it_holds_at_one_time_is_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = bnb.functional.optimizer_update_8bit_blockwise
    monkeypatch.setattr(
        bnb.functional, "optimizer_update_8bit_blockwise", lambda *a, **k: (seen.append(a[1].numel()), real(*a, **k))
    )
    (parameter,) = parameters((20 * BLOCK + 3,))
    optimizer = bnb.optim.AdamW8bit([parameter])
    with in_tiles(optimizer):
        steps(optimizer, 2)
    assert seen == [8 * BLOCK, 8 * BLOCK, 4 * BLOCK + 3] * 2
    assert optimizer.state[parameter]["step"] == 2
    assert list(optimizer.state) == [parameter]
    assert "update_step" not in vars(optimizer)


def test_an_exception_leaves_the_optimizer_as_it_was() -> None:
    optimizer = bnb.optim.AdamW8bit(parameters((8,)))
    with pytest.raises(KeyError), in_tiles(optimizer):
        raise KeyError
    assert "update_step" not in vars(optimizer)


def test_optimizers_of_others_are_left_alone() -> None:
    optimizer = torch.optim.AdamW(parameters((8,)))
    before = dict(vars(optimizer))
    with in_tiles(optimizer):
        assert vars(optimizer) == before
    assert not is_blockwise(optimizer)
    assert host_slowdown([optimizer]) == 1.0


class Derived(bnb.optim.AdamW8bit):
    """What a user derives from one of them is one of them."""


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "derived"])
def test_they_are_known(kind: str) -> None:
    optimizer = Derived(parameters((8,))) if kind == "derived" else OPTIMIZERS[kind](parameters((8,)))
    assert is_blockwise(optimizer)
    assert host_slowdown([torch.optim.SGD(parameters((8,))), optimizer]) == SLOWDOWN


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
    """To count the bytes of states must not move them to nowhere."""
    held = parameters((64, 128))
    optimizer = bnb.optim.AdamW8bit(held)
    mean_state_bytes([optimizer])
    assert {table.device.type for table in optimizer.name2qmap.values()} == {"cpu"}
    steps(optimizer)
    assert held[0].isfinite().all()


def test_a_version_without_a_step_on_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizers = [torch.optim.SGD(parameters((8,))), bnb.optim.Lion8bit(parameters((8,)))]
    refuse_without_host_step(optimizers)
    monkeypatch.setattr(eightbit, "_KERNEL", "bitsandbytes::dequantize_4bit.out")
    with pytest.raises(ValueError, match="Lion8bit of the installed bitsandbytes has no step"):
        refuse_without_host_step(optimizers)
    refuse_without_host_step(optimizers[:1])
