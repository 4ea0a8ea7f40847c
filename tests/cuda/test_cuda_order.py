"""No kernel and no copy runs before what it depends on: every access to memory is checked on the stand-in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_protrain.device.device import CUDADevice, StreamDevice
from lightning_protrain.planner.plan import Plan
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.cuda.marks import CUDA
from tests.runtime.swapped import SLAB
from tests.support.gpus import DEVICE, STAND_IN
from tests.support.models import LanguageModel, Mlp, ParityModule, fit
from tests.support.plans import place

pytestmark = [CUDA, pytest.mark.skipif(not STAND_IN, reason="a GPU checks no order")]


# --- the check --------------------------------------------------------------------------------------------------------


class Two:
    """A tensor of the compute stream, another stream, and page-locked memory."""

    def __init__(self) -> None:
        self.tensor = torch.ones(64, device="cuda")
        self.compute, self.other = torch.cuda.current_stream(), torch.cuda.Stream()
        self.host = torch.zeros(64).pin_memory()

    def aside(self, work: Callable[[], Any], waits: bool = True) -> Any:
        """Do some work on the other stream."""
        if waits:
            self.other.wait_stream(self.compute)
        with torch.cuda.stream(self.other):
            return work()

    def end(self) -> None:
        """Let the stand-in say what was found."""
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda")


def read_before_write(two: Two, waits: bool) -> None:
    two.aside(lambda: two.tensor * 2, waits)


def write_before_read(two: Two, waits: bool) -> None:
    two.aside(two.tensor[:8].sum)
    if waits:
        two.compute.wait_stream(two.other)
    two.tensor[4:].zero_()


def free_before_read(two: Two, waits: bool) -> None:
    two.aside(two.tensor.sum)
    if waits:
        two.tensor.record_stream(two.other)
    two.tensor = two.host


def resize_before_read(two: Two, waits: bool) -> None:
    two.aside(two.tensor.sum)
    if waits:
        two.compute.wait_stream(two.other)
    two.tensor.untyped_storage().resize_(0)


def host_reads_before_download(two: Two, waits: bool) -> None:
    two.host.copy_(two.tensor, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    two.host.sum()


def host_writes_before_upload(two: Two, waits: bool) -> None:
    two.aside(lambda: two.tensor.copy_(two.host, non_blocking=True))
    if waits:
        two.other.record_event().synchronize()
    two.host.zero_()


PROGRAMS = [read_before_write, write_before_read, free_before_read, resize_before_read]
PROGRAMS += [host_reads_before_download, host_writes_before_upload]


@pytest.mark.usefixtures("plants_races")
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_race_is_found_that_no_fence_prevents(program: Callable[[Two, bool], None], waits: bool) -> None:
    two = Two()
    with contextlib.nullcontext() if waits else pytest.raises(RuntimeError, match=r"Race: .* no fence is between them"):
        program(two, waits)
        two.end()


def test_parts_that_have_no_byte_in_common_need_no_order() -> None:
    two = Two()
    two.aside(two.tensor[:8].sum)
    two.tensor[8:].zero_()
    two.end()


# --- the device's fences ----------------------------------------------------------------------------------------------


def without_waits(stream: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Plant a fault: a copying stream waits for nobody."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        make = CUDADevice.__init__

        def made(device: CUDADevice, *given: Any) -> None:
            make(device, *given)
            for wait in ("wait_event", "wait_stream"):
                setattr(getattr(device, stream), wait, lambda other: None)

        patch.setattr(CUDADevice, "__init__", made)

    return plant


def without(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Plant a fault: a method that waits does not."""
    return lambda patch: patch.setattr(StreamDevice, name, lambda device, *given: None)


def released_early(patch: pytest.MonkeyPatch) -> None:
    """Plant a fault: sources of downloads are not held."""
    patch.setattr(StreamDevice, "_let_go", lambda device, *given: device._held.clear())


def swapping(module: ParityModule) -> Plan:
    return place(module, swap_bytes=lambda index: SLAB * (index % 2 == 0))


FAULTS = {
    "an upload does not wait for the compute stream": (without_waits("_up"), "offload"),
    "the compute stream does not wait for an upload": (without("wait"), "offload"),
    "a download does not wait for the compute stream": (without_waits("_down"), "offload"),
    "the host does not wait for a download": (without("wait_host"), "offload"),
    "a source is freed while it is downloaded": (released_early, "offload"),
    "a swap-out does not wait for the compute stream": (without_waits("_out"), swapping),
    "a swap-in does not wait for the compute stream": (without_waits("_in"), swapping),
}


@pytest.mark.usefixtures("plants_races")
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fence_of_the_device_is_needed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, plan = FAULTS[fault]
    torch.manual_seed(0)
    module = ParityModule(LanguageModel([Mlp() for _ in range(4)]), optimizer="adamw")
    # Activations of whole pages, as smaller ones are not worth a copy.
    module.train_dataloader = lambda: DataLoader(torch.arange(7 * 32 * 8).view(7, 1, 32, 8) % 31, batch_size=None)
    plant(monkeypatch)
    with pytest.raises(RuntimeError, match="Race: "):
        fit(module, accelerator=DEVICE, strategy=ProTrainStrategy(plan=plan if plan == "offload" else plan(module)))
