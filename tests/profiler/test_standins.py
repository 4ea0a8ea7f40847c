from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_protrain.profiler.fake_mode import StandIns

OUTSIDE, INSIDE = torch.zeros(2), torch.ones(2)


class Source:
    """Puts `INSIDE` in the place of `OUTSIDE`, and writes down what happens; its own observer."""

    def __init__(self) -> None:
        self.observer: Any = self
        self.said: list[str] = []
        self.asked: list[Tensor] = []

    def stand_in(self, tensor: Tensor) -> Tensor:
        self.asked.append(tensor)
        return INSIDE if tensor is OUTSIDE else tensor

    def check_read(self, name: str, value: object) -> None:
        self.said.append(name)

    def attend(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.said.append("attend")
        return func(*args, **kwargs)

    def dtype_read(self, tensor: Tensor) -> None:
        self.said.append(f"dtype of {'outside' if tensor is OUTSIDE else 'another'}")

    @contextmanager
    def attention(self) -> Iterator[None]:
        yield
        self.said.append("attended")


def test_stand_ins_take_the_place_of_tensors_wherever_they_are() -> None:
    with StandIns(Source()):
        assert torch.stack([OUTSIDE, OUTSIDE]).sum() == 4
        assert torch.cat(tensors=(OUTSIDE,)).sum() == 2
        assert torch.add(OUTSIDE, other=OUTSIDE).sum() == 4
        assert OUTSIDE.sum() == 2
    assert OUTSIDE.sum() == 0


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


READS: dict[str, Any] = {
    "Tensor.tolist": lambda tensor: tensor.tolist(),
    "Tensor.numpy": lambda tensor: tensor.numpy(),
    "Tensor.data_ptr": lambda tensor: tensor.data_ptr(),
    "Tensor.__format__": lambda tensor: f"{tensor[0]:.1f}",
}


@pytest.mark.parametrize("name", READS)
def test_what_reads_memory_is_named(name: str) -> None:
    source = Source()
    with StandIns(source):
        READS[name](OUTSIDE)
    assert name in source.said


def test_who_asks_for_a_dtype_is_heard() -> None:
    source = Source()
    with StandIns(source):
        assert OUTSIDE.dtype is torch.float32
        INSIDE.to(OUTSIDE)
        OUTSIDE.shape, OUTSIDE.sum()
    assert source.said == ["dtype of outside", "dtype of another", "dtype of outside"]


@pytest.mark.parametrize("cast", [lambda one: one.float(), lambda one: one.to(torch.float32), lambda one: one.half()])
def test_who_asks_for_another_dtype_asks_for_the_present_one(cast: Any) -> None:
    """A cast to the dtype that is there gives the tensor itself, with no operation."""
    source = Source()
    with StandIns(source):
        cast(OUTSIDE)
    assert source.said == ["dtype of outside"]


def test_casts_inside_of_a_transform_are_passed_over() -> None:
    source = Source()
    with StandIns(source):
        found = torch.vmap(lambda one: one.to(torch.float32) + one.dtype.itemsize)(torch.zeros(3))
    assert found.tolist() == [4, 4, 4]
    assert source.said == []


def test_attention_goes_through_its_source() -> None:
    source = Source()
    query = torch.ones(1, 2, 3, 4)
    with StandIns(source):
        F.scaled_dot_product_attention(query, query, query)
    assert source.said == ["attend", "attended"]
    source.observer = None
    with StandIns(source):
        F.scaled_dot_product_attention(query, query, query)
    assert source.said == ["attend", "attended"]
