"""Worker processes that outlive the signals which announce the end of a job.

[Note: Workers]
Schedulers send a signal to whole groups of processes, and a worker of a DataLoader that dies takes the run with it in
the middle of a step. So workers block these signals; a thread of theirs hears them, and ends the process if the process
whose worker it is has sent it. What is forked in a fit does so at once. What is spawned inherits the blocked signals
from the thread that starts it, and hears them when it has imported what it needs; so its loader gets a context whose
processes begin like that. Workers of a fork server are left alone: the server itself would have to block the signals,
and would hand that on to all that it forks, whoever has asked for it and means to end it with a signal.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext, SpawnContext, SpawnProcess
from multiprocessing.util import register_after_fork
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader


class Shield:
    """While it is there, processes that are forked are as [Note: Workers] says, and so are workers of a fit's loaders.

    Args:
        signals: What they block.
    """

    def __init__(self, signals: Collection[int]) -> None:
        self._signals = frozenset(signals)
        self._covered: list[tuple[DataLoader[Any], Any]] = []
        self._sources: list[tuple[Any, _DataLoaderSource]] = []
        register_after_fork(self, Shield._raise)  # It knows this object by a weak reference.

    def cover_fit(self, trainer: Trainer) -> None:
        """Loaders that are asked for in the fit are covered, those for training and those for validation."""
        for loop in (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop):
            self._sources.append((loop, loop._data_source))
            loop._data_source = _CoveredSource(loop._data_source, self)

    def cover(self, loaders: Any) -> None:
        """Workers of these loaders are shielded, if they are spawned.

        Args:
            loaders: As a Trainer takes them.
        """
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "sequential")
        for loader in combined.flattened:
            if not isinstance(loader, DataLoader) or loader.num_workers < 1:
                continue
            given = loader.multiprocessing_context
            context: Any = multiprocessing.get_context() if given is None else given
            stock = type(context).__module__ == BaseContext.__module__  # Nobody's own.
            if stock and context.get_start_method() == "spawn":
                self._covered.append((loader, given))
                loader.multiprocessing_context = _Spawning(self._signals)

    def close(self) -> None:
        """Loaders have what they had."""
        while self._covered:
            loader, context = self._covered.pop()
            loader.multiprocessing_context = context
        while self._sources:
            loop, source = self._sources.pop()
            loop._data_source = source

    def _raise(self) -> None:
        hear(self._signals, os.getppid())


def hear(signals: Collection[int], parent: int) -> None:
    """This process blocks signals from here on, and ends if its parent ends it.

    Args:
        signals: Numbers.
        parent: Whose worker it is.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def listen() -> None:
        while True:
            heard = signal.sigwaitinfo(signals)
            if (heard.si_pid, heard.si_signo) == (parent, signal.SIGTERM):
                os._exit(0)  # What a worker does itself.

    threading.Thread(target=listen, name="hears signals", daemon=True).start()


class _CoveredSource(_DataLoaderSource):
    """Where Lightning gets loaders from, which are covered then."""

    def __init__(self, source: _DataLoaderSource, shield: Shield) -> None:
        super().__init__(source.instance, source.name)
        self._source, self._shield = source, shield

    def dataloader(self) -> Any:
        loaders = self._source.dataloader()
        self._shield.cover(loaders)
        return loaders


@contextmanager
def _blocked(signals: Collection[int]) -> Iterator[None]:
    resource_tracker.ensure_running()  # Who starts it unblocks SIGTERM.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _SpawnedWorker(SpawnProcess):
    signals: Collection[int] = ()

    def start(self) -> None:
        with _blocked(self.signals):
            super().start()

    def run(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        assert parent.pid is not None
        hear(self.signals, parent.pid)
        super().run()


class _Spawning(SpawnContext):
    def __init__(self, signals: Collection[int]) -> None:
        self._signals = signals

    def Process(self, *args: Any, **options: Any) -> SpawnProcess:  # type: ignore[override]
        worker = _SpawnedWorker(*args, **options)
        worker.signals = self._signals
        return worker
