"""Host memory is exact, page-locked where it can be, used again exactly when nobody holds it; copies are counted."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_protrain.device import PAGE, CPUDevice, Device, HostMemory, StreamDevice, TransferCounters, open_device
from tests.runtime.applied import PLANS, Net, applied, batches, mean_square


class Locks:
    """Page-locking that records its calls and can be made to fail."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.most = most
        self.held: dict[int, int] = {}
        self.failures = 0

    def lock(self, address: int, size: int) -> bool:
        assert size % PAGE == 0
        assert address % PAGE == 0
        assert address not in self.held
        if sum(self.held.values()) + size > self.most:
            return False
        self.held[address] = size
        return True

    def unlock(self, address: int) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("unlock")
        del self.held[address]


def address_of(memory: HostMemory, nbytes: int) -> int:
    return torch.frombuffer(memory.empty(nbytes), dtype=torch.uint8).data_ptr()


@pytest.mark.parametrize(("nbytes", "pages"), [(0, 1), (1, 1), (PAGE, 1), (PAGE + 1, 2), (10 * PAGE, 10)])
def test_blocks_are_whole_pages_and_no_more(nbytes: int, pages: int) -> None:
    memory = HostMemory()
    block = memory.empty(nbytes)
    assert len(block) == memory.allocated_bytes == pages * PAGE
    assert torch.frombuffer(block, dtype=torch.uint8).data_ptr() % PAGE == 0
    assert memory.locked_bytes == 0


def test_a_block_comes_back_when_the_last_tensor_dies() -> None:
    memory = HostMemory()
    first = memory.empty_like(torch.empty(1000))
    address = first.data_ptr()
    view = first[10:20]
    del first
    second = memory.empty_like(torch.empty(1000))
    assert second.data_ptr() != address
    assert memory.allocated_bytes == 2 * PAGE
    del view
    third = memory.empty_like(torch.empty(1000))
    assert third.data_ptr() == address
    assert memory.allocated_bytes == 2 * PAGE


def as_gradient(tensor: Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros_like(tensor))
    parameter.grad = tensor
    return parameter


@pytest.mark.parametrize("hold", [Tensor.untyped_storage, Tensor.detach, Tensor.numpy, as_gradient, lambda one: [one]])
def test_whatever_holds_a_block_keeps_it(hold: Callable[[Tensor], Any]) -> None:
    memory = HostMemory()
    tensor = memory.empty_like(torch.empty(16))
    tensor.fill_(7)
    held = hold(tensor)
    address = tensor.data_ptr()
    del tensor
    other = memory.empty_like(torch.empty(16))
    other.fill_(1)
    assert other.data_ptr() != address
    del held
    gc.collect()
    assert address_of(memory, 16) == address


def test_only_blocks_of_the_same_size_are_used_again() -> None:
    memory = HostMemory()
    small = address_of(memory, 1)
    assert address_of(memory, PAGE + 1) != small
    assert address_of(memory, PAGE) == small
    assert memory.allocated_bytes == 3 * PAGE


@given(sizes=st.lists(st.integers(0, 5 * PAGE), max_size=12), keep=st.lists(st.booleans(), min_size=12, max_size=12))
def test_no_two_tensors_share_a_byte(sizes: list[int], keep: list[bool]) -> None:
    memory = HostMemory()
    held: list[tuple[int, Tensor]] = []
    for value, (size, stays) in enumerate(zip(sizes, keep, strict=False)):
        tensor = torch.frombuffer(memory.empty(size), dtype=torch.uint8)
        tensor.fill_(value)
        if stays:
            held.append((value, tensor))
        del tensor
    assert all(bool((tensor == value).all()) for value, tensor in held)
    assert memory.allocated_bytes % PAGE == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(()),
        torch.randn(0, 3),
        torch.randn(4, dtype=torch.complex128),
        torch.randn(5).bfloat16(),
        torch.ones(3, dtype=torch.bool),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_empty_like(tensor: Tensor) -> None:
    empty = HostMemory().empty_like(tensor)
    assert (empty.dtype, empty.shape, empty.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    empty.copy_(tensor)
    assert torch.equal(empty, tensor)
    assert empty.untyped_storage().nbytes() == tensor.nbytes
    assert torch.equal(copy.deepcopy(empty), tensor)


def test_new_blocks_are_locked_once_and_unlocked_at_the_end() -> None:
    locks = Locks()
    memory = HostMemory(locks.lock, locks.unlock)
    kept = memory.empty_like(torch.empty(PAGE))
    for _ in range(3):
        memory.empty_like(torch.empty(2 * PAGE))
    assert memory.locked_bytes == memory.allocated_bytes == sum(locks.held.values()) == 12 * PAGE
    memory.close()
    assert locks.held == {}
    assert memory.locked_bytes == 0
    kept.fill_(3)
    assert bool((kept == 3).all())
    memory.close()


def test_memory_that_cannot_be_locked_is_used_all_the_same() -> None:
    locks = Locks(most=2 * PAGE)
    memory = HostMemory(locks.lock, locks.unlock)
    held = [memory.empty(PAGE) for _ in range(5)]
    assert memory.locked_bytes == 2 * PAGE
    assert memory.allocated_bytes == 5 * PAGE
    assert len({id(block) for block in held}) == 5
    memory.close()
    assert locks.held == {}


def test_unlocking_that_fails_is_tried_again_from_where_it_stopped() -> None:
    locks = Locks()
    memory = HostMemory(locks.lock, locks.unlock)
    held = [memory.empty(PAGE) for _ in range(3)]
    locks.failures = 1
    with pytest.raises(RuntimeError, match="unlock"):
        memory.close()
    assert memory.locked_bytes == 3 * PAGE
    assert len(held) == 3
    memory.close()
    assert memory.locked_bytes == 0
    assert locks.held == {}


def test_locking_that_raises_leaves_nothing_locked() -> None:
    def lock(address: int, size: int) -> bool:
        raise OSError("no")

    memory = HostMemory(lock, lambda address: None)
    with pytest.raises(OSError, match="no"):
        memory.empty(1)
    assert memory.locked_bytes == 0
    memory.close()


def test_closed_memory_gives_nothing_and_takes_nothing_back() -> None:
    memory = HostMemory()
    held = memory.empty_like(torch.empty(4))
    memory.close()
    del held
    with pytest.raises(AssertionError):
        memory.empty(1)


# --- the CPU as a device --------------------------------------------------------------------------------------------


def test_copies_are_counted_to_the_byte() -> None:
    device = CPUDevice(torch.device("cpu"))
    source, target = torch.randn(10), torch.zeros(10)
    device.wait(device.upload(source, target))
    assert torch.equal(source, target)
    device.land(device.download(2 * source[:3], target[:3]))
    assert torch.equal(target[:3], 2 * source[:3])
    device.settle()
    assert device.counters == TransferCounters(uploaded_bytes=40, downloaded_bytes=12)


def test_live_bytes_and_their_peak() -> None:
    counters = TransferCounters()
    for nbytes in (5, 7, -5, 4, -11):
        counters.add_live(nbytes)
    assert (counters.live_bytes, counters.peak_live_bytes) == (0, 12)


def test_every_device_counts_for_itself() -> None:
    one, other = CPUDevice(torch.device("cpu")), CPUDevice(torch.device("cpu"))
    one.upload(torch.zeros(1), torch.zeros(1))
    assert one.counters.uploaded_bytes == 4
    assert other.counters == TransferCounters()
    assert one.host is not other.host


def test_the_counters_of_a_step_are_exact() -> None:
    model = Net()
    with applied(model, PLANS["kept"]) as state:
        nbytes = {chunk.plan.unit: chunk.nbytes for chunk in state.chunks}
        state.step(mean_square, model, batches()[0], 0).backward()
        counters = state.device.counters
        num = len(state.chunks)
        # Forward brings every chunk; the last one is still there when backward begins.
        assert counters.uploads == 2 * num - 1
        assert counters.uploaded_bytes == 2 * sum(nbytes.values()) - nbytes["head"]
        assert counters.downloaded_bytes == sum(parameter.nbytes for parameter in model.parameters())
        assert counters.prefetch_hits + counters.prefetch_misses == counters.uploads
        assert counters.live_bytes == 0
        assert counters.peak_live_bytes == max(nbytes.values())


def test_the_cpu_has_no_budget_of_its_own() -> None:
    device = open_device(torch.device("cpu"), print)
    assert type(device) is CPUDevice
    assert device.free_bytes() is None
    device.close()


def test_storages_are_resized_in_place() -> None:
    device: Device = CPUDevice(torch.device("cpu"))
    storage = torch.UntypedStorage(8)
    device.resize(storage, 0)
    assert storage.nbytes() == 0
    device.resize(storage, 16)
    assert storage.nbytes() == 16


@pytest.mark.parametrize("kind", ["meta", "mps", "xpu"])
def test_other_devices_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"No streaming on '{kind}'"):
        open_device(torch.device(kind), print)


# --- streams --------------------------------------------------------------------------------------------------------


class Late:
    """An event, and the stream that records it: nothing has ended before somebody waits for it."""

    def __init__(self) -> None:
        self.ended = False
        self.events: list[Late] = []

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.ended = True

    def wait_event(self, event: Late) -> None:
        self.events.append(event)

    def wait_stream(self, stream: Late) -> None:
        self.events.append(stream)

    def record_event(self) -> Late:
        return Late()


class LateDevice(StreamDevice):
    """Copies at once, and pretends that it has not ended."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), HostMemory(), Late(), Late())
        self.computing = Late()

    def compute_stream(self) -> Late:
        return self.computing

    def copy(self, stream: Late, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def free_bytes(self) -> int | None:
        return None


def test_copies_wait_for_what_has_been_computed() -> None:
    device = LateDevice()
    fence = device.upload(torch.zeros(1), torch.zeros(1))
    device.download(torch.zeros(1), torch.zeros(1))
    assert device._up.events == [device.computing]
    assert device._down.events == [device.computing]
    assert device.computing.events == []
    device.wait(fence)
    assert device.computing.events == [fence]
    assert not fence.query()


def test_settling_waits_for_the_last_upload() -> None:
    device = LateDevice()
    device.upload(torch.zeros(1), torch.zeros(1))
    last = device.upload(torch.zeros(1), torch.zeros(1))
    device.settle()
    assert last.query()


def test_a_source_is_held_until_its_download_has_ended() -> None:
    device = LateDevice()
    first = device.download(torch.zeros(4), torch.zeros(4))
    assert [tensor.nbytes for _, tensor in device._held] == [16]
    device.land(first)
    device.download(torch.zeros(2), torch.zeros(2))
    assert [tensor.nbytes for _, tensor in device._held] == [8]
    device.close()
    assert not device._held


def test_sources_do_not_pile_up() -> None:
    device = LateDevice()
    for _ in range(6):
        device.download(torch.zeros(4), torch.zeros(4))
        assert sum(tensor.nbytes for _, tensor in device._held) <= 2 * 16
