"""Finds on which bus the GPUs of a node are, and whether they reach each other directly.

[Note: Peer-to-peer]
NCCL copies directly between the GPUs of a node, over NVLink or PCIe, if the driver says that they reach each other. On
consumer cards, in virtual machines and behind switches with access control, the driver can be wrong: NCCL then hangs or
copies wrong bytes. Nothing can change this setting once a communicator exists. So every rank probes its GPU before, and
the ranks exchange the answers through a store. A single no, or an error, sets `NCCL_P2P_DISABLE=1` on all ranks,
because ranks that differ in it may not find each other. This is the only environment variable that the package sets,
and it does not change a value that a user has set.
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
    """Return True if the driver lets one GPU of this node read the memory of another one.

    Raises:
        AssertionError: If there is no GPU of that index; raised by PyTorch.
        RuntimeError: If CUDA does not work.
    """
    try:
        return bool(torch.cuda.can_device_access_peer(gpu, other))
    except torch.cuda.DeferredCudaCallError as error:
        raise RuntimeError(str(error)) from error


def describe_gpus() -> list[str]:
    """Return the name, memory and architecture of each visible GPU."""
    each = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, architecture {gpu.major}.{gpu.minor}" for gpu in each]


def nvlink_counts() -> Sequence[Sequence[int]] | None:
    """Return the number of NVLinks between each pair of visible GPUs, or None if it cannot be read."""
    detect = getattr(torch._C._distributed_c10d, "_detect_dma_connectivity", None)
    if detect is None:
        return None
    try:
        found: Sequence[Sequence[int]] = detect(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    except RuntimeError:  # There is no NVML, or PyTorch is built without CUDA.
        return None
    return found


def pci_address(gpu: torch.device) -> str | None:
    """Return the address of a GPU on the PCI bus as Linux writes it, or None if PyTorch does not give it."""
    properties = torch.cuda.get_device_properties(gpu)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, device = (f"{part or 0:02x}" for part in parts)
    return None if None in parts else f"{domain:0>4}:{bus}:{device}.0"


def numa_node(gpu: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node of a GPU, or None if PyTorch does not give its address or Linux not its node.

    Args:
        gpu: The GPU.
        devices: Folder in which Linux describes the devices on the bus.
    """
    told = devices / str(pci_address(gpu)) / "numa_node"
    return int(told.read_text()) if told.is_file() else None


Link = Literal["nvlink", "pcie", "none", "unknown"]
SETTING = "NCCL_P2P_DISABLE"
_KEY = "lightning_protrain/peers"
# Everything that a driver, NVML or PyTorch may raise: an error on one rank must not keep the others waiting for its
# answer.
_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(OSError, RuntimeError, TypeError, ValueError),
)


@dataclass(frozen=True)
class PeerReport:
    """The answer of one rank, see [Note: Peer-to-peer].

    Attributes:
        rank: Global rank.
        machine: Host name of the node.
        reached: True if this rank's GPU reaches all other GPUs of the run on its node; None if there is no other.
        nvlink: True if NVLink joins it with all of them; None if unknown.
        problem: Reason against direct copies; None if there is none.
        setting: Value that the user has given `NCCL_P2P_DISABLE`; None if it is not set.
    """

    rank: int
    machine: str
    reached: bool | None = None
    nvlink: bool | None = None
    problem: str | None = None
    setting: str | None = None


@dataclass(frozen=True)
class PeerAccess:
    """The decision of all ranks, see [Note: Peer-to-peer].

    Attributes:
        link: Slowest link between GPUs of a node. `"none"`: they do not reach each other directly. `"unknown"`: no rank
            could tell.
        switched_off: True if the ranks set `NCCL_P2P_DISABLE=1` because of it.
        problems: Reasons against direct copies, each with its rank.
        settings: Rank and value of every `NCCL_P2P_DISABLE` that a user has set; if there are any, the ranks set
            nothing.
    """

    link: Link
    switched_off: bool = False
    problems: tuple[str, ...] = ()
    settings: tuple[tuple[int, str], ...] = ()

    def describe(self) -> str:
        """Return one or two sentences for the user."""
        texts = {
            "nvlink": "The GPUs of a node reach each other over NVLink.",
            "pcie": "The GPUs of a node reach each other over PCIe, or some of them do.",
            "none": f"GPUs of a node do not reach each other directly ({'; '.join(self.problems)}).",
            "unknown": "Whether GPUs of a node reach each other directly is not known.",
        }
        text = texts[self.link]
        if self.switched_off:
            text += f" {SETTING}=1 is set on all ranks: copies between GPUs go through host memory."
        elif self.settings:
            values = ", ".join(f"{value!r} on rank {rank}" for rank, value in self.settings)
            text += f" {SETTING} was set before ({values}), and is left as it is."
        return text


class MeetingPoint(Protocol):
    """Address at which rank 0 listens, as Lightning's cluster environments give it."""

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
    """Find out how the GPUs of all ranks reach each other, and yield the decision.

    Every rank enters the context and makes the process group within it, which may meet at the same port. Nothing is
    probed without several GPUs, or if there is a process group already.

    Args:
        meeting: Address at which the ranks meet.
        rank: Global rank.
        world_size: Number of ranks.
        device: Device of this rank.
        devices: Devices of all ranks of this node that this process sees; None if unknown.
        timeout: Limit for connecting and for every answer.

    Yields:
        The decision of all ranks.

    Raises:
        RuntimeError: If a rank has not answered in time; the message names its number.
    """
    if device.type != "cuda" or world_size == 1 or dist.is_initialized():
        yield PeerAccess("unknown")
        return
    store = meeting_store(meeting.main_address, meeting.main_port, rank, world_size, timeout)
    yield find_peers(store, rank, world_size, device, devices or (), os.environ)
    del store  # Not earlier: other ranks may still read it, and the group meets at its port.


def find_peers(
    store: dist.Store,
    rank: int,
    world_size: int,
    device: torch.device,
    devices: Sequence[torch.device],
    environment: MutableMapping[str, str],
) -> PeerAccess:
    """Probe the GPU of this rank, agree with all ranks, and set `NCCL_P2P_DISABLE` if the decision requires it.

    Args:
        store: Store that all ranks share.
        rank: Global rank.
        world_size: Number of ranks.
        device: Device of this rank.
        devices: Devices of all ranks of this node that this process sees.
        environment: Environment in which the variable is read and set.

    Raises:
        RuntimeError: If a rank has not answered in time; the message names its number.
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
    """Return the report of this rank about its GPU.

    Args:
        rank: Global rank.
        gpu: Index of its GPU among those that this process sees.
        others: Indices of the GPUs of the other ranks of this node.
        setting: Value of `NCCL_P2P_DISABLE`; None if it is not set.
        reach: Returns True if the first GPU reaches the second.
        count_nvlinks: Returns the number of NVLinks between each pair, or None.
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
    """Return the decision that follows from the reports of all ranks."""
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
    """Give the report of this rank to rank 0, which decides for all, and return the decision.

    Raises:
        RuntimeError: If a rank has not answered within the timeout of the store.
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
    """Return the store at which a process group is going to meet; hold it until the group exists, or pass it on.

    Args:
        address: Host of rank 0, as in `MASTER_ADDR`.
        port: Port of rank 0, as in `MASTER_PORT`; the process group may use the same port.
        rank: Global rank.
        world_size: Number of ranks.
        timeout: Limit for connecting and for every answer.
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
            f"Rank {rank} has not reported whether its GPU reaches the others. Its own log has the reason."
        ) from error
