"""A measured step stands beside the predicted one on a page and in a trace, and figures reach the loggers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_protrain.device.recording import Span, busy
from lightning_protrain.planner.lanes import LANES, Work, work_of
from lightning_protrain.report.plan_monitor import PlanMonitor
from lightning_protrain.report.timeline import PAGE, TRACE, as_lanes, trace
from tests.callbacks.streamed import train
from tests.support.browser import look_at, needs_browser
from tests.support.models import fit, zoo


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a run of four micro-batches, two to a step, has written."""
    folder = tmp_path_factory.mktemp("measured")
    train(folder, PlanMonitor(timeline=True), max_epochs=4, accumulate_grad_batches=2)
    return folder


def threads(content: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Events by names of their process and thread, in order; raises if the trace is not in Chrome's format."""
    events = content["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    processes = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    named = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert all(type(event[key]) is int for key in ("pid", "tid"))
            assert event["ts"] >= 0
            assert event["dur"] > 0
            assert event["name"]
            assert set(event) <= {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"}
            found.setdefault((processes[event["pid"]], named[event["pid"], event["tid"]]), []).append(event)
    return {key: sorted(own, key=lambda event: event["ts"]) for key, own in found.items()}


def test_the_trace_is_one_that_perfetto_opens(measured: Path) -> None:
    found = threads(json.loads((measured / TRACE).read_text(encoding="utf-8")))
    assert {(who, lane) for who in ("predicted", "measured") for lane in ("compute", "upload", "download", "host")} == {
        *found
    }
    for key, events in found.items():
        # Perfetto drops events of one thread that overlap without one being inside the other.
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1e-3 for one, other in pairwise(events)), key
    for who in ("predicted", "measured"):
        kinds = {event["name"] for event in found[who, "compute"]}
        assert {"forward", "backward"} <= kinds
        assert {event["name"] for event in found[who, "host"]} >= {"optimizer step"}
    assert {event["args"].get("unit", "") for event in found["predicted", "compute"]} > {""}


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_legible(measured: Path, tmp_path: Path, width: int) -> None:
    seen = look_at((measured / PAGE).read_text(encoding="utf-8"), width, True, tmp_path)
    assert seen["faults"] == []
    assert seen["drawn"] == 8  # Four lanes, twice.


def test_a_measured_run_computes_the_same(tmp_path: Path) -> None:
    modules = [train(tmp_path, PlanMonitor(timeline=timeline), max_epochs=2)[1] for timeline in (False, True)]
    assert (tmp_path / PAGE).is_file()
    assert all(map(torch.equal, modules[0].losses, modules[1].losses))
    assert all(map(torch.equal, modules[0].parameters(), modules[1].parameters()))


@pytest.mark.parametrize(("monitor", "steps"), [(PlanMonitor(), 4), (PlanMonitor(timeline=True), 2)])
def test_nothing_is_written_without_timeline_or_in_a_short_run(
    tmp_path: Path, monitor: PlanMonitor, steps: int
) -> None:
    trainer, _ = train(tmp_path, monitor, max_epochs=-1, max_steps=steps)
    assert trainer.global_step == steps
    assert not any(tmp_path.iterdir())


def test_plain_runs_are_not_measured(tmp_path: Path) -> None:
    fit(zoo()["dropout"](), callbacks=[PlanMonitor(timeline=True)], default_root_dir=tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_run_that_fails_records_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, devices = zoo()["dropout"](), list[Any]()
    step = module.training_step

    def fails(batch: Any, batch_idx: int) -> Any:
        device = module.trainer.strategy.device
        if device.recording is not None:
            devices.append(device)
            raise RuntimeError("planted")
        return step(batch, batch_idx)

    monkeypatch.setattr(module, "training_step", fails)
    with pytest.raises(RuntimeError, match="planted"):
        train(tmp_path, PlanMonitor(timeline=True), module)
    assert [device.recording for device in devices] == [None]
    assert not (tmp_path / PAGE).exists()


SPANS = st.lists(
    st.tuples(
        st.sampled_from(["compute", "stall", "upload", "download", "swap_out", "swap_in", "host"]),
        st.integers(0, 40),
        st.integers(1, 20),
    ),
    min_size=1,
    max_size=12,
)


@given(SPANS, st.booleans())
def test_measured_lanes_are_apart_and_as_long_as_what_was_recorded(
    given: Sequence[tuple[Any, int, int]], beside: bool
) -> None:
    spans = [Span(lane, begin, begin + length) for lane, begin, length in given]
    lanes = as_lanes(spans, beside)
    for lane in LANES:
        own = [work for work in lanes if work.lane == lane]
        assert all(one.end <= other.begin for one, other in pairwise(own))
    assert work_of(lanes, "upload") == busy(spans, "upload", "swap_in")
    assert work_of(lanes, "download") == busy(spans, "download", "swap_out")
    assert work_of(lanes, "host") == busy(spans, "host")
    idle = ["stall", *([] if beside else ["upload", "download", "swap_out", "swap_in"])]
    both = busy(spans, "compute", *idle) - busy(spans, *idle)
    assert work_of(lanes, "compute") == both
    assert min((work.begin for work in lanes), default=0) == 0


def test_a_trace_without_a_prediction_has_the_measured_step_alone() -> None:
    found = threads(trace([], [Work("compute", 0.0, 1.5, "forward")]))
    assert list(found) == [("measured", "compute")]
    assert found["measured", "compute"][0]["dur"] == 1.5e6


# --- figures ----------------------------------------------------------------------------------------------------------


def test_tensorboard_gets_the_figures(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="run", version=0)
    train(tmp_path, PlanMonitor(timeline=True), max_epochs=3, logger=logger)
    events = EventAccumulator(str(tmp_path / "run" / "version_0"), size_guidance={"images": 0})
    events.Reload()
    tags = {f"protrain/{name}": step for name, step in (("plan", 0), ("prediction", 0), ("measured_step", 2))}
    assert set(events.Tags()["images"]) == set(tags)
    for tag, step in tags.items():
        (image,) = events.Images(tag)
        assert image.step == step
        assert (image.width, image.height) == (900, 360)


@pytest.mark.slow
def test_wandb_gets_the_figures_offline(tmp_path: Path) -> None:
    # In a process of its own: W&B leaves another one that serves it.
    command = [sys.executable, "-m", "tests.callbacks.streamed", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120, cwd=Path(__file__).parents[2])
    names = {path.name.split("_")[0] for path in tmp_path.rglob("media/images/protrain/*.png")}
    assert names == {"plan", "prediction"}


def test_without_matplotlib_nothing_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "lightning_protrain.report.timeline.find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    logger = TensorBoardLogger(tmp_path, name="run", version=0)
    train(tmp_path, PlanMonitor(), max_epochs=1, logger=logger)
    events = EventAccumulator(str(tmp_path / "run" / "version_0"))
    events.Reload()
    assert events.Tags()["images"] == []


def test_other_loggers_get_none(tmp_path: Path) -> None:
    train(tmp_path, PlanMonitor(), max_epochs=1, logger=CSVLogger(tmp_path, name="run", version=0))
    assert not list(tmp_path.rglob("*.png"))


def test_pictures_that_cannot_be_written_end_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / PAGE).mkdir()
    logger = TensorBoardLogger(tmp_path, name="run", version=0)

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logger.experiment, "add_image", full)
    with pytest.warns(UserWarning, match="cannot be written") as told:
        trainer, _ = train(tmp_path, PlanMonitor(timeline=True), max_epochs=3, logger=logger)
    said = [str(one.message) for one in told]
    assert sum(one.startswith("The measured step cannot be written: ") for one in said) == 1
    assert sum(one.startswith("Figures of the plan are not logged: OSError") for one in said) == 2
    assert trainer.state.finished
