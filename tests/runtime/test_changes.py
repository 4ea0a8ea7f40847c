"""Changes of weights in the wrong place are errors that name the weight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_protrain.runtime.param import changed_before_backward, refuse_changed_by_others


def param(**given: Any) -> Any:
    known = {"owned": False, "changed_here": False, "seen_version": 0}
    return SimpleNamespace(fqn="a.weight", host=torch.ones(2), **{**known, **given})


def test_a_graph_names_the_versions_that_it_knows() -> None:
    changed = param()
    changed.host.mul_(2).mul_(2)
    assert "version 2, the forward used 0" in str(changed_before_backward(changed))
    assert "`data` is other memory now" in str(changed_before_backward(param(seen_version=-1)))


@pytest.mark.parametrize(
    ("owned", "changed", "refused"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_what_ranks_share_is_changed_by_its_owner(owned: bool, changed: bool, refused: bool) -> None:
    params = [param(owned=True), param(owned=owned, changed_here=changed)]
    if not refused:
        refuse_changed_by_others(params)
        return
    with pytest.raises(RuntimeError, match=r"'a.weight' was changed between steps on a rank that does not own it"):
        refuse_changed_by_others(params)
