"""The catalogue: units are right, siblings are in order, and names are found however they are written."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from lightning_protrain.profiler.gpu_specs import (
    CALIBRATION,
    CAPABILITIES,
    CATALOGUE,
    GIB,
    GPU,
    HALF_RATE_EFFICIENCY,
    MATMUL_EFFICIENCY,
    capability,
    find,
    gpu,
)
from lightning_protrain.profiler.records import HardwareProfile
from tests.support.machines import implausible

lines = pytest.mark.parametrize("line", CATALOGUE, ids=lambda line: line.name)


@pytest.fixture(autouse=True)
def _data_sheets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what has been measured."""
    monkeypatch.setitem(CALIBRATION, "gpus", {})


def profile(name: str) -> HardwareProfile:
    return gpu(name, 64 * GIB, 16)


def test_a_measured_gpu_has_its_measured_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    before = profile("H100 SXM"), profile("H200")
    rates = {"upload": 53.4e9, "flops": {"bfloat16": 7.8e14}}
    monkeypatch.setitem(CALIBRATION, "gpus", {"H100 SXM": rates})
    found = profile("NVIDIA H100 80GB HBM3")
    assert (found.upload, found.flops["bfloat16"]) == (53.4e9, 7.8e14)
    assert found.flops["float32"] == before[0].flops["float32"]
    assert replace(found, upload=before[0].upload, flops=before[0].flops) == before[0]
    assert profile("H200") == before[1]


@lines
def test_units_are_right(line: GPU) -> None:
    assert 8 <= line.gib <= 288, "GiB"
    assert 200 <= line.memory <= 10_000, "GB/s"
    assert 5 <= line.float32 <= 200, "TFLOP/s"
    assert 20 <= line.half <= 3000, "TFLOP/s, dense"
    assert line.half >= 1.9 * line.float32
    # What lies between arithmetic and memory has grown slowly: a figure with sparsity, or in other units, sticks out.
    assert 50 <= 1000 * line.half / line.memory <= 500
    assert line.source.startswith(("https://www.nvidia.com/", "https://images.nvidia.com/", "https://d1.awsstatic.com/",
                                   "https://www.amd.com/"))  # fmt: skip


@lines
def test_a_profile_is_below_the_peak_and_plausible(line: GPU) -> None:
    machine = profile(line.name)
    assert implausible(machine) == []
    assert 0.8 * line.gib * GIB < machine.device_bytes < line.gib * GIB
    assert machine.memory < line.memory * 1e9
    assert machine.flops["float16"] >= machine.flops["float32"]
    share = HALF_RATE_EFFICIENCY if line.half_rate else MATMUL_EFFICIENCY[line.vendor]
    assert machine.flops["float16"] == line.half * 1e12 * share
    # The names of GeForce cards have no letter before the number, and no generation behind it.
    geforce = re.fullmatch(r"RTX \d0\d0( Ti)?( SUPER)?( 16GB)?", line.name) is not None
    assert line.half_rate == (geforce or line.name == "A10G")
    assert ("bfloat16" in machine.flops) is line.bfloat16
    assert 10e9 < machine.upload < 64e9
    assert machine.upload_beside < machine.upload
    assert machine.host_step < machine.device_step
    assert HardwareProfile.from_json(machine.to_json()) == machine


@pytest.mark.parametrize(
    "names",
    [
        ("RTX 3060", "RTX 3080", "RTX 3090", "RTX 3090 Ti", "RTX 4090", "RTX 5090"),
        ("T4", "L4", "A10", "A100 40GB", "H100 SXM", "B200"),
        ("RTX 4060 Ti 16GB", "RTX 4070 Ti SUPER", "RTX 4080", "RTX 4090"),
        ("RTX A5000", "RTX A6000", "RTX 6000 Ada"),
    ],
    ids=lambda names: names[0],
)
def test_the_larger_sibling_is_faster(names: tuple[str, ...]) -> None:
    for small, large in pairwise(profile(name) for name in names):
        assert small.flops["float16"] < large.flops["float16"]
        assert small.memory <= large.memory
        assert small.upload <= large.upload


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("rtx3090", "RTX 3090"),
        ("RTX 3090", "RTX 3090"),
        ("3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("RTX-3090 (24GB)", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("4060ti-16gb", "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Tesla T4", "T4"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla V100-SXM2-32GB", "V100 SXM 32GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("h200", "H200"),
        ("AMD Instinct MI300X OAM", "MI300X"),
    ],
)
def test_names_are_found_however_they_are_written(name: str, found: str) -> None:
    assert find(name).name == found
    assert profile(name).name == found


@lines
def test_every_name_means_one(line: GPU) -> None:
    for name in (line.name, *line.aliases):
        assert find(name) is find(name.lower()) is find(f"NVIDIA {name}") is line


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("RTX 3900", "Did you mean .*'RTX 3090'.*"),
        ("A100", "Did you mean .*'A100 40GB' or 'A100 80GB PCIe' or 'A100 80GB SXM'.*"),
        ("H100", "Did you mean .*'H100 PCIe' or 'H100 SXM'.*"),
        ("RTX 4060 Ti", "Did you mean .*'RTX 4060 Ti 16GB'.*"),
        ("V100", "Did you mean .*'V100 SXM 16GB'.*"),
        ("MI30X", "Did you mean .*'MI300X'.*"),
        *((name, "") for name in ("", "NVIDIA", "a toaster")),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"No GPU '{name}' is in the catalogue. {near}Known GPUs: RTX 3060, ") as error:
        profile(name)
    assert all(line.name in str(error.value) for line in CATALOGUE)


@pytest.mark.parametrize(("host_bytes", "cores"), [(0, 8), (-1, 8), (1e9, 8), (True, 8), (GIB, 0), (GIB, 2.5)])
def test_a_host_without_memory_or_cores_is_an_error(host_bytes: int, cores: int) -> None:
    with pytest.raises(ValueError, match="give a positive integer"):
        gpu("RTX 3090", host_bytes, cores)


def test_the_host_is_the_users() -> None:
    few, many, most = (gpu("RTX 3090", 64 * GIB, cores) for cores in (8, 16, 1000))
    assert few.host_bytes == 64 * GIB
    assert 2 * few.host_step == many.host_step < most.host_step
    assert most.host_memory == 200e9


def test_the_page_shows_the_catalogue() -> None:
    text = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text(encoding="utf-8")
    for line in CATALOGUE:
        half = f"{line.half:g}" + ("" if line.bfloat16 else " (no bfloat16)")
        cells = (
            line.name,
            str(line.gib),
            f"{line.memory:g}",
            f"{line.float32:g}",
            half,
            f"{line.pcie}.0 x{line.lanes}",
        )
        assert f"| {' | '.join(cells)} | [data sheet]({line.source}) |" in text
    assert text.count("[data sheet]") == len(CATALOGUE)


def test_every_nvidia_gpu_has_a_compute_capability() -> None:
    for line in CATALOGUE:
        found = capability(line.name)
        assert (found is not None) == (line.vendor == "nvidia"), line
        # Tensor cores know bfloat16 from Ampere on.
        assert found is None or (found >= (8, 0)) == line.bfloat16, line
    named = [name for names in CAPABILITIES.values() for name in names]
    assert len(named) == len(set(named))
    assert set(named) <= {line.name for line in CATALOGUE}
    assert capability("another") is None
