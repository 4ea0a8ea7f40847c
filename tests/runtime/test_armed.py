"""A step that has been announced has begun as soon as some weight may be stepped."""

from __future__ import annotations

import pytest
import torch

from lightning_protrain.runtime.optim.async_step import Overlap, PendingStep
from lightning_protrain.runtime.optim.step import PartGroups


@pytest.mark.parametrize(
    ("stepped", "left", "begun"), [(set(), set(), False), ({1}, set(), True), (set(), {0}, True), ({1}, {0, 1}, True)]
)
def test_a_step_begins_with_the_first_chunk(stepped: set[int], left: set[int], begun: bool) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    armed = PendingStep(optimizer, PartGroups(optimizer), Overlap.BACKWARD, None, False, stepped=stepped, left=left)
    assert armed.has_begun is begun


def test_two_steps_share_nothing() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    one, other = (PendingStep(optimizer, PartGroups(optimizer), Overlap.FORWARD, None, True) for _ in range(2))
    one.left.add(3)
    one.norms[0] = torch.ones(())
    assert not other.has_begun
    assert not other.norms
