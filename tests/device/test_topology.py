"""What is known of GPUs comes from PyTorch and Linux; without any, nothing is, and asking says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from lightning_protrain.device.topology import numa_node, nvlink_counts, reaches

DETECT = "torch._C._distributed_c10d._detect_dma_connectivity"
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")


@without_cuda
def test_without_gpus_nothing_reaches() -> None:
    assert nvlink_counts() is None
    with pytest.raises((AssertionError, RuntimeError)):
        reaches(0, 1)


@pytest.mark.cuda
def test_gpus_are_counted() -> None:
    counts = nvlink_counts()
    assert counts is None or len(counts) == torch.cuda.device_count()


def test_links_are_those_of_the_driver() -> None:
    with mock.patch(DETECT, return_value=SimpleNamespace(matrix=[[0, 4], [4, 0]])) as detect:
        assert nvlink_counts() == [[0, 4], [4, 0]]
    assert detect.call_args.args[1] == "nvlink"
    with mock.patch(DETECT, side_effect=RuntimeError("no NVML")):
        assert nvlink_counts() is None
    with mock.patch(DETECT, new=None):
        assert nvlink_counts() is None


@pytest.mark.parametrize(("told", "node"), [("1\n", 1), ("-1\n", -1), (None, None)])
def test_the_node_of_a_gpu_is_read_from_linux(
    told: str | None, node: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    if told is not None:
        (tmp_path / "0000:3b:00.0").mkdir()
        (tmp_path / "0000:3b:00.0" / "numa_node").write_text(told)
    assert numa_node(torch.device("cuda:0"), tmp_path) == node
    del properties.pci_bus_id
    assert numa_node(torch.device("cuda:0"), tmp_path) is None
