"""On a GPU, layers of bitsandbytes find the quantisation states of their weights, and train as without offloading."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import lightning as L
import pytest
import torch

from lightning_protrain.quant_state import prepare_weights
from lightning_protrain.runtime.optim.bnb_optimizers import in_tiles
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.cuda.marks import CUDA
from tests.support.gpus import DEVICE, STAND_IN
from tests.support.models import fit
from tests.support.plans import plans
from tests.support.quantised import LAYERS, module

pytestmark = CUDA

TOLERANCE = {"rtol": 1e-3, "atol": 1e-4}
OPTIONS: dict[str, Any] = {"accelerator": DEVICE, "devices": 1, "limit_train_batches": 5}


def trained(kind: str, **options: Any) -> Any:
    one = module(kind)
    one.optimizer = "sgd"
    fit(one, **OPTIONS, **options)
    return one


@pytest.mark.sample(12)
@pytest.mark.parametrize("plan", ["resident", "offload", "kept", "alternating", "half"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", LAYERS)
def test_parity(kind: str, precision: Any, plan: str) -> None:
    """Weights are quantised on the device either way, here one after the other."""
    expected = trained(kind, precision=precision)
    made = plans()[plan](module(kind).to("cpu"))
    found = trained(kind, precision=precision, strategy=ProTrainStrategy(plan=made))
    tolerance = TOLERANCE if precision == "32-true" and "int8" not in kind else {"rtol": 5e-2, "atol": 5e-2}
    torch.testing.assert_close(found.losses, expected.losses, **tolerance)


@pytest.mark.parametrize("kind", LAYERS)
def test_weights_are_quantised_on_the_device_and_stay_on_the_host(kind: str) -> None:
    layer, plain = (LAYERS[kind]().requires_grad_(False) for _ in range(2))
    plain.load_state_dict(layer.state_dict())
    prepare_weights(layer, torch.device(DEVICE))
    plain.to(DEVICE)
    expected = {name: value.cpu() for name, value in plain.state_dict().items()}
    for name, value in layer.state_dict().items():
        assert value.device.type == "cpu"
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("plan", ["offload", "kept"])
@pytest.mark.parametrize("kind", LAYERS)
def test_two_runs_are_bitwise_equal(kind: str, plan: str) -> None:
    """A missing fence shows as two runs that differ."""
    runs = []
    for _ in range(2):
        one = trained(kind, strategy=ProTrainStrategy(plan=plans()[plan](module(kind).to("cpu"))))
        runs.append(torch.stack(one.losses))
    assert torch.equal(*runs)


@pytest.mark.parametrize("kind", LAYERS)
def test_after_training_nothing_is_left_on_the_device(kind: str) -> None:
    one = trained(kind, strategy=ProTrainStrategy(plan="offload"))
    weight = one.network.blocks[0].base.weight
    state = getattr(weight, "quant_state", None)
    found = [weight, *([state.absmax, state.code] if state is not None else [weight.SCB])]
    assert {tensor.device.type for tensor in found} == {"cpu"}
    one.network.cpu()
    assert one.network(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()


OPTIMIZERS: dict[str, Any] = {
    "AdamW8bit": bnb.optim.AdamW8bit,
    "PagedAdamW8bit": bnb.optim.PagedAdamW8bit,
    "Lion8bit": bnb.optim.Lion8bit,
}


def stepped(kind: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight after ten steps over the same gradients, and its first moments, dequantised."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(256, 1024, generator=generator).to(device))
    optimizer = OPTIMIZERS[kind]([weight], lr=1e-3, weight_decay=0.1)
    for _ in range(10):
        weight.grad = torch.randn(weight.shape, generator=generator).to(device)
        with in_tiles(optimizer):
            optimizer.step()
    state = {name: value.cpu() for name, value in optimizer.state[weight].items() if isinstance(value, torch.Tensor)}
    scales = state["absmax1"].repeat_interleave(256).view(weight.shape)
    return weight.detach().cpu(), state["qmap1"][state["state1"].int()] * scales


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_step_on_the_host_gives_the_numbers_of_the_one_on_the_device(kind: str) -> None:
    """Within what bitsandbytes holds its own kernels to: a moment may fall into the code beside."""
    if STAND_IN and "Paged" in kind:
        pytest.skip("paged memory belongs to a driver")
    (weight, moment), (expected, expected_moment) = stepped(kind, "cpu"), stepped(kind, DEVICE)
    assert (weight - expected).abs().mean() < 1e-4
    assert (moment - expected_moment).abs().mean() < 2e-3


@pytest.mark.parametrize("plan", ["offload", "half", "kept"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_states_are_where_their_parameters_are(kind: str, plan: str) -> None:
    one = module("nf4")
    one.configure_optimizers = lambda: OPTIMIZERS[kind](  # type: ignore[method-assign]
        [parameter for parameter in one.parameters() if parameter.requires_grad], min_8bit_size=64
    )
    places: set[tuple[str, str]] = set()

    class Look(L.Callback):
        def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
            for parameter, state in optimizer.state.items():
                for name in ("absmax1", "absmax2", "state1", "state2"):
                    value = state.get(name)
                    if value is not None and not getattr(value, "is_paged", False):
                        places.add((parameter.device.type, value.device.type))

    made = plans()[plan](module("nf4").to("cpu"))
    fit(one, **OPTIONS, strategy=ProTrainStrategy(plan=made), callbacks=[Look()])
    assert ("cpu", "cpu") in places
    assert all(one == other for one, other in places)
    assert all(torch.isfinite(loss) for loss in one.losses)
