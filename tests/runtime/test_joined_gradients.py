"""Gradients of a chunk of adapters leave in one copy, and the bits are those of copies one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.device.device import Device
from lightning_protrain.planner import plan as planning
from lightning_protrain.planner.memory import memory_terms
from lightning_protrain.runtime.optim.async_step import Overlap
from lightning_protrain.runtime.shadow import InPlaceGrad
from tests.runtime.applied import WIDTH, Net, applied, batches, differences, mean_square
from tests.runtime.low_precision import assert_parity, low_layout, low_plan, run
from tests.runtime.overlapped import train
from tests.support.plans import kept
from tests.support.simulated.device import SimulatedDevice

NUM_ADAPTERS = 7
NUM_BLOCKS = 4


class Adapted(nn.Module):
    """A frozen layer with adapters of two matrices each."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(NUM_ADAPTERS))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(NUM_ADAPTERS))
        self.used = NUM_ADAPTERS

    def forward(self, hidden: Tensor) -> Tensor:
        for down, up in list(zip(self.down, self.up, strict=True))[: self.used]:
            hidden = hidden + up(down(torch.tanh(self.base(hidden))))
        return hidden


def adapted(used: int = NUM_ADAPTERS) -> Net:
    model = Net([Adapted() for _ in range(NUM_BLOCKS)])
    model.blocks[1].used = used
    return model


class Shared(Net):
    """Its blocks are called twice, so that each gradient comes once, behind both."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.tanh() + super().forward(hidden))


class Steps:
    """Makes a step function that freezes an adapter in its second step."""

    def __call__(self, model: nn.Module, batch: Tensor, index: int) -> Tensor:
        model.get_parameter("blocks.2.down.0.weight").requires_grad_(index != 1)
        return mean_square(model, batch, index)


def count_calls(monkeypatch: pytest.MonkeyPatch, gathers: bool) -> tuple[int, int]:
    """Copies to the host and events of the simulated device in the backward of one step."""
    monkeypatch.setattr(planning, "SMALL_GRADIENT", planning.SMALL_GRADIENT if gathers else 0)
    copies, events = list[int](), list[None]()
    device = SimulatedDevice()
    download, record = type(device).download, type(device).record
    model = adapted()
    with applied(model, kept, device) as state, device:
        loss = state.step(mean_square, model, batches()[0], 0)
        monkeypatch.setattr(device, "download", lambda *copy: copies.append(1) or download(device, *copy))
        monkeypatch.setattr(device, "record", lambda stream: events.append(None) or record(device, stream))
        loss.backward()
        state.runtime.settle()
    monkeypatch.undo()
    return len(copies), len(events)


def test_adapters_of_a_block_leave_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    before, events_before = count_calls(monkeypatch, gathers=False)
    after, events_after = count_calls(monkeypatch, gathers=True)
    others = sum(1 for name, _ in Net([nn.Identity()]).named_parameters())
    assert before == NUM_BLOCKS * 2 * NUM_ADAPTERS + others
    assert after == NUM_BLOCKS + others
    assert events_before - events_after == before - after


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate": 3},
    "overlap": {"overlap": Overlap.FORWARD, "norm": 0.05},
    "overlap and accumulation": {"overlap": Overlap.FORWARD, "accumulate": 2},
    "behind backward": {"overlap": Overlap.BACKWARD},
    "an adapter is frozen for a step": {"step": Steps()},
}
MODELS = {
    "all": adapted,
    "some unused": lambda: adapted(used=3),
    "called twice": lambda: Shared([Adapted() for _ in range(NUM_BLOCKS)]),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("simulated", [False, True], ids=["cpu", "simulated"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", OPTIONS)
def test_parity(options: str, model: str, simulated: bool) -> None:
    given = dict(OPTIONS[options])
    torch.manual_seed(0)
    overlap = given.pop("overlap", Overlap.OFF)
    expected = train(MODELS[model](), **given)
    torch.manual_seed(0)
    made = MODELS[model]()
    device = SimulatedDevice() if simulated else None
    with applied(made, kept, device) as state:
        if device is None:
            found = train(made, state, overlap, **given)
        else:
            with device:
                found = train(made, state, overlap, **given)
                state.runtime.async_step.finish_all()
    assert differences(expected, found) == []


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["cpu", "simulated"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("lends", [False, True])
def test_parity_in_low_precision(lends: bool, accumulate: int, kind: str) -> None:
    assert_parity(adapted, mean_square, kind, Overlap.FORWARD, lends=lends, accumulate=accumulate)


def test_gradients_lie_in_the_memory_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    seen: list[type] = []
    download = SimulatedDevice.download

    def look(model: nn.Module, index: int) -> None:
        seen.append(type(model.get_parameter("blocks.1.up.0.weight").grad))

    def count(device: Device, source: Tensor, target: Tensor) -> Any:
        copied.append(source.nbytes)
        return download(device, source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(SimulatedDevice, "download", count)
    _, state = run(adapted, mean_square, "simulated", Overlap.FORWARD, lends=True, num_steps=2, look=look)
    adapters = [c.nbytes for c in state.plan.chunks if c.trainable and c.unit.startswith("blocks")]
    assert len(adapters) == NUM_BLOCKS
    assert sum(nbytes in adapters for nbytes in copied) == 2 * NUM_BLOCKS
    assert InPlaceGrad in seen


def test_a_gradient_that_somebody_holds_is_not_overwritten() -> None:
    model = adapted()
    with applied(model, kept) as state:
        name = "blocks.1.up.3.weight"
        state.step(mean_square, model, batches()[0], 0).backward()
        held = model.get_parameter(name).grad
        assert held is not None
        value = held.clone()
        model.zero_grad()
        state.step(mean_square, model, batches()[1], 1).backward()
        assert torch.equal(held, value)
        assert not torch.equal(model.get_parameter(name).grad, value)  # type: ignore[arg-type]


def test_a_hook_of_the_user_sees_the_gradient() -> None:
    model = adapted()
    seen: list[Tensor] = []
    weight = model.get_parameter("blocks.1.up.3.weight")
    weight.register_post_accumulate_grad_hook(lambda it: seen.append(it.grad.clone()))
    with applied(model, kept) as state:
        state.step(mean_square, model, batches()[0], 0).backward()
        assert weight.grad is not None
        assert torch.equal(seen[0], weight.grad)


def test_an_exception_in_backward_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model = adapted()
    with applied(model, kept) as state:
        hidden = batches()[0]
        loss = state.step(mean_square, model, hidden, 0)
        handle = model.get_parameter("inp.weight").register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            state.step(mean_square, model, hidden, 0).backward()
        handle.remove()
        del loss
        state.runtime.reset()
        model.zero_grad()
        state.step(mean_square, model, hidden, 0).backward()
        found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    torch.manual_seed(0)
    plain = adapted()
    mean_square(plain, hidden, 0).backward()
    expected = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    assert differences(expected, found) == []


def test_the_memory_model_counts_what_is_staged() -> None:
    model = adapted()
    layout = low_layout(model, mean_square)
    chunks = low_plan(model, layout).chunks
    (nbytes,) = {chunk.nbytes for chunk in chunks if chunk.trainable and chunk.unit.startswith("blocks")}
    found = memory_terms(layout, chunks, 2, 8.0).gradients_in_flight
    assert found == 3 * nbytes  # one chunk's leave, while the next one's are kept, and laid side by side
