"""Optimizer states of all owners come together in one state dict, and part again when it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_protrain.runtime.comm.collectives import make_rank_mesh
from lightning_protrain.strategy.sharded_states import drop_states, gather_states
from tests.support.ranks import run_ranks, values

# Owners of the parameters that ranks share; None: every rank has the state of its own.
OWNERS = (0, 2, None, 1, 1)
KINDS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),  # No state at all.
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    made = [nn.Parameter(torch.randn(2, at + 1, generator=generator)) for at in range(len(OWNERS))]
    made[3].data = made[3].detach().bfloat16()
    return made


def stepped(kind: str, present: list[bool]) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """An optimizer after two steps of the parameters that have gradients."""
    made = parameters()
    optimizer = KINDS[kind]([{"params": made[:2]}, {"params": made[2:], "lr": 0.2}])
    for _ in range(2):
        for at, parameter in enumerate(made):
            parameter.grad = torch.full_like(parameter, 0.1 + at) if present[at] else None
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.05
    return optimizer, made


def plain(value: Any) -> Any:
    """Return the value with lists and dtypes in place of tensors, which can be compared and sent."""
    if isinstance(value, Tensor):
        return str(value.dtype), list(value.shape), value.float().flatten().tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def _gather(rank: int) -> list[tuple[Any, Any, list[int]]]:
    """Return, for each kind: saved states, this rank's own states, and the states left after loading the former."""
    ranks, found = make_rank_mesh(rank, 3), []
    for kind in KINDS:
        optimizer, made = stepped(kind, [owner in (None, ranks.local_rank) for owner in OWNERS])
        owners = {id(parameter): owner for parameter, owner in zip(made, OWNERS, strict=True) if owner is not None}
        saved = gather_states(optimizer, owners, ranks)
        mine = plain(optimizer.state_dict())
        optimizer.load_state_dict(stepped(kind, [True] * len(OWNERS))[0].state_dict())
        drop_states(optimizer, owners, ranks)
        found.append((plain(saved), mine, [at for at, each in enumerate(made) if each in optimizer.state]))
    return found


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of `_gather` on three ranks, by kind of the optimizer."""
    found = values(run_ranks(_gather, 3, tmp_path_factory.mktemp("ranks")))
    return dict(zip(KINDS, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_rank_0_saves_what_one_rank_with_everything_has(kind: str, gathered: dict[str, Any]) -> None:
    state = plain(stepped(kind, [True] * len(OWNERS))[0].state_dict())
    assert gathered[kind][0][0] == state
    for rank, (saved, mine, left) in enumerate(gathered[kind]):
        assert rank == 0 or saved == mine
        has_state = [] if kind == "sgd" and not state["state"] else range(len(OWNERS))
        assert left == [at for at in has_state if OWNERS[at] in (None, rank)]


def _gather_on_two_nodes(rank: int) -> list[int]:
    ranks = make_rank_mesh(rank % 2, 2)
    places = [None if owner is None else owner % 2 for owner in OWNERS]
    optimizer, made = stepped("adamw", [place in (None, ranks.local_rank) for place in places])
    owners = {id(parameter): place for parameter, place in zip(made, places, strict=True) if place is not None}
    return sorted(gather_states(optimizer, owners, ranks)["state"])


def test_only_the_first_node_tells(tmp_path: Path) -> None:
    found = values(run_ranks(_gather_on_two_nodes, 4, tmp_path))
    assert found == [[0, 1, 2, 3, 4], [2, 3, 4], [0, 1, 2], [2, 3, 4]]


def test_an_owner_without_a_state_has_none_in_the_whole(tmp_path: Path) -> None:
    assert values(run_ranks(_gather_without, 2, tmp_path)) == [[0, 2], [0, 2]]


def _gather_without(rank: int) -> list[int]:
    """Parameter 1 has had no gradient anywhere; parameter 2 is that of rank 1, 0 that of everybody."""
    ranks = make_rank_mesh(rank, 2)
    optimizer, made = stepped("adamw", [True, False, rank == 1, False, False])
    owners = {id(made[1]): 1, id(made[2]): 1, id(made[3]): 0}
    return sorted(gather_states(optimizer, owners, ranks)["state"])


def test_what_everybody_steps_is_kept() -> None:
    optimizer, made = stepped("adamw", [True] * len(OWNERS))
    ranks: Any = type("Ranks", (), {"local_rank": 1})
    drop_states(optimizer, {id(made[0]): 0, id(made[1]): 1}, ranks)
    assert [parameter in optimizer.state for parameter in made] == [False, True, True, True, True]
