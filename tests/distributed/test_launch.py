"""Two ranks, however they are started, give the weights of DDP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_protrain import ProTrainCheckpointIO
from tests.distributed import launched
from tests.support.rank_models import Module
from tests.support.ranks import run_ranks, trainer_on_rank, values

ROOT = Path(__file__).resolve().parents[2]
STARTS = {
    "script": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    "spawn": [sys.executable],
}


def train(how: str, plan: str, folder: Path) -> dict[str, Tensor]:
    path = folder / f"{plan}.pt"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*STARTS[how], str(launched.__file__), how, plan, str(path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Tensor] = torch.load(path, weights_only=True)
    (newest,) = path.with_suffix("").iterdir()
    saved = ProTrainCheckpointIO().load_checkpoint(newest)["state_dict"]
    assert saved.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in saved.items())
    return found


def _train_with_ddp(rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = Module("tied")
    trainer_on_rank(rank, 2, max_steps=5).fit(module)
    return {name: value.numpy() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = values(run_ranks(_train_with_ddp, 2, tmp_path_factory.mktemp("ddp")))[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", STARTS)
def test_every_way_to_start_gives_the_weights_of_ddp(how: str, expected: dict[str, Any], tmp_path: Path) -> None:
    found = train(how, "offload", tmp_path)
    assert list(found) == list(expected)
    assert [name for name, value in expected.items() if not torch.equal(torch.from_numpy(value), found[name])] == []
