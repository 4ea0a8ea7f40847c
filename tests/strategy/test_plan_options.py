"""What the arguments of a strategy say about a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lightning_protrain import ProTrainStrategy
from lightning_protrain.config import PlanOptions
from lightning_protrain.strategy.plan_session import read_plan_choice
from tests.support.models import zoo
from tests.support.plans import half


@pytest.mark.parametrize("source", ["command line", "config"])
@pytest.mark.parametrize("name", ["auto", "offload", "plan.json", "none.json"])
def test_parsers_of_command_lines_leave_names_and_paths(name: str, source: str, tmp_path: Path) -> None:
    """They would read a file that is there, as a config."""
    half(next(iter(zoo().values()))()).save(tmp_path / "plan.json")
    given = str(tmp_path / name) if name.endswith(".json") else name
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(ProTrainStrategy, "strategy")
    (tmp_path / "config.yaml").write_text(f"strategy:\n  plan: {given}\n")
    options = [f"--strategy.plan={given}"] if source == "command line" else [f"--config={tmp_path / 'config.yaml'}"]
    found = parser.parse_args(options)
    assert found.strategy.plan == given
    assert f"plan: {given}\n" in parser.dump(found)


@pytest.mark.parametrize("preset", ["auto", "resident", "offload"])
def test_presets_are_taken_by_name(preset: str) -> None:
    assert read_plan_choice(preset) == preset


def test_a_plan_is_taken_as_it_is_or_from_its_path(tmp_path: Path) -> None:
    plan = half(next(iter(zoo().values()))())
    plan.save(tmp_path / "plan.json")
    assert read_plan_choice(plan) is plan
    assert read_plan_choice(tmp_path / "plan.json") == plan
    assert read_plan_choice(str(tmp_path / "plan.json")) == plan


@pytest.mark.parametrize("plan", [None, 7, ["auto"], "Auto", "nowhere.json"])
def test_anything_else_is_refused(plan: Any) -> None:
    with pytest.raises(ValueError, match=r'[Gg]ive plan="auto"|give "auto", "resident", "offload", a Plan'):
        read_plan_choice(plan)


@pytest.mark.parametrize(("text", "nbytes"), [("auto", None), ("2GiB", 2 << 30), (512, 512)])
def test_memory_is_read_in_units(text: str | int, nbytes: int | None) -> None:
    assert PlanOptions(device_memory=text).device_bytes == nbytes
    assert PlanOptions(host_memory=text).host_bytes == nbytes


@pytest.mark.parametrize("number", [0, -1, 1.0, True, None])
def test_min_num_params_is_a_positive_number(number: Any) -> None:
    with pytest.raises(ValueError, match="give a positive number of parameters"):
        PlanOptions(min_num_params=number)


def test_a_whole_plan_leaves_knobs_nothing_to_decide() -> None:
    plan = half(next(iter(zoo().values()))())
    with pytest.raises(ValueError, match="num_chunk_buffers"):
        ProTrainStrategy(plan=plan, num_chunk_buffers=2)
    ProTrainStrategy(plan=plan)
