"""Topology of the GPUs of a node: PCI addresses, NUMA nodes, and whether GPUs can copy directly to each other.

[Note: Peer-to-peer]
NCCL copies directly between the GPUs of a node (peer-to-peer, over NVLink or PCIe). On consumer cards, in virtual
machines and behind PCIe switches with access control, this can fail: NCCL then hangs or copies wrong bytes. Direct
copies can only be disabled before NCCL creates a communicator. So every rank first asks the driver whether its GPU
reaches the others, and the ranks exchange the answers through a store. If one answer is no, or an error, all ranks set
`NCCL_P2P_DISABLE=1`, because ranks with different settings may fail to connect. The package sets no other environment
variable, and never changes a value that the user has set.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_protrain.device.host import parse_ranges


def reaches(gpu: int, other: int) -> bool:
    """Return True if the driver allows one GPU of this node to access the memory of another one.

    Raises:
        AssertionError: If a GPU does not exist (raised by PyTorch).
        RuntimeError: If CUDA does not work.
    """
    try:
        return bool(torch.cuda.can_device_access_peer(gpu, other))
    except torch.cuda.DeferredCudaCallError as error:
        raise RuntimeError(str(error)) from error


def describe_gpus() -> list[str]:
    """Return the name, memory and architecture of each visible GPU."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, architecture {gpu.major}.{gpu.minor}" for gpu in gpus]


def first_gpu() -> tuple[int, bool] | None:
    """Return the free memory of the first GPU, bytes, and True if it computes in bfloat16; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.mem_get_info(0)[0], torch.cuda.is_bf16_supported(including_emulation=False)


def nvlink_counts() -> Sequence[Sequence[int]] | None:
    """Return the number of NVLinks between each pair of visible GPUs, or None if it cannot be read."""
    detect = getattr(torch._C._distributed_c10d, "_detect_dma_connectivity", None)
    if detect is None:
        return None
    try:
        counts: Sequence[Sequence[int]] = detect(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    except RuntimeError:  # NVML is missing, or PyTorch is built without CUDA.
        return None
    return counts


def allocator_settings() -> str:
    """Return the user's settings of the caching allocator; torch 2.11 only has them in the environment."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is None:
        return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    settings: str = read()
    return settings


def pci_address(gpu: torch.device) -> str | None:
    """Return the PCI address of a GPU in the format of Linux, or None if PyTorch does not know it."""
    properties = torch.cuda.get_device_properties(gpu)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, device = (f"{part or 0:02x}" for part in parts)
    return None if None in parts else f"{domain:0>4}:{bus}:{device}.0"


def numa_node(gpu: torch.device, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node of a GPU, or None if it is unknown.

    Args:
        gpu: The GPU.
        devices: Folder of PCI devices in Linux' sysfs.
    """
    file = devices / str(pci_address(gpu)) / "numa_node"
    return int(file.read_text()) if file.is_file() else None


# Number of the system call `mbind` by processor architecture, because libc has no function for it; policy
# MPOL_INTERLEAVE.
_MBIND = {"x86_64": 237, "aarch64": 235}
_INTERLEAVE = 3
_Syscall = Callable[..., int]


def nodes_to_fill(near: Collection[int | None], folder: Path = Path("/sys/devices/system/node")) -> list[int]:
    """Return the NUMA nodes whose memory GPUs should read from; empty: there is one, or it is unknown.

    Args:
        near: NUMA node of each GPU; None or a negative number if it is unknown.
        folder: Folder of NUMA nodes in Linux' sysfs.
    """
    lists = [folder / name for name in ("has_cpu", "has_memory")]
    if not all(path.is_file() for path in lists):
        return []
    cores, memory = (parse_ranges(path.read_text().strip()) for path in lists)
    nodes = cores & memory
    known = {node for node in near if node in nodes}
    return sorted(known if len(known) == len({*near}) else nodes) if len(nodes) > 1 else []


def interleave(block: mmap.mmap, nodes: Sequence[int], syscall: _Syscall | None = None) -> bool:
    """Spread the pages of a shared block that no process has touched yet over NUMA nodes, in turn.

    Args:
        block: Map of a file in memory; the policy holds for all processes that map the file.
        nodes: Numbers of the NUMA nodes.
        syscall: Makes a system call; None: libc's.

    Returns:
        True if the system accepts the policy. A container without permission refuses it; each page then lies on the
        NUMA node that touches it first.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not nodes or platform.system() != "Linux":
        return False
    address = ctypes.c_void_p(torch.frombuffer(block, dtype=torch.uint8).data_ptr())
    mask = sum(1 << node for node in nodes)
    words = (mask.bit_length() + 63) // 64
    bits = (ctypes.c_uint64 * words)(*(mask >> 64 * word & (1 << 64) - 1 for word in range(words)))
    # The kernel reads one bit less than it is told.
    sizes = ctypes.c_ulong(len(block)), ctypes.c_ulong(64 * words + 1)
    return (syscall or ctypes.CDLL(None).syscall)(number, address, sizes[0], _INTERLEAVE, bits, sizes[1], 0) == 0


Link = Literal["nvlink", "pcie", "none", "unknown"]
SETTING = "NCCL_P2P_DISABLE"
_KEY = "lightning_protrain/peers"
# Errors of the driver, NVML or PyTorch. They are reported to the other ranks, which wait for the answer.
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
        reached: True if this rank's GPU reaches all other GPUs of the run on its node; None if it is the only GPU.
        nvlink: True if NVLink connects this rank's GPU to all of them; None if unknown.
        problem: Reason why GPUs cannot copy directly; None if they can.
        setting: Value of `NCCL_P2P_DISABLE` that the user has set; None if it is not set.
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
        link: Slowest link between GPUs of a node; `"none"` if some GPUs do not reach each other directly.
        switched_off: True if all ranks set `NCCL_P2P_DISABLE=1`.
        problems: Reasons why GPUs cannot copy directly, each with its rank.
        settings: Rank and value of each `NCCL_P2P_DISABLE` that the user has set. If there are any, ranks keep them.
    """

    link: Link
    switched_off: bool = False
    problems: tuple[str, ...] = ()
    settings: tuple[tuple[int, str], ...] = ()

    def describe(self) -> str:
        """Return one or two sentences for the user."""
        texts = {
            "nvlink": "The GPUs of a node reach each other over NVLink.",
            "pcie": "GPUs of a node reach each other directly, but some only over PCIe.",
            "none": f"GPUs of a node do not reach each other directly ({'; '.join(self.problems)}).",
            "unknown": "It is unknown whether GPUs of a node reach each other directly.",
        }
        text = texts[self.link]
        if self.switched_off:
            text += f" {SETTING}=1 is set on all ranks: copies between GPUs go through host memory."
        elif self.settings:
            values = ", ".join(f"{value!r} on rank {rank}" for rank, value in self.settings)
            text += f" {SETTING} is already set ({values}) and is not changed."
        return text


@contextmanager
def peers_found(
    meeting: Any,
    rank: int,
    world_size: int,
    device: torch.device,
    devices: Sequence[torch.device] | None,
    timeout: timedelta | None = default_pg_timeout,
) -> Iterator[PeerAccess]:
    """Probe the GPUs of all ranks, set `NCCL_P2P_DISABLE` if they must, and yield their decision: [Note: Peer-to-peer].

    Every rank enters the context and creates the process group within it, which may use the same port. GPUs are not
    probed if there is only one rank, or if a process group exists.

    Args:
        meeting: Lightning's cluster environment, with the address of rank 0.
        rank: Global rank.
        world_size: Number of ranks.
        device: Device of this rank.
        devices: Devices of this node's ranks that this process sees; None if unknown.
        timeout: Limit for connecting and for each answer; None means PyTorch's default.

    Raises:
        RuntimeError: If a rank has not answered in time; the message names the rank.
    """
    if device.type != "cuda" or world_size == 1 or dist.is_initialized():
        yield PeerAccess("unknown")
        return
    address, limit = meeting.main_address, timeout or default_pg_timeout
    host = f"[{address}]" if ":" in address else address
    url = f"tcp://{host}:{meeting.main_port}?rank={rank}&world_size={world_size}"
    store: dist.Store
    store, _, _ = next(dist.rendezvous(url, timeout=limit))
    store.set_timeout(limit)
    others = [other.index for other in devices or () if other != device]
    access = agree(store, rank, world_size, probe(rank, device.index, others, os.environ.get(SETTING)))
    if access.switched_off:
        os.environ[SETTING] = "1"
    yield access
    del store  # Keep it until here: other ranks may still read it, and the process group uses its port.


def probe(rank: int, gpu: int, others: Sequence[int], setting: str | None) -> PeerReport:
    """Return the report of this rank about its GPU.

    Args:
        rank: Global rank.
        gpu: Index of this rank's GPU in this process.
        others: Indices of the GPUs of the other ranks of this node.
        setting: Value of `NCCL_P2P_DISABLE`; None if it is not set.
    """
    machine = platform.node()
    if not others:
        return PeerReport(rank, machine, setting=setting)
    try:
        refused = [other for other in others if not reaches(gpu, other)]
        counts = None if refused else nvlink_counts()
        joined = None if counts is None else all(counts[gpu][other] > 0 for other in others)
    except _ERRORS as error:
        lines = str(error).splitlines() or ["no message"]
        return PeerReport(rank, machine, False, None, f"{type(error).__name__}: {lines[0]}", setting)
    if refused:
        problem = f"GPU {gpu} does not reach GPU {', '.join(map(str, refused))}"
        return PeerReport(rank, machine, False, None, problem, setting)
    return PeerReport(rank, machine, True, joined, None, setting)


def decide(reports: Sequence[PeerReport]) -> PeerAccess:
    """Return the decision for all ranks, given the reports of all ranks."""
    problems = tuple(
        f"rank {report.rank} on {report.machine}: {report.problem}" for report in reports if report.problem is not None
    )
    settings = tuple((report.rank, report.setting) for report in reports if report.setting is not None)
    joined = [report.nvlink for report in reports if report.reached]
    link: Link = "unknown"
    if any(report.reached is False for report in reports):
        link = "none"
    elif False in joined:
        link = "pcie"
    elif joined and None not in joined:
        link = "nvlink"
    return PeerAccess(link, link == "none" and not settings, problems, settings)


def agree(store: dist.Store, rank: int, world_size: int, report: PeerReport) -> PeerAccess:
    """Send the report of this rank to rank 0 through the store, and return the decision that rank 0 makes.

    Raises:
        RuntimeError: If a rank has not answered within the timeout of the store.
    """
    store.set(f"{_KEY}/{rank}", json.dumps(asdict(report)))
    if rank == 0:
        reports = [PeerReport(**json.loads(_get(store, f"{_KEY}/{number}", number))) for number in range(world_size)]
        store.set(f"{_KEY}/decision", json.dumps(asdict(decide(reports))))
    decision = json.loads(_get(store, f"{_KEY}/decision", 0))
    problems, settings = tuple(decision["problems"]), tuple((number, value) for number, value in decision["settings"])
    return PeerAccess(decision["link"], decision["switched_off"], problems, settings)


def _get(store: dist.Store, key: str, rank: int) -> str:
    try:
        return store.get(key).decode()
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank {rank} has not reported whether its GPU reaches the others. Its own log has the reason."
        ) from error
