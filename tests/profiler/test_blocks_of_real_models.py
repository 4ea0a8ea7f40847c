from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_protrain.planner.memory import minimum_chunk_buffers
from lightning_protrain.planner.packing import pack_chunks
from lightning_protrain.profiler.blocks import describe_model, discover_blocks
from lightning_protrain.profiler.records import ModelLayout
from tests.profiler.models import CASES, Case


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


class Uses(TorchFunctionMode):
    """Records every operation on a parameter that no running unit needs."""

    def __init__(self, model: nn.Module, layout: ModelLayout) -> None:
        super().__init__()
        by_name = dict(model.named_parameters())
        self.names = {id(parameter): fqn for fqn, parameter in by_name.items()}
        self.running: list[frozenset[str]] = []
        self.seen: set[str] = set()
        self.outside: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # reading `.dtype` or `.shape` needs no data
            used = {self.names[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self.names}
            self.seen |= used
            self.outside |= used - set().union(*self.running)
        return func(*args, **(kwargs or {}))


@contextmanager
def running_units(model: nn.Module, layout: ModelLayout, uses: Uses) -> Iterator[None]:
    handles = []
    for unit in layout.units:
        needs = frozenset(unit.parameters)
        module = model.get_submodule(unit.name)
        handles.append(module.register_forward_pre_hook(lambda *_, needs=needs: uses.running.append(needs)))
        handles.append(module.register_forward_hook(lambda *_: uses.running.pop() and None))
    yield
    for handle in handles:
        handle.remove()


def test_every_parameter_is_used_while_a_unit_that_needs_it_runs(case: Case) -> None:
    model = case.build().eval()
    layout = describe_model(model)
    uses = Uses(model, layout)
    with torch.no_grad(), running_units(model, layout, uses), uses:
        model(**case.inputs())
    assert uses.outside == set()
    assert len(uses.seen) > len(uses.names) / 2
    assert uses.running == []


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_blocks_and_units_of_real_models(case: Case, where: str) -> None:
    with torch.device(where):
        model = case.build()
    layout = describe_model(model)
    assert [unit.name for unit in layout.blocks] == list(case.blocks)
    assert [unit.name for unit in layout.units if not unit.is_block] == list(case.others)
    assert sum(len(info.sites) > 1 for info in layout.parameters) == case.tied
    assert discover_blocks(model) == (() if case.blocks == [""] else tuple(case.blocks))


def test_nothing_is_lost_and_nothing_counted_twice(case: Case) -> None:
    model = case.build()
    layout = describe_model(model)
    names = [name for name, _ in model.named_modules()]
    parameters = dict(model.named_parameters())
    assert [info.fqn for info in layout.parameters] == list(parameters)
    assert sum(info.nbytes for info in layout.parameters) == sum(p.nbytes for p in model.parameters())
    assert layout.buffer_bytes == sum(buffer.nbytes for buffer in model.buffers())
    assert {fqn for unit in layout.units for fqn in unit.parameters} == set(parameters)
    assert sorted((unit.name for unit in layout.units), key=names.index) == [unit.name for unit in layout.units]
    for unit in layout.units:
        assert list(unit.parameters) == sorted(set(unit.parameters), key=list(parameters).index)
    for info in layout.parameters:
        assert all(model.get_parameter(site) is parameters[info.fqn] for site in info.sites)


def test_units_inside_are_named_by_those_around_them(case: Case) -> None:
    layout = describe_model(case.build())
    for outer in layout.units:
        prefix = f"{outer.name}." if outer.name else ""
        inside = {unit.name for unit in layout.units if unit.name.startswith(prefix)} - {outer.name}
        assert set(outer.encloses) == (inside if not outer.is_block else set())


@pytest.mark.parametrize(("name", "buffers"), [("llama", 1), ("llava", 2), ("siglip", 3), ("bert", 2), ("zamba2", 2)])
def test_fewest_buffers_of_real_models(name: str, buffers: int) -> None:
    layout = describe_model(CASES[name].build())
    assert minimum_chunk_buffers(layout, pack_chunks(layout)) == buffers
