"""Streams and a worker that run their work as late as the fences allow, see [Note: Lateness]."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from lightning_protrain.device.host import HostWorker, place_in


class RaceError(RuntimeError):
    """Two accesses to one storage that no fence orders, or an operation that a real device could not run."""


@dataclass(eq=False)
class Host:
    """The part of the host that runs at present: the main thread, or a worker that runs a job.

    Attributes:
        stream: The stream that stands for it.
    """

    stream: SimulatedStream = field(init=False)

    def __post_init__(self) -> None:
        """The main thread to begin with."""
        self.stream = SimulatedStream("host", self, eager=True)


@dataclass
class SimulatedEvent:
    """A point in a stream; `clock` is what is known to have ended when it has passed, at the virtual `time`."""

    stream: SimulatedStream
    clock: dict[str, int]
    time: float
    passed: bool = False

    def query(self) -> bool:
        """Return whether everything before it has run, and the host has come as far on the virtual clock."""
        return self.passed and self.time <= self.stream.host.stream.time

    def synchronize(self) -> None:
        """The host waits for it."""
        self.stream.run_until(self)
        host = self.stream.host.stream
        join(host.clock, self.clock)
        host.time = max(host.time, self.time)


@dataclass
class Link:
    """One direction of the link between host and device; several streams share it, see [Note: Virtual clock].

    Attributes:
        busy: Intervals of time in which the link carries copies; disjoint, in order.
    """

    busy: list[tuple[float, float]] = field(default_factory=list)

    def carry(self, begin: float, seconds: float) -> float:
        """Give a copy the free time of the link, in pieces if necessary; earlier copies keep their time.

        Args:
            begin: Earliest beginning of the copy.
            seconds: Duration of the copy on an idle link.

        Returns:
            When it has ended.
        """
        first = last = bisect_right(self.busy, begin, key=itemgetter(1))  # what is before has ended
        time, left = begin, seconds
        while last < len(self.busy) and time + left > self.busy[last][0]:
            begins, ends = self.busy[last]
            left -= max(begins - time, 0.0)
            time, last = ends, last + 1
        since = min(begin, self.busy[first][0]) if last > first else begin
        self.busy[first:last] = [(since, time + left)]
        return time + left


@dataclass(eq=False)
class SimulatedStream:
    """A queue of work; one that is `eager` has run everything it has been given.

    Attributes:
        name: Name in error messages.
        host: Host that launches its work.
        eager: Whether it runs at once what it is given.
        link: Link that its copies share with other streams; None: it shares none.
        clock: The vector clock, see [Note: Happens-before].
        queue: Work that has been launched and not run.
        time: Time at which it is free, in virtual seconds.
        busy: Time for which it has worked, in virtual seconds.
    """

    name: str
    host: Host
    eager: bool
    link: Link | None = None
    clock: dict[str, int] = field(default_factory=dict)
    queue: deque[Callable[[], None]] = field(default_factory=deque)
    time: float = 0.0
    busy: float = 0.0

    def spend(self, seconds: float) -> None:
        """Work for `seconds`; begin when the stream is free and the host has launched the work."""
        begin = max(self.time, self.host.stream.time)
        self.time = begin + seconds if self.link is None else self.link.carry(begin, seconds)
        self.busy += seconds

    def step(self) -> int:
        """Begin a step after everything that the host has seen so far, and return its number."""
        join(self.clock, self.host.stream.clock)
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]

    def record_event(self) -> SimulatedEvent:
        """An event after the work given so far."""
        event = SimulatedEvent(self, dict(self.clock), self.time, passed=self.eager)
        self.queue.append(lambda: setattr(event, "passed", True))
        self._advance()
        return event

    def wait_event(self, event: SimulatedEvent) -> None:
        """Order later work after `event`."""
        join(self.clock, event.clock)
        self.time = max(self.time, event.time)
        self.queue.append(lambda: event.stream.run_until(event))
        self._advance()

    def wait_stream(self, stream: SimulatedStream) -> None:
        """Order later work after the work that `stream` has been given so far."""
        self.wait_event(stream.record_event())

    def launch(self, work: Callable[[], None]) -> None:
        """Give the stream work."""
        self.queue.append(work)
        self._advance()

    def run_until(self, event: SimulatedEvent) -> None:
        """Run the work before `event`."""
        while not event.passed:
            self.queue.popleft()()

    def _advance(self) -> None:
        while self.eager and self.queue:
            self.queue.popleft()()


@dataclass(eq=False)
class SimulatedJob:
    """A job of the simulated worker: it runs when somebody waits for it, and not before, see [Note: Lateness]."""

    worker: SimulatedWorker
    work: Callable[[], object]
    given: SimulatedEvent
    ended: SimulatedEvent | None = None
    error: BaseException | None = None
    callbacks: list[Callable[[Any], object]] = field(default_factory=list)

    def done(self) -> bool:
        """Return whether it has run."""
        return self.ended is not None

    def exception(self) -> BaseException | None:
        """Run the job after earlier jobs, and return the exception that it raised."""
        self.worker.run_until(self)
        assert self.ended is not None
        host = self.worker.stream.host.stream
        join(host.clock, self.ended.clock)
        host.time = max(host.time, self.ended.time)
        return self.error

    def result(self) -> None:
        """Run the job after earlier jobs.

        Raises:
            BaseException: The job raised.
        """
        error = self.exception()
        if error is not None:
            raise error

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        """Calls `function` when it has run."""
        self.callbacks.append(function)
        if self.ended is not None:
            function(self)


class SimulatedWorker(HostWorker):
    """The host's worker as a stream of its own: as late as a thread can be.

    Args:
        host: Host that gives it jobs.
        name: Name of its stream.
    """

    def __init__(self, host: Host, name: str = "worker") -> None:
        super().__init__(1)
        self.stream = SimulatedStream(name, host, eager=True)
        self._jobs: deque[SimulatedJob] = deque()
        self._sorted: tuple[float, Callable[[Any], int]] | None = None

    def reorder(self, jobs: Sequence[Any], after: SimulatedEvent | None = None) -> None:
        """Sort the jobs that have not begun when `after` has ended on the virtual clock."""
        time = self.stream.host.stream.time if after is None else after.time
        self._sorted = time, place_in(jobs, self._jobs)

    def submit(self, work: Callable[[], object]) -> SimulatedJob:
        """Keep `work` until it is waited for."""
        job = SimulatedJob(self, work, self.stream.host.stream.record_event())
        self._jobs.append(job)
        return job

    def run_until(self, job: SimulatedJob) -> None:
        """Run the jobs up to `job`."""
        while job.ended is None:
            self._run(self._next())

    def _next(self) -> SimulatedJob:
        if self._sorted is not None:
            time, place = self._sorted
            if max(self.stream.time, self._jobs[0].given.time) >= time:
                self._jobs, self._sorted = deque(sorted(self._jobs, key=place)), None
        return self._jobs.popleft()

    def drain(self) -> None:
        """Runs every job."""
        while self._jobs:
            self._run(self._next())

    def close(self) -> None:
        self.drain()

    def _run(self, job: SimulatedJob) -> None:
        stream, host = self.stream, self.stream.host
        join(stream.clock, job.given.clock)
        stream.time = max(stream.time, job.given.time)
        main, host.stream = host.stream, stream
        try:
            job.work()
        except RaceError as error:
            job.error = error
            raise  # Whether or not anybody waits for the job.
        except RuntimeError as error:
            job.error = error
        finally:
            job.ended = stream.record_event()
            for function in job.callbacks:
                function(job)
            host.stream = main


def join(clock: dict[str, int], other: Mapping[str, int]) -> None:
    """Merge the vector clock `other` into `clock`."""
    for name, step in other.items():
        clock[name] = max(clock.get(name, 0), step)
