"""Chunks whose steps flow into each other: bitwise what PyTorch's own step does to all of them at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_protrain.runtime.optim import host_step
from lightning_protrain.runtime.optim.fused import LINE, NO_CLIP, Clip
from lightning_protrain.runtime.optim.host_step import (
    Given,
    HostStep,
    ParamUpdate,
    StepBatch,
    StepSchedule,
    hyperparameters,
)

SIZES = st.lists(st.sampled_from([1, LINE, 3 * LINE + 5, 1000]), min_size=0, max_size=3)
KINDS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (AdamW, {"amsgrad": True}),
    (Adam, {"weight_decay": 0.1, "maximize": True}),
    (SGD, {"momentum": 0.9, "nesterov": True}),
    (SGD, {}),
    (Adagrad, {"lr_decay": 0.1}),
    (torch.optim.NAdam, {}),
]


@contextmanager
def running(threads: int) -> Iterator[HostStep]:
    host = HostStep(threads, tile_bytes=LINE * 4)
    try:
        with torch.no_grad():
            yield host
    finally:
        host.close()


class Pair:
    """Equal parameters in chunks: ours, and those of a peer that PyTorch steps."""

    def __init__(self, chunks: Sequence[Sequence[int]], kind: type[Optimizer], options: dict[str, Any]) -> None:
        self.ours = [[nn.Parameter(torch.randn(size)) for size in chunk] for chunk in chunks]
        self.theirs = [[nn.Parameter(each.detach().clone()) for each in chunk] for chunk in self.ours]
        everything = [[*chain(*chunks)] for chunks in (self.ours, self.theirs)]
        fused = {} if kind is torch.optim.NAdam else {"fused": True}
        self.optimizer = kind(everything[0] or [torch.zeros(1)], lr=0.01, **options)
        self.peer = kind(everything[1] or [torch.zeros(1)], lr=0.01, **options, **fused)
        self.group = hyperparameters(self.optimizer.param_groups[0])
        self.copies: list[tuple[nn.Parameter, Tensor | None]] = []

    def gradients(
        self, index: int, dtype: torch.dtype = torch.float32, clip: Clip = NO_CLIP, shared: bool = False
    ) -> Given:
        """New ones of a chunk, which the peer is given too, clipped; copies may lie where they lie."""
        updates = []
        for one, other in zip(self.ours[index], self.theirs[index], strict=True):
            gradient = torch.randn_like(one).to(dtype)
            other.grad = gradient.float().clone()
            clip.apply([other.grad])
            copy = torch.empty_like(one, dtype=torch.bfloat16, requires_grad=False)
            updates.append(ParamUpdate(one, gradient, gradient if shared and gradient.dtype == copy.dtype else copy))
            self.copies.append((one, updates[-1].copy))
        return [(self.group, updates)]

    def assert_equal(self) -> None:
        self.peer.step()
        while self.copies:
            one, copy = self.copies.pop()
            assert copy is not None
            assert torch.equal(copy, one.detach().bfloat16())
        for one, other in zip(chain(*self.ours), chain(*self.theirs), strict=True):
            assert torch.equal(one, other)
            state, expected = self.optimizer.state.get(one, {}), self.peer.state.get(other, {})
            for name, value in expected.items():
                assert torch.equal(state[name], value) if isinstance(value, Tensor) else state[name] == value


@settings(max_examples=40, deadline=None)
@given(
    case=st.sampled_from(KINDS),
    chunks=st.lists(SIZES, min_size=1, max_size=5),
    late=st.integers(0, 5),
    threads=st.sampled_from([1, 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    shared=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_equals_one_step_of_all(
    case: Any, chunks: list[list[int]], late: int, threads: int, dtype: torch.dtype, shared: bool, order: Any
) -> None:
    """Some are added when others have been stepped already, some are clipped, and they are waited for in any order."""
    pair, clips = Pair(chunks, *case), [NO_CLIP, Clip(bound=0.5), Clip(coefficient=torch.tensor(0.3))]
    with running(threads) as host:
        for _ in range(2):
            steps, portions = host.steps(pair.optimizer), list[StepBatch]()
            for index in range(len(chunks)):
                if index == late:
                    order.shuffle(portions)
                    while portions:
                        steps.finish(portions.pop())
                clip = clips[index % 3]
                gradients = pair.gradients(index, dtype, clip, shared)
                portions.append(steps.add(partial(lambda given: given, gradients), clip))
            for portion in portions:
                steps.finish(portion)
            pair.assert_equal()


def test_so_many_are_prepared_together_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_step, "PREPARED_TOGETHER", 2)
    pair, asked = Pair([[10 * (index + 1)] for index in range(5)], AdamW, {}), list[int]()

    def ask(index: int) -> Given:
        asked.append(index)
        return pair.gradients(index)

    with running(1) as host:
        steps, seen = host.steps(pair.optimizer), list[int]()
        for portion in [steps.add(partial(ask, index)) for index in range(5)]:
            steps.finish(portion)
            seen.append(len(asked))
        assert seen == [2, 2, 4, 4, 5]
        pair.assert_equal()


def test_what_is_known_is_prepared_together_and_stepped_in_turn() -> None:
    pair, asked = Pair([[100], [200], [300]], AdamW, {}), list[int]()

    def ask(index: int) -> Given:
        asked.append(index)
        return pair.gradients(index)

    with running(1) as host:
        steps = host.steps(pair.optimizer)
        first, second = (steps.add(partial(ask, index)) for index in (0, 1))
        assert asked == []
        before = pair.ours[1][0].clone()
        steps.finish(first)
        assert asked == [0, 1]
        assert torch.equal(pair.ours[1][0], before)
        third = steps.add(partial(ask, 2))
        steps.finish(second)
        assert asked == [0, 1, 2]
        steps.finish(third)
        pair.assert_equal()


def test_groups_of_a_chunk_step_as_each_of_them_says() -> None:
    pair = Pair([[500, 40, 7]], AdamW, {})
    other = {**pair.group, "lr": 0.5, "foreach": True}
    with running(3) as host:
        [(group, updates)] = pair.gradients(0)
        steps = host.steps(pair.optimizer)
        steps.finish(steps.add(lambda: [(group, updates[:1]), (other, updates[1:])]))
    peers = [AdamW(pair.theirs[0][:1], lr=0.01, fused=True), AdamW(pair.theirs[0][1:], lr=0.5, foreach=True)]
    for peer in peers:
        peer.step()
    assert all(torch.equal(*both) for both in zip(pair.ours[0], pair.theirs[0], strict=True))


@pytest.mark.parametrize(("error", "failing"), [(RuntimeError, [1, 2]), (KeyError, [0, 1, 2])])
def test_what_cannot_be_prepared_is_told_to_all_who_were_to_be(error: type[Exception], failing: list[int]) -> None:
    """The first is prepared before the others; an error that nobody expects is told at once."""
    pair = Pair([[100], [200], [300]], AdamW, {})

    def fail() -> Given:
        raise error("out of luck")

    with running(2) as host:
        steps, before = host.steps(pair.optimizer), pair.ours[2][0].clone()
        portions = [steps.add(partial(pair.gradients, 0)), steps.add(fail), steps.add(partial(pair.gradients, 2))]
        for index, portion in enumerate(portions):
            with pytest.raises(error, match="out of luck") if index in failing else nullcontext():
                steps.finish(portion)
        assert torch.equal(pair.ours[2][0], before)
        assert pair.ours[2][0] not in pair.optimizer.state


def test_an_error_of_a_kernel_is_that_of_its_chunk() -> None:
    pair = Pair([[100], [200], [300]], AdamW, {})
    with running(1) as host:
        for round_ in range(2):
            steps = host.steps(pair.optimizer)
            portions = [steps.add(partial(pair.gradients, index)) for index in range(3)]
            if round_:
                state = pair.optimizer.state[pair.ours[1][0]]
                state["exp_avg"] = state["exp_avg"].double()
            for index, portion in enumerate(portions):
                if round_ and index == 1:
                    with pytest.raises(RuntimeError, match="expected scalar type"):
                        steps.finish(portion)
                else:
                    steps.finish(portion)
            pair.peer.step()
    for index in (0, 2):
        assert torch.equal(pair.ours[index][0], pair.theirs[index][0])


def test_gradients_are_not_held_when_their_chunk_is_done() -> None:
    pair, died = Pair([[100], [200]], AdamW, {}), list[int]()
    kept = [[*pair.gradients(index)] for index in range(2)]
    with running(1) as host:
        steps = host.steps(pair.optimizer)
        portions = [steps.add(partial(kept.pop, 0)) for _ in range(2)]
        for index, each in enumerate(kept):
            weakref.finalize(each[0][1][0].gradient, died.append, index)
        del each
        for index, portion in enumerate(portions):
            steps.finish(portion)
            gc.collect()
            assert died == list(range(index + 1))


def test_lbfgs_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS works on all parameters as one vector"):
        StepSchedule(HostStep(1), torch.optim.LBFGS([torch.zeros(1)]))
