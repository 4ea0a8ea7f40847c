"""Products are distinguished from all other operations, also from kernels with dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_protrain.profiler import ops
from lightning_protrain.profiler.op_kinds import is_product

ATEN = torch.ops.aten


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


class Asked(TorchDispatchMode):
    """Asks of every operation whether it makes a product."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[str] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (self.products if is_product(func, args, kwargs or {}) else self.others).append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


PRODUCTS: dict[str, tuple[Callable[[], Any], str]] = {
    "mm": (lambda: ones(4, 8) @ ones(8, 8), "mm"),
    "linear": (lambda: torch.nn.functional.linear(ones(4, 8), ones(32, 8), ones(32)), "addmm"),
    "bmm": (lambda: ones(2, 4, 8) @ ones(2, 8, 4), "bmm"),
    "baddbmm": (lambda: torch.baddbmm(ones(2, 4, 4), ones(2, 4, 8), ones(2, 8, 4)), "baddbmm"),
    "convolution": (lambda: torch.conv1d(ones(1, 3, 9), ones(4, 3, 2)), "convolution"),
    "attention": (
        lambda: torch.nn.functional.scaled_dot_product_attention(*(ones(1, 2, 4, 8) for _ in range(3))),
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "without autograd": torch.no_grad()(lambda: ones(4, 8) @ ones(8, 8)),
    "adapter": lambda: ones(4, 2) @ ones(2, 16),
    "adapter with a bias": lambda: torch.addmm(ones(16), ones(4, 2), ones(2, 16)),
    "scores": lambda: ones(1, 64, 8) @ ones(1, 8, 64),
    "norm": lambda: torch.nn.functional.layer_norm(ones(4, 8), (8,)),
    "activation": lambda: torch.nn.functional.silu(ones(4)),
    "softmax": lambda: ones(4, 4).softmax(-1),
    "cast": lambda: ones(4).bfloat16(),
    "view": lambda: ones(4, 8).t(),
    "into memory that is there": lambda: torch.mm(ones(4, 8), ones(8, 8), out=torch.empty(4, 8)),
    "in place": lambda: ones(4, 8).addmm_(ones(4, 8), ones(8, 8)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str) -> None:
    make, found = PRODUCTS[name]
    with Asked() as asked:
        make()
    assert asked.products == [found]


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_none(name: str) -> None:
    with Asked() as asked:
        OTHERS[name]()
    assert asked.products == []
    assert asked.others


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("_scaled_dot_product_flash_attention", ()),
        ("_scaled_dot_product_efficient_attention", (None, True)),
        ("_scaled_dot_product_cudnn_attention", (None, True)),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_kernels_that_drop_at_random_make_none(name: str, before: tuple[Any, ...], dropout: float) -> None:
    func, given = getattr(ATEN, name).default, (ones(1, 2, 4, 8),) * 3
    assert is_product(func, (*given, *before, dropout), {}) == (not dropout)
    assert is_product(func, (*given, *before), {"dropout_p": dropout}) == (not dropout)
    assert is_product(func, (*given, *before), {})


def test_whatever_has_a_cost_of_ours_is_one() -> None:
    """But for what only backward calls."""
    names = {func._schema.name for func in ops._FORMULAS} | set(ops.PRODUCTS_OF_CODES)
    forward = {name for name in names if not name.endswith("_backward")}
    schemas = {func._schema.name: func for func in ops._FORMULAS}
    known = {func for name, func in schemas.items() if name in forward}
    assert all(is_product(func, (), {}) for func in known)
    assert set(ops.PRODUCTS_OF_CODES) <= forward
