"""Lets ranks agree on a checkpoint and at the end of a step, so that no rank waits for one that is gone.

A collective that a rank does not join fails only after the timeout of its group, half an hour by default, and names
nobody. A save may take that long on one rank while the others wait. So the ranks meet in the store of the process
group: each rank writes its value, and rank 0 collects the values and writes them all. Meanwhile a thread of each rank
increments a counter in the store. A rank whose counter does not change for `BOUND` seconds is gone, however long the
others would wait for a slow rank. A rank that fails leaves a note, and waits for no other rank.

[Note: Flags]
In every optimizer step the ranks combine a few flags, one byte each, over a group of their own on the host. The
all-reduce starts before the optimizer step and is read after it, so it runs beside the step and no rank waits for a
device. All ranks get the same result at the same step. A flag that is set after the start counts at the next step.
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

# Seconds without a sign of life after which a rank is gone; seconds between two signs; shortest and longest pause
# between two reads.
BOUND = 8.0
_BEAT = 0.5
_LOOKS = (0.001, 0.05)
# Seconds for which rank 0, whose exit may end the store, waits until the others have read that it failed.
_FAREWELL = 2.0


class FailedElsewhere(RuntimeError):
    """An error on another rank."""


class Rendezvous:
    """The meeting point of the ranks, made by `Rendezvous.open`. Every rank makes the same calls in the same order.

    Args:
        store: Store that all ranks share; None if there is only one rank.
        rank: Number of this rank.
        world_size: Number of ranks.
        bound: Seconds after which a rank without a sign of life is gone; None means `BOUND`.
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
        if store is not None:  # A single rank makes no thread, so that the object can be pickled for spawned processes.
            self._closing = threading.Event()
            self._thread = threading.Thread(target=self._beat, name="is there", daemon=True)
            self._thread.start()

    @staticmethod
    def open(name: str, bound: float | None = None) -> Rendezvous:
        """Return the rendezvous of the present process group; every rank calls it.

        Args:
            name: Name of the caller; the same on all ranks.
            bound: As in the constructor.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return Rendezvous(None)
        store, rank = dist.PrefixStore(f"lightning_protrain/{name}", _get_default_store()), dist.get_rank()
        number = store.add(f"opened/{rank}", 1)  # Do not read keys of an earlier rendezvous.
        return Rendezvous(dist.PrefixStore(str(number), store), rank, dist.get_world_size(), bound)

    def gather(self, value: Value, doing: str, patience: float | None = None) -> list[Value]:
        """Return the values of all ranks, by rank.

        Args:
            value: Value that can be pickled.
            doing: Description of the common task, for messages: `"Saving x.ckpt"`.
            patience: Seconds to wait even for a rank that is alive; None waits without a limit.

        Raises:
            FailedElsewhere: If another rank has failed, is gone, or does something else; the message names it.
        """
        values: list[Value] = self._meet(value, None, doing, patience)
        return values

    def broadcast(self, value: Value, doing: str) -> Value:
        """Return the value of rank 0."""
        return self.gather(value if self._rank == 0 else None, doing)[0]  # type: ignore[return-value]

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Let an error of one rank within the context end all ranks; every rank enters it.

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
        """Leave the rendezvous for good; messages of other ranks say "rank 1" and `reason`."""
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
                f"{doing} cannot be ended on rank {self._rank}: the store of rank 0 is gone."
            ) from gone

    def _tell(self, number: int, value: Any, failure: str | None, doing: str, patience: float | None) -> list[Any]:
        assert self._store is not None
        self._put(f"{number}/{self._rank}", (doing, failure, value))
        if failure is not None:
            return []
        # Rank 0 may have to wait for others, which takes as long again.
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
        """Wait until another rank has written a key."""
        assert self._store is not None
        beats, pause = -1, _LOOKS[0]
        begin = since = time.monotonic()
        while not self._store.check([key]):
            if self._store.check([f"left/{rank}"]) and not self._store.check([key]):
                reason = self._store.get(f"left/{rank}").decode()
                raise FailedElsewhere(f"{doing} cannot be ended: rank {rank} {reason}")
            seen = self._store.add(f"alive/{rank}", 0)
            if seen != beats:
                beats, since = seen, time.monotonic()
            elif time.monotonic() - since > self._bound:
                raise FailedElsewhere(
                    f"{doing} cannot be ended: rank {rank} has given no sign of life for {self._bound:g} s. Its "
                    "own message, if it could leave one, is in the log of that rank."
                )
            if patience is not None and time.monotonic() - begin > patience:
                raise FailedElsewhere(
                    f"{doing} cannot be ended: rank {rank} is alive, but does something else. All "
                    "ranks must save and stop at the same steps."
                )
            time.sleep(pause)
            pause = min(2 * pause, _LOOKS[1])

    def _beat(self) -> None:
        assert self._store is not None
        assert self._closing is not None
        with suppress(RuntimeError):  # The store is gone: its next reader reports that.
            while not self._closing.is_set():
                self._store.add(f"alive/{self._rank}", 1)
                self._closing.wait(_BEAT)


class StepFlags:
    """Finds the maximum of each flag over all ranks, see [Note: Flags].

    Args:
        facts: Returns the flags of this rank: always the same count of numbers from 0 to 255.
    """

    def __init__(self, facts: Callable[[], Sequence[int]]) -> None:
        self._facts = facts
        self._group: dist.ProcessGroup | None = None
        self._question: tuple[dist.Work, torch.Tensor] | None = None

    def open(self) -> None:
        """Make the group for the flags if there are several ranks; every rank calls it."""
        if self._group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def ask(self) -> None:
        """Start the all-reduce, unless it is under way; every rank calls it, and `answer` afterwards."""
        if self._group is not None and self._question is None:
            facts = torch.tensor(self._facts(), dtype=torch.uint8)
            work = dist.all_reduce(facts, dist.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None
            self._question = work, facts

    def answer(self) -> list[int]:
        """Return the maximum of each flag, starting an all-reduce if `ask` has not; it is the same on every rank.

        Raises:
            RuntimeError: If another rank is gone.
        """
        if self._group is None:
            return list(self._facts())
        self.ask()
        assert self._question is not None
        work, facts = self._question
        try:
            work.wait()
        except RuntimeError as gone:
            raise RuntimeError(
                f"The step cannot be ended on rank {dist.get_rank()}: another rank does not answer any more. Its own "
                "message, if it could leave one, is in the log of that rank."
            ) from gone
        self._question = None
        return [int(each) for each in facts]

    def close(self) -> None:
        """Destroy the group."""
        group, self._group = self._group, None
        question, self._question = self._question, None
        # With an all-reduce under way this would wait for ranks that may have failed; the end of the process destroys
        # the group too.
        if group is not None and question is None and dist.is_initialized():
            dist.destroy_process_group(group)
