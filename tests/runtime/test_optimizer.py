"""The optimizer step is the user's own: its state is measured, not touched, and its groups come back as they were."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_protrain import SplitAdamW
from lightning_protrain.runtime.optim.step import (
    ASSUMED_STATE_BYTES,
    check_one_device,
    fused_host_step,
    move_state_beside_parameters,
    reserve_states,
    state_bytes_per_element,
    steps_parameters_alone,
)

SHAPE = (32, 32)
Maker = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def optimizers() -> dict[str, Maker]:
    """Every class of torch.optim that this version has, with the options that change its state."""
    found: dict[str, Maker] = {}
    for name in torch.optim.__all__ if hasattr(torch.optim, "__all__") else dir(torch.optim):
        kind = getattr(torch.optim, name)
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            found[name] = lambda parameters, kind=kind: kind(parameters, lr=0.01)
    for name, kind, options in [
        ("SGD with momentum", torch.optim.SGD, {"momentum": 0.9}),
        ("Adam with amsgrad", torch.optim.Adam, {"amsgrad": True}),
        ("AdamW with foreach", torch.optim.AdamW, {"foreach": True}),
        ("AdamW fused", torch.optim.AdamW, {"fused": True}),
        ("RMSprop centered", torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
        ("Adam with a tensor as rate", torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    ]:
        found[name] = lambda parameters, kind=kind, options=options: kind(parameters, **{"lr": 0.01, **options})
    return found


OPTIMIZERS = optimizers()
MEASURED = sorted(set(OPTIMIZERS) - {"LBFGS"})


def with_gradient(sparse: bool = False) -> nn.Parameter:
    parameter = nn.Parameter(torch.randn(SHAPE))
    parameter.grad = torch.randn(SHAPE).to_sparse() if sparse else torch.randn(SHAPE)
    return parameter


def kept_bytes(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    state = optimizer.state[parameter].values()
    return sum(value.nbytes for value in state if isinstance(value, Tensor) and value.dim() > 0)


def test_every_class_of_pytorch_is_covered() -> None:
    expected = {"Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop"}
    assert expected | {"Rprop", "SGD", "LBFGS", "SparseAdam"} <= set(OPTIMIZERS)


@pytest.mark.parametrize("name", MEASURED)
def test_the_measured_state_is_that_of_a_real_step(name: str) -> None:
    parameter = with_gradient(sparse=name == "SparseAdam")
    optimizer = OPTIMIZERS[name]([parameter])
    measured = state_bytes_per_element([optimizer])
    optimizer.step()
    assert measured * parameter.numel() == kept_bytes(optimizer, parameter)
    assert state_bytes_per_element([optimizer]) == measured


def test_lbfgs_keeps_no_more_than_is_said() -> None:
    parameter = with_gradient()
    optimizer = torch.optim.LBFGS([parameter], history_size=3, max_iter=12)
    target = torch.randn(SHAPE)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (parameter - target).pow(4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    tensors: list[Tensor] = []
    for value in optimizer.state[parameter].values():
        tensors += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Tensor)]
    kept = sum(tensor.nbytes for tensor in tensors if tensor.numel() == parameter.numel())
    assert kept > 4 * parameter.nbytes
    assert kept <= state_bytes_per_element([optimizer]) * parameter.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_dtype_counts(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(SHAPE, dtype=dtype))
    assert state_bytes_per_element([torch.optim.Adam([parameter])]) == 2 * dtype.itemsize


@pytest.mark.parametrize(
    ("moments", "masters", "nbytes"),
    [
        ("float32", True, 10),
        ("bfloat16", True, 6),
        ("8bit", True, 4 + 8 / 256),
        ("float32", False, 8),
        ("bfloat16", False, 4),
        ("8bit", False, 2 + 8 / 256),
    ],
)
def test_split_masters_and_their_moments_are_measured(moments: Any, masters: bool, nbytes: float) -> None:
    parameter = nn.Parameter(torch.zeros(SHAPE, dtype=torch.bfloat16))
    optimizer = SplitAdamW([parameter], moments=moments, masters=masters)
    sums = 8 / parameter.numel() if masters else 0  # One for each page of 65,536 elements.
    assert state_bytes_per_element([optimizer]) == nbytes + sums
    assert not optimizer.state
    assert steps_parameters_alone(optimizer)


def test_a_class_derived_from_split_adamw_may_step_in_another_way() -> None:
    derived = type("Derived", (SplitAdamW,), {})
    assert not steps_parameters_alone(derived([nn.Parameter(torch.zeros(SHAPE))]))


def test_groups_and_optimizers_are_averaged_by_elements() -> None:
    small, large = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.zeros(30))
    both = torch.optim.SGD([{"params": [small], "momentum": 0.9}, {"params": [large]}], lr=0.1)
    assert state_bytes_per_element([both]) == 4 * 10 / 40
    assert state_bytes_per_element([both, torch.optim.Adam([large])]) == (4 * 10 + 8 * 30) / 70
    assert state_bytes_per_element([]) == 0.0


def test_an_optimizer_of_somebody_else_is_assumed() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        def step(self, closure: Any = None) -> None:
            raise AssertionError("not to be tried")

    assert state_bytes_per_element([Own([nn.Parameter(torch.zeros(3))])]) == ASSUMED_STATE_BYTES


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_reserved_memory_has_the_sizes_of_the_states_that_the_first_step_makes(kind: Any) -> None:
    here, streamed = (nn.Parameter(torch.ones(size)) for size in (5, 3))
    optimizer = kind([here, streamed])
    pieces = reserve_states(optimizer, state_bytes_per_element([optimizer]), [here])
    here.grad = torch.ones(5)
    optimizer.step()
    made = [value.nbytes for value in optimizer.state[here].values() if isinstance(value, torch.Tensor) and value.dim()]
    assert [piece.nbytes() for piece in pieces] == made
    assert reserve_states(optimizer, 8.0, [here]) == []  # It has its state.


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("stepped", [True, False])
def test_measuring_touches_nothing(name: str, stepped: bool) -> None:
    parameter = with_gradient(sparse=name == "SparseAdam")
    calls: list[str] = []
    optimizer = OPTIMIZERS[name]([parameter])
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    if stepped:
        optimizer.step()
        calls.clear()
    weights, groups = parameter.detach().clone(), [dict(group) for group in optimizer.param_groups]
    state = {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in optimizer.state[parameter].items()
    }
    held = dict(vars(optimizer))
    generator = torch.get_rng_state()
    state_bytes_per_element([optimizer])
    assert calls == []
    assert torch.equal(parameter, weights)
    assert optimizer.param_groups == groups
    assert vars(optimizer).keys() == held.keys()
    assert all(vars(optimizer)[key] is value for key, value in held.items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert list(optimizer.state[parameter]) == list(state)
    for key, value in state.items():
        now = optimizer.state[parameter][key]
        assert torch.equal(now, value) if isinstance(value, Tensor) else now == value


def test_measuring_calls_no_hook_on_all_optimizers() -> None:
    calls: list[str] = []
    handle = register_optimizer_step_pre_hook(lambda *_: calls.append("before"))
    try:
        state_bytes_per_element([torch.optim.AdamW([with_gradient()])])
    finally:
        handle.remove()
    assert calls == []


# --- the step itself ------------------------------------------------------------------------------------------------

FUSIBLE = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]


@pytest.mark.parametrize("kind", FUSIBLE)
def test_on_the_cpu_nothing_changes(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([with_gradient()], lr=0.01)
    groups = optimizer.param_groups
    with fused_host_step(optimizer, lambda: None, "cpu") as final:
        final()
        assert optimizer.param_groups is groups
        assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("kind", FUSIBLE)
def test_beside_a_gpu_the_host_part_is_fused(kind: type[torch.optim.Optimizer]) -> None:
    one, other = with_gradient(), with_gradient()
    optimizer = kind([{"params": [one]}, {"params": [other], "lr": 0.5, "fused": False}], lr=0.01)
    groups = optimizer.param_groups
    before = one.detach().clone()
    with fused_host_step(optimizer, lambda: None, "cuda") as final:
        final()
        seen = [dict(group) for group in optimizer.param_groups]
        optimizer.step()
    assert [(group["fused"], group["lr"], group["params"]) for group in seen] == [
        (True, 0.01, [one]),
        (False, 0.5, [other]),
    ]
    assert optimizer.param_groups is groups
    assert groups[0]["fused"] is None
    assert not torch.equal(one, before)


@pytest.mark.parametrize("kind", FUSIBLE)
def test_the_fused_step_does_the_same(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    results = []
    for device_type in ("cpu", "cuda"):
        torch.manual_seed(0)
        parameter = with_gradient()
        optimizer = kind([parameter], lr=0.01)
        for _ in range(3):
            with fused_host_step(optimizer, lambda: None, device_type) as final:
                optimizer.step(final)
        results.append((parameter, optimizer.state_dict()))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1]["param_groups"] == results[1][1]["param_groups"]
    assert results[0][1]["state"].keys() == results[1][1]["state"].keys()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": False}, {"fused": True}, {"differentiable": True}])
def test_a_choice_of_the_user_stays(options: dict[str, bool]) -> None:
    optimizer = torch.optim.AdamW([with_gradient()], **options)
    before = [dict(group) for group in optimizer.param_groups]
    with fused_host_step(optimizer, lambda: None, "cuda") as final:
        final()
        assert [dict(group) for group in optimizer.param_groups] == before


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adafactor])
def test_an_optimizer_without_a_fused_kernel_stays(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([with_gradient()])
    with fused_host_step(optimizer, lambda: None, "cuda") as final:
        optimizer.step(final)
        assert not any(group.get("fused") for group in optimizer.param_groups)


def test_complex_parameters_are_not_fused() -> None:
    parameter = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    parameter.grad = torch.randn(4, dtype=torch.complex64)
    optimizer = torch.optim.Adam([parameter])
    with fused_host_step(optimizer, lambda: None, "cuda") as final:
        optimizer.step(final)
        assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_are_stepped_beside_a_gpu(kind: type[torch.optim.Optimizer]) -> None:
    """The fused kernels take no sparse gradients, and which gradients come is known only after the closure."""
    results = []
    for device_type in ("cpu", "cuda"):
        torch.manual_seed(0)
        table = nn.Embedding(6, 4, sparse=True)
        optimizer = kind(table.parameters(), lr=0.1)

        def closure(table: nn.Embedding = table) -> Tensor:
            loss = table(torch.tensor([1, 1, 3])).square().sum()
            loss.backward()
            return loss

        with fused_host_step(optimizer, closure, device_type) as final:
            optimizer.step(final)
        results.append(table.weight.detach().clone())
    assert torch.equal(*results)


def test_groups_come_back_after_an_exception() -> None:
    optimizer = torch.optim.AdamW([with_gradient()])
    groups = optimizer.param_groups
    with pytest.raises(ZeroDivisionError), fused_host_step(optimizer, lambda: None, "cuda") as final:
        1 / len(final() or ())
    assert optimizer.param_groups is groups
    assert groups[0]["fused"] is None


class Elsewhere(nn.Parameter):
    """A parameter that says it lies on a GPU, but not to who would move its state there."""

    away = True
    device = property(lambda self: torch.device("cuda" if Elsewhere.away else "cpu"))  # type: ignore[assignment]


def mixed() -> list[dict[str, Any]]:
    """Two groups over parameters of the host and of a device, the device's first."""
    torch.manual_seed(0)
    kinds = [Elsewhere, nn.Parameter, Elsewhere, nn.Parameter]
    parameters = [kind(torch.randn(3, index + 1)) for index, kind in enumerate(kinds)]
    return [{"params": parameters[:3], "weight_decay": 0.1}, {"params": parameters[3:], "weight_decay": 0.0}]


def stepped(groups: list[dict[str, Any]], plain: bool, state: Any = None, steps: int = 2) -> torch.optim.Optimizer:
    """Return AdamW after some steps: fused on the host, or with PyTorch's defaults everywhere."""
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    if state is not None:
        Elsewhere.away = False
        optimizer.load_state_dict(copy.deepcopy(state))
        Elsewhere.away = True
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach().as_subclass(Tensor).clone()
        with fused_host_step(optimizer, lambda: None, "cpu" if plain else "cuda") as final:
            optimizer.step(final)
    return optimizer


def values(groups: list[dict[str, Any]]) -> list[Tensor]:
    return [p.detach().as_subclass(Tensor).clone() for group in groups for p in group["params"]]


@pytest.mark.parametrize("plain_first", [True, False])
def test_states_go_from_and_to_a_plain_optimizer(plain_first: bool) -> None:
    """Indices, order and settings are the user's, and each state goes to its own parameter."""
    runs = {}
    for plain in (True, False):
        groups = mixed()
        runs[plain] = (groups, stepped(groups, plain).state_dict())
    one, other = runs[plain_first][1], runs[not plain_first][1]
    assert one["param_groups"] == other["param_groups"]
    assert [group["params"] for group in one["param_groups"]] == [[0, 1, 2], [3]]
    assert {key: state.keys() for key, state in one["state"].items()} == {
        key: state.keys() for key, state in other["state"].items()
    }
    for key, state in one["state"].items():
        torch.testing.assert_close(
            state["exp_avg"].as_subclass(Tensor), other["state"][key]["exp_avg"].as_subclass(Tensor)
        )
    resumed = []
    for state in (one, other):
        groups = runs[True][0]
        before = values(groups)
        stepped(groups, not plain_first, state, steps=1)
        resumed.append(values(groups))
        with torch.no_grad():
            for parameter, value in zip([p for group in groups for p in group["params"]], before, strict=True):
                parameter.copy_(value)
    for expected, found in zip(*resumed, strict=True):
        torch.testing.assert_close(found, expected)


def test_hooks_on_the_step_see_the_groups_of_the_user() -> None:
    seen: list[Any] = []
    optimizer = torch.optim.AdamW(mixed(), lr=0.1)
    expected = optimizer.state_dict()["param_groups"]
    optimizer.register_step_pre_hook(lambda one, *_: seen.append(one.state_dict()["param_groups"]))
    optimizer.register_step_post_hook(lambda one, *_: seen.append(one.state_dict()["param_groups"]))
    elsewhere = {id(optimizer.param_groups[0]["params"][1])}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones(parameter.shape)
    with fused_host_step(optimizer, lambda: None, "cuda", lambda: elsewhere) as final:
        optimizer.step(final)
    assert seen == [expected, expected]
    assert len(optimizer._optimizer_step_post_hooks) == 1


def test_a_rate_set_inside_the_closure_stays() -> None:
    """`training_step` and `on_before_optimizer_step` run inside of `optimizer.step(closure)`."""
    parameter = with_gradient()
    optimizer = torch.optim.AdamW([parameter], lr=0.1)

    def closure() -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        return torch.zeros(())

    with fused_host_step(optimizer, closure, "cuda") as final:
        optimizer.step(final)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["fused"] is None


def test_state_goes_where_its_parameter_is() -> None:
    """The device here is `meta`, which stands for any other than the CPU."""
    host, away = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.Adam([host, away])
    for parameter in (host, away):
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(3), "name": "text"}
    optimizer.state["global"] = defaultdict(int)
    move_state_beside_parameters([optimizer])
    assert optimizer.state[host]["exp_avg"].device.type == "cpu"
    assert optimizer.state[away]["exp_avg"].device.type == "meta"
    assert optimizer.state[away]["step"].device.type == "cpu"
    assert torch.equal(optimizer.state[host]["exp_avg"], torch.ones(3))


def test_lbfgs_on_two_devices_is_refused() -> None:
    host, away = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, device="meta"))
    check_one_device([torch.optim.LBFGS([host]), torch.optim.Adam([host, away])])
    with pytest.raises(ValueError, match="LBFGS works on all parameters as one vector"):
        check_one_device([torch.optim.LBFGS([host, away])])
