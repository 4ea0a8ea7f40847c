"""Ranks in threads that send to each other, and a device that records its calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_protrain.device.device import CPUDevice


class Network:
    """A network of ranks in threads, which sums in the order of the ranks.

    As with gloo, a rank that is not the owner gets undefined values.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._arrived = threading.Condition()
        self._sent: dict[int, dict[int, tuple[Tensor, int | None]]] = {}

    def send(self, number: int, rank: int, flat: Tensor, owner: int | None) -> None:
        with self._arrived:
            self._sent.setdefault(number, {})[rank] = flat.clone(), owner
            self._arrived.notify_all()

    def total(self, number: int, owner: int | None) -> Tensor:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self._sent[number]) == self.num_ranks, timeout=20), "a rank hangs"
            sent = self._sent[number]
        assert {each for _, each in sent.values()} == {owner}, "ranks have sent different things at the same time"
        total = sent[0][0].clone()
        for rank in range(1, self.num_ranks):
            total += sent[rank][0]
        return total


class Communicator:
    """The communicator of one rank in a thread."""

    def __init__(self, network: Network, rank: int, dtype: torch.dtype | None = None) -> None:
        self.ranks = SimpleNamespace(world_size=network.num_ranks, local_rank=rank)
        self.dtype = dtype
        self.sizes: list[tuple[int | None, int]] = []
        self.under_way = self.most_under_way = 0
        self._network, self._rank = network, rank

    def begin_each(self, parts: Sequence[tuple[Tensor, int | None]]) -> list[int]:
        return [self.begin(flat, owner) for flat, owner in parts]

    def begin(self, flat: Tensor, owner: int | None, machine: int | None = None) -> int:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        self.sizes.append((owner, flat.nbytes))
        self._network.send(len(self.sizes) - 1, self._rank, flat, owner)
        return len(self.sizes) - 1

    def end(self, work: int, flat: Tensor, owner: int | None, machine: int | None = None) -> None:
        self.under_way -= 1
        total = self._network.total(work, owner)
        flat.copy_(total if owner in (None, self._rank) else torch.full_like(flat, torch.nan))


class Copies(CPUDevice):
    """A device that does what it is told when it is waited for, and remembers the order."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.log: list[str] = []

    def upload(self, source: Tensor, target: Tensor, after: Any = None) -> Any:
        self.log.append("upload")
        return source, target

    def wait(self, fence: Any) -> None:
        self.log.append("wait")
        fence[1].copy_(fence[0])

    def wait_host(self, fence: Any) -> None:
        self.log.append("wait_host")
