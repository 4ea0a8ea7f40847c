"""Benchmark of a training step on several ranks on the CPU, relative to DDP and FSDP2 in the same run.

    python -m benchmarks.distributed --case resident --pairs 12
    python -m benchmarks.distributed --results distributed

Each system has its own ranks, connected by gloo. All systems run in the same period and alternate step by step, see
[Note: Baton] in benchmarks/subjects.py. A step is timed from the message that starts it on all ranks to the last
answer, so it includes work between two batches.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.pairs import Ratio, median_ratio
from benchmarks.report import table, write_result
from benchmarks.subjects import VOCABULARY, Baton, Llama, Subject, llama_config
from benchmarks.systems import System
from lightning_protrain import ProTrainStrategy

HEADER = ("case", "peer", "peer / step (95 %)", "wanted", "met", "step", "peer step", "losses")
# Relative tolerance for losses, because sums are computed in different orders.
_CLOSE = 1e-4


@dataclass(frozen=True)
class Arm:
    """One system.

    Attributes:
        strategy: Takes the number of ranks; makes the strategy.
        checkpointed: True if every block uses PyTorch's activation checkpointing.
        shard: Shards the model before its optimizer is made; None does not shard.
    """

    strategy: Callable[[int], Strategy | str]
    checkpointed: bool = False
    shard: Callable[[nn.Module], None] | None = None


@dataclass(frozen=True)
class Case:
    """A comparison.

    Attributes:
        ours: Name of our arm.
        peer: Name of the arm to compare with.
        wanted: Minimum speed relative to the peer; None if there is no target.
    """

    ours: str
    peer: str
    wanted: float | None


def _ours(sharding: Any, plan: str) -> ProTrainStrategy:
    return ProTrainStrategy(sharding=sharding, plan=plan)


def _shard(model: nn.Module) -> None:
    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)


def _fsdp2(ranks: int) -> Strategy:
    return ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)


def _resident(ranks: int) -> Strategy:
    return _ours("resident", "auto")


def _replicate(ranks: int) -> Strategy:
    return _ours("replicate", "offload")


def _sharded(ranks: int) -> Strategy:
    return _ours("shard", "offload")


ARMS = {
    "resident": Arm(_resident),
    "replicate": Arm(_replicate),
    "shard": Arm(_sharded),
    "DDP": Arm(lambda ranks: "ddp"),
    "DDP, checkpointed": Arm(lambda ranks: "ddp", checkpointed=True),
    "FSDP2": Arm(_fsdp2, checkpointed=True, shard=_shard),
}
CASES = {
    "resident": Case("resident", "DDP", 0.98),
    "shard": Case("shard", "FSDP2", 1.0),
    "replicate": Case("replicate", "DDP, checkpointed", None),
}


def main(arguments: Sequence[str]) -> None:
    args = _parse(arguments)
    rows, results = [], {}
    for name in args.case:
        case = CASES[name]
        ratios, steps, losses = _compare(case, args)
        results[name] = {**asdict(case), "peer_over_step": asdict(ratios), "steps": steps, "losses": losses}
        rows.append(_row(name, case, ratios, steps, losses))
        print(table(HEADER, rows[-1:]), flush=True)
    shape = f"{args.params / 1e6:.0f} million parameters, {args.ranks} ranks x {args.batch} x {args.sequence} tokens"
    text = f"{shape}, AdamW, fp32, {args.threads} thread(s) a rank, {args.pairs} pairs.\n\n{table(HEADER, rows)}"
    print(f"\n{text}")
    if args.results:
        print(write_result(args.results, "benchmarks.distributed", arguments, {"cases": results}, text))


def train_rank(connection: Connection, arm: str, rank: int, port: int, args: argparse.Namespace) -> None:
    """Train as one rank of an arm, one step for each message; the target of a process."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    os.environ.update(place)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (the process ends with it)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    chosen = ARMS[arm]
    system = System(lambda device: "auto", shard=chosen.shard)
    module = Llama(llama_config(args.params, args.sequence), chosen.checkpointed, system)
    steps = args.warmup + args.pairs
    tokens = torch.randint(VOCABULARY, (steps * args.batch * args.ranks, args.sequence))
    subject = Subject(arm, None, steps=steps)
    trainer = L.Trainer(
        strategy=chosen.strategy(args.ranks),
        accelerator="cpu",
        devices=args.ranks,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[Baton(connection, subject)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=args.batch))


def _compare(case: Case, args: argparse.Namespace) -> tuple[Ratio, dict[str, list[float]], dict[str, list[float]]]:
    seconds: dict[str, list[float]] = {case.ours: [], case.peer: []}
    losses: dict[str, list[float]] = {case.ours: [], case.peer: []}
    with ExitStack() as stack:
        worlds = {arm: stack.enter_context(_world(arm, args)) for arm in seconds}
        for step in range(args.warmup + args.pairs):
            for arm in list(worlds)[:: 1 if step % 2 else -1]:
                took, loss = _one_step(worlds[arm])
                losses[arm].append(loss)
                if step >= args.warmup:
                    seconds[arm].append(took)
        for connections in worlds.values():
            _one_step(connections)
    pairs = zip(seconds[case.ours], seconds[case.peer], strict=True)
    return median_ratio([peer / ours for ours, peer in pairs]), seconds, losses


def _one_step(connections: Sequence[Connection]) -> tuple[float, float]:
    """Let all ranks run one step; return its seconds and the loss of rank 0."""
    begin = time.perf_counter()
    for connection in connections:
        connection.send(None)
    answers = [connection.recv() for connection in connections]
    return time.perf_counter() - begin, getattr(answers[0], "loss", 0.0)


@contextmanager
def _world(arm: str, args: argparse.Namespace) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    port, connections, processes = _free_port(), [], []
    for rank in range(args.ranks):
        near, far = context.Pipe()
        process = context.Process(target=train_rank, args=(far, arm, rank, port, args), name=f"{arm} {rank}")
        process.start()
        far.close()
        connections.append(near)
        processes.append(process)
    try:
        for connection in connections:
            assert connection.recv() is None
        yield connections
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _row(
    name: str, case: Case, ratio: Ratio, steps: dict[str, list[float]], losses: dict[str, list[float]]
) -> list[str]:
    differences = [abs(a - b) for a, b in zip(losses[case.ours], losses[case.peer], strict=True)]
    if max(differences) > _CLOSE:
        raise RuntimeError(f"{name}: losses differ by {max(differences):.2g}; no time means anything.")
    wanted = "" if case.wanted is None else f">= {case.wanted}"
    met = "" if case.wanted is None else ("yes" if ratio.median >= case.wanted else "no")
    equal = "equal" if not max(differences) else f"within {max(differences):.0e}"
    medians = [f"{statistics.median(steps[arm]):.3g} s" for arm in (case.ours, case.peer)]
    return [name, case.peer, str(ratio), wanted, met, *medians, equal]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="default: all")
    parser.add_argument(
        "--params",
        type=lambda text: int(float(text)),
        default=30_000_000,
        help="approximate number of parameters, e.g. 3e7",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2, help="sequences in a step of a rank")
    parser.add_argument("--sequence", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--pairs", type=int, default=12, help="timed pairs of steps")
    parser.add_argument("--warmup", type=int, default=2, help="pairs for warm-up")
    parser.add_argument("--threads", type=int, default=1, help="number of PyTorch's threads on each rank")
    parser.add_argument("--results", help="name of the folder in benchmarks/results")
    args = parser.parse_args(arguments)
    if min(args.params, args.ranks, args.batch, args.sequence, args.pairs, args.threads) < 1 or args.warmup < 0:
        parser.error("give positive numbers")
    return args


if __name__ == "__main__":
    main(sys.argv[1:])
