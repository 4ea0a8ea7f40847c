"""The simulated device: the real runtime passes on it bit for bit, and every fence that is taken away is caught."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.config import Knobs
from lightning_protrain.device.device import StreamDevice
from lightning_protrain.planner.memory import StatesProblem
from lightning_protrain.planner.presets import make_plan
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.runtime.apply import RunOptions, Runtime, apply_plan
from lightning_protrain.runtime.chunk import Chunk
from tests.support.simulated.device import Rates, SimulatedDevice
from tests.support.simulated.streams import RaceError

WIDTH = 8


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Network(nn.Module):
    """Some blocks, the last of them skipped on request, and a head."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        for block in self.blocks[:-1] if skip else self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def place(model: nn.Module, device: StreamDevice, **knobs: int) -> Runtime:
    layout = describe_model(model)
    preset = "auto" if knobs else "offload"
    plan = make_plan(StatesProblem(layout, 8.0), preset, Knobs(**{**_OPEN, **knobs}) if knobs else Knobs())
    return apply_plan(model, plan, layout, device, RunOptions(lambda sentence: None))


_OPEN = {
    "num_persistent_chunks": 0,
    "num_chunk_buffers": 2,
    "num_swap_blocks": 0,
    "num_checkpoint_blocks": 0,
    "num_keep_offloaded_blocks": 0,
}


def train(
    model: nn.Module,
    run: Callable[..., Any],
    backward: Callable[[], AbstractContextManager[None]],
    steps: int,
    accumulate: int,
) -> None:
    """A small training loop with evaluation and a host write (an average of weights) after every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = copy.deepcopy({name: p.detach() for name, p in model.state_dict().items()})
    data = torch.Generator().manual_seed(1)
    for step in range(steps):
        for _ in range(accumulate):
            x = torch.randn(3, WIDTH, generator=data)
            loss = run(lambda x=x, step=step: model(x, skip=step % 3 == 2), True)
            with backward():
                loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            run(lambda x=x: model(x), False)
            for name, parameter in model.named_parameters():
                average[name].lerp_(parameter, 0.5)
                parameter.copy_(parameter * 0.999 + average[name] * 0.001)


def train_simulated(device: SimulatedDevice, steps: int = 4, accumulate: int = 1, **knobs: int) -> Network:
    model = network()
    with device:
        runtime = place(model, device, **knobs)
        train(
            model,
            lambda step, training: runtime.run_step(step, (), {}, training),
            runtime.backward,
            steps,
            accumulate,
        )
        runtime.remove()
    return model


PLACEMENTS = {
    "offload": {},
    "keep": {"num_keep_offloaded_blocks": 4},
    "one buffer": {"num_chunk_buffers": 1, "num_checkpoint_blocks": 2, "num_keep_offloaded_blocks": 2},
    "many buffers": {"num_chunk_buffers": 8, "num_keep_offloaded_blocks": 4},
    "half resident": {"num_persistent_chunks": 2, "num_checkpoint_blocks": 3, "num_keep_offloaded_blocks": 1},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_runtime_is_free_of_races_and_exact(placement: str, accumulate: int) -> None:
    reference = network()
    train(reference, lambda step, training: step(), nullcontext, 4, accumulate)
    model = train_simulated(SimulatedDevice(), accumulate=accumulate, **PLACEMENTS[placement])
    for (name, expected), parameter in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, parameter), name


def upload_without_waiting_for_compute(self: StreamDevice, source: Tensor, target: Tensor, after: Any = None) -> Any:
    self.copy(self._up, source, target)
    self._uploads.append(self._up.record_event())
    return self._uploads[-1]


def download_without_waiting_for_compute(self: StreamDevice, source: Tensor, target: Tensor) -> Any:
    self.copy(self._down, source, target)
    fence = self._down.record_event()
    self._held.append((fence, source))
    return fence


def download_without_holding(self: StreamDevice, source: Tensor, target: Tensor) -> Any:
    self._down.wait_stream(self.compute_stream())
    self.copy(self._down, source, target)
    return self._down.record_event()


def download_and_let_go(self: StreamDevice, source: Tensor, target: Tensor) -> Any:
    if len(self._held) > 1:
        self._held.popleft()
    return DOWNLOAD(self, source, target)


def release_without_waiting(self: Chunk) -> None:
    self._fence = None
    RELEASE(self)


DOWNLOAD, RELEASE = StreamDevice.download, Chunk.release
BUGS: dict[str, tuple[type, str, Callable[..., Any], dict[str, int]]] = {
    "an upload that does not wait for compute": (StreamDevice, "upload", upload_without_waiting_for_compute, {}),
    "compute that does not wait for an upload": (StreamDevice, "wait", lambda self, fence: None, {}),
    "a download that does not wait for compute": (StreamDevice, "download", download_without_waiting_for_compute, {}),
    "a download whose source is not held": (StreamDevice, "download", download_without_holding, {}),
    "a source that is let go while it is copied": (StreamDevice, "download", download_and_let_go, {}),
    "a host that does not wait for a download": (StreamDevice, "wait_host", lambda self, fence: None, {}),
    "a host that does not wait for uploads": (StreamDevice, "settle", lambda self: None, {"num_chunk_buffers": 8}),
    "a release that does not wait for its prefetch": (Chunk, "release", release_without_waiting, {}),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_missing_fence_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, replacement, knobs = BUGS[bug]
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(RaceError):
        train_simulated(SimulatedDevice(), **({**PLACEMENTS["keep"], **knobs} if knobs else {}))


def test_a_kernel_over_host_and_device_is_refused() -> None:
    model, device = network(), SimulatedDevice()
    with device:
        runtime = place(model, device)
        with pytest.raises(RaceError, match="host and of the device"):
            runtime.run_step(
                lambda: model.blocks[0](torch.ones(1, WIDTH)) @ model.head.weight.t(), (), {}, training=True
            )
        runtime.remove()


def test_host_memory_for_a_while_is_known_until_it_is_closed() -> None:
    device = SimulatedDevice()
    memory = device.new_host_memory()
    tensor = memory.empty_like(torch.zeros(3))
    assert device.place(tensor) == "host"
    on_device = torch.zeros(3)
    device.set_place(on_device, "device")
    fence = device.download(on_device, tensor)
    with device:
        with pytest.raises(RaceError):
            tensor.add_(1)
        device.wait_host(fence)
        tensor.add_(1)
    memory.close()
    assert device.place(tensor) is None


def test_a_copy_runs_no_earlier_than_its_fence_demands() -> None:
    device = SimulatedDevice()
    with device:
        host = device.host.empty_like(torch.ones(4)).fill_(3.0)
        target = torch.zeros(4)
        fence = device.upload(host, target)
        with device._mode.unattributed():
            assert target.isnan().all()
        assert not fence.query()
        device.wait(fence)
        assert fence.passed
        assert not fence.query(), "the host has not come as far"
        fence.synchronize()
        assert fence.query()
        assert torch.equal(target, torch.full((4,), 3.0))


def test_a_copy_behind_a_job_hides_what_lies_there_wherever_it_is_waited_for() -> None:
    with SimulatedDevice() as device:
        host, target = device.host.empty_like(torch.ones(2)).fill_(1.0), torch.zeros(2)
        device.set_place(target, "device")
        fence = device.upload(host, target, device.worker.submit(lambda: None))
        with device.aside:
            device.wait(fence)
        with device.unattributed():
            assert target.isnan().all()


def test_the_host_runs_ahead_of_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the link is: what must not pile up on the device holds the device back alone."""
    device, model = SimulatedDevice(Rates(upload=1e15, download=1e3, memory=1e15, host_memory=1e15)), network()
    download, seen = device.download, []

    def watched(source: Tensor, target: Tensor) -> Any:
        fence = download(source, target)
        seen.append((device.host_stream.time, device.compute_stream().time))
        return fence

    monkeypatch.setattr(device, "download", watched)
    with device:
        runtime = place(model, device, num_chunk_buffers=8, num_keep_offloaded_blocks=4)
        output = runtime.run_step(lambda: model(torch.ones(3, WIDTH)), (), {}, training=True)
        with runtime.backward():
            output.backward()
        runtime.remove()
    assert len(seen) == len(list(model.parameters()))
    assert seen[-1][0] < 1e-6
    assert seen[-1][1] > 1


COMPUTE_BOUND = Rates(upload=1e9, download=1e9, flops=1e6, memory=1e15, host_memory=1e15)


def exposed_uploads(num_chunk_buffers: int) -> float:
    """Share of the upload time of a step that nothing hides, on a device where computing takes far longer."""
    device, model = SimulatedDevice(COMPUTE_BOUND), network()
    batch = torch.ones(3, WIDTH)
    with device:
        runtime = place(model, device, num_chunk_buffers=num_chunk_buffers, num_keep_offloaded_blocks=4)
        for _ in range(3):
            exposed, uploading, downloading = device.exposed, device._up.busy, device._down.busy
            output = runtime.run_step(lambda: model(batch), (), {}, training=True)
            with runtime.backward():
                output.backward()
        runtime.remove()
    last_download = max(parameter.nbytes for parameter in model.blocks[0].parameters()) / COMPUTE_BOUND.download
    assert device._down.busy > downloading
    return (device.exposed - exposed - last_download) / (device._up.busy - uploading)


def test_prefetches_hide_all_uploads_but_the_first() -> None:
    share = exposed_uploads(num_chunk_buffers=2)
    first = 1 / 8  # Five chunks up in forward, of which two are live when backward begins.
    assert share <= first + 0.05


def test_without_a_second_buffer_nothing_is_hidden() -> None:
    assert exposed_uploads(num_chunk_buffers=1) > 0.9


# --- what it says it can do -----------------------------------------------------------------------------------------
