"""A clock for many plans at once: the device, both directions of the link and the host, side by side.

Clock:
The paper's equations 2 to 7 take the longer of computation and copies for each chunk. Here the same is written as a
recursion over *positions*, the segments of the profile in the order of forward: what ends when, on the device, on each
direction of the link, and on the host. A link carries one copy after the other, as they are asked for, chunks and
swapped activations alike. Nothing starts before what it depends on has ended, and nothing waits for anything else.

Cycle:
What one step leaves to be done runs behind the next one, so a step is timed from one point at which nothing is left to
the next such point: from the beginning of the last micro-batch's backward over the optimizer step and the forwards and
backwards of the other micro-batches to the end of the forward before the next last backward. Training repeats that.

[Note: Monotone]
The result is made of sums and maxima alone, and every duration is added, never taken away. So it never falls when any
entry of `Columns` grows, when a wait is for a later position (in backward: for one that comes later there, which has a
smaller index), or when -1 (no wait) becomes a wait. Whoever puts each entry at its best has a lower bound of all plans
that the entries stand for. The value of a column depends on no other column, bit for bit.

[Note: Behind the last step]
Where steps of the host run beside the forward that follows, a step nearly always ends with one of the last chunks that
the host steps: it is uploaded, and what needs it and all behind that is computed. When the host is done a backward
tells, so that nothing else of the forward has to be known for a bound that is hardly ever below the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.activity import Backward, Columns, Forward, Positions, Seconds, broadcast
from lightning_protrain.planner.averages import Averages
from lightning_protrain.planner.sending import Sending
from lightning_protrain.planner.training import Training


def simulate(
    columns: Columns, training: Training, asynchronous: bool = True, averages: Averages | None = None
) -> Seconds:
    """Seconds of one optimizer step of every column, see [Note: Cycle] and [Note: Monotone].

    Args:
        columns: What the plans do.
        training: How they are used.
        asynchronous: Whether copies and the host run beside the device; else everything takes its turn.
        averages: What is sent to other ranks in the last backward of a step; None: there is one rank.

    Returns:
        Seconds, (K,).
    """
    return passes(columns, training, asynchronous, averages)[0]


def passes(
    columns: Columns, training: Training, asynchronous: bool = True, averages: Averages | None = None
) -> tuple[Seconds, Seconds]:
    """The result of `simulate`, and how much of it are forwards; (K,) each."""
    columns = broadcast(columns)
    if not asynchronous:
        return _in_turn(columns, training, averages)
    return begin(columns, training, averages).end(columns)


def begin(backward: Backward, training: Training, averages: Averages | None = None) -> Begun:
    """A step that runs beside copies and the host, up to the forward that it ends with.

    Args:
        backward: What the plans do till then, with all columns.
        training: As in `simulate`.
        averages: The same.
    """
    start = np.zeros(backward.device_step.shape)
    if averages is not None:
        averages = averages.broadcast(*backward.land.shape)
    ended, others = _backwards(backward, training, start, averages)
    begun, stepped = _update(backward, training, ended)
    return Begun(training.accumulate, begun, ended.down, stepped, others)


@dataclass(frozen=True)
class Begun:
    """A step whose last forward begins.

    Attributes:
        accumulate: Micro-batches.
        begun: When it does, (K,).
        down: When the link towards the host is free, (K,).
        stepped: When the host has stepped the chunks of each position, (P, K); None: it is done.
        others: How long the first backward takes and those between that and the last one, (0, 1 or 2, K).
    """

    accumulate: int
    begun: Seconds
    down: Seconds
    stepped: Seconds | None
    others: Seconds

    def least(self, computes: Seconds, last: Positions, tails: Seconds) -> Seconds:
        """Less than the seconds of the step, see [Note: Behind the last step], (K,).

        Args:
            computes: Of the device from each position of forward on, (P,).
            last: Some positions, (L,).
            tails: As in `Forward`, of these positions, or less, (L, K).
        """
        assert self.stepped is not None
        assert self.accumulate == 1
        behind = self.stepped[last] + tails + computes[last, None]
        return np.maximum(self.begun + computes[0], behind.max(axis=0, initial=-np.inf))

    def end(self, forward: Forward, chosen: Positions | None = None) -> tuple[Seconds, Seconds]:
        """Seconds of the step, and how much of them are forwards; (K,) each.

        Args:
            forward: What the plans do then, with all columns.
            chosen: Of these plans, in which no micro-batches are accumulated; None: of all.
        """
        if chosen is not None:
            stepped = None if self.stepped is None else self.stepped.take(chosen, axis=1)
            return Begun(1, self.begun[chosen], self.down[chosen], stepped, self.others[:, chosen]).end(forward)
        begun, again = self.begun, self.accumulate
        if again == 1:
            seconds = _forward(forward, begun[None], self.down[None], self.stepped)[0]
            return seconds, seconds - begun
        # The last forward, and the others.
        start = np.zeros_like(begun)
        forwards = np.stack((begun, start)), np.stack((self.down, start))
        seconds, other = _forward(forward, *forwards, self.stepped)
        spent = seconds - begun + (again - 1) * other
        seconds = seconds + (again - 1) * other + self.others[0] + (again - 2) * self.others[-1]
        return seconds, spent


def _backwards(
    columns: Backward, training: Training, start: Seconds, averages: Averages | None
) -> tuple[_Ended, Seconds]:
    """The last backward of a step, and how long its first one takes and those between them, (0, 1 or 2, K)."""
    again, behind = training.accumulate, _worked_behind(columns, training)
    if averages is None:
        works = (columns.add if again > 1 else columns.land) + behind
        # The host's work in the last backward of a step, in its first one, and in one between them.
        each = np.stack((works, columns.land, columns.add)[: min(again, 3)], axis=1)
        ended = _backward(columns, each, training, start)
        return ended, np.maximum(ended.computed, ended.known)[1:]
    # What earlier micro-batches have left is added on the device, and averages come as the host needs them.
    ended = _averaged(columns, averages, np.zeros_like(columns.land) + behind, training, start)
    if again == 1:
        return ended, ended.known[1:]
    other = _backward(columns, np.stack((columns.land, columns.add)[: again - 1], axis=1), training, start)
    return ended, np.maximum(other.computed, other.known)


def _worked_behind(columns: Backward, training: Training) -> Seconds | float:
    """What the host's worker does in the last backward of a step beside landing gradients."""
    if not training.works_in_backward:
        return 0.0
    return columns.norm if training.overlap == "forward" else columns.host_step


def _in_turn(columns: Columns, training: Training, averages: Averages | None) -> tuple[Seconds, Seconds]:
    """The same where nothing runs beside anything: sums."""
    again = training.accumulate
    forward = again * (columns.compute_forward + columns.upload_forward + columns.swap_out).sum(axis=0)
    device = columns.recompute + columns.compute_backward
    copies = columns.upload_backward + columns.download + columns.swap_in
    landed = columns.land + (again - 1) * columns.add
    update = columns.host_step + (columns.norm + columns.scale if training.clips else 0.0)
    backward = (again * (device + copies) + landed + update).sum(axis=0) + columns.device_step
    if averages is not None:
        backward = backward + averages.sent
    return forward + backward, forward


@dataclass(frozen=True)
class _Ended:
    """When a backward has ended, with each of W works of the host.

    Attributes:
        computed: Its computation, (K,).
        known: All gradients are known to the host, (W, K).
        down: The link towards the host is free, (K,).
        stepped: The host has done the first work of each position, (P, K); None: that are no steps.
    """

    computed: Seconds
    known: Seconds
    down: Seconds
    stepped: Seconds | None


def _only_where(work: Seconds) -> Seconds:
    """0 where there is work; minus infinity, which delays nothing, where there is none."""
    return np.where(work > 0, 0.0, -np.inf)


def _waits(waits: Positions) -> tuple[list[Seconds], Seconds, list[Positions], list[bool]]:
    """When the computation of each position has ended, to be filled in; what is waited for; where anybody waits.

    What ends are P + 1 rows, the last one for no wait, and the same, flat; what is waited for are places there, those
    of the last row as negative ones from the end.
    """
    num_positions, num_columns = waits.shape
    ends = np.full((num_positions + 1, num_columns), -np.inf)
    rows = waits * num_columns + np.arange(num_columns)
    somewhere: list[bool] = (waits.max(axis=1) >= 0).tolist()
    return list(ends), ends.reshape(-1), list(rows), somewhere


def _forward(columns: Forward, begun: Seconds, down: Seconds, stepped: Seconds | None) -> Seconds:
    """When forwards that begin at `begun` have ended; the link towards the host is busy until `down`; (W, K).

    `stepped` says when the host has stepped the chunks of each position, which the first one uploads then, (P, K).
    """
    passes, num_columns = begun.shape

    def rows_of(values: NDArray[Any]) -> NDArray[Any]:
        return values if passes == 1 else np.tile(values, passes)

    ends, flat, rows, waits = _waits(rows_of(columns.wait_forward))
    swaps: list[bool] = (columns.swap_out.max(axis=1) > 0).tolist()
    outs, leaves = rows_of(columns.swap_out), rows_of(_only_where(columns.swap_out))
    uploads, lates, computes = map(rows_of, (columns.upload_forward, columns.late_forward, columns.compute_forward))
    released = None if stepped is None else stepped + columns.tail
    up, out = begun.reshape(-1).copy(), np.maximum(begun, down).reshape(-1)
    time, first = up.copy(), up[:num_columns]
    gone = [np.full_like(up, -np.inf)] * 2  # What the last two positions have swapped.
    start, late, add, larger = np.empty_like(up), np.empty_like(up), np.add, np.maximum
    for index, (upload, compute, end) in enumerate(zip(uploads, computes, ends, strict=False)):
        add(up, upload, up)
        if waits[index]:
            larger(up, add(flat.take(rows[index]), lates[index], late), up)
        if released is not None:
            larger(first, released[index], first)
        larger(time, up, start)
        if index > 1 and swaps[index - 2]:  # Its memory is given back when the next position has ended.
            larger(start, gone[0], start)
        time = add(start, compute, end)
        gone = [gone[1], gone[1]]
        if swaps[index]:
            leave = leaves[index]
            larger(out, add(start, leave, late), out)
            add(out, outs[index], out)
            larger(out, add(time, leave, late), out)
            gone[1] = larger(gone[1], add(out, leave, late))
    return np.maximum(time, gone[0]).reshape(begun.shape)


def _backward(columns: Backward, works: Seconds, training: Training, start: Seconds) -> _Ended:
    """A backward, with one work of the host after the other: the device and the link wait for none of them.

    Args:
        columns: What the plans do.
        works: Of the host's worker at each position, (P, W, K); the first is that of the last backward of a step.
        training: How the plans are used.
        start: When it begins, (K,).
    """
    ends, flat, rows, waits = _waits(columns.wait_backward)
    swaps: list[bool] = (columns.swap_in.max(axis=1) > 0).tolist()
    comes, lands = _only_where(columns.swap_in), _only_where(columns.download)
    # What ends so long after the beginning of the computation, and after the downloads before: computation, downloads.
    computes, drains = columns.compute_backward + columns.stall, lands + columns.drain
    lasts, carries = lands + columns.landed, columns.carry
    # Of each position when its computation begins, and when its downloads have ended; the last row: those before it.
    begun = np.empty(lands.shape)
    downs = np.concatenate((np.empty(lands.shape), start[None]))
    time, down, up = start, downs[-1], start.copy()
    before, late = start, np.empty_like(start)
    add, larger = np.add, np.maximum
    each = columns.upload_backward, columns.late_backward, columns.recompute, computes, drains, lasts, carries
    where = waits, rows, swaps, comes, columns.swap_in, begun, ends[:-1], downs[:-1]
    for upload, held, again, compute, drain, last, carry, wait, row, swap, come, swapped, begins, end, landed in zip(
        *(values[::-1] for values in (*each, *where)), strict=True
    ):
        entered = time
        add(up, upload, up)
        if wait:
            larger(up, add(flat.take(row), held, late), up)
        larger(entered, up, begins)
        add(begins, again, begins)
        larger(add(begins, compute, end), add(down, drain, late), end)
        larger(add(begins, last, landed), add(down, carry, late), landed)
        if swap:
            # Asked for when the position before them is entered, they arrive in the order in which they are used.
            larger(up, add(before, come, late), up)
            add(up, swapped, up)
            larger(end, up, end)
        time, down, before = end, landed, entered
    known = np.maximum(lands + columns.ready + begun, columns.ready_behind + downs[1:])
    begins = _only_where(works)
    known, landed = known[:, None] + begins, downs[:-1, None] + begins
    if training.overlap == "backward":
        hosts = _worked(known, works, landed, start)
        return _Ended(time, np.maximum(down, hosts[0]), down, hosts[:, 0])
    return _Ended(time, np.maximum(down, _last_worked(known, works, landed, start)), down, None)


def _worked(known: Seconds, works: Seconds, landed: Seconds, start: Seconds) -> Seconds:
    """When the worker has done its work on each position, (P, W, K).

    Args:
        known: From when on it could begin and never wait.
        works: Its work.
        landed: When all it works on has landed: no work is done before.
        start: When it is free, (K,).
    """
    num_positions, num_works, _ = works.shape
    found = np.empty(works.shape)
    flat = [values.reshape(num_positions, -1) for values in (known, works, landed, found)]
    host = np.tile(start, num_works)
    for could, work, last, done in zip(*(values[::-1] for values in flat), strict=True):
        np.maximum(host, could, done)
        np.add(done, work, done)
        host = np.maximum(done, last, done)
    return found


def _last_worked(known: Seconds, works: Seconds, landed: Seconds, start: Seconds) -> Seconds:
    """The same of the last position of backward, which is the first one, (W, K): the latest of what all left to do."""
    left = _summed(works)
    known += left
    landed[1:] += left[:-1]
    return np.maximum(np.maximum(known.max(axis=0), landed.max(axis=0)), start + left[-1])


def _summed(values: Seconds) -> Seconds:
    """Sums of each row and all before it: in place of `cumsum`, which takes three times as long along this axis."""
    sums = values.copy()
    for before, row in pairwise(sums.reshape(len(sums), -1)):
        np.add(before, row, row)
    return sums


def _averaged(columns: Backward, sums: Averages, works: Seconds, training: Training, start: Seconds) -> _Ended:
    """The backward that ends with averages, see [Note: Sends]; `works` are those of the host's worker, (P, K)."""
    ends, flat, rows, waits = _waits(columns.wait_backward)
    swaps = bool(columns.swap_in.any())
    comes, sending = _only_where(columns.swap_in), Sending(sums, works, start)
    time = up = before = start
    for index in reversed(range(len(rows))):
        entered = time
        up = up + columns.upload_backward[index]
        if waits[index]:
            up = np.maximum(up, flat.take(rows[index]) + columns.late_backward[index])
        first = np.maximum(entered, up) + columns.recompute[index] + sums.lead[index]
        held = sending.send(first, sums.sends[index], sums.waits[index])
        rest = columns.compute_backward[index] - sums.lead[index]
        time = np.maximum(first, held) + rest
        older, left = sums.older[index], _only_where(sums.older[index])
        up = np.maximum(up, first + left) + older
        time = np.maximum(time, up + left)
        if swaps:
            up = np.maximum(up, before + comes[index]) + columns.swap_in[index]
            time = np.maximum(time, up)
        sending.complete(index, time)
        ends[index][:], before = time, entered
    sending.finish(time)
    known = np.maximum(sending.down, sending.host)[None]
    return _Ended(np.maximum(time, sending.free), known, sending.down, sending.stepped)


def _update(columns: Backward, training: Training, ended: _Ended) -> tuple[Seconds, Seconds | None]:
    """When the forward behind the optimizer step begins, and when the chunks of each position are stepped, (P, K)."""
    stepped = ended.computed + columns.device_step
    if training.overlap == "backward":
        assert ended.stepped is not None
        return stepped, ended.stepped + _only_where(columns.host_step)
    known, work = ended.known[0], columns.host_step
    if training.clips:
        work = work + columns.scale
        if training.overlap == "off":
            known = known + np.cumsum(columns.norm, axis=0)[-1]
        # The norm is that of gradients on the device, too.
        known = np.maximum(known, ended.computed)
    done = known + _summed(work)
    if training.overlap == "forward":
        return np.maximum(stepped, known), done + _only_where(columns.host_step)
    return np.maximum(stepped, done[-1]), None
