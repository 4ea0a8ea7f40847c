"""On the simulated device: every case is bitwise right with late copies, and no access goes unordered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.runtime.applied import PLANS, Block, Net, applied, differences, mean_square, train
from tests.runtime.cases import CASES, Case
from tests.support.simulated.device import SimulatedDevice

# Its step writes to weights whose upload may be under way. They are uploaded again, as their version has changed.
WRITES_IN_THE_STEP = "weights change in the step"


class OwnCheckpoint(Block):
    """Checkpoints a part of itself."""

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(self.up(x)), hidden, use_reentrant=False)
        return hidden + self.down(inner)


FENCED: dict[str, Case] = {name: case for name, case in CASES.items() if name != WRITES_IN_THE_STEP}
FENCED["own checkpoint"] = (lambda: Net([OwnCheckpoint() for _ in range(3)]), mean_square, {})


def run(name: str, plan: str) -> list[str]:
    build, step, options = FENCED[name]
    torch.manual_seed(0)
    expected = train(build(), step, **options)
    torch.manual_seed(0)
    model: nn.Module = build()
    device = SimulatedDevice()
    with applied(model, PLANS[plan], device) as state, device:
        return differences(expected, train(model, step, state, **options))


@pytest.mark.parametrize("plan", ["kept", "checkpointed", "offload"])
@pytest.mark.parametrize("name", FENCED)
def test_parity_without_races(name: str, plan: str) -> None:
    assert run(name, plan) == []
