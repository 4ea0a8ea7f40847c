"""What the ranks of a machine hold while they load a model, as a user would start them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

# Of each process: what it imports, and what it keeps beside weights (modules, plans, gloo).
ALLOWANCE = 16 << 20


def held(processes: list[int]) -> int:
    """Bytes that processes hold, of which what some share counts once."""
    total = 0
    for process in processes:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def said(folder: Path, word: str) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob(f"{word}-*.said"))]


def peak_of(model: Path, folder: Path, dtype: str, who: str, ranks: int) -> tuple[int, int]:
    """The most that all ranks hold together from before they load until they are set up, beyond what they held then.

    Returns:
        That, and the bytes of the weights.
    """
    folder.mkdir()
    script = [sys.executable, "-m", "tests.distributed.loaded"]
    with (folder / "log").open("w") as log:
        begun = subprocess.Popen([*script, str(model), str(folder), dtype, who, str(ranks)], stdout=log, stderr=log)
        try:
            while len(said(folder, "load")) < ranks and begun.poll() is None:
                time.sleep(0.1)
            processes = said(folder, "load")
            assert len(processes) == ranks, (folder / "log").read_text()[-2000:]
            before, peak = held(processes), 0
            (folder / "load").touch()
            while len(said(folder, "end")) < ranks and begun.poll() is None:
                peak = max(peak, held(processes))
                time.sleep(0.02)
            assert len(said(folder, "end")) == ranks, (folder / "log").read_text()[-2000:]
            peak = max(peak, held(processes))
        finally:
            (folder / "load").touch()
            (folder / "end").touch()
            begun.wait()
    return peak - before, said(folder, "end")[0]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 210 MB in bfloat16."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "vocab_size": 2000}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=16)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="100MB")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="only Linux says what processes share")
@pytest.mark.parametrize(("dtype", "ranks"), [("bfloat16", 4), ("float32", 2)])
def test_the_ranks_of_a_machine_hold_the_weights_once_while_they_load(
    dtype: str, ranks: int, large: Path, tmp_path: Path
) -> None:
    peak, weights = peak_of(large, tmp_path / "first", dtype, "first", ranks)
    assert weights > 200e6
    assert 0.95 * weights < peak < 1.10 * weights + ranks * ALLOWANCE


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").is_file(), reason="only Linux says what processes share")
def test_where_every_rank_loads_each_has_all_weights(large: Path, tmp_path: Path) -> None:
    """What the test before measures is there."""
    peak, weights = peak_of(large, tmp_path / "all", "bfloat16", "all", 2)
    assert peak > 0.9 * 2 * weights
