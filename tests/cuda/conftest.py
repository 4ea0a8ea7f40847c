"""Around every test on a GPU: matrix products are exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _exact_matmul() -> Iterator[None]:
    """TF32 would hide real errors below its own; cuDNN, which runs an LSTM, has a switch of its own that is on."""
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    yield
    for switch, allowed in zip(switches, before, strict=True):
        switch.allow_tf32 = allowed
