"""Finds out which ranks have failed: ranks leave notes for each other beside their collectives.

A collective that some rank never joins ends only with the timeout of the process group, half an hour by default, and
its error names no rank. So a rank that fails writes the reason into the store of the process group. A rank that waits
long writes what it waits for and with which ranks, and reads the notes of others. So it finds two ranks that wait for
each other in different collectives, which would wait forever. If a rank is gone without a note, the others write that
they are alive, and so find the missing one. On the same node the kernel shows which rank is gone, see
`NodeMemory.is_held`.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Seconds between two reads of the store, until the first read, and for a rank to write that it is alive.
_EVERY, _AT_FIRST, _TO_ANSWER = 0.5, 0.2, 2.0
# Seconds that a failed rank waits for the steps of others, so that saved weights are whole.
_TO_END = 5.0
# Seconds between two reads of shared memory: at first, and at most.
_SOON, _LATER = 2e-5, 1e-3
# Seconds of a wait during set-up before a warning; each further warning takes twice as long.
_SLOW = 30.0
# Reads of an unchanged note before it counts, as its rank may be about to take it back.
_LOOKS = 3
# Name of the phase before the first step, in errors and warnings.
SETTING_UP = "Setting up"
_GONE = "is gone without a word (killed, or out of memory? see its log)"


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
        waited = _SLOW
        if ended.wait(waited):
            return
        _warn_of_wait(rank, waited, what)
        while not ended.wait(waited):
            waited *= 2
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


class RankHealth:
    """The notes of one rank, and its reading of the others' notes.

    Args:
        store: Store of the process group, without notes of an earlier run.
        rank: Number of this rank.
        world_size: Number of all ranks.

    Attributes:
        doing: Present activity of this rank, for errors: `"Step 3"`.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = dist.PrefixStore("protrain", store)
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._num_waits = 0
        self._has_left = False
        self._patience: float = store.timeout.total_seconds()  # type: ignore[attr-defined]
        # By rank: its latest note on what it waits for, and the number of reads that found the same note.
        self._seen: dict[int, tuple[str, int]] = {}
        self.doing = SETTING_UP

    def sign_off(self, reason: str) -> None:
        """Write a note that this rank takes part in nothing any more.

        Args:
            reason: Predicate that follows "rank 1": `"failed at step 3 with ValueError: ..."`.
        """
        self._has_left = True
        self._write(f"left/{self._rank}", reason)

    def wait(self, work: Any, what: str, members: range | None = None) -> None:
        """Wait for a collective of host tensors.

        Args:
            work: The collective.
            what: Name of the collective, identical on all of its ranks: `"the averages of step 3"`.
            members: Ranks that take part; None: all ranks.

        Raises:
            RuntimeError: Some rank has failed or has gone on without the collective; the message names it.
        """
        begin, slow, said = time.monotonic(), _SLOW, False
        look = begin + _AT_FIRST
        self._num_waits += 1
        self._seen.clear()
        members = members or range(len(self._others) + 1)
        while not work.is_completed():
            if time.monotonic() > look:
                if not said:
                    self._write(f"waits/{self._rank}", f"{self._num_waits} {members.start} {members.stop} {what}")
                    said = True
                if self.doing == SETTING_UP and time.monotonic() > begin + slow:
                    _warn_of_wait(self._rank, slow, what)
                    slow *= 2
                self._refuse_absence(what, members)
                look = time.monotonic() + _EVERY
            _wait_until(work, look)
        if said:
            self._write(f"waits/{self._rank}", "")
        self.naming(work.wait)

    def wait_for_rank(self, rank: int, reached: Callable[[], bool], is_there: Callable[[], bool], what: str) -> None:
        """Wait until another rank of this node has done a piece of work; may be called from any thread.

        A rank that has failed finishes the work that it has begun, so the wait for it goes on a little longer.

        Args:
            rank: The other rank.
            reached: Returns True once the rank has done the work; called repeatedly.
            is_there: Returns whether the rank's process still takes part.
            what: Work that is waited for, for errors: `"its part of step 3 of 'layers.0'"`.

        Raises:
            RuntimeError: The rank has failed, is gone, or has exceeded the timeout of a collective.
        """
        begin, pause = time.monotonic(), _SOON
        look, failed_at = begin + _AT_FIRST, float("inf")
        while not reached():
            now = time.monotonic()
            if now > look:
                there, reason = is_there(), self._read(f"left/{rank}")
                failed_at = min(failed_at, now) if reason is not None else failed_at
                limit = _TO_END if self._has_left else self._patience
                if not there or now - failed_at > _TO_ANSWER or now - begin > limit:
                    if reached():  # The rank may have done the work just before its process ended.
                        return
                    slow = f"has not come for {now - begin:.0f} s" if there else _GONE
                    raise RuntimeError(f"{self._stops()}: rank {rank} {reason or slow}, and {what} is missing.")
                look = now + _EVERY
            time.sleep(pause)
            pause = min(1.5 * pause, _LATER)

    def naming(self, collective: Callable[[], object]) -> None:
        """Call a collective; if it fails, name the missing rank.

        Raises:
            RuntimeError: The collective failed.
        """
        try:
            collective()
        except RuntimeError as error:
            raise self.explain() from error

    def explain(self) -> RuntimeError:
        """Return an error that explains a failed collective; takes up to two seconds."""
        return RuntimeError(f"{self._stops()}: {self._find_absent()}.")

    def has_explained(self, error: BaseException) -> bool:
        """Return whether an error already says why this rank ends."""
        return self._stops() in str(error)

    def _refuse_absence(self, what: str, members: range) -> None:
        for other in self._others:
            reason = self._read(f"left/{other}")
            note = self._read(f"waits/{other}") or ""
            before, looks = self._seen.get(other, ("", 0))
            looks = looks + 1 if note == before else 1
            self._seen[other] = note, looks
            if reason is None and note and looks >= _LOOKS:
                _, start, stop, its = note.split(" ", 3)
                if its != what and other in members and self._rank in range(int(start), int(stop)):
                    reason = (
                        f"waits for {its}, but this rank waits for {what}. Check that all ranks have the same number "
                        "of batches."
                    )
            if reason is not None:
                raise RuntimeError(f"{self._stops()}: rank {other} {reason}")

    def _find_absent(self) -> str:
        """Return which rank has left or does not answer, after a collective has failed."""
        self._write(f"here/{self._rank}", "")
        until = time.monotonic() + _TO_ANSWER
        silent = self._others
        while silent and time.monotonic() < until:
            for other in self._others:
                reason = self._read(f"left/{other}")
                if reason is not None:
                    return f"rank {other} {reason}"
            silent = [other for other in silent if self._read(f"here/{other}") is None]
            time.sleep(_EVERY / 10)
        if not silent:
            return "all ranks are there, and a collective has failed (see above)"
        names = ", ".join(map(str, silent))
        return f"rank {names} {_GONE}"

    def _stops(self) -> str:
        return f"{self.doing} ends on rank {self._rank}"

    def _write(self, key: str, text: str) -> None:
        try:
            self._store.set(key, "." + text)
        except RuntimeError:  # The host of the store is gone, and with it every reader.
            return

    def _read(self, key: str) -> str | None:
        """Return the note under `key`, or None; a lost store counts as a note of rank 0, which hosts it."""
        try:
            found = self._store.get(key).decode()[1:] if self._store.check([key]) else None
        except RuntimeError:
            return "is gone, and the store of the process group with it" if key == "left/0" else None
        return found


def is_of_collective(exception: BaseException) -> bool:
    """Return whether a collective of PyTorch raised the exception; gloo has no exception class."""
    signs = ("gloo", "onnection closed by peer", "onnection reset by peer", "pair closure", "Timed out waiting")
    return isinstance(exception, dist.DistError) or (
        isinstance(exception, RuntimeError) and any(sign in str(exception) for sign in signs)
    )


def _wait_until(work: Any, end: float) -> None:
    """Wait for a collective until it ends or until the time `end`; polling without a pause would occupy a core."""
    # RuntimeError: it has not ended yet, or it has failed, which the caller finds out when it has ended.
    with contextlib.suppress(RuntimeError):
        work.wait(timedelta(seconds=max(end - time.monotonic(), 0.0) + 1e-3))
