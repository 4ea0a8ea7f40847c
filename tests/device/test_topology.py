"""The topology of GPUs comes from PyTorch and Linux, and all ranks decide alike about peer-to-peer copies."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import platform
import socket
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_protrain.device import topology
from lightning_protrain.device.topology import (
    SETTING,
    PeerAccess,
    PeerReport,
    agree,
    decide,
    interleave,
    nodes_to_fill,
    numa_node,
    nvlink_counts,
    peers_found,
    probe,
    reaches,
)
from tests.support.ranks import run_ranks, values

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


@pytest.mark.parametrize(
    ("near", "cores", "memory", "nodes"),
    [
        pytest.param([0, 1, 1], "0-1\n", "0-1\n", [0, 1], id="GPUs at both"),
        pytest.param([1, 1], "0-1\n", "0-1\n", [1], id="GPUs at one"),
        pytest.param([1, -1], "0-1\n", "0-1\n", [0, 1], id="an unknown GPU"),
        pytest.param([None, None], "0,2\n", "0-3\n", [0, 2], id="memory without cores"),
        pytest.param([5], "0-1\n", "0-1\n", [0, 1], id="a node that is not there"),
        pytest.param([0, 0], "0\n", "0\n", [], id="one node"),
        pytest.param([0, 1], None, "0-1\n", [], id="no sysfs"),
    ],
)
def test_memory_comes_from_the_numa_nodes_of_the_gpus(
    near: list[int | None], cores: str | None, memory: str, nodes: list[int], tmp_path: Path
) -> None:
    (tmp_path / "has_memory").write_text(memory)
    if cores is not None:
        (tmp_path / "has_cpu").write_text(cores)
    assert nodes_to_fill(near, tmp_path) == nodes


@pytest.mark.parametrize("refused", [False, True])
def test_pages_are_interleaved_where_the_system_permits_it(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def syscall(*args: Any) -> int:
        calls.append(args)
        return -1 if refused else 0

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    with mmap.mmap(-1, mmap.PAGESIZE) as block:
        assert interleave(block, [0, 1, 70], syscall) is not refused
        assert not interleave(block, [], syscall)
        monkeypatch.setattr(platform, "machine", lambda: "riscv64")
        assert not interleave(block, [0, 1], syscall)
        gc.collect()
    ((number, _, nbytes, policy, mask, bits, flags),) = calls
    assert (number, nbytes.value, policy, list(mask), bits.value, flags) == (237, mmap.PAGESIZE, 3, [3, 1 << 6], 129, 0)


@pytest.mark.skipif(platform.system() != "Linux" or platform.machine() != "x86_64", reason="other numbers of calls")
def test_the_kernel_takes_the_policy(tmp_path: Path) -> None:
    with tempfile.TemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else tmp_path) as file:
        file.truncate(mmap.PAGESIZE)
        block = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        if not interleave(block, [0]):
            pytest.skip("this container may not set the policy of memory")
        policy = ctypes.c_int(-1)
        address = ctypes.c_void_p(torch.frombuffer(block, dtype=torch.uint8).data_ptr())
        # The system call get_mempolicy with MPOL_F_ADDR. A kernel for up to 1,024 nodes refuses less room.
        room = (ctypes.c_uint64 * 16)()
        assert ctypes.CDLL(None).syscall(239, ctypes.byref(policy), room, ctypes.c_ulong(1024), address, 2) == 0
        assert (policy.value, room[0]) == (3, 1)


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


CUDA = [torch.device("cuda", index) for index in range(4)]


def raising(error: Exception) -> Callable[..., Any]:
    def raise_it(*_: Any) -> Any:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("others", "reach", "counts", "expected"),
    [
        ([], raising(AssertionError("must not be asked")), None, (None, None, None)),
        ([1, 2], lambda *_: True, None, (True, None, None)),
        ([1, 2], lambda *_: True, [[0, 4, 4], [4, 0, 4], [4, 4, 0]], (True, True, None)),
        ([1, 2], lambda *_: True, [[0, 4, 0], [4, 0, 0], [0, 0, 0]], (True, False, None)),
        ([1, 2, 3], lambda _, other: other == 2, None, (False, None, "GPU 0 does not reach GPU 1, 3")),
        ([1], raising(RuntimeError("no driver\nat line 3")), None, (False, None, "RuntimeError: no driver")),
        ([1], raising(AssertionError()), None, (False, None, "AssertionError: no message")),
        ([1], raising(OSError("NVML is gone")), None, (False, None, "OSError: NVML is gone")),
        ([1], raising(TypeError("an older driver")), None, (False, None, "TypeError: an older driver")),
        ([1], lambda *_: True, [[0]], (False, None, "IndexError: list index out of range")),
    ],
)
def test_a_rank_says_what_it_found(
    others: list[int],
    reach: Callable[..., bool],
    counts: Any,
    expected: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topology, "reaches", reach)
    monkeypatch.setattr(topology, "nvlink_counts", lambda: counts)
    report = probe(5, 0, others, "0")
    assert (report.reached, report.nvlink, report.problem) == expected
    assert (report.rank, report.machine, report.setting) == (5, socket.gethostname(), "0")


YES = PeerReport(0, "a", True, True)
ALONE = PeerReport(0, "a")
NO = PeerReport(1, "b", False, None, "GPU 0 does not reach GPU 1")


@pytest.mark.parametrize(
    ("reports", "link", "switched_off"),
    [
        ([YES, YES], "nvlink", False),
        ([YES, replace(YES, nvlink=False)], "pcie", False),
        ([YES, replace(YES, nvlink=None)], "unknown", False),
        ([replace(YES, nvlink=False), replace(YES, nvlink=None)], "pcie", False),
        ([ALONE, ALONE], "unknown", False),
        ([ALONE, YES], "nvlink", False),
        ([YES, NO, YES], "none", True),
        ([NO, replace(YES, setting="0")], "none", False),
        ([replace(NO, setting=""), YES], "none", False),
    ],
)
def test_what_follows(reports: list[PeerReport], link: str, switched_off: bool) -> None:
    access = decide(reports)
    assert (access.link, access.switched_off) == (link, switched_off)


reports_of_ranks = st.lists(
    st.builds(
        PeerReport,
        rank=st.just(0),
        machine=st.sampled_from(["a", "b"]),
        reached=st.sampled_from([None, True, False]),
        nvlink=st.sampled_from([None, True, False]),
        setting=st.sampled_from([None, None, "0", "1"]),
    ),
    min_size=1,
    max_size=6,
).map(lambda found: [replace(each, rank=rank) for rank, each in enumerate(found)])


@given(reports_of_ranks, st.randoms(use_true_random=False))
def test_one_no_is_a_no_of_all_and_users_come_first(reports: list[PeerReport], random: Any) -> None:
    access = decide(reports)
    refused = any(each.reached is False for each in reports)
    assert (access.link == "none") == refused
    assert access.switched_off == (refused and all(each.setting is None for each in reports))
    shuffled = list(reports)
    random.shuffle(shuffled)
    assert decide(shuffled).link == access.link


@pytest.mark.parametrize(
    ("access", "parts"),
    [
        (PeerAccess("nvlink"), ["over NVLink"]),
        (PeerAccess("pcie"), ["over PCIe"]),
        (PeerAccess("unknown"), ["is unknown"]),
        (decide([YES, NO]), ["rank 1 on b: GPU 0 does not reach GPU 1", f"{SETTING}=1 is set on all ranks"]),
        (
            decide([NO, replace(YES, rank=3, setting="0")]),
            [f"{SETTING} is already set ('0' on rank 3)", "not changed"],
        ),
    ],
)
def test_it_says_so(access: PeerAccess, parts: list[str]) -> None:
    assert all(part in access.describe() for part in parts)


def together(store: dist.Store, reports: Sequence[PeerReport]) -> list[PeerAccess]:
    with ThreadPoolExecutor(len(reports)) as pool:
        return list(pool.map(lambda each: agree(store, each.rank, len(reports), each), reports))


@pytest.mark.parametrize("setting", [None, "0"])
def test_all_ranks_get_the_same(setting: str | None) -> None:
    reports = [replace(YES, rank=0), NO, replace(YES, rank=2, setting=setting)]
    answers = together(dist.HashStore(), reports)
    assert answers == [decide(reports)] * 3
    assert answers[0].switched_off == (setting is None)


def test_a_rank_that_does_not_answer_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=200))
    for rank, missing in ((0, 1), (1, 0)):
        with pytest.raises(RuntimeError, match=f"Rank {missing} has not reported") as caught:
            agree(store, rank, 2, replace(YES, rank=rank))
        assert caught.value.__cause__ is not None


def test_a_cpu_or_a_single_rank_needs_no_collective() -> None:
    nowhere: Any = mock.Mock(spec=[])
    cpu = torch.device("cpu")
    for world_size, device in ((4, cpu), (1, CUDA[0])):
        with peers_found(nowhere, 0, world_size, device, [device] * 4) as access:
            assert access == PeerAccess("unknown")


@pytest.mark.parametrize("given", [None, "0"])
def test_the_variable_is_set_unless_a_user_did(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    store = dist.HashStore()
    meeting = SimpleNamespace(main_address="::1", main_port=1)

    def reach(gpu: int, other: int) -> bool:
        asked.append((gpu, other))
        return (gpu, other) != (2, 1)

    def run(rank: int) -> PeerAccess:
        with peers_found(meeting, rank, 4, CUDA[rank], CUDA) as access:
            return access

    # Set first, so that the variable is restored, too.
    monkeypatch.setenv(SETTING, given or "")
    if given is None:
        monkeypatch.delenv(SETTING)
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(store, 0, 0)]))
    monkeypatch.setattr(topology, "reaches", reach)
    monkeypatch.setattr(topology, "nvlink_counts", lambda: None)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(run, range(4)))
    assert len(asked) == 12
    assert len(set(answers)) == 1
    assert answers[0].link == "none"
    assert "rank 2 on" in answers[0].describe()
    assert os.environ[SETTING] == ("1" if given is None else given)


def free_port() -> int:
    with closing(socket.socket()) as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return int(probe_socket.getsockname()[1])


def meet(rank: int, port: int) -> tuple[str, int, str | None]:
    """The ranks agree, then a group is made at the same port."""
    dist.destroy_process_group()
    meeting: Any = SimpleNamespace(main_address="127.0.0.1", main_port=port)
    limit = timedelta(seconds=20)
    report = PeerReport(rank, "a", rank == 0, None, "no" if rank else None)
    with (
        mock.patch.object(topology, "probe", return_value=report),
        peers_found(meeting, rank, 2, CUDA[rank], None, limit) as access,
    ):
        url = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2, timeout=limit)
    total = torch.ones(1)
    dist.all_reduce(total)
    with peers_found(meeting, rank, 2, CUDA[rank], None) as again:  # There is a group already.
        assert again.link == "unknown"
    return access.link, int(total), os.environ.get(SETTING)


def test_a_group_is_made_at_the_store_that_was_used_before(tmp_path: Path) -> None:
    assert values(run_ranks(meet, 2, tmp_path, free_port())) == [("none", 2, "1")] * 2
