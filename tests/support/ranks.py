"""Ranks for a test: forked processes in one gloo group, and the result, error or silence of each."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy

from tests.support.trainers import QUIET

# Seconds after which a rank that has not answered is killed, and "hangs". The process group waits longer: a rank that
# waits for the timeout of the group is found, and no test depends on how fast the machine is.
LIMIT = 240.0


class Outcome(NamedTuple):
    """The outcome of one rank.

    Attributes:
        value: Return value of the function; None if it raised, or was killed.
        error: Exception of the function, as "Type: message"; "killed" if the process ended without an answer.
        seconds: Time from the start of all ranks until this one ended.
        code: Exit code of its process.
    """

    value: Any
    error: str | None
    seconds: float
    code: int | None = None


def run_ranks(function: Callable[..., Any], world_size: int, folder: Path, *args: Any) -> list[Outcome]:
    """Calls `function(rank, *args)` in as many processes as there are ranks, each a member of the default group.

    Args:
        function: Its result must be picklable.
        world_size: Number of ranks.
        folder: Empty; the ranks meet in it.
        args: Further arguments, the same for all.
    """
    context = multiprocessing.get_context("fork")
    begin = time.monotonic()
    processes, ends = [], []
    for rank in range(world_size):
        near, far = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(far, function, rank, world_size, folder, args))
        process.start()
        far.close()
        processes.append(process)
        ends.append(near)
    outcomes: dict[Connection, Outcome] = {}
    while len(outcomes) < world_size and time.monotonic() - begin < LIMIT:
        for end in wait([each for each in ends if each not in outcomes], timeout=0.5):
            assert isinstance(end, Connection)
            try:
                value, error = end.recv()
            except EOFError:
                value, error = None, "killed"
            outcomes[end] = Outcome(value, error, time.monotonic() - begin)
    for process in processes:
        process.join(timeout=0 if len(outcomes) < world_size else LIMIT)
        if process.is_alive():
            process.kill()
            process.join()
    for end in ends:
        end.close()
    ended = [outcomes.get(end, Outcome(None, "hangs", LIMIT)) for end in ends]
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.close()
    return [outcome._replace(code=code) for outcome, code in zip(ended, codes, strict=True)]


def values(outcomes: list[Outcome]) -> list[Any]:
    """Return the values of all ranks; fail if a rank has raised."""
    assert [each.error for each in outcomes] == [None] * len(outcomes)
    return [each.value for each in outcomes]


def kill_this_rank() -> None:
    """Kill this process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def trainer_on_rank(
    rank: int,
    world_size: int,
    kind: Callable[..., ParallelStrategy] = DDPStrategy,
    num_nodes: int = 1,
    **options: Any,
) -> Trainer:
    """Return a Trainer with DDP, or another kind of parallel strategy, for a rank of `run_ranks`.

    Args:
        rank: Rank of this process.
        world_size: Number of ranks.
        kind: Makes the strategy.
        num_nodes: Nodes that the ranks pretend to be on, as many on each.
        options: Arguments of the Trainer.
    """
    strategy = kind(process_group_backend="gloo")
    strategy.cluster_environment = _Environment(rank, world_size, world_size // num_nodes)
    return quiet_trainer(devices=world_size // num_nodes, num_nodes=num_nodes, strategy=strategy, **options)


def quiet_trainer(**options: Any) -> Trainer:
    """A Trainer on the CPU that shows and saves nothing, unless it is told to."""
    return Trainer(**{"accelerator": "cpu", **QUIET, **options})


class _Environment(LightningEnvironment):
    """The processes are there already, and so is the group."""

    def __init__(self, rank: int, world_size: int, ranks_per_node: int) -> None:
        super().__init__()
        self._ranks_per_node = ranks_per_node
        self.set_global_rank(rank)
        self.set_world_size(world_size)

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        return self.global_rank() % self._ranks_per_node

    def node_rank(self) -> int:
        return self.global_rank() // self._ranks_per_node


def _run(
    end: Connection, function: Callable[..., Any], rank: int, world_size: int, folder: Path, args: tuple[Any, ...]
) -> None:
    gc.freeze()  # A collection would write to all that was there before the fork, and so copy it.
    store = dist.FileStore(str(folder / "meeting"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=2 * LIMIT))
    dist.barrier()  # Nobody leaves while another one is still being connected.
    try:
        answer = function(rank, *args), None
    except BaseException as error:  # noqa: BLE001 (whatever it is, the test wants to see it)
        answer = None, f"{type(error).__name__}: {error}"
    end.send(answer)
    end.close()
    os._exit(0)  # No teardown of what the forked process has inherited.
