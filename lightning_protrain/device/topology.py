"""Finds where the GPUs of a machine are and how they reach each other.

[Note: Peer-to-peer]
NCCL copies between the GPUs of a machine directly where the driver says that they reach each other, over NVLink or
PCIe, and hangs or copies wrong bytes where that is not so: consumer cards, virtual machines, switches with access
control. A communicator that exists cannot be told otherwise any more. So every rank asks before there is one, the
answers go through a store, and a single no, or an error for an answer, sets `NCCL_P2P_DISABLE=1` on all ranks: ranks
that differ in it may not find each other. It is the one environment variable that this package sets, and it is left
alone where a user has set it.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout


def reaches(gpu: int, other: int) -> bool:
    """Whether the driver lets one GPU of this machine read the memory of another one.

    Raises:
        AssertionError: There is no GPU of that index; from PyTorch.
        RuntimeError: CUDA does not work.
    """
    try:
        return bool(torch.cuda.can_device_access_peer(gpu, other))
    except torch.cuda.DeferredCudaCallError as error:  # No RuntimeError: CUDA was asked for something before it began.
        raise RuntimeError(str(error)) from error


def nvlink_counts() -> Sequence[Sequence[int]] | None:
    """For each pair of visible GPUs, how many NVLinks join them, through a switch or not; None if nothing tells."""
    detect = getattr(torch._C._distributed_c10d, "_detect_dma_connectivity", None)
    if detect is None:
        return None
    try:
        found: Sequence[Sequence[int]] = detect(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    except RuntimeError:  # No NVML, or a build without CUDA.
        return None
    return found


def pci_address(gpu: torch.device) -> str | None:
    """Its place on the bus, as Linux writes it; None where PyTorch does not tell it."""
    properties = torch.cuda.get_device_properties(gpu)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, device = (f"{part or 0:02x}" for part in parts)
    return None if None in parts else f"{domain:0>4}:{bus}:{device}.0"


def numa_node(gpu: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node that a GPU hangs on, where PyTorch tells its address and Linux the node.

    Args:
        gpu: Which one.
        devices: Where Linux describes what is on the bus.
    """
    told = devices / str(pci_address(gpu)) / "numa_node"
    return int(told.read_text()) if told.is_file() else None


Link = Literal["nvlink", "pcie", "none", "unknown"]
SETTING = "NCCL_P2P_DISABLE"
_KEY = "lightning_protrain/peers"
# Whatever a driver, NVML or PyTorch may raise: an error on one rank must not keep the others waiting for its answer.
_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError),
)


@dataclass(frozen=True)
class PeerReport:
    """What one rank found out, see [Note: Peer-to-peer].

    Attributes:
        rank: Global.
        machine: Name of its host.
        reached: Whether its GPU reaches all others of the run on its machine; None: it knows of no other.
        nvlink: Whether NVLink joins it with all of them; None: unknown.
        problem: What speaks against it, if anything does.
        setting: What the user has set `NCCL_P2P_DISABLE` to; None: it is not set.
    """

    rank: int
    machine: str
    reached: bool | None = None
    nvlink: bool | None = None
    problem: str | None = None
    setting: str | None = None


@dataclass(frozen=True)
class PeerAccess:
    """What all ranks agreed on, see [Note: Peer-to-peer].

    Attributes:
        link: What joins the GPUs of a machine: the slowest link if there are several; `"none"`: they do not reach each
            other directly; `"unknown"`: no rank could tell.
        switched_off: Whether the ranks set `NCCL_P2P_DISABLE=1` for it.
        problems: By whom, and why.
        settings: What users have set `NCCL_P2P_DISABLE` to, by rank; where there are any, nothing is switched.
    """

    link: Link
    switched_off: bool = False
    problems: tuple[str, ...] = ()
    settings: tuple[tuple[int, str], ...] = ()

    def describe(self) -> str:
        """One or two sentences for the user."""
        texts = {
            "nvlink": "The GPUs of a machine reach each other over NVLink.",
            "pcie": "The GPUs of a machine reach each other over PCIe, or some of them do.",
            "none": f"GPUs of a machine do not reach each other directly ({'; '.join(self.problems)}).",
            "unknown": "Whether GPUs of a machine reach each other directly is not known.",
        }
        text = texts[self.link]
        if self.switched_off:
            text += f" {SETTING}=1 is set on all ranks: copies between GPUs go through host memory."
        elif self.settings:
            values = ", ".join(f"{value!r} on rank {rank}" for rank, value in self.settings)
            text += f" {SETTING} was set before ({values}), and is left as it is."
        return text


class MeetingPoint(Protocol):
    """Where rank 0 listens, as Lightning's cluster environments say it."""

    @property
    def main_address(self) -> str:
        """Host, as in `MASTER_ADDR`."""

    @property
    def main_port(self) -> int:
        """Port, as in `MASTER_PORT`."""


@contextmanager
def peers_found(
    meeting: MeetingPoint,
    rank: int,
    world_size: int,
    device: torch.device,
    devices: Sequence[torch.device] | None,
    timeout: timedelta | None = default_pg_timeout,
) -> Iterator[PeerAccess]:
    """Finds the peers of all ranks; the process group is made within it, and may meet at the same port.

    Every rank enters it. Without several GPUs, or where there is a group already, nobody is asked.

    Args:
        meeting: Where the ranks meet.
        rank: Global.
        world_size: Number of ranks.
        device: Of this rank.
        devices: Of all ranks of this machine, as far as this process sees them.
        timeout: Of connecting and of every answer.

    Yields:
        What all ranks agreed on.

    Raises:
        RuntimeError: A rank has not answered in time; its number is named.
    """
    if device.type != "cuda" or world_size == 1 or dist.is_initialized():
        yield PeerAccess("unknown")
        return
    store = meeting_store(meeting.main_address, meeting.main_port, rank, world_size, timeout)
    yield find_peers(store, rank, world_size, device, devices or (), os.environ)
    del store  # Not before: others may be asking it, and the group meets at its port.


def find_peers(
    store: dist.Store,
    rank: int,
    world_size: int,
    device: torch.device,
    devices: Sequence[torch.device],
    environment: MutableMapping[str, str],
) -> PeerAccess:
    """Asks for the GPUs of this machine, agrees with all ranks, and sets `NCCL_P2P_DISABLE` if it has to.

    Args:
        store: Of all ranks.
        rank: Global.
        world_size: Number of ranks.
        device: Of this rank.
        devices: Of all ranks of this machine, as far as this process sees them.
        environment: Where the variable is read and set.

    Raises:
        RuntimeError: A rank has not answered in time; its number is named.
    """
    others = [each.index for each in devices if each != device]
    access = agree(store, rank, world_size, probe(rank, device.index, others, environment.get(SETTING)))
    if access.switched_off:
        environment[SETTING] = "1"
    return access


def probe(
    rank: int,
    gpu: int,
    others: Sequence[int],
    setting: str | None = None,
    reach: Callable[[int, int], bool] = reaches,
    count_nvlinks: Callable[[], Sequence[Sequence[int]] | None] = nvlink_counts,
) -> PeerReport:
    """What this rank says of its GPU.

    Args:
        rank: Global.
        gpu: Index of its GPU among those that this process sees.
        others: Indices of the GPUs of the other ranks of this machine.
        setting: What `NCCL_P2P_DISABLE` is set to.
        reach: Whether one GPU reaches another.
        count_nvlinks: How many NVLinks join each pair, or None.
    """
    machine = platform.node()
    if not others:
        return PeerReport(rank, machine, setting=setting)
    try:
        refused = [other for other in others if not reach(gpu, other)]
        counts = None if refused else count_nvlinks()
        joined = None if counts is None else all(counts[gpu][other] > 0 for other in others)
    except _ERRORS as error:
        lines = str(error).splitlines() or ["no message"]
        return PeerReport(rank, machine, False, None, f"{type(error).__name__}: {lines[0]}", setting)
    if refused:
        problem = f"GPU {gpu} does not reach GPU {', '.join(map(str, refused))}"
        return PeerReport(rank, machine, False, None, problem, setting)
    return PeerReport(rank, machine, True, joined, None, setting)


def decide(reports: Sequence[PeerReport]) -> PeerAccess:
    """What follows from the reports of all ranks."""
    problems = tuple(
        f"rank {each.rank} on {each.machine}: {each.problem}" for each in reports if each.problem is not None
    )
    settings = tuple((each.rank, each.setting) for each in reports if each.setting is not None)
    joined = [each.nvlink for each in reports if each.reached]
    link: Link = "unknown"
    if any(each.reached is False for each in reports):
        link = "none"
    elif False in joined:
        link = "pcie"
    elif joined and None not in joined:
        link = "nvlink"
    return PeerAccess(link, link == "none" and not settings, problems, settings)


def agree(store: dist.Store, rank: int, world_size: int, report: PeerReport) -> PeerAccess:
    """Gives the report of this rank to rank 0, which decides for all.

    Raises:
        RuntimeError: A rank has not answered within the timeout of the store.
    """
    store.set(f"{_KEY}/{rank}", json.dumps(asdict(report)))
    if rank == 0:
        reports = [PeerReport(**json.loads(_get(store, f"{_KEY}/{each}", each))) for each in range(world_size)]
        store.set(f"{_KEY}/decision", json.dumps(asdict(decide(reports))))
    decision = json.loads(_get(store, f"{_KEY}/decision", 0))
    problems, settings = tuple(decision["problems"]), tuple((each, value) for each, value in decision["settings"])
    return PeerAccess(decision["link"], decision["switched_off"], problems, settings)


def meeting_store(
    address: str, port: int, rank: int, world_size: int, timeout: timedelta | None = default_pg_timeout
) -> dist.Store:
    """The store at which a process group is going to meet; hold it until the group exists, or pass it on to it.

    Args:
        address: Of rank 0, as in `MASTER_ADDR`.
        port: Its port, as in `MASTER_PORT`; the group may use the same.
        rank: Global.
        world_size: Number of ranks.
        timeout: Of connecting and of every answer.
    """
    host = f"[{address}]" if ":" in address else address
    url = f"tcp://{host}:{port}?rank={rank}&world_size={world_size}"
    store: dist.Store
    store, _, _ = next(dist.rendezvous(url, timeout=timeout or default_pg_timeout))
    store.set_timeout(timeout or default_pg_timeout)
    return store


def _get(store: dist.Store, key: str, rank: int) -> str:
    try:
        return store.get(key).decode()
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank {rank} has not said whether its GPU reaches the others; its own log says why, if it could write one."
        ) from error
