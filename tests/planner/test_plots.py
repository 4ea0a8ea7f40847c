"""`plot()` draws a plan and its prediction to scale, on a figure of its own or on given axes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_protrain.config import Knobs
from lightning_protrain.planner.advice import predict
from lightning_protrain.planner.lanes import work_of
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.plots import GIB, MISSING, plot_lanes
from lightning_protrain.planner.search import search
from lightning_protrain.planner.step_time import lanes
from tests.planner.problems import large_problem

PROBLEM = large_problem(8, 2)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return predict(PROBLEM, search(PROBLEM, Knobs(num_persistent_chunks=4)))


@pytest.fixture(autouse=True)
def _no_window() -> Iterator[None]:
    before = matplotlib.get_backend()
    matplotlib.use("agg")
    yield
    plt.close("all")
    matplotlib.use(before)


def lengths(ax: Axes, label: str) -> float:
    """Sum of the heights, or widths, of the bars of one kind."""
    (bars,) = [bars for bars in ax.containers if bars.get_label() == label]
    return sum(bar.get_height() if bars.orientation == "vertical" else bar.get_width() for bar in bars)


def test_a_plan_shows_its_weights(plan: Plan) -> None:
    fig, ax = plan.plot()
    assert isinstance(fig, Figure)
    resident = sum(chunk.nbytes for chunk in plan.chunks if chunk.resident)
    streamed = sum(chunk.nbytes for chunk in plan.chunks if not chunk.resident)
    assert streamed > 0
    assert lengths(ax, "weights on the device") == pytest.approx(resident / GIB)
    assert lengths(ax, "weights streamed from the host") == pytest.approx(streamed / GIB)


def test_a_prediction_shows_its_phases(plan: Plan) -> None:
    assert plan.prediction is not None
    _, ax = plan.prediction.plot()
    drawn = {bars.get_label(): lengths(ax, bars.get_label()) for bars in ax.containers}
    held: dict[str, int] = {}
    for phase in plan.prediction.phases:
        for term, nbytes in phase.device.items():
            held[term.replace("_", " ")] = held.get(term.replace("_", " "), 0) + nbytes
    others = sum(nbytes for name, nbytes in held.items() if name not in drawn)
    assert others < min(held[name] for name in drawn if name != "others")
    expected = {name: nbytes for name, nbytes in {**held, "others": others}.items() if name in drawn}
    assert drawn == pytest.approx({name: nbytes / GIB for name, nbytes in expected.items()})
    assert sum(drawn.values()) == pytest.approx(sum(held.values()) / GIB)
    assert [label.get_text() for label in ax.get_yticklabels()] == [phase.name for phase in plan.prediction.phases]
    assert "tokens per second" not in ax.get_title()  # The profile does not know them.


def test_lanes_are_as_long_as_their_work(plan: Plan) -> None:
    spans = lanes(PROBLEM, plan)
    seconds = max(span.end for span in spans)
    _, ax = plot_lanes(spans, seconds)
    drawn = sum(box.width for bars in ax.collections for path in bars.get_paths() for box in [path.get_extents()])
    assert drawn == pytest.approx(sum(work_of(spans, lane) for lane in {span.lane for span in spans}))
    assert ax.get_xlim() == (0, seconds)


@pytest.mark.parametrize("what", ["plan", "prediction"])
def test_given_axes_are_drawn_on(plan: Plan, what: str) -> None:
    fig, (left, right) = plt.subplots(1, 2)
    drawn: Any = plan if what == "plan" else plan.prediction
    assert drawn.plot(ax=right) == (fig, right)
    assert right.containers
    assert not left.containers


def test_without_matplotlib_one_line_names_the_extra(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ModuleNotFoundError, match=f"^{re.escape(MISSING)}$"):
        plan.plot()
    assert "[plots]" in MISSING
