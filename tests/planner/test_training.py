from __future__ import annotations

from typing import Any

import pytest

from lightning_protrain.planner.training import Training


@pytest.mark.parametrize("wrong", [("never", 1, False), ("off", 0, False), ("backward", 1, True)])
def test_a_training_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(ValueError, match="give"):
        Training(*wrong)
