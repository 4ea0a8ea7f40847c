"""A plan and its prediction as JSON and as files: whole or refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.planner.memory import memory_terms
from lightning_protrain.planner.packing import pack_chunks
from lightning_protrain.planner.plan import (
    ALIGNMENT,
    FORMAT,
    BlockPlan,
    BlockPolicy,
    Plan,
    Sharding,
    check_plan,
    chunk_offsets,
    only_plan,
)
from lightning_protrain.planner.prediction import PhasePrediction, Prediction
from lightning_protrain.profiler.records import ModelLayout
from tests.planner.layouts import layout_of, layouts, parameter, transformer


def make(layout: ModelLayout, policy: BlockPolicy = BlockPolicy.CHECKPOINT, mask: int = 0, swap_bytes: int = 0) -> Plan:
    chunks = tuple(chunk._replace(resident=bool(mask >> index & 1)) for index, chunk in enumerate(pack_chunks(layout)))
    blocks = tuple(BlockPlan(block.name, policy, swap_bytes) for block in layout.blocks)
    return Plan(
        chunks,
        blocks,
        max(1, len(chunks)),
        memory_terms(layout, chunks, 1, 8.0, blocks),
        {info.fqn: info.shape for info in layout.parameters},
    )


@given(layouts(), st.sampled_from(BlockPolicy), st.integers(0, 2**20), st.integers(0, 2**40))
def test_json_round_trip(layout: ModelLayout, policy: BlockPolicy, mask: int, swap_bytes: int) -> None:
    plan = make(layout, policy, mask, swap_bytes)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()
    assert all(type(block.policy) is BlockPolicy for block in again.blocks)


@given(layouts(), st.sampled_from([BlockPolicy.KEEP, BlockPolicy.CHECKPOINT]), st.integers(0, 2**20))
def test_a_plan_suits_the_model_it_was_made_for(layout: ModelLayout, policy: BlockPolicy, mask: int) -> None:
    plan = make(layout, policy, mask)
    check_plan(plan, layout)
    assert plan.num_offloaded_chunks + sum(chunk.resident for chunk in plan.chunks) == len(plan.chunks)
    assert all(plan.block(block.name) == BlockPlan(block.name, policy) for block in layout.blocks)


@pytest.mark.parametrize("policy", [BlockPolicy.SWAP, BlockPolicy.CHECKPOINT])
def test_what_swaps_names_its_bytes(policy: BlockPolicy) -> None:
    plan = make(transformer(), policy, swap_bytes=4096)
    check_plan(plan, transformer())
    assert plan.memory.swapped_activations == 2 * 4096


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(make(transformer()), sharding=Sharding.SHARD)
    monkeypatch.setenv("HOME", str(tmp_path))
    plan.save("~/plan.json")
    assert Plan.load("~/plan.json") == plan
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(str(tmp_path / "plan.json")) == plan


def test_the_only_plan_of_several_machines_is_read() -> None:
    plan = make(transformer())
    assert Plan.from_json(json.dumps({"RTX 3060": None, "RTX 3090": json.loads(plan.to_json())})) == plan


def test_a_missing_file_names_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'No plan at .*ofload\. Give plan="auto", "resident", "offload", a Plan'):
        Plan.load(tmp_path / "ofload")


def test_an_unknown_block() -> None:
    with pytest.raises(KeyError, match=r"layers\.9"):
        make(transformer()).block("layers.9")


@given(st.lists(st.integers(0, 10_000), max_size=20))
def test_chunk_offsets(sizes: list[int]) -> None:
    offsets, total = chunk_offsets(sizes)
    assert len(offsets) == len(sizes)
    assert total % ALIGNMENT == 0
    ends = (*offsets[1:], total)
    assert all(start % ALIGNMENT == 0 for start in offsets)
    assert all(0 <= end - start - size < ALIGNMENT for start, end, size in zip(offsets, ends, sizes, strict=False))


def _drop(*path: str | int) -> Callable[[Any], None]:
    def edit(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return edit


def _put(value: object, *path: str | int) -> Callable[[Any], None]:
    def edit(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_put(99, "format"), f"format 99, this version reads format {FORMAT}"),
        (_drop("format"), "format None"),
        (_drop("chunks"), "plan has the fields"),
        (_put(1, "surplus"), "plan has the fields .*'surplus'"),
        (_put({}, "chunks"), r"plan\.chunks is {}, not a list"),
        (_put("three", "chunks", 0), r"chunks\[0\] has the fields str"),
        (_drop("chunks", 1, "dtype"), r"chunks\[1\] has the fields"),
        (_put(0, "chunks", 1, "extra"), r"chunks\[1\] has the fields .*'extra'"),
        (
            _put("embed.weight", "chunks", 0, "parameters"),
            r"chunks\[0\]\.parameters is 'embed.weight', not a list",
        ),
        (_put([1], "chunks", 0, "parameters"), r"chunks\[0\]\.parameters\[0\] is 1, not a string"),
        (_put([], "chunks", 2, "parameters"), r"chunks\[2\]\.parameters is empty"),
        (_put(None, "chunks", 0, "unit"), r"chunks\[0\]\.unit is None, not a string"),
        (_put(32, "chunks", 0, "dtype"), r"chunks\[0\]\.dtype is 32, not a string"),
        (_put(1, "chunks", 0, "trainable"), r"chunks\[0\]\.trainable is 1, not true or false"),
        (_put("no", "chunks", 0, "resident"), r"chunks\[0\]\.resident is 'no', not true or false"),
        (_put(1.5, "chunks", 0, "nbytes"), r"chunks\[0\]\.nbytes is 1\.5, not a whole number from 0 on"),
        (_put(True, "chunks", 0, "nbytes"), r"chunks\[0\]\.nbytes is True, not a whole number from 0 on"),
        (
            _put("drop", "blocks", 0, "policy"),
            r"blocks\[0\]\.policy is 'drop', not one of keep, selective, checkpoint, swap",
        ),
        (_put([], "blocks", 0, "policy"), r"blocks\[0\]\.policy is \[\], not one of"),
        (_drop("blocks", 3, "name"), r"blocks\[3\] has the fields"),
        (_drop("blocks", 3, "swap_bytes"), r"blocks\[3\] has the fields"),
        (_put(1.0, "blocks", 2, "swap_bytes"), r"blocks\[2\]\.swap_bytes is 1\.0, not a whole number from 0 on"),
        (_put(1, "format"), f"format 1, this version reads format {FORMAT}"),
        (_drop("memory", "swapped_activations"), "memory has the fields"),
        (_put("2", "num_chunk_buffers"), r"num_chunk_buffers is '2', not a whole number from 0 on"),
        (_put(2.5, "num_chunk_buffers"), r"num_chunk_buffers is 2\.5, not a whole number from 0 on"),
        (_put(True, "num_chunk_buffers"), r"num_chunk_buffers is True, not a whole number from 0 on"),
        (_drop("memory", "chunk_buffers"), "memory has the fields"),
        (_put(0.5, "memory", "chunk_buffers"), r"memory\.chunk_buffers is 0\.5"),
        (_put([], "memory"), r"plan\.memory has the fields list"),
        (_put([], "shapes"), r"plan\.shapes is \[\], not an object"),
        (_put(4096, "shapes", "embed.weight"), r"shapes\['embed\.weight'\] is 4096, not a list"),
        (_put(["a"], "shapes", "embed.weight"), r"shapes\['embed\.weight'\]\[0\] is 'a', not a whole number"),
    ],
)
def test_from_json_refuses(edit: Callable[[Any], None], message: str) -> None:
    content = json.loads(make(transformer()).to_json())
    edit(content)
    with pytest.raises(ValueError, match=message) as caught:
        Plan.from_json(json.dumps(content))
    assert "again" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"not valid JSON: .*Write one with `Plan\.save\(path\)`"),
        ("{", "not valid JSON"),
        ("[]", "format 'list'"),
        ("null", "format 'NoneType'"),
        ("{}", "format None"),
        ('{"RTX 3060": null}', "no plan that fits 'RTX 3060'"),
        ('{"H200": {"format": 4}, "B200": {"format": 4}}', "plans for several machines: 'H200', 'B200'"),
    ],
)
def test_from_json_refuses_what_is_no_plan(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text)


def _chunks(plan: Plan, index: int, **changes: Any) -> Plan:
    chunks = list(plan.chunks)
    chunks[index] = chunks[index]._replace(**changes)
    return replace(plan, chunks=tuple(chunks))


LAYOUT = transformer()
PLAN = make(LAYOUT)
UP, DOWN = "layers.0.up", "layers.0.down"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, chunks=PLAN.chunks[1:]), "lacks parameters: 'embed.weight'"),
        (replace(PLAN, chunks=PLAN.chunks[:1]), r"lacks parameters: ('\S+', ){4}'layers\.2\.down' and 4 more"),
        (replace(PLAN, chunks=(*PLAN.chunks, PLAN.chunks[0])), "names twice parameters: 'embed.weight'"),
        (_chunks(PLAN, 1, parameters=(UP, DOWN, "layers.0.gate")), "names unknown parameters: 'layers.0.gate'"),
        (replace(PLAN, shapes={**PLAN.shapes, "x": (1,)}), "names unknown shapes of parameters: 'x'"),
        (replace(PLAN, shapes={}), "lacks shapes of parameters: 'embed.weight'"),
        (replace(PLAN, shapes={**PLAN.shapes, UP: (512,)}), r"'layers\.0\.up' as trainable float32\[512\], .*\[1024\]"),
        (_chunks(PLAN, 1, dtype="bfloat16"), r"as trainable bfloat16\[1024\], the model as trainable float32\[1024\]"),
        (_chunks(PLAN, 1, trainable=False), r"as frozen float32\[1024\], the model as trainable float32"),
        (_chunks(PLAN, 1, unit="layers.7"), "a chunk for 'layers.7', which is no unit"),
        (_chunks(PLAN, 1, unit="layers.2"), "'layers.0.up' into a chunk of 'layers.2', which does not use it"),
        (_chunks(PLAN, 1, nbytes=256), "gives the chunk of 'layers.0.up' 256 bytes, but it has 8.00 KiB"),
        (replace(PLAN, blocks=PLAN.blocks[1:]), "lacks blocks: 'layers.0'"),
        (replace(PLAN, blocks=(*PLAN.blocks, PLAN.blocks[0])), "names twice blocks: 'layers.0'"),
        (
            replace(PLAN, blocks=(*PLAN.blocks, BlockPlan("layers.4", BlockPolicy.KEEP))),
            "names unknown blocks: 'layers.4'",
        ),
        (replace(PLAN, num_chunk_buffers=-1), "6 offloaded chunks, but num_chunk_buffers=-1"),
        (replace(PLAN, num_chunk_buffers=0), "6 offloaded chunks, but num_chunk_buffers=0"),
        (make(LAYOUT, BlockPolicy.SWAP), r"gives block 'layers\.0' \(swap\) swap_bytes=0: give the host bytes"),
        (make(LAYOUT, BlockPolicy.SWAP, swap_bytes=-1), r"gives block 'layers\.0' \(swap\) swap_bytes=-1"),
        (make(LAYOUT, BlockPolicy.CHECKPOINT, swap_bytes=-1), r"gives block 'layers\.0' \(checkpoint\) swap_bytes=-1"),
        (make(LAYOUT, BlockPolicy.KEEP, swap_bytes=1), r"'layers\.0' \(keep\) swap_bytes=1, but nothing of it is"),
    ],
)
def test_check_plan_refuses(plan: Plan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_plan(plan, LAYOUT)


def test_check_plan_refuses_the_plan_of_a_longer_model() -> None:
    with pytest.raises(ValueError, match="made for another model: make the plan again, or load that model"):
        check_plan(make(transformer(num_blocks=5)), LAYOUT)


def test_check_plan_names_the_precision_where_only_the_dtype_differs() -> None:
    low = replace(LAYOUT, parameters=tuple(replace(info, dtype="bfloat16") for info in LAYOUT.parameters))
    with pytest.raises(ValueError, match=r'Weights of another dtype .*"32-true" or a mixed one for float32') as refused:
        check_plan(PLAN, low)
    assert "another model" not in str(refused.value)


def test_the_root_cannot_swap() -> None:
    layout = layout_of([parameter("w")], {"": ["w"]}, blocks=[""])
    with pytest.raises(ValueError, match=r"swaps the whole model, which is one block.*Name blocks with `blocks`"):
        check_plan(make(layout, BlockPolicy.SWAP, swap_bytes=1), layout)


def test_a_chunk_of_two_dtypes_is_refused() -> None:
    layout = layout_of([parameter("a.w"), parameter("a.b", dtype="bfloat16")], {"a": ["a.w", "a.b"]}, blocks=["a"])
    first, second = make(layout).chunks
    mixed = first._replace(parameters=("a.w", "a.b"), nbytes=first.nbytes + second.nbytes)
    with pytest.raises(ValueError, match=r"'a\.b' as trainable float32\[64\], the model as trainable bfloat16"):
        check_plan(replace(make(layout), chunks=(mixed,)), layout)


def test_no_offloaded_chunks_need_no_buffers() -> None:
    plan = replace(make(LAYOUT, mask=-1), num_chunk_buffers=0)
    check_plan(plan, LAYOUT)
    assert plan.num_offloaded_chunks == 0


WRITTEN = {"format": 1, "chunks": []}


@pytest.mark.parametrize("content", [WRITTEN, {}, [], None, "plan", {"RTX 3090": []}, {"RTX 3090": {"chunks": []}}])
def test_anything_else_is_left_as_it_is(content: object) -> None:
    assert only_plan(content) is content


PREDICTION = Prediction(
    hardware="Test GPU",
    budget=150,
    phases=(
        PhasePrediction("forward", "layers.1", {"activations": 70, "chunk buffers": 30}, {"weights": 500}),
        PhasePrediction("backward", "layers.0", {"activations": 90, "chunk buffers": 30}, {"weights": 400, "slab": 1}),
    ),
    step_seconds=2.0,
    busy={"compute": 1.5, "upload": 2.0, "download": 0.5, "host": 0.25},
    bound="link",
    samples=4,
    tokens=1000,
    accumulate=3,
    advice=("Buy memory.",),
)


def test_the_peaks_are_those_of_the_worst_phase() -> None:
    assert PREDICTION.device_bytes == 120
    assert PREDICTION.host_bytes == 500


def test_tokens_per_second_count_all_micro_batches() -> None:
    assert PREDICTION.tokens_per_second == 1500
    assert replace(PREDICTION, tokens=0).tokens_per_second is None


def test_what_ranks_sum_is_a_term_of_backward() -> None:
    among = PREDICTION.among_ranks(7)
    forward, backward = among.phases
    assert forward == PREDICTION.phases[0]
    assert backward.device == {**PREDICTION.phases[1].device, "gradient_buckets": 7}
    assert among.among_ranks(0) == PREDICTION
    assert among.among_ranks(3) == PREDICTION.among_ranks(3) != PREDICTION


@pytest.mark.parametrize("more", [{}, {"alone_seconds": 1.5}, {"alpha": 0.75}], ids=str)
def test_json_goes_round(more: dict[str, float]) -> None:
    among = replace(PREDICTION, **more)
    assert Prediction.from_dict(json.loads(json.dumps(asdict(among)))) == among


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("hardware",), 3),
        (("phases",), []),
        (("phases",), {}),
        (("phases", 0), "forward"),
        (("phases", 0, "device"), [1]),
        (("phases", 0, "device", "activations"), -1),
        (("phases", 0, "device", "activations"), 1.5),
        (("phases", 1, "unit"), None),
        (("step_seconds",), -1.0),
        (("step_seconds",), float("nan")),
        (("step_seconds",), True),
        (("busy", "host"), float("inf")),
        (("busy",), 1.0),
        (("bound",), 0),
        (("tokens",), -1),
        (("budget",), None),
        (("accumulate",), "3"),
        (("advice",), [1]),
        (("alone_seconds",), -1.0),
        (("alone_seconds",), "1"),
        (("alpha",), -1.0),
    ],
    ids=str,
)
def test_what_is_no_prediction_is_refused_by_name(path: tuple[Any, ...], value: Any) -> None:
    content = copy.deepcopy(json.loads(json.dumps(asdict(PREDICTION))))
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    name = next(key for key in reversed(path) if isinstance(key, str))
    with pytest.raises(ValueError, match=rf"prediction.*{name}.*Make the plan again\.") as refusal:
        Prediction.from_dict(content)
    shown = value[0] if path == ("advice",) else value
    assert repr(shown) in str(refusal.value) or type(value).__name__ in str(refusal.value)


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_fields_are_exactly_those(change: str) -> None:
    content = asdict(PREDICTION)
    if change == "missing":
        del content["bound"]
    else:
        content["more"] = 1
    with pytest.raises(ValueError, match=r"prediction has the fields .*Make the plan again"):
        Prediction.from_dict(content)
    with pytest.raises(ValueError, match="prediction"):
        Prediction.from_dict([])
