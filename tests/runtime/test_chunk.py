"""A chunk: two parameters over one storage, true values at every use, and versions as autograd expects them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.runtime.chunk import DeviceParam
from tests.runtime import applied
from tests.runtime.applied import PLANS, ROWS, WIDTH, Block, Net, assert_parity, chunk_of, live, mean_square


class Scaled(nn.Parameter):
    """A parameter class with attributes, as quantised ones have."""

    scale: float


def scaled() -> nn.Parameter:
    parameter = Scaled(torch.randn(3, 5))
    parameter.scale = 0.5
    return parameter


PARAMETERS: dict[str, Callable[[], nn.Parameter]] = {
    "matrix": lambda: nn.Parameter(torch.randn(5, 7)),
    "transposed": lambda: nn.Parameter(torch.randn(5, 7).t()),
    "channels last": lambda: nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)),
    "part of a larger tensor": lambda: nn.Parameter(torch.randn(6, 8)[1:5, 2:4]),
    "expanded": lambda: nn.Parameter(torch.randn(1, 4).expand(3, 4)),
    "no elements": lambda: nn.Parameter(torch.randn(0, 3)),
    "no dimension": lambda: nn.Parameter(torch.randn(())),
    "complex": lambda: nn.Parameter(torch.randn(3, dtype=torch.complex64)),
    "complex128": lambda: nn.Parameter(torch.randn(3, 2, dtype=torch.complex128)),
    "bfloat16": lambda: nn.Parameter(torch.randn(9).bfloat16()),
    "float64": lambda: nn.Parameter(torch.randn(9).double()),
    "uint8": lambda: nn.Parameter(torch.arange(9, dtype=torch.uint8), requires_grad=False),
    "bool": lambda: nn.Parameter(torch.tensor([True, False]), requires_grad=False),
    "frozen": lambda: nn.Parameter(torch.randn(4), requires_grad=False),
    "subclass": scaled,
}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_the_device_parameter_is_like_the_host_parameter(kind: str) -> None:
    host = PARAMETERS[kind]()
    values, strides, size = host.detach().clone(), host.stride(), host.size()
    dense = kind not in ("part of a larger tensor", "expanded")
    chunk, _ = chunk_of(nn.Parameter(torch.zeros(3, dtype=host.dtype), requires_grad=host.requires_grad), host)
    param = live(chunk).params[1]
    assert param.host is host
    assert type(param.device_param) is (DeviceParam if type(host) is nn.Parameter else type(host))
    assert isinstance(param.device_param, nn.Parameter)
    assert (param.device_param.dtype, param.device_param.requires_grad) == (values.dtype, host.requires_grad)
    assert torch.equal(param.device_param, values)
    assert torch.equal(host, values)
    assert param.device_param.is_leaf
    assert host.is_leaf
    for tensor in (host, param.device_param):
        assert tensor.size() == size
        assert not dense or tensor.stride() == strides
    if kind == "subclass":
        assert isinstance(param.device_param, Scaled)
        assert param.device_param.scale == 0.5


@pytest.mark.parametrize(
    "kind", [kind for kind, make in PARAMETERS.items() if make().requires_grad and kind != "expanded"]
)
def test_every_kind_trains_bitwise(kind: str) -> None:
    class Kind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = PARAMETERS[kind]()

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + torch.sin(self.weight).abs().square().sum().float()

    assert_parity(lambda: Net([Kind() for _ in range(3)]), PLANS["kept"])


def test_convolutions_in_channels_last_train_bitwise() -> None:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + self.conv(hidden.view(1, 2, ROWS, WIDTH // 2)).reshape(hidden.shape)

    state = assert_parity(lambda: Net([Convolution() for _ in range(3)]), PLANS["kept"])
    assert state.model.blocks[0].conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_the_storage_is_one_for_life() -> None:
    chunk, device = chunk_of(nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(3)))
    storage = chunk._storage
    views = [param.device_param.detach().view(-1) for param in live(chunk).params]
    versions = [param.device_param._version for param in chunk.params]
    for _ in range(3):
        chunk.release()
        assert storage.nbytes() == 0
        assert device.counters.live_bytes == 0
        live(chunk)
        assert device.counters.live_bytes == chunk.nbytes == storage.nbytes()
        for param, view in zip(chunk.params, views, strict=True):
            assert param.device_param.untyped_storage()._cdata == storage._cdata
            assert torch.equal(view, param.host.view(-1))
    assert [param.device_param._version for param in chunk.params] == versions
    assert device.counters.uploads == 4
    assert device.counters.uploaded_bytes == 4 * chunk.nbytes


def test_an_in_place_change_moves_the_version_once() -> None:
    chunk, device = chunk_of(nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4)))
    first, second = live(chunk).params
    versions = first.device_param._version, second.device_param._version
    chunk.release()
    with torch.no_grad():
        first.host.mul_(2)
    live(chunk)
    assert (first.device_param._version, second.device_param._version) == (versions[0] + 1, versions[1])
    chunk.release()
    live(chunk)
    assert first.device_param._version == versions[0] + 1
    assert device.counters.uploads == 3


@pytest.mark.parametrize("moment", ["on the host", "under way", "live"])
def test_a_use_in_forward_sees_a_change_made_at_any_moment(moment: str) -> None:
    chunk, _ = chunk_of(nn.Parameter(torch.ones(4)))
    (param,) = chunk.params
    if moment != "on the host":
        chunk.fetch()
    if moment == "live":
        chunk.wait(in_backward=False)
    with torch.no_grad():
        param.host.fill_(3.0)
    assert torch.equal(live(chunk).params[0].device_param, torch.full((4,), 3.0))


def test_data_pointed_elsewhere_is_followed() -> None:
    chunk, _ = chunk_of(nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(2, 2)))
    other = torch.arange(4.0)
    host = chunk.params[0].host
    live(chunk).release()
    host.data = other
    assert torch.equal(live(chunk).params[0].device_param, other)
    assert host.data_ptr() != other.data_ptr()
    other.fill_(9)
    chunk.release()
    assert torch.equal(live(chunk).params[0].device_param, torch.arange(4.0))
    host.data.mul_(2)
    chunk.release()
    assert torch.equal(live(chunk).params[0].device_param, 2 * torch.arange(4.0))


def test_data_pointed_elsewhere_in_inference_mode_can_be_trained_on() -> None:
    chunk, _ = chunk_of(nn.Parameter(torch.ones(4)))
    host = chunk.params[0].host
    host.data = torch.full((4,), 2.0)
    with torch.inference_mode():
        live(chunk).release()
    assert not host.is_inference()
    host.square().sum().backward()
    assert torch.equal(host.grad, torch.full((4,), 4.0))


@pytest.mark.parametrize("plan", ["kept", "offload"])
def test_data_pointed_elsewhere_between_forward_and_backward_is_refused(plan: str) -> None:
    def step(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        loss = mean_square(model, batch, index)
        weight = model.blocks[0].up.weight
        weight.data = weight.data * 2
        return loss

    torch.manual_seed(0)
    with applied.applied(Net(), PLANS[plan]) as state:
        loss = state.step(step, state.model, applied.batches()[0], 0)
        with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight'.*its backward \(`data` is other memory now\)"):
            loss.backward()
        state.runtime.reset()


@pytest.mark.parametrize("data", [torch.zeros(4).double(), torch.zeros(5), torch.zeros(4).bfloat16()])
def test_another_dtype_or_shape_is_refused(data: Tensor) -> None:
    chunk, _ = chunk_of(nn.Parameter(torch.ones(4)))
    chunk.params[0].host.data = data
    with pytest.raises(RuntimeError, match=r"'p0' has become .* the plan placed it as torch.float32\[4\]"):
        chunk.fetch()


def test_every_parameter_has_a_host_storage_of_its_own(tmp_path: Path) -> None:
    small, large = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(500, 500))
    chunk_of(small, large)
    written = io.BytesIO()
    torch.save(small, written)
    assert written.tell() < 5000
    written.seek(0)
    assert torch.equal(torch.load(written), small)
    safetensors.torch.save_file({"small": small, "large": large}, tmp_path / "both.safetensors")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "both.safetensors")["large"], large)
    assert small.untyped_storage().nbytes() == small.nbytes


def test_a_device_parameter_changed_by_the_forward_is_written_back_once() -> None:
    chunk, device = chunk_of(nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4)))
    first, second = live(chunk).params
    chunk.write_back()
    assert device.counters.downloaded_bytes == 0
    with torch.no_grad():
        first.device_param.mul_(3)
    chunk.write_back()
    chunk.write_back()
    assert device.counters.downloaded_bytes == first.host.nbytes
    assert torch.equal(first.host, torch.full((4,), 3.0))
    assert torch.equal(second.host, torch.ones(4))
    chunk.release()
    assert torch.equal(live(chunk).params[0].device_param, torch.full((4,), 3.0))


def test_the_poison_finds_a_chunk_that_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: memory is not freed, and backward believes it still holds the weights."""
    applied.poison_released_memory(monkeypatch)
    monkeypatch.setattr(CPUDevice, "resize", lambda device, storage, nbytes: None)
    monkeypatch.setattr("lightning_protrain.runtime.executor.Executor.before_backward", lambda *_: None)
    with pytest.raises(AssertionError, match=r"grad"):
        assert_parity(lambda: Net([Block() for _ in range(3)]), PLANS["kept"])


def test_a_device_parameter_is_shown_without_reading_freed_memory() -> None:
    with applied.applied(Net()) as state:
        param = state.chunks[0].params[0]
        assert "not on the device at present" in repr(param.device_param)
        assert "not on the device at present" in repr(param)
        shown: list[str] = []
        state.model.inp.register_forward_hook(lambda module, *_: shown.append(repr(param.device_param)))
        state.step(state.model, applied.batches()[0])
        assert shown[0].startswith("Parameter containing:\ntensor([[")
