"""A clock for many plans at once: the device, both directions of the link and the host, side by side.

[Note: Clock]
The paper's equations 2 to 7 take the longer of computation and copies for each chunk. Here the same is written as a
recursion over *positions*, the segments of the profile in the order of forward: what ends when, on the device, on each
direction of the link, and on the host. A link carries one copy after the other, as they are asked for, chunks and
swapped activations alike. Nothing starts before what it depends on has ended, and nothing waits for anything else.

[Note: Cycle]
What one step leaves to be done runs behind the next one, so a step is timed from one point at which nothing is left to
the next such point: from the beginning of the last micro-batch's backward over the optimizer step and the forwards and
backwards of the other micro-batches to the end of the forward before the next last backward. Training repeats that.

[Note: Monotone]
The result is made of sums and maxima alone, and every duration is added, never taken away. So it never falls when any
entry of `Columns` grows, when a wait is for a later position (in backward: for one that comes later there, which has a
smaller index), or when -1 (no wait) becomes a wait. Whoever puts each entry at its best has a lower bound of all plans
that the entries stand for. The value of a column depends on no other column, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_protrain.planner.averages import Averages
from lightning_protrain.planner.sending import Sending
from lightning_protrain.planner.training import Training

Seconds = NDArray[np.float64]
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Columns:
    """What K plans do at P positions, one column for each plan; see [Note: Clock].

    Arrays are (P, K) and hold seconds unless said otherwise. An array whose columns (or rows) are all alike may have
    one of them, (P, 1) or (1, K) or (1, 1): it is broadcast.

    Attributes:
        compute_forward: Of the device in forward.
        recompute: In backward, before the first gradient is computed.
        compute_backward: After that.
        upload_forward: Of all chunks that the position needs in forward and that are not there yet.
        late_forward: The part of `upload_forward` that `wait_forward` holds back; the part before it goes earlier.
        wait_forward: Position, of an earlier index, whose computation must have ended before the late part can begin
            (its buffers are in use till then), int; -1: none.
        upload_backward: As `upload_forward`, in backward.
        late_backward: As `late_forward`, in backward.
        wait_backward: The same in backward: of a later index, as backward goes from the last position to the first.
        download: Of the gradients that become whole at the position, those of offloaded chunks.
        stall: If it has downloads, how much longer than its computation it takes, as what is under way is held on the
            device, which is bounded; see [Note: Landings].
        drain: If it has downloads, from when those of the positions before (in backward) have ended until its own
            computation has, if that waits for them; negative where it may end before them.
        landed: From when its computation begins until its downloads have ended.
        carry: From when those of the positions before have ended until then.
        ready: From when its computation begins until the worker could begin and never wait, see [Note: Chunk by chunk]
            in hostwork.py.
        ready_behind: From when those of the positions before have ended until then.
        land: Of the host's worker for casting those gradients, where they are of another dtype than the weights.
        add: Of the worker for adding those gradients to those of the micro-batch before.
        norm: Of the host for their norm.
        scale: Of the host for scaling them.
        host_step: Of the host's optimizer step of their chunks.
        tail: In forward, from when the host has stepped the chunks of the position until they have been uploaded.
        swap_out: Of activations that leave in forward.
        swap_in: Of activations that come back for backward.
        device_step: Of the device for what it does with resident chunks once in a step: their optimizer step, sums over
            micro-batches, norm and scaling, (K,).
    """

    compute_forward: Seconds
    recompute: Seconds
    compute_backward: Seconds
    upload_forward: Seconds
    late_forward: Seconds
    wait_forward: Positions
    upload_backward: Seconds
    late_backward: Seconds
    wait_backward: Positions
    download: Seconds
    stall: Seconds
    drain: Seconds
    landed: Seconds
    carry: Seconds
    ready: Seconds
    ready_behind: Seconds
    land: Seconds
    add: Seconds
    norm: Seconds
    scale: Seconds
    host_step: Seconds
    tail: Seconds
    swap_out: Seconds
    swap_in: Seconds
    device_step: Seconds


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
    columns = _broadcast(columns)
    if not asynchronous:
        return _in_turn(columns, training, averages)
    start = np.zeros(columns.device_step.shape)
    again = training.accumulate
    if averages is not None:
        averages = averages.broadcast(*columns.land.shape)
    ended, others = _backwards(columns, training, start, averages)
    begun, stepped = _update(columns, training, ended)
    if again == 1:
        seconds = _forward(columns, begun[None], ended.down[None], stepped)[0]
        return seconds, seconds - begun
    # The last forward, and the others.
    forwards = np.stack((begun, start)), np.stack((ended.down, start))
    seconds, other = _forward(columns, *forwards, stepped)
    forward = seconds - begun + (again - 1) * other
    seconds = seconds + (again - 1) * other + others[0] + (again - 2) * others[-1]
    return seconds, forward


def _backwards(
    columns: Columns, training: Training, start: Seconds, averages: Averages | None
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


def _worked_behind(columns: Columns, training: Training) -> Seconds | float:
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


def _broadcast(columns: Columns) -> Columns:
    shapes = [getattr(columns, field.name).shape for field in fields(Columns)]
    num_positions, num_columns = np.broadcast_shapes(*(shape if len(shape) == 2 else (1, *shape) for shape in shapes))
    full = {}
    for field in fields(Columns):
        values = getattr(columns, field.name)
        shape = (num_positions, num_columns)[2 - values.ndim :]
        full[field.name] = values if values.shape == shape else np.broadcast_to(values, shape)
    return Columns(**full)


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


def _forward(columns: Columns, begun: Seconds, down: Seconds, stepped: Seconds | None) -> Seconds:
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


def _backward(columns: Columns, works: Seconds, training: Training, start: Seconds) -> _Ended:
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


def _averaged(columns: Columns, sums: Averages, works: Seconds, training: Training, start: Seconds) -> _Ended:
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


def _update(columns: Columns, training: Training, ended: _Ended) -> tuple[Seconds, Seconds | None]:
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
