"""The rules of groups, and gradients that are clipped in the tiles: bitwise what passes of their own leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer

from lightning_protrain.runtime.optim import fused, host_step
from lightning_protrain.runtime.optim.fused import LINE, Clip, FusedRule
from lightning_protrain.runtime.optim.host_step import HostStep, ParamUpdate, hyperparameters

CLASSES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (AdamW, {}),
    (Adam, {"amsgrad": True}),
    (SGD, {"momentum": 0.9}),
    (Adagrad, {}),
    (NAdam, {}),  # takes its own step
    (AdamW, {"foreach": True}),  # the same
]
CLIPS: dict[str, Callable[[], Clip]] = {
    "coefficient": lambda: Clip(coefficient=torch.tensor(0.3)),
    "bound": lambda: Clip(bound=0.1),
    "bound of zero": lambda: Clip(bound=0.0),
    "both": lambda: Clip(0.5, torch.tensor(0.7)),
    "not a number": lambda: Clip(coefficient=torch.tensor(torch.nan)),
}


@pytest.mark.parametrize(
    ("name", "optimizer", "states"),
    [
        ("adam", AdamW, ("exp_avg", "exp_avg_sq")),
        ("sgd", SGD, ()),
        ("adagrad", Adagrad, ("sum",)),
    ],
)
def test_the_rule_of_a_group(name: str, optimizer: type[Optimizer], states: tuple[str, ...]) -> None:
    group = hyperparameters(optimizer([nn.Parameter(torch.zeros(1))], lr=0.5).param_groups[0])
    rule = FusedRule.of(name, group)
    assert rule.states == states
    assert rule.settings.lr == 0.5
    assert rule.settings.weight_decay == group["weight_decay"]
    assert rule.settings.maximize is False


@pytest.mark.parametrize("name", ["_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_", "_foreach_mul_"])
def test_torchscript_drops_no_kernel(name: str) -> None:
    """It takes a kernel whose lists nobody reads for dead code, and then nothing is ever stepped."""
    script = fused.without_lock(fused.walk)
    assert f"aten::{name}(" in str(script.inlined_graph)  # type: ignore[attr-defined]


# --- clipping ---------------------------------------------------------------------------------------------------------


def clip_in_passes(clip: Clip, parameters: list[nn.Parameter]) -> None:
    if clip.bound is not None:
        torch.nn.utils.clip_grad_value_(parameters, clip.bound)
    for parameter in parameters if clip.coefficient is not None else ():
        assert parameter.grad is not None
        parameter.grad.mul_(clip.coefficient)


def same(found: Tensor, expected: Tensor) -> bool:
    """Bit for bit, with whatever is no number."""
    return torch.equal(found.view(torch.int32), expected.view(torch.int32))


@settings(max_examples=60, deadline=None)
@given(
    case=st.sampled_from(CLASSES),
    clip=st.sampled_from(sorted(CLIPS)),
    sizes=st.lists(st.sampled_from([0, 1, LINE, 3 * LINE + 5, 1000, 4099]), min_size=1, max_size=5),
    layout=st.sampled_from(["two threads", "one thread", "large tiles", "without TorchScript"]),
    copied=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_gradients_are_clipped_in_place(
    case: Any, clip: str, sizes: list[int], layout: str, copied: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    kind, options = case
    ours = [nn.Parameter(torch.randn(size)) for size in sizes]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    plain = options | ({"fused": True} if kind is not NAdam and not options.get("foreach") else {})
    optimizer, peer = kind(ours, lr=0.01, **options), kind(theirs, lr=0.01, **plain)
    host = HostStep(2 if layout == "two threads" else 1, tile_bytes=(4096 if layout == "large tiles" else LINE) * 4)
    if layout == "without TorchScript":
        host._walk = fused.walk
    try:
        for _ in range(2):
            clipping, updates = CLIPS[clip](), []
            for one, other in zip(ours, theirs, strict=True):
                one.grad = torch.randn_like(one)
                other.grad = one.grad.clone()
                low = torch.empty_like(one, dtype=torch.bfloat16, requires_grad=False) if copied else None
                updates.append(ParamUpdate(one, one.grad, low))
            clip_in_passes(clipping, theirs)
            peer.step()
            host.step(optimizer, hyperparameters(optimizer.param_groups[0]), updates, clipping)
            for update, other in zip(updates, theirs, strict=True):
                assert other.grad is not None
                assert same(update.gradient, other.grad)
                assert same(update.parameter.detach(), other.detach())
                if update.copy is not None and clip != "not a number":
                    assert torch.equal(update.copy, other.detach().bfloat16())
    finally:
        host.close()


def a_view(gradient: Tensor) -> Tensor:
    return torch.stack([gradient, gradient], -1)[..., 0]


@pytest.mark.parametrize("layout", [a_view, lambda gradient: gradient.t().contiguous().t()])
@pytest.mark.parametrize("clip", [name for name in CLIPS if name != "not a number"])
def test_gradients_that_do_not_lie_like_the_weight(clip: str, layout: Callable[[Tensor], Tensor]) -> None:
    """The kernel reads a copy of them, but they themselves are to be clipped, and once."""
    ours, theirs = nn.Parameter(torch.ones(9, 30)), nn.Parameter(torch.ones(9, 30))
    theirs.grad = torch.randn(9, 30)
    optimizer, peer = AdamW([ours]), AdamW([theirs], fused=True)
    gradient = layout(theirs.grad.clone())
    assert gradient.stride() != ours.stride()
    host = HostStep(1)
    host.step(optimizer, hyperparameters(optimizer.param_groups[0]), [ParamUpdate(ours, gradient)], CLIPS[clip]())
    clip_in_passes(CLIPS[clip](), [theirs])
    peer.step()
    assert same(gradient.contiguous(), theirs.grad)
    assert same(ours.detach(), theirs.detach())


@pytest.mark.parametrize("strides", ["alike", "others"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_low_precision_are_scaled_in_that_of_their_weights(dtype: torch.dtype, strides: str) -> None:
    weight = torch.ones(3 * LINE + 5, 2)
    ours, theirs = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    gradient, coefficient = torch.randn_like(weight).to(dtype), torch.tensor(0.3)
    theirs.grad = gradient.float().mul_(coefficient)
    given = gradient.clone() if strides == "alike" else gradient.t().contiguous().t()
    optimizer, peer = AdamW([ours]), AdamW([theirs], fused=True)
    clip = Clip(coefficient=coefficient)
    host = HostStep(1, tile_bytes=LINE * 4)
    host.step(optimizer, hyperparameters(optimizer.param_groups[0]), [ParamUpdate(ours, given)], clip)
    peer.step()
    assert torch.equal(given, gradient)
    assert same(ours.detach(), theirs.detach())


def test_a_sparse_gradient_is_scaled_in_a_pass_of_its_own() -> None:
    table = nn.Parameter(torch.ones(4, 3))
    gradient = torch.sparse_coo_tensor([[1]], torch.ones(1, 3), (4, 3), check_invariants=True)
    optimizer = SGD([table], lr=1.0)
    clip = Clip(coefficient=torch.tensor(0.5))
    HostStep(1).step(optimizer, hyperparameters(optimizer.param_groups[0]), [ParamUpdate(table, gradient)], clip)
    assert table.tolist() == [[1.0] * 3, [0.5] * 3, [1.0] * 3, [1.0] * 3]
    assert gradient.to_dense()[1].tolist() == [0.5] * 3


@pytest.mark.parametrize("bug", ["twice", "never"])
def test_a_wrong_number_of_scalings_would_be_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bugs."""
    own, ours = fused.Clip.arguments.fget, nn.Parameter(torch.ones(3 * LINE))  # type: ignore[attr-defined]
    monkeypatch.setattr(Clip, "arguments", property(lambda self: (own(self)[0], own(self)[1] * (2 * (bug == "twice")))))
    gradient, optimizer = torch.full_like(ours, 4.0), SGD([ours], lr=1.0)
    clip = Clip(coefficient=torch.tensor(0.5))
    HostStep(1).step(optimizer, hyperparameters(optimizer.param_groups[0]), [ParamUpdate(ours, gradient)], clip)
    assert not torch.equal(gradient, torch.full_like(ours, 2.0))


def test_nothing_to_clip_is_false() -> None:
    assert [bool(Clip()), bool(Clip(bound=0.0)), bool(Clip(coefficient=torch.tensor(1.0)))] == [False, True, True]


# --- nothing is kept from one step to the next ------------------------------------------------------------------------


def load_state(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    for value in optimizer.state[parameter].values():
        value.mul_(2)


def repoint_data(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    parameter.data = parameter.detach() * 2


def repoint_state(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    state = optimizer.state[parameter]
    state["exp_avg"].data = state["exp_avg"] * 3
    state["exp_avg_sq"] = state["exp_avg_sq"] * 2


def delete_state(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    del optimizer.state[parameter]


def change_options(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    optimizer.param_groups[0].update(lr=0.5, betas=(0.5, 0.6), weight_decay=0.3, maximize=True)


def change_one_number(optimizer: Optimizer, parameter: nn.Parameter) -> None:
    optimizer.param_groups[0].update(eps=1e-3)


CHANGES = [load_state, repoint_data, repoint_state, delete_state, change_options, change_one_number]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_between_steps_counts(
    change: Callable[[Optimizer, nn.Parameter], None], threads: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(size)) for size in (1000, 77, 5000)]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimizer, peer = AdamW(ours, lr=0.01), AdamW(theirs, lr=0.01, fused=True)
    host = HostStep(threads, tile_bytes=host_step.LINE * 4)
    try:
        for step in range(4):
            gradients = [torch.randn_like(parameter).to(dtype) for parameter in ours]
            for parameter, gradient in zip(theirs, gradients, strict=True):
                parameter.grad = gradient.float()
            peer.step()
            updates = [ParamUpdate(parameter, gradient) for parameter, gradient in zip(ours, gradients, strict=True)]
            host.step(optimizer, hyperparameters(optimizer.param_groups[0]), updates)
            assert all(same(one.detach(), other.detach()) for one, other in zip(ours, theirs, strict=True))
            if step < 3:
                with torch.no_grad():
                    change(optimizer, ours[step])
                    change(peer, theirs[step])
    finally:
        host.close()
