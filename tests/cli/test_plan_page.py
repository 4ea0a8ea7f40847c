"""The page of plans is whole, shows every plan, and reaches for nothing outside of itself."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_protrain.cli import ProTrainCLI
from lightning_protrain.planner.explain import short_bytes, short_seconds, unit_rows
from lightning_protrain.planner.plan import Plan
from lightning_protrain.report.chart_data import Charts, Moment
from lightning_protrain.report.plan_page import page
from lightning_protrain.report.svg import coloured, memory_legend
from tests.support.browser import look_at, needs_browser

VOID = {"meta"}
GPUS = ("RTX 3090", "A100 80GB SXM")
pytestmark = pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


class Whole(HTMLParser):
    """Refuses what is not closed, and keeps texts, titles and widths."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.bars: list[float] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.attributes += named.items()
        if named.get("class") == "bar":
            self.bars.append(0.0)
        if width := re.search(r"width:([0-9.]+)%", named.get("style", "")):
            self.bars[-1] += float(width[1])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a command writes: plans of two GPUs, and their page."""
    folder = tmp_path_factory.mktemp("plans")
    sizes = "hidden_size: 64, num_hidden_layers: 4, intermediate_size: 128, num_attention_heads: 4, vocab_size: 128"
    given = ["plan", *[f"--gpu={name}" for name in GPUS], "--data=null", "--length=64", "--trainer.max_epochs=1"]
    model = f"--model.config={{model_type: llama, {sizes}}}"
    streams = ["--trainer.strategy=lightning_protrain.ProTrainStrategy", "--trainer.strategy.device_memory=2MiB"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lightning-protrain"])
        ProTrainCLI([*given, model, *streams, f"--json={folder / 'plans.json'}", f"--html={folder / 'plans.html'}"])
    return folder


@pytest.fixture(scope="module")
def answers(written: Path) -> dict[str, Plan | ValueError]:
    content = json.loads((written / "plans.json").read_text(encoding="utf-8"))
    plans = {name: Plan.from_json(json.dumps(plan)) for name, plan in content.items()}
    return {**plans, "too <small>": ValueError("No plan fits: 5 < 6 & 7")}


@pytest.mark.slow
def test_the_command_writes_the_page(written: Path, answers: dict[str, Plan | ValueError]) -> None:
    text = (written / "plans.html").read_text(encoding="utf-8")
    assert "Planned for a micro-batch of 1 x 64 tokens" in text
    assert all(name in text for name in answers if "small" not in name)


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_is_legible(written: Path, tmp_path: Path, width: int, dark: bool) -> None:
    seen = look_at((written / "plans.html").read_text(encoding="utf-8"), width, dark, tmp_path)
    assert seen["faults"] == []
    assert seen["dark"] is dark
    assert seen["texts"] > 100
    assert seen["drawn"] == len(GPUS) * 7  # Four lanes, the memory, and two curves.


@needs_browser
def test_a_browser_finds_what_is_not_legible(tmp_path: Path) -> None:
    text = (
        '<body style="background:#fff"><div style="width:2000px">wide</div><b style="color:#bbb">pale</b>'
        '<i style="font-size:8px">tiny</i><div class="axis" style="position:relative"><span style="position:absolute">'
        'one</span><span style="position:absolute">two</span></div></body>'
    )
    faults = look_at(text, 390, False, tmp_path)["faults"]
    assert [fault.split(":")[0] for fault in faults] == [
        "wider than the window",
        "pale",
        "small",
        "on top of each other",
    ]


def test_the_page_shows_a_step_of_each_plan(written: Path) -> None:
    found = Whole((written / "plans.html").read_text(encoding="utf-8"))
    assert found.texts.count("A step in time") == found.texts.count("Memory of the device over a step") == len(GPUS)
    labels = [value for key, value in found.attributes if key == "aria-label"]
    lanes = [label.split(":")[0] for label in labels if ": works for" in label]
    assert sorted(lanes) == sorted(("compute", "upload", "download", "host") * len(GPUS))
    assert "Tokens per second by device memory" in labels
    assert "Tokens per second by samples of a micro-batch" in labels


def test_the_curves_pass_through_the_plan(written: Path, answers: dict[str, Plan | ValueError]) -> None:
    text = (written / "plans.html").read_text(encoding="utf-8")
    predictions = [plan.prediction for plan in answers.values() if isinstance(plan, Plan)]
    assert len(predictions) == len(GPUS)
    for prediction in predictions:
        assert prediction is not None
        rate = f"<td>{prediction.tokens_per_second:,.0f}</td>"
        assert f"<td>2.0 MiB</td>{rate}" in text
        assert f"<td>1</td>{rate}" in text


def test_the_page_shows_every_plan(answers: dict[str, Plan | ValueError]) -> None:
    found = Whole(page(answers, "For <one> batch."))
    text = " ".join(found.texts)
    assert "For <one> batch." in text
    assert "No plan fits: 5 < 6 & 7" in text
    for name, plan in answers.items():
        assert found.texts.count(name) >= 2  # In the comparison, and above its own part.
        if isinstance(plan, Plan):
            prediction = plan.prediction
            assert prediction is not None
            assert short_seconds(prediction.step_seconds) in text
            for phase in prediction.phases:
                assert {phase.name, short_bytes(phase.device_bytes)} <= set(found.texts)
            titles = [value for key, value in found.attributes if key == "title"]
            named = [row.name or "(root)" for row in unit_rows(plan)]
            assert all(any(title.startswith(f"{name}: ") for title in titles) for name in named)
            assert str(plan.explain()) in text


@pytest.mark.parametrize(("share", "also"), [(1.0, 0), (0.5, 1)])
def test_a_step_takes_as_long_in_its_chart_as_above(
    share: float, also: int, answers: dict[str, Plan | ValueError]
) -> None:
    name, plan = next(iter(answers.items()))
    assert isinstance(plan, Plan)
    assert plan.prediction is not None
    seconds = plan.prediction.step_seconds
    text = page({name: plan}, "", {name: Charts(share * seconds, (), [Moment(0.0, "forward", {"activations": 1})])})
    assert text.count(f"A step takes {short_seconds(seconds)}, bound by") == 1
    assert text.count(f"others: {short_seconds(share * seconds)}.") == also


def test_a_legend_names_what_its_chart_shows() -> None:
    colours = coloured([{"gradients": 1, "activations": 0}, {"gradients": 0, "activations": 2}])
    text = memory_legend(colours, [{"gradients": 1, "activations": 0}])
    assert "gradients" in text
    assert "activations" not in text


def test_no_bar_is_longer_than_the_whole(answers: dict[str, Plan | ValueError]) -> None:
    found = Whole(page(answers, ""))
    assert found.bars
    assert max(found.bars) <= 100.1
    assert max(found.bars) > 99  # Something is the longest.


def test_the_page_needs_nothing_else(answers: dict[str, Plan | ValueError]) -> None:
    text = page(answers, "")
    assert not re.search(r"<script|<link|@import|url\(|https?:", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    for name in set(re.findall(r"background:var\(--([a-z]+)\)", text)):
        assert f"--{name}: #" in text


def test_a_single_plan_has_no_comparison(answers: dict[str, Plan | ValueError]) -> None:
    name, plan = next(iter(answers.items()))
    assert "Comparison" not in page({name: plan}, "")
    assert "Comparison" in page(answers, "")


def test_a_plan_without_a_prediction_has_its_weights(answers: dict[str, Plan | ValueError]) -> None:
    plan = next(plan for plan in answers.values() if isinstance(plan, Plan))
    text = page({"": replace(plan, prediction=None)}, "")
    assert "What lives where" in text
    assert "Memory of the device by phase" not in text
    assert "this machine" in text
