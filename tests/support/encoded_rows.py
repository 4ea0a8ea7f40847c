"""Encoded conversations that are written down by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_protrain.data.batches.encode import Encoded


def encoded(length: int, seed: int = 0, **options: Any) -> Encoded:
    """Random tokens, about half of them trained and the last one always."""
    rng = np.random.default_rng([seed, length])
    trained = rng.random(length) < 0.5
    trained[-1:] = True
    return Encoded(
        **{"input_ids": rng.integers(3, 50, length).astype(np.int32), "trained": trained, **options}  # type: ignore[arg-type]
    )
