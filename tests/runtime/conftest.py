"""Fixtures that several test files about swapping share."""

from __future__ import annotations

import pytest

from lightning_protrain.runtime import swap


@pytest.fixture
def everything_is_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of small models as well."""
    monkeypatch.setattr(swap, "least_swapped", lambda swap_bytes: 1)
