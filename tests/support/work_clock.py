"""A clock of the work that the CPU does, so that the same program takes the same time on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.device.host import HostWorker, Job
from lightning_protrain.profiler.records import HardwareProfile
from tests.support.simulated.work import work_of


class WorkClock:
    """A clock that advances with each operation of PyTorch, and with nothing else.

    Args:
        rates: Rates by which an operation takes time: its FLOPs or the bytes that it touches, whichever takes longer.

    Attributes:
        seconds: Time that has passed.
    """

    def __init__(self, rates: HardwareProfile) -> None:
        self.seconds = 0.0
        self.rates = rates

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the operations of this thread and of the host's worker as the time of the CPU device."""
        submit = HostWorker.submit

        def counted(worker: HostWorker, work: Callable[[], object]) -> Job:
            def job() -> object:
                with _Counting(self):
                    return work()

            return submit(worker, job)

        with pytest.MonkeyPatch.context() as patch, _Counting(self):
            patch.setattr(HostWorker, "submit", counted)
            patch.setattr(CPUDevice, "mark", lambda device, lane: self.seconds)
            patch.setattr(CPUDevice, "host_clock", lambda device: self.seconds)
            yield


class _Counting(TorchDispatchMode):
    """Advances a clock by each operation of one thread."""

    def __init__(self, clock: WorkClock) -> None:
        super().__init__()
        self._clock = clock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:
            flops, nbytes = work_of(func, args, kwargs, result)
            rates = self._clock.rates
            self._clock.seconds += max(flops / rates.flops["float32"], nbytes / rates.memory)
        return result
