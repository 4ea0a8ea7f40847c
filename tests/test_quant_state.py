"""Quantisation states are counted, placed, moved and loaded together with their weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.quant_state import (
    ALIGNMENT,
    accepting_companions,
    attach_companions,
    has_companions,
    move_companions,
    packed_nbytes,
    place_companions,
    prepare_weights,
)
from tests.support.quantised import LAYERS, WIDTH

QUANTISED = {name: make for name, make in LAYERS.items() if name != "int8 with outliers"}
# The shapes of what a layer of 64 x 64 elements keeps, in blocks of 64; scales of the second kind in blocks of 256.
NUM_BLOCKS = WIDTH * WIDTH // 64
COMPANIONS: dict[str, list[int]] = {
    "nf4": [4 * NUM_BLOCKS, 4 * 16],
    "nf4 nested": [NUM_BLOCKS, 4 * 16, 4, 4, 4 * 256],
    "fp4 nested": [NUM_BLOCKS, 4 * 16, 4, 4, 4 * 256],
    "int8": [4 * WIDTH],
}


def quantised(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return LAYERS[kind]().requires_grad_(False).to("cpu")


def tensors_of(weight: Any) -> list[Tensor]:
    """Every companion, found without the code under test."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return [weight.SCB]
    return [state.absmax, state.code, *((state.offset, state.state2.absmax, state.state2.code) if state.nested else ())]


class Memory:
    """A block of bytes that hands out tensors in it, and notes where they lie."""

    def __init__(self, nbytes: int) -> None:
        self.storage = torch.UntypedStorage(nbytes)
        self.spans: list[tuple[int, int]] = []

    def __call__(self, begin: int, like: Tensor) -> Tensor:
        self.spans.append((begin, begin + like.nbytes))
        empty = torch.empty(0, dtype=like.dtype)
        return empty.set_(self.storage, begin // like.element_size(), like.shape, like.stride())


@pytest.mark.parametrize("kind", QUANTISED)
def test_bytes_are_those_of_the_weight_and_of_all_companions(kind: str) -> None:
    weight = quantised(kind).weight
    assert sorted(tensor.nbytes for tensor in tensors_of(weight)) == sorted(COMPANIONS[kind])
    aligned = sum(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in [weight.nbytes, *COMPANIONS[kind]])
    assert aligned - ALIGNMENT < packed_nbytes(weight) <= aligned
    assert has_companions(weight)


@pytest.mark.parametrize("tensor", [nn.Parameter(torch.ones(3)), torch.ones(2, 2), nn.Linear(3, 3).weight])
def test_any_other_tensor_has_none(tensor: Tensor) -> None:
    before = tensor.clone()
    assert packed_nbytes(tensor) == tensor.nbytes
    assert not has_companions(tensor)
    place_companions(tensor, lambda *_: pytest.fail("nothing to place"))
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("kind", QUANTISED)
def test_they_lie_behind_their_weight_without_overlap(kind: str) -> None:
    weight = quantised(kind).weight
    values = [tensor.clone() for tensor in tensors_of(weight)]
    memory = Memory(packed_nbytes(weight))
    place_companions(weight, memory)
    assert memory.spans[0][0] >= weight.nbytes
    assert all(one[1] <= other[0] for one, other in zip(memory.spans, memory.spans[1:], strict=False))
    assert memory.spans[-1][1] == packed_nbytes(weight)
    assert all(begin % ALIGNMENT == 0 for begin, _ in memory.spans)
    for tensor, value in zip(tensors_of(weight), values, strict=True):
        assert tensor.untyped_storage()._cdata == memory.storage._cdata
        assert torch.equal(tensor, value)


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_twin_has_companions_of_its_own_that_are_filled_later(kind: str) -> None:
    layer = quantised(kind)
    host = layer.weight
    place_companions(host, Memory(packed_nbytes(host)))
    device_param = torch.Tensor._make_subclass(type(host), host.detach().as_subclass(Tensor).clone(), False)
    vars(device_param).update(vars(host))
    before = [tensor.data_ptr() for tensor in tensors_of(host)]
    memory = Memory(packed_nbytes(host))
    attach_companions(host, device_param, memory)
    assert [tensor.data_ptr() for tensor in tensors_of(host)] == before
    assert not set(before) & {tensor.data_ptr() for tensor in tensors_of(device_param)}
    for tensor, value in zip(tensors_of(device_param), tensors_of(host), strict=True):
        tensor.copy_(value)
    if hasattr(host, "CB"):
        assert device_param.CB.data_ptr() == device_param.data_ptr() != host.data_ptr()
    inputs = torch.randn(2, WIDTH)
    expected = layer(inputs)
    layer._parameters["weight"] = device_param
    if hasattr(layer, "state"):
        layer.state = bnb.MatmulLtState()
        layer.state.has_fp16_weights = False
    assert torch.equal(layer(inputs), expected)


def test_a_weight_that_was_quantised_again_keeps_its_scales() -> None:
    layer, other = quantised("int8"), quantised("int8", seed=1)
    inputs = torch.randn(2, WIDTH)
    layer(inputs)  # moves the scales into the layer's state
    layer.weight, layer.bias = quantised("int8", seed=1).weight, other.bias
    prepare_weights(layer)
    assert torch.equal(layer.weight.SCB, other.weight.SCB)
    assert torch.equal(layer(inputs), other(inputs))


@pytest.mark.parametrize("kind", QUANTISED)
def test_they_are_moved_beside_their_weight(kind: str) -> None:
    weight = quantised(kind).weight
    move_companions(weight, torch.device("meta"))
    assert {tensor.device.type for tensor in tensors_of(weight)} == {"meta"}
    assert getattr(weight, "CB", weight).data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("kind", QUANTISED)
def test_what_waits_to_be_quantised_is_in_place(kind: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind]().requires_grad_(False)
    weight = layer.weight
    assert weight.is_floating_point()
    prepare_weights(nn.Sequential(layer, nn.Linear(2, 2)))
    assert layer.weight is weight
    assert torch.equal(weight, quantised(kind).weight)
    prepare_weights(layer)
    assert torch.equal(weight, quantised(kind).weight)


def test_weights_without_values_and_weights_that_stay_floats_are_left_alone() -> None:
    on_meta = bnb.nn.Linear4bit(WIDTH, WIDTH, device="meta")
    trained = bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=True)
    prepare_weights(nn.Sequential(on_meta, trained))
    assert on_meta.weight.is_meta
    assert trained.weight.is_floating_point()


def test_what_the_first_forward_takes_off_an_8_bit_weight_hangs_on_it_again() -> None:
    layer = quantised("int8")
    expected = layer(torch.ones(1, WIDTH))
    assert layer.weight.SCB is None
    prepare_weights(layer)
    assert layer.weight.SCB is not None
    assert layer.weight.CB.data_ptr() == layer.weight.data_ptr()
    assert layer.state.CB is layer.state.SCB is None
    assert torch.equal(layer(torch.ones(1, WIDTH)), expected)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_bias_is_cast_once_as_the_first_forward_does(dtype: torch.dtype | None) -> None:
    expected, layer = (bnb.nn.Linear4bit(WIDTH, WIDTH, compute_dtype=dtype) for _ in range(2))
    bias = layer.bias
    prepare_weights(layer)
    expected.to("cpu")(torch.ones(1, WIDTH))
    assert layer.bias is bias
    assert bias.dtype == expected.bias.dtype == (dtype or torch.float32)


@pytest.mark.parametrize("other", [lambda kind: quantised(kind, seed=1), lambda kind: LAYERS[kind]()])
@pytest.mark.parametrize("kind", QUANTISED)
def test_a_layer_is_loaded_strictly(kind: str, other: Callable[[str], Any]) -> None:
    source, target = nn.Sequential(quantised(kind)), nn.Sequential(other(kind).requires_grad_(False))
    weight = target[0].weight
    with accepting_companions(target):
        keys = target.load_state_dict(source.state_dict(), strict=True)
    assert not keys.missing_keys
    assert not keys.unexpected_keys
    assert target[0].weight is weight
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name
    assert torch.equal(target(torch.ones(1, WIDTH)), source(torch.ones(1, WIDTH)))


@pytest.mark.parametrize("kind", QUANTISED)
def test_floats_are_loaded_as_ever(kind: str) -> None:
    target = LAYERS[kind]().requires_grad_(False)
    floats = nn.Linear(WIDTH, WIDTH)
    with accepting_companions(target):
        target.load_state_dict(floats.state_dict())
    assert torch.equal(target.weight, floats.weight)


@pytest.mark.parametrize(("source", "target"), [("fp4 nested", "nf4 nested"), ("nf4", "nf4 nested")])
def test_another_quantisation_is_refused_by_name(source: str, target: str) -> None:
    model = nn.Sequential(quantised(target))
    with accepting_companions(model), pytest.raises(RuntimeError, match=r"0\.weight is quantised differently"):
        model.load_state_dict(nn.Sequential(quantised(source)).state_dict())


def test_outside_of_it_loading_is_as_ever() -> None:
    model = nn.Sequential(quantised("nf4"))
    state = model.state_dict()
    with accepting_companions(model):
        pass
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(state)
