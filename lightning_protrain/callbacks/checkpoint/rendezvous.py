"""Lets ranks agree around a checkpoint and at the end of a step, so that nobody waits for a rank that is gone.

[Note: Store]
A collective of a process group ends with the timeout of the group, half an hour by default, where a rank does not
join it, and names nobody. A save may take as long on one rank while the others wait. So the ranks meet in the store
that the group was made with: each lays down what it has to say, rank 0 collects it and lays down the whole. Meanwhile
a thread of each rank counts up a number there. A rank whose number stands still for `BOUND` seconds is gone, however
long the others are ready to wait for one that is only slow. A rank that has failed says so, and waits for nobody.

[Note: Facts]
In every optimizer step the ranks put together a few facts, one byte each, over a group of their own on the host: the
question is asked before the optimizer steps and answered after it, so that it runs beside the step, and no rank waits
for a device. All get the same answer at the same step. What becomes true after the question belongs to the next step.
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

# Seconds without a sign of life after which a rank is gone; between two signs; between two looks.
BOUND = 8.0
_BEAT = 0.5
_LOOKS = (0.001, 0.05)
# Seconds for which rank 0, with whom the store may end, waits until the others have read that it failed.
_FAREWELL = 2.0


class FailedElsewhere(RuntimeError):
    """It failed on another rank."""


class Rendezvous:
    """Of one rank; `Rendezvous.open` makes it. Every rank does the same with its own, in the same order.

    Args:
        store: That all ranks have; None: there is only one.
        rank: Of this rank.
        world_size: Number of ranks.
        bound: Seconds after which a rank that gives no sign is gone; None: `BOUND`.
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
        if store is not None:  # Without others there is nothing that could not be pickled: processes may be spawned.
            self._closing = threading.Event()
            self._thread = threading.Thread(target=self._beat, name="is there", daemon=True)
            self._thread.start()

    @staticmethod
    def open(name: str, bound: float | None = None) -> Rendezvous:
        """The one for the process group that there is; every rank calls it.

        Args:
            name: Whose it is; the same on all ranks.
            bound: As above.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return Rendezvous(None)
        store, rank = dist.PrefixStore(f"lightning_protrain/{name}", _get_default_store()), dist.get_rank()
        number = store.add(f"opened/{rank}", 1)  # Nothing that an earlier one has left is read.
        return Rendezvous(dist.PrefixStore(str(number), store), rank, dist.get_world_size(), bound)

    def gather(self, value: Value, doing: str, patience: float | None = None) -> list[Value]:
        """The values of all ranks, by rank.

        Args:
            value: What can be pickled.
            doing: What all of them do, for messages: `"Saving x.ckpt"`.
            patience: Seconds after which even a rank that is there is not waited for; None: as long as it takes.

        Raises:
            Failed: Another rank failed meanwhile, or has gone, or does something else; the message names it.
        """
        values: list[Value] = self._meet(value, None, doing, patience)
        return values

    def broadcast(self, value: Value, doing: str) -> Value:
        """That of rank 0."""
        return self.gather(value if self._rank == 0 else None, doing)[0]  # type: ignore[return-value]

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """What every rank does within it ends on all ranks if it fails on one; they all go through it.

        Raises:
            Failed: As in `gather`.
        """
        try:
            yield
        except BaseException as error:
            with suppress(FailedElsewhere):
                self._meet(None, error, doing)
            raise
        self._meet(None, None, doing)

    def close(self, reason: str = "has ended") -> None:
        """This rank takes part in nothing any more; goes on after "rank 1" in the messages of others."""
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
        """Waits for what another rank lays down."""
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
                    f"{doing} cannot be ended: rank {rank} has given no sign of life for {self._bound:g} seconds. Its "
                    "own message, if it could leave one, is in the log of that rank"
                )
            if patience is not None and time.monotonic() - begin > patience:
                raise FailedElsewhere(f"{doing} cannot be ended: rank {rank} is there, and does something else")
            time.sleep(pause)
            pause = min(2 * pause, _LOOKS[1])

    def _beat(self) -> None:
        assert self._store is not None
        assert self._closing is not None
        with suppress(RuntimeError):  # The store has gone: who asks for it next says so.
            while not self._closing.is_set():
                self._store.add(f"alive/{self._rank}", 1)
                self._closing.wait(_BEAT)


class StepFlags:
    """Asks for the highest value of each fact on any rank, see [Note: Facts].

    Args:
        facts: Those of this rank, numbers from 0 to 255; always as many.
    """

    def __init__(self, facts: Callable[[], Sequence[int]]) -> None:
        self._facts = facts
        self._group: dist.ProcessGroup | None = None
        self._question: tuple[dist.Work, torch.Tensor] | None = None

    def open(self) -> None:
        """From here on there are other ranks, if there are; every rank calls it."""
        if self._group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def ask(self) -> None:
        """Asks, unless that was done; every rank calls it, and `answer` after it."""
        if self._group is not None and self._question is None:
            facts = torch.tensor(self._facts(), dtype=torch.uint8)
            work = dist.all_reduce(facts, dist.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None
            self._question = work, facts

    def answer(self) -> list[int]:
        """To `ask`, or to a question of its own; the same on every rank.

        Raises:
            RuntimeError: Another rank has gone.
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
        """There are no other ranks any more."""
        group, self._group = self._group, None
        question, self._question = self._question, None
        # With a question under way it would wait for ranks that may have failed; the end of the process closes it too.
        if group is not None and question is None and dist.is_initialized():
            dist.destroy_process_group(group)
