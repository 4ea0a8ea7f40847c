"""What a run under the strategy got wrong once: gradients in manual optimization, replaced weights, peaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.runtime.apply import apply_plan
from lightning_protrain.strategy import protrain
from lightning_protrain.strategy.protrain import ProTrainStrategy
from tests.support.models import fit

WIDTH = 6
Step = Callable[["Manual", Tensor], None]


class Dense(L.LightningModule):
    """Two layers that no block is found in: the root owns every weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, 1)

    def loss(self, batch: Tensor) -> Tensor:
        return self.second(self.first(batch).tanh()).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        data = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(data), batch_size=2)


class Manual(Dense):
    """Optimizes by hand, as `step` does it."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.step = step

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.step(self, batch[0])


def _clip(module: Manual, batch: Tensor) -> None:
    optimizer: Any = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(1000 * module.loss(batch))
    assert nn.utils.clip_grad_norm_(module.parameters(), 0.01) > 0.01
    optimizer.step()


def _zero_by_module(module: Manual, batch: Tensor) -> None:
    optimizer: Any = module.optimizers()
    loss = module.loss(batch)
    module.zero_grad()
    module.manual_backward(loss)
    optimizer.step()


def _edit_gradients(module: Manual, batch: Tensor) -> None:
    optimizer: Any = module.optimizers()
    for _ in range(2):
        module.manual_backward(module.loss(batch))
    assert module.first.weight.grad is not None
    module.first.weight.grad /= 2
    optimizer.step()
    optimizer.zero_grad()
    assert module.first.weight.grad is None


def _weights(module: Dense, **options: Any) -> dict[str, Tensor]:
    fit(module, **options)
    return {name: value.clone() for name, value in module.state_dict().items()}


def _assert_equal(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("step", [_clip, _zero_by_module, _edit_gradients])
def test_a_manual_step_reads_and_edits_the_gradients_of_the_root(step: Step) -> None:
    _assert_equal(_weights(Manual(step), strategy=ProTrainStrategy(plan="offload")), _weights(Manual(step)))


class Reassign(L.Callback):
    """Puts a new parameter in the place of one that is streamed."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            pl_module.second.bias = nn.Parameter(torch.full((1,), 5.0))


def test_a_parameter_that_the_user_replaces_is_not_put_back() -> None:
    expected = _weights(Dense(), callbacks=[Reassign()])
    weights = _weights(Dense(), callbacks=[Reassign()], strategy=ProTrainStrategy(plan="offload"))
    assert weights["second.bias"].item() == 5.0
    _assert_equal(weights, expected)


class Functional(Dense):
    """Calls a block with other weights than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def loss(self, batch: Tensor) -> Tensor:
        block = self.blocks[0]
        doubled = {name: 2 * value for name, value in block.named_parameters()}
        return super().loss(self.blocks[1](functional_call(block, doubled, (batch,))))


def test_weights_given_to_a_functional_call_are_the_ones_used() -> None:
    _assert_equal(_weights(Functional(), strategy=ProTrainStrategy(plan="offload")), _weights(Functional()))


@pytest.mark.parametrize("plan", ["resident", "offload"])
def test_the_measured_peak_is_not_that_of_what_came_before(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def place(*args: Any, **kwargs: Any) -> Any:
        seen.append("place")
        return apply_plan(*args, **kwargs)

    monkeypatch.setattr(CPUDevice, "forget_peak", lambda self: seen.append("forget"))
    monkeypatch.setattr(protrain, "apply_plan", place)
    _weights(Dense(), strategy=ProTrainStrategy(plan=plan))
    assert seen == ["forget", "place"]
