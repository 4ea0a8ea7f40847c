"""An access to a watched parameter waits; the parameter stays the same object throughout."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.runtime.access_guard import NO_VALUES, AccessGuard, below_guard, can_be_watched


class Finish:
    """Ends the watch, and counts the requests to end it."""

    def __init__(self, *parameters: Tensor) -> None:
        self.parameters = parameters
        self.guard = AccessGuard(self)
        self.calls = 0
        self.touched: list[Tensor] = []

    def __call__(self, touched: Sequence[Tensor]) -> None:
        self.calls += 1
        self.touched += touched
        self.guard.unwatch(self.parameters)


def a_parameter() -> nn.Parameter:
    return nn.Parameter(torch.arange(4.0))


TOUCHES: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.norm(),
    "data": lambda p: p.data,
    "set data": lambda p: setattr(p, "data", torch.zeros(4)),
    "grad": lambda p: p.grad,
    "set grad": lambda p: setattr(p, "grad", None),
    "detach": lambda p: p.detach(),
    "version": lambda p: p._version,
    "address": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "repr": repr,
    "len": len,
    "index": lambda p: p[1],
    "array": lambda p: p.numpy(force=True),
    "sum with another": lambda p: torch.ones(4) + p,
    "in a list": lambda p: torch.stack([torch.ones(4), p]),
    "over lists": lambda p: torch._foreach_norm([torch.ones(2), p]),
    "functional": lambda p: nn.functional.linear(torch.ones(4), p),
    "in place": lambda p: p.data.add_(1),
    "copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "requires_grad": lambda p: p.requires_grad_(False),
    "hook": lambda p: p.register_hook(lambda gradient: gradient),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "clipping": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "zero_grad": lambda p: torch.optim.SGD([p]).zero_grad(),
    "state_dict": lambda p: module_of(p).state_dict(),
    "load_state_dict": lambda p: module_of(p).load_state_dict({"weight": torch.ones(4)}),
    "module in use": lambda p: module_of(p)(torch.ones(4)),
    "moved": lambda p: module_of(p).double(),
}


class Scale(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return self.weight * value


def module_of(parameter: nn.Parameter) -> nn.Module:
    module = Scale()
    module.weight = parameter
    return module


@pytest.mark.parametrize("touch", TOUCHES)
def test_every_touch_waits_once(touch: str) -> None:
    parameter, other = a_parameter(), a_parameter()
    expected = TOUCHES[touch](a_parameter())
    finish = Finish(parameter, other)
    finish.guard.watch([parameter, other])
    found = TOUCHES[touch](parameter)
    assert finish.calls == 1
    assert [id(each) for each in finish.touched] == [id(parameter)]
    assert type(parameter) is type(other) is nn.Parameter
    if isinstance(expected, Tensor):
        assert type(found) is type(expected)
        assert torch.equal(expected, found)


def test_meanwhile_it_is_the_same_parameter() -> None:
    parameter = a_parameter()
    module, optimizer = module_of(parameter), torch.optim.SGD([parameter])
    finish = Finish(parameter)
    finish.guard.watch([parameter])
    assert finish.guard.watches(parameter)
    assert isinstance(parameter, nn.Parameter)
    assert type(parameter).__name__ == "Parameter"
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    assert next(module.parameters()) is parameter
    assert module.weight is parameter
    assert optimizer.param_groups[0]["params"][0] is parameter
    assert {parameter: 1}[parameter] == 1
    assert finish.calls == 0
    finish.guard.unwatch([parameter])
    assert not finish.guard.watches(parameter)
    finish.guard.unwatch([parameter])
    assert type(parameter) is nn.Parameter


def test_the_runtime_passes_below() -> None:
    parameter = a_parameter()
    finish = Finish(parameter)
    finish.guard.watch([parameter])
    with below_guard(), torch.no_grad():
        parameter.mul_(2.0)
        parameter.grad = torch.ones(4)
        assert parameter.grad.sum() == 4
    assert finish.calls == 0
    finish.guard.unwatch([parameter])
    assert torch.equal(parameter, 2 * torch.arange(4.0))


def test_what_refuses_is_heard() -> None:
    parameter = a_parameter()

    def refuse(touched: Sequence[Tensor]) -> None:
        raise RuntimeError("not now")

    guard = AccessGuard(refuse)
    guard.watch([parameter])
    with pytest.raises(RuntimeError, match="not now"):
        parameter.norm()
    assert guard.watches(parameter)
    guard.unwatch([parameter])
    assert parameter.norm() > 0


class Labelled(nn.Parameter):
    """A parameter of a class of its own."""


@pytest.mark.parametrize(
    ("make", "can"), [(nn.Parameter, True), (lambda t: t, True), (lambda t: Labelled(t), False)], ids=["p", "t", "own"]
)
def test_only_plain_parameters_are_watched(make: Callable[[Tensor], Tensor], can: bool) -> None:
    assert can_be_watched(make(torch.ones(2))) is can


@pytest.mark.parametrize("name", ["dtype", "device", "shape", "ndim", "layout", "is_cuda", "is_leaf", "requires_grad"])
def test_what_describes_a_parameter_is_read_at_once(name: str) -> None:
    parameter = a_parameter()
    finish = Finish(parameter)
    finish.guard.watch([parameter])
    assert getattr(parameter, name) == getattr(a_parameter(), name)
    assert finish.calls == 0
    assert finish.guard.watches(parameter)
    finish.guard.unwatch([parameter])


# --- several guards ---------------------------------------------------------------------------------------------------


def two_guards(free: frozenset[Any] = frozenset()) -> tuple[AccessGuard, AccessGuard, list[str]]:
    """The second finds nothing in what is `free`; each leaves what is touched, and notes its name."""
    calls: list[str] = []

    def first(touched: Sequence[Tensor]) -> None:
        calls.append("first")
        one.unwatch(touched)

    def second(touched: Sequence[Tensor]) -> None:
        calls.append("second")
        other.unwatch(touched)

    one = AccessGuard(first)
    other = AccessGuard(second, free, beside=one)
    return one, other, calls


@pytest.mark.parametrize("first_out", [0, 1])
def test_guards_of_a_parameter_come_and_go_in_any_order(first_out: int) -> None:
    parameter, guards = a_parameter(), two_guards()[:2]
    for guard in guards:
        guard.watch([parameter])
    guards[first_out].unwatch([parameter])
    assert [guard.watches(parameter) for guard in guards] == [first_out == 1, first_out == 0]
    assert type(parameter) is not nn.Parameter
    guards[1 - first_out].unwatch([parameter])
    assert type(parameter) is nn.Parameter


def test_every_guard_is_told_of_what_it_watches() -> None:
    parameter, alone = a_parameter(), a_parameter()
    one, other, calls = two_guards()
    one.watch([parameter, alone])
    other.watch([parameter])
    torch.stack([torch.ones(4), parameter, alone])
    assert calls == ["first", "second"]
    assert type(parameter) is type(alone) is nn.Parameter


def test_what_one_guard_allows_another_may_not() -> None:
    parameter = a_parameter()
    one, other, calls = two_guards(NO_VALUES)
    one.watch([parameter])
    other.watch([parameter])
    assert parameter._version == 0
    assert calls == ["first"]
    assert other.watches(parameter)
    parameter.data.mul_(2)
    assert calls == ["first", "second"]


ALLOWED: dict[str, Callable[[nn.Parameter], Any]] = {
    "version": lambda p: p._version,
    "grad": lambda p: setattr(p, "grad", torch.ones(4)),
    "size": lambda p: (p.size(), p.numel(), p.dim(), p.stride(), p.element_size(), p.nbytes),
    "kind": lambda p: (p.is_floating_point(), torch.is_complex(p), p.is_sparse),
    "hook": lambda p: p.register_hook(lambda gradient: gradient),
    "requires_grad": lambda p: p.requires_grad_(False),
}


@pytest.mark.parametrize("touch", {**TOUCHES, **ALLOWED})
def test_values_and_their_memory_are_not_free(touch: str) -> None:
    parameter = a_parameter()
    finish = Finish(parameter)
    finish.guard = AccessGuard(finish, NO_VALUES)
    finish.guard.watch([parameter])
    allowed = touch in {*ALLOWED, "set grad", "clipping", "zero_grad"}
    (ALLOWED.get(touch) or TOUCHES[touch])(parameter)
    assert finish.calls == (0 if allowed else 1)
    finish.guard.unwatch([parameter])
    assert type(parameter) is nn.Parameter
