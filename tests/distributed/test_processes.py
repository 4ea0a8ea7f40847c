"""Processes of a run: how many there are, who starts them, and by what they send."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_protrain import ProTrainStrategy
from lightning_protrain.device.host import HostWorker
from lightning_protrain.device.topology import PeerAccess
from lightning_protrain.distributed import launch


def trainer_with(strategy: Any, **options: Any) -> L.Trainer:
    return L.Trainer(accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False, **options)


@pytest.mark.parametrize(("devices", "num_nodes"), [(2, 1), (1, 3), (2, 3)])
def test_several_processes_are_launched(devices: int, num_nodes: int) -> None:
    strategy = trainer_with("protrain", devices=devices, num_nodes=num_nodes).strategy
    assert strategy.is_distributed
    assert isinstance(strategy.launcher, _SubprocessScriptLauncher)
    assert strategy.world_size == devices * num_nodes
    assert isinstance(trainer_with("protrain_spawn", devices=1).strategy.launcher, _MultiProcessingLauncher)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": devices * num_nodes, "rank": 0}


@pytest.mark.parametrize(
    ("chosen", "kind", "backend"),
    [
        (None, "cpu", "gloo"),
        (None, "cuda", "cpu:gloo,cuda:nccl"),
        ("nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("gloo", "cpu", "gloo"),
        ("gloo", "cuda", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda", "cpu:gloo,cuda:nccl"),
    ],
)
def test_the_backend_sends_what_is_on_host_and_device(chosen: str | None, kind: str, backend: str) -> None:
    assert launch.choose_backend(chosen, kind) == backend


@pytest.mark.parametrize(("chosen", "kind"), [("nccl", "cpu"), ("cuda:nccl", "cpu"), ("cpu:gloo", "cuda")])
def test_another_backend_is_refused(chosen: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"process_group_backend='{chosen}' cannot send tensors on '{kind}'"):
        launch.choose_backend(chosen, kind)


@pytest.mark.parametrize(("kind", "told"), [("cuda", 1), ("cpu", 0)])
def test_nccl_is_told_of_the_end(kind: str, told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = trainer_with("protrain", devices=2).strategy
    assert isinstance(strategy, ProTrainStrategy)
    monkeypatch.setattr(strategy, "parallel_devices", [torch.device(kind)] * 2)
    monkeypatch.setattr(ParallelStrategy, "setup_environment", lambda _: None)
    monkeypatch.setattr(launch, "peers_found", lambda *_: nullcontext(PeerAccess("unknown")))
    connect, register = mock.MagicMock(), mock.MagicMock()
    monkeypatch.setattr(launch, "_init_dist_connection", connect)
    monkeypatch.setattr("atexit.register", register)
    monkeypatch.setattr(launch, "make_rank_mesh", lambda *_: None)
    strategy.setup_environment()
    assert connect.call_count == 1
    assert register.call_args_list == told * [mock.call(launch._destroy_dist_connection)]


def test_ranks_of_a_machine_share_out_the_cores_of_their_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = trainer_with("protrain", devices=2).strategy
    assert isinstance(strategy, ProTrainStrategy)
    monkeypatch.setattr(ProTrainStrategy, "local_rank", 1)
    monkeypatch.setattr(launch, "open_device", lambda *_: SimpleNamespace(worker=HostWorker(8, frozenset(range(8)))))
    worker = strategy.open_device().worker
    assert (sorted(worker._cores), worker.threads) == ([4, 5, 6, 7], 3)  # One launches kernels.


@pytest.mark.parametrize(("rank", "cores"), [(1, [4, 5, 6, 7]), (2, [0, 1, 2, 3])])
def test_only_ranks_whose_gpus_hang_on_one_node_share_its_cores(
    rank: int, cores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = trainer_with("protrain", devices=4).strategy
    assert isinstance(strategy, ProTrainStrategy)
    strategy.parallel_devices = [torch.device("cuda", index) for index in range(4)]
    monkeypatch.setattr(ProTrainStrategy, "local_rank", rank)
    monkeypatch.setattr(launch, "numa_node", lambda gpu: gpu.index // 2)
    monkeypatch.setattr(launch, "open_device", lambda *_: SimpleNamespace(worker=HostWorker(8, frozenset(range(8)))))
    assert sorted(strategy.open_device().worker._cores) == cores


@pytest.mark.parametrize(("devices", "prefix"), [(1, ""), (2, "[rank: 1] ")])
def test_every_rank_says_what_only_its_device_refuses(
    devices: int, prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`rank_zero_info` would leave a refusal on another rank unsaid."""
    strategy = trainer_with("protrain", devices=devices).strategy
    assert isinstance(strategy, ProTrainStrategy)
    monkeypatch.setattr(ProTrainStrategy, "global_rank", devices - 1)
    monkeypatch.setattr(rank_zero_only, "rank", devices - 1)

    def refuse(torch_device: torch.device, log_once: Callable[[str], None]) -> Any:
        log_once("Nothing can be locked.")
        return SimpleNamespace(worker=HostWorker())

    monkeypatch.setattr(launch, "open_device", refuse)
    with caplog.at_level(logging.INFO):
        strategy.open_device()
    assert [message for message in caplog.messages if "locked" in message] == [f"{prefix}Nothing can be locked."]
