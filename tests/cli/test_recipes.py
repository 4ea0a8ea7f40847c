"""Each recipe is planned from its config, without weights, for the machine that it is for."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_protrain import CausalLMModule
from lightning_protrain.cli import ProTrainCLI
from lightning_protrain.planner.plan import Plan
from tests.whole_runs.support import documented

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 1 << 30
# Billions of parameters, and bytes of each parameter on the device and the host together.
RECIPES: dict[str, tuple[float, float]] = {
    "lora-8b": (8.07, 2.0),
    "qlora-27b": (27.1, 0.6),
    "full-7b": (7.24, 8.0),
    "four-cards": (8.03, 8.0),
}
pytestmark = pytest.mark.leaves("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_the_size_that_it_is_called_after(name: str) -> None:
    """Counted with adapters; where weights are quantised two of their elements are a byte."""
    module = CausalLMModule(**read(name)["model"]["init_args"])
    with torch.device("meta"):
        module.configure_model()
    billions, _ = RECIPES[name]
    number = sum(p.numel() * (2 if p.dtype is torch.uint8 else 1) for p in module.parameters())
    assert number / 1e9 == pytest.approx(billions, rel=0.01)
    assert all(parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize("name", [*RECIPES, "slurm"])
def test_a_recipe_says_how_it_is_run(name: str) -> None:
    text, given = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"), read(name)
    assert f"fit --config configs/{name}.yaml --model.config null --model.model models/" in text
    assert given["trainer"]["logger"]["init_args"]["name"] == name
    assert given["model"]["init_args"]["dtype"] == "bfloat16"
    if "lora" not in given["model"]["init_args"]:
        # Moments have the dtype of their weights: in float32 they would not fit.
        assert given["trainer"]["precision"] == "bf16-true"


def test_every_plan_for_another_gpu_names_its_host() -> None:
    """Figures beside such a command would be those of whoever reads it otherwise."""
    pages = [CONFIGS.parent / "README.md", *(CONFIGS.parent / "docs").glob("*.md"), *CONFIGS.glob("*.yaml")]
    texts = [page.read_text(encoding="utf-8").replace("\\\n#", " ").replace("\\\n", " ") for page in pages]
    commands = [line for text in texts for line in text.splitlines() if "-protrain plan " in line and "--gpu" in line]
    assert len(commands) > 8
    assert [line for line in commands if "--host_cores " not in line or "--host_memory " not in line] == []


def test_the_job_of_the_cluster_is_that_of_its_config() -> None:
    text, trainer = (CONFIGS / "slurm.yaml").read_text(encoding="utf-8"), read("slurm")["trainer"]
    assert f"#SBATCH --nodes={trainer['num_nodes']}\n" in text
    assert f"#SBATCH --ntasks-per-node={trainer['devices']}\n" in text
    assert f"#SBATCH --gpus-per-node={trainer['devices']}\n" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_machine(name: str) -> None:
    """Planned by the command that its first lines give."""
    billions, state_bytes = RECIPES[name]
    Path("configs").symlink_to(CONFIGS)
    (line,) = (line for line in documented() if f"plan --config configs/{name}.yaml" in line)
    ProTrainCLI([*shlex.split(line)[1:], "--json=plans.json"])
    assert {each.name for each in Path().iterdir()} == {"configs", "plans.json"}
    (content,) = json.loads(Path("plans.json").read_text()).values()
    plan = Plan.from_json(json.dumps(content))
    prediction = plan.prediction
    assert prediction is not None
    assert plan.memory.resident_states < prediction.device_bytes < 24 * GIB
    page = (CONFIGS.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| `{name}.yaml`"))
    assert prediction.tokens_per_second == pytest.approx(float(row.split("|")[-2].replace(",", "")), rel=0.05)
    assert prediction.host_bytes < (240 if name == "four-cards" else 56) * GIB
    assert prediction.device_bytes + prediction.host_bytes > state_bytes * billions * 1e9
    assert sum(chunk.nbytes for chunk in plan.chunks) < 24 * GIB
    assert prediction.step_seconds > 0
