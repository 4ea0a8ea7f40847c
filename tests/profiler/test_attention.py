"""The kernel of attention is chosen by its conditions, with its workspace and its saved bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from lightning_protrain.profiler.attention import AttentionCall, cuda_kernel, run_kernel, workspace_bytes
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import profile_model
from lightning_protrain.profiler.records import ModelProfile
from tests.profiler.models import TEXT, tokens

ATEN = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AMPERE, GEFORCE, TURING, PASCAL, HOPPER, BLACKWELL = (8, 0), (8, 6), (7, 5), (6, 1), (9, 0), (12, 0)


def call(
    dtype: torch.dtype = BF16,
    width: int = 64,
    queries: int = 32,
    keys: int = 32,
    heads: tuple[int, int] = (4, 4),
    mask: tuple[int, ...] | None = None,
    trains: bool = True,
    **rest: Any,
) -> AttentionCall:
    query = torch.empty(2, heads[0], queries, width, dtype=dtype, device="meta", requires_grad=trains)
    key, value = (torch.empty(2, heads[1], keys, width, dtype=dtype, device="meta") for _ in range(2))
    given = None if mask is None else torch.ones(mask, dtype=torch.bool, device="meta")
    return AttentionCall(query, key, value, given, **rest)


CHOICES: list[tuple[str, tuple[int, int], AttentionCall]] = [
    ("flash", AMPERE, call()),
    ("flash", AMPERE, call(FP16, is_causal=True, dropout_p=0.1)),
    ("flash", AMPERE, call(heads=(8, 2), enable_gqa=True)),
    ("flash", AMPERE, call(width=20)),  # is padded
    ("flash", AMPERE, call(width=256)),
    ("flash", BLACKWELL, call()),
    ("efficient", AMPERE, call(FP32)),
    ("efficient", AMPERE, call(mask=(2, 1, 32, 32))),
    ("efficient", AMPERE, call(width=264)),
    ("efficient", AMPERE, call(is_causal=True, queries=16)),
    ("efficient", GEFORCE, call(width=200)),
    ("efficient", GEFORCE, call(width=256, dropout_p=0.1)),
    ("flash", GEFORCE, call(width=200, trains=False)),
    ("flash", GEFORCE, call(width=256)),
    ("flash", AMPERE, call(width=200)),
    ("efficient", TURING, call(FP16)),
    ("efficient", TURING, call(FP32, width=17)),
    ("efficient", PASCAL, call(FP16, width=17)),
    ("math", TURING, call(FP16, width=17)),
    ("math", TURING, call(BF16)),
    ("math", AMPERE, call(torch.float64)),
    ("math", AMPERE, call(FP32, width=18)),
    ("math", AMPERE, call(mask=(32, 32), width=20)),
    ("math", AMPERE, call(mask=(2, 1, 32, 32), heads=(8, 2), enable_gqa=True)),
    ("cudnn", HOPPER, call()),
    ("cudnn", HOPPER, call(mask=(2, 1, 32, 32))),
    ("cudnn", (10, 0), call(heads=(8, 2), enable_gqa=True)),
    ("flash", HOPPER, call(width=20)),
    ("flash", HOPPER, call(width=256)),
    ("flash", HOPPER, call(dropout_p=0.1)),  # no multiple of 1/16
    ("cudnn", HOPPER, call(dropout_p=0.125)),
    ("efficient", HOPPER, call(FP32)),
    ("efficient", HOPPER, call(mask=(1, 2, 1, 32, 32)[1:], width=136)),
]


@pytest.mark.parametrize(("kernel", "capability", "chosen"), CHOICES)
def test_the_kernel_is_the_first_whose_conditions_are_met(
    kernel: str, capability: tuple[int, int], chosen: AttentionCall
) -> None:
    assert cuda_kernel(chosen, capability) == kernel


def test_a_last_dimension_that_is_not_the_innermost_rules_fused_kernels_out() -> None:
    query, key, value = call().tensors
    turned = AttentionCall(query.transpose(2, 3).contiguous().transpose(2, 3), key, value)
    assert cuda_kernel(turned, AMPERE) == "math"
    mask = torch.ones(32, 32, device="meta").t()
    assert cuda_kernel(AttentionCall(query, key, value, mask), AMPERE) == "math"
    assert cuda_kernel(AttentionCall(query[:, :, :, 0], key[:, 0], value[:, 0]), AMPERE) == "math"  # three dimensions


SWITCHED: list[tuple[list[SDPBackend], bool, str]] = [
    ([SDPBackend.MATH], False, "math"),
    ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], False, "efficient"),
    ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], False, "flash"),
    ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], True, "efficient"),
    ([SDPBackend.CUDNN_ATTENTION], False, "cudnn"),
]


@pytest.mark.parametrize(("backends", "ordered", "kernel"), SWITCHED)
def test_what_the_user_switches_off_is_not_chosen(backends: list[SDPBackend], ordered: bool, kernel: str) -> None:
    with sdpa_kernel(backends, set_priority=ordered):
        assert cuda_kernel(call(), AMPERE) == kernel
    refused = pytest.raises(ValueError, match=r"No enabled kernel .*\(2, 4, 32, 64\).*7\.5")
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), refused:
        cuda_kernel(call(), TURING)


class Attends(nn.Module):
    """One attention whose inputs are projected by a parameter, so that autograd saves them."""

    def __init__(self, example: AttentionCall) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=example.query.dtype))
        self.example = example

    def forward(self) -> Tensor:
        example = self.example
        tensors = [torch.ones(tensor.shape, dtype=tensor.dtype) * self.scale for tensor in example.tensors]
        mask = None if example.attn_mask is None else torch.ones(example.attn_mask.shape, dtype=torch.bool)
        return F.scaled_dot_product_attention(
            *tensors, mask, example.dropout_p, example.is_causal, scale=example.scale, enable_gqa=example.enable_gqa
        )


def saved_by_meta_kernel(example: AttentionCall, operation: Any, mask: Tensor | None = None) -> tuple[int, Tensor]:
    """Bytes that autograd saves of torch's own kernel on meta tensors, and what the kernel gives."""
    saved: dict[StorageWeakRef, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[StorageWeakRef(tensor.untyped_storage())] = tensor.untyped_storage().nbytes()
        return tensor

    tensors = [tensor.detach().requires_grad_() for tensor in example.tensors]
    rest: dict[str, Any] = {"dropout_p": example.dropout_p, "is_causal": example.is_causal}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if operation is ATEN._scaled_dot_product_flash_attention.default:
            result = operation(*tensors, **rest)
        else:
            result = operation(*tensors, mask, True, **rest)
    return sum(saved.values()), result[0]


def traced(example: AttentionCall, capability: tuple[int, int] | None) -> ModelProfile:
    model = Attends(example)
    return profile_model(model, describe_model(model), lambda: model().sum(), capability=capability)


OPERATIONS = {
    "flash": ATEN._scaled_dot_product_flash_attention.default,
    "efficient": ATEN._scaled_dot_product_efficient_attention.default,
    "cudnn": ATEN._scaled_dot_product_cudnn_attention.default,
}
# What the multiplications by the parameter save beside attention: their results are the query, the key and the value.
EXAMPLES = [
    ("flash", AMPERE, call(is_causal=True, queries=48, keys=48)),
    ("flash", AMPERE, call(FP16, dropout_p=0.1)),
    ("flash", AMPERE, call(heads=(8, 2), enable_gqa=True, queries=40)),
    ("efficient", AMPERE, call(FP32, queries=33)),
    ("efficient", AMPERE, call(mask=(2, 1, 32, 32))),
    ("efficient", AMPERE, call(mask=(2, 1, 30, 30), queries=30, keys=30)),
    ("efficient", TURING, call(FP16, dropout_p=0.1)),
    ("cudnn", HOPPER, call()),
]


@pytest.mark.parametrize(("kernel", "capability", "example"), EXAMPLES)
def test_saved_bytes_are_those_of_the_meta_kernel_and_flops_those_of_any(
    kernel: str, capability: tuple[int, int], example: AttentionCall
) -> None:
    mask = None
    if example.attn_mask is not None:
        # Eight elements: the step in which the kernel reads masks.
        rows, columns = example.attn_mask.shape[-2:]
        padded = torch.empty(2, 1, rows, -(-columns // 8) * 8, dtype=example.query.dtype, device="meta")
        mask = padded[..., :columns].expand(2, example.query.shape[1], rows, columns)
    expected, output = saved_by_meta_kernel(example, OPERATIONS[kernel], mask)
    profile = traced(example, capability)
    assert profile.attention == ((kernel, 1),)
    # Each product with the parameter saves its other factor, as large as the query, the key or the value.
    factors = sum(tensor.nbytes for tensor in example.tensors)
    assert profile.saved_bytes == expected + factors
    assert output.shape == example.query.shape
    heads = example.query.shape[1]  # with as many for keys and values, which torch 2.11 asks for
    shapes = [(tensor.shape[0], heads, *tensor.shape[2:]) for tensor in example.tensors]
    assert profile.flops == sdpa_flop_count(*shapes)
    backward = sum(cost.flops * cost.count for segment in profile.segments for cost in segment.backward.operations)
    assert backward == sdpa_backward_flop_count(shapes[0], *shapes)


def test_on_the_cpu_nothing_changes() -> None:
    plain = traced(call(FP32, is_causal=True), None)
    assert plain.attention == (("flash_cpu", 1),)
    assert traced(call(FP32, mask=(2, 1, 32, 32), dropout_p=0.1), None).attention == (("math", 1),)
    planned = traced(call(FP32, is_causal=True), AMPERE)
    # Both save one number for each query and head, the GPU in steps of 32 and with the state of its random numbers.
    assert planned.saved_bytes - plain.saved_bytes == 16


def test_math_keeps_the_matrix_of_weights() -> None:
    profile = traced(call(BF16, queries=64, keys=64), TURING)
    assert profile.attention == (("math", 1),)
    assert profile.saved_bytes > traced(call(BF16, queries=64, keys=64), AMPERE).saved_bytes + 2 * 4 * 64 * 64 * 2


@pytest.mark.parametrize(
    ("func", "example", "nbytes"),
    [
        # Tiles of 128 queries: sums of 64 wide in float32, and one number each.
        ("flash", call(queries=100), 2 * 4 * 128 * 4 * (64 + 1)),
        ("flash", call(queries=100, width=40), 2 * 4 * 128 * 4 * (64 + 1)),
        ("flash", call(queries=128, width=256), 2 * 4 * 128 * 4 * (256 + 1)),
        # And the gradients of keys and values for each of eight heads.
        ("flash", call(queries=128, heads=(8, 2)), 2 * 8 * 128 * 4 * (64 + 1) + 2 * 2 * 8 * 32 * 64 * 2),
        ("efficient", call(queries=128), 2 * 4 * 128 * 4 * (64 + 1)),
        ("efficient", call(FP32, queries=128), 2 * 4 * 128 * 4),
    ],
)
def test_workspace_of_backward(func: str, example: AttentionCall, nbytes: int) -> None:
    backward = getattr(ATEN, f"_scaled_dot_product_{func}_attention_backward").default
    assert workspace_bytes(backward, (example.query, *example.tensors)) == nbytes
    assert workspace_bytes(OPERATIONS[func], example.tensors) == 0


def test_the_workspace_is_part_of_the_peak() -> None:
    example = call(queries=128, keys=128)
    profile = traced(example, AMPERE)
    block = next(segment for segment in profile.segments if not segment.between)
    nbytes = workspace_bytes(ATEN._scaled_dot_product_flash_attention_backward.default, (None, *example.tensors))
    size = example.query.nbytes
    # In the kernel: the three it was given, what it gave, two gradients of that, three of its own.
    assert block.backward.peak_bytes >= nbytes + 7 * size
    assert block.backward.peak_bytes < nbytes + 14 * size


PADDED = {"input_ids": tokens().repeat(2, 1), "attention_mask": torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])}
WHOLE = {"input_ids": tokens().repeat(2, 1)}
AUTOCAST: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "mixed": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "full": nullcontext,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("batch", "precision", "capability", "kernel"),
    [
        (WHOLE, "mixed", GEFORCE, "flash"),
        (PADDED, "mixed", GEFORCE, "efficient"),
        (PADDED, "full", GEFORCE, "efficient"),
        (WHOLE, "full", GEFORCE, "math"),  # two heads of queries share one of keys, which only flash and cuDNN can do
        (WHOLE, "mixed", HOPPER, "cudnn"),
        (WHOLE, "mixed", TURING, "math"),
        (WHOLE, "mixed", None, "flash_cpu"),
    ],
)
def test_of_a_language_model(
    batch: dict[str, Tensor], precision: str, capability: tuple[int, int] | None, kernel: str
) -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT | {"num_key_value_heads": 1})).train()
    step = lambda: model(**batch, labels=batch["input_ids"]).loss  # noqa: E731
    profile = profile_model(model, describe_model(model), step, AUTOCAST[precision], capability=capability)
    assert profile.attention == ((kernel, 3),)
    assert profile.segments[-1].forward.operations


def test_a_checkpointed_attention_counts_once() -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)).train()
    model.gradient_checkpointing_enable()
    step = lambda: model(**WHOLE, labels=WHOLE["input_ids"]).loss  # noqa: E731
    profile = profile_model(model, describe_model(model), step, AUTOCAST["mixed"], capability=AMPERE)
    assert profile.attention == (("flash", 3),)


@given(
    width=st.integers(1, 300),
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    dtype=st.sampled_from([BF16, FP16, FP32]),
    masked=st.booleans(),
    capability=st.sampled_from([PASCAL, TURING, AMPERE, GEFORCE, HOPPER, BLACKWELL]),
)
def test_whatever_is_chosen_runs(
    width: int, queries: int, keys: int, dtype: torch.dtype, masked: bool, capability: tuple[int, int]
) -> None:
    example = call(dtype, width, queries, keys, mask=(1, 1, queries, keys) if masked else None)
    kernel = cuda_kernel(example, capability)
    result = run_kernel(kernel, example)
    assert result.shape == example.query.shape
    assert result.dtype is dtype
    assert kernel != "flash" or not masked
    assert math.prod(result.shape) == result.numel()
