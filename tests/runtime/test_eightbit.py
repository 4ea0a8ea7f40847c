"""The optimizers of bitsandbytes over host memory: their own bits, and exactly so many bytes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.runtime.optim import adam8bit, bnb_optimizers
from lightning_protrain.runtime.optim.adam8bit import BLOCK
from lightning_protrain.runtime.optim.bnb_optimizers import (
    OWN_SLOWDOWN,
    SLOWDOWN,
    host_slowdown,
    in_tiles,
    load_by_reference,
    mean_state_bytes,
    refuse_without_host_step,
)
from tests.runtime.test_blockwise import OPTIMIZERS, WITH_TABLES, parameters, quiet_and_without_overrides

__all__ = ["quiet_and_without_overrides"]  # Around these tests, too.
Parameters = list[nn.Parameter]


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


def test_several_threads_change_no_bit_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []
    real = bnb_optimizers.ThreadPool.join
    monkeypatch.setattr(
        bnb_optimizers.ThreadPool,
        "join",
        lambda pool, calls, number: (joined.append(number), real(pool, calls, number))[1],
    )
    monkeypatch.setattr("lightning_protrain.runtime.optim.adam8bit._TILES_PER_CALL", 1)
    before, running = torch.get_num_threads(), threading.active_count()
    torch.set_num_threads(3)
    try:
        assert_same_as_whole("AdamW8bit", (4 * adam8bit.TILE + 5,), (7,))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert joined == [2] * 3
    assert threading.active_count() == running


def test_it_takes_as_many_threads_as_the_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as many as there were before: the main thread gets others for the step of host parameters."""
    joined: list[int] = []
    monkeypatch.setattr(bnb_optimizers.ThreadPool, "join", lambda pool, calls, number: joined.append(number))
    monkeypatch.setattr("lightning_protrain.runtime.optim.adam8bit._TILES_PER_CALL", 1)
    optimizer = bnb.optim.AdamW8bit(parameters((4 * adam8bit.TILE + 5,)))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with in_tiles(optimizer):
            torch.set_num_threads(3)
            steps(optimizer, 1)
    finally:
        torch.set_num_threads(before)
    assert joined == [2]


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
    """As where some are stepped elsewhere: the rest moves up in its group."""
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
    assert host_slowdown([optimizer]) == 1.0


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_a_step_takes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [torch.optim.SGD(parameters((8,)))]
    expected = SLOWDOWN if kind in WITH_TABLES else OWN_SLOWDOWN
    assert host_slowdown([*others, OPTIMIZERS[kind](parameters((8,)))]) == expected
    monkeypatch.setattr(bnb_optimizers, "codebook_of", lambda values: None)
    assert host_slowdown([OPTIMIZERS[kind](parameters((8,)))]) == OWN_SLOWDOWN
    assert host_slowdown([]) == 1.0


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
