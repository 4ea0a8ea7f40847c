"""Markers and rows drawn at random, such that the markers occur, overlap, contain one another and are shared."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lightning_protrain.data.chat.markers import ExclusionMarkers, Marker, Markers, RoleMarkers
from lightning_protrain.data.chat.mask import MaskOptions

TOKENS = range(5)
ROLES = ("assistant", "user", "tool")


@dataclass(frozen=True)
class Case:
    rows: list[list[int]]
    markers: Markers
    options: MaskOptions


def random_case(rng: random.Random) -> Case:
    """One case."""
    pool = [_marker(rng) for _ in range(5)]
    roles = tuple(
        RoleMarkers(name, _some(rng, pool, 1, 2), _some(rng, pool, 0, 2), *(rng.random() < 0.5 for _ in range(3)))
        for name in ROLES[: rng.randint(1, 3)]
    )
    kinds = [rng.choice(["tool_output", "thinking", "scaffold"]) for _ in range(rng.choice([0, 0, 1, 2]))]
    parts = tuple(ExclusionMarkers(kind, _some(rng, pool, 1, 2), _some(rng, pool, 0, 1)) for kind in kinds)
    media = frozenset(rng.sample(TOKENS, rng.choice([0, 0, 1])))
    ids: list[int] = []
    for _ in range(rng.randint(0, 10)):
        ids += rng.choice(pool).ids if rng.random() < 0.6 else [rng.choice(TOKENS) for _ in range(rng.randint(1, 3))]
    border = rng.randint(0, len(ids)) if rng.random() < 0.4 else len(ids)
    rows = [ids[:border], ids[border:]]
    return Case(rows, Markers("any", roles, parts, media), _options(rng, [role.role for role in roles]))


def _marker(rng: random.Random) -> Marker:
    ids = tuple(rng.choice(TOKENS) for _ in range(rng.choice([1, 1, 2, 3])))
    return Marker("m", ids, frozenset(rng.sample(TOKENS, rng.choice([0, 0, 0, 2]))))


def _some(rng: random.Random, pool: list[Marker], least: int, most: int) -> tuple[Marker, ...]:
    return tuple(rng.sample(pool, rng.randint(least, most)))


def _options(rng: random.Random, names: list[str]) -> MaskOptions:
    return MaskOptions(
        train_on_inputs=rng.random() < 0.1,
        roles_to_train=tuple(rng.sample(names, rng.randint(0 if rng.random() < 0.1 else 1, len(names)))),
        train_on_eos=rng.choice(["turn", "all", "all", "last", "none"]),
        train_on=rng.choice(["all", "last_turn"]),
        train_thinking=rng.random() < 0.5,
    )
