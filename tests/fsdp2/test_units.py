"""Units hold every parameter once; recomputed modules compute the same under the same names."""

from __future__ import annotations

import weakref
from typing import Any

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_protrain.fsdp2.refusals import explained, refuse_unshardable
from lightning_protrain.fsdp2.strategy import evaluating, let_recompute, release_parameters
from lightning_protrain.fsdp2.units import ShardUnits, choose_checkpointed, choose_units, owners_of, parameters_by_unit
from tests.support.models import HIDDEN, LanguageModel, Mlp

# Parameters of `Mlp` and of its parts: norm 32, up 544, down 528.
MLP, UP, DOWN = 1104, 544, 528


class Pair(nn.Module):
    """Two parts and a weight of its own."""

    def __init__(self, first: nn.Module, second: nn.Module, own: int = 4) -> None:
        super().__init__()
        self.first = first
        self.second = second
        self.own = nn.Parameter(torch.zeros(own))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(value))


def linear(size: int) -> nn.Module:
    """`size` parameters."""
    return nn.Linear(size, 1, bias=False)


@pytest.mark.parametrize(
    ("min_num_params", "expected"),
    [
        (MLP + 1, ()),
        (MLP, ("first",)),
        (UP, ("first.up", "first")),  # norm and down are left, and enough
        (DOWN, ("first.up", "first.down")),  # the norm is left, and passed on
        (32, ("second", "first.up", "first.norm", "first.down")),
    ],
)
def test_what_children_took_does_not_count(min_num_params: int, expected: tuple[str, ...]) -> None:
    found = choose_units(Pair(Mlp(), linear(40)), "size", min_num_params).names
    assert set(found) == set(expected)
    assert found.index("first") == len(found) - 1 if "first" in found and len(found) > 1 else True


def test_the_model_takes_what_is_left_of_everything() -> None:
    model = Pair(Pair(linear(30), linear(30)), linear(30), own=30)
    assert choose_units(model, "size", 50).names == ("first",)
    assert choose_units(model, "size", 70).names == ()


def test_a_shell_around_everything_is_no_unit() -> None:
    shell = nn.Sequential(Pair(Mlp(), linear(10)))
    assert choose_units(nn.Sequential(shell), "size", 500).names == ("0.0.first.down", "0.0.first.up")


def test_what_is_never_called_is_no_unit() -> None:
    model = Pair(nn.ModuleList([linear(60), linear(60)]), linear(60))
    assert choose_units(model, "size", 100).names == ()
    assert set(choose_units(model, "size", 60).names) == {"first.0", "first.1", "second"}


def test_what_reads_the_weights_of_its_children_is_whole() -> None:
    model = Pair(nn.MultiheadAttention(16, 2), nn.TransformerEncoderLayer(16, 2, 64))
    assert set(choose_units(model, "size", 100).names) == {"first", "second"}


def test_layers_with_adapters_are_whole() -> None:
    adapted = peft.get_peft_model(LanguageModel([Mlp(), Mlp()]), peft.LoraConfig(r=2, target_modules=["up"]))
    found = choose_units(adapted, "size", 512).names
    assert "base_model.model.blocks.0.up" in found
    assert not any("base_layer" in name or "lora_" in name for name in found)


def test_a_module_at_two_places_is_one_unit() -> None:
    shared = linear(60)
    found = choose_units(Pair(shared, Pair(shared, linear(7))), "size", 50)
    assert found == ShardUnits(("first",))


def test_tied_weights_go_to_what_is_around_both() -> None:
    model = LanguageModel([Mlp(), Mlp()])
    model.head.weight = model.embedding.weight
    untied = choose_units(LanguageModel([Mlp(), Mlp()]), "size", 512)
    tied = choose_units(model, "size", 512)
    assert set(untied.names) - set(tied.names) == {"embedding", "head"}
    # The tied weight counts once, where it is met first; the other place alone is no unit.
    assert tied.left_out == {"embedding": "embedding.weight"}


def test_blocks_that_share_a_weight_are_left_out_and_named() -> None:
    model = LanguageModel([Mlp(), Mlp(), Mlp()])
    model.blocks[2].up.weight = model.blocks[0].up.weight
    found = choose_units(model, "transformer", 1)
    assert found.names == ("blocks.1",)
    assert dict(found.left_out) == {"blocks.0": "blocks.0.up.weight", "blocks.2": "blocks.0.up.weight"}


@st.composite
def trees(draw: st.DrawFn, depth: int = 4) -> nn.Module:
    kind = draw(st.sampled_from(["leaf", "pair", "list"] if depth else ["leaf"]))
    if kind == "leaf":
        return linear(draw(st.integers(1, 60)))
    if kind == "list":
        return nn.Sequential(*[draw(trees(depth - 1)) for _ in range(draw(st.integers(1, 3)))])
    return Pair(draw(trees(depth - 1)), draw(trees(depth - 1)), draw(st.integers(1, 30)))


@given(trees(), st.integers(1, 120), st.randoms(use_true_random=False))
def test_every_parameter_has_one_owner(model: nn.Module, min_num_params: int, random: object) -> None:
    leaves = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for one, other in zip(leaves[::3], leaves[1::4], strict=False):
        if one.weight.shape == other.weight.shape:
            other.weight = one.weight
    found = choose_units(model, "size", min_num_params)
    chosen = {id(model.get_submodule(name)) for name in found.names}
    owners = owners_of(model, chosen)
    assert all(len(places) == 1 for places in owners.values())
    assert owners.keys() == dict(model.named_parameters()).keys()
    held = dict.fromkeys(found.names, 0)
    for fqn, (owner,) in owners.items():
        if owner:
            held[owner] += model.get_parameter(fqn).numel()
    if not found.left_out:
        assert all(size >= min_num_params for size in held.values())
    # Inner units come first, as `fully_shard` wants them.
    assert all(not later.startswith(f"{name}.") for i, name in enumerate(found.names) for later in found.names[i:])


def test_a_model_without_lists_has_no_blocks() -> None:
    with pytest.raises(ValueError, match=r"Pair has no nn\.ModuleList.*policy='size'"):
        choose_units(Pair(Mlp(), Mlp()), "transformer", 1)
    assert choose_units(Pair(Mlp(), Mlp()), "none", 1) == ShardUnits(())


def test_checkpointed_modules_are_the_blocks_or_the_outermost_large_ones() -> None:
    assert choose_checkpointed(LanguageModel([Mlp(), Mlp()]), 1) == ("blocks.0", "blocks.1")
    nested = Pair(Pair(Mlp(), linear(9), own=100), linear(9))
    assert choose_units(nested, "size", 100).names == ("first.first.down", "first.first.up", "first")
    assert choose_checkpointed(nested, 100) == ("first",)
    assert choose_checkpointed(nested, 2000) == ()


def test_parameters_are_those_that_a_unit_holds_alone() -> None:
    nested = Pair(Pair(Mlp(), linear(9), own=100), linear(9))
    units = choose_units(nested, "size", 100)
    down, up, first = parameters_by_unit(nested, units)
    assert (down, up) == tuple((f"first.first.{name}.weight", f"first.first.{name}.bias") for name in ("down", "up"))
    assert first == ("first.own", "first.first.norm.weight", "first.first.norm.bias", "first.second.weight")
    assert parameters_by_unit(nested, ShardUnits(())) == ()


def test_what_cannot_be_cut_is_refused() -> None:
    model = Pair(linear(3), linear(3).bfloat16())
    with pytest.raises(ValueError, match=r"'own' \(torch\.float32\) and 'second\.weight' \(torch\.bfloat16\)"):
        refuse_unshardable(model, ShardUnits(()))
    refuse_unshardable(model, ShardUnits(("second",)))
    model.second.requires_grad_(False)
    refuse_unshardable(model, ShardUnits(()))
    model.own = nn.Parameter(torch.zeros(()))
    with pytest.raises(ValueError, match=r"'own' has no dimension"):
        refuse_unshardable(model, ShardUnits(()))
    model.own = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"'own' has quantised values \(torch\.int8\)"):
        refuse_unshardable(model, ShardUnits(()))
    model.own = nn.Parameter(torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match=r"'own' is on the meta device"):
        refuse_unshardable(model, ShardUnits(()))


def gradients(module: nn.Module, value: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    module(value).square().sum().backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def test_it_recomputes_under_the_same_names() -> None:
    module, value = nn.Sequential(Mlp(), nn.Dropout(0.5)), torch.randn(2, HIDDEN)
    calls = []
    module[0].up.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    torch.manual_seed(0)
    expected, names = gradients(module, value), [name for name, _ in module.named_modules()]
    undo = let_recompute(module, "module")
    torch.manual_seed(0)
    assert all(torch.equal(one, other) for one, other in zip(gradients(module, value), expected, strict=True))
    assert [name for name, _ in module.named_modules()] == names
    assert len(calls) == 3
    with torch.no_grad():
        module(value)
    assert len(calls) == 4
    undo()
    gradients(module, value)
    assert len(calls) == 5
    assert "forward" not in vars(module)


def test_an_own_forward_of_the_instance_is_put_back() -> None:
    module = Mlp()
    module.forward = own = lambda value: value + 1  # type: ignore[method-assign]
    undo = let_recompute(module, "module")
    assert torch.equal(module(torch.zeros(2)), torch.ones(2))
    undo()
    assert module.forward is own


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_optimizers_let_go_of_parameters_and_get_what_took_their_place(kind: Any) -> None:
    model = nn.Linear(2, 2)
    optimizer = kind([{"params": [model.bias]}, {"params": [model.weight]}], lr=1.0)
    before, kept = weakref.ref(model.weight), len(optimizer.state)
    put_back = release_parameters([optimizer], model)
    model.weight = nn.Parameter(torch.ones(2, 2))
    assert before() is None
    put_back()
    assert [group["params"][0] for group in optimizer.param_groups] == [model.bias, model.weight]
    assert [*optimizer.state] == ([model.bias, model.weight] if kept else [])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_an_optimizer_of_another_model_is_refused() -> None:
    stray = torch.optim.SGD([nn.Parameter(torch.ones(5))], lr=1.0)
    with pytest.raises(ValueError, match=r"SGD has a tensor of shape \(5,\)"):
        release_parameters([stray], nn.Linear(2, 2))


def test_evaluation_makes_no_inference_tensors() -> None:
    with torch.inference_mode(), evaluating():
        value = torch.ones(2, requires_grad=True) * 2
    assert not value.is_inference()
    assert not value.requires_grad


def test_only_the_error_of_a_weight_that_is_not_gathered_is_explained() -> None:
    with pytest.raises(RuntimeError, match="used while it was not gathered") as caught, explained():
        raise RuntimeError("aten.mm.default: got mixed torch.Tensor and DTensor, need to convert")
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="another"), explained():
        raise RuntimeError("another")
