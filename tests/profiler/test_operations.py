"""Rules of operations give the shapes of the CPU, and their arithmetic is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.ops import SHAPE_RULES, count_flops, operation_cost
from lightning_protrain.profiler.profile import profile_model
from tests.support.models import HAS_BF16_LSTM

ATEN = torch.ops.aten
BF16 = torch.bfloat16


def ends(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def layer(dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of one LSTM layer: 5 steps, 2 sequences, 3 features to 4."""
    weights = [torch.ones(16, 3), torch.ones(16, 4), torch.ones(16), torch.ones(16)]
    tensors = [torch.ones(5, 2, 3), *weights, torch.ones(2, 4), torch.ones(2, 4)]
    return *(tensor.to(dtype) for tensor in tensors), False, [], 2, 4, 1, True, False, False, True


def layer_backward(dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of the backward of the same layer."""
    args = layer(dtype)
    outputs, hidden, cell, workspace = ATEN.mkldnn_rnn_layer.default(*args)
    gradients = torch.ones_like(outputs), torch.ones_like(hidden), torch.ones_like(cell)
    geometry = False, 2, 4, 1, True, True, False, [], True
    return *args[:7], outputs, hidden, cell, *gradients, *geometry, workspace


def norm(dtype: torch.dtype, weight: Tensor | None, *rest: Any) -> tuple[Any, ...]:
    return torch.ones(2, 4, 3, dtype=dtype), weight, weight, *rest


GROUP_NORM, LAYER_NORM, BATCH_NORM = (2, 4, 3, 2, 1e-5), (1e-5,), (True, 0.1, 1e-5)
CASES: list[tuple[Any, tuple[Any, ...]]] = [
    *((ATEN.mkldnn_rnn_layer.default, layer(dtype)) for dtype in (torch.float32, BF16)),
    (ATEN._grouped_mm.default, (torch.ones(8, 8), torch.ones(2, 8, 12), ends(3, 8))),
    (ATEN._grouped_mm.default, (torch.ones(8, 8), torch.ones(8, 12), ends(4, 8))),
    (ATEN._grouped_mm.default, (torch.ones(2, 4, 8), torch.ones(2, 8, 12))),
    (ATEN._grouped_mm.default, (torch.ones(2, 4, 8), torch.ones(8, 12), ends(4, 12))),
    (ATEN._grouped_mm.default, (torch.ones(8, 8, dtype=BF16), torch.ones(2, 8, 16, dtype=BF16), ends(3, 8))),
    *(
        (ATEN.native_group_norm.default, norm(dtype, weight, *GROUP_NORM))
        for dtype, weight in ((torch.float32, torch.ones(4)), (BF16, torch.ones(4)), (BF16, None))
    ),
    (ATEN.native_batch_norm.default, norm(BF16, None, torch.zeros(4), torch.ones(4), False, 0.1, 1e-5)),
    *(
        (operation, (torch.rand(3, 2, dtype=dtype), torch.rand(3, 2, dtype=dtype), *rest))
        for operation in (ATEN.mse_loss.default, ATEN.smooth_l1_loss.default, ATEN.soft_margin_loss.default)
        for dtype in (torch.float32, BF16)
        for rest in ((), (0,), (2,))
    ),
    *((ATEN.binary_cross_entropy.default, (torch.rand(3, 2), torch.rand(3, 2), None, kind)) for kind in range(3)),
    *(
        (
            ATEN.native_group_norm_backward.default,
            (
                tensor,
                tensor,
                torch.ones(2, 2, dtype=dtype),
                torch.ones(2, 2, dtype=dtype),
                weight,
                2,
                4,
                3,
                2,
                [True] * 3,
            ),
        )
        for tensor, dtype, weight in (
            (torch.ones(2, 4, 3), torch.float32, torch.ones(4)),
            (torch.ones(2, 4, 3, dtype=BF16), torch.float32, torch.ones(4)),
        )
    ),
    *(
        (ATEN.mkldnn_rnn_layer_backward.default, layer_backward(dtype))
        for dtype in (torch.float32, BF16)[: 1 + HAS_BF16_LSTM]
    ),
    *(
        (ATEN.native_layer_norm.default, (torch.ones(2, 4, dtype=dtype), [4], weight, weight, *LAYER_NORM))
        for dtype, weight in (
            (torch.float32, None),
            (BF16, torch.ones(4)),
            (BF16, None),
            (BF16, torch.ones(4).bfloat16()),
        )
    ),
    *(
        (ATEN._native_batch_norm_legit.no_stats, norm(dtype, weight, *BATCH_NORM))
        for dtype, weight in ((torch.float32, None), (BF16, torch.ones(4)), (BF16, None))
    ),
    *(
        (operation, norm(BF16, weight, torch.zeros(4), torch.ones(4), *BATCH_NORM))
        for operation in (ATEN.native_batch_norm.default, ATEN._native_batch_norm_legit.default)
        for weight in (None, torch.ones(4))
    ),
]


@pytest.mark.parametrize(("operation", "args"), CASES, ids=[f"{index}-{case[0]}" for index, case in enumerate(CASES)])
def test_a_rule_gives_the_shapes_of_the_cpu(operation: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if operation is ATEN.mkldnn_rnn_layer.default and args[0].dtype == BF16 and not HAS_BF16_LSTM:
        pytest.skip("oneDNN has no LSTM in bfloat16 for this processor")
    meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), args)
    expected, given = tree_leaves(operation(*args)), tree_leaves(SHAPE_RULES[operation](*meta))
    assert [(x.shape, x.stride(), x.dtype) for x in given] == [(x.shape, x.stride(), x.dtype) for x in expected]
    assert all(tensor.is_meta for tensor in given)
    sizes = [[tensor.untyped_storage().nbytes() for tensor in tensors] for tensors in (given, expected)]
    assert sizes[0] == sizes[1] or operation is ATEN.mkldnn_rnn_layer.default


def test_every_rule_is_tested() -> None:
    assert {operation for operation, _ in CASES} == SHAPE_RULES.keys()


ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_counted_by_the_heads_of_the_query(name: str) -> None:
    """Keys and values of two heads and 10 tokens serve four heads of queries of 8 tokens; values are wider."""
    query, key, value, gradient = (
        torch.empty(2, heads, tokens, width, device="meta")
        for heads, tokens, width in ((4, 8, 16), (2, 10, 16), (2, 10, 32), (4, 8, 32))
    )
    of_query, of_value = (2 * (2 * 4 * 8 * 10 * width) for width in (16, 32))
    forward, backward = (getattr(ATEN, f"_scaled_dot_product_{name}{kind}").default for kind in ("", "_backward"))
    assert count_flops(forward, (query, key, value), {}, gradient) == of_query + of_value
    assert count_flops(backward, (gradient, query, key, value), {}, query) == 3 * of_query + 2 * of_value


@pytest.mark.parametrize(
    ("operation", "shapes", "flops"),
    [
        (ATEN.mm.default, [(2, 3), (3, 5)], 2 * 2 * 3 * 5),
        (ATEN.addmm.default, [(5,), (2, 3), (3, 5)], 2 * 2 * 3 * 5),
        (ATEN._grouped_mm.default, [(7, 3), (4, 3, 5)], 2 * 7 * 3 * 5),
        (ATEN._grouped_mm.default, [(4, 7, 3), (4, 3, 5)], 4 * 2 * 7 * 3 * 5),
        (ATEN._grouped_mm.default, [(7, 3), (3, 5)], 2 * 7 * 3 * 5),
        (ATEN._grouped_mm.default, [(4, 7, 3), (3, 5)], 2 * 7 * 3 * 5),
        (ATEN._scaled_dot_product_flash_attention_for_cpu.default, [(2, 4, 8, 16)] * 3, 2 * 2 * (2 * 4 * 8 * 8 * 16)),
        (ATEN.mkldnn_rnn_layer.default, [(5, 2, 3), (16, 3), (16, 4)], 2 * 5 * 2 * 16 * (3 + 4)),
        # Scores again, and the gradients of the weights, of the value, the query and the key.
        (
            ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
            [(2, 4, 8, 16)] * 4,
            5 * 2 * (2 * 4 * 8 * 8 * 16),
        ),
        (ATEN.mkldnn_rnn_layer_backward.default, [(5, 2, 3), (16, 3), (16, 4)], 2 * 2 * 5 * 2 * 16 * (3 + 4)),
        (ATEN.add.Tensor, [(2, 3), (2, 3)], 0),
    ],
)
def test_flops(operation: Any, shapes: list[tuple[int, ...]], flops: int) -> None:
    args = tuple(torch.empty(shape, device="meta") for shape in shapes)
    assert count_flops(operation, args, {}, torch.empty((), device="meta")) == flops


@pytest.mark.parametrize(("name", "products"), [("_cudnn_rnn", 1), ("_cudnn_rnn_backward", 2)])
def test_flops_of_all_layers_at_once(name: str, products: int) -> None:
    operation = getattr(ATEN, name).default
    weights = [torch.empty(shape, device="meta") for shape in [(16, 3), (16, 4), (16,), (16,), (16, 4), (16, 4)]]
    tensor = torch.empty(5, 2, 3, device="meta")
    assert count_flops(operation, (tensor, weights), {}, tensor) == products * 2 * 5 * 2 * 16 * (3 + 4 + 4 + 4)


def flops_of(model: nn.Module, step: Callable[[], object]) -> tuple[int, int]:
    """Return the FLOPs of forward and of backward."""
    profile = profile_model(model, describe_model(model), step)
    passes = [[segment.forward for segment in profile.segments], [segment.backward for segment in profile.segments]]
    forward, backward = (sum(cost.flops * cost.count for one in some for cost in one.operations) for some in passes)
    assert forward == profile.flops
    return forward, backward


def test_backward_of_recurrent_layers_is_twice_the_forward() -> None:
    lstm = nn.LSTM(8, 8, 2, bidirectional=True)
    inputs = torch.ones(5, 2, 8, requires_grad=True)
    forward, backward = flops_of(lstm, lambda: lstm(inputs)[0].sum())
    # Four gates, from 8 and 8 elements in the first layer and from 16 and 8 in the second one, in two directions.
    assert forward == 2 * 5 * 2 * 4 * 8 * 2 * (8 + 8 + 16 + 8)
    assert backward == 2 * forward


SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
}
MOE: dict[str, Callable[[], nn.Module]] = {
    "gpt-oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**SIZES, intermediate_size=96, num_local_experts=8)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, intermediate_size=96, num_local_experts=8)),
    "qwen3-moe": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**SIZES, moe_intermediate_size=96, num_experts=8, intermediate_size=96)
    ),
}


@pytest.mark.parametrize("name", MOE)
def test_flops_of_experts_are_those_that_tokens_go_through(name: str) -> None:
    with torch.device("meta"):
        model = MOE[name]().train()
    batch, length = 2, 128
    ids = torch.arange(batch * length).reshape(batch, length) % 128
    forward, backward = flops_of(model, lambda: model(input_ids=ids, labels=ids).loss)
    hidden, heads, shared, width, experts, chosen, inner = 64, 4, 2, 16, 8, 2, 96
    projections = hidden * width * (2 * heads + 2 * shared)
    attention = 2 * length * heads * width
    layer = projections + attention + hidden * experts + chosen * 3 * hidden * inner
    assert forward == pytest.approx(2 * batch * length * (2 * layer + hidden * 128), rel=0.01)
    # Fused attention computes its scores once more; GPT-OSS, whose scores have sinks, has none.
    again = 2 * batch * length * 2 * attention // 2 if name != "gpt-oss" else 0
    assert backward == pytest.approx(2 * forward + again, rel=0.01)


def quantised(kind: str) -> Any:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear8bitLt(64, 128, has_fp16_weights=False) if kind == "int8" else bnb.nn.Linear4bit(64, 128)
    return layer.requires_grad_(False).to("cpu")


@pytest.mark.parametrize("kind", ["int8", "fp4"])
def test_a_quantised_layer_costs_what_it_stands_for(kind: str) -> None:
    """The 8-bit product of the CPU and of evaluation is another operation than that of 4 bits."""
    layer = nn.Sequential(nn.Linear(64, 64), quantised(kind))
    profile = profile_model(layer, describe_model(layer), lambda: layer(torch.ones(3, 64)).sum())
    assert profile.flops == 2 * 3 * 64 * 128 + 2 * 3 * 64 * 64
    assert layer[1](torch.ones(1, 64)).isfinite().all()


def test_products_of_8_bits_count_by_the_dtype_that_they_give() -> None:
    pytest.importorskip("bitsandbytes")
    func = torch.ops.bitsandbytes.int8_scaled_mm.default
    codes, other = torch.ones(3, 64, dtype=torch.int8), torch.ones(128, 64, dtype=torch.int8)
    result = torch.ones(3, 128, dtype=BF16)
    flops = count_flops(func, (codes, other, torch.ones(3), torch.ones(128)), {}, result)
    assert flops == 2 * 3 * 64 * 128
    cost = operation_cost(func, flops, [codes, other, torch.ones(3), torch.ones(128)], [result])
    assert cost is not None
    assert cost[2] == "bfloat16"


def test_a_weight_that_is_parametrised_in_forward_is_traced() -> None:
    """PEFT adapts the experts of a block so; `register_parametrization` sets the weight to itself."""

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    class Parametrised(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            nn.utils.parametrize.register_parametrization(self, "weight", Doubled())
            result = super().forward(rows)
            nn.utils.parametrize.remove_parametrizations(self, "weight", leave_parametrized=False)
            return result

    layer = nn.Sequential(nn.Linear(8, 8), Parametrised(8, 4))
    profile = profile_model(layer, describe_model(layer), lambda: layer(torch.ones(3, 8)).sum())
    assert not profile.measured
    assert isinstance(layer[1].weight, nn.Parameter)
