"""Comparison of two runs that alternate step by step: the ratio of their times, with its confidence interval."""

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
        confidence: Minimum probability that the interval contains the true median.
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
        peer_steps: Timed steps of the peer, with the same batches in the same order.
        facts: Facts about the subject.
        peer_facts: Facts about the peer.
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
        """Processor time of the subject over that of its peer, which other programs hardly affect."""
        return median_ratio([a.cpu_seconds / b.cpu_seconds for a, b in zip(self.steps, self.peer_steps, strict=True)])

    @property
    def same_losses(self) -> bool:
        """True if both computed the same losses, bit for bit."""
        return [step.loss for step in self.steps] == [step.loss for step in self.peer_steps]


def median_ratio(ratios: Sequence[float]) -> Ratio:
    """Return the median with the interval between two order statistics (an inverted sign test).

    The interval only assumes independent ratios, so it is robust against disturbed pairs. Fewer than six pairs cannot
    reach 95 %: then the interval is their range, and `confidence` is lower.
    """
    ordered = sorted(ratios)
    num = len(ordered)
    tails = [2 * sum(math.comb(num, i) for i in range(k)) / 2**num for k in range(1, num // 2 + 1)]
    rank = max(sum(tail <= 1 - CONFIDENCE for tail in tails), 1)
    confidence = 1 - tails[rank - 1] if tails else 0.0
    return Ratio(statistics.median(ordered), ordered[rank - 1], ordered[num - rank], confidence)


def compare(subject: Subject, peer: Subject, warmup: int, launches: int = 1) -> Comparison:
    """Run a subject and its peer alternately, one step each; the first one alternates from pair to pair.

    The placement of its memory pages makes a process a few per cent faster or slower for its whole life. So the pairs
    come from several launches.

    Args:
        subject: The run to examine.
        peer: The run to compare with, with the same number of steps.
        warmup: Number of pairs at the begin of each launch that do not count.
        launches: Number of launches of both processes.
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
    """Let a run continue until its next answer, and return it: a `Step`, or the `Facts` at the end."""
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
