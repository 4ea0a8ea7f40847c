"""Applying a plan changes no name and no object; removing it leaves nothing; what is added later is refused."""

from __future__ import annotations

import ctypes
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.device.host import HostMemory
from lightning_protrain.profiler.blocks import describe_model
from lightning_protrain.runtime.apply import RunOptions, Runtime, apply_plan, refuse_additions
from lightning_protrain.runtime.optim.async_step import Overlap
from tests.runtime import overlapped
from tests.runtime.applied import (
    PLANS,
    WIDTH,
    Applied,
    Block,
    Net,
    applied,
    assert_parity,
    batches,
    differences,
    each_plan,
    mean_square,
    train,
)
from tests.runtime.low_precision import low_plan
from tests.runtime.swapped import PLANS as SWAPPED
from tests.support.models import _llama
from tests.support.plans import half, place, preset

ALL = {**PLANS, **{f"swaps, {name}": plan for name, plan in SWAPPED.items()}}


class Locks:
    """Page-locking that only counts; `broken` addresses cannot be unlocked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.broken = False

    def lock(self, address: int, size: int) -> bool:
        assert address not in self.locked
        self.locked[address] = size
        return True

    def unlock(self, address: int) -> None:
        if self.broken:
            raise RuntimeError(f"cannot unlock {address}")
        del self.locked[address]


def locking(model: nn.Module, make: Any = PLANS["kept"]) -> tuple[Runtime, CPUDevice, Locks]:
    locks = Locks()
    device = CPUDevice(torch.device("cpu"), host=HostMemory(locks.lock, locks.unlock))
    return (
        apply_plan(model, make(model), describe_model(model), device, RunOptions(lambda sentence: None)),
        device,
        locks,
    )


def left_behind(model: nn.Module) -> list[str]:
    """Every hook and attribute that a plan has put on the model."""
    found = [f"{name}.forward" for name, module in model.named_modules() if "forward" in vars(module)]
    for name, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(parameter, kind):
                found.append(f"{name}.{kind}")
    for name, module in model.named_modules():
        for kind, hooks in vars(module).items():
            if kind.endswith("_hooks") and hooks:
                found.append(f"{name}.{kind}")
    return found


@each_plan
def test_no_name_and_no_object_changes(make: Any) -> None:
    model = Net()
    modules, parameters = list(model.named_modules()), list(model.named_parameters())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with applied(model, make) as state:
        for moment in ("applied", "after a step"):
            assert list(model.named_modules()) == modules, moment
            assert [(name, id(p)) for name, p in model.named_parameters()] == [(n, id(p)) for n, p in parameters]
            assert differences(values, dict(model.state_dict())) == []
            state.step(mean_square, model, batches()[0], 0).backward()
    assert list(model.named_modules()) == modules
    assert [(name, id(p)) for name, p in model.named_parameters()] == [(n, id(p)) for n, p in parameters]


@each_plan
def test_removal_leaves_nothing(make: Any) -> None:
    model = Net()
    assert left_behind(model) == []
    with applied(model, make) as state:
        assert left_behind(model)
        train(model, mean_square, state)
        trained = {name: value.clone() for name, value in model.state_dict().items()}
    assert left_behind(model) == []
    assert differences(trained, dict(model.state_dict())) == []
    assert state.device.counters.live_bytes == 0
    state.runtime.remove()
    assert left_behind(model) == []
    assert torch.isfinite(mean_square(model, batches()[0], 0))


def test_hooks_of_the_user_survive_removal() -> None:
    calls: list[str] = []
    model = Net()
    weight = model.blocks[0].up.weight
    handles = [weight.register_hook(lambda gradient: calls.append("gradient"))]
    with applied(model) as state:
        handles.append(weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated")))
        handles.append(model.blocks[0].register_forward_hook(lambda *_: calls.append("forward")))
        state.step(mean_square, model, batches()[0], 0).backward()
    assert calls == ["forward", "gradient", "accumulated"]
    mean_square(model, batches()[0], 0).backward()
    assert calls == 2 * ["forward", "gradient", "accumulated"]
    for handle in handles:
        handle.remove()
    assert left_behind(model) == []


@each_plan
def test_a_model_is_applied_and_removed_again_and_again(make: Any) -> None:
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    model = Net()
    for _ in range(3):
        with applied(model, make) as state:
            assert differences(train(plain, mean_square), train(model, mean_square, state)) == []


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's collector of cycles, as it runs only now and then."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("overlap", [Overlap.OFF, Overlap.BACKWARD])
@pytest.mark.parametrize("name", ALL)
def test_nobody_holds_an_old_runtime(name: str, overlap: Overlap) -> None:
    model = Net()
    with uncollected():
        with applied(model, ALL[name]) as state:
            overlapped.train(model, state, overlap, norm=0.5 if overlap is Overlap.OFF else None)
        held = [weakref.ref(part) for part in (state.runtime, state.device, *state.runtime.async_step._chunks)]
        del state
        assert [reference() for reference in held if reference() is not None] == []


def resident_bytes() -> int:
    """Resident memory of this process after malloc has returned what is free, bytes."""
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    return int(re.search(r"Rss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="only Linux says what is resident")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_placements_one_after_another_keep_no_copy_of_the_weights(dtype: str) -> None:
    """Each placement took the memory of its streamed weights, until Python's collector happened to run."""
    width = 1 << 10
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
    layout = describe_model(model)
    if dtype == "bfloat16":
        layout = layout.streaming(frozenset(name for name, _ in model.named_parameters()), dtype)
    plan, held = low_plan(model, layout), list[int]()
    with uncollected():
        for _ in range(5):
            device = CPUDevice(torch.device("cpu"))
            runtime = apply_plan(model, plan, layout, device, RunOptions(lambda sentence: None))
            with torch.autocast("cpu", torch.bfloat16, dtype == "bfloat16", cache_enabled=False):
                runtime.run_step(model, (torch.ones(1, width),), {}, training=False)
            runtime.remove()
            held.append(resident_bytes())
    streamed = sum(chunk.nbytes for chunk in plan.chunks)
    assert streamed == 8 * width**2 * (2 if dtype == "bfloat16" else 4)
    assert held[-1] - held[0] < streamed


def test_applying_twice_is_refused() -> None:
    model = Net()
    with applied(model) as state, pytest.raises(ValueError, match="already"):
        apply_plan(model, state.plan, describe_model(model), CPUDevice(torch.device("cpu")), RunOptions(print))


COMPILED: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "a block": (r"'blocks\.1'", lambda model: model.blocks[1].compile(backend="eager")),
    "a part of the root": ("'head'", lambda model: model.head.compile(backend="eager")),
    "the model": ("'Net'", lambda model: model.compile(backend="eager")),
}


@pytest.mark.parametrize("what", COMPILED)
@pytest.mark.parametrize("make", [PLANS["kept"], PLANS["checkpointed"], SWAPPED["swapped"]])
def test_what_is_streamed_or_swapped_may_not_be_compiled(what: str, make: Any) -> None:
    model = Net()
    name, change = COMPILED[what]
    change(model)
    with pytest.raises(ValueError, match=rf'{name} is compiled .*plan="resident"'), applied(model, make):
        pass
    assert left_behind(model) == []


def test_what_stays_on_the_device_may_be_compiled() -> None:
    model = Net()
    model.blocks[1].compile(backend="eager")
    with applied(model, lambda module: place(module, resident=lambda index: True)) as state:
        assert state.runtime.num_hooks == 0


@pytest.mark.parametrize(("compiled", "intercepted"), [(False, True), (True, False)])
def test_the_first_unit_is_intercepted_unless_it_is_compiled(compiled: bool, intercepted: bool) -> None:
    model = Net()
    if compiled:
        model.inp.compile(backend="eager")
    with applied(model, half):
        assert ("forward" in vars(model.inp)) is intercepted


def test_page_locks_are_given_back() -> None:
    model = Net()
    runtime, device, locks = locking(model)
    runtime.run_step(mean_square, (model, batches()[0], 0), {}, True).backward()
    assert device.host.locked_bytes == sum(locks.locked.values()) > 0
    runtime.remove()
    assert device.host.locked_bytes == 0
    assert locks.locked == {}


def test_a_removal_that_fails_raises_and_can_be_tried_again() -> None:
    model = Net()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    runtime, device, locks = locking(model)
    locks.broken = True
    with pytest.raises(RuntimeError, match="cannot unlock"):
        runtime.remove()
    assert left_behind(model) == []
    locks.broken = False
    runtime.remove()
    assert device.host.locked_bytes == 0
    assert differences(values, dict(model.state_dict())) == []


def test_removal_in_the_middle_of_a_step() -> None:
    model = Net()
    objects = dict(model.named_parameters())
    with applied(model) as state:
        loss = state.step(mean_square, model, batches()[0], 0)
    assert dict(model.named_parameters()).items() == objects.items()
    assert left_behind(model) == []
    del loss


def test_nothing_lives_on() -> None:
    model = Net()
    held: list[weakref.ref[Any]] = []
    state: Applied | None
    for _ in range(20):
        with applied(model, PLANS["offload"]) as state:
            train(model, mean_square, state, num_steps=1)
            held += [weakref.ref(chunk) for chunk in state.chunks]
            held += [weakref.ref(state.runtime._executor), weakref.ref(state.chunks[0].params[0].device_param)]
        state = None
    gc.collect()
    assert [reference for reference in held if reference() is not None] == []


def test_host_memory_does_not_grow_over_cycles() -> None:
    model = Net()
    allocated = []
    for _ in range(20):
        with applied(model) as state:
            train(model, mean_square, state, num_steps=2)
            allocated.append(state.device.host.allocated_bytes)
        model.zero_grad()
    assert len(set(allocated)) == 1


def test_a_resident_plan_attaches_nothing() -> None:
    model = Net()
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    with applied(model, lambda module: preset(module, "resident")) as state:
        assert left_behind(model) == []
        assert state.runtime.num_hooks == 0
        state.step(mean_square, model, batches()[0], 0).backward()
        assert state.device.counters.uploads == 0
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers


def test_resident_blocks_may_be_checkpointed() -> None:
    make = lambda model: place(model, resident=lambda index: True, checkpointed=lambda index: True)  # noqa: E731
    state = assert_parity(Net, make)
    assert state.device.counters.uploads == 0
    with applied(Net(), make) as state:
        assert state.runtime.num_hooks == 4


@pytest.mark.parametrize("num_resident", range(8))
def test_any_number_of_resident_chunks(num_resident: int) -> None:
    assert_parity(Net, lambda model: place(model, resident=lambda index: index < num_resident))


def test_parameters_without_values_are_refused() -> None:
    model = Net()
    plan, layout = PLANS["kept"](model), describe_model(model)
    model.blocks[1].up.to("meta")
    with pytest.raises(ValueError, match=r"'blocks\.1\.up\.weight' is on the meta device"):
        apply_plan(model, plan, layout, CPUDevice(torch.device("cpu")), RunOptions(print))
    assert left_behind(model) == []


def test_steps_return_what_the_function_returns() -> None:
    with applied(Net()) as state:
        assert state.step(lambda: None) is None
        assert state.step(lambda: {"loss": 3}, training=False) == {"loss": 3}
        with pytest.raises(KeyError, match="inside"):
            state.step(lambda: {}["inside"])
        assert state.step(lambda: state.step(lambda: "a step in a step")) == "a step in a step"


def test_gradients_that_were_there_before_are_kept() -> None:
    gradients = []
    for streamed in (True, False):
        torch.manual_seed(0)
        model = Net()
        mean_square(model, batches()[0], 0).backward()
        if streamed:
            with applied(model) as state:
                state.step(mean_square, model, batches()[1], 1).backward()
        else:
            mean_square(model, batches()[1], 1).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


class Own(nn.Module):
    """A model without blocks, whose own parameter is used in the step as well."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))
        self.layer = nn.Linear(WIDTH, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden)


def with_temperature(model: Own, batch: Tensor, index: int) -> Tensor:
    return (model(batch) / model.temperature).square().mean() + model.temperature.log()


def test_the_roots_own_parameters_are_live_throughout_a_step() -> None:
    assert_parity(Own, lambda module: preset(module, "offload"), with_temperature, accumulate=2)


class Instance(nn.Module):
    """A module whose forward is an attribute of the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.forward = lambda hidden: self.inner[1](self.inner[0](hidden * self.scale))


def test_a_forward_of_the_instance_makes_a_module_callable() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.instance = Instance()

        def forward(self, hidden: Tensor) -> Tensor:
            return self.instance(hidden)

    assert_parity(Outer, PLANS["kept"])


def test_buffers_stay_the_objects_they_are_on_the_cpu() -> None:
    class Buffered(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("none", None)

        def forward(self, hidden: Tensor) -> Tensor:
            self.count += 1
            return super().forward(hidden)

    model = Net([Buffered(), Buffered()])
    count = model.blocks[0].count
    with applied(model, PLANS["checkpointed"]) as state:
        train(model, mean_square, state)
    assert model.blocks[0].count is count
    assert float(count) == 4


def add_attribute(model: Net) -> None:
    model.extra = nn.Linear(2, 2)


def add_inside(model: Net) -> None:
    model.blocks[0].add_module("extra", nn.Linear(2, 2))


def append(model: Net) -> None:
    model.blocks.append(Block())


def replace_child(model: Net) -> None:
    model.blocks[1].up = nn.Linear(2, 2)


@pytest.mark.parametrize("add", [add_attribute, add_inside, append, replace_child])
def test_what_has_new_weights_is_refused_by_name_and_is_not_there(add: Callable[[Net], None]) -> None:
    model = Net()
    before = list(model.state_dict())
    handle = refuse_additions(model)
    with pytest.raises(ValueError, match=r"'(extra|blocks\.0\.extra|blocks\.4|blocks\.1\.up)' \((Linear|Block), with"):
        add(model)
    handle.remove()
    assert list(model.state_dict()) == before
    add(model)
    assert model.state_dict()


def test_anything_else_may_change() -> None:
    model, other = Net(), Net()
    handle = refuse_additions(model)
    model.activation = nn.Tanh()
    model.alias = model.blocks[0]
    model.holder = nn.ModuleList([model.head])
    other.extra = nn.Linear(2, 2)
    model.note = "text"
    model.blocks[0].up = None  # type: ignore[assignment]
    handle.remove()
    assert "extra.weight" in other.state_dict()


def test_an_adapter_is_added_before_or_after_a_run_but_not_within() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(_llama(2, tied=False), config)
    with applied(model, PLANS["kept"]) as state:
        with pytest.raises(ValueError, match=r"q_proj\.lora_A\.second.*is added while a plan is applied"):
            model.add_adapter("second", config)
        assert state.num_live == 0
    model = peft.get_peft_model(_llama(2, tied=False), config)
    with applied(model, PLANS["kept"]):
        pass
    model.add_adapter("second", config)
    assert any("second" in name for name, _ in model.named_parameters())
