"""What plans do at every position of a step, in seconds: the input of the clock."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
Positions = NDArray[np.int64]
Part = TypeVar("Part", bound="Forward | Backward")


@dataclass(frozen=True)
class Forward:
    """What K plans do at P positions in forward, one column for each plan; see [Note: Clock].

    Arrays are (P, K) and hold seconds unless said otherwise. An array whose columns (or rows) are all alike may have
    one of them, (P, 1) or (1, K) or (1, 1): it is broadcast.

    Attributes:
        compute_forward: Of the device in forward.
        upload_forward: Of all chunks that the position needs in forward and that are not there yet.
        late_forward: The part of `upload_forward` that `wait_forward` holds back; the part before it goes earlier.
        wait_forward: Position, of an earlier index, whose computation must have ended before the late part can begin
            (its buffers are in use till then), int; -1: none.
        tail: From when the host has stepped the chunks of the position until they have been uploaded.
        swap_out: Of activations that leave.
    """

    compute_forward: Seconds
    upload_forward: Seconds
    late_forward: Seconds
    wait_forward: Positions
    tail: Seconds
    swap_out: Seconds


@dataclass(frozen=True)
class Backward:
    """What they do in backward and in the optimizer step, as in `Forward`.

    Attributes:
        recompute: In backward, before the first gradient is computed.
        compute_backward: After that.
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
        swap_in: Of activations that come back for backward.
        device_step: Of the device for what it does with resident chunks once in a step: their optimizer step, sums over
            micro-batches, norm and scaling, (K,).
    """

    recompute: Seconds
    compute_backward: Seconds
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
    swap_in: Seconds
    device_step: Seconds


@dataclass(frozen=True)
class Columns(Forward, Backward):
    """Both: a whole step."""


def broadcast(part: Part) -> Part:
    """The same with arrays of all positions and columns."""
    arrays: dict[str, Any] = {field.name: getattr(part, field.name) for field in fields(part)}
    shapes = [array.shape if array.ndim == 2 else (1, *array.shape) for array in arrays.values()]
    shape = np.broadcast_shapes(*shapes)
    for name, array in arrays.items():
        wanted = shape[2 - array.ndim :]
        arrays[name] = array if array.shape == wanted else np.broadcast_to(array, wanted)
    return type(part)(**arrays)
