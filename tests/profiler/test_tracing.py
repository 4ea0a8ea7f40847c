"""A step is traced with stand-ins for its tensors, wherever they are."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_protrain.models.module import CausalLMModule
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.fake_mode import DataDependentError, MetaMode, ShapeTensor, StandIns
from lightning_protrain.profiler.profile import profile_model

BF16 = {"device_type": "cpu", "dtype": torch.bfloat16, "cache_enabled": False}


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def check_same(compute: Callable[[], Tensor]) -> None:
    """Check that shape, strides, dtype, device and `requires_grad` are equal for real and traced tensors."""
    expected = compute()
    with MetaMode():
        traced = compute()
        assert geometry(traced) == geometry(expected)
        assert isinstance(traced, ShapeTensor)


def test_autocast_applies_to_tensors_without_values_but_not_to_meta_tensors() -> None:
    weight, meta = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, device="meta")
    with torch.autocast(**BF16):
        assert F.linear(meta, meta).dtype is torch.float32  # why the meta device alone would not do
        check_same(lambda: F.linear(torch.zeros(2, 4), weight))
        with MetaMode():
            assert F.linear(meta, meta).dtype is torch.bfloat16
            assert F.linear(meta, meta).device.type == "cpu"


def test_composites_take_the_path_of_the_device() -> None:
    query = torch.ones(1, 2, 3, 4, requires_grad=True)
    expected = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    with MetaMode():
        traced = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    meta = query.detach().to("meta").requires_grad_()
    names = [type(out.grad_fn).__name__ for out in (traced, F.scaled_dot_product_attention(meta, meta, meta))]
    assert names[0] == type(expected.grad_fn).__name__ != names[1]


UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.relu,
    torch.Tensor.double,
    torch.Tensor.clone,
    lambda x: x.transpose(0, -1) * 2,
    lambda x: x[..., None].expand(*x.shape, 3),
    lambda x: x.flatten().softmax(0),
    lambda x: x.sum(0, keepdim=True),
    lambda x: x + torch.arange(x.shape[-1]),
    lambda x: x.clone().mul_(torch.ones(x.shape[-1])),
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: torch.zeros_like(x, dtype=torch.bfloat16) + x,
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: torch.cat([x, torch.full_like(x, 2)]),
    lambda x: x.new_ones(3, 4) @ torch.rand(4, 2, dtype=x.dtype),
    lambda x: F.dropout(x, 0.5),
    lambda x: x.squeeze_() if x._base is None and not x.requires_grad else x.squeeze(),
]


@given(
    operations=st.lists(st.sampled_from(UNARY), min_size=1, max_size=4),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    requires_grad=st.booleans(),
)
def test_any_chain_of_operations_has_the_geometry_of_the_real_one(
    operations: list[Callable[[Tensor], Tensor]], shape: list[int], requires_grad: bool
) -> None:
    def compute() -> Tensor:
        out = torch.ones(shape).requires_grad_(requires_grad) + 0 * torch.ones(2, *shape)
        for operation in operations:
            out = operation(out) if out.dim() else out.expand(2) * 1
        return out.reshape(-1).expand(2, -1)

    check_same(compute)


MASK = torch.tensor([True, False, True, True])


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x[MASK],
        lambda x: x[MASK][:, MASK],
        lambda x: x[:, MASK, None],
        lambda x: x[MASK[:, None] & MASK],
        lambda x: torch.masked_select(x, MASK),
        lambda x: x.masked_fill(MASK, 0.0),
        lambda x: x.index_put((MASK,), torch.ones(4)),
        lambda x: x[MASK.nonzero()[:, 0]],
        lambda x: x.repeat_interleave(MASK.int(), dim=0),
        lambda x: torch.stack(x.split(MASK.tolist().count(True) - 1)),
        lambda x: x.index_put((x > 0,), torch.tensor(3.0)),  # this mask nobody knows, nor needs to
    ],
)
def test_real_masks_decide_shapes(compute: Callable[[Tensor], Tensor]) -> None:
    tensor = torch.ones(4, 4, requires_grad=True)
    check_same(lambda: compute(tensor))


def test_assignment_under_a_mask() -> None:
    def compute(mask: Callable[[Tensor], Tensor]) -> Tensor:
        out = torch.zeros(4, 4)
        out[mask(out)] = 1.0
        out[MASK] = torch.ones(3, 4, requires_grad=True)
        return out

    check_same(lambda: compute(lambda out: MASK))
    check_same(lambda: compute(lambda out: out > 0))


def test_integers_and_single_numbers_are_real() -> None:
    tokens = torch.tensor([[3, 1, 2]])
    generator = torch.Generator().manual_seed(3)
    with MetaMode():
        assert (tokens.cumsum(-1) > 3).tolist() == [[False, True, True]]
        assert torch.arange(3).tolist() == [0, 1, 2]
        assert F.one_hot(tokens).shape == (1, 3, 4)
        assert tokens.float().max().shape == ()
        assert 0 <= float(torch.rand([])) < 1
        assert torch.tensor(2.5) * 2 == 5
        assert int(torch.randint(10, (1,), generator=generator)) < 10
        assert torch.empty(3).exponential_(generator=generator).shape == (3,)


def total(start: Tensor) -> Tensor:
    start += torch.ones(3, requires_grad=True).sum()
    return 2 * start


def test_a_number_that_something_unknown_goes_into_is_unknown() -> None:
    with MetaMode(), pytest.raises(ValueError, match="_local_scalar_dense"):
        total(torch.tensor(0.0)).item()
    with MetaMode():
        assert total(torch.tensor(0.0)).grad_fn is not None
    counts = torch.zeros(3, dtype=torch.long)
    with MetaMode(), pytest.raises(ValueError, match=r"Tensor\.tolist"):
        counts.copy_(torch.rand(3).argsort()).tolist()
    assert counts.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("read", "operation"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool(x.mean() > 1), "_local_scalar_dense"),
        (lambda x: float(x[0]), "_local_scalar_dense"),
        (lambda x: f"{x:.3f}", r"Tensor\.__format__"),
        (lambda x: x.tolist(), r"Tensor\.tolist"),
        (lambda x: x.numpy(), r"Tensor\.numpy"),
        (lambda x: np.asarray(x), r"Tensor\.__array__"),
        (lambda x: x.data_ptr(), r"Tensor\.data_ptr"),
        (lambda x: x[x > 0], r"aten\.index"),
        (lambda x: x.nonzero(), r"aten\.nonzero"),
        (lambda x: x.argsort().unique(), "unique"),
        (lambda x: torch.equal(x, x + 1), r"aten\.equal"),
        (lambda x: x.masked_select(x > 0), "masked_select"),
        (lambda x: (x * 1).resize_(7), "resize_"),
    ],
)
def test_reading_a_value_is_refused_with_operation_and_module(read: Callable[[Tensor], Any], operation: str) -> None:
    tensor = torch.ones(3)
    mode = MetaMode()
    mode.scopes.append("layers.1")
    with mode, pytest.raises(ValueError, match=rf"{operation}.* in 'layers\.1' .*floating-point"):
        read(tensor)
    with MetaMode(), pytest.raises(ValueError, match=rf"{operation}.* in code outside all blocks"):
        read(tensor)


def test_parameters_are_never_known() -> None:
    scale, packed = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3, dtype=torch.uint8), requires_grad=False)
    for parameter in (scale, packed):
        with MetaMode([parameter]), pytest.raises(ValueError, match="floating-point"):
            (parameter * 2).sum().item()


def test_an_operation_without_a_meta_kernel_is_named() -> None:
    library = torch.library.Library("protrain_test", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x.clone(), "CPU")
    try:
        with MetaMode(), pytest.raises(ValueError, match=r"protrain_test\.opaque.*no meta kernel"):
            torch.ops.protrain_test.opaque(torch.ones(3))
    finally:
        library._destroy()


def _spoil(tensors: dict[str, Tensor], generator: torch.Generator) -> None:
    tensors["float"].mul_(2).unsqueeze_(0)
    tensors["tokens"][1:].add_(1)
    tensors["tokens"].unsqueeze_(0)
    tensors["count"] += 1
    tensors["number"] /= 3
    tensors["mask"].copy_(torch.rand(4) > 0.5)
    (tensors["leaf"] * 2).sum().backward()
    tensors["leaf"].requires_grad_(False)
    torch.randint(3, (2,), generator=generator)
    torch.randperm(5)
    random.random()
    np.random.rand()  # noqa: NPY002
    raise KeyError


def test_what_was_there_before_is_as_it_was() -> None:
    tensors = {
        "float": torch.ones(4),
        "leaf": torch.ones(4, requires_grad=True),
        "tokens": torch.arange(4),
        "count": torch.tensor(0),
        "number": torch.tensor(1.5),
        "mask": torch.ones(4, dtype=torch.bool),
    }
    generator = torch.Generator()

    def states() -> list[Any]:
        numbers = np.random.get_state()[1].tolist()  # noqa: NPY002
        return [torch.get_rng_state().tolist(), generator.get_state().tolist(), random.getstate(), numbers]

    before = {name: (tensor.clone(), tensor._version, tensor.data_ptr()) for name, tensor in tensors.items()}
    states_before = states()
    with pytest.raises(KeyError), MetaMode():
        _spoil(tensors, generator)
    for name, tensor in tensors.items():
        values, version, pointer = before[name]
        assert torch.equal(tensor, values), name
        assert tensor.shape == values.shape
        assert (tensor._version, tensor.data_ptr(), tensor.grad) == (version, pointer, None), name
    assert tensors["leaf"].requires_grad
    assert states() == states_before


def test_backward_runs_and_gradients_stay_inside() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 2))
    with MetaMode(model.parameters()), torch.autocast(**BF16):
        model(torch.ones(4, 3)).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, parameter.dtype)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tensors_that_share_memory_share_it_in_the_trace() -> None:
    base = torch.ones(4, 4)
    row, other = base[1], torch.ones(4)
    mode = MetaMode()
    with mode:
        storages = [mode.storage(mode.stand_in(tensor))._cdata for tensor in (base, row, other, base * 1)]
        assert mode.storage(base.t())._cdata == storages[0]
        assert mode.storage(row).nbytes() == 4 * 4 * 4
    assert storages[0] == storages[1]
    assert len(set(storages)) == 3


def test_a_trace_keeps_nothing_alive() -> None:
    weight, tokens = torch.ones(4, 4), torch.arange(4)
    alive = [weakref.ref(tensor) for tensor in (weight, tokens)]
    mode = MetaMode([weight])
    with mode:
        tokens.add_(1)
        assert (weight * tokens).shape == (4, 4)
    del weight, tokens
    assert [reference() for reference in alive] == [None, None]


def test_a_tensor_of_a_trace_is_of_no_use_afterwards() -> None:
    with MetaMode():
        tensor = torch.ones(3)
    assert repr(tensor) == "ShapeTensor((3,), torch.float32, device='cpu')"
    with pytest.raises(ValueError, match="after the end of a trace"):
        tensor + 1


def test_tensors_of_several_parts_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with MetaMode(), pytest.raises(ValueError, match="NestedTensor cannot be traced"):
        nested * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_device_that_is_absent_is_refused() -> None:
    with pytest.raises(ValueError, match="'cuda' needs that device"):
        MetaMode(device="cuda")


@pytest.mark.parametrize("enabled", [True, False])
def test_what_a_loss_recomputes_needs_no_weights(enabled: bool) -> None:
    """`Tensor.backward` takes function modes off; what is recomputed in it must not meet weights without memory."""
    profiles = []
    context = partial(torch.autocast, **BF16, enabled=enabled)
    for place in ("cpu", "meta"):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        module = CausalLMModule(config={"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 2, **sizes})
        with torch.device(place):
            module.configure_model()
        tokens = torch.arange(32).view(2, 16)
        step = partial(module.training_step, {"input_ids": tokens, "labels": tokens})
        profiles.append(profile_model(module, describe_model(module), step, context))
    assert profiles[0] == profiles[1]


def test_an_operation_of_a_library_whose_shape_depends_on_values_is_refused_as_such() -> None:
    pytest.importorskip("bitsandbytes")
    tensor = torch.ones(2, 64)
    with MetaMode([tensor]), pytest.raises(DataDependentError, match="int8_vectorwise_quant"):
        torch.ops.bitsandbytes.int8_vectorwise_quant(tensor.half(), 6.0)


class Source:
    """Stands in for nothing, and writes down what happens; its own observer."""

    def __init__(self) -> None:
        self.observer: Any = self
        self.said: list[str] = []
        self.asked: list[Tensor] = []

    def stand_in(self, tensor: Tensor) -> Tensor:
        self.asked.append(tensor)
        return tensor

    def check_read(self, name: str, value: object) -> None:
        self.said.append(name)

    def dtype_read(self, tensor: Tensor) -> None:
        self.said.append("dtype")


def test_what_a_transform_holds_stays() -> None:
    seen: list[Tensor] = []

    def function(one: Tensor) -> Tensor:
        seen.append(one)
        return one.new_ones(()) + one

    source = Source()
    with StandIns(source):
        assert torch.vmap(function)(torch.zeros(3)).tolist() == [1, 1, 1]
    assert torch._C._functorch.is_functorch_wrapped_tensor(seen[0])
    assert not any(tensor is seen[0] for tensor in source.asked)


def test_casts_inside_of_a_transform_are_passed_over() -> None:
    source = Source()
    with StandIns(source):
        found = torch.vmap(lambda one: one.to(torch.float32) + one.dtype.itemsize)(torch.zeros(3))
    assert found.tolist() == [4, 4, 4]
    assert source.said == []
