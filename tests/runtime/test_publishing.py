"""What others step is published before it is read; nobody waits for what only he can announce."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_protrain.runtime.access_guard import AccessGuard
from lightning_protrain.runtime.comm.step_sync import StepPublisher


class Turns:
    """Of two ranks: when a step is announced, what the other one has stepped is there."""

    number = 2

    def __init__(self, theirs: list[nn.Parameter]) -> None:
        self.theirs = theirs
        self.announced: list[list[int]] = []
        self.waits: list[int] = []

    def announce(self, indices: list[int], number: int) -> None:
        assert number == self.number
        self.announced.append(indices)
        for parameter in self.theirs:
            parameter.data.fill_(7.0)

    def wait_until_stepped(self, index: int, number: int) -> None:
        self.waits.append(index)


class Shared:
    """Two weights in each of three chunks, one of this rank and one of another; the step of the second is pending."""

    def __init__(self, shares: bool = True) -> None:
        self.mine, self.theirs = ([nn.Parameter(torch.zeros(2)) for _ in range(3)] for _ in range(2))
        params = [
            [SimpleNamespace(host=host, owned=owned) for host, owned in ((mine, True), (theirs, False))]
            for mine, theirs in zip(self.mine, self.theirs, strict=True)
        ]
        plan, share = SimpleNamespace(trainable=True), object() if shares else None
        chunks: Any = [SimpleNamespace(params=each, share=share, plan=plan) for each in params]
        self.published: list[Any] = []
        copies: Any = SimpleNamespace(publish=self.published.append)
        self.step_sync = Turns(self.theirs)
        step_sync: Any = self.step_sync if shares else None
        self.publishing = StepPublisher(chunks, step_sync, copies, AccessGuard(lambda _: None), {1})


def test_what_others_step_is_published_before_a_hook_reads_it() -> None:
    shared = Shared()
    shared.publishing.begin()
    shared.publishing.end_step()
    assert shared.theirs[0].grad is None
    assert shared.mine[0].tolist() == [0.0, 0.0]
    assert shared.step_sync.announced == []
    assert shared.theirs[2].tolist() == [7.0, 7.0]
    assert shared.step_sync.announced == [[0, 2]]
    assert shared.step_sync.waits == [0, 2]
    assert len(shared.published) == 2
    assert {type(each) for each in shared.theirs} == {nn.Parameter}
    shared.publishing.before_wait()
    assert len(shared.step_sync.announced) == 1


def test_an_optimizer_may_look_at_what_it_does_not_step() -> None:
    shared = Shared()
    shared.publishing.begin()
    assert shared.theirs[0].tolist() == [0.0, 0.0]
    assert shared.step_sync.announced == []
    shared.publishing.publish()
    assert {type(each) for each in shared.theirs} == {nn.Parameter}


def test_what_is_frozen_is_not_watched() -> None:
    shared = Shared()
    shared.theirs[0].requires_grad_(False)
    shared.publishing._chunks[0].plan.trainable = False  # Of all of them.
    shared.publishing.begin()
    assert [type(each) is nn.Parameter for each in shared.theirs] == [True, True, False]
    shared.publishing.end()


def test_nothing_is_published_in_the_middle_of_a_step() -> None:
    shared = Shared()
    shared.publishing.begin()
    shared.publishing.before_wait()
    assert shared.step_sync.announced == []
    shared.publishing.end_step()
    shared.publishing.before_wait()
    assert shared.step_sync.announced == [[0, 2]]


def test_other_threads_publish_nothing() -> None:
    shared = Shared()
    shared.publishing.begin()
    shared.publishing.end_step()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend([shared.publishing.before_wait(), shared.theirs[0].tolist()]))
    thread.start()
    thread.join(timeout=20)
    assert found == [None, [0.0, 0.0]]
    assert shared.step_sync.announced == []
    shared.publishing.end()


def test_who_shares_nothing_publishes_nothing() -> None:
    shared = Shared(shares=False)
    shared.publishing.begin()
    shared.publishing.end_step()
    shared.publishing.before_wait()
    shared.publishing.publish()
    assert shared.published == []
    assert {type(each) for each in shared.theirs} == {nn.Parameter}
