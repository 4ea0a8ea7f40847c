"""The learning rate over a run, linear warm-up and then a cosine; and the ranges of the numbers that a module takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


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


def check_numbers(given: Mapping[str, Any]) -> None:
    """Refuses hyperparameters of a module that are out of their range.

    Raises:
        ValueError: Names the first one, with its value.
    """
    chunk_tokens = given["loss_chunk_tokens"]
    for name, wrong, must in (
        ("learning_rate", given["learning_rate"] <= 0, "be above 0"),
        ("weight_decay", given["weight_decay"] < 0, "not be negative"),
        ("warmup_steps", given["warmup_steps"] < 0, "be a number of steps or a fraction of them"),
        ("min_learning_rate_ratio", not 0 <= given["min_learning_rate_ratio"] <= 1, "lie between 0 and 1"),
        ("loss_chunk_tokens", chunk_tokens is not None and chunk_tokens < 1, "be at least 1, or None"),
    ):
        if wrong:
            raise ValueError(f"{name} is {given[name]}; it must {must}.")
