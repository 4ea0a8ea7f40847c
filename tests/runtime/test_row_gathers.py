"""Pieces of a chunk come from the machines that have them, behind a meeting of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_protrain.device import CPUDevice
from lightning_protrain.runtime.row_gathers import Piece, RowGathers


class Machines:
    """A communicator that notes what is asked of it."""

    def __init__(self, missing: bool = False) -> None:
        self.log: list[str] = []
        self._missing = missing

    def meet_everywhere(self, what: str) -> None:
        self.log.append(what)
        if self._missing:
            raise RuntimeError("rank 1 is gone")

    def send_rows(self, flat: Tensor, machine: int) -> str:
        self.log.append(f"{flat.numel()} bytes of {machine}")
        return f"work {machine}"

    def fill_rows(self, work: str, flat: Tensor, machine: int) -> str:
        self.log.append(f"{flat.numel()} bytes behind {work}")
        return work

    def end_rows(self, work: str) -> None:
        self.log.append(f"end of {work}")


FILLED = ["4 bytes behind work 0", "3 bytes behind work 1"]


def _pieces(target: Tensor) -> list[Piece]:
    ones = torch.ones(8, dtype=torch.uint8)
    return [Piece(0, ones[:4], target[:4]), Piece(1, None, target[4:7]), Piece(None, ones[:1], target[7:])]


def test_what_is_here_is_uploaded_and_everything_divided_is_sent() -> None:
    device, machines, target = CPUDevice(torch.device("cpu")), Machines(), torch.zeros(8, dtype=torch.uint8)
    communicator: Any = machines
    arrival = RowGathers(communicator, device).upload("layers.0", _pieces(target))
    assert machines.log == ["the fetch of 'layers.0'", "4 bytes of 0", "3 bytes of 1", *FILLED]
    assert target.tolist() == [1, 1, 1, 1, 0, 0, 0, 1]
    arrival.wait()
    arrival.wait()
    assert machines.log[5:] == ["end of work 0", "end of work 1"]
    device.close()


def test_nothing_is_uploaded_where_a_rank_does_not_fetch() -> None:
    device, target = CPUDevice(torch.device("cpu")), torch.zeros(8, dtype=torch.uint8)
    communicator: Any = Machines(missing=True)
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        RowGathers(communicator, device).upload("layers.0", _pieces(target))
    assert not target.any()
    device.close()


def test_what_is_abandoned_is_not_waited_for() -> None:
    device, machines, target = CPUDevice(torch.device("cpu")), Machines(), torch.zeros(8, dtype=torch.uint8)
    communicator: Any = machines
    arrival = RowGathers(communicator, device).upload("layers.0", _pieces(target)[1:2])
    arrival.abandoned = True
    arrival.wait()
    arrival.land()
    assert machines.log == ["the fetch of 'layers.0'", "3 bytes of 1", FILLED[1]]
    device.close()


def test_ranks_meet_before_sums() -> None:
    machines = Machines()
    communicator: Any = machines
    with RowGathers(communicator, CPUDevice(torch.device("cpu"))).around_sums():
        assert machines.log == ["a sum of gradients"]
