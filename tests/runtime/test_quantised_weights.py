"""Weights of bitsandbytes are streamed with what belongs to them: bitwise, fenced, and whole at rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.quant_state import packed_nbytes
from tests.runtime.applied import (
    PLANS,
    Applied,
    applied,
    assert_same,
    batches,
    differences,
    mean_square,
    poison_released_memory,
    train,
)
from tests.support.quantised import LAYERS, AdaptedBlock, build
from tests.support.simulated.device import SimulatedDevice
from tests.support.simulated.streams import RaceError


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)


def trained(model: nn.Module, state: Applied | None) -> dict[str, Tensor]:
    return train(model, mean_square, state, optimizer=adam)


def holders(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor that a 4- or 8-bit layer keeps beside its weight, at rest."""
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        for path in ("weight.quant_state", "weight.quant_state.state2", "weight", "state"):
            holder: Any = module
            for part in path.split("."):
                holder = getattr(holder, part, None)
            for key in ("absmax", "code", "offset", "SCB", "CB"):
                value = vars(holder).get(key) if holder is not None and hasattr(holder, "__dict__") else None
                if isinstance(value, Tensor):
                    found[f"{name}.{path}.{key}"] = value
    return found


@pytest.mark.sample(12)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", LAYERS)
def test_parity_on_a_device_that_is_late(kind: str, plan: str) -> None:
    """An operation that mixes host and device, or reads what no fence orders, raises there."""
    assert_same(lambda: build(kind), trained, PLANS[plan], SimulatedDevice())


@pytest.mark.parametrize("kind", LAYERS)
def test_released_memory_is_not_used(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_released_memory(monkeypatch)
    assert_same(lambda: build(kind), trained, PLANS["kept"])


def test_companions_that_stay_behind_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug: the device parameter has the companions of the host."""
    monkeypatch.setattr("lightning_protrain.runtime.chunk.attach_companions", lambda *_: None)
    model, device = build("nf4 nested"), SimulatedDevice()
    with applied(model, PLANS["kept"], device) as state, device, pytest.raises(RaceError, match="host and of the dev"):
        train(model, mean_square, state, optimizer=adam)


@pytest.mark.parametrize("kind", LAYERS)
def test_at_rest_everything_is_on_the_host_and_lies_with_its_weight(kind: str) -> None:
    model, device = build(kind), SimulatedDevice()
    before = {name: value.clone() for name, value in holders(model).items()}
    assert before
    with applied(model, PLANS["offload"], device) as state, device:
        for step in (1, 2):
            train(model, mean_square, state, optimizer=adam, num_steps=step)
            for name, value in holders(model).items():
                assert device.place(value) == "host", name
                assert torch.equal(value, before[name]), name
        for chunk in state.chunks:
            assert chunk.nbytes >= sum(packed_nbytes(param.host) for param in chunk.params)
    assert set(holders(model)) == set(before)


@pytest.mark.parametrize("kind", LAYERS)
def test_after_the_run_the_model_is_as_without_it(kind: str) -> None:
    plain, model = build(kind), build(kind)
    with applied(model, PLANS["kept"]) as state:
        train(model, mean_square, state, optimizer=adam)
    train(plain, mean_square, optimizer=adam)
    batch = batches(1)[0]
    assert torch.equal(model(batch), plain(batch))
    again = train(model, mean_square, optimizer=adam)
    assert differences(train(plain, mean_square, optimizer=adam), again) == []


@pytest.mark.parametrize("kind", LAYERS)
def test_a_state_dict_has_the_keys_of_bitsandbytes_and_is_loaded_strictly(kind: str) -> None:
    model = build(kind)
    plain = model.state_dict()
    with applied(model, PLANS["offload"]) as state:
        train(model, mean_square, state, optimizer=adam)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        assert list(saved) == list(plain)
        expected = train(model, mean_square, state, optimizer=adam)
        for name, value in model.named_parameters():
            if not value.is_floating_point():
                value.data.zero_()
                assert name in saved
        for value in holders(model).values():
            value.zero_()
        assert all(found.matched for found in [Matched(model.load_state_dict(saved, strict=True))])
        assert differences(expected, train(model, mean_square, state, optimizer=adam)) == []


class Matched:
    """The result of loading: whether it found every key and no other."""

    def __init__(self, keys: Any) -> None:
        self.matched = not keys.missing_keys and not keys.unexpected_keys


def test_evaluation_does_not_repack_a_streamed_weight() -> None:
    """On some CPUs, bitsandbytes repacks a weight that is only evaluated, into memory of its own."""
    model = build("nf4 nested").eval()
    assert [each.support_avx512bf16_for_cpu for each in model.modules() if hasattr(each, "quant_state")]
    with applied(model, PLANS["kept"]) as state, torch.no_grad():
        first = state.step(model, batches(1)[0], training=False)
        assert torch.equal(first, state.step(model, batches(1)[0], training=False))
    assert first.isfinite().all()


class Registers(AdaptedBlock):
    """A block that replaces its weight by another parameter on the same memory, as PEFT does when it reads a weight."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.base.weight = self.base.weight.to("cpu")
        return super().forward(hidden)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["nf4", "nf4 nested"])
def test_another_parameter_of_the_same_memory_does_not_stay(kind: str, plan: str) -> None:
    expected = train(build(kind), mean_square, optimizer=adam)
    model = build(kind)
    for block in model.blocks:
        block.__class__ = Registers
    hosts = [block.base.weight for block in model.blocks]
    with applied(model, PLANS[plan]) as state:
        assert differences(expected, train(model, mean_square, state, optimizer=adam)) == []
        streamed = {param.host for chunk in state.chunks for param in chunk.params}
        for block, host in zip(model.blocks, hosts, strict=True):
            assert block.base.weight is host or host not in streamed
