"""A plan in tables and sentences: what stands in them is what the plan says."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from lightning_protrain.planner.explain import host_sentences, short_seconds, time_sentence, unit_table
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, ChunkPlan, MemoryTerms, Plan, Sharding
from lightning_protrain.planner.prediction import PhasePrediction, Prediction

MIB = 1 << 20
PREDICTION = Prediction(
    hardware="Test GPU",
    budget=16 * MIB,
    phases=(
        PhasePrediction("forward", "model.layers.1", {"activations": 7 * MIB, "chunk_buffers": MIB}, {"states": MIB}),
        PhasePrediction("step", "", {}, {"states": MIB}),
    ),
    step_seconds=2.0,
    busy={"compute": 1.5, "upload": 2.0, "download": 0.5, "host": 0.25},
    bound="link",
    tokens=4096,
    accumulate=2,
    advice=("Warning: buy memory.",),
)
PLAN = Plan(
    chunks=tuple(
        ChunkPlan((f"model.layers.{i}.weight",), f"model.layers.{i}", "float32", True, MIB, i == 0) for i in range(4)
    ),
    blocks=tuple(BlockPlan(f"model.layers.{i}", BlockPolicy.CHECKPOINT) for i in range(4)),
    num_chunk_buffers=2,
    memory=MemoryTerms(4 * MIB, 2 * MIB, MIB, 512, activations=MIB),
    shapes={},
    prediction=PREDICTION,
)


def _lines(plan: Plan, budget: int | None = None, sentences: tuple[str, ...] = ()) -> list[str]:
    console = Console(width=200, color_system=None, file=io.StringIO(), record=True)
    console.print(plan.explain(budget, sentences))
    return [" ".join(line.split()) for line in console.export_text().splitlines()]


def _of_units(names: list[str]) -> Plan:
    """One chunk in each unit; the policy alternates, and the first half is resident."""
    policies = (BlockPolicy.SWAP, BlockPolicy.SELECTIVE)
    return replace(
        PLAN,
        chunks=tuple(
            ChunkPlan((f"{name}.weight",), name, "float32", True, MIB, 2 * index < len(names))
            for index, name in enumerate(names)
        ),
        blocks=tuple(BlockPlan(name, policies[index % 2], index % 2) for index, name in enumerate(names)),
    )


@pytest.mark.parametrize(
    ("around", "header", "units"),
    [
        ("model.", "unit of model.layers", ["0", "1-3"]),
        ("", "unit of layers", ["0", "1-3"]),
        ("model.base_model.model.", "unit", ["0", "1-3"]),
    ],
)
def test_a_name_around_all_units_is_said_once(around: str, header: str, units: list[str]) -> None:
    renamed = [chunk._replace(unit=f"{around}{chunk.unit.removeprefix('model.')}") for chunk in PLAN.chunks]
    blocks = [replace(block, name=f"{around}{block.name.removeprefix('model.')}") for block in PLAN.blocks]
    table = unit_table(replace(PLAN, chunks=tuple(renamed), blocks=tuple(blocks)), 9)
    assert table.columns[0].header == header
    assert list(table.columns[0].cells) == units


@pytest.mark.parametrize(
    ("names", "line"),
    [
        ([f"m.layers.{i}" for i in range(3)], "layers.0 1 1.0 MiB device swap"),
        ([f"m.layers.{i}" for i in range(96)], "layers.0-48 49 x 1 49 x 1.0 MiB device 25 swap, 24 selective"),
        ([f"m.{part}.{i}.{side}" for part in "ab" for i in range(30) for side in "xy"], "more units"),
    ],
)
@pytest.mark.parametrize("prediction", [PREDICTION, None])
def test_what_print_shows_has_few_lines(names: list[str], line: str, prediction: Prediction | None) -> None:
    advice = tuple("A piece of advice that takes more than one line, as some of them do." * 2 for _ in range(3))
    expected = prediction and replace(prediction, advice=advice, phases=prediction.phases * 2)
    plan = replace(_of_units([*names, "m.head"]), prediction=expected)
    text = str(plan)
    assert len(text.splitlines()) <= 25
    assert max(map(len, text.splitlines())) <= 80
    assert text == str(plan.explain())
    said = [" ".join(row.split()) for row in text.splitlines()]
    if line == "more units":
        count = next(int(row.split()[0]) for row in said if row.endswith(line))
        assert count + sum(row.startswith(("a.", "b.", "head")) for row in said) == len(names) + 1
    else:
        assert line in said
    assert "\n" not in repr(plan)
    assert len(repr(plan)) < 200


def test_no_name_is_cut_at_80_columns() -> None:
    names = ["vision_tower.embeddings", *(f"{'very_' * 12}long_name_{index}.tail" for index in range(3))]
    shown = "".join(line.split(" ")[0] for line in str(_of_units(names).explain()).splitlines())
    assert all(name in shown for name in names)


def test_everything_is_said() -> None:
    lines = _lines(PLAN, sentences=("One more thing.",))
    for line in (
        "0 1 1.0 MiB device checkpoint",
        "1-3 3 x 1 3 x 1.0 MiB streamed checkpoint",
        "Parameters: 1.0 MiB on the device, 3.0 MiB streamed through 2 chunk buffers.",
        "One more thing.",
        "on Test GPU device of 16.0 MiB host mostly",
        "forward 8.0 MiB 50 % 1.0 MiB activations",
        "step 0 B 0 % 1.0 MiB",
        "At the peak (forward in model.layers.1) the device holds 7.0 MiB of activations, 1.0 MiB of chunk buffers.",
        "Warning: buy memory.",
    ):
        assert line in lines, line


def test_the_fragmentation_factor_is_shown_where_there_is_an_allocator() -> None:
    said = "Fragmentation factor: 1.07."
    assert any(line.endswith(said) for line in _lines(replace(PLAN, prediction=replace(PREDICTION, alpha=1.07))))
    assert "Fragmentation" not in str(PLAN.explain())


def test_one_buffer_is_no_plural() -> None:
    assert any(line.endswith("streamed through 1 chunk buffer.") for line in _lines(replace(PLAN, num_chunk_buffers=1)))


def test_inputs_on_the_host_are_said() -> None:
    assert not any("Inputs" in line for line in _lines(PLAN))
    blocks = tuple(replace(block, swap_bytes=MIB * (index < 2)) for index, block in enumerate(PLAN.blocks))
    assert "Inputs of 2 checkpointed blocks wait on the host, 2.0 MiB." in _lines(replace(PLAN, blocks=blocks))


def test_what_the_host_has_beside_the_states_of_one_rank_is_said() -> None:
    assert host_sentences(PREDICTION) == []
    others = {"checkpoint_copy": 3 * MIB, "other_ranks": 5 * MIB}
    phases = (*PREDICTION.phases, PhasePrediction("backward", "", {}, others))
    copied, shared = host_sentences(replace(PREDICTION, phases=phases))
    assert copied == "Of the host, 3.0 MiB are the copy of the checkpoint, from the first save on."
    assert shared.startswith("Of the host, 5.0 MiB are what the other ranks of the node have of their own: ")


def test_without_a_prediction_nothing_is_expected() -> None:
    lines = _lines(replace(PLAN, prediction=None))
    assert not any("xpected" in line for line in lines)
    assert "activations 1.0 MiB" in lines
    assert "total 8.0 MiB" in lines


def test_a_budget_that_is_given_counts_for_more_than_the_predicted_one() -> None:
    assert "forward 8.0 MiB 25 % 1.0 MiB activations" in _lines(PLAN, 32 * MIB)
    assert "total 8.0 MiB 25 % of 32.0 MiB" in _lines(replace(PLAN, prediction=None), 32 * MIB)


def test_sums_over_ranks_are_said() -> None:
    among = replace(PREDICTION, busy={**PREDICTION.busy, "network": 0.5})
    assert time_sentence(among) == time_sentence(PREDICTION) + " Ranks sum gradients for 500 ms of it."
    timed = replace(among, alone_seconds=1.75)
    assert time_sentence(timed) == time_sentence(among) + " One rank alone would take 1.75 s."


@pytest.mark.parametrize("bound", ["compute", "link", "host", "network"])
def test_the_bound_is_explained(bound: str) -> None:
    sentence = time_sentence(replace(PREDICTION, bound=bound))
    assert sentence.startswith("A step of 2 micro-batches is expected to take 2 s, 4,096 tokens per second; ")
    assert f"what bounds it: {bound} (" in sentence
    unknown = time_sentence(replace(PREDICTION, bound=bound, tokens=0, accumulate=1))
    assert unknown.startswith("A step is expected to take 2 s; ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(210.0, "210 s"), (1.204, "1.2 s"), (0.25, "250 ms"), (0.0025, "2.5 ms"), (35e-6, "35 us"), (0.0, "0 us")],
)
def test_short_seconds(seconds: float, text: str) -> None:
    assert short_seconds(seconds) == text


@pytest.mark.parametrize(
    ("sharding", "sentence"),
    [
        (Sharding.REPLICATE, None),
        (Sharding.SHARD, "Streamed chunks are uploaded whole by each rank, from the one copy of its node."),
    ],
)
def test_how_chunks_come_is_said(sharding: Sharding, sentence: str | None) -> None:
    plan = replace(PLAN, sharding=sharding)
    assert [line for line in _lines(plan) if "each rank" in line] == [sentence] * bool(sentence)
    resident = replace(plan, chunks=tuple(chunk._replace(resident=True) for chunk in PLAN.chunks))
    assert not any("Streamed chunks" in line for line in _lines(resident))
