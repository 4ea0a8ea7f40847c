"""Copies are ordered and counted; the live bytes of a step are exact, and the most that was there is kept."""

from __future__ import annotations

import itertools
import resource
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_protrain.device.device import CPUDevice, CUDADevice, StreamDevice, TransferCounters, open_device
from lightning_protrain.device.host import HostMemory
from tests.runtime.applied import PLANS, Net, applied, batches, mean_square


def test_copies_are_counted_to_the_byte() -> None:
    device = CPUDevice(torch.device("cpu"))
    source, target = torch.randn(10), torch.zeros(10)
    device.wait(device.upload(source, target))
    assert torch.equal(source, target)
    device.wait_host(device.download(2 * source[:3], target[:3]))
    assert torch.equal(target[:3], 2 * source[:3])
    device.settle()
    assert device.counters == TransferCounters(uploaded_bytes=40, downloaded_bytes=12)
    device.swap_out(3 * source[:5], target[:5])
    device.wait(device.after_swaps())
    assert torch.equal(target[:5], 3 * source[:5])
    several = [(4 * source[:5], target[:5]), (source[:1], target[5:6])]
    for fence in device.swap_in(several):
        device.wait_host(fence)
    assert torch.equal(target[:6], torch.cat([4 * source[:5], source[:1]]))
    expected = TransferCounters(uploaded_bytes=40, downloaded_bytes=12, swapped_out_bytes=20, swapped_in_bytes=24)
    assert device.counters == expected


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


def test_the_cpu_has_nothing_to_wait_for_and_memory_of_its_own() -> None:
    device = CPUDevice(torch.device("cpu"))
    device.synchronize()
    assert device.describe() == {"name": "cpu"}
    memory = device.new_host_memory()
    memory.empty(1)
    assert memory.allocated_bytes > 0
    assert device.host.allocated_bytes == memory.locked_bytes == 0
    memory.close()
    device.close()


@pytest.mark.parametrize("kind", ["meta", "mps", "xpu"])
def test_other_devices_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"cannot be streamed to a device of type '{kind}'"):
        open_device(torch.device(kind), print)


# --- streams --------------------------------------------------------------------------------------------------------
class Late:
    """An event, and the stream that records it: nothing has ended before somebody waits for it."""

    def __init__(self) -> None:
        self.ended = False
        self.events: list[Late] = []
        self.recorded: list[Late] = []

    def query(self) -> bool:
        return self.ended

    def synchronize(self) -> None:
        self.ended = True

    def wait_event(self, event: Late) -> None:
        self.events.append(event)

    def wait_stream(self, stream: Late) -> None:
        self.events.append(stream)

    def record_event(self) -> Late:
        self.recorded.append(Late())
        return self.recorded[-1]


class LateDevice(StreamDevice):
    """A device whose copies run immediately and claim not to have ended."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), HostMemory(), lambda name: Late())
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
    assert device._up.events == device.computing.recorded
    assert len(device._up.events) == 1
    assert device._down.events == [device.computing]
    assert device.computing.events == []
    device.wait(fence)
    assert device.computing.events == [fence]
    assert not fence.query()


def test_swaps_have_streams_of_their_own() -> None:
    device = LateDevice()
    for _ in range(2):
        device.swap_out(torch.zeros(1), torch.zeros(1))
    out = device.after_swaps()
    backs = device.swap_in([(torch.zeros(1), torch.zeros(1)), (torch.zeros(1), torch.zeros(1))])
    back = backs[-1]
    assert device._out.events == [device.computing] * 2
    assert device._in.events == [device.computing]
    assert (device._out.recorded, device._in.recorded) == ([out], backs)
    assert device.swap_in([]) == []
    assert device._in.events == [device.computing]
    assert device._up.events == device._down.events == device.computing.events == []
    device.wait(back)
    device.wait_host(out)
    assert device.computing.events == [back]
    assert (out.query(), back.query()) == (True, False)
    device.close()
    assert all(stream.recorded[-1].query() for stream in (device._out, device._in))


def test_synchronizing_waits_for_every_stream() -> None:
    device = LateDevice()
    for copy in (device.upload, device.download, device.swap_out, lambda *copied: device.swap_in([copied])):
        copy(torch.zeros(1), torch.zeros(1))
    device.synchronize()
    streams = (device._up, device._down, device._out, device._in, device.computing)
    assert all(stream.recorded[-1].query() for stream in streams)


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
    device.wait_host(first)
    device.download(torch.zeros(2), torch.zeros(2))
    assert [tensor.nbytes for _, tensor in device._held] == [8]
    device.close()
    assert not device._held


def test_settling_holds_no_source_whose_download_has_ended() -> None:
    """Otherwise the last gradients of a backward would stay on the device until the next backward."""
    device = LateDevice()
    device.hold_bytes = 16
    first, _ = (device.download(torch.zeros(2), torch.zeros(2)) for _ in range(2))
    device.settle()
    assert [tensor.nbytes for _, tensor in device._held] == [8, 8]
    device.wait_host(first)
    device.settle()
    assert [tensor.nbytes for _, tensor in device._held] == [8]
    device.close()


def test_sources_do_not_pile_up() -> None:
    """The compute stream waits for what must go, and for nothing else; the host for nothing at all."""
    device = LateDevice()
    device.hold_bytes = 2 * 16
    fences = []
    for _ in range(6):
        fences.append(device.download(torch.zeros(4), torch.zeros(4)))
        assert sum(tensor.nbytes for _, tensor in device._held) <= device.hold_bytes
    assert device.computing.events == fences[:4]
    assert not any(fence.query() for fence in fences)
    device.close()
    assert device._down.recorded[-1].query()


def test_an_upload_after_a_job_waits_for_it_and_not_for_what_came_later() -> None:
    device, host, target = LateDevice(), torch.zeros(1), torch.zeros(1)
    gate = threading.Event()
    job = device.worker.submit(lambda: (gate.wait(), host.fill_(3.0)))
    fence = device.upload(host, target, after=job)
    given = device.computing.recorded[:]
    device.computing.record_event()
    assert device._up.events == []
    gate.set()
    device.wait(fence)
    assert device._up.events == given
    assert target.item() == 3.0
    assert device.computing.events == device._up.recorded
    device.close()


@pytest.mark.parametrize("ended", list(itertools.permutations(range(3))), ids=str)
def test_uploads_after_jobs_run_in_the_order_in_which_they_were_asked_for(ended: tuple[int, ...]) -> None:
    """Steps behind backward end from the last chunk to the first; the first is needed first."""
    device, copied = LateDevice(), []
    device.copy = lambda stream, source, target: copied.append(int(source))
    jobs: list[Future[None]] = [Future() for _ in range(3)]
    fences = [device.upload(torch.tensor(index), torch.zeros(1), after=job) for index, job in enumerate(jobs)]
    for index in ended:
        jobs[index].set_result(None)
    assert copied == [0, 1, 2]
    for fence, event in zip(fences, device._up.recorded, strict=True):
        device.wait(fence)
        assert device.computing.events[-1] is event
    device.close()


def test_settling_waits_for_uploads_that_are_yet_to_be_issued() -> None:
    device, target = LateDevice(), torch.zeros(1)
    job = device.worker.submit(lambda: None)
    device.upload(torch.ones(1), target, after=job)
    device.settle()
    assert target.item() == 1.0
    assert [event.query() for event in device._up.recorded] == [True]
    device.close()


def test_a_copy_on_the_cpu_comes_after_its_job() -> None:
    device, host, target = CPUDevice(torch.device("cpu")), torch.zeros(1), torch.zeros(1)
    fence = device.upload(host, target, after=device.worker.submit(lambda: host.fill_(2.0)))
    device.wait(fence)
    assert target.item() == 2.0
    device.close()


# --- CUDA -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> mock.MagicMock:
    """Return a mock of `torch.cuda` on which page-locking fails."""
    cuda = mock.MagicMock()
    cuda.cudart().cudaHostRegister.return_value = 2
    cuda.get_device_properties.return_value = SimpleNamespace()
    for name in ("Stream", "stream", "set_device", "cudart", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", cuda.set_allocator)
    return cuda


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (64 << 10, "Raise the limit on locked memory (`ulimit -l`), which is 64 KiB."),
        (-1, "The limit on locked memory (`ulimit -l`) is not the reason: "),
    ],
    ids=["a limit", "no limit"],
)
@pytest.mark.usefixtures("gpu")
def test_the_limit_on_locked_memory_is_blamed_only_where_there_is_one(
    limit: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert resource.RLIM_INFINITY == -1
    sentences: list[str] = []
    monkeypatch.setattr(CUDADevice, "_register", lambda *_: 2)
    device = CUDADevice(torch.device("cuda", 0), sentences.append)
    device.host.empty(1)
    (sentence,) = [sentence for sentence in sentences if "page-locked" in sentence]
    assert said in sentence


@pytest.mark.parametrize(
    ("given", "becomes", "says"),
    [
        ("", ["expandable_segments:True"], 0),
        ("max_split_size_mb:64, expandable_segments: true", [], 0),
        ("max_split_size_mb:64", [], 1),
    ],
)
@pytest.mark.parametrize("variable", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_free_memory_of_a_gpu_is_merged_unless_the_user_says_otherwise(
    given: str,
    becomes: list[str],
    says: int,
    variable: str | None,
    gpu: mock.MagicMock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    sentences: list[str] = []
    if variable is None:
        monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: given, raising=False)
    else:
        monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)  # as in torch 2.11
        monkeypatch.setenv(variable, given)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.append)
    CUDADevice(torch.device("cuda", 0), sentences.append)
    assert made == becomes
    assert len(sentences) == says
    assert all(given in sentence for sentence in sentences)


def test_the_worker_of_a_gpu_works_for_that_gpu(gpu: mock.MagicMock) -> None:
    """A thread that is not told uses GPU 0, and every rank of a machine would take memory of it."""
    device = CUDADevice(torch.device("cuda", 3), print)
    threads: list[threading.Thread] = []
    gpu.set_device.side_effect = lambda _: threads.append(threading.current_thread())
    seen: list[threading.Thread] = []
    device.worker.submit(lambda: seen.append(threading.current_thread())).result()
    device.worker.close()
    gpu.set_device.assert_called_once_with(torch.device("cuda", 3))
    assert threads == seen


def test_no_kernel_is_blamed_for_memory_that_cannot_be_locked(
    gpu: mock.MagicMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA reports an error that was not read at the next kernel launch, and PyTorch raises it there."""
    pending = [2]

    def launch(*_: object, **__: object) -> None:
        if pending:
            raise RuntimeError(f"CUDA error: {pending.pop()}")

    sentences: list[str] = []
    device = CUDADevice(torch.device("cuda", 0), sentences.append)
    monkeypatch.setattr(torch, "ones", launch)
    device.host.empty(1)
    assert pending == []
    pending.append(2)
    memory = device.new_host_memory()
    memory.empty(1)
    assert pending == []
    assert (device.host.locked_bytes, memory.locked_bytes, len(sentences)) == (0, 0, 1)


@given(st.lists(st.integers(0, 1000), max_size=30))
def test_the_peak_is_the_most_that_was_live(sizes: list[int]) -> None:
    counters, levels = TransferCounters(), [0]
    for index, size in enumerate(sizes):
        change = size if index % 2 == 0 else -min(size, levels[-1])
        counters.add_live(change)
        levels.append(levels[-1] + change)
    assert (counters.live_bytes, counters.peak_live_bytes) == (levels[-1], max(levels))
