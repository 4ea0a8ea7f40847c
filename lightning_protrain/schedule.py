"""The learning rate over a run: linear warm-up, then a cosine."""

from __future__ import annotations

import math


def learning_rate_factor(step: int, warmup: int, num_steps: int | None, floor: float) -> float:
    """Return the learning rate of an optimizer step over the peak.

    Args:
        step: Optimizer steps taken before this one.
        warmup: Steps of linear warm-up; the last of them is the first at the peak.
        num_steps: Steps in all; None holds the peak after the warm-up.
        floor: The factor at and after the last step.
    """
    if step < warmup:
        return (step + 1) / warmup
    if num_steps is None:
        return 1.0
    progress = min((step - warmup) / max(num_steps - warmup, 1), 1.0)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
