"""Which rows of a weight each machine holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_protrain.runtime.rows import Rows, can_be_divided, held_bytes, row_ranges, rows_of


def mesh_of(machine: int, number: int) -> Any:
    return SimpleNamespace(size=lambda: number, get_local_rank=lambda: machine)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8])
def test_rows_are_cut_as_by_chunk(num_rows: int, number: int) -> None:
    whole = torch.arange(num_rows)
    parts = [whole[begin:end] for begin, end in row_ranges(num_rows, number)]
    expected = [*torch.chunk(whole, number), *[whole[:0]] * number][:number]
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]


def test_what_does_not_lie_row_after_row_is_not_divided() -> None:
    assert can_be_divided(nn.Parameter(torch.ones(3, 2)))
    assert can_be_divided(nn.Parameter(torch.ones(1)))
    assert not can_be_divided(nn.Parameter(torch.ones(())))
    assert not can_be_divided(nn.Parameter(torch.ones(0, 2)))
    assert not can_be_divided(nn.Parameter(torch.ones(3, 2).T))
    assert not can_be_divided(nn.Buffer(torch.ones(3, 2)))


@pytest.mark.parametrize("machine", range(3))
def test_the_parts_of_a_tensor_are_views_of_the_right_shape(machine: int) -> None:
    whole = torch.arange(8.0).view(4, 2)
    rows = Rows.of(whole, mesh_of(machine, 3))
    part = rows.cut(whole)
    assert part.shape == rows.shape_of(None) == rows.shape_of(machine)
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert torch.equal(torch.cat([rows.cut(whole, at) for at in range(3)]), whole)
    assert rows.most_elements == 4
    assert rows.elements(0, rows.ranges[machine][0]) == part.storage_offset() or not part.numel()


def test_bytes_are_those_of_the_machine_that_has_most() -> None:
    parameters = [nn.Parameter(torch.ones(5, 2)), nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(1))]
    rows = rows_of(parameters, mesh_of(1, 2))
    assert [each is None for each in rows] == [False, True, False]
    assert held_bytes([each.nbytes for each in parameters], rows) == [24, 4, 4]
    assert rows_of(parameters, None) == [None] * 3


def test_a_machine_without_rows_keeps_nothing_of_the_whole() -> None:
    whole = torch.ones(1, 64)
    one, other = (Rows(whole.shape, ((0, 1), (1, 1)), machine, None).own(whole) for machine in range(2))
    assert one.data_ptr() == whole.data_ptr()
    assert other.shape == (0, 64)
    assert other.untyped_storage().nbytes() == 0
