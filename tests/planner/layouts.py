"""Layouts for planner tests: one builder for cases written by hand, one hypothesis strategy for all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from lightning_protrain.profiler.records import (
    Forward,
    ModelLayout,
    OperationCost,
    ParameterInfo,
    Storage,
    UnitInfo,
)

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "uint8": 1, "complex64": 8}


def parameter(
    fqn: str, numel: int = 64, dtype: str = "float32", trainable: bool = True, sites: Sequence[str] = ()
) -> ParameterInfo:
    return ParameterInfo(fqn, (fqn, *sites), (numel,), dtype, numel * ITEM_SIZES[dtype], trainable)


def layout_of(
    parameters: Sequence[ParameterInfo],
    units: Mapping[str, Sequence[str]],
    blocks: Sequence[str] = (),
    buffers: int = 0,
) -> ModelLayout:
    """A layout from units as `{name: first names of its parameters}`; names nest as modules do."""
    return ModelLayout(
        parameters=tuple(parameters),
        units=tuple(
            UnitInfo(name, name in blocks, tuple(fqns), tuple(inner for inner in units if is_inside(inner, name)))
            for name, fqns in units.items()
        ),
        buffer_bytes=buffers,
    )


def is_inside(inner: str, outer: str) -> bool:
    return inner != outer and (outer == "" or inner.startswith(outer + "."))


def transformer(num_blocks: int = 4, numel: int = 1024, vocabulary: int = 4096, tied: bool = True) -> ModelLayout:
    """Embedding, blocks of two parameters, norm and head, as most language models have them."""
    parameters = [parameter("embed.weight", vocabulary, sites=("head.weight",) if tied else ())]
    units: dict[str, list[str]] = {"embed": ["embed.weight"]}
    for index in range(num_blocks):
        name = f"layers.{index}"
        parameters += [parameter(f"{name}.up", numel), parameter(f"{name}.down", numel)]
        units[name] = [f"{name}.up", f"{name}.down"]
    parameters.append(parameter("norm.weight"))
    units["norm"] = ["norm.weight"]
    if not tied:
        parameters.append(parameter("head.weight", vocabulary))
    units["head"] = ["embed.weight" if tied else "head.weight"]
    return layout_of(parameters, units, blocks=[name for name in units if name.startswith("layers")], buffers=96)


@st.composite
def layouts(draw: st.DrawFn) -> ModelLayout:
    """Units in a random tree (blocks are leaves of it), mixed dtypes, frozen, tied and empty parameters."""
    names: list[str] = [""] if draw(st.booleans()) else []
    blocks: list[str] = []
    for index in range(draw(st.integers(1, 7))):
        path = [outer for outer in names if outer not in blocks and (not names or _is_around(outer, names[-1]))]
        parent = draw(st.sampled_from(["", *path]))
        names.append(f"{parent}.m{index}" if parent else f"m{index}")
        if draw(st.booleans()):
            blocks.append(names[-1])

    order: list[str] = []
    infos: dict[str, ParameterInfo] = {}
    units: dict[str, list[str]] = {}
    for name in names:
        tied = draw(st.sets(st.sampled_from(order), max_size=2)) if order else set()
        for fqn in tied:
            old = infos[fqn]
            sites = (*old.sites, f"{name}.tied{len(old.sites)}".lstrip("."))
            infos[fqn] = ParameterInfo(fqn, sites, old.shape, old.dtype, old.nbytes, old.trainable)
        own = []
        for number in range(draw(st.integers(0 if tied else 1, 4))):
            fqn = f"{name}.p{number}".lstrip(".")
            dtype = draw(st.sampled_from(list(ITEM_SIZES)))
            infos[fqn] = parameter(fqn, draw(st.integers(0, 400)), dtype, draw(st.booleans()))
            own.append(fqn)
        order += own
        units[name] = sorted(tied, key=order.index) + own
    return layout_of([infos[fqn] for fqn in order], units, blocks, buffers=draw(st.integers(0, 1000)))


def _is_around(outer: str, inner: str) -> bool:
    return outer == inner or is_inside(inner, outer)


def forward_of(live: int, peak: int, saved: int = 0, operations: tuple[OperationCost, ...] = ()) -> Forward:
    """Return a forward that saves so many bytes and has its peak before only autograd references them."""
    temporary = Storage(peak - live - saved, made=1, freed=2, gone=2)
    kept = Storage(saved, made=1, freed=3, gone=4, is_saved=True, is_alone=True)
    return Forward(live, operations, (temporary, kept), last_saved=3)
