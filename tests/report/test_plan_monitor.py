"""The plan as tables, the logged bytes, the summary."""

from __future__ import annotations

import csv
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console

from lightning_protrain import ProTrainStrategy
from lightning_protrain.device.device import TransferCounters
from lightning_protrain.device.topology import PeerAccess
from lightning_protrain.planner.explain import short_bytes
from lightning_protrain.planner.plan import BlockPlan, BlockPolicy, ChunkPlan, MemoryTerms, Plan
from lightning_protrain.planner.prediction import TOLERANCE, PhasePrediction, Prediction
from lightning_protrain.report.plan_monitor import (
    NEGLIGIBLE,
    PlanMonitor,
    device_bytes,
    summary,
)
from lightning_protrain.report.timeline import HasPlan
from lightning_protrain.runtime.optim.async_step import Overlap
from lightning_protrain.strategy.overlap import OverlapPlan
from tests.callbacks.stand_ins import PlannedStrategy, Speaker, chat_data, fit
from tests.support.ranks import run_ranks, trainer_on_rank, values

MIB = 2**20


class LoggingSpeaker(Speaker):
    """Logs its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss


KEEP, CHECKPOINT = BlockPolicy.KEEP, BlockPolicy.CHECKPOINT


def _chunk(unit: str, nbytes: int = MIB, resident: bool = False) -> ChunkPlan:
    return ChunkPlan((f"{unit}.weight",), unit, "float32", True, nbytes, resident)


def _plan(*chunks: ChunkPlan, blocks: tuple[BlockPlan, ...] = ()) -> Plan:
    return Plan(chunks, blocks, 2, MemoryTerms(4 * MIB, 2 * MIB, MIB, 512), {})


def _text(plan: Plan, budget: int | None = None, peers: PeerAccess | None = None) -> list[str]:
    console = Console(width=200, color_system=None, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(plan.explain(budget, [] if peers is None else [peers.describe()]))
    return [" ".join(line.split()) for line in console.export_text().splitlines()]


LLAMA = _plan(
    _chunk("model.embed_tokens", 8 * MIB, resident=True),
    *[_chunk(f"model.layers.{i}", resident=i < 2) for i in range(12) for _ in range(3)],
    _chunk("model.norm", 512, resident=True),
    _chunk("lm_head", 8 * MIB),
    blocks=tuple(BlockPlan(f"model.layers.{i}", CHECKPOINT if i > 3 else KEEP) for i in range(12)),
)


SWAPPED = replace(
    LLAMA,
    blocks=(BlockPlan("model.layers.0", BlockPolicy.SWAP, swap_bytes=3 * MIB), *LLAMA.blocks[1:]),
    memory=replace(LLAMA.memory, swapped_activations=3 * MIB),
)


def test_equal_blocks_are_one_row() -> None:
    lines = _text(LLAMA, 16 * MIB)
    assert lines[2:8] == [
        "model.embed_tokens 1 8.0 MiB device",
        "model.layers.0-1 2 x 3 2 x 3.0 MiB device keep",
        "model.layers.2-3 2 x 3 2 x 3.0 MiB streamed keep",
        "model.layers.4-11 8 x 3 8 x 3.0 MiB streamed checkpoint",
        "model.norm 1 512 B device",
        "lm_head 1 8.0 MiB streamed",
    ]
    assert "Parameters: 14.0 MiB on the device, 38.0 MiB streamed through 2 chunk buffers." in lines


def test_memory_is_shown_against_the_budget() -> None:
    lines = _text(LLAMA, 16 * MIB)
    assert "resident states 4.0 MiB 25 % of 16.0 MiB" in lines
    assert "chunk buffers 2.0 MiB 12 % of 16.0 MiB" in lines
    assert "gradients in flight 1.0 MiB 6 % of 16.0 MiB" in lines
    assert "module buffers 512 B 0 % of 16.0 MiB" in lines
    assert "total 7.0 MiB 44 % of 16.0 MiB" in lines
    assert "total 7.0 MiB" in _text(LLAMA)


def test_swapped_activations_have_a_row_if_there_are_any() -> None:
    lines = _text(SWAPPED, 20 * MIB)
    assert "swapped activations 3.0 MiB 15 % of 20.0 MiB" in lines
    assert "total 10.0 MiB 50 % of 20.0 MiB" in lines
    assert "model.layers.0 3 3.0 MiB device swap" in lines
    assert not any("swapped" in line for line in _text(LLAMA, 20 * MIB))


@pytest.mark.parametrize(
    ("overlap", "sentence"),
    [
        (OverlapPlan(), "The host steps the optimizer while the device waits."),
        (
            OverlapPlan(Overlap.BACKWARD),
            "The host steps the optimizer while the device computes: behind backward.",
        ),
    ],
)
def test_the_host_step_is_described(overlap: OverlapPlan, sentence: str) -> None:
    assert overlap.describe(None) == sentence


def test_how_gpus_reach_each_other_is_said_where_it_is_known() -> None:
    access = PeerAccess("none", True, ("rank 1 on a: GPU 1 does not reach GPU 0",))
    assert access.describe() in _text(LLAMA, peers=access)
    assert not any("reach each other" in line for line in _text(LLAMA))


def test_the_strategy_has_what_is_asked_of_it() -> None:
    strategy = ProTrainStrategy()
    assert isinstance(strategy, HasPlan)
    assert strategy.overlap == OverlapPlan()
    with pytest.raises(AttributeError):
        strategy.overlap = OverlapPlan(Overlap.FORWARD)


def test_swapped_bytes_are_logged_apart_and_only_if_a_block_swaps() -> None:
    counters = TransferCounters(uploaded_bytes=5, downloaded_bytes=7, swapped_out_bytes=11, swapped_in_bytes=13)
    logged = device_bytes(SWAPPED, counters)
    assert (logged["streamed_bytes"], logged["swapped_out_bytes"], logged["swapped_in_bytes"]) == (12, 11, 13)
    assert set(device_bytes(LLAMA, counters)) == {"device_bytes", "peak_device_bytes", "streamed_bytes"}


@pytest.mark.parametrize(
    ("chunks", "blocks", "names"),
    [
        ((_chunk("a.0"), _chunk("b.1")), (), ["a.0", "b.1"]),
        ((_chunk("a.0"), _chunk("a.1", 5)), (), ["0", "1"]),
        ((_chunk("a.0"), _chunk("x"), _chunk("a.1")), (), ["a.0", "x", "a.1"]),
        ((_chunk("a.9"), _chunk("a.10")), (), ["9-10"]),
        ((_chunk("a"), _chunk("b")), (), ["a", "b"]),
        ((_chunk(""), _chunk("0"), _chunk("1")), (), ["(root)", "0-1"]),
        ((_chunk("x"),), (BlockPlan("tied", KEEP),), ["x", "tied"]),
    ],
)
def test_only_equal_neighbours_are_joined(
    chunks: tuple[ChunkPlan, ...], blocks: tuple[BlockPlan, ...], names: list[str]
) -> None:
    lines = _text(_plan(*chunks, blocks=blocks))
    table = lines[2 : next(i for i, line in enumerate(lines) if line.startswith("Parameters"))]
    assert [line.split()[0] for line in table] == names


def test_a_unit_in_two_places_says_so() -> None:
    lines = _text(_plan(_chunk("a", resident=True), _chunk("a"), _chunk("a")))
    assert "a 3 3.0 MiB 1 device, 2 streamed" in lines


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (64 * MIB, "64.0 MiB"), (int(12.3 * 2**30), "12.3 GiB")],
)
def test_bytes_have_a_unit(count: int, text: str) -> None:
    assert short_bytes(count) == text


@given(st.integers(0, 2**50))
def test_bytes_are_right_to_a_tenth_of_the_unit(count: int) -> None:
    number, unit = short_bytes(count).split()
    size = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert abs(float(number) * size - count) <= 0.051 * size


@pytest.mark.parametrize(
    ("counters", "budget", "expected"),
    [
        (TransferCounters(), 5, "ProTrain streamed nothing: all model states stayed on the device."),
        (
            TransferCounters(uploaded_bytes=2 * MIB, downloaded_bytes=MIB, prefetch_hits=49, prefetch_misses=1),
            64 * MIB,
            "ProTrain streamed 3.0 MiB through 64.0 MiB; 98 % of 50 fetches prefetched.",
        ),
        (TransferCounters(uploaded_bytes=MIB), None, "ProTrain streamed 1.0 MiB."),
        (
            TransferCounters(uploaded_bytes=MIB, swapped_out_bytes=MIB, swapped_in_bytes=MIB),
            None,
            "ProTrain streamed 1.0 MiB.\nIt swapped 2.0 MiB of activations.",
        ),
        (
            TransferCounters(swapped_out_bytes=MIB),
            None,
            "ProTrain streamed nothing: all model states stayed on the device.\nIt swapped 1.0 MiB of activations.",
        ),
    ],
)
def test_the_summary(counters: TransferCounters, budget: int | None, expected: str) -> None:
    assert summary(counters, budget) == expected


def test_plan_summary_and_bytes_appear_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = PlannedStrategy(SWAPPED, 16 * MIB, OverlapPlan(Overlap.BACKWARD))
    logger = CSVLogger(tmp_path, name="run", version=0)
    fit(LoggingSpeaker(), chat_data(tmp_path), PlanMonitor(), strategy=strategy, logger=logger, max_steps=3)
    output = capsys.readouterr().out
    assert output.index("model.layers.4-11") < output.index("ProTrain streamed")
    assert "ProTrain streamed 11.7 KiB through 16.0 MiB; 100 % of 3 fetches prefetched." in output
    assert "The host steps" not in output  # the strategy says it
    assert "It swapped 900 B of activations." in output
    with (tmp_path / "run" / "version_0" / "metrics.csv").open() as lines:
        logged = [row for row in csv.DictReader(lines) if row["protrain/streamed_bytes"]]
    assert [float(row["protrain/streamed_bytes"]) for row in logged] == [4000, 8000, 12000]
    assert [float(row["protrain/swapped_out_bytes"]) for row in logged] == [200, 400, 600]
    assert [float(row["protrain/swapped_in_bytes"]) for row in logged] == [100, 200, 300]
    assert {float(row["protrain/device_bytes"]) for row in logged} == {4 * MIB + 512 + 500}
    assert {float(row["protrain/peak_device_bytes"]) for row in logged} == {4 * MIB + 512 + 700}


@pytest.mark.parametrize("strategy", ["auto", PlannedStrategy(None, None)], ids=["plain", "without a plan"])
def test_without_a_plan_it_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str | PlannedStrategy
) -> None:
    trainer = fit(Speaker(), chat_data(tmp_path), PlanMonitor(), strategy=strategy)
    assert trainer.global_step == 2
    assert capsys.readouterr().out == ""
    assert not {"protrain/device_bytes", "protrain/streamed_bytes"} & set(trainer.callback_metrics)


PREDICTION = Prediction(
    hardware="Test GPU",
    budget=16 * MIB,
    phases=(PhasePrediction("backward", "", {"activations": 8 * MIB}, {}),),
    step_seconds=2.5,
    busy={"compute": 2.5, "upload": 0.0, "download": 0.0, "host": 0.0},
    bound="compute",
)


def _fit_predicted(folder: Path, measured: int | None) -> list[dict[str, str]]:
    """Rows that are logged in three steps under a plan with a prediction."""
    strategy = PlannedStrategy(replace(LLAMA, prediction=PREDICTION), 16 * MIB)
    strategy.measured_peak_bytes = measured
    strategy.counters.waited_seconds = 0.5
    strategy.allocator_stats = {} if measured is None else {"reserved_peak_bytes": measured, "alloc_retries": 3}
    logger = CSVLogger(folder, name="run", version=0)
    fit(LoggingSpeaker(), chat_data(folder), PlanMonitor(), strategy=strategy, logger=logger, max_steps=3)
    with (folder / "run" / "version_0" / "metrics.csv").open() as lines:
        return [row for row in csv.DictReader(lines) if row["protrain/streamed_bytes"]]


class PlannedRanks(DDPStrategy):
    """Plain training of several ranks that claims to have a plan."""

    plan, budget, counters, overlap = LLAMA, 16 * MIB, TransferCounters(), OverlapPlan()
    measured_peak_bytes: int | None = None
    allocator_stats: ClassVar[dict[str, int]] = {}
    peers = device = None
    session = SimpleNamespace(request=None)


class Recording(DummyLogger):
    """A logger that records every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append(dict(metrics))


def _logged_peaks(rank: int, peaks: list[int]) -> list[float]:
    """Return the peaks that a rank logs in four steps, in which each rank takes one of `peaks`."""
    PlannedRanks.measured_peak_bytes = peaks[rank]
    logger = Recording()
    trainer = trainer_on_rank(
        rank,
        len(peaks),
        PlannedRanks,
        callbacks=[PlanMonitor()],
        max_steps=4,
        log_every_n_steps=2,
        logger=logger,
        accumulate_grad_batches=2,
    )
    trainer.fit(LoggingSpeaker(), torch.ones(16, 1))
    return [call["protrain/measured_peak_bytes"] for call in logger.calls if "protrain/measured_peak_bytes" in call]


@pytest.mark.parametrize("peaks", [[3 * MIB, 8 * MIB], [8 * MIB, 3 * MIB]], ids=["last", "first"])
def test_the_peak_is_that_of_the_worst_rank(peaks: list[int], tmp_path: Path) -> None:
    assert values(run_ranks(_logged_peaks, 2, tmp_path, peaks)) == [[8 * MIB] * 2] * 2


def test_what_was_predicted_stands_beside_what_is_measured(tmp_path: Path) -> None:
    rows = _fit_predicted(tmp_path, 8 * MIB)
    assert {float(row["protrain/predicted_peak_bytes"]) for row in rows} == {8 * MIB}
    assert {float(row["protrain/measured_peak_bytes"]) for row in rows} == {8 * MIB}
    assert {float(row["protrain/reserved_peak_bytes"]) for row in rows} == {8 * MIB}
    assert {float(row["protrain/alloc_retries"]) for row in rows} == {3}
    assert {float(row["protrain/predicted_step_seconds"]) for row in rows} == {2.5}
    assert {float(row["protrain/waited_seconds"]) for row in rows} == {0.5}
    # The first step has no step before it.
    assert [bool(row["protrain/step_seconds"]) for row in rows] == [False, True, True]


def test_a_step_that_is_faster_than_predicted_is_no_news(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = _fit_predicted(tmp_path, 1 * MIB)
    assert max(float(row["protrain/step_seconds"]) for row in rows[1:]) < PREDICTION.step_seconds
    assert [one for one in caught if "predicted" in str(one.message)] == []


def test_nothing_is_measured_where_nobody_counts(tmp_path: Path) -> None:
    rows = _fit_predicted(tmp_path, None)
    assert "protrain/measured_peak_bytes" not in rows[0]


# Of the predicted 8 MiB; beside the tolerance, a megabyte is negligible.
LEAST_WARNED = 1 + TOLERANCE + NEGLIGIBLE / (8 * MIB)


@pytest.mark.parametrize(
    ("factor", "warned"), [(0.5, 0), (1.0, 0), (LEAST_WARNED - 0.01, 0), (LEAST_WARNED + 0.01, 1), (3.0, 1)]
)
def test_more_than_was_predicted_is_said_once(factor: float, warned: int, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit_predicted(tmp_path, int(factor * 8 * MIB))
    said = [str(one.message) for one in caught if "were predicted from the batch" in str(one.message)]
    assert len(said) == warned
    assert all("Lower device_memory" in sentence and "(8388608 bytes)" in sentence for sentence in said)
