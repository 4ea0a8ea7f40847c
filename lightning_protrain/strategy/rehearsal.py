"""Runs a plan before training, and searches again with the measurements.

A search relies on a profile of the model and on rates of the hardware, which are only estimates. A rehearsal measures
how long the device computes and copies under the plan, and its peak memory. The search then runs again with corrected
rates (paper, section 4). The next run of this configuration begins with these rates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_protrain.config import format_bytes, parse_bytes, plural
from lightning_protrain.device.device import Device
from lightning_protrain.distributed.rank_sync import decide
from lightning_protrain.planner.explain import short_seconds
from lightning_protrain.planner.memory_timeline import measured_alpha
from lightning_protrain.planner.plan import Plan
from lightning_protrain.planner.prediction import Prediction
from lightning_protrain.planner.request import PlanRequest
from lightning_protrain.rank_store import RankStore
from lightning_protrain.runtime.apply import Runtime
from lightning_protrain.strategy.rehearsal_cache import RehearsalCache
from lightning_protrain.strategy.rehearsed_step import (
    NotRehearsed,
    Rehearsed,
    Unreserved,
    peak_of,
    rehearse,
    within_bounds,
)

# Maximum number of searches for a faster plan, and for a smaller plan.
ROUNDS, MOST_SHRINKS = 2, 8
# A plan is replaced only if the new step takes at most this fraction of the old one.
WORTH_CHANGING = 0.97
# Fraction of the budget to give up if the allocator does not say how many bytes it was asked for.
UNKNOWN_SHORT = 0.05
# Maximum number of tensor shapes in a message.
MOST_SHAPES = 3

Shape = tuple[int, ...]
# Applies a plan instead of the present one, with a number of spare host bytes; returns what `rehearse` takes.
Place = Callable[[Plan, int], tuple[Runtime, Device, Unreserved]]


@dataclass(frozen=True)
class _Short:
    """A rehearsal that has run out of memory; `budget` bytes of device memory would have been enough."""

    budget: int


_Outcome = Rehearsed | NotRehearsed | _Short


class Rehearsal:
    """Rehearses the plan of one run, on all ranks together.

    Args:
        folder: Folder with the measurements of earlier runs.
        is_measured: True if the rates of the request were measured on this machine. Then corrections are bounded; what
            the user gives by hand may be the rates of any machine.
    """

    def __init__(self, folder: Path, is_measured: bool = False) -> None:
        self._folder = folder
        self._is_measured = is_measured
        # On rank 0, the request without corrections of earlier runs.
        self._uncorrected: PlanRequest | None = None
        self._cache: RehearsalCache | None = None

    def recall(self, request: PlanRequest, machine: Mapping[str, Any]) -> PlanRequest:
        """Return the request with the measurements of earlier runs; every rank calls it.

        Args:
            request: Request for a plan; on rank 0 with the profile of a step.
            machine: Properties of device and host, as JSON values.
        """
        profile = request.workload.profile
        knows = profile is not None and request.searches()
        if knows and self._is_measured:
            self._uncorrected = request
        mine = RehearsalCache.read(self._folder, machine, request).if_feasible(request) if knows else None
        self._cache = RankStore.current().broadcast(mine, "Reading earlier measurements")
        return request if self._cache is None else self._cache.applied_to(request)

    def improve(self, trainer: Trainer, request: PlanRequest, plan: Plan, place: Place) -> tuple[PlanRequest, Plan]:
        """Apply a plan, rehearse it, and replace it if the measurements lead to a better one; every rank calls it.

        Args:
            trainer: Trainer within `Strategy.setup` of a fit.
            request: Request that the plan answers, on this node.
            plan: Plan that the search returned.
            place: Applies a plan.

        Returns:
            The request with corrected rates, and the applied plan with a new prediction.

        Raises:
            ValueError: No plan fits the device.
            RuntimeError: The training step has changed weights, or another rank has failed.
        """
        known = self._cache.plan if self._cache is not None else None
        if known is not None:
            plan = _of_rank_0(lambda: _kept(request, known, plan))
        if known is not None and _decisions(plan) == _decisions(known):
            assert plan.prediction is not None
            rank_zero_info(
                f"The plan was rehearsed in an earlier run: a step takes {short_seconds(plan.prediction.step_seconds)}."
            )
            place(plan, request.spare_host_bytes(plan))
            return request, plan
        rounds = shrinks = 0
        while True:
            spare = request.spare_host_bytes(plan)
            placed = place(plan, spare)
            if rounds == ROUNDS:
                return request, plan
            with RankStore.current().together("The rehearsal of the plan"):
                mine = _try(partial(rehearse, trainer, *placed, spare), request, placed[1], shrinks < MOST_SHRINKS)
            del placed  # The next placement needs the memory of this one.
            outcome = _of_ranks(RankStore.current().gather(mine, "Comparing rehearsals"))
            if isinstance(outcome, NotRehearsed):
                rank_zero_info(f"The plan is not rehearsed: {outcome}")
                return request, plan
            if isinstance(outcome, _Short):
                shrinks += 1
                request = self._smaller(request, outcome.budget)
                plan = _of_rank_0(request.plan)
                continue
            rounds += 1
            rehearsed = plan
            request, plan = self._search_together(request, plan, outcome)
            if _decisions(plan) == _decisions(rehearsed):
                return request, plan

    def remember_short(self, error: torch.OutOfMemoryError, plan: Plan, device: Device) -> None:
        """Store a budget that would have been enough, for the next run of this configuration."""
        if self._cache is not None and plan.prediction is not None:
            less = _lowered(plan.prediction.budget, peak_of(device), error)
            if less is not None:
                self._cache.keep(most_device_bytes=less)

    def forget(self) -> None:
        """Remove the measured rates, the fragmentation factor and the plan from the file of this configuration."""
        if self._cache is not None:
            self._cache.keep(hardware=None, alpha=None, plan=None)

    def _search_together(self, request: PlanRequest, plan: Plan, measured: Rehearsed) -> tuple[PlanRequest, Plan]:
        """Return the request with corrected rates (on rank 0), and the plan of a new search (on all ranks)."""

        def search() -> Plan:
            nonlocal request
            request, better = self._search_again(request, plan, measured)
            return better

        better = _of_rank_0(search)
        return request, better

    def _search_again(self, request: PlanRequest, plan: Plan, measured: Rehearsed) -> tuple[PlanRequest, Plan]:
        """Return the request with corrected rates, and the plan of a new search."""
        before = request.expects(plan)
        request, odd = _corrected(request, plan, measured, self._uncorrected)
        now = request.expects(plan)
        better = _better(request, plan, now)
        message = f"The plan was rehearsed: {_compared(measured, now, before)}."
        if better is not None:
            assert better.prediction is not None
            taken = short_seconds(better.prediction.step_seconds)
            message += f" Another plan is expected to take {taken}, and is taken."
        if (slowest := min(odd, key=lambda name: odd[name], default="")) and odd[slowest] < 1:
            message += f" For this run alone: {slowest} at {odd[slowest]:.2g} times the measured rate."
        if wrong := [f"{name} at {factor:.2g} times the measured rate" for name, factor in odd.items() if factor > 1]:
            message += f" Not used, as rates of a machine change by less: {', '.join(wrong)}."
        rank_zero_info(message)
        profile = request.workload.profile
        if self._cache is not None and profile is not None:
            # The next run would find no plan with this factor, although the rehearsed one has run.
            excludes_all = better is None and now.device_bytes > (request.budget() or now.device_bytes)
            alpha = None if excludes_all else request.workload.measured_alpha
            rates = {} if odd else {"hardware": request.node.measure(profile), "alpha": alpha}
            self._cache.keep(plan=plan if better is None and not odd else None, **rates)
        return request, better or request.expecting(plan, now)

    def _smaller(self, request: PlanRequest, less: int) -> PlanRequest:
        """Return the request with the smaller budget `less`."""
        budget = request.budget()
        assert budget is not None
        rank_zero_info(
            f"The device ran out of memory as the plan was rehearsed: device_memory is {format_bytes(less)} in place "
            f"of {format_bytes(budget)}."
        )
        if self._cache is not None and request.workload.profile is not None:  # On rank 0.
            self._cache.keep(most_device_bytes=less)
        return replace(request, options=replace(request.options, device_memory=less))


def _try(trial: Callable[[], Rehearsed], request: PlanRequest, device: Device, may_shrink: bool) -> _Outcome:
    """Run the plan on this rank before training, and return the measurements or the reason why there are none."""
    try:
        return trial()
    except NotRehearsed as why:
        return why
    except torch.OutOfMemoryError as error:
        budget = request.budget()
        assert budget is not None
        if not may_shrink:
            raise
        return _Short(_lowered(budget, peak_of(device), error) or 1)
    finally:  # The peak has been read by now.
        device.forget_counters()


def _of_ranks(outcomes: Sequence[_Outcome]) -> _Outcome:
    """Combine the outcomes of all ranks: out of memory comes first, then not rehearsed, then the slowest."""
    if short := [outcome.budget for outcome in outcomes if isinstance(outcome, _Short)]:
        return _Short(min(short))
    why = next((outcome for outcome in outcomes if isinstance(outcome, NotRehearsed)), None)
    return why or Rehearsed.of_ranks([outcome for outcome in outcomes if isinstance(outcome, Rehearsed)])


def _of_rank_0(make: Callable[[], Plan]) -> Plan:
    """Return the plan that rank 0 makes; every rank calls it."""
    return decide(make) if dist.is_available() and dist.is_initialized() else make()


def _decisions(plan: Plan) -> tuple[object, ...]:
    return plan.chunks, plan.blocks, plan.num_chunk_buffers, plan.sharding, plan.gradient_buffers


def _kept(request: PlanRequest, known: Plan, found: Plan) -> Plan:
    """Return the plan `known` of an earlier rehearsal, or `found` if `known` does not fit or is clearly slower."""
    assert found.prediction is not None
    if known.sharding is not found.sharding:
        return found
    now, budget = request.expects(known), request.budget()
    fits = (budget is None or now.device_bytes <= budget) and now.host_bytes <= request.host_bytes()
    slower = found.prediction.step_seconds <= WORTH_CHANGING * now.step_seconds
    return request.expecting(replace(known, prediction=found.prediction), now) if fits and not slower else found


def _corrected(
    request: PlanRequest, plan: Plan, measured: Rehearsed, uncorrected: PlanRequest | None = None
) -> tuple[PlanRequest, dict[str, float]]:
    """Return the request with the rates and the fragmentation factor that explain the measurements.

    The rates of `uncorrected` bound the corrections, see `within_bounds`; the second result has by resource the factor
    of each correction that is out of bounds.
    """
    problem, profile, workload = request.here(), request.workload.profile, request.workload
    assert profile is not None
    before = request.node.measure(profile)
    rates = None if uncorrected is None else uncorrected.node.measure(profile)
    corrected, odd = within_bounds(rates, before, measured.correct(problem, plan, before))
    if measured.peak_bytes is not None and problem.hardware.asynchronous:
        alpha = measured_alpha(problem, plan, measured.peak_bytes, measured.steps)
        workload = replace(workload, measured_alpha=alpha)
    node = replace(request.node, measure=lambda _: corrected, is_rehearsed=True)
    return replace(request, workload=workload, node=node), odd


def _better(request: PlanRequest, plan: Plan, now: Prediction) -> Plan | None:
    """Return a plan that is faster than the rehearsed one by a worthwhile margin; None: keep the rehearsed one."""
    try:
        other = request.plan()
    except ValueError:  # No plan is predicted to fit, but the rehearsed one has run.
        return None
    if _decisions(other) == _decisions(plan):
        return None
    assert other.prediction is not None
    budget = request.budget()
    fits = budget is None or now.device_bytes <= budget
    return None if fits and other.prediction.step_seconds > WORTH_CHANGING * now.step_seconds else other


def _lowered(budget: int, held: int | None, error: torch.OutOfMemoryError) -> int | None:
    """Return a budget reduced by the missing bytes; None if nothing would be left."""
    asked = re.search(r"Tried to allocate ([0-9.]+ [KMGT]iB)", str(error))
    short = parse_bytes(asked[1]) if asked else int(UNKNOWN_SHORT * budget)
    less = min(budget, held or budget) - short
    return less if less > 0 else None


def explain_out_of_memory(error: torch.OutOfMemoryError, plan: Plan, device: Device, shapes: Collection[Shape]) -> str:
    """Return sentences that compare an out-of-memory error with the prediction, and say what to set.

    Args:
        error: Error of PyTorch's allocator.
        plan: The applied plan.
        device: Device of this rank.
        shapes: Shapes of the micro-batch's tensors.
    """
    held, prediction = peak_of(device), plan.prediction
    peak = f"The device held {format_bytes(held)} at most" if held else "The device ran out of memory"
    if prediction is None:
        return f'{peak}, and the plan does not count activations. Give plan="auto", or smaller batches.'
    known = ((prediction.samples, "sample"), (prediction.tokens, "token"))
    made = " and ".join(plural(number, name) for number, name in known if number) or "unknown size"
    these = " and ".join(str(list(shape)) for shape in list(dict.fromkeys(shapes))[:MOST_SHAPES])
    less = _lowered(prediction.budget, held, error)
    lower = "Give" if less is None else f"Set device_memory to {format_bytes(less)}, or give"
    return (
        f"{peak}, {format_bytes(prediction.device_bytes)} were predicted for a micro-batch of {made}; this one has "
        f"tensors of {these}. {lower} the data module a method `largest_batch` to plan with, or smaller batches."
    )


def _compared(measured: Rehearsed, now: Prediction, told: Prediction) -> str:
    """Return a sentence that compares measured step time and memory with the predictions before the rehearsal (`told`).

    `now` is the prediction with the rates that the rehearsal has corrected.
    """
    took = f"a step takes {short_seconds(now.step_seconds)}, {short_seconds(told.step_seconds)} were expected"
    if measured.peak_bytes is None:
        return took
    # Ranks sum no gradients in a rehearsal, so no buckets are held.
    held, expected = format_bytes(measured.peak_bytes), format_bytes(told.among_ranks(0).device_bytes)
    factors = [f"{prediction.alpha:.2f}" for prediction in (now, told) if prediction.alpha is not None]
    factor = f" (fragmentation factor {' in place of '.join(factors)})" if factors else ""
    return f"{took}; the device holds {held}, {expected} were expected{factor}"
