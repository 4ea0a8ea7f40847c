"""Messages between ranks through the store of the process group: values, failures, waits, and signs of life.

[Note: Rank store]
A collective that some rank never joins ends only with the timeout of the process group, half an hour by default, and
its error names no rank. So ranks leave notes for each other in the store of the process group, by rank:

    alive/R             counter that a thread of the rank increments twice a second
    waits/R             what the rank has waited for since 0.2 s or longer, and with which ranks; empty: nothing
    SCOPE/left/R        why the rank takes part in nothing any more: it has failed, or has ended
    SCOPE/N/R           value of the rank in the N-th exchange of the scope, or its error
    SCOPE/N/failed      number of ranks that have failed in that exchange; SCOPE/N/read: number of ranks that know

A scope is one opening of a store: notes of an earlier run do not count. Every rank finds out by itself who is missing.
A rank that has left is named at once, with its reason. Two ranks that wait for each other at different points would
wait forever, so each names the other. A rank that is gone without a word is named in an exchange when its counter has
stood still for `BOUND` seconds, and upon a failed collective within two seconds. A rank that is alive is waited for:
saving may take an hour. Rank 0 hosts the store. If it fails in an exchange, it waits until the others know; if it is
gone, so is the store, which every rank notices at its next look.
"""

from __future__ import annotations

import atexit
import contextlib
import pickle
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

Value = TypeVar("Value")

# Seconds without a sign of life after which a rank counts as dead in an exchange. A call into native code may keep all
# threads of a process from running, so a rank may be silent for some seconds.
BOUND = 30.0
# Seconds between two signs of life.
_BEAT = 0.5
# Seconds between two reads of the store, until the first read, and for a rank to show that it is alive.
_EVERY, _AT_FIRST, _TO_ANSWER = 0.5, 0.2, 2.0
# Seconds that a failed rank waits for the steps of others, so that saved weights are whole.
_TO_END = 5.0
# Seconds that a failed rank 0 waits until the others have read its error, as its exit may end the store; and that ranks
# wait for further errors when they have read one.
_FAREWELL, _TO_JOIN = 2.0, 0.3
# Seconds between two reads of shared memory, and of the values of an exchange: at first, and at most.
_SOON, _LATER = 2e-5, 1e-3
_PAUSES = (1e-3, 0.05)
# Seconds of a wait during set-up before a warning; each further warning takes twice as long.
_SLOW = 30.0
# Reads of an unchanged note before it counts, as its rank may be about to take it back.
_LOOKS = 3
# Name of the phase before the first step, in errors and warnings.
SETTING_UP = "Setting up"
_HOST_GONE = "rank 0 is gone, and the store of the process group with it"
_GONE = "is gone without a word (killed, or out of memory? see its log)"


class FailedElsewhere(RuntimeError):
    """An error that is raised because another rank has failed, is gone, or is somewhere else."""


@contextlib.contextmanager
def naming_wait(what: str, rank: int | None = None) -> Iterator[None]:
    """Warn while a wait for other ranks takes longer than 30 seconds.

    Args:
        what: Event or message that this rank waits for: `"the plan of rank 0"`.
        rank: Number of this rank; None: its rank in the default group; without that group, nothing is done.
    """
    if rank is None:
        if not dist.is_available() or not dist.is_initialized():
            yield
            return
        rank = dist.get_rank()
    ended = threading.Event()

    def warn() -> None:
        waited = 0.0
        while not ended.wait(max(waited, _SLOW)):
            waited += max(waited, _SLOW)
            _warn_of_wait(rank, waited, what)

    thread = threading.Thread(target=warn, name="protrain wait", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _warn_of_wait(rank: int, seconds: float, what: str) -> None:
    warnings.warn(f"Rank {rank} has waited {seconds:.0f} s for {what}.", stacklevel=2)


class _Heart:
    """The connection of this process to the store, and a thread that shows the other ranks that it is alive."""

    def __init__(self, group: Any) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.is_of = weakref.ref(group)
        # A connection of its own: PyTorch waits in the default one for other ranks, and blocks it for all threads.
        default: Any = _get_default_store()
        self.store = dist.PrefixStore("lightning_protrain", default.clone())
        self.current: RankStore | None = None
        self._resting = threading.Event()
        self._thread: threading.Thread | None = None
        atexit.register(self.rest)  # A thread in native code could keep the process from ending.

    def start(self) -> None:
        """Begin or go on to show signs of life."""
        if self._thread is None or not self._thread.is_alive():
            self._resting.clear()
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """End the thread."""
        self._resting.set()
        if self._thread is not None:
            self._thread.join()

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # The store has ended; the next read reports that.
            while self.is_of() is not None:
                self.store.add(f"alive/{self.rank}", 1)
                if self._resting.wait(_BEAT):
                    return


_heart: _Heart | None = None


def _heart_of_group() -> _Heart | None:
    global _heart
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    group = dist.group.WORLD
    if _heart is None or _heart.is_of() is not group:
        _heart = _Heart(group)
    _heart.start()
    return _heart


class RankStore:
    """The notes of one rank and its reading of the others' notes, see [Note: Rank store]; `open` creates it.

    All ranks must exchange values in the same order.

    Args:
        store: Store that the ranks share; None if there is only one rank.
        rank: Number of this rank.
        world_size: Number of all ranks.
        scope: Beginning of the keys that belong to one run.
        bound: Seconds without a sign of life after which a rank counts as dead in an exchange; None means `BOUND`.

    Attributes:
        doing: Present activity of this rank, for errors: `"Step 3"`.
    """

    def __init__(
        self,
        store: dist.Store | None,
        rank: int = 0,
        world_size: int = 1,
        scope: str = "",
        bound: float | None = None,
    ) -> None:
        self._store: Any = store
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._scope = scope
        self._bound = BOUND if bound is None else bound
        self._num_waits = self._num_exchanges = 0
        self._has_left = False
        self._patience: float = 0.0 if store is None else store.timeout.total_seconds()  # type: ignore[attr-defined]
        # By rank: its latest note on what it waits for, and the number of reads that found the same note.
        self._seen: dict[int, tuple[str, int]] = {}
        self.doing = SETTING_UP

    def __reduce__(self) -> tuple[Any, ...]:
        return RankStore, (None,)  # A copy meets no other ranks.

    @staticmethod
    def open(name: str, bound: float | None = None) -> RankStore:
        """Open a store of its own in the default process group; all ranks must call it.

        Args:
            name: Name of the caller, equal on all ranks.
            bound: As in the constructor.
        """
        heart = _heart_of_group()
        if heart is None:
            return RankStore(None)
        number = heart.store.add(f"opened/{name}/{heart.rank}", 1)
        return RankStore(heart.store, heart.rank, heart.world_size, f"{name}/{number}/", bound)

    @staticmethod
    def open_run() -> RankStore:
        """Open the store of a run, which `current` returns from now on; all ranks must call it."""
        store, heart = RankStore.open("run"), _heart_of_group()
        if heart is not None:
            heart.current = store
        return store

    @staticmethod
    def current() -> RankStore:
        """Return the store of the latest run in the default process group; without a run, one for the whole group."""
        heart = _heart_of_group()
        if heart is None:
            return RankStore(None)
        if heart.current is None:
            heart.current = RankStore.open("group")
        return heart.current

    @staticmethod
    def rest() -> None:
        """Show no signs of life until the next use, because a run has ended: the host of the store may end first."""
        if _heart is not None:
            _heart.rest()

    @property
    def has_others(self) -> bool:
        """True if there are other ranks."""
        return bool(self._others)

    # --- values -------------------------------------------------------------------------------------------------------

    def gather(
        self, value: Any, doing: str, patience: float | None = None, error: BaseException | None = None
    ) -> list[Any]:
        """Return the values of all ranks, in the order of ranks.

        Args:
            value: Value of this rank, which is pickled.
            doing: Description of the common task, for messages: `"Saving x.ckpt"`.
            patience: Maximum time to wait for a rank that is alive, seconds; None means no limit.
            error: Error of this rank, which is told in place of a value. Then the list is empty: this rank does not
                wait for the others.

        Raises:
            FailedElsewhere: If another rank has failed, has died, or has another value of `doing`.
        """
        if self._store is None:
            return [value]
        place = f"{self._scope}{self._num_exchanges}"
        self._num_exchanges += 1
        failure = None if error is None else f"{type(error).__name__}: {error}"
        try:
            self._store.set(f"{place}/{self._rank}", zlib.compress(pickle.dumps((doing, failure, value)), 1))
            if failure is None:
                return self._collect(place, doing, patience)
            self._tell_failure(place)
        except FailedElsewhere:
            raise
        except RuntimeError as gone:  # The store has ended.
            if failure is None:
                raise self._failure(_HOST_GONE, doing) from gone
        return []

    def broadcast(self, value: Value, doing: str) -> Value:
        """Return the value of rank 0."""
        return self.gather(value if self._rank == 0 else None, doing)[0]

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Raise an error on all ranks if one rank fails within this context; all ranks must enter it.

        Raises:
            FailedElsewhere: As in `gather`.
        """
        try:
            yield
        except BaseException as error:
            self.gather(None, doing, error=error)
            raise
        self.gather(None, doing)

    def _tell_failure(self, place: str) -> None:
        self._store.add(f"{place}/failed", 1)
        end = time.monotonic() + _FAREWELL * (self._rank == 0)
        while time.monotonic() < end and self._store.add(f"{place}/read", 0) < len(self._others):
            time.sleep(_PAUSES[1])

    def _collect(self, place: str, doing: str, patience: float | None) -> list[Any]:
        """Return the values of all ranks in an exchange once they are there."""
        keys = {rank: f"{place}/{rank}" for rank in range(len(self._others) + 1)}
        begin = time.monotonic()
        beats: dict[int, tuple[int, float]] = {}

        def poll(_: float) -> bool:
            if self._store.check([*keys.values()]):
                return True
            has_failed: bool = self._store.check([f"{place}/failed"])
            # Further ranks may fail with the first one. Without a failure, wait longer and longer.
            time.sleep(_TO_JOIN if has_failed else min(max(0.1 * (time.monotonic() - begin), _PAUSES[0]), _PAUSES[1]))
            return has_failed

        def look(now: float) -> str:
            absent = [rank for rank in self._others if not self._store.check([keys[rank]])]
            for rank in absent:
                count = self._beats(rank)
                if rank not in beats or beats[rank][0] != count:
                    beats[rank] = count, now
                if now - beats[rank][1] > self._bound:
                    silent = f"has not responded for {self._bound:g} s. Look for an error in the log of that rank."
                    raise self._failure(f"rank {rank} {silent}", doing)
                if patience is not None and now - begin > patience:
                    busy = "runs, but does something else. All ranks must save and stop at the same steps."
                    raise self._failure(f"rank {rank} {busy}", doing)
            return f"rank {', '.join(map(str, absent))} ({activity})" if absent else ""  # All have come by now.

        activity = f"{doing[0].lower()}{doing[1:]}"
        self._wait(f"the other ranks ({activity})", poll, look, doing=doing)
        entries = {
            rank: pickle.loads(zlib.decompress(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }
        failed = [f"rank {rank} ({failure})" for rank, (_, failure, _) in entries.items() if failure is not None]
        if failed:
            self._store.add(f"{place}/read", 1)
            raise FailedElsewhere(f"{doing} failed on {', '.join(failed)}; rank {self._rank} stops with it.")
        if {its for its, _, _ in entries.values()} != {doing}:
            activities = ", ".join(f"rank {rank} {its!r}" for rank, (its, _, _) in entries.items())
            raise FailedElsewhere(f"Ranks do different things: {activities}; rank {self._rank} stops with it.")
        # All ranks have read the values of the exchange before this one.
        self._store.delete_key(f"{self._scope}{self._num_exchanges - 2}/{self._rank}")
        return [value for _, _, value in entries.values()]

    # --- waits and failures -------------------------------------------------------------------------------------------

    def sign_off(self, reason: str) -> None:
        """Write a note that this rank takes part in nothing any more; only the first one counts.

        Args:
            reason: Predicate that follows "rank 1": `"failed at step 3 with ValueError: ..."`.
        """
        if self.has_others and not self._has_left:
            self._has_left = True
            self._write(f"{self._scope}left/{self._rank}", reason)

    def wait(self, work: Any, what: str, members: range | None = None) -> None:
        """Wait for a collective of host tensors.

        Args:
            work: The collective.
            what: Name of the collective, identical on all of its ranks: `"the averages of step 3"`.
            members: Ranks that take part; None: all ranks.

        Raises:
            FailedElsewhere: Some rank has failed or has gone on without the collective; the message names it.
        """
        self._wait(what, lambda until: work.is_completed() or _wait_until(work, until), lambda _: what, members)
        self.naming(work.wait)

    def _wait(
        self,
        what: str,
        poll: Callable[[float], bool],
        look: Callable[[float], str],
        members: range | None = None,
        doing: str | None = None,
    ) -> None:
        """Wait until `poll` returns True, and look from time to time whether all ranks are there.

        Args:
            what: Name of what is waited for, identical on all ranks that wait for it.
            poll: Waits until a time at most, and returns whether the wait has ended.
            look: Looks who is missing at a time, and returns what is waited for, for a warning; empty: nobody is.
            members: Ranks that wait for each other; None: all ranks.
            doing: Present activity, for errors; None: the attribute.
        """
        begin = time.monotonic()
        until, slow, has_note = begin + _AT_FIRST, _SLOW, False
        self._num_waits += 1
        self._seen.clear()
        members = members or range(len(self._others) + 1)
        while not poll(until):
            now = time.monotonic()
            if now < until:
                continue
            if not has_note:
                self._write(f"waits/{self._rank}", f"{self._num_waits} {members.start} {members.stop} {what}")
                has_note = True
            missing = look(now)
            if missing and self.doing == SETTING_UP and now > begin + slow:
                _warn_of_wait(self._rank, slow, missing)
                slow *= 2
            self._refuse_absence(what, members, doing)
            until = time.monotonic() + _EVERY
        if has_note:
            self._write(f"waits/{self._rank}", "")

    def wait_for_rank(self, rank: int, reached: Callable[[], bool], is_there: Callable[[], bool], what: str) -> None:
        """Wait until another rank of this node has done a piece of work; may be called from any thread.

        A rank that has failed finishes the work that it has begun, so the wait for it goes on a little longer.

        Args:
            rank: The other rank.
            reached: Returns True once the rank has done the work; called repeatedly.
            is_there: Returns whether the rank's process still takes part.
            what: Work that is waited for, for errors: `"its part of step 3 of 'layers.0'"`.

        Raises:
            FailedElsewhere: The rank has failed, is gone, or has exceeded the timeout of a collective.
        """
        begin, pause = time.monotonic(), _SOON
        look, failed_at = begin + _AT_FIRST, float("inf")
        while not reached():
            now = time.monotonic()
            if now > look:
                there, reason = is_there(), self._reason(rank)
                failed_at = min(failed_at, now) if reason is not None else failed_at
                limit = _TO_END if self._has_left else self._patience
                if not there or now - failed_at > _TO_ANSWER or now - begin > limit:
                    if reached():  # The rank may have done the work just before its process ended.
                        return
                    slow = f"has not come for {now - begin:.0f} s" if there else _GONE
                    raise self._failure(f"rank {rank} {reason or slow}, and {what} is missing.")
                look = now + _EVERY
            time.sleep(pause)
            pause = min(1.5 * pause, _LATER)

    def naming(self, collective: Callable[[], object]) -> None:
        """Call a collective; if it fails, name the missing rank.

        Raises:
            FailedElsewhere: The collective failed.
        """
        try:
            collective()
        except RuntimeError as error:
            raise self.explain() from error

    def explain(self) -> FailedElsewhere:
        """Return an error that explains a failed collective; takes up to two seconds."""
        before = {other: self._beats(other) for other in self._others}
        until = time.monotonic() + _TO_ANSWER
        silent = self._others
        while silent and time.monotonic() < until:
            for other in self._others:
                reason = self._reason(other)
                if reason is not None:
                    return self._failure(f"rank {other} {reason}.")
            silent = [other for other in silent if self._beats(other) == before[other]]
            time.sleep(_EVERY / 10)
        if not silent:
            return self._failure("all ranks are there, and a collective has failed (see above).")
        return self._failure(f"rank {', '.join(map(str, silent))} {_GONE}.")

    def _refuse_absence(self, what: str, members: range, doing: str | None) -> None:
        for other in self._others:
            reason = self._reason(other)
            note = self._read(f"waits/{other}") or ""
            last_note, looks = self._seen.get(other, ("", 0))
            looks = looks + 1 if note == last_note else 1
            self._seen[other] = note, looks
            if reason is None and note and looks >= _LOOKS:
                _, start, stop, its = note.split(" ", 3)
                if its != what and other in members and self._rank in range(int(start), int(stop)):
                    reason = (
                        f"waits for {its}, but this rank waits for {what}. Check that all ranks have the same number "
                        "of batches."
                    )
            if reason is not None:
                raise self._failure(f"rank {other} {reason}", doing)

    def _failure(self, text: str, doing: str | None = None) -> FailedElsewhere:
        return FailedElsewhere(f"{doing or self.doing} ends on rank {self._rank}: {text}")

    def _beats(self, rank: int) -> int:
        """Return the number of signs of life of a rank."""
        try:
            return int(self._store.add(f"alive/{rank}", 0))
        except RuntimeError:
            return 0

    def _reason(self, rank: int) -> str | None:
        """Return why a rank has left, or None."""
        return self._read(f"{self._scope}left/{rank}")

    def _write(self, key: str, text: str) -> None:
        # RuntimeError: the host of the store is gone, and with it every reader.
        with contextlib.suppress(RuntimeError):
            self._store.set(key, "." + text)

    def _read(self, key: str) -> str | None:
        """Return the note under `key`, or None; a lost store counts as a note of rank 0, which hosts it."""
        try:
            return self._store.get(key).decode()[1:] if self._store.check([key]) else None
        except RuntimeError:
            return _HOST_GONE.removeprefix("rank 0 ") if key.endswith("left/0") else None


def is_of_collective(exception: BaseException) -> bool:
    """Return whether a collective of PyTorch raised the exception; gloo has no exception class."""
    signs = ("gloo", "onnection closed by peer", "onnection reset by peer", "pair closure", "Timed out waiting")
    return isinstance(exception, dist.DistError) or (
        isinstance(exception, RuntimeError)
        and not isinstance(exception, FailedElsewhere)
        and any(sign in str(exception) for sign in signs)
    )


def _wait_until(work: Any, end: float) -> bool:
    """Wait for a collective until it ends or until the time `end`; polling without a pause would occupy a core."""
    # RuntimeError: it has not ended yet, or it has failed, which the caller finds out when it has ended.
    with contextlib.suppress(RuntimeError):
        work.wait(timedelta(seconds=max(end - time.monotonic(), 0.0) + 1e-3))
    return bool(work.is_completed())
