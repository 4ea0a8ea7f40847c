"""Processor time of the commands that answer without a config, beside that of importing PyTorch in the same run."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

PLAN = """
import sys
import lightning_protrain_command
sys.argv[1:] = {}
try:
    lightning_protrain_command.main()
finally:
    print(*sys.modules, file=sys.stderr)
"""
HOST = ["--gpu", "RTX 4090", "--host-memory", "256GiB", "--host-cores", "8"]


def _seconds(code: str) -> float:
    """Return the least processor time that a program takes in three runs."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


@pytest.mark.sample(0)  # It measures time: try it on an idle machine.
@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_plan_by_name_takes_few_times_as_long_as_importing_torch(method: str) -> None:
    plan = ["plan", "Qwen/Qwen3-8B", "--method", method, "--batch-size", "1", *HOST]
    assert _seconds(PLAN.format(plan)) < 5 * _seconds("import torch")  # 5.5 with the compiler


@pytest.mark.slow
def test_a_plan_by_name_imports_no_compiler() -> None:
    code = PLAN.format(["plan", "HuggingFaceTB/SmolLM2-135M", "--batch-size", "1", *HOST])
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    imported = ended.stderr.split()
    assert "peft" in imported
    assert "torch._inductor.compile_fx" not in imported
