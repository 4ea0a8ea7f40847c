"""Offloaded weights of which each machine holds some rows, and what they look like to their user.

[Note: Rows]
Where machines *divide weights*, each of them holds a part of the rows of every offloaded parameter, as `torch.chunk`
cuts them: the first ones as many as there are for each, rounded up, the last ones fewer or none. What is streamed,
watched, given gradients and stepped on a machine is a plain tensor of its rows, in the memory that its ranks share, by
the rank that owns the parameter there. The user's module and optimizers have a DTensor over the machines in its place,
of the true shape, whose local tensor is that memory. So what reads a whole weight outside of its block goes through the
dispatch of DTensor, on all ranks; and the parameter is another object than before the run.

Quantised weights, scalars, and those that do not lie row after row in memory are whole on every machine, and each
machine steps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from lightning_protrain.companions import has_companions


def row_ranges(num_rows: int, number: int) -> list[tuple[int, int]]:
    """First row and end of each machine's part, see [Note: Rows].

    Args:
        num_rows: In all.
        number: Of machines.
    """
    most = -(-num_rows // number)
    return [(min(at * most, num_rows), min((at + 1) * most, num_rows)) for at in range(number)]


def can_be_divided(parameter: Tensor) -> bool:
    """Whether machines hold rows of it, and not all of it, see [Note: Rows]."""
    plain = type(parameter) is nn.Parameter and not has_companions(parameter)
    return plain and parameter.dim() > 0 and parameter.is_contiguous() and parameter.numel() > 0


@dataclass(frozen=True)
class Rows:
    """How machines divide one parameter.

    Attributes:
        shape: Of all of it.
        ranges: First row and end of each machine.
        machine: This one.
        mesh: Of machines: a one-dimensional device mesh over the ranks of one place on each, for host memory.
    """

    shape: torch.Size
    ranges: tuple[tuple[int, int], ...]
    machine: int
    mesh: Any

    @classmethod
    def of(cls, parameter: Tensor, mesh: Any) -> Rows:
        """How `parameter` is divided.

        Args:
            parameter: All of it, or a tensor of its shape.
            mesh: As of the attribute.
        """
        ranges = row_ranges(parameter.shape[0], mesh.size())
        return cls(parameter.shape, tuple(ranges), mesh.get_local_rank(), mesh)

    @property
    def most_elements(self) -> int:
        """Of the rows of the machine that has most, the first one."""
        return self.elements(0, self.ranges[0][1])

    def elements(self, begin: int, end: int) -> int:
        """Of some rows."""
        return (end - begin) * self.shape[1:].numel()

    def shape_of(self, machine: int | None) -> torch.Size:
        """Of the rows of a machine; None: of this one."""
        begin, end = self.ranges[self.machine if machine is None else machine]
        return torch.Size((end - begin, *self.shape[1:]))

    def cut(self, whole: Tensor, machine: int | None = None) -> Tensor:
        """The rows of a machine, of a tensor of the whole shape; None: of this one. A view."""
        begin, end = self.ranges[self.machine if machine is None else machine]
        return whole[begin:end]

    def own(self, whole: Tensor) -> Tensor:
        """The rows of this machine; where it has none, nothing that keeps the memory of the whole."""
        part = self.cut(whole.detach())
        return part if part.numel() else part.clone()

    def shown(self, local: Tensor) -> DTensor:
        """The whole that rows of this machine are a part of; of the same memory."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local.detach(), self.mesh, (Shard(0),), run_check=False, shape=self.shape, stride=stride
        )

    def shown_as_part(self, whole: Tensor) -> DTensor:
        """The mean of all machines of what is this rank's own, and of the whole shape; of the same memory."""
        return DTensor.from_local(whole.detach(), self.mesh, (Partial("avg"),), run_check=False)


def rows_of(parameters: Sequence[Tensor], mesh: Any) -> list[Rows | None]:
    """How each of some parameters is divided; None: it is not.

    Args:
        parameters: All of them.
        mesh: Of machines; None: nothing is divided.
    """
    return [Rows.of(each, mesh) if mesh is not None and can_be_divided(each) else None for each in parameters]


def held_bytes(sizes: Sequence[int], rows: Sequence[Rows | None]) -> list[int]:
    """What the machine with most rows holds of each of some parameters.

    Args:
        sizes: Bytes of each.
        rows: How each is divided; None: it is not.
    """
    pairs = zip(sizes, rows, strict=True)
    return [size if cut is None else size * cut.most_elements // cut.shape.numel() for size, cut in pairs]
