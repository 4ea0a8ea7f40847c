"""Chooses the sizes of a micro-batch that the user has left open, between the optimizers and the plan.

[Note: Open sizes]
`configure_optimizers` may ask for the number of steps, which depends on the batch size, and the best batch size depends
on the optimizer's states. So optimizers are made twice: with the smallest size, and with the one that was chosen. A
resumed run keeps the sizes of its checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, runtime_checkable

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_protrain.distributed.failures import failing_together
from lightning_protrain.planner.plan import Sharding
from lightning_protrain.planner.request import PlanRequest
from lightning_protrain.planner.sizes import LEAST, SizedStep, fastest, lengths_to, longest
from lightning_protrain.profiler.records import HardwareProfile
from lightning_protrain.strategy.describe import Described, profiled_again
from lightning_protrain.strategy.joint_plan import DryRun
from lightning_protrain.strategy.profile_step import MOST_TOKENS


@runtime_checkable
class HasOpenSizes(Protocol):
    """A data module whose user may leave sizes to the plan, such as `ChatDataModule(batch_size="auto")`."""

    def open_sizes(self) -> Mapping[str, tuple[int, int]]:
        """Return the least and the greatest `"max_length"`, then the same of `"batch_size"`; empty if none is open.

        Lightning's `setup` hooks have run before the call.
        """

    def try_size(self, name: str, size: int) -> None:
        """Make `largest_batch` return a batch of this size; rank 0 calls it.

        Args:
            name: `"max_length"` or `"batch_size"`.
            size: Number of tokens of a row, or of rows; within the bounds of `open_sizes`.
        """

    def take_size(self, name: str, size: int) -> None:
        """Train with this size from now on, so that `open_sizes` no longer has it; every rank calls it.

        Args:
            name: As in `try_size`.
            size: As in `try_size`.
        """


@contextmanager
def provisional(trainer: Trainer) -> Generator[None]:
    """Suppress warnings of a first making of optimizers, if sizes are open: it is for a run that does not happen."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(data, HasOpenSizes) and data.open_sizes():
        with warnings.catch_warnings(action="ignore"):
            yield
    else:
        yield


@dataclass(frozen=True)
class SizeSearch:
    """A search for the open sizes of the data of a run.

    Attributes:
        data: Data module with open sizes.
        described: The run with the sizes that the data has now.
        request: Request for a plan, with the least free memory of any rank.
        shardings: Allowed shardings.
        dry_run: Hardware to plan for instead of training; None: train.
    """

    data: HasOpenSizes
    described: Described
    request: PlanRequest
    shardings: tuple[Sharding, ...]
    dry_run: DryRun | None

    def choose_all(self) -> None:
        """Choose the open sizes on rank 0, one after the other; every rank calls it.

        Raises:
            ValueError: The device memory has no limit, the plan is given, or the step cannot be profiled.
            RuntimeError: Another rank is gone or has failed.
        """
        trainer = self.described.run.trainer
        while sizes := self.data.open_sizes():
            name = next(iter(sizes))
            least, most = self._sizes(name)
            with failing_together(f"The choice of {name}"):
                chosen = 0 if trainer.global_rank else self._choose(name)
            chosen = trainer.strategy.broadcast(chosen)
            size = chosen or least
            if not chosen:
                why = "not even the least is planned to fit"
            elif name == "batch_size":
                why = "all rows of a rank" if size == most else "the one with most tokens per second"
            else:
                why = "no training conversation is cut" if size == most else "the longest that fits"
            rank_zero_info(f'{name}="auto" is {size:,}: {why}.')
            self.data.take_size(name, size)

    def _sizes(self, name: str) -> tuple[int, int]:
        """Return the least and the greatest size to choose."""
        least, most = self.data.open_sizes()[name]
        if name == "batch_size" and self.dry_run is not None:  # The data is divided among its ranks.
            most = -(-most // self.dry_run.ranks.num_ranks)
        return (least if name == "batch_size" else max(least, min(LEAST, most))), most

    def _choose(self, name: str) -> int:
        """Return the longest length that fits, or the fastest batch size; 0: none fits."""
        least, most = self._sizes(name)

        @cache
        def at(size: int) -> SizedStep:
            self.data.try_size(name, size)
            return self._step(name)

        if name == "batch_size":
            return fastest(at, min(most, max(MOST_TOKENS // max(at(1).tokens, 1), 1)))
        return longest(at, [length for length in lengths_to(most) if length >= least], most)

    def _step(self, name: str) -> SizedStep:
        """Return the step with the batch that the data has now."""
        now = profiled_again(self.described, f"The choice of {name}")
        request = replace(self.request, profile_on=now.profile_on, sliced_on=now.sliced_on)
        if self.dry_run is None:
            requests: list[tuple[PlanRequest, HardwareProfile | None]]
            requests = [(request.under(each).on(None), None) for each in self.shardings]
        else:
            if len(self.dry_run.targets) > 1:
                raise ValueError(f'{name}="auto" is chosen for one GPU: plan for one at a time, or give a number.')
            target = next(iter(self.dry_run.targets))
            requests = self.dry_run.requests_on(target, request, request.element_bytes)
        one, hardware = requests[0]
        if not one.searches(hardware):
            raise ValueError(
                f'{name}="auto" is chosen by a search within the memory of the device, and there is none: the device '
                "has no limit, or a plan or all its knobs are given. Set device_memory and leave the others out, or "
                "give a number."
            )
        return SizedStep(requests)
