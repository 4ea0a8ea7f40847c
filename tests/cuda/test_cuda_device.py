"""CUDA transfers: correct bytes in order, page-locked memory, and the fallback if memory cannot be locked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_protrain.device.device import CUDADevice, open_device
from lightning_protrain.device.host import PAGE
from tests.cuda.marks import needs_real_gpu
from tests.support.gpus import STAND_IN

pytestmark = pytest.mark.cuda

MIB = 1 << 20


@pytest.fixture
def sentences() -> list[str]:
    return []


@pytest.fixture
def device(sentences: list[str]) -> Iterator[CUDADevice]:
    opened = open_device(torch.device("cuda", 0), sentences.append)
    assert isinstance(opened, CUDADevice)
    yield opened
    opened.close()


def busy(device: CUDADevice) -> torch.Tensor:
    """Keeps the compute stream busy for a while: copies issued now would run ahead of it without a fence."""
    size = 64 if STAND_IN else 4096
    matrix = torch.randn(size, size, device=device.torch_device)
    for _ in range(20):
        matrix = matrix @ matrix * 1e-4
    return matrix


def test_host_memory_is_page_locked(device: CUDADevice, sentences: list[str]) -> None:
    tensor = device.host.empty_like(torch.empty(3 * MIB))
    assert tensor.is_pinned()
    assert device.host.locked_bytes == device.host.allocated_bytes == 12 * MIB
    assert sentences == []
    device.close()
    assert device.host.locked_bytes == 0
    assert not tensor.is_pinned()
    tensor.fill_(1)


def test_an_upload_is_waited_for(device: CUDADevice) -> None:
    source = device.host.empty_like(torch.empty(16 * MIB))
    source.copy_(torch.arange(16 * MIB, dtype=torch.float32))
    target = torch.empty(16 * MIB, device=device.torch_device)
    fence = device.upload(source, target)
    device.wait(fence)
    assert torch.equal(target.cpu(), source)
    assert device.counters.uploaded_bytes == source.nbytes


def test_an_upload_waits_for_what_reads_its_target(device: CUDADevice) -> None:
    """The memory of a released chunk may still be read by a kernel that has been launched before."""
    source = device.host.empty_like(torch.empty(4 * MIB))
    source.fill_(2.0)
    target = torch.ones(4 * MIB, device=device.torch_device)
    busy(device)
    read = target.clone()
    device.upload(source, target)
    torch.cuda.synchronize()
    assert bool((read == 1).all())
    assert bool((target == 2).all())


def test_a_download_waits_for_its_source_and_holds_it(device: CUDADevice) -> None:
    busy(device)
    source = torch.full((4 * MIB,), 3.0, device=device.torch_device)
    target = device.host.empty_like(source.cpu())
    fence = device.download(source, target)
    del source
    # Whoever is given the memory now must not be able to overwrite what is being copied.
    torch.full((4 * MIB,), 4.0, device=device.torch_device)
    device.wait_host(fence)
    assert bool((target == 3).all())
    assert device.counters.downloaded_bytes == target.nbytes


@needs_real_gpu
def test_copies_do_not_block_the_host(device: CUDADevice) -> None:
    source = device.host.empty_like(torch.empty(64 * MIB))
    target = torch.empty(64 * MIB, device=device.torch_device)
    busy(device)
    fence = device.upload(source, target)
    assert not fence.query()
    device.settle()
    assert fence.query()


def test_memory_that_cannot_be_locked_is_said_once_and_works(
    monkeypatch: pytest.MonkeyPatch, device: CUDADevice, sentences: list[str]
) -> None:
    class Refusing:
        def cudaHostRegister(self, *_: Any) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    source = device.host.empty_like(torch.empty(PAGE))
    other = device.host.empty_like(torch.empty(2 * PAGE))
    monkeypatch.undo()
    assert device.host.locked_bytes == 0
    assert len(sentences) == 1
    assert "cudaHostRegister returned 2" in sentences[0]
    assert "ulimit -l" in sentences[0]
    source.fill_(5.0)
    target = torch.empty(PAGE, device=device.torch_device)
    device.wait(device.upload(source, target))
    device.wait_host(device.download(target, other[:PAGE]))
    assert bool((other[:PAGE] == 5).all())


def test_an_error_of_locking_reaches_no_kernel(device: CUDADevice, sentences: list[str]) -> None:
    block = device.host.empty_like(torch.empty(PAGE))
    assert not device._lock(block.data_ptr(), PAGE)  # It is locked already.
    assert len(sentences) == 1
    assert torch.ones(2, device=device.torch_device).sum().item() == 2


def test_the_budget_counts_what_the_allocator_keeps(device: CUDADevice) -> None:
    torch.cuda.empty_cache()
    before = device.free_bytes()
    tensor = torch.empty(64 * MIB, device=device.torch_device)
    held = device.free_bytes()
    del tensor
    after = device.free_bytes()
    assert before is not None
    assert held is not None
    assert after is not None
    assert before - held >= 64 * MIB * 4 - MIB
    assert abs(after - before) <= 4 * MIB


def test_freed_storages_give_their_memory_back(device: CUDADevice) -> None:
    storage = torch.UntypedStorage(32 * MIB, device=device.torch_device)
    before = torch.cuda.memory_allocated()
    device.resize(storage, 0)
    assert before - torch.cuda.memory_allocated() == 32 * MIB
    device.resize(storage, 32 * MIB)
    assert torch.cuda.memory_allocated() == before
