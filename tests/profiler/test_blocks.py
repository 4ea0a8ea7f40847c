"""Blocks and units of made-up and of real models: nothing is lost and nothing counted twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_protrain.planner.memory import minimum_chunk_buffers
from lightning_protrain.planner.packing import pack_chunks
from lightning_protrain.profiler.blocks import describe_model, discover_blocks, modules_in
from lightning_protrain.profiler.records import ModelLayout
from tests.profiler.models import CASES, Case, numbered


class Layer(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Container(nn.Module):
    """A module that registers its arguments under their names, and calls none of them."""

    def __init__(self, **modules: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self) -> None: ...


def layers(count: int, **kwargs: int) -> nn.ModuleList:
    return nn.ModuleList(Layer(**kwargs) for _ in range(count))


def pair() -> nn.ModuleDict:
    return nn.ModuleDict({"attention": Layer(), "mlp": nn.Linear(4, 4)})


BARE = nn.ParameterList([nn.Parameter(torch.ones(2))])
SHARED = Layer()
OUTER = layers(2)


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (Container(layers=layers(3, experts=4)), numbered("layers", 3)),
        (Container(layers=layers(1, experts=4)), numbered("layers.0.experts", 4)),
        (Container(layers=nn.ModuleList([Layer(), nn.Dropout(), Layer()])), ["layers.0", "layers.2"]),
        (Container(layers=nn.ModuleList([Layer(), Layer(), nn.Linear(4, 4)])), numbered("layers", 3)),
        (Container(layers=nn.ModuleList([nn.Dropout(), nn.Dropout()])), []),
        (Container(layers=nn.ModuleList([Layer(), nn.Linear(4, 4)])), []),
        (Container(l=nn.ModuleList([pair(), pair()])), ["l.0.attention", "l.0.mlp", "l.1.attention", "l.1.mlp"]),
        (Container(layers=nn.ModuleList([layers(2), layers(1)])), ["layers.0.0", "layers.0.1", "layers.1.0"]),
        (Container(layers=nn.ModuleList([BARE, BARE])), []),
        (Container(t=nn.ModuleDict({"a": layers(2), "b": layers(2)})), numbered("t.a", 2) + numbered("t.b", 2)),
        (Container(inner=Container(layers=layers(2)), head=nn.Linear(4, 4)), numbered("inner.layers", 2)),
        (layers(2), ["0", "1"]),
        (nn.Sequential(Layer(), Layer(), nn.Linear(4, 4)), ["0", "1"]),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), []),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4))), ["0", "1"]),
        (nn.Sequential(Layer(), nn.Sequential(nn.Linear(4, 4))), []),
        (Container(layers=nn.ModuleList([SHARED] * 5)), ["layers.0"]),
        (Container(first=SHARED, layers=nn.ModuleList([SHARED, Layer()])), ["first", "layers.1"]),
        (Container(one=OUTER, again=OUTER), numbered("one", 2)),
        (Container(inner=nn.ModuleList(x.linear for x in OUTER), outer=OUTER), numbered("outer", 2)),
        (Container(outer=OUTER, inner=nn.ModuleList(x.linear for x in OUTER)), numbered("outer", 2)),
        (nn.Linear(4, 4), []),
        (nn.Module(), []),
    ],
)
def test_discovery(model: nn.Module, blocks: list[str]) -> None:
    assert list(discover_blocks(model)) == blocks
    layout = describe_model(model)
    assert [unit.name for unit in layout.blocks] == (blocks or [""] * bool(layout.parameters))


ENCODER = Container(embed=nn.Embedding(9, 4), layers=layers(3, experts=2), norm=nn.LayerNorm(4), act=nn.ReLU())


@pytest.mark.parametrize(
    ("choice", "blocks"),
    [
        (["layers.1"], ["layers.1"]),
        (["layers.2", "layers.0"], ["layers.0", "layers.2"]),
        (["norm", "norm"], ["norm"]),
        ([Layer], numbered("layers", 3)),
        ([Layer, "embed", "layers.1"], ["embed", *numbered("layers", 3)]),
        ([nn.Embedding, nn.LayerNorm], ["embed", "norm"]),
        ((nn.Linear,), [n for i in range(3) for n in (f"layers.{i}.linear", *numbered(f"layers.{i}.experts", 2))]),
        ([""], [""]),
        ([Container], [""]),
    ],
)
def test_explicit_blocks(choice: list[str | type[nn.Module]], blocks: list[str]) -> None:
    assert list(discover_blocks(ENCODER, choice)) == blocks
    assert [unit.name for unit in describe_model(ENCODER, choice).blocks] == blocks


def test_an_alias_names_the_module_of_its_first_name() -> None:
    model = Container(embed=nn.Embedding(9, 4), alias=SHARED, layers=nn.ModuleList([SHARED, Layer()]))
    assert discover_blocks(model, ["layers.0"]) == ("alias",)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (["layer.1"], r"no module is called 'layer\.1'\. Similar: 'layers\.1', "),
        (["zzz"], r"no module is called 'zzz'\.$"),
        (["LayerNorm"], r"called 'LayerNorm'\. It is the class of 'norm': give the class itself, or names of modules"),
        ([nn.LSTM], r"no module is a LSTM\."),
        ([nn.RMSNorm], r"no module is a RMSNorm\. Similar: 'LayerNorm'"),
        (["layers.0.linear", "layers.0"], r"'layers\.0\.linear' is inside 'layers\.0'\. Give one of the two"),
        ([Layer, nn.Linear], r"is inside 'layers\.0'"),
        (["", "norm"], r"'norm' is inside ''"),
        (["act"], r"'act' \(ReLU\) has no parameters\. Remove it"),
        ([nn.ReLU], r"'act' \(ReLU\) has no parameters"),
        (["layers"], r"'layers' \(ModuleList\) has no forward of its own, .* Give the modules inside it"),
        ([7], "7 is neither a module name nor a module class"),
        ([int], "<class 'int'> is neither"),
        ([], r"blocks=\[\]: give None"),
        ("layers.0", r"blocks='layers\.0': give None, \"size\", or a list"),
        ("", "blocks='': give None"),
        (nn.Linear, r"blocks=Linear is one class, not a list: give blocks=\[Linear\]"),
        (int, "blocks=<class 'int'>: give None"),
        (3, "blocks=3: give None"),
    ],
)
def test_explicit_blocks_refused(choice: Any, message: str) -> None:
    for function in (discover_blocks, describe_model):
        with pytest.raises(ValueError, match=message):
            function(ENCODER, choice)


@pytest.mark.parametrize(
    ("least", "blocks"),
    [
        (
            1,
            [
                "embed",
                *[n for i in range(3) for n in (f"layers.{i}.linear", *numbered(f"layers.{i}.experts", 2))],
                "norm",
            ],
        ),
        (21, ["embed", *numbered("layers", 3)]),  # a linear has 20 parameters, the embedding 36, a layer 60
        (37, numbered("layers", 3)),
        (61, [""]),
        (224, [""]),
        (225, []),
    ],
)
def test_blocks_by_size(least: int, blocks: list[str]) -> None:
    assert list(discover_blocks(ENCODER, "size", least)) == blocks
    assert [unit.name for unit in describe_model(ENCODER, "size", least).blocks] == (blocks or [""])


@pytest.mark.parametrize("least", [0, -3, True])
def test_size_out_of_range(least: int) -> None:
    with pytest.raises(ValueError, match=f"min_num_params is {least}; give a positive number"):
        discover_blocks(ENCODER, "size", least)


def needs(model: nn.Module, **kwargs: Any) -> dict[str, list[str]]:
    """Return the names of the parameters of each unit that is not a block."""
    units = describe_model(model, **kwargs).units
    return {unit.name: list(unit.parameters) for unit in units if not unit.is_block}


def weights(count: int = 1) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(count))


@pytest.mark.parametrize(
    ("others", "units"),
    [
        ({"scale": nn.Parameter(torch.ones(2))}, {"": ["scale"]}),
        ({"scales": weights(2)}, {"": ["scales.0", "scales.1"]}),
        ({"scales": nn.ParameterDict({"a": nn.Parameter(torch.ones(2))})}, {"": ["scales.a"]}),
        ({"inner": Container(scales=weights())}, {"inner": ["inner.scales.0"]}),
        ({"inner": nn.ModuleDict({"a": weights()})}, {"": ["inner.a.0"]}),
        ({"heads": nn.ModuleDict({"a": nn.Linear(2, 2, bias=False)})}, {"heads.a": ["heads.a.weight"]}),
        ({"drop": nn.Dropout()}, {}),
        ({"head": nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())}, {"head.0": ["head.0.weight"]}),
        (
            {"attention": nn.MultiheadAttention(4, 2, bias=False)},
            {"attention": ["attention.in_proj_weight", "attention.out_proj.weight"]},
        ),
        (
            {"layer": nn.TransformerDecoderLayer(4, 2, 4, bias=False)},
            {
                "layer": [
                    f"layer.{a}.{w}"
                    for a in ("self_attn", "multihead_attn")
                    for w in ("in_proj_weight", "out_proj.weight")
                ]
                + [f"layer.{name}.weight" for name in ("linear1", "linear2", "norm1", "norm2", "norm3")]
            },
        ),
    ],
)
def test_units_outside_blocks(others: dict[str, Any], units: dict[str, list[str]]) -> None:
    assert needs(Container(layers=layers(2), **others)) == units


def test_a_subclass_of_a_builtin_composite_is_one_unit_too() -> None:
    class Attention(nn.MultiheadAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = Container(layers=layers(2), attention=Attention(4, 2))
    assert list(needs(model)) == ["attention"]


def test_tied_parameters_belong_to_every_unit_that_needs_them() -> None:
    model = Container(embed=nn.Embedding(4, 4), layers=layers(2), head=nn.Linear(4, 4))
    model.head.weight = model.embed.weight
    model.layers[1].linear.weight = model.layers[0].linear.weight
    layout = describe_model(model)
    assert layout.parameter("embed.weight").sites == ("embed.weight", "head.weight")
    assert layout.parameter("layers.0.linear.weight").sites == ("layers.0.linear.weight", "layers.1.linear.weight")
    assert needs(model) == {"embed": ["embed.weight"], "head": ["embed.weight", "head.bias"]}
    assert [unit.parameters[0] for unit in layout.blocks] == ["layers.0.linear.weight"] * 2
    with pytest.raises(KeyError, match=r"head\.weight"):
        layout.parameter("head.weight")


def test_a_module_used_inside_and_outside_a_block_is_a_unit_in_it() -> None:
    model = Container(layers=layers(2))
    model.late = model.layers[0].linear
    layout = describe_model(model)
    inner = ("layers.0.linear.weight", "layers.0.linear.bias")
    assert [(unit.name, unit.parameters) for unit in layout.units if not unit.is_block] == [("layers.0.linear", inner)]
    assert [unit.encloses for unit in layout.blocks] == [("layers.0.linear",), ()]
    assert minimum_chunk_buffers(layout, pack_chunks(layout)) == 1


def test_a_shared_list_of_parameters_is_handed_to_both_modules_around_it() -> None:
    shared = weights()
    model = Container(layers=layers(2), a=Container(scales=shared), b=Container(scales=shared))
    assert needs(model) == {"a": ["a.scales.0"], "b": ["a.scales.0"]}


class Packed(nn.Parameter):
    """A parameter that stores two elements to a byte, as 4-bit weights do."""


def test_what_is_stored_is_what_counts() -> None:
    model = Container(
        packed=Packed(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False),
        phase=nn.Parameter(torch.zeros(3, dtype=torch.complex64)),
        low=nn.Parameter(torch.zeros(3, 5, dtype=torch.bfloat16, device="meta")),
        empty=nn.Parameter(torch.zeros(0, 7)),
    )
    found = [(p.fqn, p.shape, p.dtype, p.nbytes, p.numel, p.trainable) for p in describe_model(model).parameters]
    assert found == [
        ("packed", (32, 1), "uint8", 32, 32, False),
        ("phase", (3,), "complex64", 24, 3, True),
        ("low", (3, 5), "bfloat16", 30, 15, True),
        ("empty", (0, 7), "float32", 0, 0, True),
    ]


@pytest.mark.parametrize(
    ("module", "name"), [(nn.LazyLinear(3), "head.weight"), (nn.LazyBatchNorm1d(affine=False), "head.running_mean")]
)
def test_lazy_tensors_are_refused(module: nn.Module, name: str) -> None:
    with pytest.raises(ValueError, match=f"'{re.escape(name)}' has no shape yet. Run one batch through the model"):
        describe_model(Container(layers=layers(2), head=module))


def test_buffers_are_counted_once() -> None:
    model = Container(layers=layers(2), norm=nn.BatchNorm1d(4))
    model.register_buffer("again", model.norm.running_mean)
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    model.register_buffer("unset", None)
    assert describe_model(model).buffer_bytes == 16 + 16 + 8 + 8


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """Nested containers, lists and leaves, some of them registered several times."""
    kinds = ["linear", "layer", "weights", "dropout"]
    if depth == 0 or draw(st.booleans()):
        builders = {"linear": lambda: nn.Linear(2, 2), "layer": Layer, "weights": weights, "dropout": nn.Dropout}
        return builders[draw(st.sampled_from(kinds))]()
    children = [draw(trees(depth - 1)) for _ in range(draw(st.integers(1, 3)))]
    children += draw(st.lists(st.sampled_from(children), max_size=2))
    kind = draw(st.sampled_from(["container", "list", "dict", "sequential"]))
    if kind == "container":
        own = {"own": nn.Parameter(torch.ones(1))} if draw(st.booleans()) else {}
        return Container(**own, **{f"m{index}": child for index, child in enumerate(children)})
    if kind == "dict":
        return nn.ModuleDict({f"m{index}": child for index, child in enumerate(children)})
    return nn.ModuleList(children) if kind == "list" else nn.Sequential(*children)


@given(trees())
def test_any_tree_of_modules_is_covered_by_units_that_can_be_called(model: nn.Module) -> None:
    layout = describe_model(model)
    parameters = dict(model.named_parameters())
    assert [info.fqn for info in layout.parameters] == list(parameters)
    assert {fqn for unit in layout.units for fqn in unit.parameters} == set(parameters)
    for unit in layout.units:
        module = model.get_submodule(unit.name)
        assert unit.name == "" or type(module).forward is not nn.Module.forward
        assert unit.parameters
        if unit.is_block:
            assert set(unit.parameters) == {
                name for name, p in parameters.items() if any(p is q for q in module.parameters())
            }
            assert not {block.name for block in layout.blocks} & set(unit.encloses)
        for inner in unit.encloses:
            assert any(model.get_submodule(inner) is below for below in module.modules())
    for info in layout.parameters:
        users = {id(model.get_submodule(unit.name)) for unit in layout.units if info.fqn in unit.parameters}
        for site in info.sites:
            path = site.split(".")[:-1]
            around = {id(model.get_submodule(".".join(path[:length]))) for length in range(len(path) + 1)}
            assert users & around


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
        prefix = f"{unit.name}." if unit.name else ""
        inside = {each.name for each in layout.units if each.name.startswith(prefix)} - {unit.name}
        assert set(unit.encloses) == (inside if not unit.is_block else set())
    for info in layout.parameters:
        assert all(model.get_parameter(site) is parameters[info.fqn] for site in info.sites)


def test_each_module_is_found_once(case: Case) -> None:
    model = case.build()
    found = modules_in(model)
    assert len(found) == len(set(found))
    assert set(found) == set(model.modules())
