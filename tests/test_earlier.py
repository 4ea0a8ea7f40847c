"""Weights that a run has divided, and another one reads; runs on ranks are in tests/distributed/test_row_runs.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_protrain.earlier import EarlierRows, divided_by_run, forget_values, refuse_divided
from lightning_protrain.runtime.rows import Rows


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 4)
        self.other = nn.Linear(3, 4, bias=False)
        self.other.weight = self.one.weight


@pytest.fixture
def divided(tmp_path: Path) -> Iterator[nn.Module]:
    """As a run on one machine would leave it, if one machine divided anything."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "meeting"), 1), rank=0, world_size=1)
    model = Tied()
    rows = Rows.of(model.one.weight, init_device_mesh("cpu", (1,)))
    model.one.weight = nn.Parameter(rows.shown(model.one.weight), requires_grad=False)
    model.other.weight = model.one.weight
    yield model
    dist.destroy_process_group()


class Together:
    def __init__(self) -> None:
        self.met: list[str] = []

    def meet(self, what: str) -> bool:
        self.met.append(what)
        return False


@pytest.mark.parametrize("again", [True, False])
def test_rows_are_read_once_where_the_model_has_had_them(divided: nn.Module, again: bool) -> None:
    before: Any = divided.one.weight
    earlier, ranks = EarlierRows(divided), Together()
    bare = divided.one.weight
    assert bare is divided.other.weight
    assert bare.is_meta
    assert bare.shape == before.shape
    assert not bare.requires_grad
    assert "one.weight" in earlier
    assert "one.bias" not in earlier
    found = earlier.read("one.weight", {"one.weight"} if again else set(), ranks)  # type: ignore[arg-type]
    assert torch.equal(found, before.full_tensor())
    assert ranks.met == ([] if again else ["the rows of one.weight"])
    assert "one.weight" not in earlier
    earlier.put_back(divided)
    assert divided.one.weight is bare


def test_what_was_not_read_is_put_back(divided: nn.Module) -> None:
    before = divided.one.weight
    EarlierRows(divided).put_back(divided)
    assert divided.one.weight is before
    assert divided.other.weight is before


def test_other_machines_are_refused(divided: nn.Module) -> None:
    assert list(divided_by_run(divided)) == ["one.weight"]
    refuse_divided(divided, 1)
    with pytest.raises(ValueError, match=r"'one.weight' is a DTensor: .* among 1 machines"):
        refuse_divided(divided, 2)


def test_values_are_forgotten_everywhere() -> None:
    model = Tied()
    refuse_divided(model, 1)
    forget_values(model, ["one.weight"])
    assert model.one.weight is model.other.weight
    assert model.one.weight.is_meta
    assert not model.one.bias.is_meta
    assert not any(isinstance(each, DTensor) for each in model.parameters())
