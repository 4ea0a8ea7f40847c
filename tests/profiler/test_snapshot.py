"""All objects within reach of a root are restored, and no others are touched."""

from __future__ import annotations

import argparse
import functools
import random
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from lightning_protrain.profiler import profile
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.profiler.profile import MAX_ITEMS, unchanged


class Plain:
    """Holds anything."""

    shared = 0

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def count(self) -> int:
        self.shared += 1
        return self.shared


class Slotted:
    """An object with slots, of which one is private."""

    __slots__ = ("__own", "value")

    def __init__(self, value: Any) -> None:
        self.value = self.__own = value

    def change(self) -> None:
        self.value, self.__own = 1, 2

    def state(self) -> tuple[Any, Any]:
        return self.value, self.__own


class Named(NamedTuple):
    """A tuple of a class of its own."""

    value: Any


def draws(generator: Any) -> Any:
    """Draw numbers that show the position of a generator."""
    if isinstance(generator, torch.Generator):
        return torch.randint(1 << 40, (3,), generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.random() for _ in range(3)]
    if isinstance(generator, np.random.BitGenerator):
        return generator.random_raw(3).tolist()
    return generator.normal(size=3).tolist()


GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "python": lambda: random.Random(1),
    "numpy": lambda: np.random.default_rng(1),
    "bits": lambda: np.random.Philox(1),
    "old": lambda: np.random.RandomState(1),
}


def _method(value: Any) -> Any:
    return Plain(value=value).count


def _default(value: Any) -> Any:
    def function(held: Any = value, *, also: Any = None) -> Any:
        return held

    return function


def _keyword(value: Any) -> Any:
    def function(*, held: Any = value) -> Any:
        return held

    return function


def _closure(value: Any) -> Any:
    return lambda: value


def _marked(value: Any) -> Any:
    def function() -> None:
        """Holds an attribute."""

    function.mark = value
    return function


def _module(value: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].register_forward_hook(lambda *_: value)
    return module


def _data(value: Any) -> L.LightningDataModule:
    data = L.LightningDataModule()
    data.held = value
    return data


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda value: value,
    "list": lambda value: [[value]],
    "tuple": lambda value: ((value,),),
    "named tuple": lambda value: Named(value),
    "dict": lambda value: {1: {"x": value}},
    "key": lambda value: {value: 1},
    "default dict": lambda value: defaultdict(int, x=value),
    "deque": lambda value: deque([value]),
    "set": lambda value: {frozenset([value])},
    "user dict": lambda value: UserDict(x=value),
    "object": lambda value: Plain(inner=Plain(value=value)),
    "slots": Slotted,
    "name space": lambda value: SimpleNamespace(value=value),
    "arguments": lambda value: argparse.Namespace(value=value),
    "partial": lambda value: functools.partial(print, [value], end=""),
    "partial keyword": lambda value: functools.partial(print, end=value),
    "method": _method,
    "default": _default,
    "keyword": _keyword,
    "closure": _closure,
    "attribute of a function": _marked,
    "hook of a module": _module,
    "collate_fn": lambda value: DataLoader(range(3), collate_fn=functools.partial(_default, value)),
    "sampler": lambda value: DataLoader(range(3), sampler=RandomSampler(range(3), generator=value)),
    "dataset": lambda value: DataLoader(Plain(inner=value, __len__=lambda: 1), sampler=[0]),
    "data module": _data,
}


@pytest.mark.parametrize(
    ("kind", "holder"), [*((kind, "object") for kind in GENERATORS), *(("torch", holder) for holder in HOLDERS)]
)
def test_generators_are_put_back(kind: str, holder: str) -> None:
    generator = GENERATORS[kind]()
    draws(generator)
    expected = draws(generator)
    generator = GENERATORS[kind]()
    draws(generator)
    root = HOLDERS[holder](generator)
    with unchanged(root):
        assert draws(generator) == expected
    assert draws(generator) == expected


@pytest.mark.parametrize("holder", HOLDERS)
def test_counters_are_put_back(holder: str) -> None:
    held = Plain(more=[1])
    root = HOLDERS[holder](held)

    def change() -> None:
        with unchanged(None, root):
            assert held.count() == 1
            held.new, held.more = held.more, [2]
            held.new.append(3)
            raise KeyError

    with pytest.raises(KeyError):
        change()
    assert vars(held) == {"more": [1]}
    assert Plain.shared == 0


CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "list": (lambda: [3, 1], lambda held: held.sort()),
    "long list": (lambda: list(range(2 * MAX_ITEMS)), lambda held: held.pop()),
    "dict": (lambda: {"a": 1, "b": 2}, lambda held: held.update(a=held.pop("a"))),
    "value": (lambda: {"a": 1, "b": 2}, lambda held: held.update(b=3)),
    "ordered": (lambda: OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
    "default": (lambda: defaultdict(list, a=1), lambda held: held["b"]),
    "counter": (lambda: Counter("aab"), lambda held: held.update("abc")),
    "set": (lambda: {1, 2}, lambda held: held.add(3)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda held: held.append(3)),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_are_put_back(name: str) -> None:
    make, change = CONTAINERS[name]
    held = make()
    with unchanged(Plain(held=held)):
        change(held)
        assert held != make() or list(held) != list(make())
    assert held == make()
    assert list(held) == list(make())
    assert type(held) is type(make())


def test_slots_are_put_back() -> None:
    held = Slotted(5)
    with unchanged(held):
        held.change()
        assert held.state() == (1, 2)
        del held.value
    assert held.state() == (5, 5)


def test_variables_of_a_closure_are_put_back() -> None:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    with unchanged(Plain(step=step)):
        assert step() == 1
    assert count == 0


def test_what_refers_to_itself_ends() -> None:
    held = Plain()
    held.me = [held, {"me": held}]
    with unchanged(held):
        held.me.append(1)
    assert len(held.me) == 2


class Loop(L.Callback):
    """A callback: objects that only the Trainer holds are not restored."""

    def __init__(self) -> None:
        self.seen = [0]


def test_the_trainer_is_not_walked() -> None:
    module, callback = L.LightningModule(), Loop()
    module.trainer = L.Trainer(accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False)
    with unchanged(module):
        callback.seen.append(1)
        module.trainer.fit_loop.min_epochs = 7
        module.more = 1
    assert callback.seen == [0, 1]
    assert module.trainer.fit_loop.min_epochs == 7
    assert not hasattr(module, "more")


def test_what_is_out_of_reach_is_left_as_it_becomes() -> None:
    tensor, array, numbers = torch.zeros(1), np.zeros(1), iter(range(3))
    data = [Plain() for _ in range(MAX_ITEMS + 1)]
    gone = weakref.proxy(Plain())
    with unchanged(Plain(tensor=tensor, array=array, numbers=numbers, data=data, gone=gone)):
        tensor += 1
        array += 1
        next(numbers)
        data[0].count()
    assert (tensor.item(), array.item(), next(numbers), data[0].shared) == (1, 1, 1, 1)


def test_the_walk_ends_in_a_large_heap() -> None:
    def tree(depth: int) -> Plain:
        return Plain(inner=[tree(depth - 1) for _ in range(10)]) if depth else Plain()

    root = tree(5)
    with unchanged(root):
        root.inner.clear()
        root.count()
    assert len(root.inner) == 10
    assert root.shared == 0


class Attached:
    """An object that user code attaches to a parameter."""

    def __init__(self) -> None:
        self.scale: torch.Tensor | None = torch.ones(1)


def test_what_is_attached_to_a_tensor_is_put_back() -> None:
    module = nn.Linear(2, 2)
    scale, state = torch.ones(2), Attached()
    module.weight.scale, module.weight.state = scale, state  # type: ignore[assignment]
    inner = state.scale
    with unchanged(module):
        module.weight.scale, module.weight.state = None, None  # type: ignore[assignment]
        state.scale = None
        module.weight.more = 1  # type: ignore[assignment]
    assert module.weight.scale is scale
    assert module.weight.state is state
    assert state.scale is inner
    assert not hasattr(module.weight, "more")


def test_every_module_of_a_large_model_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "MAX_OBJECTS", 100)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(20)))
    profile.profile_model(model, describe_model(model), lambda: model(torch.ones(1, 2)).sum())
    assert not any("forward" in vars(module) for module in model.modules())
