"""Gradients go to the host as autograd would have summed them: places of their own, and bounded room on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_protrain.device.device import CPUDevice
from lightning_protrain.device.host import PAGE, HostMemory
from lightning_protrain.planner.plan import chunk_offsets
from lightning_protrain.runtime.chunk import Chunk
from lightning_protrain.runtime.grad_offload import DownloadBudget, GradientMemory, GradOffload
from lightning_protrain.runtime.optim.async_step import AsyncStep
from lightning_protrain.runtime.prefetch_schedule import Capacity
from lightning_protrain.runtime.residency import Residency
from lightning_protrain.runtime.step_context import StepContext
from tests.runtime import overlapped
from tests.runtime.applied import (
    PLANS,
    WIDTH,
    Applied,
    Block,
    Net,
    applied,
    assert_parity,
    batches,
    chunk_of,
    differences,
    each_plan,
    live,
    mean_square,
    train,
)
from tests.support import plans
from tests.support.plans import place
from tests.support.simulated.device import Rates, SimulatedDevice


class Words(Net):
    """An embedding with sparse gradients; its weight may also be the head's, as a function or not at all."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(6, WIDTH, sparse=sparse)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + self.table(torch.tensor([0, 1, 1, 4])))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@each_plan
@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation(make: Any, accumulate: int, set_to_none: bool) -> None:
    class Zeroing(torch.optim.AdamW):
        def zero_grad(self, set_to_none: bool = set_to_none) -> None:
            super().zero_grad(set_to_none)

    assert_parity(Net, make, accumulate=accumulate, optimizer=lambda model: Zeroing(model.parameters()))


@each_plan
@pytest.mark.parametrize("accumulate", [1, 3])
def test_sparse_gradients(make: Any, accumulate: int) -> None:
    assert_parity(Words, make, accumulate=accumulate, optimizer=sgd)


@pytest.mark.parametrize("first_sparse", [True, False])
def test_sparse_and_dense_gradients_of_one_weight(first_sparse: bool) -> None:
    """A micro-batch may look words up (sparse) or go through all of them (dense)."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, WIDTH))

        def forward(self, hidden: Tensor, sparse: bool) -> Tensor:
            if sparse:
                words = torch.tensor([0, 1, 1, 4])
                return hidden + nn.functional.embedding(words, self.weight, sparse=True)
            return hidden + 0.1 * (hidden @ self.weight.t()) @ self.weight

    def step(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        sparse = (index % 2 == 0) is first_sparse
        hidden = model.inp(batch)
        for block in model.blocks:
            hidden = block(hidden, sparse)
        return model.head(hidden).square().mean()

    assert_parity(
        lambda: Net([Both() for _ in range(3)]),
        PLANS["kept"],
        step,
        accumulate=2,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.001),
    )


def one_gradient_at_a_time(monkeypatch: pytest.MonkeyPatch, state: Applied) -> list[int]:
    """Counts, whenever a gradient lands, how many device parameters have one."""
    seen: list[int] = []
    take = GradOffload.take

    def counted(grads: GradOffload, param: Any) -> None:
        seen.append(sum(other.device_param.grad is not None for chunk in state.chunks for other in chunk.params))
        take(grads, param)
        assert param.device_param.grad is None

    monkeypatch.setattr(GradOffload, "take", counted)
    return seen


def offload_of(chunk: Chunk, device: CPUDevice, pending_bytes: int | None = None) -> GradOffload:
    """Takes the gradients of one chunk without an executor."""
    context, async_step = StepContext((), [chunk], device, print), AsyncStep([chunk], device)
    residency = Residency(context, Capacity(1, chunk.nbytes, [chunk.nbytes]), async_step)
    grads = GradOffload(context, residency, async_step, pending_bytes=pending_bytes)
    for param in chunk.params:
        param.device_param.register_post_accumulate_grad_hook(lambda _, param=param: grads.take(param))
    return grads


@each_plan
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_device_holds_one_gradient_at_a_time(monkeypatch: pytest.MonkeyPatch, make: Any, accumulate: int) -> None:
    with applied(Net(), make) as state:
        seen = one_gradient_at_a_time(monkeypatch, state)
        train(state.model, mean_square, state, accumulate=accumulate)
        offloaded = sum(len(chunk.params) for chunk in state.chunks)
        assert seen == [1] * 4 * offloaded


def test_gradients_lie_on_the_host_like_their_parameters() -> None:
    parameter = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    chunk, device = chunk_of(parameter)
    grads = offload_of(chunk, device)
    live(chunk).params[0].device_param.square().sum().backward()
    grads.finish()
    assert parameter.grad.stride() == parameter.stride()
    assert torch.equal(parameter.grad, 2 * parameter)
    assert chunk.params[0].device_param.grad is None


def test_memory_of_gradients_is_used_again() -> None:
    with applied(Net()) as state:
        train(state.model, mean_square, state, num_steps=2)
        before = state.device.host.allocated_bytes
        train(state.model, mean_square, state, num_steps=6)
        assert state.device.host.allocated_bytes == before


def test_a_gradient_that_somebody_holds_is_not_written_over() -> None:
    with applied(Net()) as state:
        held = []
        for batch in batches(3):
            state.step(mean_square, state.model, batch, 0).backward()
            gradient = state.model.blocks[0].up.weight.grad
            held.append((gradient, gradient.clone()))
            state.model.zero_grad()
        assert all(torch.equal(gradient, copy) for gradient, copy in held)
        assert not torch.equal(held[0][0], held[1][0])


# --- weights used outside their blocks ------------------------------------------------------------------------------
def penalty_after(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    return mean_square(model, batch, index) + 0.1 * sum(p.square().sum() for p in model.parameters())


def penalty_before(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    penalty = 0.1 * sum(p.square().sum() for p in model.parameters())
    return penalty + mean_square(model, batch, index)


def two_penalties_after(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    loss = mean_square(model, batch, index)
    return loss + sum(0.1 * (p * p).sum() + 0.3 * p.abs().sum() for p in model.parameters())


def two_penalties_before(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    penalty = sum(0.1 * (p * p).sum() + 0.3 * p.abs().sum() for p in model.parameters())
    return penalty + mean_square(model, batch, index)


def penalties_around(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    before = sum(0.1 * p.square().sum() for p in model.parameters())
    return before + penalty_after(model, batch, index)


def penalty_alone(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    return sum((p * p).sum() for p in model.parameters())


def functional_after(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    return nn.functional.linear(model(batch).expand(-1, WIDTH), model.blocks[0].up.weight).square().mean()


def functional_before(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    return model(nn.functional.linear(batch, model.blocks[0].up.weight)[:, :WIDTH]).square().mean()


def penalty_of_a_reused_block(model: nn.Module, batch: Tensor, index: int) -> Tensor:
    hidden = model.blocks[0](model.blocks[0](model.inp(batch)))
    return model.head(hidden).square().mean() + 0.1 * model.blocks[0].up.weight.square().sum()


DIRECT = [
    penalty_after,
    penalty_before,
    two_penalties_after,
    two_penalties_before,
    penalties_around,
    penalty_alone,
    functional_after,
    functional_before,
    penalty_of_a_reused_block,
]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("plan", ["kept", "checkpointed", "small chunks"])
@pytest.mark.parametrize("step", DIRECT, ids=lambda step: step.__name__)
def test_a_weight_used_outside_its_block_is_exact_or_refused(
    step: Callable[..., Tensor], plan: str, accumulate: int
) -> None:
    if step in (penalty_after, two_penalties_after, penalty_alone, functional_after):
        assert_parity(Net, PLANS[plan], step, accumulate=accumulate)
    else:
        with pytest.raises(RuntimeError, match="used outside its own block"):
            assert_parity(Net, PLANS[plan], step, accumulate=accumulate)


def test_the_refusal_names_the_weight_and_the_remedy() -> None:
    with applied(Net()) as state:
        with pytest.raises(RuntimeError, match=r"'head\.\w+' is used outside its own block .*num_persistent_chunks"):
            state.step(penalty_before, state.model, batches()[0], 0).backward()
        state.runtime.reset()


def test_a_resident_weight_may_be_used_anywhere() -> None:
    make = lambda model: place(model, resident=lambda index: True)  # noqa: E731
    for step in DIRECT:
        torch.manual_seed(0)
        expected = train(Net(), step, accumulate=2)
        torch.manual_seed(0)
        with applied(Net(), make) as state:
            assert differences(expected, train(state.model, step, state, accumulate=2)) == [], step.__name__


def test_a_weight_frozen_after_its_forward_takes_no_gradient() -> None:
    with applied(Words(sparse=False)) as state:
        loss = state.step(mean_square, state.model, batches()[0], 0)
        frozen = (state.model.blocks[1].requires_grad_(False), state.model.table.requires_grad_(False))
        loss.backward()
        assert all(parameter.grad is None for each in frozen for parameter in each.parameters())
        assert all(parameter.grad is not None for parameter in state.model.blocks[0].parameters())


class Late(CPUDevice):
    """A device that downloads in order, and only when a download is waited for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.ended = 0

    def download(self, source: Tensor, target: Tensor) -> Any:
        self.copies.append((target, source.clone()))
        target.fill_(float("nan"))
        return len(self.copies)

    def wait_host(self, fence: Any) -> None:
        for target, late in self.copies[self.ended : fence]:
            target.copy_(late)
        self.ended = max(self.ended, fence)


@pytest.mark.parametrize("limit", [0, 1, 100, 1 << 30])
def test_sums_wait_for_no_more_than_their_bound(limit: int) -> None:
    """If downloads end late, gradients are summed in the order of arrival, and a bound holds for pending ones."""
    parameters = [nn.Parameter(torch.randn(5)) for _ in range(4)]
    chunk, device = chunk_of(*parameters)[0], Late()
    offload = offload_of(chunk, device, limit)
    params = live(chunk).params
    for factor in (1.0, 2.0, 3.0):
        sum((factor * param.device_param).sum() for param in params).backward()
        assert sum(item.part.nbytes for item in offload._sums) <= limit
        offload.finish()
        assert not offload._sums
    assert all(torch.equal(parameter.grad, torch.full((5,), 6.0)) for parameter in parameters)
    device.close()


@pytest.mark.parametrize("before", [1, 2])
def test_a_sparse_gradient_is_added_once_others_of_its_weight_have_arrived(before: int) -> None:
    """A backward that has failed leaves dense gradients on their way, and nobody need have reset the runtime."""
    parameter = nn.Parameter(torch.zeros(3, 2))
    chunk, device = chunk_of(parameter)[0], Late()
    offload = offload_of(chunk, device)
    (param,) = live(chunk).params
    gradients = [torch.full((3, 2), 1e8), torch.full((3, 2), 0.1), torch.full((3, 2), -1e8).to_sparse()]
    for gradient in gradients[2 - before :]:
        param.device_param.grad = gradient.clone()
        offload.take(param)
    offload.finish()
    assert torch.equal(parameter.grad, sum(gradients[3 - before : -1], gradients[2 - before]) + gradients[-1])
    device.close()


# --- on the worker, and in flight -------------------------------------------------------------------------------------
@pytest.mark.parametrize("plan", ["kept", "small chunks", "checkpointed"])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_the_worker_adds_what_is_complete(plan: str, accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One job for each chunk and each micro-batch but the first; the main thread adds nothing and waits for no link."""
    torch.manual_seed(0)
    expected = train(Net(), mean_square, accumulate=accumulate, num_steps=2 * accumulate)
    torch.manual_seed(0)
    device, model = SimulatedDevice(), Net()
    adding: list[str] = []
    add = GradOffload._add_up
    monkeypatch.setattr(
        GradOffload, "_add_up", lambda self, item: (adding.append(device.host_stream.name), add(self, item))[1]
    )
    with applied(model, PLANS[plan], device) as state, device:
        found = train(model, mean_square, state, accumulate=accumulate, num_steps=2 * accumulate)
    assert differences(expected, found) == []
    assert adding == ["worker"] * (2 * (accumulate - 1) * len(list(model.parameters())))


def test_jobs_end_before_their_memory_is_used_again_after_an_exception() -> None:
    def step(model: nn.Module, batch: Tensor, index: int) -> Tensor:
        hidden = model.inp(batch)
        if index == 1:
            hidden.register_hook(lambda gradient: 1 // 0)
        for block in model.blocks:
            hidden = block(hidden)
        return model.head(hidden).square().mean()

    device, model = SimulatedDevice(), Net()
    with applied(model, PLANS["kept"], device) as state, device:
        state.step(step, model, batches()[0], 0).backward()
        loss = state.step(step, model, batches()[1], 1)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        offload = state.runtime._executor.grads
        assert offload._jobs
        state.runtime.reset()
        assert not offload._jobs
        assert offload._sum_bytes == 0


def test_gradients_are_computed_while_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than the two largest are there, and less is waited for than if the largest were always to come."""
    elapsed = {}
    rates = Rates(upload=1e15, download=1e6, flops=2e6, memory=1e15, host_memory=1e15)
    for known in (True, False):
        device, model = SimulatedDevice(rates), Net([Block() for _ in range(6)])
        with applied(model, PLANS["kept"], device) as state, device, pytest.MonkeyPatch.context() as patch:
            if not known:
                patch.setattr(DownloadBudget, "end", lambda self: self.forget())
            most = sum(sorted(parameter.nbytes for parameter in model.parameters())[-2:])
            for _ in range(3):
                begun = device.elapsed
                state.step(mean_square, model, batches()[0], 0).backward()
                assert sum(source.nbytes for _, source in device._held) <= most
            elapsed[known] = device.elapsed - begun
    assert elapsed[True] <= 0.97 * elapsed[False]


@pytest.mark.parametrize(
    ("order", "allowed"),
    [
        ("abcd", [30, 30, 35, 40]),  # As expected: the two largest, less what comes next.
        ("abdc", [30, 30, 10, 10]),  # Another order: the largest may come.
        ("b", [10]),
        ("abcda", [30, 30, 35, 40, 10]),
    ],
)
def test_room_is_left_for_what_is_computed_next(order: str, allowed: list[int]) -> None:
    sizes = {"a": 30, "b": 10, "c": 10, "d": 5}
    params: dict[str, Any] = {name: object() for name in sizes}
    flight = DownloadBudget(list(sizes.values()))
    assert flight.hold_bytes == 10
    assert [flight.arrive(params[name], sizes[name]) for name in "abcd"] == [10] * 4
    flight.end()
    assert [flight.arrive(params[name], sizes[name]) for name in order] == allowed
    flight.forget()
    assert [flight.arrive(params[name], sizes[name]) for name in "ab"] == [30, 30]


GRADIENTS = {
    "matrix": torch.randn(3, 5),
    "vector": torch.randn(7),
    "no dimension": torch.randn(()),
    "no elements": torch.randn(0, 3),
    "transposed": torch.randn(5, 3).t(),
    "channels last": torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "bfloat16": torch.randn(3, 5).bfloat16(),
    "bfloat16, transposed": torch.randn(5, 3).bfloat16().t(),
    "float16": torch.randn(9).half(),
    "float64": torch.randn(3, 2).double(),
    "complex": torch.randn(3, 2, dtype=torch.complex64),
}


def num_free(memory: HostMemory) -> int:
    return sum(len(blocks) for blocks in memory._free.values())


@pytest.mark.parametrize("kind", GRADIENTS)
def test_every_kind_has_a_place(kind: str) -> None:
    gradient, memory = GRADIENTS[kind], HostMemory()
    places = GradientMemory(memory, [4, gradient.nbytes, 4])
    before, made, after = (places.empty_like(g, at) for at, g in enumerate((torch.ones(1), gradient, torch.ones(1))))
    before.fill_(1)
    after.fill_(2)
    made.copy_(gradient)
    assert (made.dtype, made.shape, made.stride()) == (gradient.dtype, gradient.shape, gradient.stride())
    assert torch.equal(made, gradient)
    assert (before.item(), after.item()) == (1, 2)
    assert made.untyped_storage().nbytes() == gradient.nbytes
    assert made.is_leaf
    assert not made._is_view()
    assert memory.allocated_bytes == PAGE


def test_the_block_lives_as_long_as_any_view_of_a_gradient() -> None:
    memory = HostMemory()
    places = GradientMemory(memory, [16, 16])
    for gradient in (torch.ones(4), torch.ones(2, 2), torch.ones(8).bfloat16()):
        first, second = (places.empty_like(gradient, at) for at in (0, 1))
        view = second.detach().view(-1)
        del first, second
        assert num_free(memory) == 0
        assert memory.allocated_bytes == PAGE
        del view
        assert num_free(memory) == 1


def test_a_place_that_was_given_out_is_not_given_again_while_its_block_lives() -> None:
    memory = HostMemory()
    places = GradientMemory(memory, [16, 16])
    held = places.empty_like(torch.ones(4), 0).fill_(1)
    other = places.empty_like(torch.ones(4), 0).fill_(2)
    assert memory.allocated_bytes == 2 * PAGE
    assert held.tolist() == [1.0] * 4
    # The block that was taken last has a free place; the one before is left to who holds it.
    assert places.empty_like(torch.ones(4), 1).data_ptr() == other.data_ptr() + chunk_offsets([16, 16])[0][1]


def test_gradients_have_versions_of_their_own() -> None:
    places = GradientMemory(HostMemory(), [16, 16])
    first, second = (places.empty_like(torch.ones(4), at) for at in (0, 1))
    before = second._version
    first.add_(1)
    assert second._version == before


@given(moves=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
@settings(deadline=None)
def test_whatever_is_held_keeps_its_values(moves: list[tuple[int, bool]]) -> None:
    memory = HostMemory()
    places = GradientMemory(memory, [16] * 4)
    held: list[tuple[Tensor, int]] = []
    for number, (at, drop) in enumerate(moves):
        made = places.empty_like(torch.ones(4), at)
        made.fill_(number)
        held.append((made, number))
        if drop:
            held.pop(len(held) // 2)
        del made
        assert all(tensor.tolist() == [value] * 4 for tensor, value in held)
    held.clear()
    assert num_free(memory) * PAGE == memory.allocated_bytes


def test_memory_that_is_page_locked_is_made_before_training() -> None:
    """Positive control: without page-locking the first backward makes it."""
    made = []
    for lock in (None, lambda address, size: True):
        device = CPUDevice(torch.device("cpu"))
        device.host = HostMemory(lock, lambda address: None)
        with applied(Net(), plans.place, device) as state:
            before = device.host.allocated_bytes
            overlapped.train(state.model, state, num_steps=2)
            made.append(device.host.allocated_bytes - before)
    assert made[0] > 0
    assert made[1] == 0
