"""Exchanges values between ranks, and detects ranks that have failed or died.

If a rank does not join a collective, the collective fails only after a timeout, 30 minutes by default, and the error
does not name the rank. Saving may legitimately take that long on one rank. So the ranks exchange values through the
store of the process group: each rank writes its value, and rank 0 collects all values and writes the list. A thread of
each rank increments a counter in the store. If a counter does not change for `BOUND` seconds, its rank has died. A rank
that fails writes its error into the store, and does not wait for other ranks.

[Note: Flags]
In every optimizer step, the ranks take the maximum of a few flags by an all-reduce in a separate gloo group. The
all-reduce starts before the optimizer step and is read after it, so that it overlaps with the step. All ranks get the
same result at the same step. A flag that is set after the all-reduce has started counts at the next step.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

Value = TypeVar("Value")

# A rank counts as dead if its counter does not change for this number of seconds.
BOUND = 8.0
# Interval at which a rank increments its counter, seconds.
_BEAT = 0.5
# Minimum and maximum pause between two reads of the store, seconds.
_LOOKS = (0.001, 0.05)
# Maximum time for which a failed rank 0 waits until others have read its error, seconds; its exit may end the store.
_FAREWELL = 2.0


class FailedElsewhere(RuntimeError):
    """An error that is raised because another rank has failed."""


class RankExchange:
    """Exchanges values between ranks, which must make the same calls in the same order. `open` creates it.

    Args:
        store: Store that all ranks share; None if there is only one rank.
        rank: Number of this rank.
        world_size: Number of ranks.
        bound: Seconds without a change of its counter after which a rank counts as dead; None means `BOUND`.
    """

    def __init__(
        self, store: dist.Store | None, rank: int = 0, world_size: int = 1, bound: float | None = None
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._bound = BOUND if bound is None else bound
        self._count = 0
        self._closing: threading.Event | None = None
        self._thread: threading.Thread | None = None
        if store is not None:  # A single rank needs no thread.
            self._closing = threading.Event()
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()

    def __reduce__(self) -> tuple[Any, ...]:
        return RankExchange, (None,)  # A copy meets no other ranks.

    @staticmethod
    def open(name: str, bound: float | None = None) -> RankExchange:
        """Create the exchange of the default process group; all ranks must call it.

        Args:
            name: Name of the caller, equal on all ranks.
            bound: As in the constructor.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return RankExchange(None)
        store, rank = dist.PrefixStore(f"lightning_protrain/{name}", _get_default_store()), dist.get_rank()
        number = store.add(f"opened/{rank}", 1)  # separates the keys from those of an earlier exchange
        return RankExchange(dist.PrefixStore(str(number), store), rank, dist.get_world_size(), bound)

    def gather(self, value: Value, doing: str, patience: float | None = None) -> list[Value]:
        """Return the values of all ranks, in the order of ranks.

        Args:
            value: Value of this rank, which is pickled.
            doing: Description of the common task, for messages, such as "Saving x.ckpt".
            patience: Maximum time to wait for a rank that is alive, seconds; None means no limit.

        Raises:
            FailedElsewhere: If another rank has failed, has died, or has another value of `doing`.
        """
        values: list[Value] = self._meet(value, None, doing, patience)
        return values

    def broadcast(self, value: Value, doing: str) -> Value:
        """Return the value of rank 0."""
        return self.gather(value if self._rank == 0 else None, doing)[0]  # type: ignore[return-value]

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Raise an error on all ranks if one rank fails within this context; all ranks must enter it.

        Raises:
            FailedElsewhere: As in `gather`.
        """
        try:
            yield
        except BaseException as error:
            with suppress(FailedElsewhere):
                self._meet(None, error, doing)
            raise
        self._meet(None, None, doing)

    def close(self, reason: str = "has ended") -> None:
        """End the use of this object; a rank that still waits for this one raises an error with `reason`."""
        if self._thread is None or self._closing is None or self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        with suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", reason)  # type: ignore[union-attr]

    # --- in the store -------------------------------------------------------------------------------------------------

    def _meet(self, value: Any, error: BaseException | None, doing: str, patience: float | None = None) -> list[Any]:
        if self._store is None:
            return [value]
        number, self._count = self._count, self._count + 1
        failure = None if error is None else f"{type(error).__name__}: {error}"
        try:
            meet = self._collect if self._rank == 0 else self._tell
            return meet(number, value, failure, doing, patience)
        except FailedElsewhere:
            raise
        except RuntimeError as gone:
            raise FailedElsewhere(
                f"{doing} cannot be completed on rank {self._rank}: rank 0, which has the store, has ended."
            ) from gone

    def _tell(self, number: int, value: Any, failure: str | None, doing: str, patience: float | None) -> list[Any]:
        assert self._store is not None
        self._put(f"{number}/{self._rank}", (doing, failure, value))
        if failure is not None:
            return []
        # Rank 0 may wait for other ranks as long as `patience`, too.
        self._await(0, f"{number}/all", doing, None if patience is None else 2 * patience)
        message, values = pickle.loads(self._store.get(f"{number}/all"))
        self._store.add(f"{number}/read", 1)
        if number:
            self._store.delete_key(f"{number - 1}/{self._rank}")
        if message is not None:
            raise FailedElsewhere(f"{message}; rank {self._rank} stops with it.")
        return list(values)

    def _collect(self, number: int, value: Any, failure: str | None, doing: str, patience: float | None) -> list[Any]:
        assert self._store is not None
        values = [value]
        if failure is not None:
            self._say_failed(number, f"{doing} failed on rank 0 ({failure})")
            return []
        failed = []
        for rank in range(1, self._world_size):
            try:
                self._await(rank, f"{number}/{rank}", doing, patience)
            except FailedElsewhere as gone:
                self._fail(number, str(gone))
            its_doing, its_failure, its_value = pickle.loads(self._store.get(f"{number}/{rank}"))
            if its_failure is not None:
                failed.append(f"rank {rank} ({its_failure})")
            elif its_doing != doing:
                self._fail(number, f"Ranks do different things: rank 0 {doing!r}, rank {rank} {its_doing!r}")
            values.append(its_value)
        if failed:
            self._fail(number, f"{doing} failed on {', '.join(failed)}")
        self._put(f"{number}/all", (None, values))
        for name in ("all", "read") if number else ():
            self._store.delete_key(f"{number - 1}/{name}")
        return values

    def _fail(self, number: int, message: str) -> NoReturn:
        self._say_failed(number, message)
        raise FailedElsewhere(f"{message}; rank 0 stops with it.")

    def _say_failed(self, number: int, message: str) -> None:
        assert self._store is not None
        self._put(f"{number}/all", (message, []))
        end = time.monotonic() + min(_FAREWELL, self._bound)
        while time.monotonic() < end and self._store.add(f"{number}/read", 0) < self._world_size - 1:
            time.sleep(_LOOKS[1])

    def _put(self, key: str, value: Any) -> None:
        assert self._store is not None
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # it takes bytes

    def _await(self, rank: int, key: str, doing: str, patience: float | None) -> None:
        """Wait until `rank` has written `key`."""
        assert self._store is not None
        beats, pause = -1, _LOOKS[0]
        begin = since = time.monotonic()
        while not self._store.check([key]):
            if self._store.check([f"left/{rank}"]) and not self._store.check([key]):
                reason = self._store.get(f"left/{rank}").decode()
                raise FailedElsewhere(f"{doing} cannot be completed: rank {rank} {reason}")
            seen = self._store.add(f"alive/{rank}", 0)
            if seen != beats:
                beats, since = seen, time.monotonic()
            elif time.monotonic() - since > self._bound:
                raise FailedElsewhere(
                    f"{doing} cannot be completed: rank {rank} has not responded for {self._bound:g} s. Look for "
                    "an error in the log of that rank."
                )
            if patience is not None and time.monotonic() - begin > patience:
                raise FailedElsewhere(
                    f"{doing} cannot be completed: rank {rank} runs, but does something else. All "
                    "ranks must save and stop at the same steps."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LOOKS[1])

    def _beat(self) -> None:
        assert self._store is not None
        assert self._closing is not None
        with suppress(RuntimeError):  # The store has ended; the next read reports that.
            while not self._closing.is_set():
                self._store.add(f"alive/{self._rank}", 1)
                self._closing.wait(_BEAT)


class StepFlags:
    """Takes the maximum of flags over all ranks, see [Note: Flags].

    Args:
        flags: Function that returns the flags of this rank: numbers from 0 to 255, as many on all ranks.
    """

    def __init__(self, flags: Callable[[], Sequence[int]]) -> None:
        self._flags = flags
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[dist.Work, torch.Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_group": None, "_pending": None}

    def open(self) -> None:
        """Create the process group for the flags if there are several ranks; all ranks must call it."""
        if self._group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def start(self) -> None:
        """Start the all-reduce, unless one has been started; all ranks must call it, and `result` afterwards."""
        if self._group is not None and self._pending is None:
            flags = torch.tensor(self._flags(), dtype=torch.uint8)
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None
            self._pending = work, flags

    def result(self) -> list[int]:
        """Return the maximum of each flag over all ranks; start the all-reduce if `start` was not called.

        Raises:
            RuntimeError: If another rank has died.
        """
        if self._group is None:
            return list(self._flags())
        self.start()
        assert self._pending is not None
        work, flags = self._pending
        try:
            work.wait()
        except RuntimeError as gone:
            raise RuntimeError(
                f"The step cannot be completed on rank {dist.get_rank()}: another rank does not respond. Look for an "
                "error in the log of that rank."
            ) from gone
        self._pending = None
        return [int(each) for each in flags]

    def close(self) -> None:
        """Destroy the process group."""
        group, self._group = self._group, None
        pending, self._pending = self._pending, None
        # During an all-reduce, this would wait for ranks that may have failed.
        if group is not None and pending is None and dist.is_initialized():
            dist.destroy_process_group(group)


def refuse_unequal(values: list[str | None], what: str) -> None:
    """Raise ValueError if the values of ranks differ.

    Args:
        values: One value for each rank, see `RankExchange.gather`.
        what: Beginning of the message, such as `"The ranks have loaded different checkpoints"`.
    """
    if len(set(values)) > 1:
        each = ", ".join(f"rank {rank}: {found}" for rank, found in enumerate(values))
        raise ValueError(f"{what}: {each}.")
