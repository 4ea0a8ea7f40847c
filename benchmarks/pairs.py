"""Two runs that take turns step by step, and the ratio of their times with its confidence interval."""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.subjects import Facts, Step, Subject, run_subject

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios of pairs.

    Attributes:
        median: Over all pairs.
        lower: Lower limit of the interval.
        upper: Upper limit.
        confidence: With which probability at least the interval holds the true median.
    """

    median: float
    lower: float
    upper: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.lower:.3f} to {self.upper:.3f})"


@dataclass(frozen=True)
class Comparison:
    """All timed pairs of two runs.

    Attributes:
        steps: Timed steps of the subject.
        peer_steps: Timed steps of its peer, the same batches in the same order.
        facts: What the subject says of itself.
        peer_facts: What its peer says.
    """

    steps: tuple[Step, ...]
    peer_steps: tuple[Step, ...]
    facts: Facts
    peer_facts: Facts

    @property
    def wall(self) -> Ratio:
        """Elapsed time of the subject over that of its peer."""
        return median_ratio([a.wall_seconds / b.wall_seconds for a, b in zip(self.steps, self.peer_steps, strict=True)])

    @property
    def cpu(self) -> Ratio:
        """Processor time of the subject over that of its peer: what other programs do hardly shows in it."""
        return median_ratio([a.cpu_seconds / b.cpu_seconds for a, b in zip(self.steps, self.peer_steps, strict=True)])

    @property
    def same_losses(self) -> bool:
        """True if both computed the same losses, bit for bit."""
        return [step.loss for step in self.steps] == [step.loss for step in self.peer_steps]


def median_ratio(ratios: Sequence[float]) -> Ratio:
    """Return the median with the interval between two order statistics (an inverted sign test).

    It assumes only that the ratios are independent, so another load that spoils some pairs does not spoil it. Fewer
    than six pairs cannot give 95 %: the interval is then their range, and `confidence` says what it is worth.
    """
    ordered = sorted(ratios)
    num = len(ordered)
    tails = [2 * sum(math.comb(num, i) for i in range(k)) / 2**num for k in range(1, num // 2 + 1)]
    rank = max(sum(tail <= 1 - CONFIDENCE for tail in tails), 1)
    confidence = 1 - tails[rank - 1] if tails else 0.0
    return Ratio(statistics.median(ordered), ordered[rank - 1], ordered[num - rank], confidence)


def compare(subject: Subject, peer: Subject, warmup: int, launches: int = 1) -> Comparison:
    """Run both, a step each in turn; which one begins alternates from pair to pair.

    The placement of a process's memory pages makes it a few per cent faster or slower for its whole life. No number of
    pairs of one launch can tell that from a real difference, so the pairs come from several launches.

    Args:
        subject: The run to examine.
        peer: The run that it is compared with; as many steps.
        warmup: Number of pairs at the beginning of each launch that do not count.
        launches: Number of times that both are started.
    """
    assert subject.steps == peer.steps > warmup
    parts = [_launch(subject, peer, warmup) for _ in range(launches)]
    steps = tuple(step for part in parts for step in part.steps)
    peer_steps = tuple(step for part in parts for step in part.peer_steps)
    return Comparison(steps, peer_steps, parts[-1].facts, parts[-1].peer_facts)


def _launch(subject: Subject, peer: Subject, warmup: int) -> Comparison:
    with _process(subject) as ours, _process(peer) as theirs:
        for connection in (ours, theirs):
            assert _receive(connection) is None
        pairs = [_one_pair(ours, theirs, swap=index % 2 == 1) for index in range(subject.steps)][warmup:]
        facts, peer_facts = _give_leave(ours), _give_leave(theirs)
    return Comparison(tuple(a for a, _ in pairs), tuple(b for _, b in pairs), facts, peer_facts)


def _one_pair(ours: Connection, theirs: Connection, swap: bool) -> tuple[Step, Step]:
    if swap:
        second = _give_leave(theirs)
        return _give_leave(ours), second
    return _give_leave(ours), _give_leave(theirs)


def _give_leave(connection: Connection) -> Any:
    """Lets a run go on until its next answer: a `Step`, and the `Facts` at the end."""
    connection.send(None)
    return _receive(connection)


def _receive(connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError as error:
        raise RuntimeError("A run of the comparison ended early; its own message is above.") from error


@contextmanager
def _process(subject: Subject) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=run_subject, args=(far, subject), name=subject.name)
    process.start()
    far.close()
    try:
        yield near
        process.join()
    finally:
        near.close()
        process.terminate()
        process.join()
