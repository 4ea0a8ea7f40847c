"""Memory of gradients: one block a chunk, a place of its own for each, and nothing written over that somebody holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.device.host import PAGE, HostMemory
from lightning_protrain.planner.plan import chunk_offsets
from lightning_protrain.runtime.grad_offload import GradientMemory
from tests.runtime.applied import Net, applied
from tests.runtime.overlapped import train
from tests.support import plans

GRADIENTS = {
    "matrix": torch.randn(3, 5),
    "vector": torch.randn(7),
    "no dimension": torch.randn(()),
    "no elements": torch.randn(0, 3),
    "transposed": torch.randn(5, 3).t(),
    "channels last": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "bfloat16": torch.randn(3, 5).bfloat16(),
    "bfloat16, transposed": torch.randn(5, 3).bfloat16().t(),
    "float16": torch.randn(9).half(),
    "float64": torch.randn(3, 2).double(),
    "complex": torch.randn(3, 2, dtype=torch.complex64),
}


def num_free(memory: HostMemory) -> int:
    return sum(len(blocks) for blocks in memory._free.values())


@pytest.mark.parametrize("kind", GRADIENTS)
def test_every_kind_has_a_place(kind: str) -> None:
    gradient, memory = GRADIENTS[kind], HostMemory()
    places = GradientMemory(memory, [4, gradient.nbytes, 4])
    before, made, after = (places.empty_like(g, at) for at, g in enumerate((torch.ones(1), gradient, torch.ones(1))))
    before.fill_(1)
    after.fill_(2)
    made.copy_(gradient)
    assert (made.dtype, made.shape, made.stride()) == (gradient.dtype, gradient.shape, gradient.stride())
    assert torch.equal(made, gradient)
    assert (before.item(), after.item()) == (1, 2)
    assert made.untyped_storage().nbytes() == gradient.nbytes
    assert made.is_leaf
    assert not made._is_view()
    assert memory.allocated_bytes == PAGE


def test_the_block_lives_as_long_as_any_view_of_a_gradient() -> None:
    memory = HostMemory()
    places = GradientMemory(memory, [16, 16])
    for gradient in (torch.ones(4), torch.ones(2, 2), torch.ones(8).bfloat16()):
        first, second = (places.empty_like(gradient, at) for at in (0, 1))
        view = second.detach().view(-1)
        del first, second
        assert num_free(memory) == 0
        assert memory.allocated_bytes == PAGE
        del view
        assert num_free(memory) == 1


def test_a_place_that_was_given_out_is_not_given_again_while_its_block_lives() -> None:
    memory = HostMemory()
    places = GradientMemory(memory, [16, 16])
    held = places.empty_like(torch.ones(4), 0).fill_(1)
    other = places.empty_like(torch.ones(4), 0).fill_(2)
    assert memory.allocated_bytes == 2 * PAGE
    assert held.tolist() == [1.0] * 4
    # The block that was taken last has a free place; the one before is left to who holds it.
    assert places.empty_like(torch.ones(4), 1).data_ptr() == other.data_ptr() + chunk_offsets([16, 16])[0][1]


def test_gradients_have_versions_of_their_own() -> None:
    places = GradientMemory(HostMemory(), [16, 16])
    first, second = (places.empty_like(torch.ones(4), at) for at in (0, 1))
    before = second._version
    first.add_(1)
    assert second._version == before


@given(moves=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
@settings(deadline=None)
def test_whatever_is_held_keeps_its_values(moves: list[tuple[int, bool]]) -> None:
    memory = HostMemory()
    places = GradientMemory(memory, [16] * 4)
    held: list[tuple[Tensor, int]] = []
    for number, (place, drop) in enumerate(moves):
        made = places.empty_like(torch.ones(4), place)
        made.fill_(number)
        held.append((made, number))
        if drop:
            held.pop(len(held) // 2)
        del made
        assert all(tensor.tolist() == [value] * 4 for tensor, value in held)
    held.clear()
    assert num_free(memory) * PAGE == memory.allocated_bytes


def test_memory_that_is_page_locked_is_made_before_training() -> None:
    """Positive control: without page-locking the first backward makes it."""
    made = []
    for lock in (None, lambda address, size: True):
        device = CPUDevice(torch.device("cpu"))
        device.host = HostMemory(lock, lambda address: None)
        with applied(Net(), plans.place, device) as state:
            before = device.host.allocated_bytes
            train(state.model, state, num_steps=2)
            made.append(device.host.allocated_bytes - before)
    assert made[0] > 0
    assert made[1] == 0
