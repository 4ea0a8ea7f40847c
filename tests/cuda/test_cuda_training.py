"""On a GPU, the streamed model trains like the plain one, and takes no more memory than planned."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_protrain.planner.plan import Plan
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.cuda.marks import CUDA, needs_gpu
from tests.support.gpus import DEVICE, STAND_IN
from tests.support.models import OPTIMIZERS, ParityModule, ValidationModule, fit, zoo
from tests.support.plans import plans

pytestmark = CUDA

# What two kernels of one sum in another order differ by, over seven optimizer steps.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}
WIDTH = 512
NUM_BLOCKS = 12


@pytest.fixture(autouse=True)
def _workspaces() -> None:
    """cuBLAS takes them now, for each thread that multiplies: they are no part of what is measured."""
    layer = nn.Linear(WIDTH, WIDTH, device=DEVICE)
    layer(torch.ones(4, WIDTH, device=DEVICE, requires_grad=True)).sum().backward()


def train(module: L.LightningModule, **options: Any) -> L.Trainer:
    return fit(module, **{"accelerator": DEVICE, "devices": 1, **options})


@pytest.mark.parametrize("plan", plans())
@pytest.mark.parametrize("trait", zoo())
def test_parity(trait: str, plan: str) -> None:
    """The optimizer is SGD: Adam turns differences of gradients near zero into whole steps."""
    expected, found = zoo()[trait](optimizer="sgd"), zoo()[trait](optimizer="sgd")
    options = {"limit_train_batches": 7}
    train(expected, **options)
    train(found, strategy=ProTrainStrategy(plan=plans()[plan](zoo()[trait]())), **options)
    torch.testing.assert_close(found.losses, expected.losses, **TOLERANCE)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(
            found.state_dict()[name], value, **TOLERANCE, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("plan", ["offload", "kept", "alternating"])
@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1}])
def test_parity_of_the_loop(plan: str, options: dict[str, Any]) -> None:
    make = zoo()["reused"]
    expected, found = make(optimizer="sgd"), make(optimizer="sgd")
    train(expected, limit_train_batches=9, **options)
    train(found, strategy=ProTrainStrategy(plan=plans()[plan](make())), limit_train_batches=9, **options)
    torch.testing.assert_close(found.losses, expected.losses, **TOLERANCE)


class Copying(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.copied = copy.deepcopy(pl_module)


@pytest.mark.parametrize("plan", ["offload", "half"])
def test_a_copy_in_a_fit_is_whole_and_on_the_host(plan: str) -> None:
    module, copying = zoo()["reused"](), Copying()
    train(module, strategy=ProTrainStrategy(plan=plans()[plan](zoo()["reused"]())), callbacks=[copying])
    for name, value in copying.copied.state_dict().items():
        assert value.device.type == "cpu"
        assert torch.equal(value, module.state_dict()[name].cpu())


@pytest.mark.parametrize("plan", ["offload", "half", "kept"])
def test_parity_with_scaled_gradients(plan: str) -> None:
    """The scale is on the device, and gradients are in both places."""
    make = zoo()["reused"]
    expected, found = make(optimizer="sgd"), make(optimizer="sgd")
    options = {"precision": "16-mixed", "gradient_clip_val": 0.5}
    train(expected, **options)
    train(found, strategy=ProTrainStrategy(plan=plans()[plan](make())), **options)
    torch.testing.assert_close(found.losses, expected.losses, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", ["offload", "half"])
def test_the_loss_falls_with_every_optimizer(optimizer: str, plan: str) -> None:
    make = zoo()["reused"]
    module = make(optimizer=optimizer)
    train(module, strategy=ProTrainStrategy(plan=plans()[plan](make())), max_epochs=5)
    assert torch.stack(module.losses[-14:]).mean() < torch.stack(module.losses[:14]).mean()
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())


@pytest.mark.parametrize("plan", ["offload", "kept"])
def test_two_runs_are_bitwise_equal(plan: str) -> None:
    """A missing fence shows as two runs that differ."""
    make = zoo()["reused"]
    runs = []
    for _ in range(2):
        module = make()
        train(module, strategy=ProTrainStrategy(plan=plans()[plan](make())))
        runs.append(torch.stack(module.losses))
    assert torch.equal(*runs)


def test_a_rehearsal_changes_no_bit_and_says_what_a_step_takes(caplog: pytest.LogCaptureFixture) -> None:
    """The other run is given the plan that the rehearsal ends with: another plan may choose other kernels."""
    caplog.set_level("INFO")
    make = zoo()["reused"]
    module, other = make(), make()
    budget = int(3.5 * sum(weight.nbytes for weight in module.parameters()))
    trainer = train(module, strategy=ProTrainStrategy(device_memory=budget, rehearse=True))
    train(other, strategy=ProTrainStrategy(plan=trainer.strategy.plan))
    assert torch.equal(torch.stack(module.losses), torch.stack(other.losses))
    assert any("The plan was rehearsed: a step takes" in line for line in caplog.messages)
    assert trainer.strategy.plan.prediction.step_seconds > 0


class Wide(nn.Module):
    """(B, WIDTH) to (B, WIDTH), 8 MiB of weights: long copies, short computation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class WideModule(L.LightningModule):
    """Records the most bytes that the allocator ever held during a step, activations included."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Wide() for _ in range(NUM_BLOCKS))
        self.losses: list[Tensor] = []
        self.peaks: list[int] = []

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        torch.cuda.reset_peak_memory_stats()
        hidden = batch
        for block in self.blocks:
            hidden = block(hidden)
        loss = hidden.square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.synchronize()
        self.peaks.append(torch.cuda.max_memory_allocated())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        return DataLoader([torch.randn(4, WIDTH, generator=generator) for _ in range(6)], batch_size=None)


@needs_gpu
@pytest.mark.parametrize("plan", ["offload", "kept", "half"])
def test_the_peak_stays_inside_the_plan(plan: str) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    module = WideModule()
    made = plans()[plan](WideModule())
    strategy = ProTrainStrategy(plan=made)
    bounds: list[int] = []
    counters: list[Any] = []

    class Read(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            assert isinstance(strategy.plan, Plan)
            bounds.append(strategy.plan.memory.total)
            counters.append(strategy.counters)

    train(module, strategy=strategy, callbacks=[Read()])
    assert counters[0].peak_live_bytes <= made.memory.chunk_buffers if isinstance(made, Plan) else True
    activations = 4 * WIDTH * 4 * 8 * NUM_BLOCKS  # Rows, width, bytes, tensors that autograd keeps of each block.
    workspace = 40 << 20  # What cuBLAS allocates for itself.
    assert max(module.peaks[1:]) - before <= bounds[0] + activations + workspace
    nbytes = sum(parameter.nbytes for parameter in module.parameters())
    # The model with gradients and moments would be four times that.
    assert plan == "half" or bounds[0] < nbytes


@needs_gpu
def test_what_else_is_on_the_device_is_in_no_peak() -> None:
    """A notebook may keep another model there; the peak and what a rehearsal learns from it are the run's own."""
    peaks, factors, others = [], [], []
    for nbytes in (0, 256 << 20):
        others.append(torch.empty(nbytes, dtype=torch.uint8, device=DEVICE))
        strategy = ProTrainStrategy(device_memory="24MiB", rehearse=True)
        train(WideModule(), strategy=strategy)
        assert isinstance(strategy.plan, Plan)
        assert strategy.plan.prediction is not None
        peaks.append(strategy.measured_peak_bytes)
        factors.append(strategy.plan.prediction.alpha)
    # A factor of so small a run follows the 2 MiB in which the allocator takes memory; the other model would add 100.
    assert all(0 < peak < 64 << 20 for peak in peaks)
    assert factors[1] == pytest.approx(factors[0], abs=0.2 if STAND_IN else 20)


@needs_gpu
def test_gradients_do_not_pile_up_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies down that are slower than backward must hold it back, or every gradient is on the device at once."""
    module = WideModule()
    strategy = ProTrainStrategy(plan=plans()["offload"](WideModule()))
    held: list[int] = []

    class Watch(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            device = strategy._device
            download = device.download

            def slow(source: Tensor, target: Tensor) -> Any:
                with torch.cuda.stream(device._down):
                    torch.cuda._sleep(20_000_000)
                fence = download(source, target)
                held.append(sum(tensor.nbytes for _, tensor in device._held))
                return fence

            monkeypatch.setattr(device, "download", slow)

    train(module, strategy=strategy, callbacks=[Watch()], limit_train_batches=2)
    largest = max(parameter.nbytes for parameter in module.parameters())
    assert held
    assert max(held) <= 4 * largest


@needs_gpu
def test_pageable_memory_trains_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    make = zoo()["reused"]
    losses = []
    for lockable in (True, False):
        if not lockable:
            monkeypatch.setattr(
                "lightning_protrain.device.device.CUDADevice._lock", lambda device, address, size: False
            )
        module = make()
        train(module, strategy=ProTrainStrategy(plan="offload"))
        losses.append(torch.stack(module.losses))
    assert torch.equal(*losses)


@needs_gpu
def test_after_training_everything_is_on_the_host_and_nothing_on_the_device() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    module: ParityModule = zoo()["reused"]()
    train(module, strategy="protrain")
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
    module.losses.clear()
    module.zero_grad()
    assert torch.cuda.memory_allocated() - before <= 1 << 20


def test_gradients_and_states_are_where_their_parameters_are() -> None:
    module = zoo()["reused"]()
    strategy = ProTrainStrategy(plan=plans()["half"](zoo()["reused"]()))
    seen: list[set[str]] = []

    class Look(L.Callback):
        def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
            for parameter in pl_module.parameters():
                state = optimizer.state.get(parameter, {})
                places = {value.device.type for value in state.values() if isinstance(value, Tensor) and value.dim()}
                gradients = {parameter.grad.device.type} if parameter.grad is not None else set()
                seen.append(places | gradients | {parameter.device.type})

    train(module, strategy=strategy, callbacks=[Look()], limit_train_batches=3)
    assert seen
    assert all(len(places) == 1 for places in seen)
    assert {"cpu"} in seen
    assert {DEVICE} in seen


def test_validation_and_prediction_stream_too() -> None:
    from_blocks = plans()["offload"]
    expected = ValidationModule(_language_model())
    found = ValidationModule(_language_model())
    train(expected, limit_train_batches=2)
    train(found, strategy=ProTrainStrategy(plan=from_blocks(found)), limit_train_batches=2)
    torch.testing.assert_close(found.val_losses, expected.val_losses, rtol=5e-2, atol=5e-2)


def _language_model() -> nn.Module:
    torch.manual_seed(0)
    return zoo()["reused"]().network
