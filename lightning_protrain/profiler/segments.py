"""Cuts a traced step into segments, see [Note: Segment] in `records.py`.

[Note: Sequence numbers]
Autograd numbers the nodes of its graph as it makes them, and of those that are ready it runs the one with the highest
number. A node is ready when all nodes made from its results have run, and these have higher numbers. So backward goes
through the numbers from high to low, and the numbers with which a segment's forward began and ended say which operation
of backward belongs to it. Nodes that accumulate gradients run as soon as they can: what has no number of the forward
belongs to the segment that runs, as does what a recomputation does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_protrain.profiler.liveness import Activation, LiveBytes
from lightning_protrain.profiler.records import OperationCost, Pass, Segment, swapped_bytes

# FLOPs, bytes and dtype of an operation.
Cost = tuple[int, int, str]
Operations = tuple[OperationCost, ...]


@dataclass
class _Pass:
    live: int = 0
    peak: int = 0
    peak_with_gradients: int = 0
    without_casts: int = 0
    unsaved: int = 0
    unsaved_without_casts: int = 0
    selective: int = 0
    selective_without_casts: int = 0
    again: int = 0
    again_without_casts: int = 0
    costs: Counter[Cost] = field(default_factory=Counter)
    # Of what makes no products, in forward.
    others: Counter[Cost] = field(default_factory=Counter)
    # Both, up to where autograd saved last: a recomputation comes no further.
    recomputed: Counter[Cost] = field(default_factory=Counter)
    again_others: Counter[Cost] = field(default_factory=Counter)

    def begin(self, live: int, casts: int = 0) -> None:
        self.live = max(self.live, live)
        self.peak = max(self.peak, live)
        self.peak_with_gradients = max(self.peak_with_gradients, live)
        self.without_casts = max(self.without_casts, live - casts)
        self.unsaved = max(self.unsaved, live)
        self.unsaved_without_casts = max(self.unsaved_without_casts, live - casts)
        self.selective = self.again = live
        self.selective_without_casts = self.again_without_casts = live - casts

    def reach(self, live: LiveBytes, workspace: int, made: int, is_product: bool) -> None:
        """An operation has run; `made` are the bytes of all products so far, its own too."""
        now = live.now + workspace
        self.peak = max(self.peak, now)
        self.peak_with_gradients = max(self.peak_with_gradients, now + live.held_gradients)
        self.without_casts = max(self.without_casts, now - live.casts)
        self.unsaved = max(self.unsaved, now - live.kept)
        unsaved_without_casts = now - live.kept - live.casts + live.kept_casts
        self.unsaved_without_casts = max(self.unsaved_without_casts, unsaved_without_casts)
        self.selective = max(self.selective, now - live.kept + live.dropped)
        self.selective_without_casts = max(self.selective_without_casts, unsaved_without_casts + live.dropped)
        later = live.now - made if is_product else now - made  # A product is not computed again.
        self.again = max(self.again, later)
        self.again_without_casts = max(self.again_without_casts, later - live.casts)

    def record(self, seen: dict[Operations, Operations], products: int = 0) -> Pass:
        """Segments that compute the same share one tuple, so that their times are summed once."""
        each = (
            tuple(OperationCost(*cost, count) for cost, count in counts.items())
            for counts in (self.costs, self.recomputed, self.again_others)
        )
        costs, recomputed, others = (seen.setdefault(operations, operations) for operations in each)
        unsaved = self.without_casts, self.unsaved, self.unsaved_without_casts
        selective = self.selective, self.selective_without_casts
        again = self.again + products, self.again_without_casts + products
        return Pass(self.live, self.peak, costs, *unsaved, *selective, *again, recomputed, others)


@dataclass(eq=False)
class _Segment:
    """A segment that is being recorded."""

    unit: str
    between: bool
    # Of the first node of autograd that it makes.
    number: int
    given: dict[Activation, None] = field(default_factory=dict)
    saved: dict[Activation, None] = field(default_factory=dict)
    casts: dict[Activation, str] = field(default_factory=dict)
    # Of what is saved, what somebody else holds too: when it ends, and when the next call ends.
    shared: set[Activation] = field(default_factory=set)
    shared_longer: set[Activation] = field(default_factory=set)
    # See [Note: Products]; their bytes, those since autograd last saved something, whether they cannot be kept.
    products: dict[Activation, None] = field(default_factory=dict)
    made: int = 0
    idle: int = 0
    # Bytes that were live when its backward first asked for something saved.
    asked: int = 0
    unkeepable: bool = False
    # Of what is given, what is dead when backward begins.
    unkept: list[Activation] = field(default_factory=list)
    forward: _Pass = field(default_factory=_Pass)
    backward: _Pass | None = None
    gradients: list[str] = field(default_factory=list)


class SegmentRecorder:
    """Is told what happens in a step and says what its segments do.

    Args:
        live: Counts activations.
    """

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self._segments: list[_Segment] = []
        self._numbers: list[int] = []
        self._whole: dict[str, _Segment] = {}
        self._products: dict[Activation, _Segment] = {}
        # The latest call that has ended, until the next one has.
        self._latest: _Segment | None = None
        # The segment whose backward runs, and the first number of autograd that is not of a forward before it.
        self._in_backward: _Segment | None = None
        self._end = 0
        # Segments that had ended when the latest backward began.
        self._kept = 0
        self._open("", (), between=True)

    def enter(self, unit: str, given: Iterable[Activation], compiled: bool = False) -> None:
        """A call of a unit begins; of what is `compiled` nobody can keep the products."""
        self._open(unit, given, between=False)
        self._segments[-1].unkeepable = compiled

    def leave(self) -> None:
        """The call ends."""
        self._settle()
        ended = self._segments[-1]
        ended.shared = {activation for activation in ended.saved if activation.original_alive}
        self._latest = ended
        self._open("", (), between=True)

    def operation(
        self, cost: Cost | None, before: int, workspace: int = 0, products: Iterable[Activation] = ()
    ) -> None:
        """An operation has run.

        Args:
            cost: What it takes; None if that is nothing.
            before: Bytes that were live before it.
            workspace: Bytes that it allocated and freed within itself.
            products: What it has made, if that is products.
        """
        segment, is_product = self._segments[-1], False
        if torch._C._current_graph_task_id() == -1:
            run = segment.forward
            self._in_backward = None
            for product in products:
                product.is_product = is_product = True
                segment.products[product] = None
                segment.made += product.nbytes
                segment.idle += product.nbytes
                self._products[product] = segment
        else:
            run = self._of_node(before)
        run.reach(self._live, workspace, segment.made, is_product)
        if cost is not None:
            run.costs[cost] += 1
            if run is segment.forward and not is_product:
                run.others[cost] += 1

    def packed(self) -> None:
        """Autograd saves something, maybe a weight: what has run so far is what would run again."""
        run = self._segments[-1].forward
        run.recomputed, run.again_others = run.costs.copy(), run.others.copy()

    def save(self, activation: Activation, cast: str | None) -> None:
        """Autograd saves `activation`, which is a copy of the parameter `cast` in another dtype, if that is given."""
        segment = self._segments[-1]
        segment.saved[activation] = None
        segment.idle = 0
        if cast is not None:
            segment.casts[activation] = cast
        self._live.mark([activation], cast=activation in segment.casts, own=activation not in segment.given)

    def asked(self) -> None:
        """Backward asks for something saved."""
        node: Any = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else self._end
        segment = self._segments[bisect_right(self._numbers, number) - 1]
        segment.asked = segment.asked or self._live.now

    def written(self, activation: Activation) -> None:
        """An operation has changed `activation` in place."""
        if activation in self._products:
            self._products[activation].unkeepable = True

    def accumulated(self, fqn: str) -> None:
        """A gradient has been added to that of a parameter."""
        self._whole[fqn] = self._in_backward or self._segments[-1]

    def segments(self) -> tuple[Segment, ...]:
        """What was recorded; empty if no backward ran."""
        if all(segment.backward is None for segment in self._segments):
            return ()
        for fqn, segment in self._whole.items():
            segment.gradients.append(fqn)
        savers = Counter(activation for segment in self._segments for activation in segment.saved)
        takers = Counter(activation for segment in self._segments for activation in segment.given)
        seen = _Seen()
        return tuple(_record(segment, savers, takers, seen) for segment in self._segments if not _is_empty(segment))

    def _open(self, unit: str, given: Iterable[Activation], between: bool) -> None:
        segment = _Segment(unit, between, torch._C._autograd._get_sequence_nr(), dict.fromkeys(given))
        if self._segments:
            self._live.mark(self._segments[-1].saved)
            for product in self._segments[-1].products:
                product.is_product = False
        self._live.dropped = 0
        segment.forward.begin(self._live.now)
        self._segments.append(segment)
        self._numbers.append(segment.number)

    def _settle(self) -> None:
        """The copies of the latest call to the host have ended."""
        if self._latest is not None:
            self._latest.shared_longer = {saved for saved in self._latest.saved if saved.original_alive}
            self._latest = None

    def _begin_backward(self) -> None:
        """What has been saved for no backward, and is gone, is not what a policy would free."""
        self._settle()
        for segment in self._segments[self._kept :]:
            segment.saved = {activation: None for activation in segment.saved if activation.alive}
        self._kept = len(self._segments)

    def _of_node(self, before: int) -> _Pass:
        """The backward in which autograd's present node runs."""
        if self._in_backward is None:
            self._begin_backward()
            self._end = torch._C._autograd._get_sequence_nr()
        node: Any = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else self._end
        segment = self._in_backward or self._segments[-1]
        if number < self._end:
            segment = self._segments[bisect_right(self._numbers, number) - 1]
        if segment.backward is None:
            segment.backward = _Pass()
        if segment is not self._in_backward:
            before_it = self._in_backward or self._segments[-1]
            self._in_backward = segment
            self._live.held_gradients = 0
            self._live.mark(before_it.saved)
            self._live.mark(segment.casts, cast=True)
            segment.backward.begin(before, self._live.casts)
            segment.unkept = [activation for activation in segment.given if not activation.alive]
        return segment.backward


@dataclass
class _Seen:
    """What earlier segments were given, hold for a recomputation, save as a cast, and compute."""

    given: set[Activation] = field(default_factory=set)
    unkept: set[Activation] = field(default_factory=set)
    casts: set[Activation] = field(default_factory=set)
    operations: dict[Operations, Operations] = field(default_factory=dict)

    @staticmethod
    def first(seen: set[Activation], activations: Iterable[Activation]) -> list[Activation]:
        fresh = [activation for activation in activations if activation not in seen]
        seen.update(fresh)
        return fresh


def _is_empty(segment: _Segment) -> bool:
    backward = segment.backward.costs if segment.backward is not None else ()
    return segment.between and not (segment.forward.costs or backward)


def _record(segment: _Segment, savers: Counter[Activation], takers: Counter[Activation], seen: _Seen) -> Segment:
    # What another segment saves too, or may hold to be recomputed, stays. What lies between calls has no policy.
    alone = (
        []
        if segment.between
        else [saved for saved in segment.saved if savers[saved] == 1 and takers[saved] == (saved in segment.given)]
    )
    freed = [saved for saved in alone if saved not in segment.given and saved not in segment.shared]
    swapped = [saved for saved in alone if saved not in segment.shared_longer and swapped_bytes(saved.nbytes)]
    held = seen.first(seen.unkept, segment.unkept)
    casts = seen.first(seen.casts, segment.casts)
    return Segment(
        unit=segment.unit,
        forward=segment.forward.record(seen.operations, segment.made),
        backward=segment.backward.record(seen.operations) if segment.backward is not None else Pass(),
        peak_with_gradients=segment.backward.peak_with_gradients if segment.backward is not None else 0,
        checkpoint_saving=_total(freed) - _total(held),
        swap_saving=_total(swapped),
        input_bytes=_total(seen.first(seen.given, segment.given)),
        casts=tuple((segment.casts[activation], activation.nbytes) for activation in casts),
        gradients=tuple(segment.gradients),
        held_bytes=_total(segment.unkept),
        idle_product_bytes=segment.idle,
        asked_live=segment.asked,
        # Where autograd saves nothing, nobody holds them.
        product_bytes=None if segment.between or segment.unkeepable else segment.made * bool(segment.saved),
        between=segment.between,
    )


def _total(activations: Iterable[Activation]) -> int:
    return sum(activation.nbytes for activation in activations)
