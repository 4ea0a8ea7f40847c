"""Two ranks, however they are started, give the weights of DDP started the same way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_protrain import ProTrainCheckpointIO
from tests.distributed import launched

ROOT = Path(__file__).resolve().parents[2]
STARTS = {
    "script": [sys.executable],
    "module": [sys.executable, "-m"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    "spawn": [sys.executable],
}


def train(how: str, plan: str, folder: Path) -> dict[str, Tensor]:
    path = folder / f"{plan}.pt"
    target = "tests.distributed.launched" if how == "module" else str(launched.__file__)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*STARTS[how], target, how, plan, str(path)],
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


@pytest.mark.slow
@pytest.mark.parametrize("how", STARTS)
def test_every_way_to_start_gives_the_weights_of_ddp(how: str, tmp_path: Path) -> None:
    expected, found = train(how, "ddp", tmp_path), train(how, "offload", tmp_path)
    assert list(found) == list(expected)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
