"""Without GPUs nothing is known of them, and asking says so."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from lightning_protrain.device_peers import nvlink_counts, reaches

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
