"""Ranks that leave a script in any place still gather all of it, and nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from lightning_protrain.runtime.script import BACKWARD, SUMS, Walk, digest

SCRIPT = (0, 1, 2, BACKWARD, 2, SUMS, 1, 0, SUMS, SUMS)


def gathers(script: tuple[int, ...]) -> list[int]:
    return [event for event in script if event >= 0]


class Follower:
    """What a rank does in a step: gathers and sums begin, and are waited for.

    Args:
        program: What it needs, and its marks; sums are as many as in the script.
        script: What was agreed on.
        early: Gathers that are under way at most before one is waited for.
        at_once: Whether it gathers for others what it owes; else when its step ends.
    """

    def __init__(self, program: tuple[int, ...], script: tuple[int, ...], early: int = 1, at_once: bool = True) -> None:
        self.begun: list[int] = []
        self.sent_behind: list[int] = []  # How many gathers were begun before each sum.
        self.num_sums = 0
        self._walk = Walk(script)
        self._program, self._early, self._at_once = program, early, at_once

    def run(self) -> Iterator[tuple[str, int]]:
        """Yields what it waits for: ("gather" or "sums", which one in its order)."""
        walk, needed = self._walk, []
        for event in self._program:
            if event >= 0:
                if walk.reach(event):
                    self.begun.append(event)
                    needed.append(len(self.begun) - 1)
                self._give()
                while len(needed) >= self._early:
                    yield "gather", needed.pop(0)
                continue
            walk.reach(event)
            self._give()
            if event == SUMS:
                self.num_sums += 1
                self.sent_behind.append(len(self.begun))
                walk.send()
                self._give()
                if self.num_sums > 1:
                    yield "sums", self.num_sums - 2
        for each in needed:
            yield "gather", each
        if self.num_sums:
            yield "sums", self.num_sums - 1
        self.begun += walk.end()

    def _give(self) -> None:
        if self._at_once:
            self.begun += self._walk.owed()


def stuck(followers: list[Follower], chance: random.Random) -> bool:
    """Whether some wait for ever, in some order of running."""
    running = {rank: each.run() for rank, each in enumerate(followers)}
    waits: dict[int, tuple[str, int] | None] = dict.fromkeys(running)

    def ready(rank: int) -> bool:
        wait = waits[rank]
        if wait is None:
            return True
        return all((len(f.begun) if wait[0] == "gather" else f.num_sums) > wait[1] for f in followers)

    while running:
        able = [rank for rank in running if ready(rank)]
        if not able:
            return True
        rank = chance.choice(able)
        try:
            waits[rank] = next(running[rank])
        except StopIteration:
            del running[rank]
    return False


def changed(script: tuple[int, ...], chance: random.Random) -> tuple[int, ...]:
    """Another order of fetches among the same sums."""
    program = list(script)
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(program) or 1)
        if program[at : at + 1] in ([], [SUMS]):
            continue
        program[at : at + 1] = chance.choice([[], [chance.randrange(5)], [program[at], chance.randrange(5)]])
    if chance.random() < 0.3:  # Its sums are sent earlier among the fetches.
        sums = [at for at, event in enumerate(program) if event == SUMS]
        if sums:
            program.pop(sums[0])
            program.insert(chance.randrange(sums[0] + 1), SUMS)
    return tuple(program)


def a_script(chance: random.Random) -> tuple[int, ...]:
    forward = [chance.randrange(5) for _ in range(chance.randrange(1, 6))]
    backward = [chance.choice([SUMS, chance.randrange(5)]) for _ in range(chance.randrange(8))]
    return (*forward, BACKWARD, *backward)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_for_ever_whoever_leaves(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        script = a_script(chance)
        programs = [changed(script, chance) if chance.random() < 0.7 else script for _ in range(chance.choice([2, 4]))]
        followers = [Follower(program, script, chance.randrange(1, 4)) for program in programs]
        assert not stuck(followers, chance), (script, programs)
        assert [each.begun for each in followers] == [gathers(script)] * len(followers), (script, programs)
        # Sums and gathers are begun in one order on all ranks, which NCCL asks for.
        sums = [at for at, event in enumerate(script) if event == SUMS]
        behind = [len(gathers(script[:at])) for at in sums]
        assert [each.sent_behind for each in followers] == [behind] * len(followers), (script, programs)


def test_what_is_owed_may_not_come_when_the_step_ends() -> None:
    """One rank skips a chunk and waits for the other's sums; the other waits for the chunk before it sends them."""
    script = (0, 1, BACKWARD, 1, SUMS, 0, SUMS)
    skips = (0, BACKWARD, SUMS, 0, SUMS)
    late = [Follower(script, script), Follower(skips, script, at_once=False)]
    assert stuck(late, random.Random(0))
    assert not stuck([Follower(script, script), Follower(skips, script)], random.Random(0))


def test_a_rank_in_the_script_owes_nothing() -> None:
    walk = Walk(SCRIPT)
    for event in SCRIPT:
        assert walk.reach(event)
        walk.send()
        assert walk.owed() == []
    assert (walk.end(), walk.left) == ([], False)


@pytest.mark.parametrize("at", range(len(SCRIPT)))
def test_a_rank_that_leaves_owes_the_rest(at: int) -> None:
    walk = Walk(SCRIPT)
    taken = [event for event in SCRIPT[:at] if walk.reach(event)]
    assert not walk.reach(7)
    assert walk.left
    following = SCRIPT[at:]
    until = following.index(SUMS) if SUMS in following else len(following)
    assert walk.owed() == [event for event in following[:until] if event >= 0]
    assert walk.owed() == []
    assert not walk.reach(SCRIPT[at])  # It stays away, although what it does is in the script again.
    rest = [event for event in following[until:] if event >= 0]
    assert walk.end() == rest
    assert gathers(tuple(taken)) + gathers(following) == gathers(SCRIPT)


def test_behind_its_own_sums_it_owes_what_the_script_has_behind_them() -> None:
    walk = Walk(SCRIPT)
    walk.reach(3)
    assert walk.owed() == [0, 1, 2, 2]
    walk.reach(SUMS)
    assert walk.owed() == []  # Not before they have been sent.
    walk.send()
    assert walk.owed() == [1, 0]


def test_more_sums_than_the_script_has_change_nothing() -> None:
    walk, owed = Walk((0, SUMS)), []
    for _ in range(3):
        walk.reach(SUMS)
        owed += walk.owed()
        walk.send()
    assert (owed, walk.owed(), walk.end()) == ([0], [], [])


def test_digests_tell_scripts_apart() -> None:
    scripts = [(), (0,), (0, 0), (0, SUMS), (SUMS, 0), (BACKWARD, 0), (1, 0), (0, 1), SCRIPT]
    found = [digest(script) for script in scripts]
    assert len(set(found)) == len(scripts)
    assert all(0 < each < 1 << 62 for each in found)
    assert digest((0, SUMS)) == digest([0, SUMS])
